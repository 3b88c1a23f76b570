"""Response streams of the HTTP API: they turn tokens into what one client gets, synchronously."""

from __future__ import annotations

from collections.abc import Callable

from mypy_extensions import mypyc_attr

from sluice.v1 import engine_pb2
from sluice_router.api.http.answer_progress import AnswerProgress, WholeAnswer
from sluice_router.api.http.http_errors import format_error_event
from sluice_router.api.openai_responses import AnswerFormat
from sluice_router.api.slow_readers import SlowReaders
from sluice_router.errors import RouterError
from sluice_router.scheduling.requests import Finish, ResponseStream
from sluice_router.text.output import Output

STREAM_INTERVAL_TOKENS = 1  # per event, after the first


@mypyc_attr(allow_interpreted_subclasses=True)
class ClientStream:
    """Where the bytes of a streamed answer go; a base class."""

    __slots__ = ()

    @property
    def is_writable(self) -> bool:
        """False while the client's transport is full."""
        raise NotImplementedError

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes in the transport that the kernel has not taken."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Writes; to a closed transport, nothing."""
        raise NotImplementedError

    def abort(self) -> None:
        """Closes at once, whatever is unsent."""
        raise NotImplementedError

    def end(self, data: bytes) -> None:
        """Writes the last bytes, and drops what is written from here on."""
        raise NotImplementedError


class WholeResponseStream(ResponseStream):
    """Collects one choice of an answer that does not stream.

    Args:
        output: The request's output.
        answer: The endpoint's form.
        whole: The answer.
        index: Of the choice.
    """

    def __init__(self, output: Output, answer: AnswerFormat, whole: WholeAnswer, index: int) -> None:
        self._output = output
        self._answer = answer
        self._whole = whole
        self._index = index

    def on_token(self, token_id: int, logprobs: engine_pb2.TokenLogprobs | None) -> int | None:
        """Takes the next token; see ``ResponseStream.on_token``."""
        return self._output.push(token_id, logprobs)

    def flush(self, now: float) -> None:
        """Does nothing: the answer goes out whole."""

    def on_finished(self, finish: Finish) -> None:
        """Makes the choice, and with the last one the answer."""
        self._output.finish()
        self._whole.choices[self._index] = self._answer.choice(self._output.take(), finish, self._output.matched_stop)
        progress = self._whole.progress
        progress.note_end(self._index, finish)
        if progress.is_over:
            progress.announce()

    def on_error(self, error: RouterError) -> None:
        """Fails the answer."""
        self._whole.progress.note_end(self._index, error)
        self._whole.progress.announce()


class SseResponseStream(ResponseStream):
    """Writes one choice of an answer as server-sent events.

    An answer's life: tokens come, ``AnswerProgress.announce`` has the streams of all choices opened, events go out as
    they come, and the last choice's end is written (``wait_over`` returns).

    Args:
        output: The request's output.
        answer: The endpoint's form.
        progress: Of the answer.
        index: Of the choice.
        slow_readers: Where it registers while its client is paused.
        interval_tokens: Tokens per event after the first.
        cancel: Cancels the request because its client reads too slowly.
    """

    def __init__(
        self,
        output: Output,
        answer: AnswerFormat,
        progress: AnswerProgress,
        index: int,
        *,
        slow_readers: SlowReaders,
        interval_tokens: int,
        cancel: Callable[[], None],
    ) -> None:
        self._output = output
        self._answer = answer
        self._progress = progress
        self._index = index
        self._slow_readers = slow_readers
        self._interval_tokens = interval_tokens
        self._is_plain = answer.is_plain
        self._cancel = cancel
        self._stream: ClientStream | None = None
        self._end: Finish | RouterError | None = None
        self._is_paused = False
        self._is_ended = False
        self.paused_since_s = 0.0

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for the client; see ``SlowReader``."""
        return self._output.num_bytes + (0 if self._stream is None else self._stream.num_buffered_bytes)

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

    def on_token(self, token_id: int, logprobs: engine_pb2.TokenLogprobs | None) -> int | None:
        """Takes the next token; see ``ResponseStream.on_token``."""
        return self._output.push(token_id, logprobs)

    def flush(self, now: float) -> None:  # noqa: ARG002 - gRPC's response stream needs it
        """Writes one event with what has come."""
        if self._stream is None:
            self._progress.announce()
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
        self._progress.note_end(self._index, end)
        if self._stream is None:
            self._progress.announce()
        else:
            self._advance()

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
            stream.end((self._answer.chunk(delta) if delta else b"") + format_error_event(end))
            self._progress.conclude()
            return
        data = self._answer.end(delta, end, self._output.matched_stop)
        if self._progress.note_written():
            stream.end(data + self._answer.last(self._progress.usage))
            self._progress.conclude()
        else:
            stream.write(data)


class ResumableStream(SseResponseStream):
    """Writes an answer that goes on when its client is gone, who may come back; for the arguments see its base."""

    _is_detached = False

    @property
    def is_open(self) -> bool:
        """Whether the client has the answer's head, and with it what it needs to come back."""
        return self._stream is not None or self._is_detached

    def detach(self) -> None:
        """Writes no more. Stop strings still end the output; its text is made once more for who asks for it."""
        self._is_detached, self._is_paused, self._stream = True, False, None
        self._output.take()

    def flush(self, now: float) -> None:
        """Writes one event with what has come, or drops it."""
        if self._is_detached:
            self._output.take()
        else:
            super().flush(now)
