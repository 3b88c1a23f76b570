"""Asks again when a request fails, so that a look at a cluster does not end with the first of its many requests that does.

A look makes about eleven reads and some writes: with one request in five failing, nine looks in ten would be over before
their end, and back-off grows with each. Reads change nothing. Writes say how things should be, or name the very version
that they replace: a second one changes nothing more, or conflicts, and the next look sees what has become of the first.
``create`` is the exception (events get their names from the server), and is left to the next look.

Each request is asked at most four times, and once more at most if the server did not answer at all; a server that names a
time is given it, unless it is longer than a worker should wait: then the queue waits instead.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from sluice_operator.kubernetes.interface import BusyError

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from sluice_operator.kubernetes.interface import Kind, Kubernetes, Object

MAX_ATTEMPTS = 4
# An answer that took longer than PATIENCE_S was none; its time-out is long enough.
MAX_SLOW_ATTEMPTS = 2
# Doubled with each attempt, less up to half of it as jitter.
PAUSE_S = 0.1
# A server that wants more time than this is not worth a worker's waiting.
PATIENCE_S = 1.0

Answer = TypeVar("Answer")


class RetryingKubernetes:
    """Passes requests on, and repeats those that fail.

    Args:
        kubernetes: The API server; fenced, so that no repetition outlives the lease.
        rng: Jitter.
        now: Monotonic seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        *,
        rng: random.Random,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kubernetes = kubernetes
        self._rng = rng
        self._now = now
        self._sleep = sleep

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """See ``Kubernetes.get``."""
        return await self._ask(lambda: self._kubernetes.get(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        """See ``Kubernetes.list``."""
        return await self._ask(lambda: self._kubernetes.list(kind, namespace, labels))

    async def is_served(self, kind: Kind) -> bool:
        """See ``Kubernetes.is_served``."""
        return await self._ask(lambda: self._kubernetes.is_served(kind))

    async def apply(self, content: Object) -> Object:
        """See ``Kubernetes.apply``."""
        return await self._ask(lambda: self._kubernetes.apply(content))

    async def create(self, content: Object) -> Object:
        """See ``Kubernetes.create``; asked once."""
        return await self._kubernetes.create(content)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch``."""
        return await self._ask(lambda: self._kubernetes.patch(kind, namespace, name, patch))

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch_status``."""
        return await self._ask(lambda: self._kubernetes.patch_status(kind, namespace, name, patch))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """See ``Kubernetes.delete``."""
        await self._ask(lambda: self._kubernetes.delete(kind, namespace, name, uid))

    async def _ask(self, request: Callable[[], Awaitable[Answer]]) -> Answer:
        num_slow = 0
        for attempt in range(1, MAX_ATTEMPTS):
            started_s = self._now()
            try:
                return await request()
            except BusyError as error:
                num_slow += self._now() - started_s > PATIENCE_S
                if num_slow >= MAX_SLOW_ATTEMPTS or (error.retry_after_s or 0.0) > PATIENCE_S:
                    raise
                pause_s = PAUSE_S * 2.0 ** (attempt - 1) * (0.5 + self._rng.random() / 2)
                await self._sleep(max(pause_s, error.retry_after_s or 0.0))
        return await request()
