"""The verbs of the API server that the operator uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sluice_operator.kubernetes.kinds import Kind
    from sluice_operator.kubernetes.objects import Object


class Kubernetes(Protocol):
    """The verbs. Each raises a ``KubernetesError`` when it fails; none retries."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Reads an object; None when there is none."""

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        """Reads the objects with these labels, as of now."""

    async def is_served(self, kind: Kind) -> bool:
        """Whether the server has this kind at all."""

    async def apply(self, content: Object) -> Object:
        """Applies an object server-side as ours, by force; with a uid in it, to that very object only."""

    async def create(self, content: Object) -> Object:
        """Creates an object; ``ConflictError`` when there is one."""

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """Merges a patch; with a resourceVersion or uid in it, into that very object only."""

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """Merges a patch into the status."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes an object if it still has this uid; one that is gone is no error."""
