"""The response stream of the gRPC API: it gathers what has come until the call's coroutine has written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sluice.v1 import engine_pb2
from sluice_router.api.slow_readers import SlowReaders
from sluice_router.errors import RouterError
from sluice_router.scheduling.requests import Finish, ResponseStream
from sluice_router.text.output import Delta, Output


class GrpcResponseStream(ResponseStream):
    """Gathers deltas for the coroutine that writes them.

    Args:
        output: The request's output.
        slow_readers: Where it registers while its client does not keep up.
        cancel: Cancels the request because its client reads too slowly.
    """

    def __init__(self, output: Output, *, slow_readers: SlowReaders, cancel: Callable[[], None]) -> None:
        self._output = output
        self._slow_readers = slow_readers
        self._cancel = cancel
        self._ready = asyncio.Event()
        self._is_writing = self._is_detached = False
        self.end: Finish | RouterError | None = None
        self.paused_since_s = 0.0

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for the client; see ``SlowReader``."""
        return self._output.num_bytes

    async def next(self) -> tuple[Delta, Finish | RouterError | None]:
        """Waits for something to write.

        Returns:
            What has come, and the end if it has come too.
        """
        self._is_writing = False
        self._slow_readers.discard(self)
        await self._ready.wait()
        self._ready.clear()
        self._is_writing = True
        return self._output.take(), self.end

    def on_token(self, token_id: int, logprobs: engine_pb2.TokenLogprobs | None) -> int | None:
        """Takes the next token; see ``ResponseStream.on_token``."""
        return self._output.push(token_id, logprobs)

    def flush(self, now: float) -> None:
        """Wakes the writer, or notes that it is still busy with an earlier delta."""
        if self._is_detached:
            self._output.take()
            return
        if self._is_writing:
            if not self._ready.is_set():
                self.paused_since_s = now
                self._slow_readers.add(self)
            self._slow_readers.check(self)
        self._ready.set()

    def on_finished(self, finish: Finish) -> None:
        """Has the end written."""
        self._output.finish()
        self.end = finish
        self._ready.set()

    def on_error(self, error: RouterError) -> None:
        """Has the call fail."""
        self.end = error
        self._ready.set()

    def close(self) -> None:
        """Forgets the client."""
        self._slow_readers.discard(self)

    def detach(self) -> None:
        """Keeps nothing from here on; the request goes on for a client that may come back."""
        self._is_detached = True
        self._output.take()

    def shed(self) -> None:
        """Gives the client up, who reads too slowly."""
        self._cancel()
