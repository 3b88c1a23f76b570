"""Retries, queue and reconciler in simulated time: among faults, with a dead API server, and when it is back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from cluster_harness import KEY, World

from sluice_operator.api.labels import ROLE_LABEL
from sluice_operator.controller.reconciler import Reconciler
from sluice_operator.controller.work_queue import EVENT_PAUSE_S, MAX_BACKOFF_S, Schedule
from sluice_operator.kubernetes.errors import BusyError, ConflictError, KubernetesError
from sluice_operator.kubernetes.interceptors import InterceptedKubernetes
from sluice_operator.kubernetes.retry import MAX_ATTEMPTS, Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.api.names import ClusterKey

TIMEOUT_S = 2.0
# Between two steps of the Deployment controller and of the watches.
STEP_S = 0.1


class Clockwork:
    """A world whose cluster is reconciled when the queue says so: changes enqueue it, as the informer does.

    Args:
        rng: Jitter, and faults.
    """

    def __init__(self, rng: random.Random) -> None:
        self.world = World()
        self.num_reconciles = 0
        self._rng = rng
        self._schedule: Schedule[ClusterKey] = Schedule(rng)
        self._seen = self.world.snapshot()
        self._reconciler = Reconciler(
            InterceptedKubernetes(self.world.kubernetes, Retry(rng=rng, now=lambda: self.world.now, sleep=self._sleep)),
            self.world.routers,
            self.world.settings,
            now=lambda: self.world.now,
            now_text=lambda: "t",
        )
        self.enqueue()

    @property
    def roles(self) -> list[str]:
        return sorted(pod["metadata"]["labels"].get(ROLE_LABEL, "") for pod in self.world.engines)

    def enqueue(self) -> None:
        self._schedule.add(KEY, self.world.now)

    async def run_until(self, is_reached: Callable[[], bool], patience_s: float) -> float:
        """Runs until something is the case; returns how long that took, in seconds."""
        started_s = self.world.now
        while not is_reached():
            assert self.world.now - started_s < patience_s, self.world.conditions
            await self.step()
        return self.world.now - started_s

    async def step(self) -> None:
        self.world.kubernetes.run_controllers()
        if (seen := self.world.snapshot()) != self._seen:
            self._seen = seen
            self.enqueue()
        if self._schedule.take(self.world.now) is not None:
            await self._reconcile_due()
        self.world.now += STEP_S

    async def _reconcile_due(self) -> None:
        self.num_reconciles += 1
        try:
            after_s = await self._reconciler.reconcile(KEY)
        except KubernetesError as error:
            self._schedule.fail(KEY, self.world.now, error.retry_after_s or 0.0)
        else:
            self._schedule.finish(KEY)
            if after_s is not None:
                self._schedule.add(KEY, self.world.now + after_s)

    async def _sleep(self, duration_s: float) -> None:
        self.world.now += duration_s

    def fail(self, share: float) -> None:
        """Has a share of all requests fail, one third of those after a server that lives has carried them out."""
        lost = share / 3 if share < 1.0 else 0.0

        def strike(share: float, errors: tuple[KubernetesError, ...]) -> None:
            if self._rng.random() < share:
                error = self._rng.choice(errors)
                self.world.now += TIMEOUT_S if "no answer" in str(error) else 0.0
                raise error

        errors = (BusyError("500"), BusyError("429", retry_after_s=1.0), BusyError("no answer"), BusyError("cut"))
        self.world.kubernetes.before = lambda _verb, _plural: strike(share - lost, errors)
        self.world.kubernetes.after = lambda _verb, _plural: strike(lost, (BusyError("lost"),))


@pytest.mark.parametrize("seed", range(10))
async def test_edits_are_in_force_within_seconds_though_a_fifth_of_all_requests_fails(seed) -> None:
    work = Clockwork(random.Random(seed))
    await work.run_until(lambda: work.world.conditions.get("Progressing") == ("False", "Settled"), 60.0)
    work.fail(0.2)
    times_s = []
    for number in (3, 1, 4, 0, 2):
        work.world.edit(prefillHeavy=number)
        wanted = ["d-heavy"] * (4 - number) + ["p-heavy"] * number
        times_s.append(await work.run_until(lambda wanted=wanted: work.roles == wanted, 60.0))
    assert max(times_s) < 30.0
    assert sorted(times_s)[len(times_s) // 2] < 10.0


@pytest.mark.parametrize("seed", range(4))
async def test_half_of_all_requests_may_fail(seed) -> None:
    work = Clockwork(random.Random(seed))
    work.fail(0.5)
    await work.run_until(lambda: work.roles == ["d-heavy"] * 2 + ["p-heavy"] * 2, 600.0)


async def test_requests_to_a_dead_api_server_are_bounded_whatever_events_come() -> None:
    work = Clockwork(random.Random(1))
    await work.run_until(lambda: work.world.conditions.get("Progressing") == ("False", "Settled"), 60.0)
    work.fail(1.0)
    started_s, num_reconciles, num_calls = work.world.now, work.num_reconciles, len(work.world.kubernetes.calls)
    while work.world.now - started_s < 600.0:
        work.enqueue()
        await work.step()
    num_reconciles, num_calls = work.num_reconciles - num_reconciles, len(work.world.kubernetes.calls) - num_calls
    assert 600.0 / MAX_BACKOFF_S < num_reconciles <= 600.0 / EVENT_PAUSE_S
    # Its first failed request ends a reconcile.
    assert num_calls <= MAX_ATTEMPTS * num_reconciles


@pytest.mark.parametrize("seed", range(4))
async def test_without_events_a_dead_api_server_gets_few_requests(seed) -> None:
    work = Clockwork(random.Random(seed))
    await work.run_until(lambda: work.world.conditions.get("Progressing") == ("False", "Settled"), 60.0)
    work.fail(1.0)
    work.enqueue()
    started_s, num_reconciles = work.world.now, work.num_reconciles
    await work.run_until(lambda: work.world.now - started_s > 600.0, 700.0)
    assert work.num_reconciles - num_reconciles <= 600.0 / (MAX_BACKOFF_S / 2) + 6


@pytest.mark.parametrize("happens", [False, True], ids=["nothing happens", "an edit"])
async def test_an_api_server_that_is_back_is_noticed_in_time(happens) -> None:
    work = Clockwork(random.Random(1))
    await work.run_until(lambda: work.world.conditions.get("Progressing") == ("False", "Settled"), 60.0)
    work.fail(1.0)
    work.world.edit(prefillHeavy=3)
    started_s = work.world.now
    await work.run_until(lambda: work.world.now - started_s > 300.0, 400.0)
    work.fail(0.0)
    if happens:
        work.enqueue()
    took_s = await work.run_until(lambda: work.roles.count("p-heavy") == 3, MAX_BACKOFF_S + 5.0)
    if happens:
        assert took_s < EVENT_PAUSE_S + 5.0


async def test_somebody_who_is_always_faster_does_not_keep_a_cluster_from_its_turn() -> None:
    work = Clockwork(random.Random(1))
    await work.run_until(lambda: work.world.conditions.get("Progressing") == ("False", "Settled"), 60.0)
    remaining = 20

    def conflict(verb: str, plural: str) -> None:
        nonlocal remaining
        if (verb, plural) == ("patch", "configmaps") and remaining:
            remaining -= 1
            raise ConflictError("somebody was faster")

    work.world.kubernetes.before = conflict
    work.world.edit(prefillHeavy=3)
    await work.run_until(lambda: remaining == 0, 20 * MAX_BACKOFF_S)
    work.enqueue()
    assert await work.run_until(lambda: work.roles.count("p-heavy") == 3, MAX_BACKOFF_S) < EVENT_PAUSE_S + 5.0
