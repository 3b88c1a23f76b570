"""Keeps a replica that may have lost its lease from writing: its successor may write already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.kubernetes.errors import LeaseLostError
from sluice_operator.kubernetes.interceptors import READ_VERBS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sluice_operator.kubernetes.interceptors import Answer


class LeaseFence:
    """Sends reads, and writes only while the lease is held; see ``Interceptor``.

    A write that is sent at the last moment ends within the request timeout (5 s). The lease outlives the renew deadline
    by as long (15 s against 10 s), so that the write is over before a successor begins.

    Args:
        may_write: Whether the lease is held, by our own clock.
    """

    def __init__(self, may_write: Callable[[], bool]) -> None:
        self._may_write = may_write

    async def __call__(self, verb: str, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """See ``Interceptor``."""
        if verb not in READ_VERBS and not self._may_write():
            raise LeaseLostError(f"{verb} was not sent: the lease is lost or could not be renewed in time")
        return await send()
