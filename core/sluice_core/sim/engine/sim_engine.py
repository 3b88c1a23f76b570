"""One simulated engine: what its router asks of it, and its iterations."""

from __future__ import annotations

import math
from typing import Final

from sluice_core.records import EngineId, IterationShape, Role
from sluice_core.scheduling.engine_policy import EnginePolicy, RequestKind
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.sim.engine.gap_histogram import GapHistogram
from sluice_core.sim.engine.host_prefills import HostPrefills
from sluice_core.sim.engine.moving_requests import MovingRequests
from sluice_core.sim.engine.preemption import (
    make_room_for_chunks,
    make_room_for_decodes,
    make_room_in_step,
)
from sluice_core.sim.engine.suspended_batch import IterationRest
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.sim_setup import EngineSetup

_NEVER_S: Final = math.inf  # looking it up in the module costs as much as a tenth of an iteration


class SimEngine(MovingRequests):
    """An engine; mutable, changed by its own methods only.

    An iteration is ``start`` (fixes the batch and returns its time), then ``end`` when that time has passed. It costs
    O(finished + prefilled), never O(batch): see ``DecodeBatch`` and ``PrefillQueue``.

    Args:
        setup: What it is.
        policy: What an iteration may hold, and what should leave.
        gaps: Where gaps between tokens are counted.
        changed: See ``SchedulerState``.
        joins_end_ttft: TTFT ends when a request joins its first decode batch.
        schedules_ahead: See ``SchedulerState``.
        hash_block_tokens: See ``SimOptions``.

    Attributes:
        finished: Requests that ended in the last iteration.
        hands_off_prefills: Prefills that yield the first token are handed off to nobody yet; set it with a plan.
        prefilled: Those of the last iteration, until somebody takes them from here.
        parted: Prompts that were cut and whose beginning the last iteration has ended, until somebody takes them.
        num_operators: Operators of the iteration under way at whose ends it may stop; 0: it does not.
        interrupts_at_s: When it stops before its end; ``math.inf``: it does not (``operator_interrupts``).
        withholds_decodes: The iteration under way, or the last one, is of prefills alone, and the decodes wait.
    """

    __slots__ = (
        "_gaps",
        "_joins_end_ttft",
        "_load",
        "_num_submitted",
        "_prefilled_alone",
        "_profile",
        "_shape",
        "_switching",
        "duration_s",
        "ends_at_s",
        "finished",
        "hands_off_prefills",
        "interrupts_at_s",
        "is_dead",
        "is_draining",
        "num_operators",
        "parted",
        "prefilled",
        "role",
        "withholds_decodes",
    )

    def __init__(
        self,
        setup: EngineSetup,
        policy: EnginePolicy,
        gaps: GapHistogram,
        changed: list[EngineId],
        *,
        joins_end_ttft: bool = False,
        schedules_ahead: bool = False,
        hash_block_tokens: int | None = None,
    ) -> None:
        super().__init__(setup, policy, changed, schedules_ahead=schedules_ahead, hash_block_tokens=hash_block_tokens)
        self.role: Role = setup.role
        self.is_draining = False
        self.is_dead = False
        self.duration_s = 0.0
        self.ends_at_s = 0.0
        self.finished: list[SimRequest] = []
        self.hands_off_prefills = False
        self.prefilled: list[SimRequest] = []
        self.parted: list[SimRequest] = []
        self.num_operators = 0
        self.interrupts_at_s = _NEVER_S
        self.withholds_decodes = False
        self._prefilled_alone: list[SimRequest] = []  # joined the decodes with the end of an iteration of prefills
        self._profile = setup.profile
        self._shape = IterationShape()
        self._switching: list[SimRequest] = []  # have a first token, and wait for the phase of decodes
        self._gaps = gaps
        self._joins_end_ttft = joins_end_ttft
        self._num_submitted = 0
        self._load = EngineLoad(kv_blocks_total=setup.kv_blocks_total, pull_bytes_per_s=setup.link.speed.bytes_per_s)

    # --- requests of the router ------------------------------------------------------------------------------

    def submit(self, request: SimRequest, kind: RequestKind) -> int:
        """Queue a prefill of all tokens that the request has so far.

        Returns:
            Its submit number.
        """
        self._note_submit(request)
        self.enqueue(request, kind)
        return self._num_submitted

    def submit_whole(self, request: SimRequest) -> int:
        """Queue the whole prompt whose beginning has ended here: what it held is free, and it may find it again.

        Returns:
            Its submit number.
        """
        self.free_part(request)
        self._note_submit(request)
        self.prefills.add(request, RequestKind.NEW_PROMPT, is_deferred=self.schedules_ahead)
        return self._num_submitted

    def _note_submit(self, request: SimRequest) -> None:
        self._num_submitted += 1
        request.state = RequestState.QUEUED
        request.target = self.engine_id
        request.is_moved_in = False

    def configure(self, role: Role, chunk_size_tokens: int, *, is_draining: bool) -> None:
        """Put a plan in force."""
        self.note_change()
        self.role = self.batch.decodes.role = role
        self.is_draining = self.batch.decodes.is_draining = self.prefills.batch.is_draining = is_draining
        self.prefills.batch.chunk_size_tokens = chunk_size_tokens
        if chunk_size_tokens:
            self.prefills.batch.last_chunk_size_tokens = chunk_size_tokens

    def clear(self, now: float) -> list[SimRequest]:
        """Die: returns every request that ran or waited here; the iteration under way yields nothing."""
        self.is_dead = True
        waiting, computing = self.prefills.clear()
        self.counters.num_lost_prefill_tokens += sum(
            request.num_computed_tokens - request.num_cached_tokens for request in computing
        )
        self.counters.num_lost_prefill_tokens -= self.prefills.count_suspended_tokens()
        if self.is_running:
            self.counters.num_lost_prefill_tokens -= self.prefills.num_tokens
        last_token_s = self.ends_at_s - self.duration_s if self.is_running else now
        lost = waiting + computing + self.arrived
        for request in list(self.batch.list_requests()):
            self.batch.leave(request, last_token_s)
            lost.append(request)
        return lost

    # --- an iteration ------------------------------------------------------------------------------------------

    def start(self, now: float) -> float:
        """Fix the batch of the next iteration.

        Returns:
            Its time in seconds; negative when there is nothing to do.
        """
        if self.arrived:
            self._take_in(now)
        batch, prefills = self.batch, self.prefills
        if self.policy.separates_phases:
            duration_s = self._start_prefills_alone(now)
            if duration_s >= 0.0:
                return duration_s
        num_decodes = batch.num_decodes
        if num_decodes:
            need = batch.count_growth_blocks()
            if need > self.count_schedulable_blocks():
                need = make_room_for_decodes(self, now) if self.schedules_ahead else make_room_in_step(self, now)
            self.used_blocks += need
            if self.cache is not None:
                self.cache.take(need)
            elif prefills.freed is not None:
                prefills.freed.take(need)
        work2 = self._schedule_prefills(now, num_decodes)
        num_tokens = batch.num_decodes + prefills.num_tokens
        if num_tokens == 0:
            return self._start_without_lookahead(now) if batch.paused else -1.0
        return self._run(now, work2, batch.num_decodes, batch.context_tokens)

    def _run(self, now: float, work2: int, num_decodes: int, context_tokens: int) -> float:
        """Begin an iteration.

        Args:
            now: Seconds of the simulated clock.
            work2: Twice the attention work of its chunks.
            num_decodes: Its decodes.
            context_tokens: Sum of their contexts.
        """
        prefills = self.prefills
        if self.policy.separates_phases:
            self.policy.note_batch(now, has_prefills=prefills.num_tokens > 0)
            if num_decodes and self._switching:
                self._end_phase_switch(now)
        if self.policy.records_iterations or self.setup.learns_latency:
            self._shape = IterationShape(
                prefill_tokens=prefills.num_tokens,
                attention_work=work2 * 0.5,
                num_chunks=prefills.num_chunks,
                num_decodes=num_decodes,
                decode_context_tokens=context_tokens,
            )
        self.duration_s = self._profile.estimate_iteration_s(
            num_decodes + prefills.num_tokens,
            prefills.num_chunks,
            prefills.num_tokens,
            work2 * 0.5,
            num_decodes,
            context_tokens,
        )
        self.num_operators = self.setup.operators_per_iteration
        if prefills.resumed is not None:
            self._go_on(prefills.resumed, num_decodes, context_tokens)
        self.ends_at_s = now + self.duration_s
        self.is_running = True
        self.note_change()
        self.counters.peak_blocks = max(self.counters.peak_blocks, self.used_blocks)
        return self.duration_s

    def _go_on(self, rest: IterationRest, num_decodes: int, context_tokens: int) -> None:
        """Go on with an iteration that has stopped; decodes that have come meanwhile cost what they do alone."""
        self.duration_s, self.num_operators = rest.time_s, rest.num_operators
        if num_decodes:
            self.duration_s += self._profile.estimate_iteration_s(num_decodes, 0, 0, 0.0, num_decodes, context_tokens)

    def _end_phase_switch(self, now: float) -> None:
        """Begin a phase of decodes, where TTFT ends with it (EcoServe, section 3.3)."""
        paused = self.batch.paused
        for request in self._switching:
            is_first = request.state is RequestState.DECODING and request.generated_tokens == 1
            if is_first and request not in paused:
                request.first_token_s = request.last_token_s = now
        self._switching = [request for request in self._switching if request in paused]

    def _start_prefills_alone(self, now: float) -> float:
        """Begin an iteration of prefills while the decodes wait; negative when none finds a seat and blocks."""
        batch, prefills = self.batch, self.prefills
        had_withheld, self.withholds_decodes = self.withholds_decodes, False
        prefills.batch.is_stalled = False
        if not batch.num_decodes or not prefills.num_queued:
            return -1.0
        prefills.num_tokens = prefills.num_chunks = 0
        fill_room = self._fill_room_ahead if self.schedules_ahead else self._fill_room
        work2 = fill_room(now, batch.num_decodes)
        if not prefills.num_tokens:
            prefills.batch.is_stalled = True
            prefills.undo_batch()
            return -1.0
        prefills.release_deferred()
        self.ending = []
        prefills.batch.last_prefill_s = now
        self.withholds_decodes = True
        self._note_waiting_decodes(now, had_withheld=had_withheld)
        return self._run(now, work2, 0, 0)

    def _note_waiting_decodes(self, now: float, *, had_withheld: bool) -> None:
        """Let the gaps of the decodes go on whose last token came now: O(decodes) where they begin to wait."""
        waiting = self._prefilled_alone
        if not had_withheld:
            known = {request.index for request in self.joined}
            waiting = [request for request in self.batch.list_requests() if request.index not in known]
        for request in waiting:
            if request.state is RequestState.DECODING:
                request.last_token_s = now
                self.joined.append(request)

    def _start_without_lookahead(self, now: float) -> float:
        """Schedule an iteration of which nothing could be scheduled ahead, for want of blocks."""
        self.batch.resume()
        self.schedules_late = True
        duration_s = self.start(now)
        self.schedules_late = False
        return duration_s

    def end(self, now: float) -> None:
        """Take the iteration's tokens in; see ``finished``."""
        self.is_running = False
        self.interrupts_at_s = _NEVER_S
        self.note_change()
        self.prefills.end_batch(now)
        counters, num_decodes = self.counters, 0 if self.withholds_decodes else self.batch.num_decodes
        counters.num_iterations += 1
        counters.busy_s += self.duration_s
        counters.kv_block_seconds += self.duration_s * self.used_blocks
        counters.num_output_tokens += num_decodes
        counters.num_prefill_tokens += self.prefills.num_tokens
        self.finished = []
        if self._prefilled_alone:
            self._prefilled_alone = []
        ending = None
        if not self.withholds_decodes:
            self._count_gaps(now)
            ending = self.batch.advance()
        if ending is not None:
            for batch_epoch, request in ending:
                if request.batch_epoch == batch_epoch:
                    self.batch.leave(request, now)
                    self._finish(request, now)
        if self.prefills.completing:
            completing, self.prefills.completing = self.prefills.completing, []
            for request in completing:
                self._complete(request, now)
        if self.policy.records_iterations or self.setup.learns_latency:
            self._note_measured()
        if self.schedules_ahead:
            self.ending = list(self.finished)
        # Handed-off requests may share blocks of a common prefix, which are then pinned twice.
        self.batch.decodes.kv_blocks_held = max(0, self.used_blocks - self.pinned_blocks)

    def _note_measured(self) -> None:
        """Tell the policy and the latency model how long the iteration has taken."""
        if self.policy.records_iterations:
            self.policy.record_iteration(self._shape, self.duration_s)
        if self.setup.learns_latency:
            self.latency.observe(self._shape, self.duration_s)

    def _count_gaps(self, now: float) -> None:
        """Count the gaps that end with the iteration; decodes that were left out go on with theirs."""
        joined, paused = self.joined, self.batch.paused
        if joined or paused:
            self.joined = list(paused)
            for request in paused:
                if request not in joined:  # else it had none in the iteration before either
                    request.last_token_s = now - self.duration_s
            if paused:
                joined = [request for request in joined if request not in paused]
        self._gaps.add(self.duration_s, self.batch.num_decodes - len(joined))
        for request in joined:
            self._gaps.add(now - request.last_token_s, 1)

    def report_load(self, now: float) -> EngineLoad:
        """Make the load report."""
        self.is_reported = True
        load = self._load
        load.last_submit_number = self._num_submitted
        load.queued_prefill_tokens = self.prefills.queued_tokens
        load.queued_requests = self.prefills.num_queued
        load.queued_attention_work = self.prefills.queued_work2 * 0.5
        if self.selector is not None:
            late = self.selector.count_late(now)
            load.late_requests, load.late_prefill_tokens, load.late_attention_work = late
            load.due = self.selector.list_due()
        # Those that the iteration leaves out have their seats all the same.
        load.running_decodes = self.batch.num_decodes + len(self.batch.paused) + self.num_incoming
        load.decode_context_tokens = self.batch.context_tokens
        load.kv_blocks_used = self.used_blocks
        load.kv_blocks_granted = self.granted_blocks
        load.kv_blocks_pinned = min(self.used_blocks, self.pinned_blocks)
        load.iteration_remaining_s = self.ends_at_s - now if self.is_running else 0.0
        if self.policy.separates_phases:
            self._report_phase(load, now)
        return load

    def _report_phase(self, load: EngineLoad, now: float) -> None:
        """Report where the engine is that separates prefills from decodes."""
        is_prefilling = self.prefills.num_queued > 0 or (self.is_running and self.prefills.num_tokens > 0)
        phase = self.policy.describe_phase(now, is_prefilling=is_prefilling)
        if phase is not None:
            load.prefill_phase_s, load.saved_tpot_s = phase.prefill_phase_s, phase.saved_tpot_s

    def check_idle(self) -> None:
        """Assert that nothing is left: no block, no queue, and sums that have not drifted."""
        self.prefills.check_idle()
        self.batch.check_idle()
        assert not self.arrived, self.engine_id
        assert self.num_incoming == 0, self.engine_id
        assert self.used_blocks == self.pinned_blocks == self.granted_blocks == 0, self.engine_id
        if self.cache is not None:
            self.cache.check_idle()
        if self.host is not None:
            self.host.check_idle()

    # --- requests of an iteration --------------------------------------------------------------------

    def _schedule_prefills(self, now: float, num_decodes: int) -> int:
        """Schedule chunks and take their prompts' blocks; returns twice their attention work."""
        prefills = self.prefills
        prefills.num_tokens = prefills.num_chunks = 0
        if not self.schedules_ahead:
            work2 = self._fill_room(now, self.batch.num_decodes) if prefills.num_queued else 0
        else:
            work2 = self._fill_room_ahead(now, num_decodes) if prefills.num_queued else 0
            prefills.release_deferred()
            self.ending = []
            has_nothing = not self.batch.num_decodes and not prefills.num_tokens
            if has_nothing and prefills.num_queued and not self.batch.paused:
                # Nothing could be scheduled ahead, and the decodes behind which prefills stood are preempted by now.
                prefills.batch.is_stalled = False
                work2 = self._fill_room_ahead(now, 0)
        if not prefills.num_queued or prefills.num_tokens:
            prefills.batch.last_prefill_s = now
        return work2

    def _fill_room_ahead(self, now: float, num_decodes: int) -> int:
        if self.prefills.may_run_short(self.count_schedulable_blocks()):
            make_room_for_chunks(self, now, num_decodes)
        work2 = self._fill_room(now, num_decodes)
        self.prefills.lift_preemption_limits()
        return work2

    def _fill_room(self, now: float, num_decodes: int) -> int:
        prefills = self.prefills
        num_seats = self.setup.max_num_seqs - self.batch.num_decodes - self.num_incoming
        prefills.reserved_blocks = 0
        prefills.batch.decode_context_tokens = self.batch.context_tokens
        work2 = prefills.schedule(now, num_decodes, num_seats, self.free_blocks)
        self.used_blocks += prefills.reserved_blocks
        return work2

    def _complete(self, request: SimRequest, now: float) -> None:
        """Take the token in that the end of a prefill yields."""
        if request.prefill_tokens < request.prompt_tokens:
            self._end_part(request)
            return
        request.generated_tokens += 1
        self.counters.num_output_tokens += 1
        self.counters.num_completed_prefill_tokens += request.prefill_tokens - request.num_cached_tokens
        if request.first_token_s < 0.0:
            request.first_token_s = now
        else:
            self._gaps.add(now - request.last_token_s, 1)
        if request.generated_tokens == request.output_tokens:
            self._finish(request, now)
        elif self.hands_off_prefills and request.generated_tokens == 1:
            self._hand_off_prefill(request, now)
        else:
            self._join(request)
            if self._joins_end_ttft and self.policy.separates_phases and request.generated_tokens == 1:
                self._switching.append(request)
            if self.withholds_decodes:
                self._prefilled_alone.append(request)

    def _end_part(self, request: SimRequest) -> None:
        """End the beginning of a prompt that was cut: its token is none of the request's, and its KV is pinned."""
        self.counters.num_completed_prefill_tokens += request.prefill_tokens - request.num_cached_tokens
        request.part_tokens = request.prefill_tokens
        request.state = RequestState.MOVING
        request.source_table, request.table = request.table, None
        self.pinned_blocks += request.num_blocks
        self.parted.append(request)

    def _hand_off_prefill(self, request: SimRequest, now: float) -> None:
        """End a request's part here with its first token, and pin its KV until ``release``."""
        request.last_token_s = now
        request.num_blocks = -(-request.num_kv_tokens // self.setup.block_size_tokens)
        self.pinned_blocks += request.num_blocks
        self.cache_filled_blocks(request)
        request.source_table, request.table = request.table, None
        self.prefilled.append(request)

    def _join(self, request: SimRequest) -> None:
        request.target = self.engine_id
        self.batch.join(request)

    def _take_in(self, now: float) -> None:
        """Let requests whose KV has arrived join the decodes."""
        arrived, self.arrived = self.arrived, []
        for request in arrived:
            self.num_incoming -= 1
            if self._joins_end_ttft and request.generated_tokens == 1:
                request.first_token_s = request.last_token_s = now
                if self.policy.separates_phases:
                    self._switching.append(request)
            request.is_moved_in = True
            self._join(request)
            self.joined.append(request)
            if isinstance(self.prefills, HostPrefills):
                self.prefills.offer(request, request.num_kv_tokens)

    def _finish(self, request: SimRequest, now: float) -> None:
        """Free what a request held that has its last token."""
        request.state = RequestState.FINISHED
        request.last_token_s = now
        self.cache_filled_blocks(request)
        self.free_kv(request.num_blocks, request.num_kv_tokens, request.table)
        self.finished.append(request)
