"""``sluice up`` and the operator read one manifest alike: both get the same situations, and must decide the same."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from sluice.v1 import control_pb2
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.cluster_plan import ClusterPlan
from sluice_cli.local_cluster.local_autotune import LocalAutotuner
from sluice_cli.local_cluster.reconcile.desired_processes import make_desired_processes
from sluice_cli.local_cluster.reconcile.reconcile_steps import (
    DesiredProcesses,
    ObservedProcesses,
    RemoveEngines,
    RestartEngine,
    next_step,
)
from sluice_core.records import EngineId, Role
from sluice_core.slo_attainment import SloCounts
from sluice_operator.api import names
from sluice_operator.api.manifest import ManifestError, parse_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders, resolve_strategy
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.tuner import Tuner, TunerInputs
from sluice_operator.controller.preconditions import check_cluster
from sluice_operator.planning.plan import make_plan
from sluice_operator.planning.plan_message import render_plan
from sluice_operator.planning.plan_store import StoredPlan
from sluice_operator.planning.scale_down import decide_scale
from sluice_operator.resources.deployments.engine_deployment import render_engines
from sluice_operator.resources.pods.pod_status import Pod
from sluice_operator.resources.pods.secrets import describe_security, locate_in_pod
from sluice_operator.resources.rollout_hash import RESTARTS_ENGINES, RESTARTS_ROUTERS, compute_rollout_hash
from sluice_operator.routers.engine_reports import EngineReport
from sluice_operator.settings import OperatorSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sluice_operator.api.serving_cluster import ServingCluster, ServingClusterSpec
    from sluice_operator.autotune.condition import AutotuneStatus

P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY


class Engine(NamedTuple):
    """An engine as both programs observe it."""

    role: Role | None
    load: int = 0
    is_serving: bool = True


def make_manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "ServingCluster",
        "metadata": {"name": "test", "namespace": "default", "uid": "u"},
        "spec": {
            "replicas": 4,
            "prefillHeavy": "50%",
            "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
            "strategy": "TaiChi",
            "slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50},
            "model": {"name": "tiny", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
            **spec,
        },
    }


def parse(**spec: Any) -> ServingCluster:
    return parse_manifest(yaml.safe_dump(make_manifest(**spec)))


def make_pods(engines: Sequence[Engine]) -> list[Pod]:
    return [
        Pod(
            name=f"pod-{number}",
            engine_id=EngineId(f"engine-{number}"),
            address="",
            role_label="",
            has_deletion_cost=False,
            is_ready=engine.is_serving,
            is_ending=False,
            has_ended=False,
            failure=None,
            created=f"2026-01-01T00:00:{number:02}Z",
        )
        for number, engine in enumerate(engines)
    ]


def make_reports(engines: Sequence[Engine]) -> dict[EngineId, EngineReport]:
    return {
        EngineId(f"engine-{number}"): EngineReport(
            role=engine.role,
            chunk_size_tokens=0,
            acknowledged_generation=0,
            is_drained=False,
            load=engine.load,
            transport="",
            fault="",
        )
        for number, engine in enumerate(engines)
    }


def list_roles(engines: Sequence[Engine]) -> dict[EngineId, Role]:
    return {EngineId(f"engine-{n}"): engine.role for n, engine in enumerate(engines) if engine.role is not None}


@pytest.mark.parametrize(
    ("engines", "num_engines", "num_prefill_heavy", "victims"),
    [
        pytest.param([Engine(P), Engine(D), Engine(D)], 2, 1, {2}, id="the youngest of the role with too many"),
        pytest.param([Engine(P), Engine(D, 1), Engine(D, 2)], 2, 1, {1}, id="the least loaded of that role"),
        pytest.param([Engine(P), Engine(P), Engine(D), Engine(D)], 2, 1, {1, 3}, id="one of each role"),
        pytest.param([Engine(P), Engine(P, 9), Engine(D)], 2, 2, {2}, id="P-heavy ones stay where all are wanted"),
        pytest.param([Engine(P), Engine(D), Engine(D)], 2, 0, {0}, id="the only P-heavy one where none is wanted"),
        pytest.param([Engine(P), Engine(P), Engine(D)], 1, 1, {1, 2}, id="both roles have too many"),
        pytest.param(
            [Engine(P, is_serving=False), Engine(D), Engine(D)], 2, 1, {0}, id="one that does not serve goes first"
        ),
        pytest.param([Engine(P), Engine(D, 5), Engine(None)], 2, 1, {2}, id="one without a role and without requests"),
    ],
)
def test_the_same_engines_leave(
    engines: list[Engine], num_engines: int, num_prefill_heavy: int, victims: set[int]
) -> None:
    expected = {EngineId(f"engine-{number}") for number in victims}
    scale = decide_scale(
        num_engines,
        len(engines),
        make_pods(engines),
        roles=list_roles(engines),
        num_prefill_heavy=num_prefill_heavy,
        reports=make_reports(engines),
    )
    reports = make_reports(engines)
    step = next_step(
        ObservedProcesses(
            compatibility_key="",
            engines=dict.fromkeys(reports, ""),
            routers={},
            roles=list_roles(engines),
            loads={engine_id: report.load for engine_id, report in reports.items()},
            serving={EngineId(f"engine-{n}") for n, engine in enumerate(engines) if engine.is_serving},
        ),
        DesiredProcesses(
            compatibility_key="",
            engine_hash="",
            router_hash="",
            num_engines=num_engines,
            routers=(),
            num_prefill_heavy=num_prefill_heavy,
        ),
    )
    assert isinstance(step, RemoveEngines)
    assert set(step.engine_ids) == scale.victims == expected


@pytest.mark.parametrize(
    ("engines", "prefill_heavy", "roles"),
    [
        pytest.param([Engine(None)] * 4, "50%", [P, P, D, D], id="new engines"),
        pytest.param([Engine(P), Engine(P), Engine(D), Engine(D)], 1, [D, P, D, D], id="one role changes"),
        pytest.param(
            [Engine(P, 3), Engine(P, 1), Engine(D), Engine(D)], 1, [P, D, D, D], id="the least loaded changes"
        ),
        pytest.param([Engine(D), Engine(P), Engine(D), Engine(P)], "50%", [D, P, D, P], id="roles stay where they fit"),
        pytest.param([Engine(P), Engine(D), Engine(None), Engine(None)], "75%", [P, D, P, P], id="joiners fill up"),
        pytest.param([Engine(P), Engine(D)], 0, [D, D], id="none"),
        pytest.param(
            [Engine(P), Engine(P), Engine(D), Engine(D), *[Engine(None, is_serving=False)] * 4],
            "50%",
            [P, P, D, D, None, None, None, None],
            id="scaled to twice the size, the new ones load",
        ),
        pytest.param(
            [Engine(P), Engine(P), Engine(D), Engine(D), Engine(None), *[Engine(None, is_serving=False)] * 3],
            6,
            [P, P, D, D, P, None, None, None],
            id="a joiner takes the role that is missing",
        ),
        pytest.param(
            [Engine(P), Engine(P), Engine(P), Engine(P), *[Engine(D, is_serving=False)] * 4],
            "50%",
            [D, D, P, P, D, D, D, D],
            id="every D-heavy one is lost",
        ),
        pytest.param(
            [Engine(P, is_serving=False), Engine(P), Engine(D), Engine(D)], "50%", [P, P, D, D], id="one is away"
        ),
        pytest.param(
            [Engine(P, is_serving=False), Engine(D), Engine(D)], 1, [P, P, D], id="the only P-heavy one is away"
        ),
        pytest.param([Engine(P, is_serving=False), Engine(D, is_serving=False)], 1, [P, D], id="all are away"),
    ],
)
def test_the_same_engines_get_the_same_roles(
    engines: list[Engine], prefill_heavy: Any, roles: list[Role | None], tmp_path: Path
) -> None:
    cluster = parse(replicas=len(engines), prefillHeavy=prefill_heavy)
    loads = {engine_id: report.load for engine_id, report in make_reports(engines).items()}
    before = render_plan(cluster, list_roles(engines), generation=1, cluster_uid="u", draining=set())
    stored = StoredPlan(plan=before, generation=1)
    operator_plan = make_plan(
        cluster, stored, make_pods(engines), victims=(), reports=make_reports(engines), statuses=()
    )

    directory = ClusterDirectory("test", tmp_path)
    directory.path.mkdir(parents=True)
    local = ClusterPlan(directory)
    local.roles = list_roles(engines)
    serving = {EngineId(f"engine-{n}") for n, engine in enumerate(engines) if engine.is_serving}
    plan = local.update(cluster, loads, loads, serving)
    assert plan is not None
    assert list(operator_plan.engines) == sorted(plan.engines, key=lambda engine: engine.engine_id)
    assert [StoredPlan(plan=operator_plan).roles.get(engine_id) for engine_id in sorted(loads)] == roles
    operator_plan.generation = plan.generation
    operator_plan.cluster_uid = plan.cluster_uid
    assert operator_plan == plan


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"replicas": 0}, id="no engine"),
        pytest.param({"prefillHeavy": 9}, id="more P-heavy engines than there are"),
        pytest.param({"chunkSizes": {"prefillHeavy": -1, "decodeHeavy": 64}}, id="a negative chunk size"),
        pytest.param({"slo": {"ttftMilliseconds": 0, "tpotMilliseconds": 50}}, id="an objective of zero"),
        pytest.param({"strategy": "Guess"}, id="an unknown strategy"),
        pytest.param({"engnie": {}}, id="a misspelt field"),
    ],
)
def test_the_same_manifests_are_refused_for_the_same_reasons(spec: dict[str, Any]) -> None:
    body = make_manifest(**spec)
    with pytest.raises(ManifestError) as refused:
        parse_manifest(yaml.safe_dump(body))
    cluster, failure = check_cluster(json.loads(json.dumps(body)), OperatorSettings(identity="a", namespace="s"))
    assert cluster is None
    assert failure is not None
    assert failure.message == "; ".join(map(str, refused.value.problems))


@pytest.mark.parametrize(
    ("edit", "restarted"),
    [
        pytest.param({"prefillHeavy": 1}, set(), id="slider"),
        pytest.param({"chunkSizes": {"prefillHeavy": 256, "decodeHeavy": 64}}, set(), id="chunk size"),
        pytest.param({"slo": {"ttftMilliseconds": 900, "tpotMilliseconds": 90}}, set(), id="objectives"),
        pytest.param({"strategy": "Aggregated"}, set(), id="strategy"),
        pytest.param({"engine": {"drainTimeoutSeconds": 7}}, {"engine"}, id="drain timeout"),
        pytest.param({"engine": {"resumeTimeoutSeconds": 7}}, {"engine"}, id="resume timeout"),
        pytest.param({"router": {"drainTimeoutSeconds": 7}}, {"router"}, id="drain timeout of routers"),
        pytest.param({"autotune": {"mode": "Recommend"}}, set(), id="autotune"),
        pytest.param({"engine": {"maxBatchTokens": 4096}}, {"engine"}, id="largest batch"),
        pytest.param({"engine": {"maxModelLen": 1024}}, {"engine"}, id="longest request"),
        pytest.param({"engine": {"extraArgs": ["--seed=7"]}}, {"engine"}, id="arguments of vLLM"),
        pytest.param({"engine": {"env": [{"name": "A", "value": "b"}]}}, {"engine"}, id="environment of engines"),
        pytest.param({"router": {"env": [{"name": "A", "value": "b"}]}}, {"router"}, id="environment of routers"),
    ],
)
def test_the_same_edits_restart_the_same_pods(edit: dict[str, Any], restarted: set[str]) -> None:
    old, new = parse(), parse(**edit)

    def hash_locally(cluster: ServingCluster) -> dict[str, str]:
        security = describe_security(cluster, names.ROUTER, locate_in_pod, "")
        state = make_desired_processes(cluster.spec, cluster.spec, http_port=8000, router_security=security)
        return {"engine": state.engine_hash + state.compatibility_key, "router": state.router_hash}

    def hash_in_operator(cluster: ServingCluster) -> dict[str, str]:
        effects = {"engine": RESTARTS_ENGINES, "router": RESTARTS_ROUTERS}
        return {part: compute_rollout_hash(cluster.spec, fields, "image") for part, fields in effects.items()}

    for hash_parts in (hash_locally, hash_in_operator):
        before, after = hash_parts(old), hash_parts(new)
        assert {part for part in before if before[part] != after[part]} == restarted


@pytest.mark.parametrize(
    ("rollout", "is_paused"),
    [pytest.param({}, False, id="by default"), pytest.param({"paused": True}, True, id="paused")],
)
def test_a_roll_replaces_as_many_engines_at_once_and_stops_at_the_same_word(
    rollout: dict[str, Any], *, is_paused: bool
) -> None:
    """``sluice up`` chooses the next engine itself, the oldest old one.

    In Kubernetes the Deployment's controller chooses it. So what the operator decides is compared: how many engines may
    be away or beyond replicas, and whether the roll is paused.
    """
    old, cluster = parse(replicas=3), parse(replicas=3, rollout=rollout, engine={"maxModelLen": 1024})
    deployment = render_engines(cluster, cluster.spec.replicas, "engine:1")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert deployment["paused"] == is_paused

    security = describe_security(cluster, names.ROUTER, locate_in_pod, "")
    before, desired = (
        make_desired_processes(each.spec, each.spec, http_port=8000, router_security=security)
        for each in (old, cluster)
    )
    engines = dict.fromkeys([EngineId("engine-2"), EngineId("engine-0"), EngineId("engine-1")], before.engine_hash)
    routers = dict.fromkeys(desired.routers, desired.router_hash)
    restarted: list[EngineId] = []
    while len(restarted) <= len(engines):
        step = next_step(
            ObservedProcesses(
                compatibility_key=desired.compatibility_key,
                engines=engines,
                routers=routers,
                roles={},
                loads={},
                serving=set(engines),
            ),
            desired,
        )
        if step is None:
            break
        # One engine per step, and a step is carried out to its end: none beyond replicas, one away.
        assert isinstance(step, RestartEngine)
        engines[step.engine_id] = desired.engine_hash
        restarted.append(step.engine_id)
    assert restarted == ([] if is_paused else list(engines))


FOUND = Sliders(num_prefill_heavy=3, prefill_heavy_tokens=1024, decode_heavy_tokens=128)
BOUNDS = {
    "prefillHeavy": {"min": 1, "max": 3},
    "chunkSizes": {"prefillHeavy": {"min": 256, "max": 2048}, "decodeHeavy": {"min": 0, "max": 256}},
}


async def find_sliders(request: SearchRequest) -> SearchResult:
    return SearchResult(
        sliders=replace(FOUND, strategy="flowprefill" if request.constraints.chooses_strategy else ""),
        goodput_rps=3.0,
        attainment=0.93,
        in_force_goodput_rps=2.0,
        in_force_attainment=0.7,
        least_gain=0.4,
    )


async def tune_both(
    cluster: ServingCluster, num_samples: int, tmp_path: Path, *, is_settled: bool = True
) -> tuple[list[ServingClusterSpec], AutotuneStatus]:
    """The operator goes by its ``Tuner``, ``sluice up`` by one in ``LocalAutotuner``; both are told the same.

    Returns:
        What they put in force, one after the other, and what both say in the end.
    """
    sample = control_pb2.RequestSample(gap_s=0.5, prompt_tokens=500, output_tokens=50)
    status = control_pb2.GetStatusResponse(router_id="r", samples=[sample] * num_samples)
    now_s = 0.0
    directory = ClusterDirectory("test", tmp_path)
    directory.path.mkdir(parents=True)
    local = LocalAutotuner(directory, report=lambda _: None, wake=lambda: None, clock=lambda: now_s, ask=find_sliders)
    tuner = Tuner(find_sliders, enqueue=lambda: None, now=lambda: now_s)
    specs = []
    for num_requests in (0, 50, 100, 150):
        counts = SloCounts(
            num_finished=num_requests, num_met_ttft=num_requests, num_met_tpot=num_requests, num_met_both=num_requests
        )
        inputs = TunerInputs(cluster=cluster, statuses=[status], counts=counts, is_settled=is_settled)
        specs.append(tuner.update(inputs).spec)
        assert local.reconcile(inputs).spec == specs[-1]
        said = tuner.describe_status()
        assert said is not None
        assert (local.status.reason if local.status else "Off") == said.reason
        for _ in range(5):
            await asyncio.sleep(0)
        now_s += 20.0
    return specs, said


@pytest.mark.parametrize(
    ("autotune", "num_samples", "is_settled", "reason"),
    [
        pytest.param({}, 100, True, "Off", id="disabled"),
        pytest.param({"mode": "Recommend"}, 100, True, "Recommended", id="recommend"),
        pytest.param({"mode": "Apply", "bounds": BOUNDS, "cooldownSeconds": 10}, 100, True, "Tuned", id="apply"),
        pytest.param(
            {"mode": "Apply", "bounds": BOUNDS, "cooldownSeconds": 10},
            100,
            False,
            "Measuring",
            id="engines come and go",
        ),
        pytest.param({"mode": "Apply"}, 100, True, "NothingToTune", id="no bounds"),
        pytest.param({"mode": "Apply", "bounds": BOUNDS}, 3, True, "NoSample", id="too few requests"),
    ],
)
async def test_the_same_requests_put_the_same_sliders_in_force(
    autotune: dict[str, Any], num_samples: int, reason: str, tmp_path: Path, *, is_settled: bool
) -> None:
    cluster = parse(autotune=autotune, engine={"emulation": {"gpu": "a100-80g", "model": "qwen2.5-14b"}})
    specs, said = await tune_both(cluster, num_samples, tmp_path, is_settled=is_settled)
    in_force = resolve_sliders(specs[-1])
    assert said.reason == reason
    assert (in_force == FOUND) == (reason == "Tuned")


@pytest.mark.parametrize(
    ("mode", "num_samples", "strategies"),
    [
        pytest.param("Apply", 100, ["Sluice", "FlowPrefill", "FlowPrefill", "FlowPrefill"], id="apply"),
        pytest.param("Apply", 3, ["Sluice"] * 4, id="too few requests"),
        pytest.param("Recommend", 100, ["Sluice"] * 4, id="recommend"),
    ],
)
async def test_the_same_requests_choose_the_same_strategy(
    mode: str, num_samples: int, strategies: list[str], tmp_path: Path
) -> None:
    cluster = parse(
        strategy="Auto",
        autotune={"mode": mode, "cooldownSeconds": 10},
        engine={"emulation": {"gpu": "a100-80g", "model": "qwen2.5-14b"}},
    )
    specs, _ = await tune_both(cluster, num_samples, tmp_path)
    assert [resolve_strategy(spec).title for spec in specs] == strategies
