"""A ServingCluster for tests that read its state often: over HTTPS, because kubectl would take a whole core."""

from __future__ import annotations

from typing import Any

from test_operator import Cluster

MERGE = "application/merge-patch+json"


class LightCluster(Cluster):
    """See ``Cluster``."""

    @property
    def path(self) -> str:
        """Where it is."""
        return f"/apis/sluice.dev/v1alpha1/namespaces/{self.namespace}/servingclusters/tiny"

    def read(self, what: str) -> Any:
        return self.client.request("GET", self.path).content if what == "slc/tiny" else super().read(what)

    def edit(self, **spec: Any) -> None:
        answer = self.client.request("PATCH", self.path, {"spec": spec}, MERGE)
        assert answer.is_ok, answer.content

    def condition(self, kind: str) -> dict[str, Any]:
        """Reads a condition, whichever generation it describes; empty without one."""
        conditions = self.read("slc/tiny").get("status", {}).get("conditions", [])
        return next((item for item in conditions if item["type"] == kind), {})

    def reason(self, kind: str) -> str:
        """Reads the reason of a condition; empty without one."""
        return str(self.condition(kind).get("reason", ""))

    def message(self, kind: str) -> str:
        """Reads the message of a condition; empty without one."""
        return str(self.condition(kind).get("message", ""))

    def find_pods(self, component: str) -> dict[str, dict[str, Any]]:
        query = f"labelSelector=app.kubernetes.io%2Fcomponent%3D{component}"
        answer = self.client.request("GET", f"/api/v1/namespaces/{self.namespace}/pods?{query}")
        return {pod["metadata"]["uid"]: pod for pod in answer.content["items"]}
