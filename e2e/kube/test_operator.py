"""The operator as a process on a real API server, with exactly the rights of ``kubernetes/rbac.py``.

kwok plays the nodes: pods become Ready in name only, and a stand-in answers for their routers. These tests cover
objects, plans, rights and leader election. ``test_serving.py`` has real engines and streams.
"""

from __future__ import annotations

import signal
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from kubectl_cluster import (
    CHILDREN,
    PATIENCE_S,
    KubectlCluster,
    find_turn,
    make_manifest,
    read_image,
    read_images,
    wait_for,
)
from operator_process import Operator, Replicas, make_access
from stand_in_router import StandInRouters, run_stand_in_routers
from testbed.fake_nodes import is_ready, make_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.client import Client
    from testbed.cluster import Testbed

pytestmark = pytest.mark.usefixtures("crd", "open_node")


@pytest.fixture(scope="module")
def open_node(client: Client) -> Iterator[None]:
    """A kwok node without a taint, which any pod may run on."""
    node = make_node("open")
    del node["spec"]["taints"]
    client.apply(node)
    wait_for(lambda: is_ready(client, "open"), "the open node")
    yield
    client.kubectl("delete", "node", "open")


@pytest.fixture(scope="module")
def routers(client: Client) -> Iterator[StandInRouters]:
    with run_stand_in_routers(client) as running:
        yield running


@pytest.fixture(scope="module")
def replicas(client: Client, testbed: Testbed) -> Iterator[Replicas]:
    made = Replicas(client, testbed)
    yield made
    made.end()


@pytest.fixture(scope="module")
def operator(replicas: Replicas, routers: StandInRouters) -> Operator:
    """The replica that leads at first."""
    started = replicas.start("first", watch_nodes="true")
    wait_for(lambda: started.leads, "a leader")
    return started


class Cluster(KubectlCluster):
    """The example in a namespace. No program runs in its pods, so they mount nothing and wait for no claim."""

    def __init__(self, client: Client, namespace: str) -> None:
        super().__init__(client, namespace)
        manifest = make_manifest(router={"replicas": 2})
        manifest["spec"]["model"]["source"] = {"huggingFace": {}}
        self.apply(manifest)


@pytest.fixture
def cluster(client: Client, operator: Operator, namespace: str, routers: StandInRouters) -> Iterator[Cluster]:
    """A cluster that has settled, in a namespace under Pod Security ``restricted``."""
    made = Cluster(client, namespace)
    made.wait("Progressing", "Settled")
    yield made
    made.kubectl("delete", "slc", "tiny", "--ignore-not-found")
    routers.stuck.clear()


def test_a_new_cluster_becomes_ready(cluster: Cluster, client: Client) -> None:
    cluster.kubectl("wait", "--for=condition=Ready", "--timeout=10s", "slc/tiny")
    assert cluster.roles == ["d-heavy", "d-heavy", "p-heavy", "p-heavy"]
    names = {f"{item['kind']}/{item['metadata']['name']}" for item in cluster.read(CHILDREN)["items"]}
    assert {"Deployment/tiny-engine", "Deployment/tiny-router", "Service/tiny-router", "Service/tiny-engines"} <= names
    assert {"ConfigMap/tiny-plan", "NetworkPolicy/tiny-engine", "PodDisruptionBudget/tiny-engine"} <= names
    columns = cluster.kubectl("get", "slc", "tiny", "-o", "wide").splitlines()[1].split()
    assert columns[:5] == ["tiny", "True", "4", "2", "2"]
    assert "Serving" in cluster.kubectl("events", "--for", "servingcluster/tiny")


def test_live_edits_reach_the_routers_and_replace_no_pod(cluster: Cluster, routers: StandInRouters) -> None:
    before = set(cluster.engines)
    cluster.edit(prefillHeavy=1, chunkSizes={"prefillHeavy": 1024, "decodeHeavy": 0})
    wait_for(lambda: cluster.roles == ["d-heavy"] * 3 + ["p-heavy"], "the roles")
    cluster.wait("Progressing", "Settled")
    assert {(part.role, part.chunk_size_tokens) for part in routers.plan.engines} == {(1, 1024), (2, 0)}
    effective = cluster.read("slc/tiny")["status"]["effective"]
    assert effective["chunkSizes"] == {"prefillHeavy": 1024, "decodeHeavy": 0}
    assert set(cluster.engines) == before


def test_engines_leave_only_when_they_are_drained(cluster: Cluster, routers: StandInRouters) -> None:
    before = set(cluster.engines)
    routers.stuck = set(before)
    cluster.kubectl("scale", "slc/tiny", "--replicas=2")
    cluster.wait("Progressing", "Draining")
    draining = wait_for(lambda: routers.draining, "the plan to reach the routers")
    assert len(draining) == 2
    assert set(cluster.engines) == before
    # One that still has work holds back no other.
    routers.stuck = {slow := min(draining)}
    wait_for(lambda: set(cluster.engines) == before - draining | {slow}, "the end of one engine")
    cluster.wait("Progressing", "Draining")
    routers.stuck = set()
    wait_for(lambda: len(cluster.engines) == 2, "the end of two engines")
    assert set(cluster.engines) == before - draining
    cluster.wait("Progressing", "Settled")
    assert cluster.roles == ["d-heavy", "p-heavy"]


def test_an_engine_leaves_a_node_that_is_cordoned_and_comes_back(
    cluster: Cluster, client: Client, routers: StandInRouters
) -> None:
    before = set(cluster.engines)
    client.kubectl("cordon", "open")
    try:
        draining = wait_for(lambda: routers.draining, "the plan to reach the routers")
        assert len(draining) == 1
        cluster.wait("Progressing", "Draining")
        assert [part.role for part in routers.plan.engines if not part.is_draining].count(1) in (1, 2)
    finally:
        client.kubectl("uncordon", "open")
    wait_for(lambda: not routers.draining, "its return")
    cluster.wait("Progressing", "Settled")
    assert set(cluster.engines) == before


def test_a_rollout_that_cannot_progress_stops_and_can_be_reverted(cluster: Cluster) -> None:
    before = set(cluster.engines)
    cluster.edit(engine={"nodeSelector": {"no": "such-node"}})
    cluster.wait("Progressing", "RolloutStopped")
    cluster.wait("Degraded", "Unschedulable")
    kept = before & set(cluster.engines)
    assert len(kept) == 3
    cluster.kubectl("wait", "--for=condition=Ready", "--timeout=5s", "slc/tiny")
    cluster.edit(engine={"nodeSelector": None})
    cluster.wait("Progressing", "Settled")
    assert kept < set(cluster.engines)


def test_an_edit_that_restarts_engines_replaces_all_of_them_and_no_router(cluster: Cluster) -> None:
    before = set(cluster.engines)
    template = cluster.read("deployment/tiny-router")["spec"]["template"]
    cluster.edit(engine={"maxBatchTokens": 4096})
    wait_for(lambda: not before & set(cluster.engines), "new engines")
    cluster.wait("Progressing", "Settled")
    assert cluster.read("deployment/tiny-router")["spec"]["template"] == template


def test_a_gated_roll_goes_back_by_itself_and_goes_on_when_its_engines_are_good(
    cluster: Cluster, routers: StandInRouters
) -> None:
    before = set(cluster.engines)
    gate = {"durationSeconds": 3, "minRequests": 10, "timeoutSeconds": 600}
    cluster.edit(rollout={"maxSurge": "100%", "maxUnavailable": 0, "gate": gate}, engine={"maxBatchTokens": 4096})

    def is_held() -> bool:
        return len(cluster.engines) == 8 and bool(cluster.read("deployment/tiny-engine")["spec"].get("paused"))

    def serve(*, is_good: bool) -> None:
        """More requests end on every engine; on the new ones they fail unless those are good."""
        for uid in cluster.engines:
            routers.num_ended[uid] += 5
            routers.num_failed[uid] += 0 if is_good or uid in before else 5

    def has_gone_back() -> bool:
        serve(is_good=False)
        found = {item["type"]: item["reason"] for item in cluster.read("slc/tiny")["status"]["conditions"]}
        return found["Degraded"] == found["Progressing"] == "RolledBack"

    wait_for(is_held, "the new engines beside the old ones")
    assert before < set(cluster.engines)
    wait_for(has_gone_back, "the way back")
    wait_for(lambda: set(cluster.engines) == before, "the end of the new engines")
    assert "maxErrorRate" in cluster.kubectl("describe", "slc", "tiny")

    cluster.edit(engine={"maxBatchTokens": 2048 * 4})
    wait_for(is_held, "other new engines beside the old ones")

    def has_gone_on() -> bool:
        serve(is_good=True)
        return not before & set(cluster.engines)

    wait_for(has_gone_on, "the end of the old engines")
    cluster.wait("Progressing", "Settled")
    assert len(cluster.engines) == 4


@pytest.fixture
def cert_manager(client: Client) -> Iterator[Callable[[], None]]:
    """Installs cert-manager's CRD of Certificates, without a controller that issues any."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "Certificate", "plural": "certificates", "singular": "certificate"}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "certificates.cert-manager.io"},
        "spec": {"group": "cert-manager.io", "scope": "Namespaced", "names": names, "versions": [version]},
    }
    yield lambda: client.apply(definition)
    client.kubectl("delete", "crd", "certificates.cert-manager.io", "--ignore-not-found")


def test_certificates_are_requested_once_cert_manager_is_installed(
    cluster: Cluster, cert_manager: Callable[[], None]
) -> None:
    before = cluster.read("deployment/tiny-router")["spec"]["template"]
    issuer = {"kind": "ClusterIssuer", "name": "ca"}
    cluster.edit(router={"tls": {"mode": "CertManager", "issuerRef": issuer, "dnsNames": ["llm.example.com"]}})
    cluster.wait("SpecValid", "NotAvailable")
    assert cluster.read("deployment/tiny-router")["spec"]["template"] == before
    cert_manager()
    cluster.wait("SpecValid", "Valid")
    certificate = wait_for(lambda: cluster.read("certificates")["items"], "the certificate")[0]
    assert certificate["metadata"]["name"] == "tiny-front-tls"
    assert certificate["spec"]["dnsNames"] == ["llm.example.com"]
    assert certificate["spec"]["issuerRef"] == {"group": "cert-manager.io", **issuer}
    (volume,) = [
        item
        for item in cluster.read("deployment/tiny-router")["spec"]["template"]["spec"]["volumes"]
        if "secret" in item
    ]
    assert volume["secret"]["secretName"] == certificate["spec"]["secretName"]
    cluster.edit(router={"tls": {"dnsNames": ["api.example.com"]}})
    wait_for(lambda: cluster.read("certificates")["items"][0]["spec"]["dnsNames"] == ["api.example.com"], "the name")
    cluster.edit(router={"tls": None})
    wait_for(lambda: not cluster.read("certificates")["items"], "the end of the certificate")
    cluster.wait("Progressing", "Settled")
    assert cluster.read("deployment/tiny-router")["spec"]["template"]["spec"] == before["spec"]


def test_network_tls_is_refused_while_the_operator_has_no_certificate(
    cluster: Cluster, routers: StandInRouters
) -> None:
    before = cluster.versions()
    cluster.edit(network={"tls": {"mode": "SecretRef", "secretName": "peers"}})
    cluster.wait("SpecValid", "NotAvailable")
    now = cluster.versions()
    assert {name for name in before if now[name] != before[name]} == {"ServingCluster/tiny"}
    cluster.wait("Degraded", "SpecInvalid")
    # Meanwhile the spec that was accepted last is in force, also for a pod that is new.
    lost, pod = next(iter(cluster.engines.items()))
    cluster.kubectl("delete", "pod", pod["metadata"]["name"])
    wait_for(lambda: len(cluster.engines) == 4 and lost not in cluster.engines, "another pod")
    wait_for(lambda: {part.engine_id for part in routers.plan.engines} == set(cluster.engines), "its place in the plan")
    wait_for(lambda: cluster.roles == ["d-heavy", "d-heavy", "p-heavy", "p-heavy"], "its role")
    cluster.edit(network={"tls": None})
    cluster.wait("SpecValid", "Valid")


def test_children_edited_or_deleted_by_hand_are_repaired(cluster: Cluster) -> None:
    cluster.kubectl(
        "patch", "service", "tiny-engines", "--type=merge", "-p", '{"spec":{"publishNotReadyAddresses":false}}'
    )
    wait_for(lambda: cluster.read("service/tiny-engines")["spec"].get("publishNotReadyAddresses"), "the field")
    cluster.kubectl("delete", "networkpolicy/tiny-engine", "pdb/tiny-engine")
    wait_for(lambda: "NetworkPolicy/tiny-engine" in cluster.versions(), "the policy")
    cluster.kubectl("delete", "configmap", "tiny-plan")
    wait_for(lambda: "ConfigMap/tiny-plan" in cluster.versions(), "the plan")
    cluster.wait("Progressing", "Settled")


def test_a_foreign_service_with_our_name_is_left_alone(
    client: Client, namespace: str, operator: Operator, routers: StandInRouters
) -> None:
    client.kubectl("-n", namespace, "create", "service", "clusterip", "tiny-router", "--tcp=1:1")
    cluster = Cluster(client, namespace)
    cluster.wait("Degraded", "NameConflict")
    assert "ownerReferences" not in cluster.read("service/tiny-router")["metadata"]
    cluster.kubectl("delete", "service", "tiny-router")
    cluster.wait("Degraded", "AsExpected")
    cluster.kubectl("delete", "slc", "tiny")


def test_an_idle_cluster_causes_no_writes(cluster: Cluster, operator: Operator) -> None:
    versions, writes = cluster.wait_unchanged(), operator.writes()
    time.sleep(10)
    assert cluster.versions() == versions
    assert operator.writes() == writes


def test_a_resync_writes_nothing(cluster: Cluster, operator: Operator) -> None:
    versions = cluster.wait_unchanged()
    reconciles = operator.calls()["get", "servingclusters", "200"]
    # This event changes nothing that the operator owns.
    cluster.kubectl("label", "slc", "tiny", "touched=yes")
    wait_for(lambda: operator.calls()["get", "servingclusters", "200"] > reconciles, "a reconcile")
    time.sleep(1)
    after = cluster.versions()
    assert {name for name in after if after[name] != versions[name]} == {"ServingCluster/tiny"}


def test_a_deleted_cluster_takes_everything_with_it(cluster: Cluster) -> None:
    cluster.kubectl("delete", "slc", "tiny")
    ours = {"tiny-engine", "tiny-router", "tiny-engines", "tiny-router-control", "tiny-plan"}
    wait_for(lambda: not {name.split("/")[1] for name in cluster.versions()} & ours, "the end of the children")


def test_a_cluster_recreated_under_its_old_name_gets_new_objects(cluster: Cluster, client: Client) -> None:
    before = set(cluster.engines)
    cluster.kubectl("delete", "slc", "tiny", "--wait=false")
    recreated = Cluster(client, cluster.namespace)
    wait_for(lambda: not before & set(recreated.engines), "the end of the old engines")
    recreated.wait("Progressing", "Settled")


def test_the_next_replica_leads_after_the_leader_stops_or_is_killed(
    cluster: Cluster, operator: Operator, replicas: Replicas
) -> None:
    second = replicas.start("second")
    wait_for(lambda: second.read("/readyz") == "ok\n", "the second replica")
    assert not second.leads
    versions = cluster.versions()
    assert not any(status == "403" for _, _, status in operator.calls())
    assert operator.end(signal.SIGTERM) == 0
    wait_for(lambda: second.leads, "the second one as leader")
    # The new leader finds nothing to do.
    wait_for(lambda: ("get", "servingclusters", "200") in second.calls(), "a reconcile")
    time.sleep(1)
    assert cluster.versions() == versions
    third = replicas.start("third")
    second.end(signal.SIGKILL)
    cluster.edit(prefillHeavy=3)
    wait_for(lambda: third.leads, "the third one as leader")
    wait_for(lambda: cluster.roles == ["d-heavy"] + ["p-heavy"] * 3, "the roles")
    assert not any(status == "403" for _, _, status in third.calls())
    assert "Traceback" not in third.log.read_text()


def test_an_operator_for_one_namespace_needs_no_rights_elsewhere(
    cluster: Cluster, client: Client, testbed: Testbed, namespace: str, replicas: Replicas
) -> None:
    kubeconfig = make_access(client, testbed, "narrow", namespace)
    options = {"watch_namespaces": namespace, "lease_name": "narrow", "watch_nodes": "true"}
    narrow = replicas.start("narrow", kubeconfig, **options)
    wait_for(lambda: narrow.leads, "the operator for one namespace")
    versions = cluster.versions()
    wait_for(lambda: ("get", "servingclusters", "200") in narrow.calls(), "a reconcile")
    cluster.edit(prefillHeavy=3)
    cluster.wait("Progressing", "Settled")
    assert cluster.versions() != versions
    assert "sluice_operator_clusters 1.0" in narrow.read("/metrics")
    # Nodes are what it may not read, and it goes on without.
    assert {call for call in narrow.calls() if call[2] == "403"} == {("list", "nodes", "403")}
    assert "nodes are not watched" in narrow.log.read_text()
    assert narrow.end(signal.SIGTERM) == 0
    assert '"ERROR"' not in narrow.log.read_text()


@pytest.mark.parametrize("program", ["kube-apiserver", "etcd"])
def test_a_restart_of_the_control_plane_changes_no_engine(
    program: str, cluster: Cluster, testbed: Testbed, replicas: Replicas
) -> None:
    """The operator exits if it cannot renew its lease in time, which depends on how long the API server is away."""
    before = set(cluster.engines)
    testbed.control_plane.stop_program(program)
    time.sleep(2)
    testbed.control_plane.start_program(program)
    wait_for(cluster.client.is_ready, "the API server")
    cluster.edit(prefillHeavy=3)

    def have_roles() -> bool:
        replicas.restart_ended()
        return cluster.roles == ["d-heavy"] + ["p-heavy"] * 3

    wait_for(have_roles, "the roles")
    cluster.wait("Progressing", "Settled")
    assert set(cluster.engines) == before


def test_three_clusters_take_the_images_of_a_new_operator_one_after_the_other(
    client: Client, routers: StandInRouters, replicas: Replicas, make_namespace: Callable[[str], str]
) -> None:
    replicas.end()
    old = replicas.start("old")
    stuck, *clusters = [Cluster(client, make_namespace("restricted")) for _ in range(4)]
    stuck.edit(engine={"nodeSelector": {"no": "such-node"}})
    for each in clusters:
        each.edit(replicas=2)
    stuck.wait("Degraded", "Unschedulable")
    for each in clusters:
        each.wait("Progressing", "Settled")
    assert old.end(signal.SIGTERM) == 0
    replicas.start("new", engine_image="sluice-engine:9")

    image = "{.spec.template.spec.containers[0].image}"
    for each in clusters:
        # As docs/guides/upgrade.md says. A new operator lets half a minute pass first.
        engines, limit = "deployment/tiny-engine", f"--timeout={2 * PATIENCE_S:.0f}s"
        each.kubectl("wait", f"--for=jsonpath={image}=sluice-engine:9", engines, limit)
        each.kubectl("rollout", "status", engines, limit)
        assert read_images(each) == {"sluice-engine:9"}
        each.wait("Progressing", "Settled")
    turns = sorted(find_turn(each) for each in clusters)
    print(f"first new engine, last one Ready: {turns}")
    assert all(end <= begin for (_, end), (begin, _) in pairwise(turns))
    # One that cannot start keeps nobody waiting, and comes last.
    wait_for(
        lambda: read_image(stuck.read("deployment/tiny-engine")["spec"]["template"]["spec"]) == "sluice-engine:9",
        "the new image in the cluster that cannot start",
    )
    for each in (stuck, *clusters):
        each.kubectl("delete", "slc", "tiny")
