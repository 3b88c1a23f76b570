"""The tuner around its decisions: searches that run, fail and are ended, and when an update is needed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from test_autotune_requests import make_status
from tuner_harness import APPLY, FOUND, make_answer, make_samples

from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.autotune.tuner import Tuner, TunerInputs, apply_sliders
from sluice_operator.autotune.workload import (
    MIN_REQUESTS,
)

if TYPE_CHECKING:
    from sluice_operator.autotune.search_messages import SearchResult


class Tuned:
    """A tuner with a clock, and searches that end when told."""

    def __init__(self) -> None:
        self.now = 50.0
        self.questions: list[object] = []
        self.num_enqueued = self.num_cancelled = 0
        self.answers: asyncio.Queue[object] = asyncio.Queue()
        self.samples = make_samples(2000)
        self.spec = {"autotune": APPLY, "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64}}
        self.counts = SloCounts()
        self.tuner = Tuner(self.search, enqueue=self.enqueue, now=lambda: self.now, wall_s=lambda: 1e9 + self.now)

    def enqueue(self) -> None:
        self.num_enqueued += 1

    async def search(self, request: object) -> SearchResult:
        self.questions.append(request)
        try:
            answer = await self.answers.get()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read_inputs(self) -> TunerInputs:
        emulation = {"emulation": {"gpu": "a100-80g", "model": "qwen2.5-14b"}}
        body = {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "ServingCluster",
            "metadata": {"name": "m"},
            "spec": {
                "replicas": 4,
                "strategy": "TaiChi",
                "slo": {"ttftMilliseconds": 4000, "tpotMilliseconds": 70},
                "model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
                "engine": emulation,
                **self.spec,
            },
        }
        return TunerInputs(
            cluster=check_manifest(body),
            statuses=[make_status(samples=self.samples)],
            counts=self.counts,
            is_settled=True,
        )

    def update(self) -> Sliders:
        return resolve_sliders(self.tuner.update(self.read_inputs()).spec)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_search_runs_once_and_its_result_wakes_a_reconcile() -> None:
    tuned = Tuned()
    assert tuned.tuner.describe_status() is None
    assert tuned.tuner.stored is None
    assert tuned.update() == Sliders(num_prefill_heavy=2, prefill_heavy_tokens=512, decode_heavy_tokens=64)
    tuned.update()
    await tuned.settle()
    tuned.update()
    assert (len(tuned.questions), tuned.num_enqueued, tuned.tuner.result) == (1, 0, None)
    await tuned.answers.put(make_answer())
    await tuned.settle()
    assert (tuned.num_enqueued, tuned.tuner.result) == (1, make_answer())
    tuned.counts = SloCounts(num_finished=100, num_met_both=100)
    assert tuned.update() == FOUND
    stored = tuned.tuner.stored
    assert stored is not None
    assert (stored.sliders, stored.replicas, stored.trial.former, stored.trial.before) == (FOUND, 4, None, tuned.counts)
    assert tuned.tuner.describe_status().reason is Reason.ON_TRIAL
    assert tuned.num_cancelled == 0


@pytest.mark.parametrize(
    ("failure", "message"),
    [(SearchError("bounds are too wide"), "bounds are too wide"), (OSError("disk"), "the search failed: disk")],
)
async def test_a_search_that_fails_is_told_and_wakes_a_reconcile(failure, message) -> None:
    tuned = Tuned()
    tuned.update()
    await tuned.answers.put(failure)
    await tuned.settle()
    status = tuned.tuner.describe_status()
    assert status is not None
    assert (status.reason, status.message, tuned.num_enqueued) == (Reason.SEARCH_FAILED, message, 1)


async def test_an_edit_ends_the_search_under_way_and_off_ends_all() -> None:
    tuned = Tuned()
    tuned.update()
    await tuned.settle()
    tuned.spec = {**tuned.spec, "slo": {"ttftMilliseconds": 9, "tpotMilliseconds": 9}}
    tuned.update()
    await tuned.settle()
    assert (tuned.num_cancelled, len(tuned.questions)) == (1, 2)
    tuned.spec = {**tuned.spec, "autotune": {"mode": "Off"}}
    tuned.update()
    await tuned.settle()
    assert (tuned.num_cancelled, tuned.num_enqueued) == (2, 0)
    assert tuned.tuner.describe_status().reason is Reason.OFF


async def test_stop_ends_the_search() -> None:
    tuned = Tuned()
    tuned.update()
    await tuned.settle()
    tuned.tuner.stop()
    await tuned.settle()
    assert (tuned.num_cancelled, tuned.num_enqueued) == (1, 0)
    tuned.tuner.stop()


async def test_an_update_is_needed_when_it_would_decide_or_say_something_else() -> None:
    tuned = Tuned()
    assert not tuned.tuner.needs_update(tuned.read_inputs)  # nothing has been decided yet
    tuned.samples = []
    tuned.update()
    assert not tuned.tuner.needs_update(tuned.read_inputs)
    tuned.samples = make_samples(2000)
    assert not tuned.tuner.needs_update(tuned.read_inputs)  # it was asked just now
    tuned.now += 2.0
    assert not tuned.tuner.needs_update(lambda: None)
    assert not tuned.tuner.needs_update(tuned.read_inputs)
    tuned.now += 2.0
    assert tuned.tuner.needs_update(tuned.read_inputs)
    tuned.update()
    tuned.now += 2.0
    assert not tuned.tuner.needs_update(tuned.read_inputs)
    await tuned.answers.put(make_answer())
    await tuned.settle()
    tuned.update()
    assert tuned.tuner.describe_status().reason is Reason.MEASURING
    tuned.counts = SloCounts(num_finished=100, num_met_both=100)
    tuned.now += 2.0
    assert tuned.tuner.needs_update(tuned.read_inputs)
    tuned.spec = {**tuned.spec, "autotune": {"mode": "Off"}}
    tuned.update()
    tuned.now += 2.0
    assert not tuned.tuner.needs_update(tuned.read_inputs)


@pytest.mark.parametrize(
    ("spec", "samples", "reason", "part"),
    [
        ({"autotune": {"mode": "Off"}}, 100, Reason.OFF, "off"),
        ({"autotune": {**APPLY, "bounds": {}}}, 100, Reason.NOTHING_TO_TUNE, "no slider a choice"),
        ({}, MIN_REQUESTS - 1, Reason.NO_SAMPLE, "fewer than 30 requests"),
        ({"engine": {}}, 100, Reason.NO_LATENCY_MODEL, "fewer than 200 iterations"),
        ({}, 100, Reason.SEARCHING, "search"),
    ],
)
async def test_the_condition_says_what_is_missing(spec, samples, reason, part) -> None:
    tuned = Tuned()
    tuned.spec = {**tuned.spec, **spec}
    tuned.samples = make_samples(2000, samples)
    tuned.update()
    status = tuned.tuner.describe_status()
    assert status is not None
    assert status.reason is reason
    assert part in status.message
    tuned.tuner.stop()


def test_sliders_take_the_place_of_the_specs_and_nothing_else_changes() -> None:
    cluster = Tuned().read_inputs().cluster
    assert apply_sliders(cluster, None) is cluster
    tuned = apply_sliders(cluster, FOUND)
    assert resolve_sliders(tuned.spec) == FOUND
    back = {"prefill_heavy": cluster.spec.prefill_heavy, "chunk_sizes": cluster.spec.chunk_sizes}
    assert tuned.spec.model_copy(update=back) == cluster.spec
    assert tuned.model_copy(update={"spec": cluster.spec}) == cluster
