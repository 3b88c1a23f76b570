"""The operator tunes a cluster: on a fake Kubernetes, with searches that answer as a test says, and with real ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from cluster_harness import KEY, World
from fake_kubernetes import READS
from test_operator_faults import Crash, CrashOnce
from tuner_harness import APPLY, FOUND, FOUND_FLOWPREFILL, make_answer, make_samples

from sluice.v1 import control_pb2
from sluice_operator.api.labels import TUNED_ANNOTATION
from sluice_operator.autotune.engine_facts import MeasuredEngineFacts
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.kubernetes.errors import ForbiddenError
from sluice_operator.kubernetes.kinds import CLUSTERS, CONFIG_MAPS

if TYPE_CHECKING:
    from sluice_operator.autotune.search_messages import SearchRequest, SearchResult

COEFFICIENTS = control_pb2.LatencyCoefficients(
    base_s=0.02,
    per_token_s=9e-5,
    per_attention_pair_s=5e-9,
    per_chunk_s=4e-4,
    per_decode_s=1e-5,
    per_context_token_s=1e-7,
)


class Tuned:
    """A settled world whose searches answer ``answer``, and whose requests finish."""

    def __init__(self, **spec: object) -> None:
        self.world = World(**spec)
        self.world.run_search = self.ask
        self.world.routers.samples = make_samples(2000)
        self.world.routers.latency = COEFFICIENTS
        self.world.routers.num_fitted_iterations = 300
        self.last_request: list[SearchRequest] = []
        self.answer: SearchResult | Exception = make_answer()
        self.num_met = self.num_finished = 0

    async def ask(self, request: SearchRequest) -> SearchResult:
        self.last_request.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def finish(self, count: int, share: float = 1.0) -> None:
        """Has requests finish, and the routers tell."""
        self.num_finished += count
        self.num_met += round(count * share)
        self.world.routers.counters[:] = [
            control_pb2.ClassCounters(
                num_finished=self.num_finished,
                num_met_ttft=self.num_met,
                num_met_tpot=self.num_met,
                num_met_both=self.num_met,
            )
        ]
        for status in self.world.routers.statuses(KEY).values():
            self.world.reconciler.record_status(KEY, status)

    async def run(self, seconds: int, share: float = 1.0) -> None:
        for _ in range(seconds):
            self.finish(5, share)
            await asyncio.sleep(0)
            self.world.kubernetes.run_controllers()
            await self.world.reconcile()
            self.world.now += 1.0

    @property
    def chunks(self) -> list[int]:
        return sorted(part.chunk_size_tokens for part in self.world.plan.engines)

    @property
    def condition(self) -> tuple[str, str]:
        return self.world.conditions["Autotuned"]


async def test_recommend_writes_the_status_and_nothing_else() -> None:
    tuned = Tuned(autotune={"mode": "Recommend"})
    await tuned.run(30)
    assert tuned.condition == ("False", "Recommended")
    assert {**tuned.world.status["recommended"], "time": ""} == {
        "replicas": 4,
        "prefillHeavy": 3,
        "chunkSizes": {"prefillHeavy": 1024, "decodeHeavy": 128},
        "predictedAttainment": "93.4%",
        "time": "",
    }
    assert tuned.chunks == [64, 64, 512, 512]
    assert len(tuned.last_request) == 1
    engine = tuned.last_request[0].engine
    assert isinstance(engine, MeasuredEngineFacts)
    assert engine.coefficients == pytest.approx((0.02, 9e-5, 5e-9, 4e-4, 1e-5, 1e-7))
    assert (engine.kv_blocks_total, engine.block_size_tokens, engine.max_num_seqs) == (1000, 16, 256)


async def test_apply_runs_on_what_was_found_without_a_write_of_the_spec_or_of_pods() -> None:
    tuned = Tuned(autotune=APPLY)
    await tuned.world.settle()
    spec, template = tuned.world.kubernetes.find(CLUSTERS, "tiny")["spec"], tuned.world.deployment()["spec"]
    uids = tuned.world.engine_uids
    await tuned.run(40)
    assert tuned.chunks == [128, 1024, 1024, 1024]
    assert tuned.world.status["effective"] == {
        "prefillHeavy": 3,
        "decodeHeavy": 1,
        "draining": 0,
        "strategy": "TaiChi",
        "chunkSizes": {"prefillHeavy": 1024, "decodeHeavy": 128},
    }
    assert tuned.condition == ("True", "Tuned")
    assert tuned.world.kubernetes.find(CLUSTERS, "tiny")["spec"] == spec
    assert (tuned.world.deployment()["spec"], tuned.world.engine_uids) == (template, uids)
    generation = tuned.world.plan.generation
    await tuned.run(60)
    assert tuned.world.plan.generation == generation


async def test_sliders_return_when_measured_attainment_falls() -> None:
    tuned = Tuned(autotune=APPLY)
    await tuned.world.settle()
    await tuned.run(12)
    assert tuned.chunks == [128, 1024, 1024, 1024]
    await tuned.run(15, share=0.2)
    assert tuned.chunks == [64, 64, 512, 512]
    assert tuned.condition == ("False", "Returned")
    assert [event["reason"] for event in tuned.world.kubernetes.events].count("Returned") == 1


async def test_auto_is_the_default_until_a_search_has_chosen_and_returns_when_attainment_falls() -> None:
    """A choice of strategy is one change as any: measured first, on trial, taken back."""
    tuned = Tuned(strategy="Auto", autotune={"mode": "Apply", "cooldownSeconds": 10})
    tuned.answer = make_answer(FOUND_FLOWPREFILL)
    tuned.world.routers.samples = []
    await tuned.world.settle()
    assert (tuned.world.plan.strategy, tuned.world.status["effective"]["strategy"]) == ("sluice", "Sluice")
    assert tuned.condition == ("False", "NoSample")
    assert tuned.world.message("Autotuned").endswith("; strategy Auto is Sluice, the default")
    before, template, uids = tuned.chunks, tuned.world.deployment()["spec"], tuned.world.engine_uids

    tuned.world.routers.samples = make_samples(2000)
    await tuned.run(12)
    assert tuned.condition == ("True", "OnTrial")
    assert (tuned.world.plan.strategy, tuned.chunks) == ("flowprefill", [0, 1536, 1536, 1536])
    assert tuned.world.status["effective"]["strategy"] == "FlowPrefill"
    assert tuned.world.status["recommended"]["strategy"] == "FlowPrefill"
    assert tuned.world.message("Autotuned").endswith("; strategy Auto is FlowPrefill, as a search chose")
    assert (tuned.world.deployment()["spec"], tuned.world.engine_uids) == (template, uids)
    assert tuned.world.kubernetes.find(CLUSTERS, "tiny")["spec"]["strategy"] == "Auto"

    tuned.world.start_operator()
    await tuned.run(3)
    assert tuned.world.plan.strategy == "flowprefill"
    await tuned.run(20, share=0.2)
    assert (tuned.world.plan.strategy, tuned.chunks) == ("sluice", before)
    assert tuned.condition == ("False", "Returned")
    assert tuned.world.message("Autotuned").endswith("; strategy Auto is Sluice, the default")


@pytest.mark.parametrize(
    ("mode", "reason", "strategies"),
    [("Recommend", "Recommended", ("sluice", "FlowPrefill")), ("Disabled", "Off", ("sluice", None))],
)
async def test_auto_changes_nothing_outside_apply(mode: str, reason: str, strategies: tuple[str, str | None]) -> None:
    tuned = Tuned(strategy="Auto", autotune={"mode": mode})
    tuned.answer = make_answer(FOUND_FLOWPREFILL)
    await tuned.run(30)
    recommended = tuned.world.status.get("recommended", {}).get("strategy")
    assert (tuned.world.plan.strategy, recommended) == strategies
    assert tuned.condition == ("False", reason)
    assert tuned.world.message("Autotuned").endswith("; strategy Auto is Sluice, the default")


async def test_a_users_strategy_wins_over_the_tuners() -> None:
    tuned = Tuned(strategy="Auto", autotune={"mode": "Apply", "cooldownSeconds": 10})
    tuned.answer = make_answer(FOUND_FLOWPREFILL)
    await tuned.world.settle()
    await tuned.run(20)
    assert tuned.world.plan.strategy == "flowprefill"
    tuned.world.edit(strategy="Aggregated")
    await tuned.run(2)
    assert tuned.world.plan.strategy == "aggregated"
    assert "strategy Auto" not in tuned.world.message("Autotuned")


async def test_a_users_slider_wins_over_the_tuners() -> None:
    tuned = Tuned(autotune={**APPLY, "cooldownSeconds": 300})
    await tuned.world.settle()
    await tuned.run(20)
    assert tuned.chunks == [128, 1024, 1024, 1024]
    tuned.world.edit(prefillHeavy=2, chunkSizes={"prefillHeavy": 512, "decodeHeavy": 96})
    await tuned.run(1)
    assert tuned.chunks == [96, 96, 512, 512]
    await tuned.run(100)
    assert tuned.chunks == [96, 96, 512, 512]
    assert tuned.condition == ("False", "CoolingDown")


async def test_a_new_process_keeps_the_tuned_sliders() -> None:
    tuned = Tuned(autotune=APPLY)
    await tuned.world.settle()
    while tuned.world.conditions.get("Autotuned") != ("True", "OnTrial"):
        await tuned.run(1)
    plan, recommended = tuned.world.plan, tuned.world.status["recommended"]
    assert FOUND.num_prefill_heavy == 3
    tuned.world.start_operator()
    tuned.world.routers.samples = []
    await tuned.world.settle()
    assert tuned.world.plan == plan
    assert tuned.world.status["recommended"] == recommended
    # Its trial goes on.
    assert tuned.condition == ("True", "OnTrial")
    await tuned.run(60, share=0.1)
    assert tuned.condition == ("False", "NoSample")
    assert tuned.world.plan != plan


async def test_a_crash_after_any_write_of_a_change_ends_with_the_tuned_sliders() -> None:
    calm = Tuned(autotune=APPLY)
    await calm.world.settle()
    num_before = len(calm.world.kubernetes.calls)
    await calm.run(40)
    writes = [number for number, (verb, *_) in enumerate(calm.world.kubernetes.calls[num_before:]) if verb not in READS]
    assert len(writes) > 5
    for crash_at in writes[::2]:
        tuned = Tuned(autotune=APPLY)
        await tuned.world.settle()
        crash = tuned.world.kubernetes.after = CrashOnce(crash_at)
        for _ in range(45):
            try:
                await tuned.run(1)
            except* Crash:
                tuned.world.start_operator()
        assert crash.has_come
        assert tuned.chunks == [128, 1024, 1024, 1024], f"crashed after request {crash_at}"
        assert tuned.condition == ("True", "Tuned")


async def test_a_tuned_plan_says_so_and_one_of_the_spec_does_not() -> None:
    def annotation() -> str:
        return tuned.world.kubernetes.find(CONFIG_MAPS, "tiny-plan")["metadata"]["annotations"][TUNED_ANNOTATION]

    tuned = Tuned(autotune=APPLY)
    await tuned.world.settle()
    assert annotation() == ""
    await tuned.run(30)
    assert '"prefill_heavy_tokens": 1024' in annotation()
    tuned.world.edit(autotune={"mode": "Off"})
    await tuned.run(5)
    assert annotation() == ""
    assert tuned.chunks == [64, 64, 512, 512]
    assert "recommended" not in tuned.world.status


async def test_an_edited_objective_is_answered_at_once_and_a_shifted_workload_too() -> None:
    tuned = Tuned(autotune=APPLY)
    await tuned.run(30)
    tuned.answer = make_answer(attainment=0.5)
    tuned.world.edit(slo={"ttftMilliseconds": 2000, "tpotMilliseconds": 50})
    await tuned.run(3)
    assert tuned.world.status["recommended"]["predictedAttainment"] == "50%"
    assert tuned.last_request[-1].in_force == FOUND
    await tuned.run(30)
    num_asked = len(tuned.last_request)
    tuned.world.routers.samples[:] = make_samples(5000)
    tuned.world.enqueued.clear()
    tuned.world.now += 2.0
    tuned.finish(1)
    assert tuned.world.enqueued == [KEY], "counters alone cause no reconcile"
    await tuned.run(3)
    assert len(tuned.last_request) == num_asked + 1


@pytest.mark.parametrize("failure", [SearchError("no chunk size fits"), ZeroDivisionError("a mistake")])
async def test_a_search_that_fails_is_a_condition_and_the_cluster_goes_on(failure: Exception) -> None:
    tuned = Tuned(autotune=APPLY)
    tuned.answer = failure
    await tuned.run(30)
    assert tuned.condition == ("False", "SearchFailed")
    assert str(failure) in tuned.world.message("Autotuned")
    assert tuned.world.conditions["Ready"] == ("True", "Serving")
    assert len(tuned.last_request) == 1


async def test_a_tuner_with_nothing_to_say_writes_nothing() -> None:
    tuned = Tuned(autotune=APPLY)
    await tuned.run(60)
    tuned.world.now += 20.0
    await tuned.world.settle()
    tuned.world.kubernetes.calls.clear()
    for _ in range(5):
        await tuned.world.reconcile()
        tuned.world.now += 1.0
    assert tuned.world.kubernetes.writes == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"samples": []}, "NoSample"),
        ({"latency": None}, "NoLatencyModel"),
        ({"num_fitted_iterations": 1}, "NoLatencyModel"),
    ],
)
async def test_the_condition_names_what_is_missing(change: dict[str, object], reason: str) -> None:
    tuned = Tuned(autotune=APPLY)
    for name, value in change.items():
        setattr(tuned.world.routers, name, value)
    await tuned.world.settle()
    assert tuned.condition == ("False", reason)
    assert tuned.last_request == []


async def test_the_condition_names_bounds_that_leave_no_choice() -> None:
    tuned = Tuned(autotune={"mode": "Apply"})
    await tuned.world.settle()
    assert tuned.condition == ("False", "NothingToTune")


async def test_sliders_stay_while_the_number_of_engines_is_another_than_the_specs() -> None:
    tuned = Tuned(autotune=APPLY)
    await tuned.world.settle()

    def forbid(verb: str, plural: str) -> None:
        if (verb, plural) == ("apply", "deployments"):
            raise ForbiddenError("exceeded quota")

    tuned.world.kubernetes.before = forbid
    tuned.world.edit(replicas=5)
    await tuned.run(40)
    assert tuned.chunks == [64, 64, 512, 512]
    tuned.world.kubernetes.before = lambda *_: None
    await tuned.run(40)
    assert tuned.chunks == [128, 128, 1024, 1024, 1024]


async def test_the_tuner_of_a_deleted_cluster_ends_its_search() -> None:
    tuned, ended = Tuned(autotune=APPLY), asyncio.Event()

    async def wait_for_ever(request: SearchRequest) -> SearchResult:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    tuned.world.run_search = wait_for_ever
    await tuned.world.settle()
    await tuned.run(3)
    tuned.world.kubernetes.objects.pop(next(key for key in tuned.world.kubernetes.objects if key[0] == CLUSTERS.name))
    await tuned.world.reconcile()
    await asyncio.wait_for(ended.wait(), 5)
