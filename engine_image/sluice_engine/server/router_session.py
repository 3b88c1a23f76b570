"""One router's session: its requests here, the pending of the message under way, and its stream.

A session outlives its streams: when one is lost, its requests go on for a lease, are listed in the hello of the next
stream of the same router, and are resumed there from the token that the router names; those that are not end with the
lease. What a router has received is not known here, so that a request's tokens are kept as long as it is. All methods are synchronous; only ``AttachStream.write`` waits, and it is
the one writer of its stream, because two writes at once kill a grpc.aio stream.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine.server import wire_conversion

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sluice_engine import core_messages

# Messages that may wait for a router that does not read; its stream is cut beyond that.
MAX_WAITING_MESSAGES = 4096


class MessageWriter(Protocol):
    """The part of grpc.aio's context that a stream uses."""

    async def write(self, message: wire.AttachResponse) -> None:
        """Sends one message, and returns when the next may be sent."""


@dataclass(slots=True, eq=False)
class RouterRequest:
    """A request of a session in the EngineCore.

    Args:
        session: The session.
        core_id: Its id in the EngineCore, unique within the epoch.
        request_id: The router's id of it.
        fence: Fencing number of its Submit.
        slot: Its slot on the stream; None while it is held for the next stream.
        first_index: Index in the whole output of the first token made here.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        held_since_s: When its stream was lost; None while it has one.
        token_ids: Output tokens made here.
        logprobs: One for each of them; empty when the request asked for none.
        ended: How it ended while it was held; None while it runs.
    """

    session: RouterSession
    core_id: str
    request_id: str
    fence: int
    slot: int | None
    first_index: int
    num_cached_tokens: int = 0
    held_since_s: float | None = None
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    ended: wire.Finished | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, over all engines."""
        return self.first_index + len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class KvSource:
    """Where the KV of this engine's requests lies; goes into every KV handle.

    Args:
        engine_id: This engine.
        epoch: Its epoch.
        fingerprint: Its fingerprint.
    """

    engine_id: str
    epoch: int
    fingerprint: str


class AttachStream:
    """One Attach stream: messages wait here for its one writer."""

    def __init__(self) -> None:
        self._waiting: deque[wire.AttachResponse] = deque()
        self._has_news = asyncio.Event()
        self._is_written = asyncio.Event()
        self._is_closed = False

    def send(self, message: wire.AttachResponse) -> None:
        """Hands a message to the writer; a router that does not read loses its stream."""
        if self._is_closed:
            return
        if len(self._waiting) >= MAX_WAITING_MESSAGES:
            self.close()
            return
        self._waiting.append(message)
        self._has_news.set()

    def close(self) -> None:
        """Lets the writer end after what waits."""
        self._is_closed = True
        self._has_news.set()

    async def write(self, writer: MessageWriter) -> None:
        """Sends messages until the stream is closed and empty."""
        try:
            while True:
                while self._waiting:
                    await writer.write(self._waiting.popleft())
                if self._is_closed:
                    return
                self._has_news.clear()
                await self._has_news.wait()
        finally:
            self._is_closed = True
            self._is_written.set()

    async def wait_written(self) -> None:
        """Waits until everything is sent, or can no longer be."""
        await self._is_written.wait()


@dataclass(slots=True)
class PendingResponse:
    """The message under way: what one iteration has for one router."""

    slots: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    output_indexes: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    finished: list[wire.Finished] = field(default_factory=list)
    proposals: list[wire.Proposal] = field(default_factory=list)
    refused: list[wire.HandOffRefused] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Nothing happened for this router."""
        return not (self.slots or self.finished or self.proposals or self.refused)


class RouterSession:
    """One router, as this engine sees it.

    Args:
        router_id: The router.
        kv_source: Where the KV of this engine lies.
    """

    def __init__(self, router_id: str, kv_source: KvSource) -> None:
        self.router_id = router_id
        # Number of the present stream within this engine; grant keys and submit numbers belong to it.
        self.number = 0
        self._kv_source = kv_source
        self.stream: AttachStream | None = None
        self.lost_at_s: float | None = None
        self.last_sent_s = 0.0
        self.by_slot: dict[int, RouterRequest] = {}
        self.held: dict[str, RouterRequest] = {}
        # Core ids of handed-off requests whose KV waits here, by slot.
        self.handed_off: dict[int, str] = {}
        # The last submit that load reports include, the last one the EngineCore got, and the last one that came.
        self.last_submit_number = 0
        self.sent_submit_number = 0
        self.received_submit_number = 0
        # Submits that the EngineCore has got and not reported yet: number, tokens to prefill.
        self.unreported: deque[tuple[int, int]] = deque()
        self._pending = PendingResponse()

    # --- streams -------------------------------------------------------------------------------------------------

    def attach(self, stream: AttachStream, number: int, now_s: float) -> list[wire.HeldRequest]:
        """Puts a new stream in place; what runs is held until the router says what becomes of it."""
        self.detach(now_s)
        self.stream, self.number, self.lost_at_s = stream, number, None
        self.last_submit_number = self.sent_submit_number = self.received_submit_number = 0
        return [
            wire.HeldRequest(
                request_id=request.request_id, fence=request.fence, num_output_tokens=request.num_output_tokens
            )
            for request in self.held.values()
        ]

    def detach(self, now_s: float) -> None:
        """The stream is lost: its requests are held, its slots mean nothing any more."""
        if self.stream is not None:
            self.stream.close()
        self.stream, self.lost_at_s = None, now_s
        for request in self.by_slot.values():
            request.slot, request.held_since_s = None, now_s
            self.held[request.core_id] = request
        self.by_slot.clear()
        self.handed_off.clear()
        self.unreported.clear()
        self._pending = PendingResponse()

    def resume(self, resume: wire.Resume) -> bool:
        """Gives a held request its slot on the new stream, and sends what the router has not got of it.

        Returns:
            False when it is not held, or not with that fence, or begins after the token that is asked for.
        """
        request = next(
            (
                request
                for request in self.held.values()
                if (request.request_id, request.fence) == (resume.request_id, resume.fence)
            ),
            None,
        )
        if request is None or not request.first_index <= resume.next_output_index <= request.num_output_tokens:
            return False
        del self.held[request.core_id]
        self.by_slot[resume.slot] = request
        request.slot, request.held_since_s = resume.slot, None
        start = resume.next_output_index - request.first_index
        pending = self._pending
        for offset, logprobs in enumerate(request.logprobs[start:]):
            logprobs.column = len(pending.slots) + offset
            pending.logprobs.append(logprobs)
        self._add_columns(resume.slot, request.token_ids[start:], resume.next_output_index)
        if request.ended is not None:
            request.ended.slot = resume.slot
            pending.finished.append(request.ended)
            self.drop(request)
        return True

    def take_held(self, request_id: str) -> list[RouterRequest]:
        """Takes the held requests of one id out of the session."""
        return self._take_out([request for request in self.held.values() if request.request_id == request_id])

    def take_expired(self, held_until_s: float) -> list[RouterRequest]:
        """Takes the requests that are held since then or before out of the session, whether it has a new stream or not."""
        since = ((request, request.held_since_s) for request in self.held.values())
        return self._take_out([request for request, held_s in since if held_s is None or held_s <= held_until_s])

    def _take_out(self, requests: list[RouterRequest]) -> list[RouterRequest]:
        for request in requests:
            del self.held[request.core_id]
        return requests

    # --- requests ------------------------------------------------------------------------------------------------

    def open(self, core_id: str, submit: wire.Submit) -> RouterRequest:
        """Enters an accepted submit."""
        request = RouterRequest(
            self, core_id, submit.request_id, submit.fence, submit.slot, len(submit.output_token_ids)
        )
        self.by_slot[submit.slot] = request
        self.sent_submit_number = submit.submit_number
        if not submit.HasField("kv"):
            num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
            self.unreported.append((submit.submit_number, num_tokens))
        return request

    def drop(self, request: RouterRequest) -> None:
        """Forgets a request."""
        if request.slot is None:
            self.held.pop(request.core_id, None)
        else:
            self.by_slot.pop(request.slot, None)

    def report_submits(self, number: int | None) -> None:
        """Notes which submit the load includes.

        A refused submit never reaches the EngineCore: it counts as included with the last one that did.
        """
        if number is not None:
            self.last_submit_number = max(self.last_submit_number, number)
            while self.unreported and self.unreported[0][0] <= number:
                self.unreported.popleft()
        if self.last_submit_number >= self.sent_submit_number:
            self.last_submit_number = max(self.last_submit_number, self.received_submit_number)

    # --- the message under way -----------------------------------------------------------------------------------

    def add_tokens(self, request: RouterRequest, token_ids: list[int], logprobs: Any) -> None:
        """Adds an iteration's tokens of one request (vLLM's ``LogprobsLists`` only if it asked for logprobs)."""
        index = request.num_output_tokens
        request.token_ids.extend(token_ids)
        pending = self._pending
        if logprobs is not None:
            rows = list(wire_conversion.token_logprobs(logprobs, len(pending.slots)))
            request.logprobs += rows
            if request.slot is not None:
                pending.logprobs += rows
        if request.slot is not None:
            self._add_columns(request.slot, token_ids, index)

    def _add_columns(self, slot: int, token_ids: Iterable[int], index: int) -> None:
        """Adds tokens of a slot, the first of which has this index in the whole output."""
        pending = self._pending
        for token_id in token_ids:
            pending.slots.append(slot)
            pending.token_ids.append(token_id)
            pending.output_indexes.append(index)
            index += 1

    def add_finished(
        self,
        request: RouterRequest,
        reason: sampling_pb2.FinishReason.ValueType,
        *,
        stop_token_id: int | None = None,
        handed_off: core_messages.HandedOffKv | None = None,
        error: str = "",
    ) -> None:
        """Ends a request's slot; a held request's end waits for the next stream, unless it was handed off to nobody."""
        finished = wire.Finished(
            reason=reason,
            stop_token_id=stop_token_id,
            error=error,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
        )
        if request.slot is None:
            request.ended = finished
            if handed_off is not None:
                self.drop(request)
            return
        finished.slot = request.slot
        if handed_off is not None:
            self.handed_off[request.slot] = request.core_id
            finished.kv.engine_id = self._kv_source.engine_id
            finished.kv.epoch = self._kv_source.epoch
            finished.kv.fingerprint = self._kv_source.fingerprint
            finished.kv.num_tokens = handed_off.num_tokens
            finished.kv.transfer_params_json = handed_off.transfer_params
        self._pending.finished.append(finished)
        self.drop(request)

    def add_refusal(self, slot: int, error: str) -> None:
        """Ends the slot of a submit that cannot run."""
        self._pending.finished.append(wire.Finished(slot=slot, reason=sampling_pb2.FINISH_REASON_REFUSED, error=error))

    def add_not_held(self, slot: int) -> None:
        """Ends the slot of a request that cannot be resumed."""
        self._pending.finished.append(wire.Finished(slot=slot, reason=sampling_pb2.FINISH_REASON_ABORTED))

    def add_proposal(self, request: RouterRequest, proposal: core_messages.ProposedMove) -> None:
        """Proposes a move."""
        if request.slot is not None:
            self._pending.proposals.append(wire_conversion.proposal_message(request.slot, proposal))

    def add_hand_off_refused(self, slot: int, reason: str) -> None:
        """Refuses a hand-off."""
        self._pending.refused.append(wire.HandOffRefused(slot=slot, reason=reason))

    def has_news(self) -> bool:
        """The message under way has something to say."""
        return not self._pending.is_empty()

    def flush(self, load: wire.LoadReport | None, now_s: float) -> int:
        """Sends the message under way.

        Returns:
            Tokens that it carries.
        """
        pending, self._pending = self._pending, PendingResponse()
        if self.stream is None:
            return 0
        if load is not None:
            load.last_submit_number = self.last_submit_number
        self.stream.send(
            wire.AttachResponse(
                slots=pending.slots,
                token_ids=pending.token_ids,
                output_indexes=pending.output_indexes,
                logprobs=pending.logprobs,
                finished=pending.finished,
                proposals=pending.proposals,
                hand_offs_refused=pending.refused,
                load=load,
            )
        )
        self.last_sent_s = now_s
        return len(pending.slots)

    def send(self, message: wire.AttachResponse) -> None:
        """Sends a message of its own, beside the iterations' ones."""
        if self.stream is not None:
            self.stream.send(message)


def count_requests(sessions: Iterable[RouterSession]) -> int:
    """Requests of all sessions that have not ended."""
    return sum(len(session.by_slot) + sum(held.ended is None for held in session.held.values()) for session in sessions)
