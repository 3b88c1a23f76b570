"""A ServingCluster with real pods: streams through its Service, and the status of its routers and engines.

Tests reach it at the addresses that a client, the operator or Prometheus uses. kube-proxy's rules and the pod network
hold for this machine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from cluster import Client as StreamClient
from conftest import make_volume
from kubectl_cluster import KubectlCluster, make_manifest
from testbed.errors import TestbedError
from testbed.fake_nodes import says_ready
from testbed.settings import ROOT

from sluice.v1 import control_pb2, control_pb2_grpc, router_pb2_grpc
from sluice_operator.api.ports import CONTROL_PORT, GRPC_PORT, METRICS_PORT
from sluice_operator.api.router_workers import control_port, metrics_port
from sluice_operator.resources.pods.pod_status import read_pod

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from testbed.client import Client

Status = control_pb2.GetStatusResponse

MODELS = ROOT / ".sluice" / "volumes" / "models"
CLAIMS = {"models": MODELS, "checkout": ROOT}
# gRPC's documentation advises this for servers that come and go: gRPC sends a call again if it has had no answer yet.
# A call that has had its first token is not sent again. A call that comes in just as a server stops may be CANCELLED.
RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}
# A client in a pod. It knows only the Service's name.
CHAT = """
import json, sys, urllib.request
body = {"model": "tiny", "stream": True, "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
headers = {"Content-Type": "application/json"}
url = "http://tiny-router:8000/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
with urllib.request.urlopen(request, timeout=60) as answer:
    lines = [line.decode().strip() for line in answer]
print(json.dumps([line.removeprefix("data: ") for line in lines if line]))
"""
# Importing vLLM takes an engine half a minute when other engines use the same two cores.
PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Credentials for the control ports of a cluster with ``network.tls``.

    Args:
        files: Entries of a Secret: the client's key and certificate, and the authority.
        name: Name in the routers' certificate.
    """

    files: dict[str, bytes]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EditTimes:
    """Progress of an edit, in seconds from just before the request to the API server.

    Args:
        accepted_s: Time of the API server's answer.
        pushed_s: Time at which every router had the operator's plan.
        in_force_s: Time at which every engine had acknowledged it to every router.
    """

    accepted_s: float
    pushed_s: float
    in_force_s: float

    def __str__(self) -> str:
        return (
            f"in force in every engine after {1e3 * self.in_force_s:.0f} ms "
            f"(accepted {1e3 * self.accepted_s:.0f}, at every router {1e3 * self.pushed_s:.0f})"
        )


def make_pods_manifest(**spec: Any) -> dict[str, Any]:
    """Makes the example's manifest for two cores. Engines mount their environment, because their image has none.

    Args:
        spec: Fields of the spec to set as well.
    """
    volume = {"name": "checkout", "persistentVolumeClaim": {"claimName": "checkout", "readOnly": True}}
    mount = {"name": "checkout", "mountPath": str(ROOT), "readOnly": True}
    template = {"spec": {"volumes": [volume], "containers": [{"name": "engine", "volumeMounts": [mount]}]}}
    # Pods without a CPU request get what is left, which is nothing while an engine imports vLLM.
    engine = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    manifest = make_manifest(engine={"podTemplate": template, "resources": engine}, router={"replicas": 2})
    manifest["spec"] |= {"replicas": 2, **spec}
    return manifest


class PodCluster(KubectlCluster):
    """The ServingCluster ``tiny``, with engines and routers in pods of this machine.

    Frequent reads go over HTTPS: kubectl would take half a core from the engines.

    Args:
        client: The administrator.
        namespace: Its namespace.
        manifest: The ServingCluster; two engines and two routers by default.
        trust: Credentials for its control ports, if it has ``network.tls``.
        claims: Folders by the name of the claim through which pods mount them.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        manifest: dict[str, Any] | None = None,
        trust: Trust | None = None,
        claims: Mapping[str, Path] = CLAIMS,
    ) -> None:
        super().__init__(client, namespace, PATIENCE_S)
        self.manifest = manifest or make_pods_manifest()
        self._trust = trust
        self._claims = claims
        self._path = f"/apis/sluice.dev/v1alpha1/namespaces/{namespace}/servingclusters/tiny"

    def create(self) -> None:
        """Creates the cluster and the volumes that its pods claim."""
        for claim, folder in self._claims.items():
            volume, content = make_volume(self.namespace, claim, folder)
            self.client.apply(volume)
            self.kubectl("apply", "-f", "-", stdin=json.dumps(content))
        self.apply(self.manifest)

    def remove(self) -> None:
        """Deletes the cluster, and waits until its pods are gone."""
        self.kubectl("delete", "slc", "tiny", "--timeout=120s")
        self.wait_for(lambda: not self.engines and not self.routers, "the end of the pods")

    # --- read

    def describe(self) -> str:
        """Describes its pods, manifest, status and events as text."""
        said = [
            self.kubectl(*command.split()) for command in ("get slc,pods -o wide", "get slc tiny -o yaml", "events")
        ]
        pods = self.kubectl("get", "pods", "-o", "name").split()
        logs = [f"--- {pod}\n{self.kubectl('logs', '--tail=30', '--ignore-errors', pod)}" for pod in pods]
        return "\n".join([*said, *logs])

    def read(self, what: str) -> Any:
        return self.client.request("GET", self._path).content if what == "slc/tiny" else super().read(what)

    def find_pods(self, component: str) -> dict[str, dict[str, Any]]:
        query = f"labelSelector=sluice.dev%2Fcluster%3Dtiny,app.kubernetes.io%2Fcomponent%3D{component}"
        answer = self.client.request("GET", f"/api/v1/namespaces/{self.namespace}/pods?{query}")
        return {pod["metadata"]["uid"]: pod for pod in answer.content["items"]}

    @property
    def routers(self) -> dict[str, dict[str, Any]]:
        return self.find_pods("router")

    def identify(self, component: str) -> set[tuple[str, ...]]:
        """Identifies pods and their containers: equal before and after if nothing was replaced or restarted."""
        return {
            (uid, *(item.get("containerID", "") for item in pod["status"].get("containerStatuses", ())))
            for uid, pod in self.find_pods(component).items()
        }

    def addresses(self, component: str) -> dict[str, str]:
        """Lists the address of each pod by uid, without pods that end."""
        return {
            uid: pod["status"]["podIP"]
            for uid, pod in self.find_pods(component).items()
            if "podIP" in pod["status"] and "deletionTimestamp" not in pod["metadata"]
        }

    def list_router_addresses(self, port: Callable[[int], int]) -> list[str]:
        """Lists an address of each router, of which a pod has one or more, without pods that end.

        Args:
            port: Port of a router by its number in the pod.
        """
        return [
            f"{pod.address}:{port(worker)}"
            for pod in map(read_pod, self.routers.values())
            if pod.address and not pod.is_ending
            for worker in range(pod.num_workers)
        ]

    def statuses(self) -> list[Status]:
        """Reads the status of each router; none if one of them does not answer."""
        try:
            return [self._read_status(address) for address in self.list_router_addresses(control_port)]
        except grpc.RpcError:
            return []

    def chunk_sizes(self) -> list[int]:
        """Reads the chunk size of each engine, in tokens, from its own metrics."""
        found = []
        for address in self.addresses("engine").values():
            with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            found += [
                int(float(line.split()[1])) for line in lines if line.startswith("sluice_engine_chunk_size_tokens ")
            ]
        return sorted(found)

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Reads the decisions on a request from the router that served it."""
        for address in self.list_router_addresses(metrics_port):
            with contextlib.suppress(urllib.error.HTTPError):  # 404 from the others
                url = f"http://{address}/debug/requests/{request_id}"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    events: list[dict[str, Any]] = json.loads(answer.read())["events"]
                    return events
        raise LookupError(f"no router knows {request_id}")

    def wait_chunk_sizes(self, sizes: list[int]) -> None:
        """Waits until the engines' metrics show these chunk sizes. They follow with the next load report."""
        self.wait_for(lambda: self.chunk_sizes() == sizes, f"chunk sizes {sizes}")

    def wait_ready(self, component: str) -> None:
        """Waits until all pods of a component are Ready and none ends. Conditions may lag behind the pods."""
        spec = self.read("slc/tiny")["spec"]
        wanted = spec["replicas"] if component == "engine" else spec["router"]["replicas"]

        def is_ready(pod: dict[str, Any]) -> bool:
            return says_ready(pod) and "deletionTimestamp" not in pod["metadata"]

        def are_ready() -> bool:
            pods = self.find_pods(component).values()
            return len(pods) == wanted and all(is_ready(pod) for pod in pods)

        self.wait_for(are_ready, f"{wanted} Ready pods of the {component}")

    def wait_settled(self) -> None:
        """Waits until everything matches the manifest."""
        self.wait("Progressing", "Settled")
        for condition, reason in {
            "Degraded": "AsExpected",
            "EnginesReady": "AllReady",
            "RouterReady": "AllReady",
        }.items():
            self.wait(condition, reason)

    def wait_whole(self) -> None:
        """Waits until everything matches the manifest, no request runs, and all KV blocks are free."""
        self.wait_settled()
        spec = self.read("slc/tiny")["spec"]

        def is_whole() -> bool:
            statuses = self.statuses()
            return len(statuses) == spec["router"]["replicas"] * spec["router"]["workers"] and all(
                len(status.engines) == spec["replicas"] and is_idle(status) for status in statuses
            )

        self.wait_for(is_whole, "idle engines with all their blocks free")

    # --- act

    def reset(self) -> None:
        """Restores the manifest; tries again if the operator wrote the status between kubectl's read and write."""

        def is_replaced() -> bool:
            try:
                self.kubectl("replace", "-f", "-", stdin=json.dumps(self.manifest))
            except TestbedError as error:
                if "(Conflict)" not in str(error):
                    raise
                return False
            return True

        self.wait_for(is_replaced, "the manifest to be put back")

    def time_edit(self, is_reached: Callable[[Status], bool], **spec: Any) -> EditTimes:
        """Edits the spec, and measures the time until every engine has acknowledged it to every router.

        Args:
            is_reached: Whether the edit is in force, by a router's status.
            spec: The edit.
        """
        body = json.loads(json.dumps({"spec": spec}))
        before = max(status.generation for status in self.wait_for(self.statuses, "the routers' answers"))

        def is_in_force(status: Status) -> bool:
            return status.acknowledged_generation > before and is_reached(status)

        addresses = self.addresses("router").values()
        at_the_start = threading.Barrier(len(addresses) + 1, timeout=30)
        steps = (lambda status: status.generation > before, is_in_force)
        with ThreadPoolExecutor(len(addresses)) as pool:
            seen = [pool.submit(self._follow_status, address, at_the_start, steps) for address in addresses]
            at_the_start.wait()
            started_s = time.monotonic()
            answer = self.client.request("PATCH", self._path, body, "application/merge-patch+json")
            accepted_s = time.monotonic()
            assert answer.is_ok, answer
            pushed, in_force = zip(*(future.result() for future in seen), strict=True)
        return EditTimes(
            accepted_s=accepted_s - started_s, pushed_s=max(pushed) - started_s, in_force_s=max(in_force) - started_s
        )

    def kill_router(self, uid: str) -> None:
        """Kills a router without a warning, and deletes its pod: kubelet would wait longer before each restart."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if uid in (process / "cgroup").read_text() and b"sluice_router" in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        self.kubectl("delete", "pod", self.routers[uid]["metadata"]["name"], "--force", "--grace-period=0")

    def evict(self, pod: str, *, grace_s: int | None = None) -> int:
        """Evicts a pod, as `kubectl drain` does; returns the HTTP status.

        Args:
            pod: Its name.
            grace_s: Time until it is killed, in seconds; None: what the pod asks for.
        """
        content = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
            "deleteOptions": {} if grace_s is None else {"gracePeriodSeconds": grace_s},
        }
        return self.client.request("POST", f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction", content).status

    # --- streams

    def chat(self) -> list[str]:
        """Streams an answer of 16 tokens from the Service in a router pod; returns the data of each event."""
        said: list[str] = json.loads(self.kubectl("exec", "deployment/tiny-router", "--", "python", "-c", CHAT))
        return said

    async def find_service(self) -> str:
        """Finds the address of the Service: kube-proxy chooses a router for each connection."""
        return str((await asyncio.to_thread(self.read, "service/tiny-router"))["spec"]["clusterIP"])

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[StreamClient]:
        """Opens its own connection to the Service."""
        address = await self.find_service()
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.service_config", json.dumps(RETRIES)),
        ]
        async with grpc.aio.insecure_channel(f"{address}:{GRPC_PORT}", options=options) as channel:
            # Moves are requested from a router, not from the Service.
            yield StreamClient(router_pb2_grpc.RouterStub(channel), control_pb2_grpc.ControlStub(channel))

    # --- control ports

    def _read_status(self, address: str) -> Status:
        with open_channel(address, self._trust) as channel:
            return control_pb2_grpc.ControlStub(channel).GetStatus(control_pb2.GetStatusRequest(), timeout=5)

    def _follow_status(
        self, address: str, at_the_start: threading.Barrier, steps: Sequence[Callable[[Status], bool]]
    ) -> list[float]:
        """Follows a router's status, from the barrier on, until each condition has been met in turn.

        Returns:
            Time at which each was met, by the monotonic clock.
        """
        times: list[float] = []
        with open_channel(f"{address}:{CONTROL_PORT}", self._trust) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            status = stub.GetStatus(control_pb2.GetStatusRequest(), timeout=10)
            at_the_start.wait()
            deadline = time.monotonic() + self.patience_s
            while True:
                while len(times) < len(steps) and steps[len(times)](status):
                    times.append(time.monotonic())
                if len(times) == len(steps):
                    return times
                assert time.monotonic() < deadline, f"{address}: condition not met in time: {status}"
                request = control_pb2.GetStatusRequest(after_version=status.version, timeout_s=5)
                status = stub.GetStatus(request, timeout=15)


def open_channel(address: str, trust: Trust | None) -> grpc.Channel:
    """Opens a channel to a port of a router or an engine."""
    if trust is None:
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(trust.files["ca.crt"], trust.files["tls.key"], trust.files["tls.crt"])
    return grpc.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", trust.name)])


def is_idle(status: Status) -> bool:
    """Whether a router has no request, and every engine has all blocks free, none granted and none pinned."""
    return (
        status.is_ready
        and status.num_requests == 0
        and all(
            engine.state == control_pb2.ENGINE_STATE_READY
            and engine.kv_blocks_total > 0
            and not (engine.kv_blocks_used or engine.kv_blocks_granted or engine.kv_blocks_pinned)
            and not (engine.running_decodes or engine.waiting_requests)
            for engine in status.engines
        )
    )


def list_sizes(status: Status) -> list[int]:
    """Lists the chunk sizes of a router's engines, in tokens, from small to large."""
    return sorted(engine.chunk_size_tokens for engine in status.engines)
