"""vLLM's scheduler under Sluice's knobs.

``schedule()`` stays vLLM's own. Before it, the batch policy's limits are set; during it, one hook hands out prefill room
chunk by chunk; after it, classes and sums are brought up to date. ``update_from_output()`` stays vLLM's own too; after it
Algorithm 1 looks at the decodes, and a report goes up beside the tokens.

What an iteration holds (architecture 2): every running decode, then requests whose KV has arrived, both without limit;
then recompute and prefills within the room. vLLM serves its running list in order and its waiting heap by priority, so
both are kept in the policy's order. With chunk size 0 unstarted prompts end here and are named in the report.

Grants are real blocks (``grants.py``): the allocator gives a granted request its own blocks and nobody else's.

Everything of vLLM that is used here and is not public is listed, and checked at start, in ``selfcheck.py``.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from sluice_core.kv import KvBlocks, blocks_for_tokens
from sluice_core.records import MoveCause, Role
from sluice_core.scheduling.batching import BatchLimits, EngineBatch, RequestKind
from sluice_core.strategies import get_strategy
from sluice_engine import core_messages, vllm_check
from sluice_engine.kv_transfer.kv_handles import MalformedHandleError
from sluice_engine.kv_transfer.outgoing_hand_offs import OutgoingHandOffs
from sluice_engine.kv_transfer.resume import GrammarReplayError, replay_grammar, restore_output
from sluice_engine.processes import die_with_parent
from sluice_engine.scheduling.grants import GrantTable
from sluice_engine.scheduling.iteration_recorder import open_recorder
from sluice_engine.scheduling.iteration_timer import IterationTimer, PullRate, describe_batch
from sluice_engine.scheduling.move_proposals import MoveProposer
from sluice_engine.scheduling.report_outbox import ReportOutbox
from sluice_engine.scheduling.request_tracker import RequestTracker, TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# The mixin stands before one of vLLM's schedulers and uses its attributes, which a type checker must not look for here.
_Stock: Any = object

# A pull that has not started by then is given up, in seconds (architecture 4.3).
PULL_START_S = 2.0


class SluiceMixin(_Stock):  # type: ignore[misc]
    """Over ``Scheduler`` and ``AsyncScheduler``; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_check.check_installed()
        super().__init__(*args, **kwargs)
        vllm_check.check_scheduler(self)
        die_with_parent()
        manager = self.kv_cache_manager
        self._kv_connector = self.connector
        self._tracker = RequestTracker(get_strategy("taichi").make_batching())
        self._grants = GrantTable(manager.block_pool)
        self._hand_offs = OutgoingHandOffs(self._kv_connector, self.max_model_len)
        self._moves = MoveProposer(
            max_batch_tokens=self.max_num_scheduled_tokens,
            block_size_tokens=self.block_size,
            max_num_seqs=self.max_num_running_reqs,
        )
        self._timer = IterationTimer()
        self._pull_rate = PullRate()
        self._limits: BatchLimits
        self._room_tokens = 0
        self._last_prefill_s = time.monotonic()
        self._decode_context_tokens = 0
        self._num_preemptions = self._num_moved_in = self._num_recomputed_pulls = 0
        self._outbox = ReportOutbox()
        self._recorder = open_recorder(self.vllm_config.kv_transfer_config.engine_id)
        self._allocate_slots = manager.allocate_slots
        manager.allocate_slots = self._allocate_with_grants

    # --- commands ------------------------------------------------------------------------------------------------

    def carry_out(self, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Carries out a batch of commands (``control.py``), between two iterations."""
        self._grants.expire(time.monotonic())
        return core_messages.encode_answers(
            [self._carry_out(command) for command in core_messages.decode_commands(commands)]
        )

    def _carry_out(self, command: core_messages.Command) -> core_messages.Answer:
        match command:
            case core_messages.ConfigureCommand():
                configured = self._moves.configure(command)
                if self._recorder is not None:
                    self._recorder.note_plan(configured)
                return configured
            case core_messages.GrantCommand():
                return self._grant(command)
            case core_messages.ReleaseGrantCommand():
                self._grants.release_open(command.key)
            case core_messages.HandOffCommand():
                return self._hand_off(command.request_id)
            case core_messages.ReleaseCommand():
                self._release(command.request_id)
            case core_messages.ReadLoadCommand():
                return self._measure_load()
        return core_messages.EmptyAnswer()

    def _grant(self, command: core_messages.GrantCommand) -> core_messages.GrantAnswer:
        num_blocks = blocks_for_tokens(command.num_tokens, self.block_size)
        reason = self._find_refusal(command, num_blocks)
        if not reason and not self._grants.reserve(command.key, num_blocks, time.monotonic() + command.ttl_s):
            reason = "kv"
        return core_messages.GrantAnswer(
            key=command.key, is_granted=not reason, reason=reason, ttl_s=0.0 if reason else command.ttl_s
        )

    def _find_refusal(self, command: core_messages.GrantCommand, num_blocks: int) -> str:
        if self._moves.plan.is_draining:
            return "draining"
        if self._count_seats_taken() >= self.max_num_active_reqs:
            return "seqs"
        kv = self._measure_kv()
        bounds = self._moves.role is Role.PREFILL_HEAVY and command.cause == MoveCause.DEGRADE
        if bounds and kv.used + kv.granted + num_blocks > self._moves.watermark * kv.total:
            return "watermark"
        # Prefills under way need their rest, and whoever waits for room to recompute goes first.
        needed = num_blocks + self._inflight_prefill_reserved_blocks()
        return "kv" if needed > kv.available or self._has_waiting_recompute() else ""

    def _count_seats_taken(self) -> int:
        """Places of the batch that are taken or promised."""
        num_pulling = self._tracker.count(RequestKind.JOINING)
        return len(self.running) + num_pulling + self._grants.num_open

    def _has_waiting_recompute(self) -> bool:
        return any(
            tracked.request.status == RequestStatus.PREEMPTED
            for tracked in self._tracker.of_kind(RequestKind.RECOMPUTE)
        )

    def _hand_off(self, request_id: str) -> core_messages.HandOffAnswer:
        request = self.requests.get(request_id)
        reason = ""
        if request is None or request.is_finished():
            reason = "unknown"
        elif request.status == RequestStatus.PREEMPTED:
            reason = "preempted"
        elif request.status != RequestStatus.RUNNING:
            reason = "waiting"
        elif request.is_prefill_chunk or not request.num_output_tokens:
            reason = "prefill"
        else:
            self._hand_offs.begin(request)
        return core_messages.HandOffAnswer(request_id=request_id, is_accepted=not reason, reason=reason)

    def _release(self, request_id: str) -> None:
        if self._hand_offs.is_pinned(request_id):
            self._hand_offs.release(request_id)
            self._free_blocks(self.requests[request_id])

    # --- requests come and go ------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Takes a request in, with what it brings from elsewhere."""
        extras = core_messages.decode_extras(request.sampling_params.extra_args)
        now_s = time.monotonic()
        tracked = TrackedRequest(
            request=request,
            extras=extras,
            kind=RequestKind.NEW_PROMPT,
            arrival_s=now_s if extras.arrival_s is None else extras.arrival_s,
            user_priority=request.priority,
            first_token_s=extras.first_token_s,
            pull_deadline_s=now_s + PULL_START_S,
        )
        restore_output(request, extras.output_token_ids)
        tracked.kind = self._admit(tracked)
        self._tracker.add(tracked)
        self._outbox.note_submit(extras)
        if self._recorder is not None:
            self._recorder.note_request(tracked)
        super().add_request(request)

    def _admit(self, tracked: TrackedRequest) -> RequestKind:
        """Ties a request to its grant and its KV, and says what it is."""
        request, extras = tracked.request, tracked.extras
        request.kv_transfer_params = None
        if extras.grant_key:
            self._grants.claim(extras.grant_key, request.request_id)
        if extras.transfer_params:
            try:
                self._kv_connector.start_pull(request, extras.transfer_params)
            except MalformedHandleError as error:
                logger.warning("request %s recomputes: %s", request.request_id, error)
                self._num_recomputed_pulls += 1
                return RequestKind.RECOMPUTE
            return RequestKind.JOINING
        return RequestKind.RECOVERY if extras.is_recovery or extras.output_token_ids else RequestKind.NEW_PROMPT

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        status = request.status
        is_ready: bool = super()._handle_blocked_waiting_request(request)
        if is_ready and status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return self._replay_grammar(request)
        if is_ready and status == RequestStatus.WAITING_FOR_REMOTE_KVS and not request.num_computed_tokens:
            # Its pull has failed and its blocks are free. Skipped, it leaves the queue of those that hold blocks, where
            # it would stand in the way of requests that need one token; its place is with the others that recompute.
            self._tracker.place(self._tracker.by_id[request.request_id])
            return False
        return is_ready

    def _replay_grammar(self, request: Request) -> bool:
        try:
            replay_grammar(request)
        except GrammarReplayError as error:
            logger.warning("%s", error)
            self.grammar_compile_error_reqs.add(request.request_id)
            return False
        return True

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        has_failed = request.request_id in self.failed_recving_kv_req_ids
        super()._update_waiting_for_remote_kv(request)
        tracked = self._tracker.by_id[request.request_id]
        if has_failed:
            self._num_recomputed_pulls += 1
            self._tracker.change_kind(tracked, RequestKind.RECOMPUTE)
        else:
            self._num_moved_in += 1
            tracked.is_moved_in = True

    def _give_up_late_pulls(self, now_s: float) -> None:
        for tracked in self._tracker.of_kind(RequestKind.JOINING):
            request = tracked.request
            has_started = not (request.kv_transfer_params or {}).get("do_remote_prefill")
            if has_started or now_s < tracked.pull_deadline_s:
                continue
            self.waiting.remove_request(request)
            self._kv_connector.cancel_pull(request)
            self._num_recomputed_pulls += 1
            self._tracker.change_kind(tracked, RequestKind.RECOMPUTE)
            self._tracker.place(tracked)
            self.waiting.add_request(request)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:  # noqa: FBT001, FBT002
        tracked = self._tracker.by_id[request.request_id]
        if self._hand_offs.cancel(request):
            self._outbox.note_refused(request.request_id, "preempted")
        self._leave_decodes(tracked)
        self._num_preemptions += 1
        self._tracker.change_kind(tracked, RequestKind.RECOMPUTE)
        self._tracker.place(tracked)
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._tracker.recount(tracked)

    def _leave_decodes(self, tracked: TrackedRequest) -> None:
        if tracked.kind is RequestKind.DECODE:
            self._decode_context_tokens -= tracked.request.num_computed_tokens
        self._moves.leave(tracked.request.request_id)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:  # noqa: FBT001, FBT002
        request_id = request.request_id
        self._hand_offs.settle(request)
        tracked = self._tracker.discard(request_id)
        if tracked is not None:
            self._leave_decodes(tracked)
        self._grants.close(request_id)
        result = super()._free_request(request, delay_free_blocks)
        if result[0] is not None and request_id in self.requests:
            self._hand_offs.pin(request_id, self._count_blocks_of(request_id))
            if self._recorder is not None:
                self._recorder.note_hand_off(request_id)
        return result

    def _free_blocks(self, request: Request) -> None:
        self._hand_offs.unpin(request.request_id)
        super()._free_blocks(request)

    def _update_from_kv_xfer_finished(self, kv_connector_output: KVConnectorOutput) -> None:
        kv_connector_output.finished_sending = self._hand_offs.drop_released(kv_connector_output.finished_sending)
        super()._update_from_kv_xfer_finished(kv_connector_output)

    def has_finished_requests(self) -> bool:
        """Also True while something waits to be reported, so that an iteration carries it up."""
        return self._outbox.has_news or super().has_finished_requests()

    # --- an iteration --------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002
        """Schedules the next iteration within the batch policy's limits."""
        started_s = time.perf_counter()
        now_s = time.monotonic()
        self._grants.expire(now_s)
        self._give_up_late_pulls(now_s)
        self._set_limits(now_s)
        output = super().schedule(throttle_prefills)
        if output.total_num_scheduled_tokens:
            self._settle_batch(output, started_s, now_s)
        return output

    def _set_limits(self, now_s: float) -> None:
        count = self._tracker.count
        if not self._tracker.num_queued:
            self._last_prefill_s = now_s
        plan = self._moves.plan
        limits = self._tracker.policy.limits(
            now_s,
            EngineBatch(
                chunk_size_tokens=plan.chunk_size_tokens,
                last_chunk_size_tokens=self._moves.last_chunk_size_tokens,
                max_batch_tokens=self.max_num_scheduled_tokens,
                block_size_tokens=self.block_size,
                num_decodes=count(RequestKind.DECODE) - self._count_ending(),
                num_joining=count(RequestKind.JOINING),
                num_recomputing=count(RequestKind.RECOMPUTE) + count(RequestKind.RECOVERY),
                num_started_prefills=count(RequestKind.STARTED_PREFILL),
                num_new_prompts=count(RequestKind.NEW_PROMPT),
                last_prefill_s=self._last_prefill_s,
                is_draining=plan.is_draining,
            ),
        )
        if limits.returns_new_prompts:
            self._return_new_prompts()
        # When a decode finds no block, vLLM preempts the last request and gives nothing to those behind the one that asked.
        may_preempt = self.kv_cache_manager.block_pool.get_num_free_blocks() < len(self.running)
        if may_preempt or len(self.running) != count(RequestKind.DECODE):
            self.running.sort(key=self._order_running)
        self._limits = limits
        self._room_tokens = limits.prefill_room_tokens

    def _count_ending(self) -> int:
        """Decodes that the next iteration leaves out: their last token comes with the one under way.

        The condition is the stock ``schedule``'s.
        """
        num_ending = 0
        for tracked in self._tracker.of_kind(RequestKind.DECODE):
            request = tracked.request
            in_flight = request.num_output_placeholders
            if (
                in_flight
                and request.num_computed_tokens + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens
            ):
                num_ending += 1
        return num_ending

    def _order_running(self, request: Request) -> tuple[int, float]:
        return int(self._tracker.by_id[request.request_id].kind), request.arrival_time

    def _return_new_prompts(self) -> None:
        request_ids = [tracked.request.request_id for tracked in self._tracker.of_kind(RequestKind.NEW_PROMPT)]
        if request_ids:
            self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
            self._outbox.note_returned(request_ids)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:  # noqa: ARG002
        """Answers vLLM, which asks this of every request before it gives it tokens: here prefill room is handed out."""
        kind = self._tracker.by_id[request.request_id].kind
        if kind is RequestKind.DECODE or kind is RequestKind.JOINING:
            return num_new_tokens  # the stock method is about speculative decoding, which is refused at start
        if self._limits.hides(kind) or (kind is RequestKind.NEW_PROMPT and not self._has_seat()):
            return 0
        room = self._room_tokens
        if kind in (RequestKind.STARTED_PREFILL, RequestKind.NEW_PROMPT):
            room -= self._count_recompute_ahead()
        num_tokens = max(0, min(num_new_tokens, room, self._limits.max_tokens_per_prefill))
        self._room_tokens -= num_tokens
        return num_tokens

    def _has_seat(self) -> bool:
        """True when a new prompt takes no seat that is promised to a request on its way."""
        return bool(self._count_seats_taken() < self.max_num_active_reqs)

    def _count_recompute_ahead(self) -> int:
        """Room that the next waiting recompute will use: vLLM serves running prefills before it looks there."""
        if not self.waiting:
            return 0
        request = self.waiting.peek_request()
        kind = self._tracker.by_id[request.request_id].kind
        if kind not in (RequestKind.RECOMPUTE, RequestKind.RECOVERY):
            return 0
        if blocks_for_tokens(request.num_tokens, self.block_size) > self._measure_kv().available:
            return 0
        _, num_cached_tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
        return int(request.num_tokens - num_cached_tokens)

    def _allocate_with_grants(self, request: Request, num_new_tokens: int, **options: Any) -> Any:
        """Stands in for vLLM's allocator, so that a granted request finds its own blocks free and nobody else."""
        request_id = request.request_id
        if not self._grants.is_claimed_by(request_id):
            return self._allocate_slots(request, num_new_tokens, **options)
        self._grants.lift(request_id)
        options |= {"reserved_blocks": 0, "has_scheduled_reqs": False}
        blocks = self._allocate_slots(request, num_new_tokens, **options)
        if blocks is not None and not options.get("delay_cache_blocks"):
            self._grants.close(request_id)
        else:
            self._grants.lower(request_id, self._count_blocks_of(request_id))
        return blocks

    def _settle_batch(self, output: SchedulerOutput, started_s: float, now_s: float) -> None:
        batch = describe_batch(output, self._tracker, started_s)
        self._decode_context_tokens = batch.decode_context_tokens
        if self._recorder is not None:
            self._recorder.note_batch(output, batch)
        if batch.prefill_tokens:
            self._last_prefill_s = now_s
        for tracked in batch.computing:
            self._tracker.place_running(tracked)
            if not tracked.request.is_prefill_chunk:
                batch.arriving.append(tracked)
                self._tracker.change_kind(tracked, RequestKind.DECODE)
            elif tracked.kind is RequestKind.NEW_PROMPT:
                self._tracker.change_kind(tracked, RequestKind.STARTED_PREFILL)
            else:
                self._tracker.recount(tracked)
        self._timer.start(output, batch)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes an iteration's tokens in, and tells what there is to tell."""
        if model_runner_output.kv_connector_output:
            self._pull_rate.observe(model_runner_output.kv_connector_output.kv_connector_stats)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        measured = self._timer.stop(scheduler_output)
        iteration, proposals = None, []
        if measured is not None:
            batch, iteration = measured
            if self._recorder is not None:
                self._recorder.note_end(iteration.duration_s)
            now_s = time.monotonic()
            self._moves.advance(scheduler_output.num_scheduled_tokens)
            for tracked in batch.arriving:
                if tracked.request.status == RequestStatus.RUNNING and tracked.kind is RequestKind.DECODE:
                    self._moves.join(tracked, now_s)
            proposals = self._moves.propose(now_s, self._measure_kv())
        self._outbox.send(outputs, self._measure_load(), iteration, proposals)
        return outputs

    # --- load -------------------------------------------------------------------------------------------------

    def _measure_kv(self) -> KvBlocks:
        pool = self.kv_cache_manager.block_pool
        total = pool.num_gpu_blocks - 1  # without the null block
        granted = self._grants.num_blocks
        used = total - pool.get_num_free_blocks() - granted
        # Handed-off requests may share blocks of a common prefix, which are then pinned twice.
        pinned = min(used, self._hand_offs.num_pinned_blocks)
        return KvBlocks(total=total, used=used, granted=granted, pinned=pinned)

    def _count_blocks_of(self, request_id: str) -> int:
        return len(self.kv_cache_manager.get_block_ids(request_id)[0])

    def _measure_load(self) -> core_messages.SchedulerLoad:
        kv, tracker, plan = self._measure_kv(), self._tracker, self._moves.plan
        return core_messages.SchedulerLoad(
            queued_prefill_tokens=tracker.queued_prefill_tokens,
            queued_requests=tracker.num_queued,
            queued_attention_work=tracker.queued_attention_work,
            running_decodes=tracker.count(RequestKind.DECODE),
            decode_context_tokens=max(0, self._decode_context_tokens),
            pulling_requests=tracker.count(RequestKind.JOINING),
            kv_blocks_total=kv.total,
            kv_blocks_used=kv.used,
            kv_blocks_granted=kv.granted,
            kv_blocks_pinned=kv.pinned,
            chunk_size_tokens=plan.chunk_size_tokens,
            is_draining=plan.is_draining,
            generation=plan.generation,
            pull_bytes_per_s=self._pull_rate.bytes_per_s,
            num_preemptions=self._num_preemptions,
            num_moved_in=self._num_moved_in,
            num_moved_out=self._hand_offs.num_moved_out,
            num_recomputed_pulls=self._num_recomputed_pulls,
        )


class SluiceScheduler(SluiceMixin, Scheduler):  # type: ignore[misc]
    """For engines that schedule an iteration when the one before it has ended."""


class SluiceAsyncScheduler(SluiceMixin, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule an iteration while another runs."""
