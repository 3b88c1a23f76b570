"""One simulated engine: what its scheduler does between two iterations (simulation.md, section 2).

An iteration costs O(finished + prefilled), never O(batch): all decodes gain one token per iteration, so

- a decode ends at an iteration that is known when it joins: ``_ending`` holds the requests of each;
- the context that decode attention reads is a running sum;
- a decode takes a block when its KV fills one, which is every ``block_size_tokens`` iterations: ``_growth`` counts the
  decodes by the remainder at which that happens.

KV accounting: ``used_blocks`` is what requests hold here, ``pinned_blocks`` the part whose transfer away is under way,
``granted_blocks`` what is reserved for transfers to here. A prompt's blocks are reserved when its first chunk is
scheduled. Out of blocks for the decodes: the last one in the batch policy's order is preempted and recomputes.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from sluice_core.batching import BatchLimits, BatchPolicy, EngineBatch, RequestKind
from sluice_core.decodes import DecodeSet
from sluice_core.records import EngineId, EngineLoad, RequestId, Role
from sluice_core.sim.counters import EngineCounters
from sluice_core.sim.gaps import GapHistogram
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.setup import EngineSetup

_Waiting = tuple[int, float, int, SimRequest]


class SimEngine:
    """An engine; mutable, changed by its own methods only.

    A round is ``start`` (fixes the batch and returns its time), then ``end`` when that time has passed.

    Args:
        setup: What it is.
        batching: What an iteration may hold.
        gaps: Where gaps between tokens are counted.
        changed: Where it puts itself when its load has changed since the last report.
        joins_end_ttft: TTFT ends when a request joins its first decode batch.
        schedules_ahead: What an iteration may hold was decided when the one before it began: requests that came and
            blocks that became free since then are not in it.

    Attributes:
        counters: What it has done.
        is_running: Between ``start`` and ``end``.
        finished: Requests that ended in the last iteration.
        returned: Prompts that the last ``start`` gave back to the router.
        has_freed_blocks: Blocks became free since the simulation last looked.
    """

    __slots__ = (
        "_arrived",
        "_batch",
        "_batching",
        "_block_size",
        "_changed",
        "_completing",
        "_ctx_tokens",
        "_decoding",
        "_ending",
        "_gaps",
        "_growth",
        "_is_reported",
        "_joined",
        "_joins_end_ttft",
        "_last_prefill_s",
        "_load",
        "_num_queued",
        "_num_submitted",
        "_profile",
        "_queue",
        "_queued_tokens",
        "_queued_work2",
        "_schedules_ahead",
        "_started",
        "_unseen",
        "_unseen_blocks",
        "chunk_size_tokens",
        "counters",
        "decodes",
        "duration_s",
        "ends_at_s",
        "engine_id",
        "finished",
        "granted_blocks",
        "has_freed_blocks",
        "is_dead",
        "is_draining",
        "is_running",
        "iteration",
        "last_chunk_size_tokens",
        "num_decodes",
        "num_incoming",
        "pinned_blocks",
        "prefill_chunks",
        "prefill_tokens",
        "returned",
        "role",
        "setup",
        "total_blocks",
        "used_blocks",
    )

    def __init__(
        self,
        setup: EngineSetup,
        batching: BatchPolicy,
        gaps: GapHistogram,
        changed: list[SimEngine],
        *,
        joins_end_ttft: bool = False,
        schedules_ahead: bool = False,
    ) -> None:
        self.setup = setup
        self.engine_id: EngineId = setup.engine_id
        self.role: Role = setup.role
        self.chunk_size_tokens = setup.chunk_size_tokens
        self.last_chunk_size_tokens = setup.chunk_size_tokens
        self.is_draining = False
        self.is_dead = False
        self.is_running = False
        self.has_freed_blocks = False
        self.total_blocks = setup.kv_blocks_total
        self.used_blocks = 0
        self.pinned_blocks = 0
        self.granted_blocks = 0
        self.num_incoming = 0
        self.num_decodes = 0
        self.iteration = 0
        self.duration_s = 0.0
        self.ends_at_s = 0.0
        self.prefill_tokens = 0
        self.prefill_chunks = 0
        self.finished: list[SimRequest] = []
        self.returned: list[SimRequest] = []
        self.counters = EngineCounters()
        self.decodes = DecodeSet(block_size_tokens=setup.block_size_tokens, max_num_seqs=setup.max_num_seqs)
        self.decodes.role = setup.role
        self.decodes.kv_blocks_total = setup.kv_blocks_total
        self._profile = setup.profile
        self._batching = batching
        self._gaps = gaps
        self._joins_end_ttft = joins_end_ttft
        self._schedules_ahead = schedules_ahead
        self._unseen: list[_Waiting] = []
        self._changed = changed
        self._load = EngineLoad(kv_blocks_total=setup.kv_blocks_total, pull_bytes_per_s=setup.link.speed.bytes_per_s)
        self._is_reported = True
        self.note_change()
        self._unseen_blocks = self._queued_tokens = self._num_queued = self._num_submitted = self._ctx_tokens = 0
        self._queued_work2 = 0  # twice the attention work: an integer
        self._block_size = setup.block_size_tokens
        self._growth: list[int] = [0] * setup.block_size_tokens
        self._ending: dict[int, list[tuple[int, SimRequest]]] = {}
        self._decoding: dict[RequestId, SimRequest] = {}
        self._queue: list[_Waiting] = []
        self._started: list[SimRequest] = []
        self._completing: list[SimRequest] = []
        self._arrived: list[SimRequest] = []
        self._joined: list[SimRequest] = []
        self._last_prefill_s = 0.0
        self._batch = EngineBatch(
            chunk_size_tokens=setup.chunk_size_tokens,
            last_chunk_size_tokens=setup.chunk_size_tokens,
            max_batch_tokens=setup.max_batch_tokens,
            block_size_tokens=setup.block_size_tokens,
        )

    # --- what the router asks for ------------------------------------------------------------------------------

    def submit(self, request: SimRequest, kind: RequestKind) -> int:
        """Queue a prefill of all tokens that the request has so far.

        Returns:
            Its submit number.
        """
        self._num_submitted += 1
        request.state = RequestState.QUEUED
        request.target = self.engine_id
        request.is_moved_in = False
        self._enqueue(request, kind)
        return self._num_submitted

    def configure(self, role: Role, chunk_size_tokens: int, *, is_draining: bool) -> None:
        """Put a plan in force."""
        self.note_change()
        self.role = self.decodes.role = role
        self.chunk_size_tokens = chunk_size_tokens
        self.is_draining = self.decodes.is_draining = is_draining
        if chunk_size_tokens:
            self.last_chunk_size_tokens = chunk_size_tokens

    def reserve(self, num_blocks: int) -> None:
        """Grant blocks and a seat to a transfer to here."""
        assert num_blocks <= self.free_blocks
        self.granted_blocks += num_blocks
        self.num_incoming += 1
        self.note_change()

    def receive(self, request: SimRequest) -> None:
        """Take a request over whose KV has arrived; it joins at the next iteration boundary."""
        self.granted_blocks -= request.num_blocks
        self.used_blocks += request.num_blocks
        self._arrived.append(request)
        self.note_change()

    def recompute_arrival(self, request: SimRequest) -> None:
        """Take a request over whose KV will not arrive: it is recomputed here."""
        self.granted_blocks -= request.num_blocks
        self.num_incoming -= 1
        request.num_blocks = 0
        request.state = RequestState.QUEUED
        request.is_moved_in = True
        self._enqueue(request, RequestKind.RECOMPUTE)

    def hand_off(self, request_id: RequestId, now: float) -> SimRequest:
        """End a decode's part here and pin its KV until ``release``."""
        request = self._decoding[request_id]
        self._leave(request, now)
        self.pinned_blocks += request.num_blocks
        self.note_change()
        return request

    def count_blocks(self, request: SimRequest) -> int:
        """Count the blocks that a decode holds."""
        num_tokens = request.prompt_tokens + self.iteration - request.born_at
        return -(-(num_tokens - 1) // self._block_size)

    def resume(self, request: SimRequest) -> None:
        """Take a request back that was handed off and has not left; it joins at the next iteration boundary."""
        self.pinned_blocks -= request.num_blocks
        self.num_incoming += 1
        self._arrived.append(request)
        self.note_change()

    def release(self, num_blocks: int) -> None:
        """Free the KV of a request that was handed off."""
        self.pinned_blocks -= num_blocks
        self._free(num_blocks)
        self.note_change()

    def clear(self, now: float) -> list[SimRequest]:
        """Die: returns every request that ran or waited here; the iteration under way yields nothing."""
        self.is_dead = True
        computing = self._started + self._completing
        self.counters.num_lost_prefill_tokens += sum(request.num_computed_tokens for request in computing)
        if self.is_running:
            self.counters.num_lost_prefill_tokens -= self.prefill_tokens
        last_token_s = self.ends_at_s - self.duration_s if self.is_running else now
        lost = [entry[3] for entry in sorted(self._queue + self._unseen)] + computing + self._arrived
        for request in list(self._decoding.values()):
            self._leave(request, last_token_s)
            lost.append(request)
        return lost

    # --- an iteration ------------------------------------------------------------------------------------------

    @property
    def decode_context_tokens(self) -> int:
        """Sum of the decodes' contexts."""
        return self._ctx_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds or was promised."""
        return self.total_blocks - self.used_blocks - self.granted_blocks

    def start(self, now: float) -> float:
        """Fix the batch of the next iteration.

        Returns:
            Its time in seconds; negative when there is nothing to do.
        """
        if self._arrived:
            self._take_in(now)
        if self.num_decodes:
            need = self._growth[-self.iteration % self._block_size]
            if need > self.free_blocks - self._unseen_blocks:
                need = self._preempt(now)
            self.used_blocks += need
        self.prefill_tokens = self.prefill_chunks = 0
        work2 = self._schedule_prefills(now) if self._num_queued else 0
        if self._schedules_ahead:
            self._see()
            if not self.num_decodes and not self.prefill_tokens and self._num_queued:
                work2 = self._schedule_prefills(now)  # nothing could be scheduled ahead
        if not self._num_queued or self.prefill_tokens:
            self._last_prefill_s = now
        num_tokens = self.num_decodes + self.prefill_tokens
        if num_tokens == 0:
            return -1.0
        self.duration_s = self._profile.estimate_iteration_s(
            num_tokens, self.prefill_chunks, self.prefill_tokens, work2 * 0.5, self.num_decodes, self._ctx_tokens
        )
        self.ends_at_s = now + self.duration_s
        self.is_running = True
        self.note_change()
        self.counters.peak_blocks = max(self.counters.peak_blocks, self.used_blocks)
        return self.duration_s

    def end(self, now: float) -> None:
        """Take the iteration's tokens in; see ``finished``."""
        self.is_running = False
        self.note_change()
        self.iteration += 1
        counters = self.counters
        counters.num_iterations += 1
        counters.busy_s += self.duration_s
        counters.kv_block_seconds += self.duration_s * self.used_blocks
        counters.num_output_tokens += self.num_decodes
        counters.num_prefill_tokens += self.prefill_tokens
        self._gaps.add(self.duration_s, self.num_decodes - len(self._joined))
        for request in self._joined:
            self._gaps.add(now - request.last_token_s, 1)
        self._joined = []
        self.decodes.advance()
        self._ctx_tokens += self.num_decodes
        self.finished = []
        ending = self._ending.pop(self.iteration, None)
        if ending is not None:
            for stay, request in ending:
                if request.stay == stay:
                    self._leave(request, now)
                    self._finish(request, now)
        if self._completing:
            completing, self._completing = self._completing, []
            for request in completing:
                self._complete(request, now)
        self.decodes.kv_blocks_held = self.used_blocks - self.pinned_blocks

    def _see(self) -> None:
        """From now on what came and became free since the last iteration began is scheduled."""
        self._unseen_blocks = 0
        for entry in self._unseen:
            heappush(self._queue, entry)
        self._unseen.clear()

    def note_change(self) -> None:
        """Note that the load is no longer what was last reported."""
        if self._is_reported:
            self._is_reported = False
            self._changed.append(self)

    def report_load(self, now: float) -> EngineLoad:
        """Make the load report."""
        self._is_reported = True
        load = self._load
        load.last_submit_number = self._num_submitted
        load.queued_prefill_tokens = self._queued_tokens
        load.queued_requests = self._num_queued
        load.queued_attention_work = self._queued_work2 * 0.5
        load.running_decodes = self.num_decodes + self.num_incoming
        load.decode_context_tokens = self._ctx_tokens
        load.kv_blocks_used = self.used_blocks
        load.kv_blocks_granted = self.granted_blocks
        load.kv_blocks_pinned = self.pinned_blocks
        load.iteration_remaining_s = self.ends_at_s - now if self.is_running else 0.0
        return load

    def check_idle(self) -> None:
        """Assert that nothing is left: no block, no queue, and sums that have not drifted."""
        assert not self._queue, self.engine_id
        assert not self._unseen, self.engine_id
        assert not self._started, self.engine_id
        assert not self._completing, self.engine_id
        assert not self._arrived, self.engine_id
        assert not self._decoding, self.engine_id
        assert len(self.decodes) == 0, self.engine_id
        assert self.num_decodes == self.num_incoming == self._num_queued == 0, self.engine_id
        assert self._queued_tokens == self._queued_work2 == self._ctx_tokens == 0, self.engine_id
        assert self.used_blocks == self.pinned_blocks == self.granted_blocks == 0, self.engine_id
        assert not any(self._growth), self.engine_id

    # --- prefills ----------------------------------------------------------------------------------------------

    def _enqueue(self, request: SimRequest, kind: RequestKind) -> None:
        request.kind = kind
        request.num_computed_tokens = 0
        request.prefill_tokens = tokens = request.prompt_tokens + request.generated_tokens
        first, second = self._batching.order_key(kind, request.arrival_s, request.priority)
        request.order = (first, second, request.index)
        entry = (first, second, request.index, request)
        if self._schedules_ahead and self.is_running:
            self._unseen.append(entry)
        else:
            heappush(self._queue, entry)
        self._num_queued += 1
        self._queued_tokens += tokens
        self._queued_work2 += tokens * tokens
        self._count_kind(kind, 1)
        self.note_change()

    def _count_kind(self, kind: RequestKind, by: int) -> None:
        batch = self._batch
        if kind is RequestKind.NEW_PROMPT:
            batch.num_new_prompts += by
        elif kind is RequestKind.STARTED_PREFILL:
            batch.num_started_prefills += by
        else:
            batch.num_recomputing += by

    def _schedule_prefills(self, now: float) -> int:
        """Fill the prefill room in order.

        Returns:
            Twice the attention work of the chunks.
        """
        batch = self._batch
        batch.chunk_size_tokens = self.chunk_size_tokens
        batch.last_chunk_size_tokens = self.last_chunk_size_tokens
        batch.num_decodes = self.num_decodes
        batch.last_prefill_s = self._last_prefill_s
        batch.is_draining = self.is_draining
        limits = self._batching.limits(now, batch)
        if limits.returns_new_prompts and batch.num_new_prompts:
            self._return_new_prompts()
        room = limits.prefill_room_tokens
        if room <= 0:
            return 0
        started, self._started = self._started, []
        position, num_started = 0, len(started)
        may_admit = True
        work2 = 0
        while room > 0:
            request: SimRequest | None = started[position] if position < num_started else None
            if may_admit and self._queue:
                head = self._queue[0]
                if request is None or (head[0], head[1], head[2]) < request.order:
                    if not self._admit(head[3], limits, num_started - position):
                        may_admit = False
                        continue
                    heappop(self._queue)
                    request = head[3]
                else:
                    position += 1
            elif request is None:
                break
            else:
                position += 1
            tokens = min(room, limits.max_tokens_per_prefill, request.prefill_tokens - request.num_computed_tokens)
            room -= tokens
            work2 += self._compute(request, tokens)
        while position < num_started:
            self._started.append(started[position])
            position += 1
        if len(self._started) > 1:
            self._started.sort(key=_order_of)
        self._queued_work2 -= work2
        return work2

    def _compute(self, request: SimRequest, tokens: int) -> int:
        """Schedule a chunk; returns twice its attention work."""
        before = request.num_computed_tokens
        after = request.num_computed_tokens = before + tokens
        self.prefill_tokens += tokens
        self.prefill_chunks += 1
        self._queued_tokens -= tokens
        if after == request.prefill_tokens:
            self._num_queued -= 1
            self._count_kind(request.kind, -1)
            self._completing.append(request)
        else:
            if request.kind is RequestKind.NEW_PROMPT:
                self._count_kind(RequestKind.NEW_PROMPT, -1)
                self._count_kind(RequestKind.STARTED_PREFILL, 1)
                request.kind = RequestKind.STARTED_PREFILL
                first, second = self._batching.order_key(request.kind, request.arrival_s, request.priority)
                request.order = (first, second, request.index)
            self._started.append(request)
        return after * after - before * before

    def _admit(self, request: SimRequest, limits: BatchLimits, num_started: int) -> bool:
        """Reserve the blocks and the seat of a whole prompt; False when something is missing."""
        if limits.hides(request.kind):
            return False
        seats = self.num_decodes + self.num_incoming + num_started + len(self._started) + len(self._completing)
        if seats >= self.setup.max_num_seqs:
            return False
        blocks = -(-request.prefill_tokens // self._block_size)
        if blocks > self.free_blocks - self._unseen_blocks:
            return False
        request.num_blocks = blocks
        self.used_blocks += blocks
        return True

    def _return_new_prompts(self) -> None:
        """Give prompts back that have not started."""
        self._see()
        kept = [entry for entry in self._queue if entry[3].kind is not RequestKind.NEW_PROMPT]
        returned = [entry for entry in self._queue if entry[3].kind is RequestKind.NEW_PROMPT]
        heapify(kept)
        self._queue = kept
        returned.sort()
        for entry in returned:
            request = entry[3]
            self._num_queued -= 1
            self._queued_tokens -= request.prefill_tokens
            self._queued_work2 -= request.prefill_tokens * request.prefill_tokens
            self._count_kind(RequestKind.NEW_PROMPT, -1)
            self.returned.append(request)

    def _complete(self, request: SimRequest, now: float) -> None:
        """Take the token in that the end of a prefill yields."""
        request.generated_tokens += 1
        self.counters.num_output_tokens += 1
        self.counters.num_completed_prefill_tokens += request.prefill_tokens
        if request.first_token_s < 0.0:
            request.first_token_s = now
        else:
            self._gaps.add(now - request.last_token_s, 1)
        if request.generated_tokens == request.output_tokens:
            self._finish(request, now)
        else:
            self._join(request, now)

    # --- decodes -----------------------------------------------------------------------------------------------

    def _take_in(self, now: float) -> None:
        """Let requests whose KV has arrived join the decodes."""
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            self.num_incoming -= 1
            if self._joins_end_ttft and request.generated_tokens == 1:
                request.first_token_s = request.last_token_s = now
            request.is_moved_in = True
            self._join(request, now)
            self._joined.append(request)

    def _join(self, request: SimRequest, now: float) -> None:
        """Add a request to the decode batch."""
        iteration, generated = self.iteration, request.generated_tokens
        num_tokens = request.prompt_tokens + generated
        request.state = RequestState.DECODING
        request.target = self.engine_id
        request.born_at = iteration - generated
        self.num_decodes += 1
        self._ctx_tokens += num_tokens
        self._growth[(num_tokens - 1 - iteration) % self._block_size] += 1
        ends_at = iteration + request.output_tokens - generated
        ending = self._ending.get(ends_at)
        if ending is None:
            self._ending[ends_at] = [(request.stay, request)]
        else:
            ending.append((request.stay, request))
        self._decoding[request.request_id] = request
        self.decodes.join(
            request.request_id,
            now=now,
            prompt_tokens=request.prompt_tokens,
            output_tokens=generated,
            output_tokens_since_reset=generated - request.reset_tokens,
            since_first_token_s=now - request.first_token_s,
            tpot_slo_s=request.tpot_slo_s,
            is_moved_in=request.is_moved_in,
        )

    def _leave(self, request: SimRequest, now: float) -> None:
        """Take a request out of the decode batch; its blocks stay used."""
        request.generated_tokens = self.iteration - request.born_at
        request.last_token_s = now
        request.stay += 1
        num_tokens = request.prompt_tokens + request.generated_tokens
        request.num_blocks = -(-(num_tokens - 1) // self._block_size)
        self.num_decodes -= 1
        self._ctx_tokens -= num_tokens
        self._growth[(num_tokens - 1 - self.iteration) % self._block_size] -= 1
        del self._decoding[request.request_id]
        self.decodes.leave(request.request_id)

    def _finish(self, request: SimRequest, now: float) -> None:
        """Free what a request held that has its last token."""
        request.state = RequestState.FINISHED
        request.last_token_s = now
        self._free(request.num_blocks)
        self.finished.append(request)

    def _free(self, num_blocks: int) -> None:
        self.used_blocks -= num_blocks
        self.has_freed_blocks = True
        if self._schedules_ahead:
            self._unseen_blocks += num_blocks

    def _preempt(self, now: float) -> int:
        """Preempt decodes until the others have blocks for their next tokens.

        Returns:
            Blocks that they need.
        """
        need = self._growth[-self.iteration % self._block_size]
        while need > self.free_blocks - self._unseen_blocks:
            victim = self._pick_victim()
            is_new_here = victim in self._joined
            self._leave(victim, victim.last_token_s if is_new_here else now)
            if is_new_here:
                self._joined.remove(victim)
            self.used_blocks -= victim.num_blocks
            victim.num_blocks = 0
            victim.num_preemptions += 1
            victim.state = RequestState.QUEUED
            self.counters.num_preemptions += 1
            self._enqueue(victim, RequestKind.RECOMPUTE)
            need = self._growth[-self.iteration % self._block_size]
        return need

    def _pick_victim(self) -> SimRequest:
        """Pick the decode that comes last in the batch policy's order; of equals the one that arrived last."""
        victim: SimRequest | None = None
        last = 0.0
        for request in self._decoding.values():
            key = self._batching.victim_key(request.arrival_s, request.priority)
            if victim is None or key > last or (key == last and request.index > victim.index):
                victim, last = request, key
        assert victim is not None
        return victim


def _order_of(request: SimRequest) -> tuple[int, float, int]:
    return request.order
