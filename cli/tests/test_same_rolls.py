"""``sluice up`` and the operator let the same rolls go on, wait and go back: both see the same engines and requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import yaml

from sluice.v1 import control_pb2
from sluice_cli.local_cluster.reconcile.local_roll import LocalRoll
from sluice_cli.local_cluster.reconcile.reconcile_steps import DesiredProcesses
from sluice_core.records import EngineId
from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.api.manifest import parse_manifest
from sluice_operator.controller.cluster_state import ClusterState
from sluice_operator.controller.observation import ObservedRouters, ObservedState
from sluice_operator.controller.rollout_step import decide_rollout
from sluice_operator.planning.roll_observation import RollingEngine
from sluice_operator.resources.deployments.engine_deployment import render_engines
from sluice_operator.resources.deployments.rolling_update import mark_rollout
from sluice_operator.resources.pods.pod_status import Pod
from sluice_operator.resources.rollout_hash import (
    RESTARTS_ENGINES,
    compute_rollout_hash,
    keep_pod_template,
    read_kept_template,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.planning.rollout_gate import GateDecision

GATE = {"durationSeconds": 10, "minAttainment": "90%", "maxErrorRate": "5%", "minRequests": 10, "timeoutSeconds": 60}
IMAGE = "engine:1"
NUM_ENGINES = 3
START_S = 1000


class Moment(NamedTuple):
    """What both programs observe for some seconds.

    Args:
        engines: A letter for each: (o)ld, (n)ew and serving, new and (s)tarting, new and it (r)efuses to start.
        seconds: For how long.
        on_old: Requests that end in a second on each old engine, those that are met, and those that fail.
        on_new: The same of each new one.
        has_router: Whether a router answers.
        edit: Of the manifest, as this moment begins.
    """

    engines: str
    seconds: int
    on_old: tuple[int, int, int] = (2, 2, 0)
    on_new: tuple[int, int, int] = (2, 2, 0)
    has_router: bool = True
    edit: str = ""


class Outcome(NamedTuple):
    """What both decide last: engines that passed, whether the next waits, and why the roll went back, or that it ends.

    ``why`` is a part of the reason.
    """

    num_passed: int = 0
    is_held: bool = False
    why: str = ""
    is_over: bool = False


LATE, BROKEN, IDLE = (2, 1, 0), (2, 2, 2), (0, 0, 0)
PASSED = Outcome(num_passed=1)
OLD: dict[str, Any] = {"drainTimeoutSeconds": 1, "startupTimeoutSeconds": 30}
NEW = {**OLD, "maxModelLen": 1024}
EDITS: dict[str, dict[str, Any]] = {
    "back": {"engine": OLD},
    "other": {"engine": {**OLD, "maxModelLen": 2048}},
    "no gate": {"rollout": {}},
    "paused": {"rollout": {"gate": GATE, "paused": True}},
}
ROLLS: dict[str, tuple[list[Moment], Outcome]] = {
    "it begins": ([Moment("ooo", 1)], Outcome()),
    "a new engine starts": ([Moment("soo", 5)], Outcome()),
    "it serves": ([Moment("soo", 5), Moment("noo", 5)], Outcome(is_held=True)),
    "it served for long enough": ([Moment("soo", 5), Moment("noo", 12)], PASSED),
    "the second one is measured anew": ([Moment("noo", 12), Moment("nno", 5)], Outcome(num_passed=1, is_held=True)),
    "late": ([Moment("noo", 12, on_new=LATE)], Outcome(why="met their objectives")),
    "the second one is late": (
        [Moment("noo", 12), Moment("nso", 3), Moment("nno", 12, on_new=LATE)],
        Outcome(num_passed=1, why="met their objectives"),
    ),
    "errors, at once": ([Moment("noo", 6, on_new=BROKEN)], Outcome(why="failed")),
    "none ends on the new one": ([Moment("noo", 12, on_new=IDLE)], PASSED),
    "no requests": ([Moment("noo", 50, on_old=IDLE, on_new=IDLE)], Outcome(is_held=True)),
    "no requests for too long": ([Moment("noo", 62, on_old=IDLE, on_new=IDLE)], PASSED),
    "no router for too long": ([Moment("noo", 62, has_router=False)], Outcome(why="no router")),
    "it refuses to start": ([Moment("roo", 1)], Outcome(why="sliding window")),
    "it does not start in time": ([Moment("soo", 155)], Outcome(why="did not serve within")),
    "all have passed": ([Moment("noo", 12), Moment("nno", 12), Moment("nnn", 13)], Outcome(is_over=True)),
    "it went back and stays": (
        [Moment("noo", 12, on_new=LATE), Moment("ooo", 30)],
        Outcome(why="met their objectives"),
    ),
    "an edit back": ([Moment("noo", 5), Moment("noo", 1, edit="back")], Outcome(is_over=True)),
    "another edit begins anew": ([Moment("noo", 12, on_new=LATE), Moment("ooo", 3, edit="other")], Outcome()),
    "the gate is taken away": (
        [Moment("noo", 12, on_new=LATE), Moment("noo", 1, edit="no gate")],
        Outcome(is_over=True),
    ),
    "paused": ([Moment("noo", 5), Moment("noo", 30, on_new=LATE, edit="paused")], Outcome()),
}


def parse(**spec: Any) -> ServingCluster:
    content = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "ServingCluster",
        "metadata": {"name": "test", "namespace": "default", "uid": "u"},
        "spec": {
            "replicas": NUM_ENGINES,
            "prefillHeavy": 1,
            "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
            "strategy": "TaiChi",
            "slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50},
            "model": {"name": "tiny", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "rollout": {"gate": GATE},
            **spec,
        },
    }
    return parse_manifest(yaml.safe_dump(content))


def name_engine(number: int) -> EngineId:
    return EngineId(f"engine-{number}")


class OperatorRoll:
    """The operator's side: what it decides is stored on a Deployment, as it does."""

    def __init__(self, cluster: ServingCluster) -> None:
        self.deployment = keep_pod_template(render_engines(cluster, NUM_ENGINES, IMAGE), None)
        self.state = ClusterState(first_reconcile_s=0, tuner=None, scaler=None)  # type: ignore[arg-type]
        self.old_hash = self.hash(cluster)

    def hash(self, cluster: ServingCluster) -> str:
        return compute_rollout_hash(cluster.spec, RESTARTS_ENGINES, IMAGE)

    def decide(
        self, cluster: ServingCluster, engines: str, statuses: Sequence[control_pb2.GetStatusResponse], now: float
    ) -> GateDecision:
        for status in statuses:
            self.state.rolling.outcomes.take(status)
        found = tuple(self.make_pod(number, letter, self.hash(cluster)) for number, letter in enumerate(engines))
        observed = ObservedState(
            body={}, live={}, pods={}, engines=found, routers=(), has_monitors=False, has_cert_manager=False
        )
        reported = ObservedRouters(statuses={status.router_id: status for status in statuses}, reports={})
        decision = decide_rollout(
            cluster, self.deployment, observed, reported, self.state, default_image=IMAGE, now=now, wall_s=now
        )
        rendered = keep_pod_template(render_engines(cluster, NUM_ENGINES, IMAGE), self.deployment)
        self.deployment = mark_rollout(rendered, decision.state, is_held=decision.is_held)
        return decision

    def make_pod(self, number: int, letter: str, new_hash: str) -> Pod:
        return Pod(
            name=name_engine(number),
            engine_id=name_engine(number),
            address="",
            role_label="",
            has_deletion_cost=False,
            is_ready=letter in "on",
            is_ending=False,
            has_ended=False,
            failure=Failure(reason=Reason.ENGINE_REFUSED, message="sliding window") if letter == "r" else None,
            restart_hash=self.old_hash if letter == "o" else new_hash,
        )

    def is_back(self, template: Any) -> bool:
        return bool(read_kept_template(self.deployment) == template)


class Launcher:
    """The side of ``sluice up``."""

    def __init__(self, cluster: ServingCluster) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.roll = LocalRoll(cluster, self.hash(cluster), report=self.lines.append, clock=lambda: self.now)

    def hash(self, cluster: ServingCluster) -> str:
        return f"maxModelLen {cluster.spec.engine.max_model_len}"

    def decide(
        self, cluster: ServingCluster, engines: str, statuses: Sequence[control_pb2.GetStatusResponse], now: float
    ) -> DesiredProcesses:
        self.now = now
        self.roll.take(statuses)
        found = [
            RollingEngine(
                engine_id=name_engine(number),
                restart_hash="maxModelLen None" if letter == "o" else self.hash(cluster),
                is_ready=letter in "on",
                refusal="sliding window" if letter == "r" else "",
            )
            for number, letter in enumerate(engines)
        ]
        self.roll.follow(cluster, self.hash(cluster), found, has_reports=bool(statuses))
        return self.roll.restrain(
            DesiredProcesses(
                compatibility_key="",
                engine_hash=self.hash(cluster),
                router_hash="",
                num_engines=NUM_ENGINES,
                routers=("router-0",),
                num_prefill_heavy=1,
                is_paused=cluster.spec.rollout.paused,
            )
        )


@pytest.mark.parametrize(("moments", "outcome"), ROLLS.values(), ids=ROLLS)
def test_the_same_rolls_go_on_wait_and_go_back(moments: list[Moment], outcome: Outcome) -> None:
    old, cluster = parse(engine=OLD), parse(engine=NEW)
    operator, launcher = OperatorRoll(old), Launcher(old)
    former = read_kept_template(operator.deployment)
    counts = dict.fromkeys(map(name_engine, range(NUM_ENGINES)), (0, 0, 0))
    now = START_S
    for moment in moments:
        cluster = parse(**{"engine": NEW, **EDITS[moment.edit]}) if moment.edit else cluster
        for _ in range(moment.seconds):
            for (engine_id, before), letter in zip(list(counts.items()), moment.engines, strict=True):
                grown = {"o": moment.on_old, "n": moment.on_new}.get(letter, IDLE)
                counts[engine_id] = tuple(map(sum, zip(before, grown, strict=True)))  # type: ignore[assignment]
            statuses = [make_status(counts)] if moment.has_router else []
            decision = operator.decide(cluster, moment.engines, statuses, now)
            desired = launcher.decide(cluster, moment.engines, statuses, now)
            now += 1
    state, local = decision.state, launcher.roll.state
    assert (state is None) == (local is None) == outcome.is_over
    if state is not None and local is not None:
        assert (state.num_passed, state.num_unmeasured, state.failure, state.since_s, state.measured_since_s) == (
            (local.num_passed, local.num_unmeasured, local.failure, local.since_s, local.measured_since_s)
        )
        assert (state.num_passed, bool(state.failure)) == (outcome.num_passed, bool(outcome.why))
        assert outcome.why in state.failure
    assert operator.is_back(former) == (desired.engine_hash == "maxModelLen None")
    is_paused = operator.deployment["spec"]["paused"]
    assert is_paused == desired.is_paused == (outcome.is_held or cluster.spec.rollout.paused)


def make_status(counts: dict[EngineId, tuple[int, int, int]]) -> control_pb2.GetStatusResponse:
    num_ended, num_met, num_failed = map(sum, zip(*counts.values(), strict=True))
    return control_pb2.GetStatusResponse(
        router_id="r",
        num_failed=num_failed,
        classes=[control_pb2.ClassCounters(num_finished=num_ended, num_met_both=num_met)],
        engines=[
            control_pb2.EngineStatus(engine_id=name, num_ended=ended, num_met_both=met, num_failed=failed)
            for name, (ended, met, failed) in counts.items()
        ],
    )
