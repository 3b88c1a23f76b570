"""Interceptors of requests to the API server: each verb is passed on here, once, and through all of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.kinds import Kind
    from sluice_operator.kubernetes.objects import Object

READ_VERBS = frozenset({"get", "list", "discover"})

Answer = TypeVar("Answer")


class Interceptor(Protocol):
    """Sees every request."""

    async def __call__(self, verb: str, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """Sends a request once, several times, or not at all.

        Args:
            verb: get, list, discover, apply, create, patch, patch_status or delete.
            send: Sends it; may be called again.

        Raises:
            KubernetesError: The request failed or was not sent.
        """


class InterceptedKubernetes:
    """See ``Kubernetes``.

    Args:
        kubernetes: The API server.
        interceptors: What each request passes, the outermost first.
    """

    def __init__(self, kubernetes: Kubernetes, *interceptors: Interceptor) -> None:
        self._kubernetes = kubernetes
        self._interceptors = interceptors

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """See ``Kubernetes.get``."""
        return await self._request("get", lambda: self._kubernetes.get(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        """See ``Kubernetes.list``."""
        return await self._request("list", lambda: self._kubernetes.list(kind, namespace, labels))

    async def is_served(self, kind: Kind) -> bool:
        """See ``Kubernetes.is_served``."""
        return await self._request("discover", lambda: self._kubernetes.is_served(kind))

    async def apply(self, content: Object) -> Object:
        """See ``Kubernetes.apply``."""
        return await self._request("apply", lambda: self._kubernetes.apply(content))

    async def create(self, content: Object) -> Object:
        """See ``Kubernetes.create``."""
        return await self._request("create", lambda: self._kubernetes.create(content))

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch``."""
        return await self._request("patch", lambda: self._kubernetes.patch(kind, namespace, name, patch))

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch_status``."""
        return await self._request("patch_status", lambda: self._kubernetes.patch_status(kind, namespace, name, patch))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """See ``Kubernetes.delete``."""
        await self._request("delete", lambda: self._kubernetes.delete(kind, namespace, name, uid))

    async def _request(self, verb: str, send: Callable[[], Awaitable[Answer]]) -> Answer:
        for interceptor in reversed(self._interceptors):
            send = partial(interceptor, verb, send)
        return await send()
