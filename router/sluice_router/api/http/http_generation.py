"""What the inference endpoints answer over HTTP, whole or as server-sent events, until its end or the client leaves."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion11

from sluice_router.api import openai_responses
from sluice_router.api.http.http_connection import connection_of
from sluice_router.api.http.response_streams import AnswerProgress, SseResponseStream, WholeAnswer, WholeResponseStream
from sluice_router.api.openai_requests import ChatBody
from sluice_router.text.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_router.api.openai_requests import CompletionBody
    from sluice_router.api.request_preparation import PreparedRequest
    from sluice_router.api.slow_readers import SlowReaders
    from sluice_router.scheduling.requests import DataPlane, ResponseStream
    from sluice_router.text.tokenizer import ModelText

SERVER = "sluice"
# Of the head of every stream.
FIXED_LINES = (f"Content-Type: {openai_responses.CONTENT_TYPE}", "Cache-Control: no-cache", f"Server: {SERVER}")


class HttpStream:
    """A streamed answer, written past aiohttp's coroutines: head and first events in one piece, and the end in one.

    Args:
        connection: The client's connection.
        is_chunked: Whether the body is sent in HTTP chunks; HTTP/1.0 has none.

    Attributes:
        is_lost: The client had gone when something was to be written.
        keeps_connection: Whether the head says that the connection stays open behind it.
    """

    __slots__ = ("_connection", "_held", "_is_chunked", "_is_over", "_transport", "is_lost", "keeps_connection")

    def __init__(self, connection: web.RequestHandler, *, is_chunked: bool) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._is_chunked = is_chunked
        self._held: list[bytes] | None = None
        self._is_over = False
        self.is_lost = False
        self.keeps_connection = True

    @property
    def is_writable(self) -> bool:
        """False while the transport is full."""
        return not self._connection.writing_paused

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes in the transport."""
        return 0 if self._transport is None or self._is_over else self._transport.get_write_buffer_size()

    def hold(self, head: bytes) -> None:
        """Begins with the answer's head, and keeps what is written until ``release``."""
        self._held = [head]

    def release(self) -> None:
        """Writes what was kept."""
        held, self._held = self._held, None
        if held:
            self._send(b"".join(held))

    def write(self, data: bytes) -> None:
        """Writes; to a closed transport, nothing."""
        if data and not self._is_over:
            self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def abort(self) -> None:
        """Closes at once."""
        if self._transport is not None and not self._is_over:
            self._transport.abort()

    def end(self, data: bytes) -> None:
        """Writes the last bytes, at least one, and drops what is written from here on."""
        if not self._is_over:
            self._is_over = True
            self._send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if self._is_chunked else data)

    def _send(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
        elif self._transport is None or self._transport.is_closing():
            # uvloop raises on a closed transport, and the client's end is heard of elsewhere.
            self.is_lost = True
        else:
            self._transport.write(data)


class WrittenResponse(web.StreamResponse):
    """Tells aiohttp of an answer that ``HttpStream`` has written.

    Args:
        keeps_connection: Whether the connection stays open behind it.
    """

    def __init__(self, *, keeps_connection: bool) -> None:
        super().__init__()
        self._keeps_connection = keeps_connection

    @property
    def prepared(self) -> bool:
        """Its head is out."""
        return True

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection stays open behind it."""
        return self._keeps_connection

    async def prepare(self, request: web.BaseRequest) -> None:
        """Writes nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Writes nothing."""


class HttpGeneration:
    """Admits what an HTTP request asks for and writes the answer, each choice of which is a request of its own.

    Args:
        plane: The data plane.
        text: The model's text side.
        slow_readers: Where paused streams register.
        interval_tokens: Tokens per event after the first.
        comment_interval_s: Between two comments of an answer that is held.

    Attributes:
        is_closing: Whether answers say that the connection closes behind them.
    """

    def __init__(
        self,
        plane: DataPlane,
        text: ModelText,
        slow_readers: SlowReaders,
        interval_tokens: int,
        comment_interval_s: float,
    ) -> None:
        self._plane = plane
        self._text = text
        self._slow_readers = slow_readers
        self._interval_tokens = interval_tokens
        self._comment_interval_s = comment_interval_s
        self.is_closing = False

    async def answer(
        self,
        request: web.BaseRequest,
        body: CompletionBody | ChatBody,
        prepared: Sequence[PreparedRequest],
        headers: dict[str, str],
    ) -> web.StreamResponse:
        """Answers a request.

        Args:
            request: The HTTP request.
            body: Its body.
            prepared: What the data plane shall do, a request for each choice.
            headers: Of the answer.

        Raises:
            RouterError: A choice failed before the first byte.
        """
        formats = self.make_formats(body, prepared)
        progress = AnswerProgress(len(prepared), body.n or 1)
        if body.stream:
            return await self._stream(request, prepared, formats, progress, headers)
        return await self._answer_whole(request, prepared, formats, progress, headers)

    def make_formats(
        self, body: CompletionBody | ChatBody, prepared: Sequence[PreparedRequest]
    ) -> list[openai_responses.AnswerFormat]:
        """Makes the forms of an answer's choices."""
        is_chat = isinstance(body, ChatBody)
        make = openai_responses.ChatFormat if is_chat else openai_responses.CompletionFormat
        answer_id = openai_responses.ID_PREFIXES[is_chat] + prepared[0].request.request_id
        created_s = int(time.time())
        return [
            make(
                answer_id=answer_id,
                index=index,
                created_s=created_s,
                model=self._plane.model.name,
                settings=choice.output,
                text=self._text,
                includes_usage=body.includes_usage,
                prompt_token_ids=list(choice.request.prompt_token_ids) if body.return_token_ids else None,
            )
            for index, choice in enumerate(prepared)
        ]

    async def _answer_whole(
        self,
        request: web.BaseRequest,
        prepared: Sequence[PreparedRequest],
        formats: Sequence[openai_responses.AnswerFormat],
        progress: AnswerProgress,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        whole = WholeAnswer(progress, formats[0], len(prepared))
        choices = enumerate(zip(prepared, formats, strict=True))
        response_streams = [
            WholeResponseStream(Output(self._text, choice.output), answer, whole, index)
            for index, (choice, answer) in choices
        ]
        try:
            await self._admit(prepared, response_streams)
            connection_of(request).watch(lambda: self._cancel(prepared))
            body = await whole.wait()
        finally:
            if not progress.is_over:
                self._cancel(prepared)
        return web.json_response(body, headers=headers)

    async def _stream(
        self,
        request: web.BaseRequest,
        prepared: Sequence[PreparedRequest],
        formats: Sequence[openai_responses.AnswerFormat],
        progress: AnswerProgress,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        response_streams = [
            SseResponseStream(
                Output(self._text, choice.output),
                answer,
                progress,
                index,
                slow_readers=self._slow_readers,
                interval_tokens=self._interval_tokens,
                cancel=lambda: self._cancel(prepared, "slow_reader"),
            )
            for index, (choice, answer) in enumerate(zip(prepared, formats, strict=True))
        ]

        def leave() -> None:
            for response_stream in response_streams:
                response_stream.on_lost()
            self._cancel(prepared)

        try:
            await self._admit(prepared, response_streams)
        except BaseException:
            leave()
            raise
        return await self.write_stream(request, response_streams, progress, headers, leave)

    async def write_stream(
        self,
        request: web.BaseRequest,
        response_streams: Sequence[SseResponseStream],
        progress: AnswerProgress,
        headers: dict[str, str],
        leave: Callable[[], None],
    ) -> web.StreamResponse:
        """Writes a streamed answer, whose choices the data plane has, until it is over.

        Args:
            request: The HTTP request.
            response_streams: Of the answer's choices.
            progress: Of the answer.
            headers: Of the answer.
            leave: Called when the client is gone before the answer is over.

        Raises:
            RouterError: A choice failed before the first byte.
            ConnectionResetError: The client has gone.
        """
        connection = connection_of(request)
        try:
            connection.watch(leave)
            stream = None
            if self._plane.is_holding:
                stream = await self._comment(request, progress, headers)
            if stream is None:
                await progress.wait_first()
                stream = self._open(request, headers)
            connection.attach(response_streams, stream)
            for response_stream in response_streams:
                response_stream.open(stream, self._plane.now())
            stream.release()
            await progress.wait_over()
            if stream.is_lost:
                raise ConnectionResetError("the client has gone")
        finally:
            if not progress.is_over:
                leave()
        return WrittenResponse(keeps_connection=stream.keeps_connection)

    async def _comment(
        self, request: web.BaseRequest, progress: AnswerProgress, headers: dict[str, str]
    ) -> HttpStream | None:
        """Begins the answer with comments while a request is held, so that neither client nor proxy gives up.

        Returns:
            The stream, once there is something to send; None: nothing has been written by then.
        """
        stream: HttpStream | None = None
        while not await progress.wait_news(self._comment_interval_s):
            if stream is None:
                stream = self._open(request, headers)
                stream.release()
            stream.write(openai_responses.HELD_COMMENT)
        return stream

    async def _admit(self, prepared: Sequence[PreparedRequest], response_streams: Sequence[ResponseStream]) -> None:
        """Admits all choices; the caller cancels those that were when another is refused."""
        for index, (choice, response_stream) in enumerate(zip(prepared, response_streams, strict=True)):
            if index:
                # Tokens of other requests go out between two of them.
                await asyncio.sleep(0)
            self._plane.admit(choice.request, response_stream)

    def _cancel(self, prepared: Sequence[PreparedRequest], reason: str = "client_gone") -> None:
        for choice in prepared:
            self._plane.cancel(choice.request.request_id, reason)

    def _keeps_connection(self, request: web.BaseRequest) -> bool:
        # HTTP/1.0 has no other end of a body whose length is not known, whatever the client says of keep-alive.
        return request.keep_alive and not self.is_closing and request.version >= HttpVersion11

    def _open(self, request: web.BaseRequest, headers: dict[str, str]) -> HttpStream:
        """Begins a stream with the answer's head."""
        version, keeps_connection = request.version, self._keeps_connection(request)
        is_chunked = version >= HttpVersion11
        lines = [f"HTTP/{version.major}.{version.minor} 200 OK", *FIXED_LINES, f"Date: {rfc822_formatted_time()}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if is_chunked:
            lines.append("Transfer-Encoding: chunked")
            if not keeps_connection:
                lines.append("Connection: close")
        stream = HttpStream(connection_of(request), is_chunked=is_chunked)
        stream.keeps_connection = keeps_connection
        stream.hold("\r\n".join([*lines, "", ""]).encode())
        return stream
