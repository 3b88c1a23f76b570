"""Limits of owners of API keys: what is admitted, what is given back, and what is refused with which words."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from fake_engine import make_plan

from sluice.v1 import plan_pb2
from sluice_core.records import OwnerLimits
from sluice_router.errors import NotAllowedError, OwnerLimitError, PlanRefusedError
from sluice_router.observability.metrics import MAX_OWNERS, OTHER_OWNERS
from sluice_router.owner_limits.limiter import OwnerLimiter
from sluice_router.owner_limits.peers import SILENCE_S, Peer
from sluice_router.owner_limits.usage_window import OwnerUsage

ONE = {"d0": "D"}
NOW = 1000.0


def make_limiter(*, num_routers: int = 1, **limits: int) -> OwnerLimiter:
    limiter = OwnerLimiter()
    limiter.set_limits({"alice": OwnerLimits(**limits)}, num_routers)
    return limiter


def count_admitted(limiter: OwnerLimiter, now: float, *, tokens: int = 1, owner: str = "alice") -> int:
    """Asks until it is refused."""
    for number in range(10_000):
        try:
            assert limiter.admit(owner, tokens, now) is not None
        except OwnerLimitError:
            return number
    raise AssertionError("never refused")


@pytest.mark.parametrize("limit", ["requests_per_minute", "concurrent_requests"])
def test_so_many_requests_are_admitted_and_the_next_is_refused_by_name(limit: str) -> None:
    limiter = make_limiter(**{limit: 5})
    assert count_admitted(limiter, NOW) == 5
    with pytest.raises(OwnerLimitError, match=f"{limit} of alice is 5: 5 are in use, 1 more are asked for") as caught:
        limiter.admit("alice", 1, NOW)
    assert caught.value.code == limit
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1


def test_a_minute_has_no_more_requests_than_the_limit_wherever_it_begins() -> None:
    limiter = make_limiter(requests_per_minute=6)
    admitted = []
    for step in range(2000):
        now = NOW + step * 0.1
        try:
            limiter.admit("alice", 1, now)
        except OwnerLimitError:
            continue
        admitted.append(now)
    assert len(admitted) > 12
    assert max(sum(start <= time < start + 60 for time in admitted) for start in admitted) == 6


def test_retry_after_is_when_the_request_is_admitted() -> None:
    limiter = make_limiter(requests_per_minute=2, tokens_per_minute=100)
    limiter.admit("alice", 40, NOW)
    limiter.admit("alice", 40, NOW + 20)
    with pytest.raises(OwnerLimitError) as caught:
        limiter.admit("alice", 40, NOW + 30)
    retry_at_s = NOW + 30 + caught.value.retry_after_s
    with pytest.raises(OwnerLimitError):
        limiter.admit("alice", 40, retry_at_s - 0.5)
    assert limiter.admit("alice", 40, retry_at_s) is not None
    with pytest.raises(OwnerLimitError) as caught:
        limiter.admit("alice", 40, retry_at_s)
    assert retry_at_s + caught.value.retry_after_s == NOW + 81


def test_a_refusal_says_in_whole_seconds_when_to_try_again() -> None:
    limiter = make_limiter(requests_per_minute=1)
    limiter.admit("alice", 1, NOW)
    with pytest.raises(OwnerLimitError, match="try again in 31 s") as caught:
        limiter.admit("alice", 1, NOW + 30.5)
    assert caught.value.retry_after_s == 30.5


def test_what_a_peer_tells_late_of_an_earlier_second_is_forgotten_before_the_later_one() -> None:
    usage = OwnerUsage()
    usage.replace(50, 1, 5)
    usage.replace(10, 2, 7)
    usage.advance(70)
    assert (usage.requests, usage.tokens) == (3, 12)
    usage.advance(71)
    assert (usage.requests, usage.tokens) == (1, 5)


def test_tokens_are_reserved_and_what_is_not_used_is_given_back() -> None:
    limiter = make_limiter(tokens_per_minute=100)
    first = limiter.admit("alice", 80, NOW)
    with pytest.raises(OwnerLimitError, match="tokens_per_minute of alice is 100: 80 are in use, 30 more") as caught:
        limiter.admit("alice", 30, NOW)
    assert caught.value.code == "tokens_per_minute"
    limiter.end(first, 50, NOW + 2)
    assert limiter.admit("alice", 50, NOW + 2) is not None
    assert count_admitted(limiter, NOW + 2) == 0


def test_a_request_that_another_router_admitted_counts_and_is_never_refused() -> None:
    limiter = make_limiter(concurrent_requests=2, tokens_per_minute=1000)
    taken = [limiter.take_over("alice", 10, NOW) for _ in range(3)]
    with pytest.raises(OwnerLimitError, match="concurrent_requests of alice is 2: 3 are in use"):
        limiter.admit("alice", 1, NOW)
    for reservation in taken:
        assert reservation is not None
        limiter.end(reservation, 5, NOW)
    assert limiter.local["alice"].running == 0
    assert limiter.take_over("bob", 10, NOW) is None


def test_an_end_after_the_minute_gives_nothing_back_twice() -> None:
    limiter = make_limiter(tokens_per_minute=100, concurrent_requests=2)
    first = limiter.admit("alice", 100, NOW)
    assert limiter.admit("alice", 100, NOW + 61) is not None
    limiter.end(first, 10, NOW + 62)
    assert limiter.local["alice"].tokens == 100
    assert limiter.local["alice"].running == 1


def test_a_request_beyond_the_limit_of_tokens_waits_for_an_empty_minute() -> None:
    limiter = make_limiter(tokens_per_minute=100)
    limiter.admit("alice", 1, NOW)
    with pytest.raises(OwnerLimitError):
        limiter.admit("alice", 1000, NOW)
    assert limiter.admit("alice", 1000, NOW + 61) is not None


def test_owners_do_not_share_and_the_star_is_for_those_without_limits_of_their_own() -> None:
    limiter = OwnerLimiter()
    limits = {"*": OwnerLimits(requests_per_minute=2), "alice": OwnerLimits(requests_per_minute=1)}
    limiter.set_limits(limits, 1)
    assert [count_admitted(limiter, NOW, owner=owner) for owner in ("alice", "bob", "carol")] == [1, 2, 2]
    assert limiter.admit("", 1, NOW) is None


def test_limits_that_are_lifted_are_forgotten_and_new_ones_hold_at_once() -> None:
    limiter = make_limiter(requests_per_minute=2)
    assert count_admitted(limiter, NOW) == 2
    limiter.set_limits({"alice": OwnerLimits(requests_per_minute=3)}, 1)
    assert count_admitted(limiter, NOW) == 1
    limiter.set_limits({}, 1)
    assert limiter.admit("alice", 1, NOW) is None
    assert not limiter.local


def test_owners_without_a_key_are_forgotten_here_and_of_peers() -> None:
    limiter = make_limiter(requests_per_minute=2)
    reservation = limiter.admit("alice", 1, NOW)
    limiter.peers["other"] = Peer(heard_s=NOW, owners=dict(limiter.local))
    limiter.keep_owners({"bob"})
    assert not limiter.local
    assert not limiter.peers["other"].owners
    limiter.end(reservation, 1, NOW)
    assert limiter.changed == {"alice"}


def test_idle_owners_leave_nothing_behind() -> None:
    limiter = make_limiter(requests_per_minute=2)
    limiter.end(limiter.admit("alice", 1, NOW), 1, NOW + 1)
    limiter.changed.clear()
    limiter.sweep(NOW + 60)
    assert limiter.local
    limiter.sweep(NOW + 61)
    assert not limiter.local


@pytest.mark.parametrize("num_routers", [2, 3, 10])
def test_routers_that_hear_of_nobody_keep_to_their_share(num_routers: int) -> None:
    limiters = [make_limiter(num_routers=num_routers, requests_per_minute=100) for _ in range(num_routers)]
    assert 100 <= sum(count_admitted(limiter, NOW) for limiter in limiters) <= 100 + num_routers - 1


def test_a_peer_that_falls_silent_is_assumed_to_go_on() -> None:
    limiter = make_limiter(num_routers=2, requests_per_minute=100)
    limiter.peers["other"] = Peer(heard_s=NOW)
    assert count_admitted(limiter, NOW) == 50
    assert count_admitted(limiter, NOW + 1) == 25
    assert count_admitted(limiter, NOW + 1 + SILENCE_S) == 0


def test_what_ran_on_a_router_that_is_silent_is_not_remembered() -> None:
    limiter = make_limiter(num_routers=2, concurrent_requests=4)
    limiter.peers["other"] = Peer(heard_s=NOW, owners={"alice": OwnerUsage(running=4)})
    assert count_admitted(limiter, NOW + SILENCE_S) == 0
    # It is assumed to run as many as this one.
    assert count_admitted(limiter, NOW + SILENCE_S + 0.1) == 2


# --- through the data plane


def limited(**limits: object) -> plan_pb2.Plan:
    classes = [
        plan_pb2.SloClass(name="", ttft_milliseconds=5000, tpot_milliseconds=500),
        plan_pb2.SloClass(name="batch", ttft_milliseconds=5000, tpot_milliseconds=500, priority=-5),
        plan_pb2.SloClass(name="gold", ttft_milliseconds=5000, tpot_milliseconds=500, priority=5),
    ]
    owner_limits = [plan_pb2.OwnerLimits(**{"owner": "alice", "weight": 1, **limits})]
    return make_plan(ONE, generation=2, slo_classes=classes, owner_limits=owner_limits)


def make_limited(**limits: object) -> Harness:
    harness = Harness(ONE)
    harness.router.apply_plan(limited(**limits))
    harness.deliver()
    return harness


def test_real_usage_counts_once_a_request_has_ended() -> None:
    harness = make_limited(tokens_per_minute=60)
    harness.admit(20, 40, owner="alice")[1].stop_at = 4
    with pytest.raises(OwnerLimitError):
        harness.admit(20, 16, owner="alice")
    harness.run()
    assert harness.state.limiter.local["alice"].tokens == 24
    harness.admit(20, 16, owner="alice")
    harness.run()
    assert harness.count("key_tokens", "alice", "prompt") == 40
    assert harness.count("key_tokens", "alice", "output") == 20
    harness.assert_idle()


def test_a_cancelled_request_has_used_what_was_computed() -> None:
    harness = make_limited(tokens_per_minute=1000, concurrent_requests=2)
    begun, _ = harness.admit(20, 40, owner="alice")
    for _ in range(4):
        harness.step_all()
    waiting, _ = harness.admit(20, 40, owner="alice")
    num_output = len(harness.state.requests.live[begun].output_token_ids)
    assert num_output
    harness.router.cancel(waiting)
    harness.router.cancel(begun)
    usage = harness.state.limiter.local["alice"]
    assert (usage.running, usage.requests, usage.tokens) == (0, 2, 20 + num_output)
    assert harness.count("key_tokens", "alice", "output") == num_output
    harness.run()
    harness.assert_idle()


def test_a_limit_is_no_lack_of_room_attainment_does_not_know_of_it() -> None:
    harness = make_limited(concurrent_requests=1)
    harness.admit(owner="alice")
    with pytest.raises(OwnerLimitError):
        harness.admit(owner="alice")
    harness.admit(owner="bob")
    harness.run()
    assert harness.count("key_requests", "alice", "limited") == 1
    assert harness.count("key_limited", "alice", "concurrent_requests") == 1
    assert harness.state.statistics.attainment.totals[""].num_finished == 2
    harness.assert_idle()


def test_owners_of_refused_requests_beyond_so_many_share_a_label() -> None:
    harness = make_limited(concurrent_requests=1)
    for number in range(MAX_OWNERS):
        harness.state.metrics.label_owner(f"owner-{number}")
    harness.admit(owner="alice")
    with pytest.raises(OwnerLimitError):
        harness.admit(owner="alice")
    for name, labels in (("key_requests", "limited"), ("key_limited", "concurrent_requests")):
        assert dict(harness.state.metrics.counters[name]) == {(OTHER_OWNERS, labels): 1}


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"slo_class": "gold"}, "class_not_allowed", "slo_class 'gold' is not open to alice; open are '', 'batch'"),
        ({"priority": 1}, "priority_not_allowed", "priority is 1, at most 0 is open to alice"),
        ({"priority": -5, "slo_class": "batch"}, "", ""),
        ({}, "", ""),
        ({"owner": "bob", "slo_class": "gold", "priority": 9}, "", ""),
    ],
)
def test_classes_and_priorities_beyond_an_owners_are_refused(fields, code, words) -> None:
    harness = make_limited(classes=["", "batch"])
    request = {"owner": "alice", **fields}
    if not code:
        harness.admit(**request)
        harness.run()
        return
    with pytest.raises(NotAllowedError, match=words) as caught:
        harness.admit(**request)
    assert (caught.value.code, caught.value.param) == (code, words.split()[0])
    harness.assert_idle()


def test_an_owner_who_floods_the_router_does_not_hold_up_another() -> None:
    harness = Harness(ONE)
    core = harness.cores["d0"]
    core.kv_blocks_total = 40
    harness.step_all()
    flood = [harness.admit(200, 2, owner="alice", priority=9)[0] for _ in range(20)]
    late = [harness.admit(200, 2, owner="bob")[0] for _ in range(4)]
    assert harness.state.requests.waiting.keys() >= set(late)
    harness.run(400)
    order = [submit.request_id for submit in core.submitted]
    turns = ["bob" if request_id in late else "alice" for request_id in order]
    assert len(order) == len(flood) + len(late)
    behind = len(turns) - turns[::-1].index("bob")
    assert turns[behind:].count("alice") >= len(flood) // 2
    harness.assert_idle()


@pytest.mark.parametrize("weight", [1, 4])
def test_an_owner_is_charged_its_prompts_when_they_are_placed_and_its_outputs_when_they_end(weight: int) -> None:
    harness = make_limited(weight=weight)
    share = harness.state.fair_share
    harness.admit(20, 40, owner="alice")[1].stop_at = 8
    # The start of the next one, in tokens over weight.
    assert share.start_of("alice") == 20 / weight
    harness.run()
    assert share.start_of("alice") == (20 + 8) / weight
    harness.admit(12, 4, owner="alice")
    assert share.start_of("alice") == (20 + 8 + 12) / weight
    harness.run()
    assert share.start_of("alice") == (20 + 8 + 12 + 4) / weight
    assert share.start_of("bob") == (20 + 8) / weight, "others begin where the last one began"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ([{"owner": ""}], "owner_limits[0].owner is ''"),
        ([{"owner": "a"}, {"owner": "a"}], "owner_limits[1].owner is 'a'"),
        ([{"owner": "a", "classes": ["x"]}], "owner_limits[0].classes are ['x'], known are ['']"),
        ([{"owner": "a", "weight": 1001}], "owner_limits[0].weight is 1001, allowed are 1 to 1000"),
    ],
)
def test_plans_with_wrong_limits_are_refused_by_name(limits, words) -> None:
    harness = Harness(ONE)
    messages = [plan_pb2.OwnerLimits(**{"weight": 1, **fields}) for fields in limits]
    with pytest.raises(PlanRefusedError) as caught:
        harness.router.apply_plan(make_plan(ONE, generation=2, owner_limits=messages))
    assert words in str(caught.value)
