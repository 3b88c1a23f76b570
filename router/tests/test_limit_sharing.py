"""Limits over several routers, with the engines' real relay between them, on a clock in hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from data_plane_harness import Harness
from fake_engine import make_plan

from sluice.v1 import engine_pb2, plan_pb2
from sluice_core.records import OwnerLimits
from sluice_engine.server.usage_relay import UsageRelay
from sluice_router.errors import OwnerLimitError
from sluice_router.owner_limits.limiter import OwnerLimiter
from sluice_router.owner_limits.sharing import UsageSharing

LIMIT = 300
TICK_S = 0.05


@dataclass(eq=False)
class RouterStub:
    """A router as far as limits go; its clock began at another time than the others'."""

    name: str
    limiter: OwnerLimiter
    sharing: UsageSharing
    clock_s: float
    running: list[tuple[float, object, int]] = field(default_factory=list)


class Routers:
    """Routers and engines; messages are under way for up to 60 ms."""

    def __init__(self, *, limits: OwnerLimits, num_routers: int, num_engines: int = 3, seed: int = 0) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.limits = {"alice": limits}
        self.num_routers = num_routers
        self.engines = [UsageRelay() for _ in range(num_engines)]
        self.routers: dict[str, RouterStub] = {}
        self.wire: list[tuple[float, int, RouterStub | None, UsageRelay, str, engine_pb2.RouterUsage]] = []
        self.admitted: list[tuple[float, int]] = []
        self.num_sent = 0

    def join(self, name: str) -> RouterStub:
        limiter = OwnerLimiter()
        limiter.set_limits(self.limits, self.num_routers)
        router = RouterStub(name, limiter, UsageSharing(limiter), self.rng.uniform(0, 1000))
        self.routers[name] = router
        for engine in self.engines:
            for usage in engine.list_others(name, self.now):
                router.sharing.take(usage, self.now + router.clock_s, is_history=True)
        return router

    def ask(self, name: str, number: int, tokens: int = 1, runs_s: float = 0.2) -> int:
        """Asks so many times; returns how often it was admitted."""
        router, admitted = self.routers[name], 0
        for _ in range(number):
            try:
                reservation = router.limiter.admit("alice", 2 * tokens, self.now + router.clock_s)
            except OwnerLimitError:
                break
            admitted += 1
            self.admitted.append((self.now, tokens))
            router.running.append((self.now + runs_s, reservation, tokens))
        return admitted

    def tick(self) -> None:
        self.now += TICK_S
        for item in [item for item in self.wire if item[0] <= self.now]:
            self.wire.remove(item)
            _, _, receiver, engine, sender, usage = item
            if receiver is None:
                news = engine.take(sender, usage, self.now)
                for other in self.routers.values():
                    if other.name != sender:
                        self._send(other, engine, sender, news)
            elif receiver.name in self.routers and engine in self.engines:
                receiver.sharing.take(news_of(usage), self.now + receiver.clock_s)
        for router in self.routers.values():
            now = router.clock_s + self.now
            for item in [item for item in router.running if item[0] <= self.now]:
                router.running.remove(item)
                router.limiter.end(item[1], item[2], now)
            router.limiter.sweep(now)
            for engine, usage in router.sharing.report(self.engines, now):
                self._send(None, engine, router.name, news_of(usage))

    def _send(self, receiver, engine, sender, usage) -> None:
        # Streams keep the order of their messages.
        behind = [item[0] for item in self.wire if (item[2], item[3], item[4]) == (receiver, engine, sender)]
        due_s = max([self.now + self.rng.uniform(0, 0.06), *behind])
        self.num_sent += 1
        self.wire.append((due_s, self.num_sent, receiver, engine, sender, usage))

    def most_of_a_minute(self) -> int:
        """Most requests of any 60 s."""
        times = [time for time, _ in self.admitted]
        return max(sum(start <= time < start + 60 for time in times) for start in times)


def news_of(usage: engine_pb2.RouterUsage) -> engine_pb2.RouterUsage:
    """A copy, as the wire makes one."""
    return engine_pb2.RouterUsage.FromString(usage.SerializeToString())


def run(routers: Routers, seconds: float, *, ask) -> None:
    for _ in range(round(seconds / TICK_S)):
        routers.tick()
        ask()


@pytest.mark.parametrize("num_routers", [1, 2, 4])
def test_a_minute_has_the_limit_within_a_tenth_however_clients_are_spread(num_routers: int) -> None:
    routers = Routers(limits=OwnerLimits(requests_per_minute=LIMIT), num_routers=num_routers)
    names = [f"r{number}" for number in range(num_routers)]
    for name in names:
        routers.join(name)
    run(routers, 2, ask=lambda: None)
    # Clients turn to all routers at once, then to one for a while, then to another.
    for phase in range(6):
        busy = names if phase % 3 == 0 else [names[phase % num_routers]]
        run(routers, 25, ask=lambda busy=busy: [routers.ask(name, 20) for name in busy])
    assert routers.most_of_a_minute() <= LIMIT * 1.1
    late = sum(time >= 90 for time, _ in routers.admitted)
    assert late >= LIMIT * 0.9


def test_running_requests_count_on_all_routers() -> None:
    routers = Routers(limits=OwnerLimits(concurrent_requests=20), num_routers=2)
    for name in ("a", "b"):
        routers.join(name)
    run(routers, 1, ask=lambda: None)
    assert routers.ask("a", 100, runs_s=5) == 10
    run(routers, 1, ask=lambda: None)
    run(routers, 3, ask=lambda: routers.ask("a", 100, runs_s=5))
    assert 19 <= len(routers.admitted) <= 20
    assert routers.ask("b", 100) <= 1
    run(routers, 10, ask=lambda: None)
    assert routers.ask("b", 100) == 10


def test_tokens_that_are_given_back_are_so_on_all_routers() -> None:
    routers = Routers(limits=OwnerLimits(tokens_per_minute=1000), num_routers=2)
    for name in ("a", "b"):
        routers.join(name)
    run(routers, 1, ask=lambda: None)
    routers.ask("a", 2, tokens=200, runs_s=1)
    run(routers, 2, ask=lambda: None)
    peer = routers.routers["b"].limiter.peers["a"]
    assert (peer.owners["alice"].tokens, peer.owners["alice"].running) == (200, 0)


def test_a_router_that_takes_anothers_place_does_not_begin_with_an_empty_minute() -> None:
    routers = Routers(limits=OwnerLimits(requests_per_minute=LIMIT), num_routers=1)
    routers.join("a")
    run(routers, 5, ask=lambda: routers.ask("a", 100))
    assert len(routers.admitted) == LIMIT
    del routers.routers["a"]
    routers.join("b")
    run(routers, 50, ask=lambda: routers.ask("b", 100))
    assert len(routers.admitted) == LIMIT
    run(routers, 15, ask=lambda: routers.ask("b", 100))
    assert len(routers.admitted) >= LIMIT * 1.9
    assert routers.most_of_a_minute() <= LIMIT * 1.1


def test_routers_come_and_go_and_engines_die_and_the_limit_holds() -> None:
    routers = Routers(limits=OwnerLimits(requests_per_minute=LIMIT), num_routers=3, num_engines=4, seed=7)
    for name in ("a", "b", "c"):
        routers.join(name)

    def ask() -> None:
        for name in list(routers.routers):
            routers.ask(name, routers.rng.choice((0, 0, 0, 5)))

    for step in range(8):
        run(routers, 15, ask=ask)
        if step % 2:
            del routers.routers[next(iter(routers.routers))]
            routers.join(f"next-{step}")
        else:
            routers.engines.pop(0)
            routers.engines.append(UsageRelay())
    assert routers.most_of_a_minute() <= LIMIT * 1.1
    assert sum(time >= 60 for time, _ in routers.admitted) >= LIMIT * 0.9


def test_without_engines_each_router_keeps_to_its_share() -> None:
    routers = Routers(limits=OwnerLimits(requests_per_minute=LIMIT), num_routers=3, num_engines=0)
    for name in ("a", "b", "c"):
        routers.join(name)
    run(routers, 70, ask=lambda: [routers.ask(name, 5) for name in "abc"])
    assert LIMIT * 0.9 <= routers.most_of_a_minute() <= LIMIT + 2


def test_an_owner_without_a_key_is_forgotten_on_every_router_and_engine() -> None:
    routers = Routers(limits=OwnerLimits(concurrent_requests=9), num_routers=2)
    for name in ("a", "b"):
        routers.join(name)
    routers.ask("a", 3, runs_s=500)
    run(routers, 1, ask=lambda: None)
    assert routers.routers["b"].limiter.peers["a"].owners["alice"].running == 3
    for router in routers.routers.values():
        router.limiter.keep_owners(frozenset())
    run(routers, 70, ask=lambda: None)
    newcomer = routers.join("c")
    for router in (*routers.routers.values(), newcomer):
        assert "alice" not in router.limiter.local
        assert not any(peer.owners for peer in router.limiter.peers.values())


def test_a_removed_limit_is_forgotten_by_peers_whose_plan_still_has_it() -> None:
    routers = Routers(limits=OwnerLimits(concurrent_requests=9), num_routers=2)
    for name in ("a", "b"):
        routers.join(name)
    routers.ask("a", 3, runs_s=500)
    run(routers, 1, ask=lambda: None)
    routers.routers["a"].limiter.set_limits({"bob": OwnerLimits(weight=2)}, 2)
    run(routers, 1, ask=lambda: None)
    assert routers.routers["b"].limiter.peers["a"].owners["alice"].running == 0


def test_a_report_that_was_overtaken_changes_nothing() -> None:
    limiter = OwnerLimiter()
    limiter.set_limits({"alice": OwnerLimits(requests_per_minute=9)}, 2)
    sharing = UsageSharing(limiter)

    def make(number: int, requests: int) -> engine_pb2.RouterUsage:
        seconds = [engine_pb2.SecondUsage(second=50, requests=requests)]
        owners = [engine_pb2.OwnerUsage(owner="alice", running=requests, seconds=seconds)]
        return engine_pb2.RouterUsage(router_id="a", second=50, number=number, owners=owners)

    sharing.take(make(2, 5), 1000.0)
    sharing.take(make(1, 3), 1000.1)
    sharing.take(make(9, 4), 1000.2, is_history=True)
    assert limiter.peers["a"].owners["alice"].requests == 5
    sharing.take(make(3, 6), 1000.2)
    assert limiter.peers["a"].owners["alice"].requests == 6
    assert limiter.peers["a"].owners["alice"].running == 6


def test_a_router_reports_ten_times_a_second_what_is_new_and_once_that_it_is_there() -> None:
    limiter = OwnerLimiter()
    limiter.set_limits({"alice": OwnerLimits(requests_per_minute=9)}, 2)
    sharing, engines = UsageSharing(limiter), ["d0", "d1", "d2"]

    def report(now: float) -> list[str]:
        return [engine for engine, _ in sharing.report(engines, now)]

    assert report(100.0) == ["d0", "d1"]
    assert report(100.96875) == []
    assert report(101.0) == ["d0", "d1"]
    limiter.admit("alice", 1, 101.0)
    assert report(101.0625) == []
    assert report(101.125) == ["d0", "d1"]
    assert report(102.0) == []
    # One that is new hears at once.
    engines.pop(0)
    assert report(102.0) == ["d1", "d2"]


# --- through the data plane


def make_limited(num_routers: int = 2) -> Harness:
    harness = Harness({"d0": "D", "d1": "D", "d2": "D"})
    limits = [plan_pb2.OwnerLimits(owner="*", requests_per_minute=10, weight=1)]
    harness.router.apply_plan(
        make_plan({"d0": "D", "d1": "D", "d2": "D"}, generation=2, owner_limits=limits, num_routers=num_routers)
    )
    harness.deliver()
    return harness


def list_usage(harness: Harness, name: str) -> list[engine_pb2.RouterUsage]:
    return [command.usage for command in harness.cores[name].commands if command.HasField("usage")]


def test_two_engines_hear_what_is_used_and_a_third_when_one_of_them_dies() -> None:
    harness = make_limited()
    harness.admit(owner="alice")
    harness.run()
    for _ in range(20):
        harness.step_all()
    assert list_usage(harness, "d0")[-1].owners[0].running == 0
    assert list_usage(harness, "d0") == list_usage(harness, "d1")
    assert not list_usage(harness, "d2")
    harness.kill("d0")
    harness.step_all()
    [whole] = list_usage(harness, "d2")
    assert sum(entry.requests for entry in whole.owners[0].seconds) == 1
    harness.assert_idle()


def test_what_engines_pass_on_counts() -> None:
    harness = make_limited()
    seconds = [engine_pb2.SecondUsage(second=7, requests=9, tokens=90)]
    owners = [engine_pb2.OwnerUsage(owner="alice", seconds=seconds)]
    usage = engine_pb2.RouterUsage(router_id="other", second=8, number=1, owners=owners)
    harness.router.handle_message(harness.engines["d2"], engine_pb2.AttachResponse(usage=[usage]))
    harness.admit(owner="alice")
    with pytest.raises(OwnerLimitError, match="requests_per_minute of alice is 10"):
        harness.admit(owner="alice")
    harness.run()
    harness.assert_idle()


def test_what_an_engine_kept_adds_to_what_is_known_already() -> None:
    harness = make_limited()

    def tell(name: str, *, running: int, requests: dict[int, int], **fields: object) -> None:
        seconds = [engine_pb2.SecondUsage(second=second, requests=number) for second, number in requests.items()]
        owners = [engine_pb2.OwnerUsage(owner="alice", running=running, seconds=seconds)]
        usage = engine_pb2.RouterUsage(router_id="other", second=8, number=3, owners=owners)
        harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(usage=[usage], **fields))

    tell("d0", running=2, requests={8: 4})
    tell("d1", running=1, requests={7: 5, 8: 1}, hello=engine_pb2.EngineHello(engine_id="d1"))
    known = harness.state.limiter.peers["other"].owners["alice"]
    assert (known.running, known.requests) == (2, 9)


def test_what_was_used_more_than_a_minute_ago_is_forgotten_here_and_of_routers_that_are_gone() -> None:
    harness = make_limited()
    owners = [engine_pb2.OwnerUsage(owner="bob", running=1, seconds=[engine_pb2.SecondUsage(second=7, requests=9)])]
    usage = engine_pb2.RouterUsage(router_id="other", second=8, number=1, owners=owners)
    harness.router.handle_message(harness.engines["d2"], engine_pb2.AttachResponse(usage=[usage]))
    harness.admit(owner="alice")
    harness.run()
    limiter = harness.state.limiter
    assert (list(limiter.local), list(limiter.peers)) == (["alice"], ["other"])
    for _ in range(2):
        harness.clock.advance(100.0)
        harness.router.tick()
    assert (limiter.local, limiter.peers) == ({}, {})
    harness.assert_idle()


def test_without_limits_no_engine_hears_of_owners() -> None:
    harness = Harness({"d0": "D"})
    harness.admit(owner="alice")
    harness.run()
    for _ in range(200):
        harness.step_all()
    assert not list_usage(harness, "d0")
