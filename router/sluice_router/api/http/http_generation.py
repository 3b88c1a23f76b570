"""What the inference endpoints answer over HTTP, whole or as server-sent events, until its end or the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web
from aiohttp.http import HttpVersion11

from sluice_router.api import departed_clients, openai_responses
from sluice_router.api.choices import PreparedRequest
from sluice_router.api.http.answer_progress import AnswerProgress, WholeAnswer
from sluice_router.api.http.held_comments import comment_until_news
from sluice_router.api.http.http_connection import WrittenResponse, connection_of
from sluice_router.api.http.http_stream import HttpStream, open_stream
from sluice_router.api.http.response_streams import SseResponseStream, WholeResponseStream
from sluice_router.api.openai_requests import ChatBody, CompletionBody
from sluice_router.api.slow_readers import SlowReaders
from sluice_router.scheduling.requests import DataPlane, ResponseStream
from sluice_router.text.output import Output
from sluice_router.text.tokenizer import ModelText


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
            RouterError, ConnectionResetError: A choice failed before the first byte; the client has gone.
        """
        connection = connection_of(request)
        stream: HttpStream | None = None

        def begin() -> None:
            nonlocal stream
            if stream is None:
                stream = self._open(request, headers)
            connection.attach(response_streams, stream)
            for response_stream in response_streams:
                response_stream.open(stream, self._plane.now())
            stream.release()

        try:
            connection.watch(leave)
            if self._plane.is_holding:
                open_held = partial(self._open, request, headers)
                stream = await comment_until_news(progress, open_held, self._comment_interval_s)
            if stream is None:
                progress.open_with(begin)
            else:
                begin()
            await progress.wait_over()
            if stream is None:
                progress.raise_error()
            if stream is None or stream.is_lost:
                raise ConnectionResetError("the client has gone")
        finally:
            if not progress.is_over:
                leave()
        return WrittenResponse(keeps_connection=stream.keeps_connection)

    async def _admit(self, prepared: Sequence[PreparedRequest], response_streams: Sequence[ResponseStream]) -> None:
        """Admits all choices; the caller cancels those that were when another is refused."""
        for index, (choice, response_stream) in enumerate(zip(prepared, response_streams, strict=True)):
            if index:
                # Tokens of other requests go out between two of them.
                await asyncio.sleep(0)
            self._plane.admit(choice.request, response_stream)

    def _cancel(self, prepared: Sequence[PreparedRequest], reason: str = "client_gone") -> None:
        for choice in prepared:
            departed_clients.leave(self._plane, choice.request.request_id, reason=reason)

    def _keeps_connection(self, request: web.BaseRequest) -> bool:
        # HTTP/1.0 has no other end of a body whose length is not known, whatever the client says of keep-alive.
        return request.keep_alive and not self.is_closing and request.version >= HttpVersion11

    def _open(self, request: web.BaseRequest, headers: dict[str, str]) -> HttpStream:
        return open_stream(request, headers, keeps_connection=self._keeps_connection(request))
