"""Runs the operator's reconciler in the test's own process, on the real API server, with routers in memory.

A test can thus choose the write at which the operator dies or somebody else interferes, and reconcile many clusters at
once. There is no informer here: tests call ``reconcile`` themselves.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import yaml
from fake_routers import FakeRouters
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import kube_config
from testbed.settings import ROOT

from sluice_operator.api.labels import COMPONENT_LABEL, DELETION_COST_ANNOTATION, ROLE_LABEL
from sluice_operator.api.names import ENGINE, ClusterKey
from sluice_operator.controller.manager import format_now
from sluice_operator.controller.observation import CHILD_KINDS
from sluice_operator.controller.reconciler import Reconciler
from sluice_operator.kubernetes.client import KubernetesClient
from sluice_operator.kubernetes.errors import ConflictError, KubernetesError
from sluice_operator.kubernetes.interceptors import READ_VERBS, InterceptedKubernetes
from sluice_operator.kubernetes.kinds import CLUSTERS, PODS
from sluice_operator.kubernetes.objects import annotations_of, uid_of
from sluice_operator.planning.plan_store import read_plan
from sluice_operator.settings import OperatorSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from testbed.client import Client

    from sluice_operator.kubernetes.interceptors import Answer
    from sluice_operator.kubernetes.kinds import Kind
    from sluice_operator.kubernetes.objects import Object

PAUSE_S = 0.3
PATIENCE_S = 120.0
CLOSING_S = 0.25


class Crash(BaseException):
    """The operator's process dies."""


@asynccontextmanager
async def connect(client: Client) -> AsyncIterator[KubernetesClient]:
    """Opens the operator's own client with the administrator's rights."""
    configuration = Configuration()
    await kube_config.load_kube_config(config_file=str(client.kubeconfig), client_configuration=configuration)
    configuration.connection_pool_maxsize = 16
    async with ApiClient(configuration) as api:
        yield KubernetesClient(api, timeout_s=30.0, on_call=lambda *_: None)
    # TLS connections end a moment after they are closed, and need the event loop for it.
    await asyncio.sleep(CLOSING_S)


class RecordingKubernetes(InterceptedKubernetes):
    """Records what was listed last, and counts writes; see ``Kubernetes``.

    Args:
        kubernetes: The API server.

    Attributes:
        num_writes: Writes so far.
        after: Awaited after each write with its number, from 1. An exception that it raises is the write's.
        seen: The last list of each kind.
    """

    def __init__(self, kubernetes: KubernetesClient) -> None:
        self.num_writes = 0
        self.after: Callable[[int], Awaitable[None]] = _do_nothing
        self.seen: dict[str, list[Object]] = {}
        super().__init__(kubernetes, self._count)

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        found = self.seen[kind.name] = await super().list(kind, namespace, labels)
        return found

    def select(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        """Lists the pods that the fake routers know: those listed last, Ready or not."""
        del namespace
        found = []
        for pod in self.seen.get(kind.name, []):
            if labels.items() <= pod["metadata"]["labels"].items():
                ready = [item for item in pod["status"].get("conditions") or () if item["type"] == "Ready"]
                status = {"conditions": ready, "podIP": pod["status"].get("podIP", "")}
                found.append({"metadata": pod["metadata"], "status": status})
        return found

    async def _count(self, verb: str, send: Callable[[], Awaitable[Answer]]) -> Answer:
        answer = await send()
        if verb not in READ_VERBS:
            self.num_writes += 1
            await self.after(self.num_writes)
        return answer


async def _do_nothing(_number: int) -> None:
    pass


class Routers(FakeRouters):
    """Routers in memory. kwok gives the addresses of deleted pods to pods of other clusters."""

    def set_plan(self, key: ClusterKey, plan: Any) -> None:
        for address, old in list(self.plans.items()):
            if old.cluster_uid != plan.cluster_uid:
                del self.plans[address]
        super().set_plan(key, plan)


class ReconciledCluster:
    """One ServingCluster and the operator that reconciles it.

    Args:
        kubernetes: The API server.
        namespace: Where it is.
        name: Its name.
    """

    def __init__(self, kubernetes: KubernetesClient, namespace: str, name: str) -> None:
        self.key = ClusterKey(namespace, name)
        self.kubernetes = kubernetes
        self.watched = RecordingKubernetes(kubernetes)
        self.routers = Routers(self.watched)
        self.num_crashes = self.num_conflicts = 0
        self.reconciler = self.start_operator()

    def start_operator(self) -> Reconciler:
        """Starts the operator anew, with empty memory."""
        self.routers = self.routers.restart()
        self.reconciler = Reconciler(
            self.watched,
            self.routers,
            OperatorSettings(identity="in-process", namespace="sluice-system"),
            now=time.monotonic,
            now_text=format_now,
        )
        return self.reconciler

    async def create(self, **spec: Any) -> None:
        """Creates the cluster once no other one has its name.

        Args:
            spec: Sections of the spec that replace those of the example.
        """
        manifest = yaml.safe_load((ROOT / "examples" / "tiny-cpu.yaml").read_text())
        manifest["metadata"] |= {"namespace": self.key.namespace, "name": self.key.name}
        # Nothing runs, so nothing is mounted: an unbound claim would keep pods from being scheduled.
        manifest["spec"]["model"]["source"] = {"huggingFace": {}}
        for section, fields in spec.items():
            manifest["spec"][section] |= fields
        while True:
            try:
                await self.kubernetes.create(manifest)
            except ConflictError:
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def edit(self, **spec: Any) -> None:
        await self.kubernetes.patch(CLUSTERS, self.key.namespace, self.key.name, {"spec": spec})

    async def read(self) -> Object:
        body = await self.kubernetes.get(CLUSTERS, self.key.namespace, self.key.name)
        assert body is not None
        return body

    async def delete(self) -> None:
        await self.kubernetes.delete(CLUSTERS, self.key.namespace, self.key.name, uid_of(await self.read()))

    async def reconcile(self) -> bool:
        """Reconciles once. After an error the next call tries again; after a crash a new operator does.

        Returns:
            Whether the reconcile succeeded without a write.
        """
        before = self.watched.num_writes
        try:
            await self.reconciler.reconcile(self.key)
        except Crash:
            self.num_crashes += 1
            self.start_operator()
        except ConflictError:
            self.num_conflicts += 1
        except KubernetesError:
            pass
        else:
            return self.watched.num_writes == before
        return False

    async def settle(self) -> None:
        """Reconciles until everything matches the spec and a reconcile writes nothing any more.

        It waits for pods that end, since the plan names them: only then is the plan the same whatever happened before.
        """
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await self.reconcile() and is_settled(await self.read()) and not self.is_anything_ending:
                    return
                await asyncio.sleep(PAUSE_S)

    async def list_children(self) -> list[Object]:
        """Lists all objects with the cluster's labels, pods included."""
        labels = {"sluice.dev/cluster": self.key.name}
        lists = [await self.kubernetes.list(kind, self.key.namespace, labels) for kind in (*CHILD_KINDS, PODS)]
        return [item for found in lists for item in found]

    async def summarize(self) -> Object:
        """Returns the state without what differs from run to run: versions, pod names, plan numbers, times."""
        body = await self.read()
        status = {name: value for name, value in body["status"].items() if name in ("replicas", "effective")}
        conditions = sorted((item["type"], item["status"], item["reason"]) for item in body["status"]["conditions"])
        seen = [item for kind in CHILD_KINDS for item in self.watched.seen[kind.name]]
        plan = self.plan
        found = {
            "status": status,
            "conditions": conditions,
            "children": sorted((item["kind"], item["metadata"]["name"]) for item in seen),
            "deployments": [item["spec"] for item in seen if item["kind"] == "Deployment"],
            "roles": sorted(pod["metadata"]["labels"].get(ROLE_LABEL, "") for pod in self.engines),
            "marks": sorted(annotations_of(pod).get(DELETION_COST_ANNOTATION, "") for pod in self.engines),
            "plan": sorted((part.role, part.chunk_size_tokens, part.is_draining) for part in plan.engines),
            "owners": sorted({owner["uid"] == uid_of(body) for item in seen for owner in _owners(item)}),
            "routers": [self.routers.plans[address] == plan for address in self.routers.addresses[self.key].values()],
        }
        plain: Object = json.loads(json.dumps(found).replace(self.key.name, "NAME"))
        return plain

    @property
    def engines(self) -> list[Object]:
        pods = self.watched.seen[PODS.name]
        return [pod for pod in pods if pod["metadata"]["labels"].get(COMPONENT_LABEL) == ENGINE]

    @property
    def is_anything_ending(self) -> bool:
        return any("deletionTimestamp" in pod["metadata"] for pod in self.watched.seen[PODS.name])

    @property
    def plan(self) -> Any:
        (content,) = [item for item in self.watched.seen["ConfigMap"] if item["metadata"]["name"].endswith("-plan")]
        return read_plan(content, _owners(content)[0]["uid"]).plan


def is_settled(body: Object) -> bool:
    """Whether the operator reports that the present spec is in force without a fault."""
    conditions = {item["type"]: item for item in body.get("status", {}).get("conditions", [])}
    wanted = {"Ready": "Serving", "Progressing": "Settled", "Degraded": "AsExpected"}
    return all(
        kind in conditions
        and conditions[kind]["reason"] == reason
        and conditions[kind]["observedGeneration"] == body["metadata"]["generation"]
        for kind, reason in wanted.items()
    )


def _owners(content: Object) -> list[Object]:
    owners: list[Object] = content["metadata"].get("ownerReferences") or []
    return owners
