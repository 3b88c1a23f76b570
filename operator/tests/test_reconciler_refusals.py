"""Reconciles of what is refused: specs, rights and pod templates, and what the status says."""

from __future__ import annotations

import pytest
from cluster_harness import World
from fake_kubernetes import make_cluster

from sluice_operator.api.condition_types import Reason
from sluice_operator.controller.preconditions import judge_spec
from sluice_operator.kubernetes.errors import ForbiddenError, InvalidError
from sluice_operator.kubernetes.kinds import PODS
from sluice_operator.settings import OperatorSettings

GOOD, BAD = make_cluster(replicas=2), make_cluster(replicas=-1)
TLS = make_cluster(network={"tls": {"mode": "SecretRef", "secretName": "p"}})


@pytest.mark.parametrize(
    ("body", "accepted", "in_force", "refusal", "may_apply"),
    [
        (GOOD, None, GOOD, None, True),
        (GOOD, BAD, GOOD, None, True),
        (BAD, None, None, Reason.REFUSED, True),
        (BAD, GOOD, GOOD, Reason.REFUSED, True),
        (BAD, BAD, None, Reason.REFUSED, True),
        (BAD, TLS, TLS, Reason.REFUSED, False),
        (TLS, None, None, Reason.NOT_AVAILABLE, True),
        (TLS, GOOD, GOOD, Reason.NOT_AVAILABLE, True),
    ],
    ids=[
        "good at first",
        "good again",
        "bad at first",
        "bad after a good one",
        "bad after one that another version accepted",
        "bad after one that this installation no longer carries out",
        "not available at first",
        "not available after a good one",
    ],
)
def test_what_goes_is_the_spec_or_the_one_that_was_accepted_last(
    body, accepted, in_force, refusal, *, may_apply: bool
) -> None:
    verdict = judge_spec(body, accepted and accepted["spec"], OperatorSettings(), has_cert_manager=False)
    assert (verdict.refusal.reason if verdict.refusal else None) == refusal
    assert (verdict.cluster is None) == (in_force is None)
    if verdict.cluster is not None:
        assert verdict.cluster.spec.replicas == in_force["spec"]["replicas"]
    kept = body if refusal is None else accepted
    assert verdict.accepted_spec == (kept and kept["spec"])
    assert verdict.may_apply == may_apply


async def test_an_invalid_spec_changes_nothing_and_says_why() -> None:
    world = World()
    await world.settle()
    spec = world.deployment()["spec"]
    world.edit(prefillHeavy=9)
    await world.settle()
    assert world.deployment()["spec"] == spec
    assert world.conditions["SpecValid"] == ("False", "Refused")
    assert "spec.prefillHeavy" in world.message("SpecValid")
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.conditions["Degraded"] == ("True", "SpecInvalid")
    assert all(plan == world.plan for plan in world.routers.plans.values())


@pytest.mark.parametrize("restarts", [False, True], ids=["the same process", "a new one"])
async def test_while_a_spec_is_refused_the_last_accepted_one_stays_in_force(*, restarts: bool) -> None:
    world = World()
    await world.settle()
    before = world.engine_uids
    world.edit(prefillHeavy=9, slo={"ttftMilliseconds": 1})
    await world.settle()
    if restarts:
        world.start_operator()
    for pod in world.engines:
        world.kubernetes.remove(PODS, "default", pod["metadata"]["name"])
    await world.settle()
    assert not before & world.engine_uids
    # The new pods have the roles and the objectives of the old spec.
    assert {part.engine_id for part in world.plan.engines} == world.engine_uids
    assert sorted(world.roles.values()) == ["d-heavy", "d-heavy", "p-heavy", "p-heavy"]
    assert world.plan.slo_classes[0].ttft_milliseconds > 1
    assert world.conditions["SpecValid"] == ("False", "Refused")
    assert "spec.prefillHeavy" in world.message("Degraded")
    world.edit(prefillHeavy=1)
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")
    assert sorted(world.roles.values()) == ["d-heavy", "d-heavy", "d-heavy", "p-heavy"]
    assert world.plan.slo_classes[0].ttft_milliseconds == 1


async def test_routers_that_start_while_a_spec_is_refused_get_the_plan_in_force() -> None:
    world = World()
    await world.settle()
    world.edit(prefillHeavy=9)
    await world.settle()
    plan = world.plan
    world.start_operator()
    world.routers.plans.clear()
    await world.settle()
    assert len(world.routers.plans) == 2
    assert all(found == plan for found in world.routers.plans.values())
    assert world.conditions["SLOMet"] == ("Unknown", "NoTraffic")


async def test_a_new_process_says_nothing_of_routers_before_they_had_time_to_answer() -> None:
    world = World()
    await world.settle()
    before = world.snapshot()
    world.start_operator()
    world.routers.is_silent = True
    assert await world.reconcile() == 5.0
    assert world.snapshot() == before
    world.now += 5.0
    await world.reconcile()
    assert world.conditions["Progressing"] == ("True", "ApplyingPlan")
    # What was in force stays known.
    assert world.status["effective"]["prefillHeavy"] == 2
    world.routers.is_silent = False
    await world.settle()
    assert world.conditions["Progressing"] == ("False", "Settled")


async def test_forbidden_writes_are_reported_and_the_rest_is_applied() -> None:
    world = World()

    def forbid(verb: str, plural: str) -> None:
        if (verb, plural) == ("apply", "networkpolicies"):
            raise ForbiddenError("networkpolicies is forbidden")

    world.kubernetes.before = forbid
    await world.settle()
    assert world.conditions["Degraded"] == ("True", "Forbidden")
    assert world.conditions["Ready"] == ("True", "Serving")
    assert await world.reconcile() == 30.0


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (("apply", "deployments"), InvalidError("spec.template: unknown"), "PodTemplateRefused"),
        (("apply", "services"), InvalidError("spec.ports: invalid"), "Forbidden"),
        (("apply", "deployments"), ForbiddenError("deployments is forbidden"), "Forbidden"),
        (("apply", "services"), ForbiddenError("exceeded quota: services=1"), "QuotaExceeded"),
        (("apply", "deployments"), InvalidError("exceeded quota: cpu=1"), "QuotaExceeded"),
    ],
    ids=["invalid pods", "invalid service", "forbidden", "quota", "quota of pods"],
)
async def test_each_refused_write_is_reported_by_its_cause(call, error, reason: str) -> None:
    world = World()

    def refuse(*called: str) -> None:
        if called == call:
            raise error

    world.kubernetes.before = refuse
    await world.settle()
    assert world.conditions["Degraded"] == ("True", reason)
    assert str(error) in world.message("Degraded")
    world.kubernetes.before = lambda *_: None
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")


@pytest.mark.parametrize("plural", ["pods", "deployments", "services"])
async def test_a_missing_right_to_list_is_reported(plural) -> None:
    world = World()
    await world.settle()

    def forbid(verb: str, kind: str) -> None:
        if (verb, kind) == ("list", plural):
            raise ForbiddenError(f"{plural} is forbidden")

    world.kubernetes.before = forbid
    for _ in range(3):
        assert await world.reconcile() == 0.5
    assert world.conditions["Degraded"] == ("True", "Forbidden")
    assert plural in world.message("Degraded")
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.kubernetes.events[-1]["reason"] == "Forbidden"
    world.kubernetes.before = lambda *_: None
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")


@pytest.mark.parametrize("plural", ["services", "configmaps"])
async def test_a_missing_right_to_get_is_reported(plural) -> None:
    world = World()

    def forbid(verb: str, kind: str) -> None:
        if (verb, kind) == ("get", plural):
            raise ForbiddenError(f"{plural} is forbidden")

    world.kubernetes.before = forbid
    assert await world.reconcile() == 0.5
    assert world.conditions["Degraded"] == ("True", "Forbidden")
    assert plural in world.message("Degraded")
    world.kubernetes.before = lambda *_: None
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")


async def test_a_pod_template_that_reaches_the_host_is_refused() -> None:
    world = World()
    await world.settle()
    spec = world.deployment()["spec"]
    world.edit(engine={"podTemplate": {"spec": {"hostNetwork": True}}})
    await world.settle()
    assert world.conditions["SpecValid"] == ("False", "PodTemplateRefused")
    assert world.deployment()["spec"] == spec


async def test_an_affinity_that_reaches_other_namespaces_is_refused() -> None:
    world = World()
    everywhere = {"topologyKey": "kubernetes.io/hostname", "namespaceSelector": {}}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": [everywhere]}
    world.edit(engine={"affinity": {"podAntiAffinity": rule}})
    await world.settle()
    assert world.conditions["SpecValid"] == ("False", "PodTemplateRefused")
    assert "spec.engine.affinity.podAntiAffinity" in world.message("SpecValid")


async def test_a_model_that_never_served_may_be_corrected_and_one_that_does_may_get_another_name_for_clients() -> None:
    world = World(engine={"image": "broken:1"})
    world.kubernetes.broken_images.add("broken:1")
    await world.settle()
    world.edit(model={"name": "other"}, engine={"image": None})
    await world.settle()
    assert world.conditions["SpecValid"] == ("True", "Valid")
    assert world.conditions["Ready"] == ("True", "Serving")
    world.edit(model={"servedName": "mine"})
    await world.settle()
    assert world.conditions["SpecValid"] == ("True", "Valid")
    assert world.plan.served_model_name == "mine"
