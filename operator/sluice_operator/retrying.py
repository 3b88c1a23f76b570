"""Asks again when a read fails, so that a look at a cluster does not end with the first of its many reads that does.

A look needs nine reads: with one request in five failing, seven looks in eight would be over before anything is decided,
and back-off grows with each. Reads change nothing and may be repeated at once; writes are for the next look, which knows
what has become of them. A server that does not answer at all is not asked again here: its time-out is long enough.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from sluice_operator.kubernetes_port import BusyError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sluice_operator.kubernetes_port import Kind, Kubernetes, Object

MAX_ATTEMPTS = 4
PAUSE_S = 0.1
# A failure that took longer, or a server that wants more time than this, is not worth a worker's waiting.
PATIENCE_S = 1.0

Answer = TypeVar("Answer")


class RetryingKubernetes:
    """Passes requests on, reads up to four times.

    Args:
        kubernetes: The API server.
        now: Monotonic seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kubernetes = kubernetes
        self._now = now
        self._sleep = sleep

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """See ``Kubernetes.get``."""
        return await self._read(lambda: self._kubernetes.get(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        """See ``Kubernetes.list``."""
        return await self._read(lambda: self._kubernetes.list(kind, namespace, labels))

    async def is_served(self, kind: Kind) -> bool:
        """See ``Kubernetes.is_served``."""
        return await self._read(lambda: self._kubernetes.is_served(kind))

    async def apply(self, content: Object) -> Object:
        """See ``Kubernetes.apply``."""
        return await self._kubernetes.apply(content)

    async def create(self, content: Object) -> Object:
        """See ``Kubernetes.create``."""
        return await self._kubernetes.create(content)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch``."""
        return await self._kubernetes.patch(kind, namespace, name, patch)

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch_status``."""
        return await self._kubernetes.patch_status(kind, namespace, name, patch)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """See ``Kubernetes.delete``."""
        await self._kubernetes.delete(kind, namespace, name, uid)

    async def _read(self, read: Callable[[], Awaitable[Answer]]) -> Answer:
        for attempt in range(1, MAX_ATTEMPTS):
            started_s = self._now()
            try:
                return await read()
            except BusyError as error:
                pause_s = PAUSE_S * attempt if error.retry_after_s is None else error.retry_after_s
                if pause_s > PATIENCE_S or self._now() - started_s > PATIENCE_S:
                    raise
            await self._sleep(pause_s)
        return await read()
