"""The operator scales a cluster by what arrives: on a fake Kubernetes, in simulated time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from cluster_harness import KEY
from fake_kubernetes import READS
from scaler_harness import Scaled
from test_operator_faults import Crash, CrashOnce
from tuner_harness import BOUNDS

from sluice.v1 import control_pb2
from sluice_operator.api.labels import SCALE_ANNOTATION
from sluice_operator.api.sliders import Sliders
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.kubernetes.kinds import CLUSTERS, CONFIG_MAPS


async def test_recommend_writes_the_status_and_changes_no_engine() -> None:
    scaled = Scaled("Recommend")
    assert set(await scaled.run(300.0, 9.0)) == {2}
    # 9 requests/s with the first headroom of 1.2 need 5.4 engines of 2 requests/s.
    assert scaled.scale["replicas"] == 6
    assert scaled.condition == ("False", "Recommended")
    assert "requests/s are planned for while an engine starts (120 s)" in scaled.scale["reason"]
    assert "6 engines serve 12.00" in scaled.scale["reason"]


async def test_apply_follows_the_load_up_at_once_and_down_after_the_window() -> None:
    scaled = Scaled()
    await scaled.run(330.0, 1.0)
    up = await scaled.run(120.0, 9.0)
    assert up == sorted(up)
    assert up[-1] >= 6
    assert sorted(set(scaled.world.roles.values())) == ["d-heavy", "p-heavy"]
    assert scaled.condition == ("True", "Sized")
    down = await scaled.run(115.0, 1.0)
    assert set(down) == {up[-1]}, "engines start in 120 s, and stay for as long"
    assert (await scaled.run(1500.0, 1.0))[-1] == 1
    spec = scaled.world.kubernetes.find(CLUSTERS, "tiny")["spec"]
    assert spec["replicas"] == 2, "the spec is the user's"


async def test_a_new_process_goes_on_with_the_number_and_with_what_engines_serve() -> None:
    scaled = Scaled()
    await scaled.run(300.0, 9.0)
    size, spec = scaled.wanted, scaled.world.deployment()["spec"]
    assert size >= 6
    scaled.world.start_operator()
    scaled.world.routers.samples = []
    assert set(await scaled.run(250.0, 1.0)) == {size}, "what it has not watched for the window takes no engine away"
    assert scaled.world.deployment()["spec"] == spec
    assert (await scaled.run(600.0, 1.0))[-1] == 1, "the stored goodputs say what one engine serves"


async def test_a_crash_after_any_write_ends_with_the_engines_that_are_needed() -> None:
    calm = Scaled()
    await calm.world.settle()
    num_before = len(calm.world.kubernetes.calls)
    await calm.run(120.0, 9.0)
    writes = [number for number, (verb, *_) in enumerate(calm.world.kubernetes.calls[num_before:]) if verb not in READS]
    assert len(writes) > 5
    for crash_at in writes[::4]:
        scaled = Scaled()
        await scaled.world.settle()
        crash = scaled.world.kubernetes.after = CrashOnce(crash_at)
        for _ in range(30):
            try:
                await scaled.run(5.0, 9.0)
            except* Crash:
                scaled.world.start_operator()
        assert crash.has_come
        assert scaled.wanted >= 6, f"crashed after request {crash_at}"


async def test_an_edit_of_replicas_counts_and_the_scaler_goes_on_from_there() -> None:
    scaled = Scaled()
    await scaled.run(300.0, 1.0)
    scaled.world.edit(replicas=5)
    assert set(await scaled.run(250.0, 1.0)) == {5}
    assert (await scaled.run(400.0, 1.0))[-1] == 1


async def test_disabling_returns_to_the_engines_of_the_spec() -> None:
    scaled = Scaled()
    await scaled.run(300.0, 9.0)
    scaled.world.edit(autoscaling={"mode": "Disabled"})
    await scaled.world.settle()
    assert scaled.wanted == 2
    assert scaled.world.plan.hold_seconds == 0
    assert "autoscaling" not in scaled.world.status
    assert scaled.condition == ("False", "Off")
    assert scaled.world.kubernetes.find(CONFIG_MAPS, "tiny-plan")["metadata"]["annotations"][SCALE_ANNOTATION] == ""


async def test_routers_that_do_not_count_what_arrives_take_no_engine_away() -> None:
    scaled = Scaled(spec={"replicas": 4})
    scaled.world.routers.counters[:] = [control_pb2.ClassCounters(num_finished=100)]
    assert set(await scaled.run(700.0)) == {4}
    assert "older than the operator" in scaled.world.message("Autoscaled")


async def test_more_than_all_engines_serve_is_said() -> None:
    scaled = Scaled(maxReplicas=3)
    assert (await scaled.run(200.0, 20.0))[-1] == 3
    assert scaled.condition == ("False", "AtMaximum")
    assert "maxReplicas, 3" in scaled.world.message("Autoscaled")


async def test_without_a_sample_the_number_stays_within_its_bounds() -> None:
    scaled = Scaled(minReplicas=3)
    scaled.world.routers.samples = []
    assert (await scaled.run(60.0, 20.0))[-1] == 3
    assert scaled.condition == ("False", "NoSample")
    scaled.world.routers.latency = None
    scaled.world.routers.samples = Scaled().world.routers.samples
    await scaled.run(10.0, 20.0)
    assert scaled.condition == ("False", "NoLatencyModel")


@pytest.mark.parametrize("failure", [SearchError("no chunk size fits"), ZeroDivisionError("a mistake")])
async def test_a_search_that_fails_is_a_condition_and_tried_again(failure: Exception) -> None:
    scaled = Scaled()
    scaled.failure = failure
    await scaled.run(30.0, 9.0)
    assert scaled.condition == ("False", "SearchFailed")
    assert str(failure) in scaled.world.message("Autoscaled")
    assert (scaled.wanted, len(scaled.requests)) == (2, 1)
    scaled.failure = None
    assert (await scaled.run(200.0, 9.0))[-1] >= 6


async def test_another_rate_starts_no_search_and_other_lengths_or_objectives_do() -> None:
    scaled = Scaled()
    await scaled.run(200.0, 1.0)
    await scaled.run(200.0, 9.0)
    assert [item.constraints.replicas for item in scaled.requests[0].requests] == [1, 2, 4, 8]
    assert len(scaled.requests) == 1
    scaled.world.routers.samples = scaled.world.routers.samples[:1] + [
        type(item)(gap_s=item.gap_s, prompt_tokens=9000, output_tokens=50) for item in scaled.world.routers.samples[1:]
    ]
    await scaled.run(30.0, 9.0)
    assert len(scaled.requests) == 2
    scaled.world.edit(slo={"ttftMilliseconds": 900, "tpotMilliseconds": 50})
    await scaled.run(10.0, 9.0)
    assert len(scaled.requests) == 3


async def test_an_idle_cluster_goes_to_zero_and_the_first_request_starts_an_engine() -> None:
    scaled = Scaled(minReplicas=0, scaleDown={"stabilizationWindowSeconds": 60})
    await scaled.run(120.0, 1.0)
    assert (await scaled.run(120.0))[-1] == 0
    await scaled.world.settle()
    assert scaled.world.engines == []
    assert scaled.world.status["replicas"] == 0
    assert scaled.condition == ("True", "Idle")
    expected = {"Ready": ("True", "Idle"), "Progressing": ("False", "Settled"), "EnginesReady": ("True", "AllReady")}
    assert {name: scaled.world.conditions[name] for name in expected} == expected
    assert set(await scaled.run(60.0)) == {0}
    assert scaled.world.plan.hold_seconds == 1800, "as long as an engine may take to start"
    scaled.world.edit(autoscaling={"holdTimeoutSeconds": 60})
    await scaled.run(5.0)
    assert scaled.world.plan.hold_seconds == 60
    scaled.world.routers.num_waiting = 1
    assert (await scaled.run(5.0, 0.2))[-1] == 1
    scaled.world.routers.num_waiting = 0
    await scaled.run(20.0, 0.2)
    assert scaled.world.conditions["Ready"] == ("True", "Serving")


async def test_a_cluster_is_ready_while_its_last_engine_ends() -> None:
    scaled = Scaled(minReplicas=0, scaleDown={"stabilizationWindowSeconds": 60})
    await scaled.run(120.0, 1.0)
    seen = set()
    for _ in range(130):
        await scaled.run(1.0, step_s=1.0)
        seen.add(scaled.world.conditions["Ready"])
    assert seen == {("True", "Serving"), ("True", "Idle")}


async def test_a_new_process_leaves_a_cluster_of_none_alone() -> None:
    scaled = Scaled(minReplicas=0, scaleDown={"stabilizationWindowSeconds": 60})
    await scaled.run(120.0, 1.0)
    await scaled.run(120.0)
    scaled.world.start_operator()
    assert set(await scaled.run(60.0)) == {0}
    scaled.world.routers.num_waiting = 3
    assert (await scaled.run(5.0))[-1] == 1


async def test_the_first_request_of_a_cluster_of_none_is_heard_of_at_once() -> None:
    scaled = Scaled(minReplicas=0, scaleDown={"stabilizationWindowSeconds": 60})
    await scaled.run(120.0, 1.0)
    await scaled.run(120.0)
    scaled.world.enqueued.clear()
    scaled.world.routers.num_inside = scaled.world.routers.num_waiting = 1
    scaled.world.now += 0.1
    for status in scaled.world.routers.statuses(KEY).values():
        scaled.world.reconciler.record_status(KEY, status)
    assert scaled.world.enqueued == [KEY]


async def test_one_engine_of_two_kinds_serves_nothing() -> None:
    scaled = Scaled(minReplicas=0, scaleDown={"stabilizationWindowSeconds": 60}, spec={"strategy": "Disaggregated"})
    await scaled.run(120.0, 0.5)
    assert scaled.wanted == 2
    assert (await scaled.run(120.0))[-1] == 0


async def test_engines_that_start_slowly_are_asked_for_sooner() -> None:
    """How long a pod took to be ready is measured, and stored."""
    scaled = Scaled()
    await scaled.world.settle()
    for pod in scaled.world.engines:
        name = pod["metadata"]["name"]
        times = {"creationTimestamp": "2026-01-01T00:00:00Z"}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:10:00Z"}
        scaled.world.kubernetes.objects["Pod", "default", name]["metadata"].update(times)
        scaled.world.kubernetes.objects["Pod", "default", name]["status"]["conditions"] = [ready]
    await scaled.run(10.0, 1.0)
    annotations = scaled.world.kubernetes.find(CONFIG_MAPS, "tiny-plan")["metadata"]["annotations"]
    stored = StoredScale.from_json(annotations[SCALE_ANNOTATION])
    assert stored is not None
    assert stored.start_s == 600.0


@pytest.mark.parametrize(
    ("measured_s", "known_s"),
    [(None, 100.0), (125.0, 100.0), (125.1, 125.1), (80.0, 100.0), (79.9, 79.9), (1000.0, 1000.0)],
)
def test_a_start_time_counts_once_it_is_a_quarter_longer_or_a_fifth_shorter(
    measured_s: float | None, known_s: float
) -> None:
    scale = StoredScale(basis=2, replicas=3, reason="why", start_s=100.0)
    assert scale.note_start(measured_s) == replace(scale, start_s=known_s)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"basis": 1, "replicas": 2, "reason": "", "start_s": 1, "capacity": 3}']
)
def test_what_somebody_edited_counts_as_nothing_stored(text: str) -> None:
    assert StoredScale.from_json(text) is None


# With the tuner: one decision.

TUNED = {"autotune": {"mode": "Apply", "bounds": {**BOUNDS, "prefillHeavy": {"min": "25%", "max": "75%"}}}}


async def find_none(request: object) -> object:
    raise SearchError("another test's")


async def test_sliders_of_the_new_size_are_in_force_with_it() -> None:
    scaled = Scaled(spec=TUNED)
    scaled.world.run_search = find_none
    sliders = Sliders(num_prefill_heavy=1, prefill_heavy_tokens=2048, decode_heavy_tokens=32)
    scaled.find_sliders = lambda _: sliders
    await scaled.run(60.0, 1.0)
    before = scaled.world.plan
    assert {part.chunk_size_tokens for part in before.engines} == {64, 512}, "on another size, not on this one"
    await scaled.run(120.0, 12.0)
    assert scaled.wanted >= 6
    assert {part.chunk_size_tokens for part in scaled.world.plan.engines} == {2048, 32}


async def test_sliders_suit_the_engines_that_serve_until_new_ones_do() -> None:
    """Chunk sizes change at once while new pods load, and again when they serve."""
    scaled = Scaled(spec=TUNED)
    scaled.world.run_search = find_none
    await scaled.run(60.0, 1.0)

    def find_sliders(replicas: int) -> Sliders:
        return Sliders(num_prefill_heavy=1, prefill_heavy_tokens=2048 if replicas < 4 else 1024, decode_heavy_tokens=32)

    scaled.find_sliders = find_sliders
    scaled.world.kubernetes.broken_images |= {pod["spec"]["containers"][0]["image"] for pod in scaled.world.engines}
    await scaled.run(120.0, 12.0)
    assert scaled.wanted >= 6
    assert {part.chunk_size_tokens for part in scaled.world.plan.engines} == {2048, 32}
    for pod in scaled.world.engines:
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    await scaled.run(60.0, 12.0)
    assert {part.chunk_size_tokens for part in scaled.world.plan.engines} == {1024, 32}


async def test_sliders_that_may_be_tuned_from_now_on_are_searched_for() -> None:
    scaled = Scaled(spec={"strategy": "Auto", "autotune": {"mode": "Recommend"}})
    scaled.world.run_search = find_none
    await scaled.run(60.0, 1.0)
    assert [request.may_tune for request in scaled.requests] == [False]
    scaled.world.edit(autotune={"mode": "Apply"})
    await scaled.run(10.0, 1.0)
    assert [request.may_tune for request in scaled.requests] == [False, True]
    before, after = scaled.requests
    assert before.requests == after.requests, "they differ by nothing else"


async def test_disabling_ends_the_search_under_way() -> None:
    scaled = Scaled()
    ended: list[str] = []

    async def search(request: object) -> object:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("search")
            raise
        return request

    scaled.world.run_capacity_search = search
    await scaled.run(30.0, 1.0)
    assert scaled.condition == ("False", "Searching")
    scaled.world.edit(autoscaling={"mode": "Disabled"})
    await scaled.run(10.0, 1.0)
    assert ended == ["search"]
