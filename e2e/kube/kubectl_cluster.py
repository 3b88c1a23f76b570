"""A ServingCluster in a namespace, read and edited with kubectl as users do."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import yaml
from testbed.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.client import Client

PATIENCE_S = 120.0
CHILDREN = "deployments,services,configmaps,serviceaccounts,poddisruptionbudgets,networkpolicies"


def wait_for(poll: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Polls until a function returns something true, and returns that."""
    deadline = time.monotonic() + patience_s
    while not (found := poll()):
        assert time.monotonic() < deadline, f"{what}: not in {patience_s:.0f} s"
        time.sleep(0.1)
    return found


def make_manifest(**spec: dict[str, Any]) -> dict[str, Any]:
    """Makes the example's manifest, with some fields of its spec changed."""
    manifest: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny-cpu.yaml").read_text())
    for part, fields in spec.items():
        manifest["spec"][part].update(fields)
    return manifest


class KubectlCluster:
    """The ServingCluster ``tiny`` of a namespace.

    Args:
        client: The administrator.
        namespace: The namespace.
        patience_s: Longest wait for anything that the operator or Kubernetes does.
    """

    def __init__(self, client: Client, namespace: str, patience_s: float = PATIENCE_S) -> None:
        self.client, self.namespace, self.patience_s = client, namespace, patience_s

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.client.kubectl("-n", self.namespace, *arguments, stdin=stdin)

    def read(self, what: str) -> Any:
        return json.loads(self.kubectl("get", what, "-o", "json"))

    def apply(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def list_spec_writers(self) -> set[str]:
        """Lists who has written fields of the spec, according to the API server's managed fields."""
        body = json.loads(self.kubectl("get", "slc", "tiny", "-o", "json", "--show-managed-fields"))
        managed = body["metadata"]["managedFields"]
        return {item["manager"] for item in managed if "f:spec" in item.get("fieldsV1", {})}

    def edit(self, **spec: Any) -> None:
        self.kubectl("patch", "slc", "tiny", "--type=merge", "-p", json.dumps({"spec": spec}))

    def wait_for(self, poll: Callable[[], Any], what: str) -> Any:
        return wait_for(poll, what, self.patience_s)

    def wait(self, condition: str, reason: str) -> None:
        """Waits until a condition of the present generation has a reason."""

        def poll() -> bool:
            body = self.read("slc/tiny")
            found = {item["type"]: item for item in body.get("status", {}).get("conditions", [])}
            return condition in found and (
                found[condition]["reason"] == reason
                and found[condition]["observedGeneration"] == body["metadata"]["generation"]
            )

        try:
            self.wait_for(poll, f"{condition} {reason}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.read('slc/tiny').get('status')}") from error

    def find_pods(self, component: str) -> dict[str, dict[str, Any]]:
        """Lists the pods of engines or of routers by uid."""
        label = f"sluice.dev/cluster=tiny,app.kubernetes.io/component={component}"
        pods = json.loads(self.kubectl("get", "pods", "-l", label, "-o", "json"))
        return {pod["metadata"]["uid"]: pod for pod in pods["items"]}

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        return self.find_pods("engine")

    @property
    def roles(self) -> list[str]:
        return sorted(pod["metadata"]["labels"].get("sluice.dev/role", "") for pod in self.engines.values())

    def versions(self) -> dict[str, str]:
        """Tells what has been written. Of a pod, its metadata counts: nodes write its status."""
        items = self.read(f"{CHILDREN},slc,pods")["items"]
        return {f"{item['kind']}/{item['metadata']['name']}": _render_version(item) for item in items}

    def wait_unchanged(self) -> dict[str, str]:
        """Waits until nothing has been written for two seconds; returns the versions.

        A cluster settles before the last roles, and what it costs to delete a pod, have been written.
        """
        versions: dict[str, str] = {}

        def is_unchanged() -> bool:
            nonlocal versions
            before, versions = versions, self.versions()
            if versions != before:
                time.sleep(2)
            return versions == before

        self.wait_for(is_unchanged, "two seconds without a write")
        return versions


def _render_version(item: dict[str, Any]) -> str:
    metadata: dict[str, Any] = item["metadata"]
    if item["kind"] == "Pod":
        return json.dumps([metadata["labels"], metadata.get("annotations")])
    return str(metadata["resourceVersion"])


def read_image(pod_spec: dict[str, Any]) -> str:
    """Reads the image of an engine."""
    image: str = pod_spec["containers"][0]["image"]
    return image


def read_images(cluster: KubectlCluster) -> set[str]:
    """Reads the images of a cluster's engines, also of those that end."""
    return {read_image(pod["spec"]) for pod in cluster.engines.values()}


def find_turn(cluster: KubectlCluster) -> tuple[str, str]:
    """Finds when the first engine of a cluster was created and when the last one became Ready, by Kubernetes' clock."""
    pods = cluster.engines.values()
    ready = [
        item["lastTransitionTime"] for pod in pods for item in pod["status"]["conditions"] if item["type"] == "Ready"
    ]
    return min(pod["metadata"]["creationTimestamp"] for pod in pods), max(ready)
