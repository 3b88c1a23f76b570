"""A ServingCluster can neither leave its namespace through the pod template, nor make the operator print a secret.

The API server is real, and so is what it stores of a template without a schema: nulls, unusual capitals, unknown
fields. ``test_node.py`` tests that pods obey their limits, which is the kubelet's part.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import signal
import time
from typing import TYPE_CHECKING, Any

import children_harness
import pytest
import test_pod_template
import yaml
from in_process_operator import PATIENCE_S, PAUSE_S, ReconciledCluster, connect
from kubectl_cluster import wait_for
from light_cluster import LightCluster
from operator_process import Operator, make_access
from stand_in_router import run_stand_in_routers
from testbed.fake_nodes import is_ready, make_node

from sluice_operator.controller.manager import format_now
from sluice_operator.controller.reconciler import Reconciler
from sluice_operator.kubernetes.errors import InvalidError
from sluice_operator.kubernetes.kinds import DEPLOYMENTS
from sluice_operator.resources.pods.security_context import CONTAINER_SECURITY
from sluice_operator.settings import OperatorSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.client import Client
    from testbed.cluster import Testbed

    from sluice_operator.kubernetes.client import KubernetesClient

pytestmark = pytest.mark.usefixtures("crd", "security_node")

PORT = 17520
CANARIES = {"hf-token": "canary-hf-5f1c", "api-keys": "canary-key-8d2e", "other": "canary-other-3b7a"}
# Misspelled on purpose: a lenient parser might take it for a pod's field.
MISSPELLED = {
    "capital-host-path": {"spec": {"volumes": [{"name": "x", "HostPath": {"path": "/"}}]}},
    "capital-host-network": {"spec": {"HostNetwork": True}},
    "lower-host-network": {"spec": {"hostnetwork": True}},
    "capital-privileged": {
        "spec": {"containers": [{"name": "side", "image": "i", "securityContext": {"Privileged": True}}]}
    },
}
# Pod Security has no rule for them.
UNKNOWN_TO_POD_SECURITY = {
    "token-volume",
    "device",
    "another-namespace-s-data",
    "other-pods",
    "other-pods-preferred",
}
HATCHES = {**test_pod_template.HOST, **test_pod_template.OWNED, **MISSPELLED}


@pytest.fixture(scope="module")
def security_node(client: Client) -> Iterator[None]:
    """A kwok node without a taint, which any pod may run on."""
    node = make_node("security")
    del node["spec"]["taints"]
    client.apply(node)
    wait_for(lambda: is_ready(client, "security"), "the open node")
    yield
    client.kubectl("delete", "node", "security")


async def create_with_template(
    kubernetes: KubernetesClient, namespace: str, name: str, template: Any, **settings: Any
) -> ReconciledCluster:
    """Creates a cluster with a podTemplate, and reconciles it until only its pods are missing."""
    cluster = ReconciledCluster(kubernetes, namespace, name)
    cluster.reconciler = Reconciler(
        cluster.watched,
        cluster.routers,
        OperatorSettings(identity="security", namespace="sluice-system", **settings),
        now=time.monotonic,
        now_text=format_now,
    )
    await cluster.create(engine={"podTemplate": template})
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await cluster.reconcile():
                return cluster
            await asyncio.sleep(PAUSE_S)


async def read_condition(cluster: ReconciledCluster, kind: str) -> dict[str, Any]:
    conditions = (await cluster.read())["status"]["conditions"]
    return next(item for item in conditions if item["type"] == kind)


async def test_no_pod_template_reaches_the_host_or_another_namespace(
    client: Client, make_namespace: Callable[[str], str]
) -> None:
    # Only the operator can refuse here: the namespace allows everything.
    namespace = make_namespace("privileged")
    # Of the API server: the schema declares the fields of a pod that belong to Sluice.
    refusals: list[str] = []
    async with connect(client) as kubernetes:

        async def try_one(number: int, template: Any) -> None:
            try:
                cluster = await create_with_template(kubernetes, namespace, f"h{number:03}", template)
            except InvalidError as error:
                refusals.append(str(error))
                return
            engines = await kubernetes.get(DEPLOYMENTS, namespace, f"h{number:03}-engine")
            refused = [await read_condition(cluster, kind) for kind in ("SpecValid", "Degraded")]
            assert "PodTemplateRefused" in {item["reason"] for item in refused}, refused
            assert engines is None, template
            await cluster.delete()

        async with asyncio.TaskGroup() as group:
            for number, template in enumerate(HATCHES.values()):
                group.create_task(try_one(number, template))
    assert refusals
    assert all("spec.engine.podTemplate" in refusal for refusal in refusals)


def test_pod_security_alone_lets_some_of_it_through(client: Client, namespace: str) -> None:
    """Why the operator checks besides: Pod Security says nothing of other namespaces, tokens and devices.

    The rest is refused here, under ``restricted``. Without a label, which is Kubernetes' default, nothing is.
    """
    verdicts = {
        name: ask_pod_security(client, namespace, template) for name, template in test_pod_template.HOST.items()
    }
    assert {name for name, verdict in verdicts.items() if verdict == "accepted"} == UNKNOWN_TO_POD_SECURITY
    assert "invalid" not in verdicts.values()


def ask_pod_security(client: Client, namespace: str, template: dict[str, Any]) -> str:
    """Has a pod created with a podTemplate, as a dry run; returns whether it is accepted, refused or invalid."""
    pod = children_harness.engine_template(engine={"podTemplate": template})
    for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
        container.setdefault("image", "side:1")
        if container["name"] not in ("engine", "fetch-model"):
            # A container of the user's own is refused without these, whatever else it asks for.
            context = {**CONTAINER_SECURITY, **container.get("securityContext", {})}
            if context.get("privileged"):
                del context["allowPrivilegeEscalation"]  # Kubernetes takes no such pair
            container["securityContext"] = context
    # Admission needs the service account to exist.
    pod["spec"]["serviceAccountName"] = "default"
    body = {"apiVersion": "v1", "kind": "Pod", **pod}
    body["metadata"] = {**pod["metadata"], "name": "template"}
    answer = client.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", body)
    if answer.is_ok:
        return "accepted"
    return "refused" if "violates PodSecurity" in answer.content["message"] else "invalid"


async def test_allowed_host_access_is_rendered_and_pod_security_still_applies(
    client: Client, make_namespace: Callable[[str], str]
) -> None:
    template = test_pod_template.HOST["path"]
    async with connect(client) as kubernetes:
        for level in ("privileged", "restricted"):
            namespace = make_namespace(level)
            cluster = await create_with_template(kubernetes, namespace, "host", template, allow_host_access=True)
            engines = await kubernetes.get(DEPLOYMENTS, namespace, "host-engine")
            assert engines is not None
            assert {"hostPath": {"path": "/", "type": ""}, "name": "x"} in engines["spec"]["template"]["spec"][
                "volumes"
            ]
            async with asyncio.timeout(PATIENCE_S):
                while not await has_expected_condition(cluster, level):
                    await cluster.reconcile()
                    await asyncio.sleep(PAUSE_S)
            await cluster.delete()


async def has_expected_condition(cluster: ReconciledCluster, level: str) -> bool:
    degraded = await read_condition(cluster, "Degraded")
    if level == "privileged":
        return degraded["reason"] == "AsExpected" and len(cluster.engines) == 4
    return degraded["reason"] == "Forbidden" and "violates PodSecurity" in degraded["message"] and not cluster.engines


def test_secrets_are_never_shown(client: Client, testbed: Testbed, namespace: str) -> None:
    for name, value in CANARIES.items():
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}}
        client.apply({**secret, "stringData": {"token": value, "key": value}})
    kubeconfig = make_access(client, testbed, "security")
    token = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"]
    log = testbed.settings.logs / "operator-security.log"
    with run_stand_in_routers(client):
        operator = Operator(kubeconfig, PORT, log, identity="security", lease_name="security", log_level="DEBUG")
        try:
            wait_for(lambda: operator.leads, "a leader")
            shown = use_secrets(client, namespace) + operator.read("/metrics")
        finally:
            operator.end(signal.SIGTERM)
    logged = log.read_text()
    shown += logged
    # The text has what must have been printed, and no secret.
    assert "secretKeyRef" in shown
    assert "secretKeyRef.kez" in logged
    assert '"level": "DEBUG"' in logged
    for secret in (*CANARIES.values(), token):
        for written in (secret, base64.b64encode(secret.encode()).decode()):
            assert written not in shown


def use_secrets(client: Client, namespace: str) -> str:
    """Uses secrets wherever a ServingCluster can, validly and not; returns all that people can read about it."""
    cluster = LightCluster(client, namespace)
    cluster.edit(
        model={"source": {"huggingFace": {"tokenSecretRef": {"name": "hf-token", "key": "token"}}}},
        engine={"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "other", "key": "key"}}}]},
        router={"auth": {"mode": "APIKey", "apiKey": {"secretName": "api-keys"}}},
    )
    cluster.wait("Progressing", "Settled")
    read = [describe_all(cluster)]
    bad = copy.deepcopy(test_pod_template.HOST["path"])
    bad["spec"]["volumes"].append({"name": "keys", "secret": {"secretName": "api-keys"}})
    cluster.edit(engine={"podTemplate": bad})
    cluster.wait("SpecValid", "PodTemplateRefused")
    assert "spec.engine.podTemplate.spec.volumes[x].hostPath" in cluster.message("SpecValid")
    read.append(describe_all(cluster))
    # The API server quotes the values that it refuses.
    env = {"name": "engine", "env": [{"name": "K", "valueFrom": {"secretKeyRef": {"name": "other", "kez": "key"}}}]}
    cluster.edit(engine={"podTemplate": {"spec": {"volumes": None, "containers": [env]}}})
    cluster.wait("Degraded", "PodTemplateRefused")
    cluster.wait("SpecValid", "Valid")
    assert "valueFrom.secretKeyRef.kez" in cluster.message("Degraded")
    read.append(describe_all(cluster))
    cluster.edit(engine={"podTemplate": None})
    cluster.wait("Progressing", "Settled")
    cluster.kubectl("delete", "slc", "tiny")
    return "".join(read)


def describe_all(cluster: LightCluster) -> str:
    """Returns each object of the namespace except Secrets as text, with descriptions."""
    kinds = cluster.client.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    readable = ",".join(kind for kind in kinds if kind != "secrets")
    return cluster.kubectl("get", readable, "-o", "json", "--ignore-not-found") + cluster.kubectl(
        "describe", "slc,pods"
    )
