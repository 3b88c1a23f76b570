"""The plan step and the rollout step on what was observed, without the reconciles around them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fake_kubernetes import make_cluster
from test_planning_rules import POD

from sluice.v1 import control_pb2, plan_pb2
from sluice_core.records import EngineId, Role
from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.api.labels import (
    DEFAULT_IMAGE_ANNOTATION,
    RESTART_HASH_ANNOTATION,
    ROLLOUT_ANNOTATION,
    TEMPLATE_ANNOTATION,
)
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.model_identity import identify_model
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.controller import plan_step
from sluice_operator.controller.observation import ObservedRouters, ObservedState
from sluice_operator.controller.rollout_step import SwitchOutcome, decide_rollout, switch_models
from sluice_operator.planning.model_switch import ModelSwitch, SplitStep
from sluice_operator.planning.plan_store import StoredPlan
from sluice_operator.planning.roll_observation import RollMeasurement
from sluice_operator.planning.rollout_gate import RollFacts, decide_gate
from sluice_operator.planning.scale_down import ScaleDecision
from sluice_operator.resources.rollout_hash import RESTARTS_ENGINES, compute_rollout_hash
from sluice_operator.resources.rollout_state import RolloutState
from sluice_operator.routers.engine_outcomes import Outcomes
from sluice_operator.routers.engine_reports import EngineReport

if TYPE_CHECKING:
    from sluice_operator.resources.pods.pod_status import Pod

UID = "u"
REPORT = EngineReport(
    role=Role.DECODE_HEAVY,
    chunk_size_tokens=256,
    acknowledged_generation=7,
    is_drained=False,
    load=0,
    transport="",
    fault="",
)


def make_engines(count: int, *, first: int = 1, **changes: Any) -> tuple[Pod, ...]:
    numbers = range(first, first + count)
    made = [replace(POD, name=f"e{number}", engine_id=EngineId(f"e{number}"), model_id="m") for number in numbers]
    return tuple(replace(pod, **changes) for pod in made)


def observe(engines: tuple[Pod, ...], *, replicas: int | None = None, **fields: Any) -> ObservedState:
    """What the API server says of a cluster with these engines; ``replicas`` of their Deployment, if there is one."""
    body = make_cluster(**fields.pop("spec", {}))
    body["metadata"]["uid"] = UID
    live = {}
    if replicas is not None:
        metadata = {"name": "tiny-engine", "ownerReferences": [{"controller": True, "uid": UID}]}
        live["Deployment", "tiny-engine"] = {"metadata": metadata, "spec": {"replicas": replicas}}
    values: dict[str, Any] = {"live": live, "pods": {}, "routers": (), **fields}
    return ObservedState(body=body, engines=engines, has_monitors=False, has_cert_manager=False, **values)


def read_cluster(observed: ObservedState) -> Any:
    return check_manifest({name: value for name, value in observed.body.items() if name != "status"})


# --- whether a cluster is settled

SETTLED = {f"e{number}": REPORT for number in (1, 2)}
PLAN = plan_pb2.Plan(generation=7, engines=[plan_pb2.EnginePlan(engine_id=name) for name in SETTLED])
IN_FORCE = {"r1": control_pb2.GetStatusResponse(generation=7)}

ENDING = make_engines(1, first=3, is_ending=True, is_ready=False, model_id="o")


@pytest.mark.parametrize(
    ("engines", "plan", "reports", "statuses", "verdict"),
    [
        (make_engines(2), PLAN, SETTLED, IN_FORCE, True),
        (make_engines(2) + ENDING, PLAN, SETTLED, IN_FORCE, True),
        (make_engines(1), PLAN, SETTLED, IN_FORCE, False),
        (make_engines(3), PLAN, SETTLED, IN_FORCE, False),
        (make_engines(1) + make_engines(1, first=2, is_ready=False), PLAN, SETTLED, IN_FORCE, False),
        (make_engines(1) + make_engines(1, first=2, is_ending=True), PLAN, SETTLED, IN_FORCE, False),
        (make_engines(1) + make_engines(1, first=2, model_id="other"), PLAN, SETTLED, IN_FORCE, False),
        (make_engines(2), None, SETTLED, IN_FORCE, False),
        (make_engines(2), PLAN, {"e1": REPORT}, IN_FORCE, False),
        (make_engines(2), PLAN, {**SETTLED, "e2": replace(REPORT, acknowledged_generation=6)}, IN_FORCE, False),
        (make_engines(2), PLAN, SETTLED, {**IN_FORCE, "r2": control_pb2.GetStatusResponse(generation=6)}, False),
        (make_engines(2), PLAN, SETTLED, {}, False),
    ],
    ids=[
        "settled",
        "one ends beside it",
        "too few",
        "too many",
        "one starts",
        "one of them ends",
        "two models",
        "no plan yet",
        "an engine that no router knows",
        "an engine is late",
        "a router is late",
        "no router answers",
    ],
)
def test_a_cluster_is_settled_with_all_its_engines_and_the_plan_in_force(
    engines, plan, reports, statuses, verdict
) -> None:
    observed = observe(engines, spec={"replicas": 2})
    reported = ObservedRouters(statuses=statuses, reports=reports)
    stored = StoredPlan(plan=plan, generation=7)
    assert plan_step.is_settled(read_cluster(observed), observed, stored, reported) is verdict


# --- what scaler and tuner are given, and what becomes of what they say


@dataclass
class Deciders:
    """A scaler and a tuner that note what they are given, and say what the test wants."""

    given: list[Any] = field(default_factory=list)
    replicas: int = 3
    is_on_trial: bool = True
    stored: Any = "what a decider stores"

    def update(self, inputs: Any) -> Any:
        self.given.append(inputs)
        return self.replicas if hasattr(inputs, "start_s") else inputs.cluster

    def find_sliders(self, asked: object) -> tuple[str, object]:
        return "sliders for", asked

    def search_if_due(self) -> None:
        self.given.append("a search is due")


def make_state(deciders: Deciders) -> Any:
    window = SimpleNamespace(total=SloCounts(num_finished=9))
    return SimpleNamespace(
        tuner=deciders, scaler=deciders, window=window, drain_started_s={}, tuner_inputs=None, rolling=RollMeasurement()
    )


TUNED: Any = SimpleNamespace()
SCALE = StoredScale(basis=4, replicas=3)


@pytest.mark.parametrize(
    ("starts_s", "start_s"), [((), None), ((None, None), None), ((30.0, None, 90.0), 60.0), ((5.0, 7.0, 80.0), 7.0)]
)
def test_the_scaler_hears_of_routers_trials_and_how_long_engines_take_to_start(
    starts_s: tuple[float | None, ...], start_s: float | None
) -> None:
    deciders = Deciders()
    engines = [replace(pod, started_in_s=at) for pod, at in zip(make_engines(len(starts_s)), starts_s, strict=True)]
    observed = observe(tuple(engines), spec={"replicas": 4})
    stored = StoredPlan(scale=SCALE)
    reported = ObservedRouters(statuses=IN_FORCE, reports={})
    sized = plan_step._size(read_cluster(observed), observed, reported, stored, make_state(deciders))
    (given,) = deciders.given
    assert (given.cluster.spec.replicas, sized.spec.replicas) == (4, 3)
    assert (given.statuses, given.start_s, given.is_trial, given.stored) == (
        list(IN_FORCE.values()),
        start_s,
        True,
        SCALE,
    )
    assert given.find_sliders("a spec") == ("sliders for", "a spec")


@pytest.mark.parametrize(("leaving", "is_settled"), [((), True), (("e1",), False)])
def test_the_tuner_hears_whether_all_is_settled_and_nobody_leaves(
    leaving: tuple[str, ...], *, is_settled: bool
) -> None:
    deciders = Deciders()
    state = make_state(deciders)
    observed = observe(make_engines(2), spec={"replicas": 2})
    stored = StoredPlan(plan=PLAN, generation=7, tuned=TUNED)
    reported = ObservedRouters(statuses=IN_FORCE, reports=SETTLED)
    cluster = read_cluster(observed)
    assert plan_step._tune(cluster, observed, reported, stored, state, leaving=leaving) is cluster
    given, then = deciders.given
    assert then == "a search is due"
    assert state.tuner_inputs is given
    assert (given.cluster, given.counts, given.stored) == (cluster, state.window.total, TUNED)
    assert (given.statuses, given.is_settled) == (list(IN_FORCE.values()), is_settled)
    assert given.sized == ("sliders for", 2)


def scale(observed: ObservedState, reported: ObservedRouters, state: Any, **fields: Any) -> ScaleDecision:
    values = {"leaving": (), "now": 1000.0, "wall_s": 5000.0, **fields}
    stored = StoredPlan(plan=PLAN, generation=7)
    return plan_step._scale(read_cluster(observed), observed, reported, stored, state=state, **values)


DRAINED = {f"e{number}": replace(REPORT, is_drained=number == 2, load=9 - number) for number in (1, 2, 3)}


@pytest.mark.parametrize(
    ("generations", "drained"), [((7, 7), {"e3", "e2"}), ((8, 9), {"e3", "e2"}), ((7, 6), {"e3"}), ((6, 6), {"e3"})]
)
def test_a_drain_is_over_when_routers_that_have_the_plan_say_so(
    generations: tuple[int, ...], drained: set[str]
) -> None:
    engines = make_engines(2, has_deletion_cost=True) + make_engines(1, first=3, has_deletion_cost=True, goes_next=True)
    observed = observe(engines, replicas=3, spec={"replicas": 1, "prefillHeavy": 0})
    statuses = {f"r{number}": control_pb2.GetStatusResponse(generation=each) for number, each in enumerate(generations)}
    found = scale(observed, ObservedRouters(statuses=statuses, reports=DRAINED), make_state(Deciders()))
    assert found.victims == {"e2", "e3"}
    assert found.drained == drained
    assert (found.undrained, found.replicas) == ({"e2"}, 2)


def test_a_drain_begins_once_and_ends_with_its_time() -> None:
    observed = observe(make_engines(3), replicas=3, spec={"replicas": 1, "engine": {"drainTimeoutSeconds": 60}})
    reported = ObservedRouters(statuses=IN_FORCE, reports=dict.fromkeys(("e1", "e2", "e3"), REPORT))
    state = make_state(Deciders())
    first = scale(observed, reported, state, now=1000.0)
    assert (len(first.victims), first.drained) == (2, frozenset())
    assert state.drain_started_s == dict.fromkeys(first.victims, 1000.0)
    for now, has_expired in ((1010.0, False), (1064.9, False), (1065.0, True)):
        found = scale(observed, reported, state, now=now)
        assert found.victims == first.victims
        assert found.drained == (first.victims if has_expired else frozenset())
        assert state.drain_started_s == dict.fromkeys(first.victims, 1000.0)
    # Who stays after all, and leaves later, has its whole time again.
    staying = observe(make_engines(3), replicas=3, spec={"replicas": 3})
    assert scale(staying, reported, state, now=1070.0).victims == frozenset()
    assert state.drain_started_s == {}


def test_a_drain_that_another_process_began_goes_on_by_the_pods_mark() -> None:
    engines = make_engines(1) + make_engines(1, first=2, has_deletion_cost=True, draining_since_s=4950.0)
    observed = observe(engines, replicas=2, spec={"replicas": 1, "engine": {"drainTimeoutSeconds": 60}})
    reported = ObservedRouters(statuses=IN_FORCE, reports={})
    state = make_state(Deciders())
    assert scale(observed, reported, state, now=1000.0, wall_s=5000.0).drained == frozenset()
    assert state.drain_started_s == {"e2": 950.0}
    assert scale(observed, reported, state, now=1015.0, wall_s=9.0).drained == {"e2"}


def test_who_leaves_with_its_node_is_chosen_first_and_nobody_before_there_is_a_deployment() -> None:
    reported = ObservedRouters(statuses=IN_FORCE, reports={})
    observed = observe(make_engines(3), replicas=3, spec={"replicas": 2, "prefillHeavy": 0})
    assert scale(observed, reported, make_state(Deciders()), leaving=("e1",)).victims == {"e1"}
    assert scale(observed, reported, make_state(Deciders())).victims == {"e3"}
    without = observe(make_engines(3), spec={"replicas": 2})
    assert scale(without, reported, make_state(Deciders())) == ScaleDecision(replicas=2)


# --- a gated roll

GATE = {"durationSeconds": 10, "timeoutSeconds": 60, "minRequests": 10}
IMAGE = "engine:1"
REFUSED = Failure(reason=Reason.ENGINE_REFUSED, message="it refuses to start")
OTHER = Failure(reason=Reason.CRASH_LOOP, message="it keeps ending")


@dataclass
class Roll:
    """A roll of four engines to another template, and what a process knows of it."""

    spec: dict[str, Any] = field(default_factory=dict)
    state: Any = field(default_factory=lambda: make_state(Deciders()))

    def __post_init__(self) -> None:
        made = make_cluster(replicas=4, **self.spec)
        made["spec"].setdefault("rollout", {"gate": GATE})
        made["spec"]["engine"] |= {"startupTimeoutSeconds": 100}
        self.cluster = check_manifest(made)
        self.hash = compute_rollout_hash(self.cluster.spec, RESTARTS_ENGINES, self.cluster.spec.engine.image or IMAGE)

    def make_live(self, roll: RolloutState | None, running: str = "old", **annotations: str) -> dict[str, Any]:
        template = {"metadata": {"annotations": {RESTART_HASH_ANNOTATION: running}}, "spec": {}}
        noted = {TEMPLATE_ANNOTATION: json.dumps(template), **annotations}
        if roll is not None:
            noted[ROLLOUT_ANNOTATION] = roll.to_json()
        return {"metadata": {"name": "tiny-engine", "annotations": noted}}

    @property
    def good(self) -> dict[str, Any]:
        return {"metadata": {"annotations": {RESTART_HASH_ANNOTATION: "old"}}, "spec": {}}

    def begin(self, **fields: Any) -> RolloutState:
        return RolloutState(target_hash=self.hash, good_template=self.good, **fields)

    def make_pods(self, new: int, old: int, **changes: Any) -> tuple[Pod, ...]:
        return make_engines(new, restart_hash=self.hash, **changes) + make_engines(old, first=11, restart_hash="old")

    def decide(self, roll: RolloutState | None, pods: tuple[Pod, ...], now: float = 1000.0, **fields: Any) -> Any:
        values = {"default_image": IMAGE, "now": now, "wall_s": now + 7000.0, **fields}
        statuses = values.pop("statuses", IN_FORCE)
        live = values.pop("live", self.make_live(roll))
        reported = ObservedRouters(statuses=statuses, reports={})
        return decide_rollout(self.cluster, live, observe(pods), reported, self.state, **values)

    def end_requests(self, **engines: tuple[int, int, int]) -> None:
        """So many requests ended, met their objectives and failed on each engine, at one router, so far."""
        total = [sum(counts) for counts in zip(*engines.values(), strict=True)]
        self.state.rolling.outcomes.take(
            control_pb2.GetStatusResponse(
                router_id="r1",
                num_failed=total[2],
                classes=[control_pb2.ClassCounters(num_finished=total[0], num_met_both=total[1])],
                engines=[
                    control_pb2.EngineStatus(engine_id=name, num_ended=ended, num_met_both=met, num_failed=failed)
                    for name, (ended, met, failed) in engines.items()
                ],
            )
        )

    def make_facts(self, **fields: Any) -> RollFacts:
        values = {
            "num_new": 1,
            "num_new_ready": 1,
            "num_old": 3,
            "replicas": 4,
            "refusal": "",
            "figures": Outcomes(),
            "num_ended_on_new": 0,
            "watched_s": 0.0,
            "start_limit_s": 250.0,
        }
        return RollFacts(**{**values, **fields})

    def expect(self, roll: RolloutState, now: float = 1000.0, **facts: Any) -> Any:
        return decide_gate(roll, self.make_facts(**facts), self.cluster.spec.rollout.gate, now + 7000.0)


def test_without_a_gate_or_without_a_roll_there_is_nothing_to_decide() -> None:
    assert Roll({"rollout": {"maxSurge": 1}}).decide(None, ()).state is None
    roll = Roll()
    assert roll.decide(None, (), live=None).state is None
    assert roll.decide(None, (), live=roll.make_live(None, running=roll.hash)).state is None


@pytest.mark.parametrize("image", [None, "mine:2"])
def test_a_roll_is_to_the_image_of_the_spec_or_of_the_operator(image: str | None) -> None:
    engine = {"image": image} if image else {}
    roll = Roll({"engine": engine})
    found = roll.decide(None, roll.make_pods(0, 4))
    assert (found.state.target_hash, found.state.good_template) == (roll.hash, roll.good)
    other = roll.decide(None, roll.make_pods(0, 4), default_image="engine:2").state
    assert (other.target_hash == roll.hash) == (image is not None)


def test_a_paused_roll_stays_as_it_is() -> None:
    roll = Roll({"rollout": {"gate": GATE, "paused": True}})
    stored = roll.begin(num_passed=1, since_s=5)
    found = roll.decide(stored, roll.make_pods(2, 2, failure=REFUSED))
    assert (found.state, found.is_held, found.wake_in_s) == (stored, False, None)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, {}),
        ({"is_ready": False}, {"num_new_ready": 0}),
        ({"failure": REFUSED}, {"refusal": "it refuses to start"}),
        ({"failure": OTHER}, {}),
        ({"is_ending": True}, {"num_new": 0, "num_new_ready": 0}),
        ({"has_ended": True, "is_ready": False, "failure": REFUSED}, {"num_new": 0, "num_new_ready": 0}),
    ],
    ids=["serves", "starts", "refuses", "another trouble", "ends", "has ended"],
)
def test_a_roll_is_judged_by_the_new_engines_that_are_there(changes: dict[str, Any], facts: dict[str, Any]) -> None:
    roll = Roll()
    stored = roll.begin(since_s=7990)
    assert roll.decide(stored, roll.make_pods(1, 3, **changes)) == roll.expect(stored, **facts)


def test_the_limit_of_a_start_is_that_of_drain_start_and_margin() -> None:
    roll = Roll()
    stored = roll.begin(since_s=7900)
    found = roll.decide(stored, roll.make_pods(1, 3, is_ready=False))
    assert found.wake_in_s == 150.0


def test_before_the_routers_switch_a_roll_fails_by_a_refusal_alone() -> None:
    roll = Roll()
    stored = roll.begin(num_passed=0, since_s=7900)
    for failure, said in ((REFUSED, "it refuses to start"), (OTHER, ""), (None, "")):
        found = roll.decide(stored, roll.make_pods(1, 3, failure=failure), is_before_switch=True)
        assert (found.state, found.is_held) == (replace(stored, failure=said), False)
    failed = replace(stored, failure="it was worse")
    found = roll.decide(failed, roll.make_pods(1, 3, failure=REFUSED), is_before_switch=True)
    assert found.state.failure == "it was worse"


def test_a_batch_is_judged_by_what_ended_on_it_since_it_was_seen() -> None:
    roll = Roll()
    roll.end_requests(e1=(0, 0, 0), e11=(0, 0, 0))
    roll.end_requests(e1=(50, 0, 50), e11=(100, 100, 0))
    stored = roll.begin(measured_since_s=8000, since_s=7990)
    pods = roll.make_pods(1, 3)
    begun = roll.decide(stored, pods)
    assert begun == roll.expect(stored)
    assert (roll.state.rolling.batch.seen_s, roll.state.rolling.batch.total, roll.state.rolling.batch.on_new) == (
        1000.0,
        Outcomes(150, 100, 50),
        Outcomes(50, 0, 50),
    )
    # Too few on the new engine: those of all count.
    roll.end_requests(e1=(59, 9, 50), e11=(140, 120, 20))
    found = roll.decide(stored, pods, now=1008.0)
    assert found == roll.expect(stored, 1008.0, figures=Outcomes(49, 29, 20), num_ended_on_new=9, watched_s=8.0)
    assert "20 of 49 requests failed" in found.state.failure
    # Enough on the new engine: its own count.
    roll.end_requests(e1=(60, 10, 50), e11=(140, 120, 20))
    found = roll.decide(stored, pods, now=1010.0)
    facts = {"figures": Outcomes(10, 10, 0), "num_ended_on_new": 10, "watched_s": 10.0}
    assert found == roll.expect(stored, 1010.0, **facts)
    assert (found.state.failure, found.state.num_passed) == ("", 1)
    # The next batch counts from where it is seen first.
    following = roll.begin(measured_since_s=8020, since_s=8010, num_passed=1)
    assert roll.decide(following, roll.make_pods(2, 2), now=1025.0).state == following
    assert (roll.state.rolling.batch.seen_s, roll.state.rolling.batch.on_new) == (1025.0, Outcomes(60, 10, 50))


def test_without_routers_there_are_no_figures() -> None:
    roll = Roll()
    stored = roll.begin(measured_since_s=8000, since_s=7990)
    pods = roll.make_pods(1, 3)
    roll.decide(stored, pods, statuses={})
    found = roll.decide(stored, pods, now=1060.0, statuses={})
    assert found.state.failure == "no router reported for 60 s"
    assert roll.decide(stored, pods, now=1060.0).state.num_unmeasured == 1


# --- which model is served

OLD_SOURCE = {"persistentVolumeClaim": {"claimName": "models", "path": "old"}}
NEW_SOURCE = {"persistentVolumeClaim": {"claimName": "models", "path": "new"}}
OLD = check_manifest(make_cluster(model={"name": "old", "source": OLD_SOURCE})).spec.model
NEW = check_manifest(make_cluster(model={"name": "new", "source": NEW_SOURCE})).spec.model
OLD_ID, NEW_ID = identify_model(OLD), identify_model(NEW)
READY = {"conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}]}
STARTING = {"conditions": [{"type": "Ready", "status": "False", "reason": "Starting"}]}
SERVES_OLD, HAS_SWITCHED = ModelSwitch(served=OLD), ModelSwitch(served=NEW, replaced=OLD)


def switch(
    stored: StoredPlan, *, new: int, old: int, routers: str = "o", failure: str | None = None, **fields: Any
) -> SwitchOutcome:
    """Decides for four engines that are to serve the new model; a failure, or none yet, is of a gated roll to it."""
    status = fields.pop("status", READY)
    spec = {"replicas": 4, "model": {"name": "new", "source": NEW_SOURCE}, "rollout": {"gate": GATE}, **fields}
    engines = make_engines(new, model_id=NEW_ID) + make_engines(old, first=11, model_id=OLD_ID)
    ids = {"o": OLD_ID, "n": NEW_ID}
    observed = observe(
        engines,
        spec=spec,
        replicas=4,
        routers=tuple(replace(POD, name=f"r{number}", model_id=ids[each]) for number, each in enumerate(routers)),
    )
    observed.body["status"] = status
    cluster = read_cluster(observed)
    if failure is not None:
        roll = Roll({name: value for name, value in spec.items() if name != "replicas"} | {"engine": {}})
        image = cluster.spec.engine.image or IMAGE
        roll.hash = compute_rollout_hash(cluster.spec, RESTARTS_ENGINES, image)
        live = roll.make_live(roll.begin(failure=failure), **{DEFAULT_IMAGE_ANNOTATION: IMAGE})
        observed.live["Deployment", "tiny-engine"]["metadata"] |= {"annotations": live["metadata"]["annotations"]}
    return switch_models(cluster, observed, stored)


def test_a_cluster_that_never_served_serves_what_its_spec_says() -> None:
    for status in ({}, STARTING, {"conditions": []}):
        found = switch(StoredPlan(switch=SERVES_OLD), new=0, old=4, status=status)
        assert found == SwitchOutcome(switch=ModelSwitch(served=NEW))


@pytest.mark.parametrize(
    ("accepted", "served"),
    [({"model": {"name": "old", "source": OLD_SOURCE}}, OLD), ({}, NEW), (None, NEW), ({"model": {"name": 7}}, NEW)],
)
def test_an_operator_that_stored_no_model_served_that_of_the_spec_accepted_last(accepted: Any, served: Any) -> None:
    found = switch(StoredPlan(accepted_spec=accepted), new=0, old=4)
    assert found.switch == ModelSwitch(served=served)
    known = switch(StoredPlan(accepted_spec=accepted, switch=SERVES_OLD), new=0, old=4)
    assert known.switch == SERVES_OLD


@pytest.mark.parametrize(
    ("new", "old", "is_switched", "max_unavailable"),
    [(0, 4, False, 1), (1, 3, False, 2), (2, 2, True, 2), (3, 1, True, 2)],
)
def test_the_routers_switch_with_half_of_the_engines(
    new: int, old: int, max_unavailable: int, *, is_switched: bool
) -> None:
    found = switch(StoredPlan(switch=SERVES_OLD), new=new, old=old)
    assert found.switch == (HAS_SWITCHED if is_switched else SERVES_OLD)
    assert found.split == SplitStep(num_needed=2, max_unavailable=max_unavailable)
    assert found.is_before is not is_switched
    assert found.describe() == (
        "new requests go to the new model, and streams of the replaced one end on its own engines"
        if is_switched
        else "the routers switch to the other model once 2 engines of it serve"
    )


@pytest.mark.parametrize(
    ("routers", "failure", "switched", "is_split"),
    [
        ("on", None, HAS_SWITCHED, True),
        ("n", None, ModelSwitch(served=NEW), False),
        # Whether the roll may still go back decides whether the older model is forgotten.
        ("n", "", HAS_SWITCHED, False),
    ],
    ids=["an old router has streams", "all are over", "all are over and the roll is measured"],
)
def test_a_switch_is_over_with_the_last_router_of_the_older_model(
    routers, failure, switched, *, is_split: bool
) -> None:
    found = switch(StoredPlan(switch=HAS_SWITCHED), new=4, old=0, routers=routers, failure=failure)
    assert (found.switch, found.split is not None, found.is_before) == (switched, is_split, False)
    assert bool(found.describe()) is is_split


def test_a_roll_that_failed_goes_back_to_the_model_of_before_with_its_first_engine() -> None:
    stored = StoredPlan(switch=HAS_SWITCHED)
    for old, served in ((0, HAS_SWITCHED), (1, ModelSwitch(served=OLD, replaced=NEW))):
        found = switch(stored, new=4 - old, old=old, routers="n", failure="it was worse")
        assert found.switch == served
        # The target is the old model again: until its engines serve, the routers have not switched.
        assert found.is_before is (old == 0)
    # Where no other model is known, the spec's it is.
    only = switch(StoredPlan(switch=ModelSwitch(served=NEW)), new=4, old=0, routers="n", failure="it was worse")
    assert only.switch == ModelSwitch(served=NEW)
    assert switch(StoredPlan(switch=SERVES_OLD), new=4, old=0, failure="it was worse").switch == SERVES_OLD


def test_a_roll_without_a_gate_never_goes_back() -> None:
    found = switch(StoredPlan(switch=SERVES_OLD), new=4, old=0, failure="it was worse", rollout={"maxSurge": 1})
    assert found.switch == HAS_SWITCHED
