"""The operator as a process among faults: a failing API server, silent watches, lost leases, broken pods and nodes.

Requests go through ``FaultProxy``. kwok plays all nodes but one: that one has no kubelet, and its pods stay as the test
writes them. ``test_operator_crashes.py`` has the crashes. ``test_operator.py`` has children that were edited by hand,
foreign objects, a killed control plane and clusters that were created anew.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from fault_proxy import FaultProxy
from kubectl_cluster import PATIENCE_S, wait_for
from light_cluster import MERGE, LightCluster
from operator_process import SYSTEM, Operator, make_access
from stand_in_router import StandInRouters, run_stand_in_routers
from testbed.fake_nodes import is_ready, make_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from testbed.client import Client
    from testbed.cluster import Testbed

pytestmark = pytest.mark.usefixtures("crd", "no_other_clusters", "nodes")

PORT = 17480
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/faults"
SILENT = "silent"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
# The informer (``controller/informer.py``) takes a watch for dead after about this time without a bookmark.
INACTIVITY_S = 70.0
# After this time without a request, no reconcile is under way.
STILL_S = 4.0
ENOUGH_FAULTS = 30
# How often a test begins anew where chance took away what it is about.
NUM_TRIES = 3
# How often a replica that does not lead asks for the lease before it counts as waiting.
NUM_ATTEMPTS = 5
FAULTS = {"429", "500", "503", "refused", "lost", "slow"}


Seen = TypeVar("Seen")


class Replica:
    """One replica of the operator. As Kubernetes would, it restarts the process whenever that exits."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self._kubeconfig, self._log = kubeconfig, log
        self.num_ends = 0
        self._operator: Operator | None = None

    @property
    def operator(self) -> Operator:
        if self._operator is not None:
            self.num_ends += self._operator.restart_if_ended()
        else:
            self._operator = Operator(
                self._kubeconfig,
                PORT,
                self._log,
                identity="faults",
                lease_name="faults",
                request_timeout_s="2",
                log_level="INFO",
            )
        return self._operator

    @property
    def leads(self) -> bool:
        return self.operator.leads

    def stop(self) -> None:
        if self._operator:
            self._operator.end(signal.SIGKILL)

    def read_log(self) -> str:
        return self._log.read_text()


@pytest.fixture(scope="module")
def no_other_clusters(client: Client, crd: Path) -> None:
    """Deletes the clusters that other modules left: the operator would reconcile them too, among failing requests.

    Their engines may take their time to end.
    """
    assert crd.is_file()
    client.kubectl("delete", "servingclusters", "--all", "--all-namespaces")
    query = "labelSelector=app.kubernetes.io%2Fmanaged-by%3Dsluice-operator"

    def are_ending() -> bool:
        pods = client.request("GET", f"/api/v1/pods?{query}").content["items"]
        return all("deletionTimestamp" in pod["metadata"] for pod in pods)

    wait_for(are_ending, "the end of other clusters")


@pytest.fixture(scope="module")
def nodes(client: Client) -> Iterator[None]:
    """Two kwok nodes without taints, and one that nothing plays, for pods that tolerate every taint."""
    made = [make_node(name) for name in ("faults-a", "faults-b", SILENT)]
    for node in made[:2]:
        del node["spec"]["taints"]
    del made[2]["metadata"]["annotations"]
    client.apply(*made)
    wait_for(lambda: all(is_ready(client, name) for name in ("faults-a", "faults-b")), "the open nodes")
    yield
    client.kubectl("delete", "node", "faults-a", "faults-b", SILENT, "--ignore-not-found")


@pytest.fixture(scope="module")
def routers(client: Client) -> Iterator[StandInRouters]:
    with run_stand_in_routers(client) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(testbed: Testbed) -> Iterator[FaultProxy]:
    with FaultProxy(testbed.settings).run() as running:
        yield running


@pytest.fixture(scope="module")
def replica(client: Client, testbed: Testbed, proxy: FaultProxy, routers: StandInRouters) -> Iterator[Replica]:
    direct = make_access(client, testbed, "faults")
    kubeconfig = proxy.write_kubeconfig(direct, testbed.settings.folder / "proxied.kubeconfig")
    made = Replica(kubeconfig, testbed.settings.logs / "operator-faults.log")
    wait_for(lambda: made.leads, "a leader")
    yield made
    made.stop()


@pytest.fixture
def cluster(client: Client, replica: Replica, proxy: FaultProxy, namespace: str) -> Iterator[LightCluster]:
    """A settled cluster; faults of the API server end with the test."""
    wait_for(lambda: replica.leads, "a leader")
    made = LightCluster(client, namespace)
    try:
        made.wait("Progressing", "Settled")
        yield made
    finally:
        # The stand-in serves the routers of one cluster at a time.
        proxy.fail_share, proxy.is_dead = 0.0, False
        made.kubectl("delete", "slc", "tiny", "--ignore-not-found")
        wait_for(lambda: on_silent_node(made), "the end of the engines")


def on_silent_node(cluster: LightCluster) -> bool:
    """Whether every engine is on the node that has no kubelet to end it."""
    return all(pod["spec"].get("nodeName") == SILENT for pod in cluster.engines.values())


def edit_until(cluster: LightCluster, replica: Replica, num_prefill_heavy: int) -> None:
    """Edits a slider, and waits until it is in force. Restarts the operator if it exits."""
    cluster.edit(prefillHeavy=num_prefill_heavy)
    wanted = ["d-heavy"] * (len(cluster.engines) - num_prefill_heavy) + ["p-heavy"] * num_prefill_heavy
    wait_for(lambda: replica.operator and cluster.roles == wanted, "the roles")


def test_a_fifth_of_all_requests_may_fail_or_be_slow(
    cluster: LightCluster, proxy: FaultProxy, replica: Replica
) -> None:
    before = set(cluster.engines)
    proxy.faults.clear()
    proxy.fail_share = 0.2
    for number in (3, 1, 4, 2):
        edit_until(cluster, replica, number)
    while set(proxy.faults) != FAULTS or sum(proxy.faults.values()) <= ENOUGH_FAULTS:
        edit_until(cluster, replica, 5 - cluster.roles.count("p-heavy"))
    edit_until(cluster, replica, 2)
    assert set(cluster.engines) == before
    cluster.kubectl("scale", "slc/tiny", "--replicas=2")
    wait_for(lambda: replica.operator and len(cluster.engines) == 2, "the end of two engines")
    cluster.kubectl("delete", "service", "tiny-engines")
    wait_for(lambda: replica.operator and "Service/tiny-engines" in cluster.versions(), "the Service")
    proxy.fail_share = 0.0
    wait_for(lambda: replica.leads, "a leader")
    cluster.wait("Progressing", "Settled")
    assert "the reconcile failed unexpectedly" not in replica.read_log()


@pytest.mark.parametrize("fault", ["end_watches", "expire_watches"])
def test_ended_watches_lose_no_event(fault: str, cluster: LightCluster, proxy: FaultProxy, replica: Replica) -> None:
    number_of_ends = replica.num_ends
    for number in (1, 3, 2):
        assert getattr(proxy, fault)() > 5
        edit_until(cluster, replica, number)
    assert replica.num_ends == number_of_ends


@pytest.mark.timeout(420)
def test_watches_that_go_silent_are_noticed(cluster: LightCluster, proxy: FaultProxy, replica: Replica) -> None:
    number_of_ends = replica.num_ends
    for _ in range(NUM_TRIES):
        wait_until_still(replica.operator.calls)
        proxy.withheld.clear()
        num_before = count_reconciles(replica)
        assert proxy.mute_watches() > 5
        cluster.edit(prefillHeavy=3)
        wait_for(lambda: any(path.endswith("/servingclusters") for path in list(proxy.withheld)), "the unseen edit")
        wait_until_still(replica.operator.calls)
        if count_reconciles(replica) == num_before:
            break
        # Something else, such as a router's status, caused a reconcile, which read the edit too.
        assert proxy.end_watches() > 5
        edit_until(cluster, replica, 2)
    else:
        pytest.fail(f"each of {NUM_TRIES} times something else caused a reconcile")
    assert cluster.roles.count("p-heavy") == 2
    wait_for(lambda: cluster.roles.count("p-heavy") == 3, "the edit to be noticed", INACTIVITY_S + PATIENCE_S)
    cluster.wait("Progressing", "Settled")
    assert cluster.roles.count("p-heavy") == 3
    assert replica.num_ends == number_of_ends


def test_a_leader_that_loses_its_lease_exits_and_writes_nothing_more(
    client: Client, cluster: LightCluster, proxy: FaultProxy, replica: Replica
) -> None:
    process = replica.operator.process
    taken = {"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 3600}}
    assert client.request("PATCH", LEASE, taken, MERGE).is_ok
    assert process.wait(PATIENCE_S) != 0
    assert "no longer leads" in replica.read_log()
    generation = json.loads(cluster.kubectl("get", "configmap", "tiny-plan", "-o", "json"))["metadata"]["annotations"]
    cluster.edit(prefillHeavy=3)
    proxy.requests.clear()
    standby = replica.operator
    wait_for(lambda: standby.read("/readyz") == "ok\n", "the next process")
    # It asks again and again, and does not take what another holds.
    asked = ("GET", LEASE)
    wait_for(lambda: proxy.requests.count(asked) >= NUM_ATTEMPTS, "its attempts to lead")
    assert not standby.leads
    assert {method for method, _ in proxy.requests} == {"GET"}
    after = json.loads(cluster.kubectl("get", "configmap", "tiny-plan", "-o", "json"))["metadata"]["annotations"]
    assert after == generation
    given_back = {"spec": {"holderIdentity": None, "leaseDurationSeconds": 1}}
    assert client.request("PATCH", LEASE, given_back, MERGE).is_ok
    wait_for(lambda: cluster.roles.count("p-heavy") == 3, "the roles")


def test_a_leader_that_cannot_renew_its_lease_exits_during_a_reconcile(
    cluster: LightCluster, proxy: FaultProxy, replica: Replica
) -> None:
    process = replica.operator.process
    before = set(cluster.engines)
    cluster.edit(prefillHeavy=3, replicas=5)
    proxy.is_dead = True
    started_s = time.monotonic()
    assert process.wait(PATIENCE_S) != 0
    # A short outage of the API server is no reason to exit: the lease has to run out first.
    assert time.monotonic() - started_s > 5
    proxy.is_dead = False
    wait_for(lambda: replica.leads, "the next process as leader")
    wait_for(lambda: cluster.roles == ["d-heavy"] * 2 + ["p-heavy"] * 3, "the roles")
    cluster.wait("Progressing", "Settled")
    assert before < set(cluster.engines)


def test_concurrent_edits_of_a_slider_end_in_the_last_edit(cluster: LightCluster, routers: StandInRouters) -> None:
    before, generation = set(cluster.engines), routers.plan.generation

    def turn(hand: int) -> None:
        for number in range(5):
            sizes = {"prefillHeavy": 300 + 10 * hand + number}
            cluster.edit(prefillHeavy=hand, chunkSizes=sizes)

    hands = [threading.Thread(target=turn, args=(hand,)) for hand in range(5)]
    for hand in hands:
        hand.start()
    for hand in hands:
        hand.join()
    spec = cluster.read("slc/tiny")["spec"]
    cluster.wait("Progressing", "Settled")
    sizes = {part.chunk_size_tokens for part in routers.plan.engines if part.role == 1}
    assert cluster.roles.count("p-heavy") == spec["prefillHeavy"]
    assert sizes <= {spec["chunkSizes"]["prefillHeavy"]}
    # The operator puts edits that come during a reconcile into one plan.
    assert 0 < routers.plan.generation - generation <= 25
    assert set(cluster.engines) == before


def test_an_exceeded_quota_is_reported_and_recovers(client: Client, replica: Replica, namespace: str) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small", "namespace": namespace}}
    client.apply({**quota, "spec": {"hard": {"pods": "4", "services": "2"}}})
    wait_for(
        lambda: client.kubectl("-n", namespace, "get", "quota", "small", "-o", "jsonpath={.status.hard.pods}"),
        "the quota",
    )
    cluster = LightCluster(client, namespace)
    wait_for(lambda: replica.operator and cluster.reason("Degraded") == "QuotaExceeded", "the reason")
    assert "exceeded quota: small" in cluster.message("Degraded")
    client.apply({**quota, "spec": {"hard": {"pods": "4", "services": "9"}}})
    # The quota for pods strikes Kubernetes' own controllers, which report it in the Deployment or ReplicaSet.
    wait_for(lambda: len(cluster.read("services")["items"]) == 3, "the Services")
    wait_for(lambda: "cannot create pods" in cluster.message("Degraded"), "the other reason")
    assert cluster.reason("Degraded") == "QuotaExceeded"
    client.kubectl("-n", namespace, "delete", "quota", "small")
    cluster.wait("Progressing", "Settled")
    cluster.wait("Degraded", "AsExpected")
    cluster.kubectl("delete", "slc", "tiny")


def write_pod_status(cluster: LightCluster, name: str, status: dict[str, Any]) -> None:
    """Plays the kubelet."""
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{name}/status"
    answer = cluster.client.request("PATCH", path, {"status": status}, STRATEGIC_MERGE)
    assert answer.is_ok, answer.content


def test_an_image_pull_failure_stops_the_rollout_and_a_stuck_pod_does_not(
    cluster: LightCluster, replica: Replica, client: Client
) -> None:
    before = set(cluster.engines)
    cluster.edit(
        engine={
            "image": "registry.example/no-such-image:1",
            "nodeSelector": {"kubernetes.io/hostname": SILENT},
            "tolerations": [{"operator": "Exists"}],
        }
    )
    bad = wait_for(
        lambda: next((pod for pod in cluster.engines.values() if pod["spec"].get("nodeName") == SILENT), None), "a pod"
    )["metadata"]["name"]

    def fail_to_pull(attempt: int) -> None:
        waiting = {"reason": "ImagePullBackOff", "message": f"Back-off pulling image, attempt {attempt}"}
        container = {"name": "engine", "image": "registry.example/no-such-image:1", "imageID": "", "ready": False}
        container |= {"restartCount": 0, "state": {"waiting": waiting}}
        write_pod_status(cluster, bad, {"phase": "Pending", "containerStatuses": [container]})

    fail_to_pull(1)
    cluster.wait("Degraded", "ImagePullBackOff")
    cluster.wait("Progressing", "RolloutStopped")
    assert "registry.example/no-such-image:1" in cluster.message("Degraded")
    assert bad in cluster.message("Degraded")
    assert len(before & set(cluster.engines)) == 3
    assert cluster.reason("Ready") == "Serving"
    version = wait_until_still(cluster.versions)["ServingCluster/tiny"]
    for attempt in (2, 3, 4):
        num_before = count_reconciles(replica)
        fail_to_pull(attempt)
        wait_for(lambda num_before=num_before: count_reconciles(replica) > num_before, "a reconcile")
    # The kubelet's message changes with every attempt, but the status must not.
    assert wait_until_still(cluster.versions)["ServingCluster/tiny"] == version
    cluster.edit(engine={"image": None, "nodeSelector": None, "tolerations": None})
    cluster.wait("Degraded", "AsExpected")
    cluster.wait("Progressing", "Settled")
    # Without a kubelet, this pod never ends.
    assert "deletionTimestamp" in cluster.read(f"pod/{bad}")["metadata"]
    assert len(before & set(cluster.engines)) == 3
    edit_until_among(cluster, 3)
    version, writes = wait_until_still(cluster.versions)["ServingCluster/tiny"], replica.operator.writes()
    for attempt in (5, 6, 7):
        num_before = count_reconciles(replica)
        fail_to_pull(attempt)
        wait_for(lambda num_before=num_before: count_reconciles(replica) > num_before, "a reconcile")
    # The Deployment's own controller may count the pod anew.
    assert (wait_until_still(cluster.versions)["ServingCluster/tiny"], replica.operator.writes()) == (version, writes)
    client.kubectl("-n", cluster.namespace, "delete", "pod", bad, "--force", "--grace-period=0")


def count_reconciles(replica: Replica) -> float:
    return replica.operator.calls().get(("get", "servingclusters", "200"), 0.0)


def wait_until_still(read: Callable[[], Seen]) -> Seen:
    """Waits until a value has not changed for a while; returns it."""
    seen, since_s = read(), time.monotonic()

    def poll() -> bool:
        nonlocal seen, since_s
        if (now := read()) != seen:
            seen, since_s = now, time.monotonic()
        return time.monotonic() - since_s > STILL_S

    wait_for(poll, "calm")
    return seen


def edit_until_among(cluster: LightCluster, num_prefill_heavy: int) -> None:
    cluster.edit(prefillHeavy=num_prefill_heavy)
    wait_for(lambda: cluster.roles.count("p-heavy") == num_prefill_heavy, "the roles")
    cluster.wait("Progressing", "Settled")


def test_a_deleted_namespace_takes_its_cluster_and_causes_no_retries(
    client: Client, cluster: LightCluster, replica: Replica
) -> None:
    def count_clusters() -> float:
        (line,) = re.findall(r"^sluice_operator_clusters (.*)$", replica.operator.read("/metrics"), re.MULTILINE)
        return float(line)

    namespace, num_clusters = cluster.namespace, count_clusters()
    held = {"name": "held", "namespace": namespace, "finalizers": ["example.org/held"]}
    client.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": held})
    client.kubectl("delete", "namespace", namespace, "--wait=false")
    wait_for(lambda: list(cluster.versions()) == ["ConfigMap/held"], "the end of all but one")
    wait_for(lambda: count_clusters() == num_clusters - 1, "the cluster to be forgotten")
    # Calm has to come, and to last: retries would come after growing pauses.
    calls = wait_until_still(replica.operator.calls)
    assert wait_until_still(replica.operator.calls) == calls
    assert "the reconcile failed unexpectedly" not in replica.read_log()
    path = f"/api/v1/namespaces/{namespace}/configmaps/held"
    assert client.request("PATCH", path, {"metadata": {"finalizers": None}}, MERGE).is_ok
    wait_for(lambda: client.request("GET", f"/api/v1/namespaces/{namespace}").status == 404, "the end of the namespace")


def test_an_unreachable_node_takes_no_role_with_it_and_a_lost_one_is_replaced(
    client: Client, cluster: LightCluster, routers: StandInRouters
) -> None:
    edit_until_among(cluster, 1)
    engines = cluster.engines
    (prefill,) = (pod for pod in engines.values() if pod["metadata"]["labels"]["sluice.dev/role"] == "p-heavy")
    lost = prefill["spec"]["nodeName"]
    gone = {uid for uid, pod in engines.items() if pod["spec"]["nodeName"] == lost}
    assert 0 < len(gone) < 4
    # kwok stops playing the node, so its kubelet sends no more heartbeats.
    client.kubectl("annotate", "node", lost, "kwok.x-k8s.io/node-")
    stop_node(cluster, lost)
    cluster.wait("EnginesReady", "SomeNotReady")
    wait_for(lambda: serving_role(routers, 1) - gone, "another P-heavy engine")
    assert cluster.reason("Ready") == "Serving"
    # An administrator who knows that the machine is off sets this taint: Kubernetes then deletes its pods at once.
    client.kubectl("taint", "node", lost, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
    wait_for(lambda: not gone & set(cluster.engines), "the end of the lost pods")
    cluster.wait("EnginesReady", "AllReady")
    cluster.wait("Progressing", "Settled")
    assert set(engines) - gone <= set(cluster.engines)


def stop_node(cluster: LightCluster, name: str) -> None:
    """Writes the status that Kubernetes gives a node and its pods after 50 s without a heartbeat."""
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    path = f"/api/v1/nodes/{name}/status"
    answer = cluster.client.request("PATCH", path, {"status": {"conditions": [unknown]}}, STRATEGIC_MERGE)
    assert answer.is_ok, answer.content
    not_ready = {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
    for component in ("engine", "router"):
        for pod in cluster.find_pods(component).values():
            if pod["spec"]["nodeName"] == name:
                write_pod_status(cluster, pod["metadata"]["name"], {"conditions": [not_ready]})


def serving_role(routers: StandInRouters, role: int) -> set[str]:
    return {part.engine_id for part in routers.plan.engines if part.role == role}
