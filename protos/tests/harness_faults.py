"""Faults that a harness notices where an except of the product would hide them. They fail the test at its end.

``conftest.py`` of the repository reads them after each test of every part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# They log what nobody else hears of: a callback, a task or a request handler that raised.
OUTERMOST = ("asyncio", "aiohttp.server", "grpc")
_faults: list[str] = []


def record(fault: str) -> None:
    """Records a fault."""
    _faults.append(fault)


def take() -> list[str]:
    """Returns the faults since the last call, and forgets them."""
    faults = list(_faults)
    _faults.clear()
    return faults


def check() -> None:
    """Fails if there is a fault since the last call."""
    faults = take()
    assert not faults, "\n".join(faults)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Records what the block raises, and raises it on; also a decorator."""
    try:
        yield
    except Exception:
        record(traceback.format_exc())
        raise


class LogWatcher(logging.Handler):
    """Records assertions that an except caught and logged, and errors at which an outermost frame gave up."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, asyncio.CancelledError):
            return  # gRPC logs so when a client goes, or a server stops, before the call's handler has begun
        if isinstance(error, RuntimeError) and "PollerCompletionQueue" in record.getMessage():
            return  # gRPC's poller, one per process, still has an event for the loop of a test that has ended
        if isinstance(error, AssertionError) or record.name.startswith(OUTERMOST):
            _faults.append(self.format(record))
