"""The election: one leader at a time, by our own clock, whatever the clocks of others say."""

from __future__ import annotations

import random

import pytest
from fake_kubernetes import FakeKubernetes

from sluice_operator.controller.leader_election import LEASE_S, RENEW_DEADLINE_S, LeaderElector
from sluice_operator.kubernetes.errors import BusyError, LeaseLostError
from sluice_operator.kubernetes.kinds import LEASES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_elector(kubernetes: FakeKubernetes, identity: str, clock: Clock) -> LeaderElector:
    return LeaderElector(
        kubernetes, namespace="default", name="lease", identity=identity, now=clock, now_text=lambda: f"t{clock.now}"
    )


async def test_the_first_one_leads_and_the_second_waits() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b = (make_elector(kubernetes, name, clock) for name in "ab")
    assert await a.try_acquire_or_renew()
    assert not await b.try_acquire_or_renew()
    assert (a.is_leading, b.is_leading) == (True, False)


async def test_a_replica_is_connected_while_the_api_server_shows_the_lease() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b = (make_elector(kubernetes, name, clock) for name in "ab")
    await a.try_acquire_or_renew()
    assert not b.is_connected
    await b.try_acquire_or_renew()
    assert (b.is_connected, b.is_leading) == (True, False)
    clock.now += LEASE_S
    assert not b.is_connected


async def test_a_lease_runs_out_by_the_watchers_own_clock() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b = (make_elector(kubernetes, name, clock) for name in "ab")
    await a.try_acquire_or_renew()
    clock.now += 500.0
    # It may have been renewed a moment ago: nobody knows yet.
    assert not await b.try_acquire_or_renew()
    clock.now += LEASE_S - 0.1
    assert not await b.try_acquire_or_renew()
    clock.now += 0.1
    assert await b.try_acquire_or_renew()
    taken = kubernetes.find(LEASES, "lease")["spec"]
    assert (taken["leaseTransitions"], taken["acquireTime"], taken["renewTime"]) == (1, "t615.0", "t615.0")
    clock.now += 1.0
    assert await b.try_acquire_or_renew()
    renewed = kubernetes.find(LEASES, "lease")["spec"]
    assert (renewed["acquireTime"], renewed["renewTime"]) == ("t615.0", "t616.0")


async def test_the_record_says_who_leads_since_when_and_how_often_it_changed_hands() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b = (make_elector(kubernetes, name, clock) for name in "ab")

    def read() -> dict[str, object]:
        found: dict[str, object] = kubernetes.find(LEASES, "lease")["spec"]
        return found

    await a.try_acquire_or_renew()
    lease = kubernetes.find(LEASES, "lease")
    assert (lease["apiVersion"], lease["kind"], lease["metadata"]["namespace"]) == (
        "coordination.k8s.io/v1",
        "Lease",
        "default",
    )
    first = {"holderIdentity": "a", "leaseDurationSeconds": LEASE_S, "acquireTime": "t100.0", "renewTime": "t100.0"}
    assert read() == {**first, "leaseTransitions": 0}
    clock.now = 102.0
    await a.try_acquire_or_renew()
    assert read() == {**first, "leaseTransitions": 0, "renewTime": "t102.0"}
    await a.release()
    assert (read().get("holderIdentity"), read()["leaseDurationSeconds"]) == (None, 1)
    for number, (elector, name) in enumerate([(b, "b"), (a, "a")], 1):
        clock.now += 1.0
        await elector.try_acquire_or_renew()
        text = f"t{clock.now}"
        assert read() == {
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE_S,
            "acquireTime": text,
            "renewTime": text,
            "leaseTransitions": number,
        }
        await elector.release()


@pytest.mark.parametrize(
    ("duration_s", "waited_s"),
    [({}, LEASE_S), ({"leaseDurationSeconds": 4}, 4.0), ({"leaseDurationSeconds": 60}, 60.0)],
)
async def test_another_ones_lease_runs_out_by_its_own_duration_from_when_its_record_last_changed(
    duration_s: dict[str, int], waited_s: float
) -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    elector = make_elector(kubernetes, "b", clock)
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    kubernetes.put(
        {**lease, "metadata": {"name": "lease", "namespace": "default"}, "spec": {"holderIdentity": "a", **duration_s}}
    )
    # Whatever says that somebody else is at work begins the wait anew.
    for changed in ({}, {"renewTime": "x"}, {"leaseTransitions": 7}, {"holderIdentity": "c"}):
        kubernetes.edit(LEASES, "lease", {"spec": changed})
        assert not await elector.try_acquire_or_renew()
        clock.now += waited_s - 0.5
        assert not await elector.try_acquire_or_renew()
    clock.now += 0.5
    assert await elector.try_acquire_or_renew()
    assert kubernetes.find(LEASES, "lease")["spec"]["leaseTransitions"] == 8


async def test_the_fence_closes_before_anybody_else_may_lead() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b = (make_elector(kubernetes, name, clock) for name in "ab")
    await a.try_acquire_or_renew()
    await b.try_acquire_or_renew()
    while not await b.try_acquire_or_renew():
        clock.now += 0.5
    assert not a.is_leading
    # A write that was sent in the last moment has its time-out to end.
    assert clock.now - 100.0 - RENEW_DEADLINE_S >= 5.0


async def test_the_lease_counts_from_before_the_request() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    elector = make_elector(kubernetes, "a", clock)

    def be_slow(_verb: str, _plural: str) -> None:
        clock.now += 4.0

    kubernetes.after = be_slow
    await elector.try_acquire_or_renew()
    clock.now = 100.0 + RENEW_DEADLINE_S - 0.1
    assert elector.is_leading
    clock.now += 0.1
    assert not elector.is_leading


async def test_a_released_lease_is_taken_at_once() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b = (make_elector(kubernetes, name, clock) for name in "ab")
    await a.try_acquire_or_renew()
    await b.try_acquire_or_renew()
    await a.release()
    assert not a.is_leading
    assert await b.try_acquire_or_renew()


async def test_a_lease_that_somebody_deleted_is_not_released() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    elector = make_elector(kubernetes, "a", clock)
    assert await elector.try_acquire_or_renew()
    kubernetes.remove(LEASES, "default", "lease")
    await elector.release()
    assert not elector.is_leading
    assert kubernetes.objects == {}


async def test_a_lease_that_another_one_has_is_not_released() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b = (make_elector(kubernetes, name, clock) for name in "ab")
    await a.try_acquire_or_renew()
    kubernetes.edit(LEASES, "lease", {"spec": {"holderIdentity": "b"}})
    await a.release()
    assert kubernetes.find(LEASES, "lease")["spec"]["holderIdentity"] == "b"
    assert not b.is_leading


def take_between(kubernetes: FakeKubernetes, verb: str, elector: LeaderElector) -> None:
    """Has a replica take the lease between another one's read and its write."""
    is_inside = False

    def strike(called: str, _plural: str) -> None:
        nonlocal is_inside
        if called == verb and not is_inside:
            is_inside = True
            with pytest.raises(StopIteration) as taken:
                elector.try_acquire_or_renew().send(None)
            assert taken.value.value

    kubernetes.before = strike


@pytest.mark.parametrize("verb", ["create", "patch"], ids=["a new lease", "a lease that somebody gave back"])
async def test_two_that_are_equally_fast_do_not_both_lead(verb: str) -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b, former = (make_elector(kubernetes, name, clock) for name in ("a", "b", "former"))
    if verb == "patch":
        await former.try_acquire_or_renew()
        await former.release()
    take_between(kubernetes, verb, b)
    assert not await a.try_acquire_or_renew()
    assert (a.is_leading, b.is_leading) == (False, True)
    assert kubernetes.find(LEASES, "lease")["spec"]["holderIdentity"] == "b"


async def test_a_lease_that_was_taken_meanwhile_is_not_given_back() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    a, b = (make_elector(kubernetes, name, clock) for name in "ab")
    await a.try_acquire_or_renew()
    await b.try_acquire_or_renew()

    def take(verb: str, _plural: str) -> None:
        if verb == "patch":
            kubernetes.edit(LEASES, "lease", {"spec": {"holderIdentity": "b", "renewTime": "later"}})

    kubernetes.before = take
    await a.release()
    assert kubernetes.find(LEASES, "lease")["spec"]["holderIdentity"] == "b"


async def test_one_that_finds_another_leading_stops_leading() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()
    elector = make_elector(kubernetes, "a", clock)
    await elector.try_acquire_or_renew()
    kubernetes.edit(LEASES, "lease", {"spec": {"holderIdentity": "b", "renewTime": "x"}})
    assert not await elector.try_acquire_or_renew()
    assert not elector.is_leading


async def test_renewing_ends_when_the_lease_cannot_be_renewed() -> None:
    kubernetes, clock = FakeKubernetes(), Clock()

    async def sleep(duration_s: float) -> None:
        clock.now += duration_s

    def fail(_verb: str, _plural: str) -> None:
        raise BusyError("no answer")

    elector = LeaderElector(
        kubernetes, namespace="default", name="lease", identity="a", now=clock, now_text=lambda: "t", sleep=sleep
    )
    await elector.try_acquire_or_renew()
    kubernetes.before = fail
    with pytest.raises(LeaseLostError):
        await elector.renew()
    assert RENEW_DEADLINE_S <= clock.now - 100.0 <= RENEW_DEADLINE_S + 2.0


async def test_a_renewal_that_fails_is_tried_again_soon() -> None:
    kubernetes, clock, pauses = FakeKubernetes(), Clock(), []
    faults = iter([True, True, False, True])

    class EnoughError(Exception):
        pass

    async def sleep(duration_s: float) -> None:
        pauses.append(duration_s)
        clock.now += duration_s

    def fail(verb: str, _plural: str) -> None:
        if verb == "get":
            is_failing = next(faults, None)
            if is_failing is None:
                raise EnoughError
            if is_failing:
                raise BusyError("500")

    elector = LeaderElector(
        kubernetes, namespace="default", name="lease", identity="a", now=clock, now_text=lambda: "t", sleep=sleep
    )
    await elector.try_acquire_or_renew()
    kubernetes.before = fail
    with pytest.raises(EnoughError):
        await elector.renew()
    assert pauses == [2.0, 0.5, 0.5, 2.0, 0.5]


@pytest.mark.parametrize("seed", range(10))
async def test_there_are_never_two_leaders(seed: int) -> None:
    kubernetes, clock, rng = FakeKubernetes(), Clock(), random.Random(seed)
    electors = [make_elector(kubernetes, name, clock) for name in "abc"]
    num_leading = 0

    def fail(_verb: str, _plural: str) -> None:
        clock.now += rng.choice([0.0, 0.0, 0.2, 3.0])
        if rng.random() < 0.3:
            raise BusyError("no answer")

    kubernetes.before = kubernetes.after = fail
    for _ in range(600):
        elector = rng.choice(electors)
        try:
            if rng.random() < 0.02:
                await elector.release()
            else:
                await elector.try_acquire_or_renew()
        except BusyError:
            pass
        clock.now += rng.choice([0.1, 1.0, 2.0, 6.0])
        leading = sum(other.is_leading for other in electors)
        assert leading <= 1
        num_leading += leading
    assert num_leading > 50


async def test_who_does_not_lead_tries_again_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    kubernetes, clock = FakeKubernetes(), Clock()
    former = make_elector(kubernetes, "a", clock)
    assert await former.try_acquire_or_renew()
    pauses_s: list[float] = []

    async def sleep(duration_s: float) -> None:
        pauses_s.append(duration_s)
        clock.now += duration_s
        kubernetes.before = fail if len(pauses_s) == 2 else lambda _verb, _plural: None
        if len(pauses_s) == 4:
            await former.release()

    def fail(_verb: str, _plural: str) -> None:
        raise BusyError("503")

    elector = LeaderElector(
        kubernetes, namespace="default", name="lease", identity="b", now=clock, now_text=lambda: "t", sleep=sleep
    )
    await elector.acquire()
    assert elector.is_leading
    assert pauses_s == [2.0] * 4
    assert "b is the leader" in caplog.messages
