"""What is read of a cluster, in which requests, and which of several errors counts; and what its certificates say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fake_kubernetes import FakeKubernetes, make_cluster
from test_planning_rules import POD

from sluice.v1 import control_pb2
from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.api.names import ClusterKey
from sluice_operator.controller.observation import ObservedState, observe_children, observe_plan_inputs, observe_routers
from sluice_operator.kubernetes.errors import BusyError, ForbiddenError, KubernetesError
from sluice_operator.resources.certificates import find_certificate_failures
from sluice_operator.routers.connection_table import RouterAddress

KEY = ClusterKey("ns", "tiny")
API_VERSIONS = {
    "Pod": "v1",
    "ConfigMap": "v1",
    "Deployment": "apps/v1",
    "Service": "v1",
    "ServiceAccount": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "Certificate": "cert-manager.io/v1",
}


def make_object(
    kind: str, name: str, *, component: str = "engine", cluster: str = "tiny", namespace: str = "ns"
) -> Any:
    labels = {"sluice.dev/cluster": cluster, "app.kubernetes.io/component": component}
    owner = {"controller": True, "uid": "u", "kind": "ServingCluster", "name": "tiny"}
    metadata = {"name": name, "namespace": namespace, "uid": name, "labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata}


def make_server(*, has_monitors: bool = False, has_cert_manager: bool = False) -> FakeKubernetes:
    kubernetes = FakeKubernetes()
    kubernetes.has_monitors, kubernetes.has_cert_manager = has_monitors, has_cert_manager
    for kind in API_VERSIONS:
        kubernetes.put(make_object(kind, "tiny-engine"))
        kubernetes.put(make_object(kind, "foreign", cluster="other"))
        kubernetes.put(make_object(kind, "tiny-engine", namespace="elsewhere"))
    for name, component in (("r2", "router"), ("e2", "engine"), ("e1", "engine"), ("x", "else"), ("r1", "router")):
        kubernetes.put(make_object("Pod", name, component=component))
    return kubernetes


def make_body() -> Any:
    body = make_cluster()
    body["metadata"]["uid"] = "u"
    return body


@pytest.mark.parametrize(
    ("has_monitors", "has_cert_manager"), [(False, False), (True, False), (False, True), (True, True)]
)
async def test_a_plans_inputs_are_read_first_and_the_other_children_afterwards(
    *, has_monitors: bool, has_cert_manager: bool
) -> None:
    kubernetes, body = make_server(has_monitors=has_monitors, has_cert_manager=has_cert_manager), make_body()
    observed = await observe_plan_inputs(kubernetes, KEY, body)
    assert Counter(kubernetes.calls) == Counter(
        [("discover", "servicemonitors"), ("discover", "certificates")]
        + [("list", plural) for plural in ("configmaps", "deployments", "pods")]
    )
    assert (observed.has_monitors, observed.has_cert_manager) == (has_monitors, has_cert_manager)
    assert observed.body is body
    assert set(observed.live) == {("ConfigMap", "tiny-engine"), ("Deployment", "tiny-engine")}
    assert set(observed.pods) == {"tiny-engine", "e1", "e2", "r1", "r2", "x"}
    assert [pod.name for pod in observed.engines] == ["e1", "e2", "tiny-engine"]
    assert [pod.name for pod in observed.routers] == ["r1", "r2"]
    kubernetes.calls.clear()
    whole = await observe_children(kubernetes, KEY, observed)
    others = {"ServiceAccount", "NetworkPolicy", "Service", "PodDisruptionBudget"}
    others |= {"ServiceMonitor"} if has_monitors else set()
    others |= {"Certificate"} if has_cert_manager else set()
    assert {kind for kind, _ in whole.live} == {"ConfigMap", "Deployment", *others}
    assert len(kubernetes.calls) == len(others)
    assert replace(whole, live={}) == replace(observed, live={})


def test_a_child_counts_where_it_is_of_this_very_cluster() -> None:
    live = {("Deployment", "tiny-engine"): make_object("Deployment", "tiny-engine")}
    observed = ObservedState(
        body=make_body(), live=live, pods={}, engines=(), routers=(), has_monitors=False, has_cert_manager=False
    )
    assert observed.deployment("engine") == live["Deployment", "tiny-engine"]
    assert observed.deployment("router") is None
    observed.body["metadata"]["uid"] = "another"
    assert observed.deployment("engine") is None


@pytest.mark.parametrize(
    ("errors", "counts"),
    [
        ({"pods": ForbiddenError("no right")}, "no right"),
        ({"pods": ForbiddenError("no right"), "configmaps": BusyError("later")}, "later"),
        ({"configmaps": ForbiddenError("no right"), "servicemonitors": BusyError("later")}, "later"),
        ({"servicemonitors": ForbiddenError("no right")}, "no right"),
    ],
)
async def test_of_several_errors_one_that_asks_for_a_pause_counts(
    errors: dict[str, KubernetesError], counts: str
) -> None:
    kubernetes = make_server()

    def fail(_verb: str, plural: str) -> None:
        if plural in errors:
            raise errors[plural]

    kubernetes.before = fail
    with pytest.raises(KubernetesError, match=counts) as caught:
        await observe_plan_inputs(kubernetes, KEY, make_body())
    assert isinstance(caught.value, BusyError) is (counts == "later")


async def test_an_error_of_the_other_children_comes_alone() -> None:
    kubernetes = make_server()
    observed = await observe_plan_inputs(kubernetes, KEY, make_body())

    def fail(_verb: str, plural: str) -> None:
        raise BusyError("later") if plural == "services" else ForbiddenError("no right")

    kubernetes.before = fail
    with pytest.raises(BusyError, match="later"):
        await observe_children(kubernetes, KEY, observed)


class PlayedRouters:
    """Connections to routers that note what they are to connect to."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        engine = control_pb2.EngineStatus(engine_id="e1", state=control_pb2.ENGINE_STATE_READY)
        self.known = {"r1": control_pb2.GetStatusResponse(router_id="r", engines=[engine])}

    def set_routers(self, *given: Any) -> None:
        self.given.append(given)

    def statuses(self, key: ClusterKey) -> dict[str, control_pb2.GetStatusResponse]:
        return self.known if key == KEY else {}


def test_routers_are_connected_to_from_their_address_to_their_end() -> None:
    router = replace(POD, name="r1", address="10.0.0.1")
    routers = (
        router,
        replace(router, name="r2", address=""),
        replace(router, name="r3", has_ended=True),
        replace(router, name="r4", address="10.0.0.4", is_ending=True, is_ready=False),
        replace(router, name="r5", address="10.0.0.5", control_tls="c.n.svc", num_workers=2),
    )
    observed = ObservedState(
        body=make_body(), live={}, pods={}, engines=(), routers=routers, has_monitors=False, has_cert_manager=False
    )
    played = PlayedRouters()
    found = observe_routers(played, KEY, observed)
    addresses = {
        "r1": RouterAddress(host="10.0.0.1"),
        "r4": RouterAddress(host="10.0.0.4"),
        "r5": RouterAddress(host="10.0.0.5", server_name="c.n.svc"),
        "r5-1": RouterAddress(host="10.0.0.5", worker=1, server_name="c.n.svc"),
    }
    assert played.given == [(KEY, addresses)]
    assert (found.statuses, set(found.reports)) == (played.known, {"e1"})


def certify(*conditions: tuple[str, str, str]) -> Any:
    said = [{"type": kind, "status": status, "message": message} for kind, status, message in conditions]
    return {**make_object("Certificate", "tiny-front-tls"), "status": {"conditions": said}}


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (make_object("Certificate", "tiny-front-tls"), None),
        ({**make_object("Certificate", "c"), "status": {"conditions": None}}, None),
        (certify(("Ready", "True", "it is")), None),
        (certify(("Ready", "False", "no issuer")), "no issuer"),
        (certify(("Ready", "Unknown", "no issuer")), "no issuer"),
        (certify(("Ready", "False", "no issuer"), ("Issuing", "True", "just now")), None),
        (certify(("Ready", "False", "no issuer"), ("Issuing", "False", "denied")), "denied"),
        (certify(("Ready", "False", ""), ("Issuing", "False", "")), "no reason given"),
        (certify(("Issuing", "False", "denied")), None),
        ({**certify(("Ready", "False", "no issuer")), "kind": "Other"}, None),
    ],
)
def test_a_certificate_that_is_not_issued_says_why(live: Any, said: str | None) -> None:
    words = "Certificate tiny-front-tls is not issued: {}; read `kubectl describe certificate tiny-front-tls`"
    expected = [Failure(reason=Reason.MOUNT_FAILED, message=words.format(said))] if said else []
    assert find_certificate_failures([make_object("Service", "s"), live]) == expected
    # Each that is not issued is said.
    broken = certify(("Ready", "False", "no issuer"))
    assert len(find_certificate_failures([live, broken])) == len(expected) + 1
