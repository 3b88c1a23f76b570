"""Scale-down and plans as pure functions: properties that hold whatever is observed."""

from __future__ import annotations

from typing import Any

from fake_kubernetes import make_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.records import EngineId, Role
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.planning.plan import StoredPlan, make_plan
from sluice_operator.planning.scale_down import decide_scale
from sluice_operator.resources.pods.pod_status import Pod
from sluice_operator.routers.engine_reports import EngineReport


def make_pod(number: int, *, is_ready: bool = True, has_deletion_cost: bool = False, is_ending: bool = False) -> Pod:
    return Pod(
        name=f"pod-{number}",
        engine_id=EngineId(f"e{number}"),
        address="",
        role_label="",
        has_deletion_cost=has_deletion_cost,
        is_ready=is_ready,
        is_ending=is_ending,
        has_ended=False,
        failure=None,
    )


def make_report(*, is_drained: bool = False, load: int = 0) -> EngineReport:
    return EngineReport(
        role=None,
        chunk_size_tokens=0,
        acknowledged_generation=0,
        is_drained=is_drained,
        load=load,
        transport="",
        fault="",
    )


@st.composite
def worlds(draw: st.DrawFn) -> Any:
    pods = [
        make_pod(
            number,
            is_ready=draw(st.booleans()),
            has_deletion_cost=draw(st.booleans()),
            is_ending=draw(st.integers(0, 4)) == 0,
        )
        for number in range(draw(st.integers(0, 8)))
    ]
    roles = {pod.engine_id: draw(st.sampled_from(Role)) for pod in pods if draw(st.booleans())}
    reports = {
        pod.engine_id: make_report(is_drained=draw(st.booleans()), load=draw(st.integers(0, 9)))
        for pod in pods
        if draw(st.booleans())
    }
    return pods, roles, reports


@settings(deadline=None)
@given(worlds(), st.integers(1, 8), st.integers(1, 8), st.integers(0, 8))
def test_replicas_fall_only_when_everybody_who_goes_may_go(world, wanted, live, num_prefill_heavy) -> None:
    pods, roles, reports = world
    scale = decide_scale(
        wanted, live, pods, roles=roles, num_prefill_heavy=min(num_prefill_heavy, wanted), reports=reports
    )
    present = [pod for pod in pods if pod.is_present]
    assert scale.replicas in (wanted, live)
    assert scale.undrained <= scale.victims <= {pod.engine_id for pod in present}
    if scale.replicas < live:
        assert not scale.undrained
        goes_first = sorted(present, key=lambda pod: (pod.is_ready, not pod.has_deletion_cost))
        surplus = goes_first[: max(0, len(present) - wanted)]
        # Kubernetes takes those that are not ready, then those that are marked: the very ones that we chose.
        for pod in surplus:
            if pod.is_ready:
                assert pod.has_deletion_cost
        for pod in present:
            if pod.engine_id in scale.victims and pod.is_ready:
                assert pod.has_deletion_cost
                assert reports[pod.engine_id].is_drained
    if wanted >= live:
        assert scale.replicas == wanted
        assert not scale.victims


@settings(deadline=None)
@given(worlds(), st.integers(1, 7), st.integers(0, 7))
def test_victims_stay_the_same_while_they_drain(world, wanted, num_prefill_heavy) -> None:
    pods, roles, reports = world
    arguments: Any = {"roles": roles, "num_prefill_heavy": min(num_prefill_heavy, wanted)}
    first = decide_scale(wanted, 8, pods, reports=reports, **arguments)
    marked = [
        make_pod(
            int(pod.name.removeprefix("pod-")),
            is_ready=pod.is_ready,
            has_deletion_cost=pod.engine_id in first.victims,
            is_ending=pod.is_ending,
        )
        for pod in pods
    ]
    busier = {engine_id: make_report(load=99) for engine_id in first.victims}
    assert decide_scale(wanted, 8, marked, reports=busier, **arguments).victims == first.victims


@settings(deadline=None)
@given(worlds(), st.integers(1, 8), st.sampled_from(["0%", "25%", "50%", "100%"]), st.sets(st.integers(0, 7)))
def test_a_plan_names_everybody_who_serves_and_is_made_once(world, replicas, prefill_heavy, leaving_numbers) -> None:
    pods, _, reports = world
    content = make_cluster(replicas=replicas, prefillHeavy=prefill_heavy)
    content["metadata"]["uid"] = "u"
    cluster = check_manifest(content)
    victims = {pod.engine_id for pod in pods if int(pod.name[4:]) in leaving_numbers and pod.is_present}

    def make(stored: StoredPlan) -> Any:
        return make_plan(cluster, stored, pods, victims=victims, reports=reports, statuses=[])

    plan = make(StoredPlan(generation=41))
    assert plan.generation == 42
    stored = StoredPlan(plan=plan, generation=42)
    assert make(stored) is plan
    parts = {part.engine_id: part for part in plan.engines}
    serving = {pod.engine_id for pod in pods if pod.is_present and pod.is_ready}
    assert serving <= set(parts)
    assert {engine_id for engine_id, part in parts.items() if part.is_draining} == victims
    num_serving = len(serving - victims)
    num_prefill_heavy = sum(parts[engine_id].role == 1 for engine_id in serving - victims)
    wanted = resolve_sliders(cluster.spec).num_prefill_heavy
    assert abs(num_prefill_heavy * replicas - wanted * num_serving) < replicas or (
        # Rounded away from a role that would have had no engine.
        num_serving >= 2 and num_prefill_heavy in (1, num_serving - 1)
    )
    if 0 < wanted < replicas and num_serving >= 2:
        assert 0 < num_prefill_heavy < num_serving
