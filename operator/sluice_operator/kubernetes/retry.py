"""Repeats requests that fail, so that one failed request out of many does not end a whole reconcile.

A reconcile makes about eleven reads and some writes. With one request in five failing, nine reconciles in ten would not
reach their end, and the work queue's back-off would grow with each.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sluice_operator.kubernetes.errors import BusyError

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from sluice_operator.kubernetes.interceptors import Answer

MAX_ATTEMPTS = 4
# An attempt that took longer than PATIENCE_S has waited long enough by itself.
MAX_SLOW_ATTEMPTS = 2
# Doubled with each attempt, less up to half of it as jitter.
PAUSE_S = 0.1
# A server that asks for a longer pause is left to the work queue: a worker should not wait for it.
PATIENCE_S = 1.0


class Retry:
    """Repeats requests that may succeed the next time; see ``Interceptor``.

    Reads change nothing. Writes say how things should be, or name the version that they replace: a second one changes
    nothing more, or conflicts, and the next reconcile sees what became of the first.

    Args:
        rng: Jitter.
        now: Monotonic seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        *,
        rng: random.Random,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rng = rng
        self._now = now
        self._sleep = sleep

    async def __call__(self, verb: str, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """See ``Interceptor``."""
        if verb == "create":
            # Events get their names from the server: a repeated create would make a second one.
            return await send()
        num_slow = 0
        for attempt in range(1, MAX_ATTEMPTS):
            started_s = self._now()
            try:
                return await send()
            except BusyError as error:
                num_slow += self._now() - started_s > PATIENCE_S
                if num_slow >= MAX_SLOW_ATTEMPTS or (error.retry_after_s or 0.0) > PATIENCE_S:
                    raise
                pause_s = PAUSE_S * 2.0 ** (attempt - 1) * (0.5 + self._rng.random() / 2)
                await self._sleep(max(pause_s, error.retry_after_s or 0.0))
        return await send()
