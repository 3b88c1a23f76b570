"""An API server in memory, as far as the reconciler can tell the difference, and the controllers behind it.

It has: resourceVersion and uid preconditions, generation, server-side apply by one manager (removed fields go, a no-op
changes nothing), an isolated status, selectors, owner references with garbage collection, and faults on demand. It has
no schema, no admission and no RBAC: those are tested on a real one (``e2e/kube``).
"""

from __future__ import annotations

import itertools
import marshal
from typing import TYPE_CHECKING, Any

from sluice_operator.kubernetes.errors import ConflictError, NotFoundError
from sluice_operator.kubernetes.kinds import CERTIFICATES, CLUSTERS, DEPLOYMENTS, PODS, SERVICE_MONITORS, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.kubernetes.objects import Object

READS = frozenset({"get", "list", "discover"})
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
Address = tuple[str, str, str]


def copy_object(value: Any) -> Any:
    """Copies plain data, as a round trip to the API server does; ten times faster than ``copy.deepcopy``."""
    return marshal.loads(marshal.dumps(value))


def merge(base: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy_object(patch)
    merged = dict(base) if isinstance(base, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def overlay(live: Any, wanted: Any, before: Any) -> Any:
    """Server-side apply: what is wanted, what others set, and not what was wanted before and no longer is."""
    if not isinstance(wanted, dict) or not isinstance(live, dict):
        return copy_object(wanted)
    before = before if isinstance(before, dict) else {}
    kept = {name: value for name, value in live.items() if name in wanted or name not in before}
    return kept | {name: overlay(live.get(name), value, before.get(name)) for name, value in wanted.items()}


class FakeKubernetes:
    """See ``Kubernetes``; ``run_controllers`` plays Deployments and the kubelet, ``collect_garbage`` the collector."""

    def __init__(self) -> None:
        self.objects: dict[Address, Object] = {}
        self.applied: dict[Address, Object] = {}
        self.calls: list[tuple[str, str]] = []
        self.events: list[Object] = []
        self.has_monitors = False
        self.has_cert_manager = False
        # Called before and after each call with verb and plural; raises what the call shall raise.
        self.before: Callable[[str, str], None] = lambda _verb, _plural: None
        self.after: Callable[[str, str], None] = lambda _verb, _plural: None
        # What is wrong with new pods, by the image of their first container.
        self.broken_images: set[str] = set()
        # The controllers' clock, and when they saw each pod first.
        self.now_s = 0.0
        self._ready_since_s: dict[str, float] = {}
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    # The verbs.

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        with_faults = self._call("get", kind)
        found = copy_object(self.objects.get((kind.name, namespace, name)))
        with_faults()
        return found

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        with_faults = self._call("list", kind)
        found = [copy_object(item) for item in self.select(kind, namespace, labels)]
        with_faults()
        return found

    async def is_served(self, kind: Kind) -> bool:
        self._call("discover", kind)()
        return {SERVICE_MONITORS: self.has_monitors, CERTIFICATES: self.has_cert_manager}.get(kind, True)

    async def apply(self, content: Object) -> Object:
        kind = kind_of(content)
        with_faults = self._call("apply", kind)
        address = self._address(content)
        live = self.objects.get(address)
        uid = content["metadata"].get("uid")
        if uid and (live is None or live["metadata"]["uid"] != uid):
            raise ConflictError(f"uid of {address} is another one")
        wanted = {name: value for name, value in content.items() if name != "status"}
        if live is None:
            self._store(self._new(wanted))
        else:
            self._change(address, overlay(live, wanted, self.applied.get(address)))
        self.applied[address] = copy_object(wanted)
        with_faults()
        return copy_object(self.objects[address])

    async def create(self, content: Object) -> Object:
        kind = kind_of(content)
        with_faults = self._call("create", kind)
        if content["kind"] == "Event":
            self.events.append(content)
            with_faults()
            return content
        if self._address(content) in self.objects:
            raise ConflictError(f"{self._address(content)} exists")
        created = self._store(self._new(content))
        with_faults()
        return copy_object(created)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        with_faults = self._call("patch", kind)
        address = self._check((kind.name, namespace, name), patch)
        changed = merge(self.objects[address], {key: value for key, value in patch.items() if key != "status"})
        self._change(address, changed)
        with_faults()
        return copy_object(self.objects[address])

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        with_faults = self._call("patch_status", kind)
        address = self._check((kind.name, namespace, name), patch)
        live = self.objects[address]
        self._change(address, {**live, "status": merge(live.get("status"), patch["status"])})
        with_faults()
        return copy_object(self.objects[address])

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        with_faults = self._call("delete", kind)
        live = self.objects.get((kind.name, namespace, name))
        if live is not None:
            if live["metadata"]["uid"] != uid:
                raise ConflictError("uid is another one")
            self.remove(kind, namespace, name)
        with_faults()

    # For tests.

    def put(self, content: Object) -> Object:
        """Stores an object as a user does: created, or its spec replaced."""
        address = self._address(content)
        if address not in self.objects:
            return self._store(self._new(content))
        live = self.objects[address]
        metadata = {**live["metadata"], **content["metadata"]}
        self._change(address, {**content, "metadata": metadata, "status": live.get("status", {})})
        return self.objects[address]

    def edit(self, kind: Kind, name: str, patch: Object, namespace: str = "default") -> None:
        """Merges a patch into an object, status included, as other controllers do."""
        address = kind.name, namespace, name
        self._change(address, merge(self.objects[address], patch))

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        """Deletes an object at once."""
        self.objects.pop((kind.name, namespace, name))
        self.applied.pop((kind.name, namespace, name), None)

    def find(self, kind: Kind, name: str, namespace: str = "default") -> Object:
        return self.objects[kind.name, namespace, name]

    def select(self, kind: Kind, namespace: str = "default", labels: dict[str, str] | None = None) -> list[Object]:
        wanted = (labels or {}).items()
        return [
            item
            for (name, space, _), item in sorted(self.objects.items())
            if name == kind.name and space == namespace and wanted <= (item["metadata"].get("labels") or {}).items()
        ]

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] not in READS]

    # Controllers.

    def run_controllers(self) -> None:
        """One step of the Deployment controller, the kubelet and the collector."""
        self.collect_garbage()
        for deployment in self.select(DEPLOYMENTS):
            self._run_deployment(deployment)

    def collect_garbage(self) -> None:
        """Deletes what belongs to owners that are gone."""
        while True:
            uids = {item["metadata"]["uid"] for item in self.objects.values()}
            orphans = [
                address
                for address, item in self.objects.items()
                if any(owner["uid"] not in uids for owner in item["metadata"].get("ownerReferences", []))
            ]
            if not orphans:
                return
            for address in orphans:
                del self.objects[address]
                self.applied.pop(address, None)

    def _run_deployment(self, deployment: Object) -> None:
        spec, name = deployment["spec"], deployment["metadata"]["name"]
        pods = [pod for pod in self.select(PODS) if _is_owned(pod, deployment)]
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                self.remove(PODS, "default", pod["metadata"]["name"])
        pods = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        for pod in filter(_is_ready, pods):
            self._ready_since_s.setdefault(pod["metadata"]["uid"], self.now_s)
        stale = [pod for pod in pods if pod["template"] != spec["template"]]
        if stale and spec.get("paused"):
            # Each template's ReplicaSet keeps the pods that it has.
            missing, template = spec["replicas"] - len(pods), stale[0]["template"]
            if sum(pod not in stale and self._is_available(pod, spec) for pod in pods) >= spec["replicas"]:
                # Saturated: Kubernetes then ends the old ones, paused or not.
                missing = -len(stale)
            elif missing < 0:
                _, surge = _resolve_strategy(spec["strategy"]["rollingUpdate"], spec["replicas"])
                missing = min(0, missing + surge)
        else:
            missing, template = self._roll(spec, pods, stale), spec["template"]
        for pod in sorted(pods, key=_deletion_rank)[: max(0, -missing)]:
            self._end(pod)
        for _ in range(missing):
            self._start(deployment, template)
        self._report(deployment, name)

    def _roll(self, spec: Object, pods: list[Object], stale: list[Object]) -> int:
        """Ends pods of another template as far as the strategy allows; returns how many pods are missing."""
        replicas = spec["replicas"]
        unavailable, surge = _resolve_strategy(spec["strategy"]["rollingUpdate"], replicas)
        missing = replicas + (surge if stale else 0) - len(pods)
        if missing < 0 or not stale:
            return missing
        available = [pod for pod in pods if self._is_available(pod, spec)]
        num_new_away = sum(pod not in stale and pod not in available for pod in pods)
        # Pods that do not serve first.
        idle = [pod for pod in stale if pod not in available]
        idle = idle[: max(0, len(pods) - (replicas - unavailable) - num_new_away)]
        rest = [pod for pod in stale if pod in available][: max(0, len(available) - (replicas - unavailable))]
        for pod in [*idle, *rest]:
            self._end(pod)
        return min(missing, replicas - (len(pods) - len(stale)))

    def _is_available(self, pod: Object, spec: Object) -> bool:
        """Whether a pod has been ready for ``minReadySeconds``."""
        since_s = self._ready_since_s.get(pod["metadata"]["uid"], self.now_s)
        return _is_ready(pod) and self.now_s - since_s >= spec.get("minReadySeconds", 0)

    def _start(self, deployment: Object, template: Object) -> None:
        number = next(self._uids)
        image = template["spec"]["containers"][0]["image"]
        is_broken = image in self.broken_images
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": f"back-off {number}"}}
        status: Object = {
            "phase": "Pending" if is_broken else "Running",
            "podIP": f"10.0.{number // 250}.{number % 250}",
            "conditions": [{"type": "Ready", "status": "False" if is_broken else "True"}],
            "containerStatuses": [
                {"name": "c", "image": image, "ready": not is_broken, "state": waiting if is_broken else {}}
            ],
        }
        owner = {"kind": "Deployment", "name": deployment["metadata"]["name"], "uid": deployment["metadata"]["uid"]}
        self._store(
            self._new(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": f"{deployment['metadata']['name']}-{number:04}",
                        "namespace": "default",
                        "labels": dict(template["metadata"]["labels"]),
                        "annotations": dict(template["metadata"].get("annotations") or {}),
                        "ownerReferences": [owner],
                    },
                    "spec": copy_object(template["spec"]),
                    "template": copy_object(template),
                    "status": status,
                }
            )
        )

    def _end(self, pod: Object) -> None:
        address = "Pod", "default", pod["metadata"]["name"]
        self._change(address, merge(pod, {"metadata": {"deletionTimestamp": "now"}}))

    def _report(self, deployment: Object, name: str) -> None:
        pods = [
            pod
            for pod in self.select(PODS)
            if _is_owned(pod, deployment) and "deletionTimestamp" not in pod["metadata"]
        ]
        updated = [pod for pod in pods if pod["template"] == deployment["spec"]["template"]]
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": len(updated),
            "readyReplicas": sum(map(_is_ready, pods)),
        }
        if deployment.get("status") != status:
            self._change(("Deployment", "default", name), {**deployment, "status": status})

    # Storage.

    def _call(self, verb: str, kind: Kind) -> Callable[[], None]:
        self.calls.append((verb, kind.plural))
        self.before(verb, kind.plural)
        return lambda: self.after(verb, kind.plural)

    def _address(self, content: Object) -> Address:
        metadata = content["metadata"]
        return content["kind"], metadata.get("namespace", "default"), metadata["name"]

    def _check(self, address: Address, patch: Object) -> Address:
        live = self.objects.get(address)
        if live is None:
            raise NotFoundError(f"{address} does not exist")
        for field in ("uid", "resourceVersion"):
            wanted = patch.get("metadata", {}).get(field)
            if wanted is not None and wanted != live["metadata"][field]:
                raise ConflictError(f"{field} of {address} is another one")
        return address

    def _new(self, content: Object) -> Object:
        created = copy_object(content)
        created["metadata"] = {"namespace": "default", **created["metadata"], "uid": f"uid-{next(self._uids)}"}
        created["metadata"]["generation"] = 1
        return created

    def _store(self, content: Object) -> Object:
        content["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[self._address(content)] = content
        return content

    def _change(self, address: Address, changed: Object) -> None:
        live = self.objects[address]
        changed = copy_object(changed)
        for field in ("uid", "generation", "resourceVersion"):
            changed["metadata"][field] = live["metadata"][field]
        if changed == live:
            return
        if changed.get("spec") != live.get("spec"):
            changed["metadata"]["generation"] += 1
        self._store(changed)


def _resolve_strategy(strategy: Object, replicas: int) -> tuple[int, int]:
    """Resolves maxUnavailable and maxSurge as Kubernetes does: rounded down, rounded up, never both 0."""

    def count(value: int | str, rounding: int) -> int:
        return value if isinstance(value, int) else (int(value.removesuffix("%")) * replicas + rounding) // 100

    unavailable, surge = count(strategy["maxUnavailable"], 0), count(strategy["maxSurge"], 99)
    return (unavailable, surge) if unavailable or surge else (1, 0)


def _is_owned(pod: Object, deployment: Object) -> bool:
    return any(owner["uid"] == deployment["metadata"]["uid"] for owner in pod["metadata"].get("ownerReferences", []))


def _is_ready(pod: Object) -> bool:
    return any(item["type"] == "Ready" and item["status"] == "True" for item in pod["status"]["conditions"])


def _deletion_rank(pod: Object) -> tuple[bool, int, str]:
    """Kubernetes' order: pods that do not serve, then those of the least deletion cost."""
    cost = int((pod["metadata"].get("annotations") or {}).get(DELETION_COST, "0"))
    return _is_ready(pod), cost, pod["metadata"]["name"]


def make_cluster(name: str = "tiny", **spec: Any) -> Object:
    """A ServingCluster as a user writes it."""
    return {
        "apiVersion": CLUSTERS.api_version,
        "kind": CLUSTERS.name,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": 4,
            "prefillHeavy": "50%",
            "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
            "strategy": "TaiChi",
            "slo": {"ttftMilliseconds": 2000, "tpotMilliseconds": 200},
            "model": {"name": "tiny", "source": {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}}},
            "engine": {"maxBatchTokens": 2048, "drainTimeoutSeconds": 30},
            "router": {"replicas": 2},
            **spec,
        },
    }
