"""One router as the engine sees it: its stream, its requests here, and the message under way to it.

A session outlives its streams. When a stream is lost, its requests run on for a lease, and the hello of the router's
next stream lists them. The router resumes them from the token that it needs, so that a request's tokens are kept until
it ends.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine.server import wire_conversion
from sluice_engine.server.pending_prefixes import PendingPrefixes
from sluice_engine.server.pending_response import PendingResponse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sluice_engine import core_messages
    from sluice_engine.kv_transfer.kv_handles import KvSource
    from sluice_engine.server.attach_stream import AttachStream


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
        ended: How it ended while it was held, or where it is kept for another router; None while it runs.
        submit: How it came, where its client may resume it at another router; None: it may not.
        submitted_s: When that was.
        is_first_part: It computes the first part of a prompt, and no token.
        brings_kv: Its KV comes from another engine; parts that come ahead are found in the prefix cache.
        is_claimed: It is held for a router that has asked for it, and has not resumed it.
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
    submit: wire.Submit | None = None
    submitted_s: float = 0.0
    is_first_part: bool = False
    brings_kv: bool = False
    is_claimed: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, over all engines."""
        return self.first_index + len(self.token_ids)


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
        # Whether the router has said so; a later stream of it does not take that back.
        self.is_leaving = False
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
        # Until the first stream there is nobody to tell.
        self.prefixes = PendingPrefixes(())

    # --- streams -------------------------------------------------------------------------------------------------

    def attach(
        self, stream: AttachStream, number: int, now_s: float, cached_blocks: Iterable[int] = ()
    ) -> list[wire.HeldRequest]:
        """Puts a new stream in place; what runs is held until the router says what becomes of it.

        What the router has claimed and not resumed is left out: it does not know that by its id, and would end it.
        """
        self.detach(now_s)
        self.prefixes = PendingPrefixes(cached_blocks)
        self.stream, self.number, self.lost_at_s = stream, number, None
        self.last_submit_number = self.sent_submit_number = self.received_submit_number = 0
        return [
            wire.HeldRequest(
                request_id=request.request_id, fence=request.fence, num_output_tokens=request.num_output_tokens
            )
            for request in self.held.values()
            if not request.is_claimed
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
        request.slot, request.held_since_s, request.is_claimed = resume.slot, None, False
        start = resume.next_output_index - request.first_index
        pending = self._pending
        for offset, logprobs in enumerate(request.logprobs[start:]):
            logprobs.column = len(pending.slots) + offset
            pending.logprobs.append(logprobs)
        self._pending.add_tokens(resume.slot, request.token_ids[start:], resume.next_output_index)
        if request.ended is not None:
            request.ended.slot = resume.slot
            pending.finished.append(request.ended)
            self.drop(request)
        return True

    def take_held(self, request_id: str) -> list[RouterRequest]:
        """Takes the held requests of one id out of the session."""
        return self._take_out([request for request in self.held.values() if request.request_id == request_id])

    def take_expired(self, held_until_s: float, resumable_until_s: float) -> list[RouterRequest]:
        """Takes requests out of the session that have been held since then or longer, new stream or not.

        Args:
            held_until_s: For requests that their own router alone can resume.
            resumable_until_s: For those that any router can.
        """
        expired = []
        for request in self.held.values():
            until_s = held_until_s if request.submit is None else min(held_until_s, resumable_until_s)
            if request.held_since_s is None or request.held_since_s <= until_s:
                expired.append(request)
        return self._take_out(expired)

    def let_go(self, request: RouterRequest) -> None:
        """Another router goes on with a request: its slot here ends."""
        if request.slot is not None:
            reason = sampling_pb2.FINISH_REASON_CLAIMED
            self._pending.finished.append(wire.Finished(slot=request.slot, reason=reason))
        self.drop(request)

    def hold(self, request: RouterRequest, now_s: float) -> None:
        """Holds a request that another router has let go."""
        request.session, request.slot, request.held_since_s = self, None, now_s
        request.is_claimed = True
        self.held[request.core_id] = request

    def _take_out(self, requests: list[RouterRequest]) -> list[RouterRequest]:
        for request in requests:
            del self.held[request.core_id]
        return requests

    # --- grants ----------------------------------------------------------------------------------------------------

    def make_grant_key(self, grant_id: int) -> str:
        """Key of a grant or an offer in the EngineCore: their ids are unique on a stream only."""
        return f"{self.number}.{grant_id}"

    def read_grant_key(self, key: str) -> int:
        """Reverse of ``make_grant_key``."""
        return int(key.partition(".")[2])

    # --- requests ------------------------------------------------------------------------------------------------

    def open(self, core_id: str, submit: wire.Submit) -> RouterRequest:
        """Enters an accepted submit."""
        request = RouterRequest(
            self,
            core_id,
            submit.request_id,
            submit.fence,
            submit.slot,
            len(submit.output_token_ids),
            is_first_part=submit.split_prompt_tokens > 0,
            brings_kv=submit.HasField("kv"),
        )
        self.by_slot[submit.slot] = request
        self.sent_submit_number = submit.submit_number
        num_tokens = submit.split_prompt_tokens or len(submit.prompt_token_ids) + len(submit.output_token_ids)
        num_left = num_tokens - submit.kv.num_tokens
        # What moves while it decodes computes its next token only.
        if not submit.HasField("kv") or (submit.kv.num_tokens and num_left > 1):
            self.unreported.append((submit.submit_number, num_left))
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
            self._pending.add_tokens(request.slot, token_ids, index)

    def add_finished(
        self,
        request: RouterRequest,
        reason: sampling_pb2.FinishReason.ValueType,
        *,
        stop_token_id: int | None = None,
        handed_off: core_messages.HandedOffKv | None = None,
        error: str = "",
    ) -> wire.Finished:
        """Ends a request's slot; a held request's end waits for the next stream, unless it was handed off to nobody.

        Returns:
            The end.
        """
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
            return finished
        finished.slot = request.slot
        if handed_off is not None:
            self.handed_off[request.slot] = request.core_id
            self._kv_source.fill(finished.kv, handed_off.num_tokens, handed_off.transfer_params)
        self._pending.finished.append(finished)
        self.drop(request)
        return finished

    def add_claim_answer(self, answer: wire.ClaimAnswer) -> None:
        """Answers a claim."""
        self._pending.claim_answers.append(answer)

    def add_claimed(self, slot: int) -> None:
        """Ends the slot of a submit that another router's claim has overtaken."""
        self._pending.finished.append(wire.Finished(slot=slot, reason=sampling_pb2.FINISH_REASON_CLAIMED))

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

    def add_part_pulled(self, part: core_messages.PulledPart) -> None:
        """Says what came of a part pull."""
        self._pending.parts_pulled.append(
            wire.PartPulled(grant_id=self.read_grant_key(part.key), num_tokens=part.num_tokens, reason=part.reason)
        )

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
        self.stream.send(pending.make_message(load, self.prefixes.take()))
        self.last_sent_s = now_s
        return len(pending.slots)

    def send(self, message: wire.AttachResponse) -> None:
        """Sends a message of its own, beside the iterations' ones."""
        if self.stream is not None:
            self.stream.send(message)
