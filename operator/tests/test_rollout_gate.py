"""The gate of a roll: its verdicts as a table, and rolls that go on, wait and go back in a world of fakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cluster_harness import KEY, World

from sluice.v1 import control_pb2
from sluice_operator.api.fields_and_defaults.rollout_gate_spec import RolloutGateSpec
from sluice_operator.api.labels import COMPONENT_LABEL, MODEL_LABEL
from sluice_operator.kubernetes.kinds import PODS
from sluice_operator.planning.rollout_gate import RollFacts, decide_gate
from sluice_operator.resources.rollout_state import RolloutState
from sluice_operator.routers.engine_outcomes import EngineOutcomes, Outcomes

GATE = RolloutGateSpec(durationSeconds=60, timeoutSeconds=600, minRequests=20)
BEGUN = RolloutState(target_hash="new", good_template={"spec": {}})
STARTING = replace(BEGUN, since_s=1000)
MEASURED = replace(STARTING, measured_since_s=1000)
PASSED = replace(BEGUN, num_passed=1)
# One of four engines is new and serves; routers answer, and nothing has ended yet.
FACTS = RollFacts(
    num_new=1,
    num_new_ready=1,
    num_old=3,
    replicas=4,
    refusal="",
    figures=Outcomes(),
    num_ended_on_new=0,
    watched_s=10_000.0,
    start_limit_s=300.0,
)
GOOD, LATE, FAILED = Outcomes(20, 18, 1), Outcomes(20, 17, 0), Outcomes(20, 18, 2)
NONE_NEW = {"num_new": 0, "num_new_ready": 0, "num_old": 4}
ALL_NEW = {"num_new": 4, "num_new_ready": 4, "num_old": 0}
# State, facts, seconds since 1000, and: the state that follows, whether the roll is held.
VERDICTS: dict[str, tuple[RolloutState, dict[str, Any], float, RolloutState | None, bool]] = {
    "no batch yet": (BEGUN, NONE_NEW, 0, BEGUN, False),
    "a batch starts": (BEGUN, {"num_new_ready": 0}, 0, STARTING, False),
    "a part of a batch serves": (STARTING, {"num_new": 2}, 10, STARTING, True),
    "a batch serves": (STARTING, {}, 0, MEASURED, True),
    "a batch does not start in time": (
        STARTING,
        {"num_new_ready": 0},
        300,
        replace(STARTING, failure="1 engines did not serve within 300 s"),
        False,
    ),
    "an engine refuses to start": (STARTING, {"refusal": "no"}, 0, replace(STARTING, failure="no"), False),
    "good, but not long enough": (MEASURED, {"figures": GOOD}, 59, MEASURED, True),
    "good": (MEASURED, {"figures": GOOD}, 60, PASSED, False),
    "good, but this process has not seen it for long": (
        MEASURED,
        {"figures": GOOD, "watched_s": 59.0},
        600,
        MEASURED,
        True,
    ),
    "late, and it may still get better": (MEASURED, {"figures": LATE}, 59, MEASURED, True),
    "late": (
        MEASURED,
        {"figures": LATE},
        60,
        replace(STARTING, failure="17 of 20 requests met their objectives, less than rollout.gate.minAttainment 90%"),
        False,
    ),
    "good, but too few ended on the new engines": (
        MEASURED,
        {"figures": GOOD, "num_ended_on_new": 19},
        599,
        MEASURED,
        True,
    ),
    "good, and too few ended on the new engines for too long": (
        MEASURED,
        {"figures": GOOD, "num_ended_on_new": 1},
        600,
        PASSED,
        False,
    ),
    "late, and too few ended on the new engines for too long": (
        MEASURED,
        {"figures": LATE, "num_ended_on_new": 1},
        600,
        replace(STARTING, failure="17 of 20 requests met their objectives, less than rollout.gate.minAttainment 90%"),
        False,
    ),
    "good, and enough ended on the new engines": (
        MEASURED,
        {"figures": GOOD, "num_ended_on_new": 20},
        60,
        PASSED,
        False,
    ),
    "errors while too few ended on the new engines": (
        MEASURED,
        {"figures": FAILED, "num_ended_on_new": 2},
        1,
        replace(STARTING, failure="2 of 20 requests failed, more than rollout.gate.maxErrorRate 5%"),
        False,
    ),
    "errors, at once": (
        MEASURED,
        {"figures": FAILED},
        1,
        replace(STARTING, failure="2 of 20 requests failed, more than rollout.gate.maxErrorRate 5%"),
        False,
    ),
    "errors of too few requests": (MEASURED, {"figures": Outcomes(19, 0, 19)}, 60, MEASURED, True),
    "no traffic": (MEASURED, {}, 599, MEASURED, True),
    "no traffic for too long": (MEASURED, {}, 600, replace(PASSED, num_unmeasured=1), False),
    "no router": (MEASURED, {"figures": None}, 599, MEASURED, True),
    "no router for too long": (
        MEASURED,
        {"figures": None},
        600,
        replace(STARTING, failure="no router reported for 600 s"),
        False,
    ),
    "the next batch has not begun": (PASSED, {}, 9000, PASSED, False),
    "the next batch has its own time": (
        PASSED,
        {"num_new": 2, "num_old": 2},
        0,
        replace(PASSED, since_s=1000),
        False,
    ),
    "an engine that had passed is gone": (PASSED, NONE_NEW, 0, BEGUN, False),
    "all are new, the last batch is measured": (replace(MEASURED, num_passed=3), ALL_NEW, 1, ..., True),  # type: ignore[dict-item]
    "all have passed": (replace(BEGUN, num_passed=4), ALL_NEW, 0, None, False),
    "all have passed, one of them starts anew": (
        replace(BEGUN, num_passed=4),
        {**ALL_NEW, "num_new_ready": 3},
        0,
        replace(BEGUN, num_passed=4),
        False,
    ),
    "it went back": (replace(STARTING, failure="no"), {"figures": GOOD}, 60, replace(STARTING, failure="no"), False),
}


@pytest.mark.parametrize(("state", "facts", "after_s", "follows", "is_held"), VERDICTS.values(), ids=VERDICTS)
def test_a_verdict_follows_from_what_is_stored_and_observed(
    state: RolloutState, facts: dict[str, Any], after_s: float, follows: Any, *, is_held: bool
) -> None:
    changed = {"num_new_ready": 1, **facts}
    decision = decide_gate(state, replace(FACTS, **changed), GATE, 1000 + after_s)
    assert decision.state == (state if follows is ... else follows)
    assert decision.is_held == is_held
    # What is held is decided again whatever comes.
    assert not is_held or decision.wake_in_s is not None


def status(router_id: str, **engines: tuple[int, int, int]) -> control_pb2.GetStatusResponse:
    return control_pb2.GetStatusResponse(
        router_id=router_id,
        num_failed=sum(counts[2] for counts in engines.values()),
        classes=[control_pb2.ClassCounters(num_finished=sum(counts[0] for counts in engines.values()))],
        engines=[
            control_pb2.EngineStatus(engine_id=name, num_ended=ended, num_met_both=met, num_failed=failed)
            for name, (ended, met, failed) in engines.items()
        ],
    )


def test_outcomes_of_all_routers_add_up_and_what_was_before_the_first_status_does_not_count() -> None:
    outcomes = EngineOutcomes()
    outcomes.take(status("r1", a=(5, 5, 0)))
    outcomes.take(status("r2", a=(1, 1, 0)))
    assert outcomes.total("a") == Outcomes()
    outcomes.take(status("r1", a=(7, 6, 1), b=(2, 1, 0)))
    outcomes.take(status("r2", a=(3, 3, 0)))
    assert (outcomes.total("a"), outcomes.total("b")) == (Outcomes(4, 3, 1), Outcomes(2, 1, 0))
    assert outcomes.total() == Outcomes(6, 0, 1)
    # A stream that began anew counts from nothing.
    outcomes.take(status("r2", a=(1, 0, 1)))
    assert outcomes.total("a") == Outcomes(5, 3, 2)
    outcomes.keep({"b"}, {"r1"})
    assert (outcomes.total("a"), outcomes.total("b")) == (Outcomes(), Outcomes(2, 1, 0))
    assert outcomes.total() == Outcomes(7, 0, 2), "what ended on all of them stays"


SPEC: dict[str, Any] = {"gate": {"durationSeconds": 10, "timeoutSeconds": 60, "minRequests": 10}}


class Rolling:
    """A cluster that rolls while requests end on its engines."""

    def __init__(self, **rollout: Any) -> None:
        self.world = World(replicas=4, rollout={**SPEC, **rollout})
        self.most_new = 0

    async def begin(self) -> None:
        await self.world.settle()
        self.old = self.world.engine_uids
        self.template = self.world.deployment()["spec"]["template"]
        self.world.edit(engine={"maxBatchTokens": 4096})

    async def step(self, on_old: tuple[int, int, int], on_new: tuple[int, int, int]) -> None:
        """One second, in which so many requests end, are met and fail on each old and each new engine."""
        world, outcomes = self.world, self.world.routers.outcomes
        world.run_controllers()
        for uid in world.engine_uids:
            grown = on_old if uid in self.old else on_new
            outcomes[uid] = tuple(map(sum, zip(outcomes.get(uid, (0, 0, 0)), grown, strict=True)))  # type: ignore[assignment]
        num_ended, num_met, _ = map(sum, zip(*outcomes.values(), strict=True))
        world.routers.counters = [control_pb2.ClassCounters(num_finished=num_ended, num_met_both=num_met)]
        await world.reconcile()
        for found in world.routers.statuses(KEY).values():
            world.reconciler.record_status(KEY, found)
        self.most_new = max(self.most_new, len(world.engine_uids - self.old))
        world.now += 1.0

    @property
    def is_paused(self) -> bool:
        return bool(self.world.deployment()["spec"]["paused"])


async def test_a_roll_whose_engines_are_good_goes_on_batch_by_batch() -> None:
    rolling = Rolling()
    await rolling.begin()
    sizes = []
    for _ in range(120):
        await rolling.step((2, 2, 0), (2, 2, 0))
        sizes.append(len(rolling.world.engine_uids - rolling.old))
    # Each of the four batches was measured for ten seconds.
    assert all(sizes.count(size) >= 10 for size in (1, 2, 3))
    assert not rolling.old & rolling.world.engine_uids
    assert not rolling.is_paused
    assert rolling.world.conditions["Progressing"] == ("False", "Settled")
    assert "sluice.dev/rollout" not in rolling.world.deployment()["metadata"]["annotations"]
    # What ended on engines that are gone is forgotten: a cluster that lives for months has many of them.
    counted = rolling.world.reconciler._states[KEY].rolling.outcomes._totals
    assert set(counted) == {"", *rolling.world.engine_uids}


@pytest.mark.parametrize(
    ("on_new", "words"),
    [((2, 0, 0), "met their objectives"), ((2, 0, 2), "failed, more than")],
    ids=["attainment", "errors"],
)
async def test_a_roll_whose_engines_are_worse_goes_back_by_itself_and_says_why(on_new: Any, words: str) -> None:
    rolling = Rolling()
    await rolling.begin()
    for step in range(60):
        await rolling.step((2, 2, 0), on_new)
        if step == 5:
            # A new operator finds the roll as it is.
            rolling.world.start_operator()
    world = rolling.world
    assert rolling.most_new == 1
    assert world.deployment()["spec"]["template"] == rolling.template
    assert all(pod["template"] == rolling.template for pod in world.engines)
    assert len(world.engine_uids & rolling.old) == 3
    assert world.conditions["Progressing"] == ("False", "RolledBack")
    assert world.conditions["Degraded"] == ("True", "RolledBack")
    assert words in world.message("Degraded")
    assert "runbook" in world.message("Degraded")
    # The spec is the user's: another edit is another roll, and the old one back is none.
    world.edit(engine={"maxBatchTokens": 2048})
    for _ in range(5):
        await rolling.step((2, 2, 0), (2, 2, 0))
    assert world.conditions["Progressing"] == ("False", "Settled")
    assert world.conditions["Degraded"] == ("False", "AsExpected")
    assert world.deployment()["spec"]["template"] == rolling.template


async def test_a_slower_engine_that_gets_few_requests_goes_back_all_the_same() -> None:
    rolling = Rolling(gate={**SPEC["gate"], "timeoutSeconds": 600})
    await rolling.begin()
    for step in range(120):
        # Each router has one request end on it every fourth second: about five of ten while it is measured.
        await rolling.step((2, 2, 0), (int(step % 4 == 0), 0, 0))
    assert rolling.most_new == 1
    assert rolling.world.conditions["Progressing"] == ("False", "RolledBack")
    assert rolling.world.message("Degraded").startswith("the engines that served before are back: 0 of 10 requests met")


async def test_a_batch_on_which_no_request_ends_is_judged_by_all_that_did() -> None:
    rolling = Rolling()
    await rolling.begin()
    for _ in range(120):
        await rolling.step((2, 2, 0) if rolling.world.engine_uids & rolling.old else (0, 0, 0), (0, 0, 0))
    assert rolling.most_new == 4


async def test_a_batch_is_judged_by_what_ended_since_it_began() -> None:
    rolling = Rolling()
    await rolling.begin()
    for _ in range(60):
        # The first batch serves many requests, all of them in time.
        await rolling.step((2, 2, 0), (50, 50, 0) if rolling.most_new < 2 else (2, 0, 0))
    assert rolling.most_new == 2
    assert rolling.world.conditions["Progressing"] == ("False", "RolledBack")


async def test_a_first_batch_is_held_however_late_the_operator_comes() -> None:
    rolling = Rolling(maxSurge="100%", maxUnavailable=0)
    await rolling.begin()
    await rolling.world.reconcile()
    for _ in range(60):
        # Nobody leads, for longer than a batch is measured.
        rolling.world.run_controllers()
        rolling.world.now += 1.0
    assert rolling.old < rolling.world.engine_uids


async def test_a_surge_of_all_engines_keeps_the_old_ones_until_the_verdict() -> None:
    rolling = Rolling(maxSurge="100%", maxUnavailable=0)
    await rolling.begin()
    for _ in range(30):
        await rolling.step((0, 0, 0), (0, 0, 0))
    assert (rolling.most_new, len(rolling.world.engine_uids)) == (4, 8)
    for _ in range(10):
        await rolling.step((2, 2, 0), (2, 0, 2))
    assert rolling.world.engine_uids == rolling.old
    assert rolling.world.conditions["Progressing"] == ("False", "RolledBack")


async def test_a_model_that_is_worse_goes_back_and_routers_switch_back() -> None:
    rolling = Rolling(maxSurge="100%", maxUnavailable=0)
    await rolling.world.settle()
    rolling.old, rolling.template = rolling.world.engine_uids, rolling.world.deployment()["spec"]["template"]
    world = rolling.world
    world.edit(model={"name": "other"})
    names = set()
    for _ in range(80):
        await rolling.step((2, 2, 0), (2, 0, 0))
        names.add(world.plan.served_models[0].served_name)
    # It was tried, and its routers were replaced by those of the model that served before.
    assert names == {"tiny", "other"}
    assert rolling.most_new == 4
    assert [model.served_name for model in world.plan.served_models] == ["tiny"]
    assert world.engine_uids == rolling.old
    assert world.deployment()["spec"]["template"] == rolling.template
    assert world.conditions["Progressing"] == ("False", "RolledBack")
    assert world.conditions["Degraded"] == ("True", "RolledBack")
    labels = {pod["metadata"]["labels"][MODEL_LABEL] for pod in world.engines}
    routers = world.kubernetes.select(PODS, labels={COMPONENT_LABEL: "router"})
    assert {pod["metadata"]["labels"][MODEL_LABEL] for pod in routers} == labels
    assert len(labels) == 1


async def test_a_model_whose_last_batch_is_worse_goes_back_though_no_engine_of_the_other_one_is_left() -> None:
    rolling = Rolling()
    world = rolling.world
    await world.settle()
    rolling.old = world.engine_uids
    (model,) = {pod["metadata"]["labels"][MODEL_LABEL] for pod in world.engines}
    world.edit(model={"name": "other"})
    for _ in range(200):
        await rolling.step((2, 2, 0), (2, 2, 0) if rolling.most_new < 4 else (2, 0, 0))
    assert world.conditions["Progressing"] == ("False", "RolledBack")
    routers = world.kubernetes.select(PODS, labels={COMPONENT_LABEL: "router"})
    for pods in (world.engines, routers):
        assert {pod["metadata"]["labels"][MODEL_LABEL] for pod in pods} == {model}
    assert [each.served_name for each in world.plan.served_models] == ["tiny"]


async def test_without_traffic_a_roll_waits_for_its_time_and_says_that_nothing_was_measured() -> None:
    rolling = Rolling()
    await rolling.begin()
    for _ in range(80):
        await rolling.step((0, 0, 0), (0, 0, 0))
    assert len(rolling.world.engine_uids - rolling.old) == 2
    assert "1 batches without enough requests" in rolling.world.message("Progressing")


async def test_a_gate_that_is_taken_away_lets_a_roll_go_on() -> None:
    rolling = Rolling()
    await rolling.begin()
    for _ in range(30):
        await rolling.step((2, 2, 0), (2, 0, 0))
    assert rolling.world.conditions["Progressing"] == ("False", "RolledBack")
    rolling.world.edit(rollout={"gate": None})
    await rolling.world.settle()
    assert not rolling.old & rolling.world.engine_uids
    assert rolling.world.conditions["Degraded"] == ("False", "AsExpected")
