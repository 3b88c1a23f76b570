"""Response streams of the HTTP and gRPC APIs: they turn tokens into what one client gets, synchronously."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_router.api.openai_responses import AnswerFormat
    from sluice_router.api.slow_readers import SlowReaders
    from sluice_router.errors import RouterError
    from sluice_router.scheduling.requests import Finish
    from sluice_router.text.output import Delta, Output

from sluice_router.api.openai_responses import format_error_event


class ClientStream(Protocol):
    """Where the bytes of a streamed answer go."""

    @property
    def is_writable(self) -> bool:
        """False while the client's transport is full."""
        ...

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes in the transport that the kernel has not taken."""
        ...

    def write(self, data: bytes) -> None:
        """Writes; to a closed transport, nothing."""
        ...

    def abort(self) -> None:
        """Closes at once, whatever is unsent."""
        ...


class WholeResponseStream:
    """Collects an answer that does not stream.

    Args:
        output: The request's output.
        answer: The endpoint's form.
    """

    def __init__(self, output: Output, answer: AnswerFormat) -> None:
        self._output = output
        self._answer = answer
        self.on_token = output.push
        self._done: asyncio.Future[dict[str, Any] | RouterError] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether the data plane has said how it ended."""
        return self._done.done()

    async def wait(self) -> dict[str, Any]:
        """Waits for the answer.

        Returns:
            The body.

        Raises:
            RouterError: The request failed.
        """
        result = await self._done
        if isinstance(result, dict):
            return result
        raise result

    def flush(self, now: float) -> None:
        """Does nothing: the answer goes out whole."""

    def on_finished(self, finish: Finish) -> None:
        """Makes the answer."""
        self._output.finish()
        self._settle(self._answer.whole(self._output.take(), finish, self._output.matched_stop))

    def on_error(self, error: RouterError) -> None:
        """Fails the answer."""
        self._settle(error)

    def _settle(self, result: dict[str, Any] | RouterError) -> None:
        if not self._done.done():  # the client may have gone in this very tick
            self._done.set_result(result)


class SseResponseStream:
    """Writes an answer as server-sent events.

    Its life: tokens come (``wait_first`` returns), the handler opens the stream, events go out, the end is written
    (``wait_sent`` returns).

    Args:
        output: The request's output.
        answer: The endpoint's form.
        slow_readers: Where it registers while its client is paused.
        interval_tokens: Tokens per event after the first.
        cancel: Cancels the request because its client reads too slowly.
    """

    def __init__(
        self,
        output: Output,
        answer: AnswerFormat,
        *,
        slow_readers: SlowReaders,
        interval_tokens: int,
        cancel: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._output = output
        self._answer = answer
        self._slow_readers = slow_readers
        self._interval_tokens = interval_tokens
        self._is_plain = answer.is_plain
        self._cancel = cancel
        self.on_token = output.push
        self._stream: ClientStream | None = None
        self._end: Finish | RouterError | None = None
        self._first: asyncio.Future[None] = loop.create_future()
        self._sent: asyncio.Future[None] = loop.create_future()
        self._is_paused = False
        self._is_ended = False
        self.paused_since_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the data plane has said how it ended."""
        return self._end is not None

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for the client; see ``SlowReader``."""
        return self._output.num_bytes + (0 if self._stream is None else self._stream.num_buffered_bytes)

    async def wait_first(self) -> None:
        """Waits until there is something to send: what fails before that gets an HTTP status of its own.

        Raises:
            RouterError: The request failed before that.
        """
        await self._first
        if self._end is not None and isinstance(self._end, Exception):
            raise self._end

    async def wait_sent(self) -> None:
        """Waits until the end is written."""
        await self._sent

    def open(self, stream: ClientStream, now: float) -> None:
        """Starts writing; the status line is out.

        Args:
            stream: Where to.
            now: In seconds, on the data plane's clock.
        """
        self._stream = stream
        stream.write(self._answer.start())
        self._advance()
        if not stream.is_writable:
            self.on_paused(now)

    def flush(self, now: float) -> None:  # noqa: ARG002 - gRPC's response stream needs it
        """Writes one event with what has come."""
        if self._stream is None:
            self._announce()
        elif self._output.num_tokens - self._output.first_index >= self._interval_tokens:
            self._advance()

    def on_finished(self, finish: Finish) -> None:
        """Writes the end, or leaves it until the client has drained."""
        self._output.finish()
        self._conclude(finish)

    def on_error(self, error: RouterError) -> None:
        """Ends the stream with an error; see ``ResponseStream.on_error``."""
        self._conclude(error)

    def on_paused(self, now: float) -> None:
        """Keeps what comes: the transport is full. Behind the end nothing comes, and the connection watches alone."""
        if self._is_ended:
            return
        self._is_paused = True
        self.paused_since_s = now
        self._slow_readers.add(self)

    def on_drained(self) -> None:
        """Goes on: the client has read what the transport held."""
        if not self._is_paused:
            return
        self._is_paused = False
        self._slow_readers.discard(self)
        self._advance()

    def on_lost(self) -> None:
        """Forgets the client, who has gone."""
        self._slow_readers.discard(self)

    def shed(self) -> None:
        """Gives the client up, who reads too slowly."""
        self._cancel()
        if self._stream is not None:
            self._stream.abort()

    def _conclude(self, end: Finish | RouterError) -> None:
        self._end = end
        if self._stream is None:
            self._announce()
        else:
            self._advance()

    def _announce(self) -> None:
        if not self._first.done():
            self._first.set_result(None)

    def _advance(self) -> None:
        """Writes all there is; while the client is paused keeps the text, which goes out as one event later."""
        assert self._stream is not None
        if self._is_paused:
            self._slow_readers.check(self)
            return
        if self._end is not None:
            self._write_end(self._stream, self._end)
            return
        if self._is_plain:
            text = self._output.take_text()
            data = self._answer.plain_chunk(text) if text else b""
        else:
            delta = self._output.take()
            data = self._answer.chunk(delta) if delta else b""
        if data:
            self._stream.write(data)

    def _write_end(self, stream: ClientStream, end: Finish | RouterError) -> None:
        # Before the write, which may find the transport full.
        self._is_ended = True
        delta = self._output.take()
        if isinstance(end, Exception):
            stream.write((self._answer.chunk(delta) if delta else b"") + format_error_event(end))
        else:
            stream.write(self._answer.end(delta, end, self._output.matched_stop))
        if not self._sent.done():
            self._sent.set_result(None)


class GrpcResponseStream:
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
        self.on_token = output.push
        self._ready = asyncio.Event()
        self._is_writing = False
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

    def flush(self, now: float) -> None:
        """Wakes the writer, or notes that it is still busy with an earlier delta."""
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

    def shed(self) -> None:
        """Gives the client up, who reads too slowly."""
        self._cancel()
