"""An emulated engine: what a router sees of an engine's scheduler, on a fixed grid of steps instead of a GPU.

A step gives one token to each running decode, and the rest of the chunk size to prefills, first come first served. A
prefill that completes gives its first token in the same step. Token i of the request with seed r is piece r + i of the
vocabulary on every engine, so moves and recoveries keep the text. The engine proposes no moves: the router begins those
that the plan requires. Methods are synchronous and take the time as an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stamps import Stamps

FINGERPRINT = "benchmark-stub"
GRANT_TTL_S = 2.0
LOAD_REPORT_S = 0.05
IDLE_REPORT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The limits that an engine reports, and its pace.

    Args:
        step_s: Time between two steps.
        chunk_size_tokens: Tokens per step until a plan sets another number.
        max_batch_tokens: Largest chunk size.
        max_num_seqs: Most running requests.
        max_model_len_tokens: Longest prompt + output.
        block_size_tokens: Tokens per KV block.
        kv_blocks: KV blocks in all.
    """

    step_s: float = 1 / 30
    chunk_size_tokens: int = 2048
    max_batch_tokens: int = 8192
    max_num_seqs: int = 4096
    max_model_len_tokens: int = 4096
    block_size_tokens: int = 16
    kv_blocks: int = 1_000_000


@dataclass(slots=True, eq=False)
class StubRequest:
    """A running or waiting request. Mutable.

    Args:
        link: Stream of its router.
        slot: Its slot on the link.
        fence: Fencing number.
        number: The load generator's number of the request, which is its seed.
        prefill_tokens: Prefill tokens left.
        context_tokens: Computed tokens.
        num_output_tokens: Output tokens so far, over all engines.
        max_tokens: Length of the output.
    """

    link: StubLink
    slot: int
    fence: int
    number: int
    prefill_tokens: int
    context_tokens: int
    num_output_tokens: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class StubLink:
    """One router's stream. Mutable.

    Args:
        send: Passes a message to the stream's writer.
    """

    send: Callable[[wire.AttachResponse], None]
    by_slot: dict[int, StubRequest] = field(default_factory=dict)
    pinned_blocks: dict[int, int] = field(default_factory=dict)
    last_submit_number: int = 0
    has_submits: bool = False
    last_sent_s: float = 0.0
    slots: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    output_indexes: list[int] = field(default_factory=list)
    finished: list[wire.Finished] = field(default_factory=list)


class EmulatedEngine:
    """One engine.

    Args:
        engine_id: Its id.
        shape: Its limits and pace.
        vocabulary: Token ids of the pieces.
        stamps: Table for the times of what it sends.
    """

    def __init__(self, engine_id: str, shape: EngineShape, vocabulary: Sequence[int], stamps: Stamps) -> None:
        self.engine_id = engine_id
        self.epoch = 1
        self.is_refusing_grants = False
        self.is_failing_submits = False
        self._shape = shape
        self._vocabulary = vocabulary
        self._stamps = stamps
        self._chunk_size_tokens = shape.chunk_size_tokens
        self._configured = wire.Configured(chunk_size_tokens=shape.chunk_size_tokens)
        self._is_draining = False
        self._links: list[StubLink] = []
        self._prefills: list[StubRequest] = []
        self._decodes: dict[StubRequest, None] = {}
        self._grants: dict[tuple[StubLink, int], tuple[int, float]] = {}
        self._num_steps = 0
        self._num_moved_in = 0
        self._num_moved_out = 0

    # --- links -------------------------------------------------------------------------------------------------------

    def attach(self, link: StubLink, now_s: float) -> None:
        """Adds a stream and sends hello."""
        self._links.append(link)
        shape = self._shape
        hello = wire.EngineHello(
            engine_id=self.engine_id,
            epoch=self.epoch,
            fingerprint=FINGERPRINT,
            max_batch_tokens=shape.max_batch_tokens,
            max_num_seqs=shape.max_num_seqs,
            max_model_len_tokens=shape.max_model_len_tokens,
            block_size_tokens=shape.block_size_tokens,
            kv_bytes_per_token=1,
            version="benchmark stub",
        )
        link.last_sent_s = now_s
        link.send(wire.AttachResponse(hello=hello, load=self._load(link), configured=self._configured))

    def detach(self, link: StubLink) -> None:
        """Removes a stream and its requests."""
        if link not in self._links:
            return
        self._links.remove(link)
        for request in list(link.by_slot.values()):
            self._drop(request)
        self._grants = {key: grant for key, grant in self._grants.items() if key[0] is not link}

    def restart(self) -> list[StubLink]:
        """Restarts empty, with a new epoch.

        Returns:
            The links that it had.
        """
        links = list(self._links)
        for link in links:
            self.detach(link)
        self.epoch += 1
        return links

    # --- commands ----------------------------------------------------------------------------------------------------

    def take(self, link: StubLink, message: wire.AttachRequest, now_s: float, now_ns: int) -> None:
        """Executes a router's commands."""
        if message.HasField("configure"):
            self._configure(link, message.configure)
        for submit in message.submits:
            self._submit(link, submit, now_ns)
        for abort in message.aborts:
            self._abort(link, abort.slot)
        for asked in message.grant_requests:
            self._grant(link, asked, now_s)
        for hand_off in message.hand_offs:
            self._hand_off(link, hand_off)
        for slot in message.released_slots:
            link.pinned_blocks.pop(slot, None)
        for grant_id in message.released_grant_ids:
            self._grants.pop((link, grant_id), None)

    def _configure(self, link: StubLink, configure: wire.Configure) -> None:
        if configure.generation >= self._configured.generation:
            self._chunk_size_tokens = configure.chunk_size_tokens
            self._is_draining = configure.is_draining
            self._configured = wire.Configured(
                cluster_uid=configure.cluster_uid,
                generation=configure.generation,
                role=configure.role,
                chunk_size_tokens=configure.chunk_size_tokens,
            )
        link.send(wire.AttachResponse(load=self._load(link), configured=self._configured))

    def _submit(self, link: StubLink, submit: wire.Submit, now_ns: int) -> None:
        link.last_submit_number = submit.submit_number
        link.has_submits = True
        if self.is_failing_submits:
            failed = wire.Finished(slot=submit.slot, reason=sampling_pb2.FINISH_REASON_ERROR, error="emulated failure")
            link.finished.append(failed)
            return
        num_output_tokens = len(submit.output_token_ids)
        num_tokens = len(submit.prompt_token_ids) + num_output_tokens
        is_moved_in = submit.HasField("kv")
        request = StubRequest(
            link=link,
            slot=submit.slot,
            fence=submit.fence,
            number=submit.sampling.seed,
            prefill_tokens=0 if is_moved_in else num_tokens,
            context_tokens=num_tokens if is_moved_in else 0,
            num_output_tokens=num_output_tokens,
            max_tokens=submit.sampling.max_tokens,
        )
        link.by_slot[submit.slot] = request
        self._grants.pop((link, submit.grant_id), None)
        if is_moved_in:
            self._num_moved_in += 1
            self._decodes[request] = None
        elif submit.is_recovery:
            self._prefills.insert(0, request)
        else:
            self._prefills.append(request)
        if num_output_tokens == 0:
            self._stamps.mark_read(request.number, now_ns)

    def _abort(self, link: StubLink, slot: int) -> None:
        request = link.by_slot.get(slot)
        if request is not None:
            self._finish(request, sampling_pb2.FINISH_REASON_ABORTED)

    def _grant(self, link: StubLink, asked: wire.GrantRequest, now_s: float) -> None:
        is_granted = not self.is_refusing_grants and not self._is_draining
        if is_granted:
            self._grants[link, asked.grant_id] = (self._blocks(asked.num_tokens), now_s + GRANT_TTL_S)
        reason = "" if is_granted else "draining" if self._is_draining else "kv"
        grant = wire.Grant(grant_id=asked.grant_id, is_granted=is_granted, reason=reason, ttl_s=GRANT_TTL_S)
        link.send(wire.AttachResponse(grants=[grant], load=self._load(link)))

    def _hand_off(self, link: StubLink, hand_off: wire.HandOff) -> None:
        request = link.by_slot.get(hand_off.slot)
        reason = "unknown" if request is None else "fence" if request.fence != hand_off.fence else ""
        if request is not None and request.prefill_tokens:
            reason = reason or "prefill"
        if reason or request is None:
            refused = wire.HandOffRefused(slot=hand_off.slot, reason=reason)
            link.send(wire.AttachResponse(hand_offs_refused=[refused], load=self._load(link)))
            return
        self._num_moved_out += 1
        link.pinned_blocks[hand_off.slot] = self._blocks(request.context_tokens)
        handle = wire.KvHandle(
            engine_id=self.engine_id,
            epoch=self.epoch,
            fingerprint=FINGERPRINT,
            num_tokens=max(0, request.context_tokens - 1),
            transfer_params_json="{}",
        )
        self._finish(request, sampling_pb2.FINISH_REASON_HANDED_OFF, handle)

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, now_s: float, now_ns: int) -> None:
        """Runs one step, and sends each router its messages."""
        for request in list(self._decodes):
            self._give_token(request, now_ns)
        prefill_tokens, num_chunks = self._prefill(now_ns)
        if self._decodes or num_chunks:
            self._num_steps += 1
        iteration = wire.Iteration(
            number=self._num_steps,
            prefill_tokens=prefill_tokens,
            num_chunks=num_chunks,
            num_decodes=len(self._decodes),
            decode_context_tokens=sum(request.context_tokens for request in self._decodes),
            duration_s=self._shape.step_s,
        )
        is_busy = bool(self._decodes or self._prefills)
        for link in self._links:
            self._flush(link, now_s, iteration if is_busy or num_chunks else None)

    def _prefill(self, now_ns: int) -> tuple[int, int]:
        """Spends what decodes leave of the chunk size; returns the numbers of tokens and of chunks."""
        room = max(0, self._chunk_size_tokens - len(self._decodes))
        if not self._chunk_size_tokens:
            self._return_prompts()
        spent = num_chunks = 0
        while self._prefills and spent < room:
            request = self._prefills[0]
            chunk = min(request.prefill_tokens, room - spent)
            request.prefill_tokens -= chunk
            request.context_tokens += chunk
            spent += chunk
            num_chunks += 1
            if not request.prefill_tokens:
                self._prefills.pop(0)
                self._decodes[request] = None
                self._give_token(request, now_ns)
        return spent, num_chunks

    def _return_prompts(self) -> None:
        for request in [request for request in self._prefills if not request.context_tokens]:
            self._finish(request, sampling_pb2.FINISH_REASON_RETURNED)

    def _give_token(self, request: StubRequest, now_ns: int) -> None:
        link, index = request.link, request.num_output_tokens
        link.slots.append(request.slot)
        link.token_ids.append(self._vocabulary[(request.number + index) % len(self._vocabulary)])
        link.output_indexes.append(index)
        request.num_output_tokens = index + 1
        request.context_tokens += 1
        if index < self._stamps.max_tokens:
            self._stamps.mark_sent(request.number, index, now_ns)
        if request.num_output_tokens >= request.max_tokens:
            self._finish(request, sampling_pb2.FINISH_REASON_LENGTH)

    def _finish(
        self, request: StubRequest, reason: sampling_pb2.FinishReason.ValueType, kv: wire.KvHandle | None = None
    ) -> None:
        finished = wire.Finished(slot=request.slot, reason=reason, kv=kv, num_output_tokens=request.num_output_tokens)
        request.link.finished.append(finished)
        self._drop(request)

    def _drop(self, request: StubRequest) -> None:
        del request.link.by_slot[request.slot]
        if request in self._decodes:
            del self._decodes[request]
        else:
            self._prefills.remove(request)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _flush(self, link: StubLink, now_s: float, iteration: wire.Iteration | None) -> None:
        silence_s = now_s - link.last_sent_s
        has_news = link.slots or link.finished or link.has_submits
        if not has_news and silence_s < (LOAD_REPORT_S if iteration is not None else IDLE_REPORT_S):
            return
        self._stamps.count_sent(len(link.slots))
        load = self._load(link, now_s)
        if iteration is not None:
            load.iteration.CopyFrom(iteration)
        link.send(
            wire.AttachResponse(
                slots=link.slots,
                token_ids=link.token_ids,
                output_indexes=link.output_indexes,
                finished=link.finished,
                load=load,
            )
        )
        link.slots, link.token_ids, link.output_indexes, link.finished = [], [], [], []
        link.has_submits = False
        link.last_sent_s = now_s

    def _load(self, link: StubLink, now_s: float | None = None) -> wire.LoadReport:
        if now_s is not None and self._grants:
            self._grants = {key: grant for key, grant in self._grants.items() if grant[1] > now_s}
        pinned = sum(sum(other.pinned_blocks.values()) for other in self._links)
        context_tokens = sum(request.context_tokens for request in self._decodes)
        prefilled_tokens = sum(request.context_tokens for request in self._prefills)
        return wire.LoadReport(
            last_submit_number=link.last_submit_number,
            queued_prefill_tokens=sum(request.prefill_tokens for request in self._prefills),
            queued_requests=len(self._prefills),
            queued_attention_work=sum(
                request.prefill_tokens * (request.context_tokens + request.prefill_tokens / 2)
                for request in self._prefills
            ),
            running_decodes=len(self._decodes),
            decode_context_tokens=context_tokens,
            kv_blocks_total=self._shape.kv_blocks,
            kv_blocks_used=self._blocks(context_tokens + prefilled_tokens) + pinned,
            kv_blocks_granted=sum(blocks for blocks, _ in self._grants.values()),
            kv_blocks_pinned=pinned,
            chunk_size_tokens=self._chunk_size_tokens,
            is_draining=self._is_draining,
            transport="stub",
            num_moved_in=self._num_moved_in,
            num_moved_out=self._num_moved_out,
        )

    def _blocks(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self._shape.block_size_tokens)
