"""Streams over HTTP that clients may go on with: how one begins, and how a client comes back to it.

A client asks for one with ``x-sluice-resumable: true``. Its answer carries a capability (``x-sluice-resume``) and the
request's id (``x-request-id``). With both, and the id of the last event that it has (``Last-Event-ID``), the client
goes on at any router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from sluice.v1 import resume_pb2
from sluice_core.records import RequestId
from sluice_router.api import openai_responses
from sluice_router.api.choices import PreparedRequest
from sluice_router.api.departed_clients import leave
from sluice_router.api.http.answer_progress import AnswerProgress
from sluice_router.api.http.http_generation import HttpGeneration
from sluice_router.api.http.response_streams import ResumableStream
from sluice_router.api.objectives import CAPABILITY_HEADER, RESUMABLE_HEADER
from sluice_router.api.openai_requests import ChatBody, CompletionBody, FieldError, quote
from sluice_router.api.resumption.answer_states import AnswerIdentity, make_resumable, read_state, restore_request
from sluice_router.api.resumption.claimed_answers import claim_answer, prepare_found, replay
from sluice_router.api.resumption.stream_positions import LAST_EVENT_ID_HEADER, NumberedFormat, read_position
from sluice_router.api.slow_readers import SlowReaders
from sluice_router.scheduling.requests import DataPlane
from sluice_router.text.output import Output
from sluice_router.text.tokenizer import ModelText

FORMS = {False: resume_pb2.ANSWER_FORM_COMPLETION, True: resume_pb2.ANSWER_FORM_CHAT}


def asks_for_resumable(headers: Mapping[str, str]) -> bool:
    """Whether a client wants a stream that it may go on with.

    Raises:
        FieldError: The header says neither true nor false.
    """
    value = headers.get(RESUMABLE_HEADER)
    if value is None:
        return False
    given = value.strip().lower()
    if given not in {"true", "false"}:
        raise FieldError(RESUMABLE_HEADER, f"{RESUMABLE_HEADER}: true or false, not {quote(value)}")
    return given == "true"


@dataclass(slots=True)
class OngoingAnswer:
    """A stream that its client may come back to.

    Args:
        plane: The data plane.
        request_id: The router's id of it.
        response_stream: Writes it.
        progress: How far it is.
        can_come_back: Whether the client has what it needs for that; it has from the stream's head on.
    """

    plane: DataPlane
    request_id: RequestId
    response_stream: ResumableStream
    progress: AnswerProgress
    can_come_back: bool = False

    def leave(self, reason: str = "client_gone") -> None:
        """Lets the request go on where its client can come back; else ends it."""
        self.response_stream.on_lost()
        if self.progress.is_over:
            # Another connection may go on with it.
            return
        can_come_back = self.can_come_back or self.response_stream.is_open
        leave(self.plane, self.request_id, self.response_stream if can_come_back else None, reason=reason)


class ResumableAnswers:
    """Begins and resumes streams.

    Args:
        plane: The data plane.
        text: The model's text side.
        answers: Writes them.
        slow_readers: Where paused streams register.
        interval_tokens: Tokens per event after the first.
    """

    def __init__(
        self,
        plane: DataPlane,
        text: ModelText,
        answers: HttpGeneration,
        slow_readers: SlowReaders,
        interval_tokens: int,
    ) -> None:
        self._plane = plane
        self._text = text
        self._answers = answers
        self._slow_readers = slow_readers
        self._interval_tokens = interval_tokens

    async def begin(
        self,
        request: web.BaseRequest,
        body: CompletionBody | ChatBody,
        prepared: Sequence[PreparedRequest],
        headers: dict[str, str],
        shown_id: str,
    ) -> web.StreamResponse:
        """Answers a request with a stream that its client may go on with.

        Args:
            request: The HTTP request.
            body: Its body.
            prepared: What the data plane shall do.
            headers: Of the answer.
            shown_id: The request's id as its client knows it.

        Raises:
            FieldError: The answer does not stream, or has several choices.
            RouterError: The request failed before the first byte.
        """
        if not body.stream:
            raise FieldError(RESUMABLE_HEADER, f"{RESUMABLE_HEADER}: only streams can be resumed; stream is not true")
        if len(prepared) > 1:
            message = f"{RESUMABLE_HEADER}: only one choice can be resumed, not {len(prepared)}"
            raise FieldError(RESUMABLE_HEADER, message)
        [answer] = self._answers.make_formats(body, prepared)
        identity = AnswerIdentity(
            form=FORMS[isinstance(body, ChatBody)],
            answer_id=answer.answer_id,
            created_s=answer.created_s,
            model=self._plane.model.name,
            includes_usage=body.includes_usage,
        )
        choice, capability = make_resumable(prepared[0], identity, shown_id)
        output = Output(self._text, choice.output)

        marked = {**headers, CAPABILITY_HEADER: capability}
        ongoing = self._open(choice, output, NumberedFormat(answer, output))
        return await self._write(request, marked, ongoing, lambda to: self._plane.admit(choice.request, to))

    async def resume(
        self, request: web.BaseRequest, *, is_chat: bool, owner: str, headers: dict[str, str], shown_id: str
    ) -> web.StreamResponse:
        """Goes on with a stream behind the last event that its client has.

        Args:
            request: The HTTP request.
            is_chat: Whether it came to the chats' endpoint.
            owner: Of its API key.
            headers: Of the answer.
            shown_id: The request's id as its client knows it.

        Raises:
            FieldError: A header is wrong, or the endpoint is another one than the stream's.
            RouterError: The stream is not known, or cannot go on.
        """
        position = read_position(request.headers.get(LAST_EVENT_ID_HEADER, ""))
        capability = request.headers[CAPABILITY_HEADER]
        found = await claim_answer(self._plane, capability, shown_id, owner, CAPABILITY_HEADER)
        state = read_state(found, FORMS[is_chat])
        found = prepare_found(found, position.num_tokens)
        choice = restore_request(found, state, self._plane.now())
        make = openai_responses.ChatFormat if is_chat else openai_responses.CompletionFormat
        answer = make(
            answer_id=state.answer_id,
            index=0,
            created_s=state.created_s,
            model=state.model,
            settings=choice.output,
            text=self._text,
            includes_usage=state.includes_usage,
            prompt_token_ids=list(choice.request.prompt_token_ids) if state.returns_token_ids else None,
        )
        output = Output(self._text, choice.output)
        stop_at = replay(output, found, position.num_tokens, lambda: answer.chunk(output.take()))

        def adopt(response_stream: ResumableStream) -> None:
            self._plane.adopt(found, choice.request, response_stream, stop_at)
            if len(found.output_token_ids) > position.num_tokens:
                response_stream.flush(self._plane.now())

        marked = {**headers, CAPABILITY_HEADER: capability}
        ongoing = self._open(choice, output, NumberedFormat(answer, output, position))
        ongoing.can_come_back = True
        return await self._write(request, marked, ongoing, adopt)

    def _open(self, choice: PreparedRequest, output: Output, answer: NumberedFormat) -> OngoingAnswer:
        progress = AnswerProgress(1, 1)
        response_stream = ResumableStream(
            output,
            answer,
            progress,
            0,
            slow_readers=self._slow_readers,
            interval_tokens=self._interval_tokens,
            cancel=lambda: ongoing.leave("slow_reader"),
        )
        ongoing = OngoingAnswer(self._plane, choice.request.request_id, response_stream, progress)
        return ongoing

    async def _write(
        self,
        request: web.BaseRequest,
        headers: dict[str, str],
        ongoing: OngoingAnswer,
        begin: Callable[[ResumableStream], None],
    ) -> web.StreamResponse:
        # What this raises is refused before the connection is watched.
        begin(ongoing.response_stream)
        return await self._answers.write_stream(
            request, [ongoing.response_stream], ongoing.progress, headers, ongoing.leave
        )
