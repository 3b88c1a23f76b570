"""What a Deployment says of itself: its roll, the image it keeps, whether it is whole, and why it has no pods."""

from __future__ import annotations

import json
from typing import Any

import pytest
from children_harness import check

from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.api.labels import (
    DEFAULT_IMAGE_ANNOTATION,
    RESTART_HASH_ANNOTATION,
    ROLLOUT_ANNOTATION,
    TEMPLATE_ANNOTATION,
)
from sluice_operator.resources.default_images import DefaultImages, keep_default_images
from sluice_operator.resources.deployments.deployment_status import find_pod_refusals, is_rolling, is_whole
from sluice_operator.resources.deployments.rolling_update import hold_split, mark_rollout, render_rolling_update
from sluice_operator.resources.rollout_state import RolloutState, find_roll, hash_of, went_back


def make_template(digest: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {RESTART_HASH_ANNOTATION: digest}}, "spec": {"a": digest}}


def make_live(*, running: Any = None, roll: str | RolloutState | None = None, **annotations: str) -> dict[str, Any]:
    noted = dict(annotations)
    if running is not None:
        noted[TEMPLATE_ANNOTATION] = running if isinstance(running, str) else json.dumps(running)
    if roll is not None:
        noted[ROLLOUT_ANNOTATION] = roll if isinstance(roll, str) else roll.to_json()
    return {"metadata": {"name": "tiny-engine", "generation": 2, "annotations": noted}}


OLD, NEW, THIRD = make_template("old"), make_template("new"), make_template("third")
ROLL = RolloutState(
    target_hash="new",
    good_template=OLD,
    since_s=5,
    num_passed=2,
    measured_since_s=7,
    num_unmeasured=1,
    failure="worse",
)


@pytest.mark.parametrize(
    ("live", "target", "roll"),
    [
        (None, "new", None),
        (make_live(), "new", None),
        (make_live(running="{"), "new", None),
        (make_live(running=OLD), "old", None),
        (make_live(running=OLD), "new", RolloutState(target_hash="new", good_template=OLD)),
        (make_live(running=NEW, roll=ROLL), "new", ROLL),
        # An edit overtakes a roll: what served before it is still what is good.
        (make_live(running=NEW, roll=ROLL), "third", RolloutState(target_hash="third", good_template=OLD)),
        (make_live(running=NEW, roll=ROLL), "old", None),
        *(
            (make_live(running=OLD, roll=text), "new", RolloutState(target_hash="new", good_template=OLD))
            for text in ("", "{", "[]", "3", '{"target_hash": "new"}', '{"of": "tomorrow"}')
        ),
        *(
            (
                make_live(running=OLD, roll=json.dumps({"target_hash": "new", "good_template": good})),
                "new",
                RolloutState(target_hash="new", good_template=OLD),
            )
            for good in ({}, [], None, "spec")
        ),
    ],
)
def test_a_roll_is_the_stored_one_or_begins_where_another_template_is_asked_for(live, target, roll) -> None:
    assert find_roll(live, target) == roll


def test_a_roll_went_back_when_it_is_stored_as_failed() -> None:
    assert went_back(make_live(running=OLD, roll=ROLL))
    assert not went_back(make_live(running=OLD, roll=RolloutState(target_hash="new", good_template=OLD)))
    assert not went_back(make_live(running=OLD))
    assert not went_back(make_live(running=OLD, roll="{"))
    assert (hash_of(OLD), hash_of({"metadata": {}})) == ("old", "")


def render(*, passed: int = 0, failure: str = "", is_held: bool = False, is_paused: bool = False) -> tuple[Any, Any]:
    """The Deployment as rendered, and with a roll in it."""
    spec = {"paused": is_paused, "minReadySeconds": 10, "progressDeadlineSeconds": 900, "template": NEW}
    plain = {"metadata": {"name": "d", "annotations": {"own": "a"}}, "spec": spec}
    roll = RolloutState(target_hash="new", good_template=OLD, num_passed=passed, failure=failure)
    return plain, mark_rollout(plain, roll, is_held=is_held)


@pytest.mark.parametrize(
    ("passed", "is_held", "is_paused", "pauses", "waits_s"),
    [
        (0, False, False, False, 899),
        (0, True, False, True, 899),
        (1, True, False, True, 899),
        (1, False, False, False, 10),
        (1, True, True, True, 899),
        (0, False, True, True, 899),
    ],
)
def test_a_batch_is_held_until_its_verdict(
    passed: int, waits_s: int, *, is_held: bool, is_paused: bool, pauses: bool
) -> None:
    plain, marked = render(passed=passed, is_held=is_held, is_paused=is_paused)
    assert marked["spec"] == {**plain["spec"], "paused": pauses, "minReadySeconds": waits_s}
    assert set(marked["metadata"]["annotations"]) == {"own", ROLLOUT_ANNOTATION}
    assert json.loads(marked["metadata"]["annotations"][ROLLOUT_ANNOTATION])["num_passed"] == passed
    assert mark_rollout(plain, None, is_held=is_held) == plain


def test_a_roll_that_failed_runs_the_template_of_before_at_once() -> None:
    plain, marked = render(passed=0, failure="worse", is_held=True)
    assert marked["spec"] == {**plain["spec"], "template": OLD}
    annotations = marked["metadata"]["annotations"]
    assert json.loads(annotations[TEMPLATE_ANNOTATION]) == OLD
    assert annotations[TEMPLATE_ANNOTATION] == json.dumps(OLD, sort_keys=True, separators=(",", ":"))
    assert json.loads(annotations[ROLLOUT_ANNOTATION])["failure"] == "worse"


def test_a_split_fleet_goes_no_further_than_its_step() -> None:
    update = {"maxSurge": 1, "maxUnavailable": 9}
    spec = {"strategy": {"type": "RollingUpdate", "rollingUpdate": update}, "progressDeadlineSeconds": 900}
    plain = {"metadata": {"name": "d"}, "spec": {**spec, "minReadySeconds": 0, "paused": False}}
    assert hold_split(plain, None) == plain
    for step in (0, 2):
        held = hold_split(plain, step)["spec"]
        assert held["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": step}}
        assert (held["minReadySeconds"], held["paused"]) == (899, False)


@pytest.mark.parametrize(
    ("gate", "ready_s", "deadline_s"),
    [(None, 0, 77 + 1800), ({"durationSeconds": 30, "timeoutSeconds": 400}, 30, 77 + 1800 + 30 + 400)],
)
def test_a_roll_has_time_to_pull_start_and_be_measured(gate: Any, ready_s: int, deadline_s: int) -> None:
    rollout = {"maxUnavailable": "25%", "maxSurge": 2, **({"gate": gate} if gate else {})}
    spec = check(rollout=rollout, engine={"startupTimeoutSeconds": 77}).spec
    assert render_rolling_update(spec) == {
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": "25%"}},
        "paused": False,
        "minReadySeconds": ready_s,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": deadline_s,
    }


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (None, True),
        ({}, True),
        ({"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2}, True),
        ({"observedGeneration": 2}, False),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 1}, True),
        ({"observedGeneration": 2, "replicas": 1}, True),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2}, False),
        ({"observedGeneration": 3, "replicas": 2, "updatedReplicas": 3}, False),
    ],
)
def test_a_deployment_rolls_until_it_has_seen_the_template_and_no_other_pod_is_left(
    status: Any, *, verdict: bool
) -> None:
    assert is_rolling({**make_live(), "status": status}) is verdict
    assert not is_rolling({"metadata": {}, "status": {"replicas": 2, "updatedReplicas": 2}})


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(None, False), ({"readyReplicas": 1}, False), ({"readyReplicas": 2}, True), ({"readyReplicas": 3}, True)],
)
def test_a_deployment_is_whole_with_all_its_pods(status: Any, *, verdict: bool) -> None:
    assert is_whole({"spec": {"replicas": 2}, "status": status}) is verdict
    assert is_whole({"spec": {"replicas": 0}, "status": status})


def test_what_kept_pods_from_being_created_is_said() -> None:
    def refuse(kind: str, status: str, **message: str) -> dict[str, str]:
        return {"type": kind, "status": status, **message}

    found = find_pod_refusals(
        {
            **make_live(),
            "status": {
                "conditions": [
                    refuse("Available", "True", message="it is"),
                    refuse("ReplicaFailure", "False", message="it was"),
                    refuse("ReplicaFailure", "True", message="exceeded quota: q"),
                    refuse("ReplicaFailure", "True", message="violates PodSecurity"),
                    refuse("ReplicaFailure", "True"),
                ]
            },
        }
    )
    words = "deployment tiny-engine cannot create pods: "
    assert found == [
        Failure(reason=Reason.QUOTA_EXCEEDED, message=f"{words}exceeded quota: q"),
        Failure(reason=Reason.FORBIDDEN, message=f"{words}violates PodSecurity"),
        Failure(reason=Reason.FORBIDDEN, message=words),
    ]
    for status in (None, {}, {"conditions": None}):
        assert find_pod_refusals({**make_live(), "status": status}) == []


NEWEST = DefaultImages(engine="engine:2", router="router:2")


def run(component: str, image: str, *, kept: str | None = None, **others: str) -> dict[str, Any]:
    named = {"side": "side:1", component: image, **others}
    containers = [{"name": name, "image": each} for name, each in named.items()]
    annotations = {} if kept is None else {DEFAULT_IMAGE_ANNOTATION: kept}
    return {"metadata": {"annotations": annotations}, "spec": {"template": {"spec": {"containers": containers}}}}


@pytest.mark.parametrize(
    ("spec", "deployments", "kept"),
    [
        ({}, {}, NEWEST),
        ({}, {"engine": None, "router": None}, NEWEST),
        (
            {},
            {"engine": run("engine", "x", kept="engine:1"), "router": run("router", "y", kept="router:1")},
            DefaultImages(engine="engine:1", router="router:1"),
        ),
        ({}, {"engine": run("engine", "x", kept="engine:1")}, DefaultImages(engine="engine:1", router="router:2")),
        # An older operator kept none, and one whose spec named an image kept an empty one.
        (
            {},
            {"engine": run("engine", "engine:0"), "router": run("router", "router:0")},
            DefaultImages(engine="engine:0", router="router:0"),
        ),
        ({}, {"engine": run("engine", "mine:9", kept=""), "router": run("router", "mine:8", kept="")}, NEWEST),
        ({}, {"engine": run("other", "x"), "router": run("other", "x")}, NEWEST),
        (
            {"engine": {"image": "mine:1"}},
            {"engine": run("engine", "x", kept="engine:1"), "router": run("router", "y", kept="router:1")},
            DefaultImages(engine="engine:2", router="router:1"),
        ),
        (
            {"router": {"image": "mine:1"}},
            {"engine": run("engine", "x", kept="engine:1"), "router": run("router", "y", kept="router:1")},
            DefaultImages(engine="engine:1", router="router:2"),
        ),
    ],
)
def test_a_cluster_keeps_the_default_images_that_it_runs(spec, deployments, kept) -> None:
    assert keep_default_images(check(**spec), deployments, NEWEST) == kept
