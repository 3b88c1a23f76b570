"""Scale-down and plans as pure functions: properties that hold whatever is observed."""

from __future__ import annotations

from typing import Any

import pytest
from fake_kubernetes import make_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.v1 import control_pb2, plan_pb2
from sluice_core.records import EngineId, Role
from sluice_operator.api import names
from sluice_operator.api.labels import GENERATION_ANNOTATION
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.planning.plan import make_plan
from sluice_operator.planning.plan_store import StoredPlan, read_plan, write_plan
from sluice_operator.planning.scale_down import RemovableEngine, ScaleDecision, choose_victims, decide_scale
from sluice_operator.resources.pods.pod_status import Pod
from sluice_operator.routers.engine_reports import EngineReport


def make_pod(
    number: int,
    *,
    is_ready: bool = True,
    has_deletion_cost: bool = False,
    goes_next: bool = False,
    is_ending: bool = False,
) -> Pod:
    return Pod(
        name=f"pod-{number}",
        engine_id=EngineId(f"e{number}"),
        address="",
        role_label="",
        has_deletion_cost=has_deletion_cost or goes_next,
        goes_next=goes_next,
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
            is_ready=draw(st.integers(0, 3)) > 0,
            has_deletion_cost=draw(st.booleans()),
            goes_next=draw(st.booleans()),
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


@settings(deadline=None, max_examples=400)
@given(worlds(), st.integers(1, 5), st.integers(1, 8), st.integers(0, 8))
def test_replicas_fall_by_those_who_may_go(world, wanted, live, num_prefill_heavy) -> None:
    pods, roles, reports = world
    scale = decide_scale(
        wanted, live, pods, roles=roles, num_prefill_heavy=min(num_prefill_heavy, wanted), reports=reports
    )
    present = [pod for pod in pods if pod.is_present]
    assert min(wanted, live) <= scale.replicas <= max(wanted, live)
    assert scale.undrained <= scale.victims <= {pod.engine_id for pod in present}
    if scale.replicas < live:

        def rank(pod: Pod) -> tuple[bool, int]:
            """Kubernetes' order, once the marks of those who stay after all are taken away."""
            cost = 1 + pod.goes_next if pod.has_deletion_cost and pod.engine_id in scale.victims else 0
            return pod.is_ready, -cost

        num_surplus = max(0, len(present) - scale.replicas)
        # Among equals Kubernetes takes any.
        may_be_taken = [pod for pod in present if rank(pod) in sorted(map(rank, present))[:num_surplus]]
        for pod in may_be_taken:
            if pod.is_ready:
                assert pod.engine_id in scale.victims
                assert pod.goes_next
    if wanted >= live:
        assert scale.replicas == wanted
        assert scale.victims <= {pod.engine_id for pod in present if pod.goes_next}
        assert len(scale.victims) <= max(0, len(present) - wanted)


def test_a_deployment_that_is_gone_is_made_again_as_the_manifest_says() -> None:
    scale = decide_scale(2, None, [make_pod(0), make_pod(1), make_pod(2)], roles={}, num_prefill_heavy=1, reports={})
    assert scale == ScaleDecision(replicas=2)


def test_a_victim_keeps_its_mark_and_gets_no_requests_until_kubernetes_ends_it() -> None:
    pods = [make_pod(0, goes_next=True), make_pod(1), make_pod(2)]
    # The Deployment is lowered already, and the pod is still there.
    scale = decide_scale(2, 2, pods, roles={}, num_prefill_heavy=1, reports={})
    assert (scale.replicas, scale.victims, scale.drained) == (2, {"e0"}, {"e0"})
    assert not scale.undrained
    # Engines beyond the replicas that a surge adds are no victims.
    assert not decide_scale(2, 2, [*pods[1:], make_pod(3)], roles={}, num_prefill_heavy=1, reports={}).victims


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("report", [None, make_report(), make_report(is_drained=True)], ids=["none", "busy", "drained"])
@pytest.mark.parametrize("goes_next", [False, True])
@pytest.mark.parametrize("is_ready", [False, True])
def test_a_victim_goes_when_its_drain_is_over_and_marked_or_it_does_not_serve(
    *, is_ready: bool, goes_next: bool, is_late: bool, report: EngineReport | None
) -> None:
    victim = make_pod(0, is_ready=is_ready, has_deletion_cost=True, goes_next=goes_next)
    scale = decide_scale(
        1,
        2,
        [victim, make_pod(1)],
        roles={},
        num_prefill_heavy=0,
        reports={victim.engine_id: report} if report else {},
        drain_expired={victim.engine_id} if is_late else set(),
    )
    assert scale.victims == {victim.engine_id}
    is_over = goes_next or is_late or (report is not None and report.is_drained)
    assert scale.drained == ({victim.engine_id} if is_over else set())
    may_go = not is_ready or goes_next
    assert scale.replicas == (1 if may_go else 2)
    assert scale.undrained == (set() if may_go else scale.victims)


def test_an_engine_that_does_not_drain_holds_back_no_other() -> None:
    pods = [make_pod(number, has_deletion_cost=number < 2) for number in range(4)]
    reports = {pod.engine_id: make_report(is_drained=pod.name == "pod-0") for pod in pods}
    scale = decide_scale(2, 4, pods, roles={}, num_prefill_heavy=0, reports=reports)
    assert (scale.replicas, scale.drained) == (4, {"e0"})
    pods[0] = make_pod(0, goes_next=True)
    scale = decide_scale(2, 4, pods, roles={}, num_prefill_heavy=0, reports=reports)
    assert scale == ScaleDecision(
        replicas=3, victims=frozenset({"e0", "e1"}), undrained=frozenset({"e1"}), drained=frozenset({"e0"})
    )
    scale = decide_scale(2, 3, pods[1:], roles={}, num_prefill_heavy=0, reports=reports)
    assert (scale.replicas, scale.victims) == (3, {"e1"})


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


def make_next(stored: StoredPlan, pods: list[Pod], *statuses: control_pb2.GetStatusResponse) -> plan_pb2.Plan:
    content = make_cluster(replicas=3)
    content["metadata"]["uid"] = "u"
    return make_plan(check_manifest(content), stored, pods, victims=(), reports={}, statuses=statuses)


def test_an_engine_that_ends_drains_with_the_role_that_it_had() -> None:
    first = make_next(StoredPlan(), [make_pod(number) for number in range(3)])
    roles = {part.engine_id: part.role for part in first.engines}
    ending = [make_pod(number, is_ending=number == 0) for number in range(3)]
    second = make_next(StoredPlan(plan=first, generation=first.generation), ending)
    assert {part.engine_id for part in second.engines if part.is_draining} == {"e0"}
    assert next(part for part in second.engines if part.is_draining).role == roles["e0"]
    assert second.generation == first.generation + 1


@pytest.mark.parametrize(
    ("stored", "reported", "uid", "number"),
    [(0, 0, "u", 1), (41, 0, "u", 42), (41, 50, "u", 51), (41, 50, "another", 42), (41, 7, "u", 42)],
    ids=["first", "next", "routers know more", "of another cluster", "routers know less"],
)
def test_a_plan_has_a_higher_number_than_any_before_it(stored: int, reported: int, uid: str, number: int) -> None:
    status = control_pb2.GetStatusResponse(generation=reported, cluster_uid=uid)
    assert make_next(StoredPlan(generation=stored), [make_pod(0)], status).generation == number


def test_a_plan_that_says_the_same_gets_another_number_where_routers_have_a_higher_one() -> None:
    """As after a restore of the ConfigMap from an old copy: routers would ignore the plan."""
    pods = [make_pod(0)]
    plan = make_next(StoredPlan(), pods)
    stored = StoredPlan(plan=plan, generation=plan.generation)
    status = control_pb2.GetStatusResponse(generation=plan.generation, cluster_uid="u")
    assert make_next(stored, pods, status) is plan
    status.generation += 8
    assert make_next(stored, pods, status).generation == plan.generation + 9


@pytest.mark.parametrize(
    ("annotation", "generation", "uid", "number"),
    [
        ("9", 9, "u", 9),
        ("9", 7, "u", 9),
        ("7", 9, "u", 9),
        ("x", 9, "u", 9),
        ("9", 9, "another", 9),
        ("9", None, "u", 9),
    ],
    ids=["equal", "annotation", "plan", "garbled annotation", "of another cluster", "garbled plan"],
)
def test_the_highest_number_that_a_config_map_names_counts(
    annotation: str, generation: int | None, uid: str, number: int
) -> None:
    text = "{" if generation is None else write_plan(plan_pb2.Plan(generation=generation, cluster_uid=uid))
    annotations = {GENERATION_ANNOTATION: annotation}
    stored = read_plan({"metadata": {"annotations": annotations}, "data": {names.PLAN_FILE: text}}, "u")
    assert stored.generation == number
    assert (stored.plan is not None) == (generation is not None and uid == "u")


@pytest.mark.parametrize(
    ("changes", "victim"),
    [
        pytest.param({}, "b", id="the role that has too many"),
        pytest.param({"a": {"is_victim": True}}, "a", id="a choice stays, whatever the roles are now"),
        pytest.param({"a": {"is_victim": True}, "c": {"is_serving": False}}, "c", id="but none that serves goes first"),
        pytest.param({"c": {"load": 1}, "b": {"load": 2}}, "c", id="the least loaded of that role"),
        pytest.param({"b": {"load": 1}, "c": {"load": 1}}, "c", id="the youngest of equally loaded ones"),
    ],
)
def test_the_next_victim_by_rank(changes: dict[str, dict[str, Any]], victim: str) -> None:
    roles = {"a": Role.PREFILL_HEAVY, "b": Role.DECODE_HEAVY, "c": Role.DECODE_HEAVY}
    defaults = {"a": {"load": 0}, "b": {"load": 0}, "c": {"load": 5}}
    engines = [
        RemovableEngine(
            engine_id=EngineId(name),
            role=role,
            **{"is_serving": True, **defaults[name], **changes.get(name, {})},
        )
        for name, role in roles.items()
    ]
    assert choose_victims(engines, 1, num_prefill_heavy=1) == [victim]
