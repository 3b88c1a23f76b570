"""Answers of the inference endpoints over HTTP: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import HttpVersion11

from sluice_router.api import openai_responses
from sluice_router.api.http_connection import HttpStream, connection_of
from sluice_router.api.openai_requests import ChatBody
from sluice_router.api.response_streams import AnswerProgress, SseResponseStream, WholeAnswer, WholeResponseStream
from sluice_router.text.output import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_router.api.openai_requests import CompletionBody
    from sluice_router.api.request_preparation import PreparedRequest
    from sluice_router.api.slow_readers import SlowReaders
    from sluice_router.scheduling.requests import DataPlane, ResponseStream
    from sluice_router.text.tokenizer import ModelText

SERVER = "sluice"


class HttpAnswers:
    """Admits what an HTTP request asks for and writes the answer, each choice of which is a request of its own.

    Args:
        plane: The data plane.
        text: The model's text side.
        slow_readers: Where paused streams register.
        interval_tokens: Tokens per event after the first.

    Attributes:
        is_closing: Whether answers say that the connection closes behind them.
    """

    def __init__(self, plane: DataPlane, text: ModelText, slow_readers: SlowReaders, interval_tokens: int) -> None:
        self._plane = plane
        self._text = text
        self._slow_readers = slow_readers
        self._interval_tokens = interval_tokens
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
        formats = self._make_formats(body, prepared)
        progress = AnswerProgress(len(prepared), body.n or 1)
        if body.stream:
            return await self._stream(request, prepared, formats, progress, headers)
        return await self._answer_whole(request, prepared, formats, progress, headers)

    def _make_formats(
        self, body: CompletionBody | ChatBody, prepared: Sequence[PreparedRequest]
    ) -> list[openai_responses.AnswerFormat]:
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
        connection = connection_of(request)
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
            connection.watch(leave)
            await progress.wait_first()
            response = await self._open(request, headers)
            stream = HttpStream(connection, is_chunked="Transfer-Encoding" in response.headers)
            connection.attach(response_streams, stream)
            for response_stream in response_streams:
                response_stream.open(stream, self._plane.now())
            await progress.wait_over()
            await response.write_eof()
        finally:
            if not progress.is_over:
                leave()
        return response

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

    async def _open(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": openai_responses.CONTENT_TYPE,
                "Cache-Control": "no-cache",
                "Server": SERVER,
                **headers,
            }
        )
        if request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        if self.is_closing or request.version < HttpVersion11:
            # HTTP/1.0 has no other end of a body whose length is not known, whatever the client says of keep-alive.
            response.force_close()
        await response.prepare(request)
        return response
