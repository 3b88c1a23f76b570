"""Keeps a replica that may have lost its lease from writing: its successor may be at work already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.kubernetes.interface import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.kubernetes.interface import Kind, Kubernetes, Object


class FencedKubernetes:
    """Passes reads on, and writes only while the lease is held.

    A write that is sent in the last moment ends within the request time-out (5 s), and the lease outlives the deadline
    by as long (15 s against 10 s): it is over before a successor begins.

    Args:
        kubernetes: The API server.
        may_write: Whether the lease is held, by our own clock.
    """

    def __init__(self, kubernetes: Kubernetes, may_write: Callable[[], bool]) -> None:
        self._kubernetes = kubernetes
        self._may_write = may_write

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """See ``Kubernetes.get``."""
        return await self._kubernetes.get(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        """See ``Kubernetes.list``."""
        return await self._kubernetes.list(kind, namespace, labels)

    async def is_served(self, kind: Kind) -> bool:
        """See ``Kubernetes.is_served``."""
        return await self._kubernetes.is_served(kind)

    async def apply(self, content: Object) -> Object:
        """See ``Kubernetes.apply``."""
        self._check()
        return await self._kubernetes.apply(content)

    async def create(self, content: Object) -> Object:
        """See ``Kubernetes.create``."""
        self._check()
        return await self._kubernetes.create(content)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch``."""
        self._check()
        return await self._kubernetes.patch(kind, namespace, name, patch)

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch_status``."""
        self._check()
        return await self._kubernetes.patch_status(kind, namespace, name, patch)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """See ``Kubernetes.delete``."""
        self._check()
        await self._kubernetes.delete(kind, namespace, name, uid)

    def _check(self) -> None:
        if not self._may_write():
            raise LeaseLostError("the lease is lost or could not be renewed in time")
