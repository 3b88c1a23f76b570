"""vLLM's scheduler under Sluice's batch policy.

``schedule()`` and ``update_from_output()`` stay vLLM's own. The mixin overrides the methods that they call, and hands
each concern to its module: grants, prefill budget, pulls, hand-offs, proposals, load.

An iteration holds every running decode, then requests whose KV has arrived, both without limit; then recomputes and
prefills within the prefill budget. ``vllm_internals_check`` lists everything of vLLM that is used here and is not
public.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.records import MoveCause
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_engine import core_encoding, core_messages, core_refusal, vllm_internals_check
from sluice_engine.child_processes import die_with_parent
from sluice_engine.kv_transfer.grants import EngineRoom, GrantAllocator, GrantTable, answer_grant
from sluice_engine.kv_transfer.incoming_pulls import IncomingPulls
from sluice_engine.kv_transfer.kv_offers import KvOffers
from sluice_engine.kv_transfer.outgoing_hand_offs import OutgoingHandOffs
from sluice_engine.kv_transfer.output_replay import GrammarReplayError, replay_grammar, restore_output
from sluice_engine.kv_transfer.part_pulls import PartPulls
from sluice_engine.request_tracker import RequestTracker, track_request
from sluice_engine.scheduling.expected_arrivals import ExpectedArrivals
from sluice_engine.scheduling.fidelity_recorder import open_recorder
from sluice_engine.scheduling.iteration_timer import IterationTimer
from sluice_engine.scheduling.kv_usage import KvUsage
from sluice_engine.scheduling.load_report import measure_load
from sluice_engine.scheduling.move_proposals import MoveProposer
from sluice_engine.scheduling.phase_tracker import PhaseTracker
from sluice_engine.scheduling.prefill_chunks import PrefillChunks
from sluice_engine.scheduling.prefill_selection import PrefillSelection
from sluice_engine.scheduling.prefix_recorder import PrefixRecorder
from sluice_engine.scheduling.received_plan import ReceivedPlan
from sluice_engine.scheduling.report_outbox import ReportOutbox
from sluice_engine.scheduling.scheduled_batch import describe_batch, settle_batch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

    from sluice_engine.scheduling.scheduled_batch import ScheduledBatch

logger = logging.getLogger(__name__)
_DECODE = RequestKind.DECODE  # looked up for every decode of every iteration

# The mixin stands before one of vLLM's schedulers and uses its attributes, which a type checker must not look for here.
_Stock: Any = object


class SluiceMixin(_Stock):  # type: ignore[misc]
    """Over ``Scheduler`` and ``AsyncScheduler``; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_internals_check.check_installed()
        super().__init__(*args, **kwargs)
        with core_refusal.reported():
            vllm_internals_check.check_scheduler(self)
        die_with_parent()
        manager = self.kv_cache_manager
        decodes = DecodeSet(block_size_tokens=self.block_size, max_num_seqs=self.max_num_running_reqs)
        self._plan = ReceivedPlan(decodes, max_batch_tokens=self.max_num_scheduled_tokens)
        self._moves = MoveProposer(decodes, self._plan)
        self._tracker = RequestTracker(self._plan.policy)
        self._grants = GrantTable(manager.block_pool)
        self._hand_offs = OutgoingHandOffs(self.connector, self.max_model_len)
        self._offers = KvOffers(self.connector, manager, self.block_size)
        self._outbox = ReportOutbox()
        self._pulls = IncomingPulls(self.connector, self._tracker, self._outbox.note_pulled, self.block_size)
        self._part_pulls = PartPulls(
            self.connector,
            manager,
            self._grants,
            block_size_tokens=self.block_size,
            hash_algorithm=self.vllm_config.cache_config.prefix_caching_hash_algo,
        )
        self._arrivals = ExpectedArrivals()
        self._kv_usage = KvUsage(manager, self._grants, self._hand_offs)
        self._allocator = GrantAllocator(manager, self._grants, self._kv_usage.count_blocks_of)
        self._prefill_chunks = PrefillChunks(
            self._tracker,
            manager,
            self._kv_usage,
            max_batch_tokens=self.max_num_scheduled_tokens,
            block_size_tokens=self.block_size,
            now_s=time.monotonic(),
        )
        self._selection = PrefillSelection(self._tracker, self._kv_usage)
        self._timer = IterationTimer()
        self._phases = PhaseTracker(self._tracker)
        self._prefixes = self.kv_event_publisher = PrefixRecorder()
        self._recorder = open_recorder(self.vllm_config.kv_transfer_config.engine_id)
        self._num_preemptions = 0

    # --- commands of the serving process, between two iterations ---------------------------------------------------

    def carry_out(self, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Carries out a batch of commands (``core_messages``)."""
        self._grants.expire(time.monotonic())
        self._offers.expire(time.monotonic())
        return core_encoding.encode_answers(
            [self._carry_out(command) for command in core_encoding.decode_commands(commands)]
        )

    def _carry_out(self, command: core_messages.Command) -> core_messages.Answer:
        match command:
            case core_messages.ConfigureCommand():
                return self._configure(command)
            case core_messages.GrantCommand():
                return self._grant(command)
            case core_messages.ReleaseGrantCommand():
                self._grants.release_open(command.key)
                self._arrivals.forget(command.key)
            case core_messages.OfferCommand():
                return self._offers.offer(command, self.requests.get(command.request_id), time.monotonic())
            case core_messages.ReleaseOfferCommand():
                self._offers.release(command.key)
            case core_messages.PullPartCommand():
                self._pull_part(command)
            case core_messages.HandOffCommand():
                return self._request_hand_off(command)
            case core_messages.ReleaseCommand():
                self._release(command.request_id)
            case core_messages.ReadLoadCommand():
                load = self._measure_load()
                return core_messages.CompilingAnswer(load=load) if self._is_compiling() else load
        return core_messages.EmptyAnswer()

    def _configure(self, command: core_messages.ConfigureCommand) -> core_messages.ConfigureAnswer:
        answer = self._plan.configure(command)
        if self._plan.policy is not self._tracker.policy:
            self._adopt_policy()
        if self._recorder is not None:
            self._recorder.note_plan(answer)
        return answer

    def _adopt_policy(self) -> None:
        """Puts every request into the order of the policy in force; the heap holds none while its place changes."""
        self._selection.adopt(self._plan.policy)
        for queue in (self.waiting, self.kv_holding_waiting):
            requests = list(queue)
            queue.remove_requests(requests)
            for request in requests:
                self._tracker.place(self._tracker.by_id[request.request_id])
                queue.add_request(request)
        for request in self.running:
            self._tracker.place_running(self._tracker.by_id[request.request_id])

    def _grant(self, command: core_messages.GrantCommand) -> core_messages.GrantAnswer:
        room = EngineRoom(
            is_draining=self._plan.command.is_draining,
            share=self._plan.policy.share_for(self._plan.role, MoveCause(command.cause)),
            has_seat=self._has_seat(),
            kv=self._kv_usage.measure(),
            num_prefill_blocks=self._inflight_prefill_reserved_blocks(),
            is_recompute_waiting=self._is_recompute_waiting(),
        )
        num_blocks = blocks_for_tokens(command.num_tokens, self.block_size)
        return answer_grant(command, num_blocks, room, self._grants, time.monotonic())

    def _pull_part(self, command: core_messages.PullPartCommand) -> None:
        answer = self._part_pulls.pull(command, time.monotonic())
        if answer is not None:
            self._note_pulled(answer)

    def _note_pulled(self, answer: core_messages.PulledPart) -> None:
        self._outbox.note_pulled(answer)
        if not answer.reason:
            self._arrivals.expect(answer.key, time.monotonic())

    def find_wait_s(self) -> float:
        """Finds for how long the next iteration is to be made up later, because a request is about to arrive."""
        return self._timer.find_wait_s() if self._arrivals.has_any(time.monotonic()) else 0.0

    def _request_hand_off(self, command: core_messages.HandOffCommand) -> core_messages.HandOffAnswer:
        request = self.requests.get(command.request_id)
        answer = self._hand_offs.request(command.request_id, request, command.num_output_tokens)
        self._tracker.ending.reconsider(command.request_id)
        return answer

    def _release(self, request_id: str) -> None:
        if self._hand_offs.is_pinned(request_id):
            self._hand_offs.release(request_id)
            self._free_blocks(self.requests[request_id])

    def _has_seat(self) -> bool:
        """True when the batch has a place that is neither taken nor promised to a request on its way."""
        num_taken = len(self.running) + self._tracker.count(RequestKind.JOINING) + self._grants.num_open
        return bool(num_taken < self.max_num_active_reqs)

    def _is_recompute_waiting(self) -> bool:
        return any(
            tracked.request.status == RequestStatus.PREEMPTED
            for tracked in self._tracker.of_kind(RequestKind.RECOMPUTE)
        )

    # --- waiting ---------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Takes a request in, with the output and the KV that it brings from another engine."""
        now_s = time.monotonic()
        tracked = track_request(request, now_s)
        restore_output(request, tracked.extras.output_token_ids)
        self._grants.claim(tracked.extras.grant_key, request.request_id)
        self._arrivals.forget(tracked.extras.grant_key)
        num_copied_tokens = self._grants.count_held(tracked.extras.grant_key) * self.block_size
        tracked.kind = self._pulls.classify(tracked, now_s, num_copied_tokens)
        if tracked.extras.is_first_part:
            self._hand_offs.begin_first_part(request)
        self._tracker.add(tracked)
        self._outbox.note_submit(tracked.extras)
        if self._recorder is not None:
            self._recorder.note_request(tracked)
        super().add_request(request)

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
        return is_ready and not self._waits_for_room(request)

    def _waits_for_room(self, request: Request) -> bool:
        """Says whether a prompt whose first part has come would find no room in this iteration, and must be skipped.

        It would stand in the way of requests that need one token.
        """
        tracked = self._tracker.by_id[request.request_id]
        if not request.num_computed_tokens or tracked.kind is not RequestKind.STARTED_PREFILL:
            return False
        num_left, context_tokens = request.num_tokens - request.num_computed_tokens, request.num_computed_tokens
        return not self._prefill_chunks.fit(
            tracked.kind, num_left, num_left, self.waiting, context_tokens=context_tokens
        )

    def _replay_grammar(self, request: Request) -> bool:
        try:
            replay_grammar(request)
        except GrammarReplayError as error:
            logger.warning("%s", error)
            self.grammar_compile_error_reqs.add(request.request_id)
            return False
        return True

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        # vLLM forgets the failure in its own method.
        has_failed = request.request_id in self.failed_recving_kv_req_ids
        super()._update_waiting_for_remote_kv(request)
        self._pulls.finish(self._tracker.by_id[request.request_id], has_failed=has_failed)

    def _cancel_late_pulls(self, now_s: float) -> None:
        for tracked in self._pulls.find_late(now_s):
            # A request's place in the waiting heap changes only while the heap does not hold it.
            self.waiting.remove_request(tracked.request)
            self._pulls.cancel(tracked)
            self.waiting.add_request(tracked.request)

    def _return_new_prompts(self) -> None:
        request_ids = [tracked.request.request_id for tracked in self._tracker.of_kind(RequestKind.NEW_PROMPT)]
        if request_ids:
            self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
            self._outbox.note_returned(request_ids)

    # --- running ---------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002
        """Schedules the next iteration within the batch policy's limits."""
        started_s = time.perf_counter()
        now_s = time.monotonic()
        self._grants.expire(now_s)
        self._offers.expire(now_s)
        self._cancel_late_pulls(now_s)
        num_under_way, under_way_s = (
            self._timer.estimate_rest_s(self._plan.latency) if self._plan.policy.uses_latency else (0, 0.0)
        )
        limits = self._prefill_chunks.renew(
            self._plan.command,
            self._plan.last_chunk_size_tokens,
            now_s,
            num_under_way=num_under_way,
            under_way_s=under_way_s,
        )
        if limits.returns_new_prompts:
            self._return_new_prompts()
        self._selection.renew(now_s, self._prefill_chunks.batch, self.waiting, has_seat=self._has_seat())
        self._order_running()
        output = super().schedule(throttle_prefills)
        self._selection.note_scheduled(output.total_num_scheduled_tokens)
        self._prefill_chunks.note_scheduled(output.total_num_scheduled_tokens)
        if output.total_num_scheduled_tokens:
            self._settle_batch(output, started_s, now_s)
        return output

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Hands out the prefill budget: vLLM calls this for every request before it gives it tokens."""
        tracked = self._tracker.by_id[request.request_id]
        if tracked.kind is _DECODE:
            # Decodes are never cut; speculative decoding, the method's purpose, is refused. vLLM leaves out of the
            # iteration whoever gets 0, and serves those behind it.
            return 0 if self._prefill_chunks.withholds_decodes else num_new_tokens
        if tracked.kind is RequestKind.JOINING and tracked.num_brought_tokens:
            self._pulls.finish(tracked, has_failed=False)  # what it would pull is in the prefix cache
        kind = tracked.kind
        if kind is RequestKind.JOINING:
            return 0 if self._prefill_chunks.hides(kind) else num_new_tokens
        if self._selection.hides(tracked) or (kind is RequestKind.NEW_PROMPT and not self._has_seat()):
            return 0
        return self._prefill_chunks.take(
            kind,
            num_new_tokens,
            request.num_tokens - num_computed_tokens,
            self.waiting,
            context_tokens=num_computed_tokens,
        )

    def _settle_batch(self, output: SchedulerOutput, started_s: float, now_s: float) -> None:
        batch = describe_batch(output, self._tracker, started_s)
        if self._recorder is not None:
            self._recorder.note_batch(output, batch)
        if batch.prefill_tokens:
            self._prefill_chunks.note_prefill(now_s)
        self._phases.note_batch(now_s, batch)
        for tracked in batch.computing:
            if tracked.kind is RequestKind.JOINING and not tracked.is_moved_in:
                self._pulls.finish(tracked, has_failed=False)  # there was nothing to wait for
            if tracked.kind is RequestKind.NEW_PROMPT and tracked.extras.is_first_part:
                self._moves.begin(tracked, self._kv_usage.count_blocks_of(tracked.request.request_id))
        settle_batch(batch, self._tracker)
        if batch.new_decodes and self._plan.policy.hands_off_prefills(self._plan.role):
            self._hand_off_prefills(batch)
        self._timer.start(output, batch)

    def _hand_off_prefills(self, batch: ScheduledBatch) -> None:
        """Lets the prefills that end now end here; one that recovers tokens decodes where it is."""
        for tracked in batch.new_decodes:
            if not tracked.request.num_output_tokens:
                self._hand_offs.begin(tracked.request)
                self._tracker.ending.reconsider(tracked.request.request_id)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes an iteration's tokens in, and adds a report to them."""
        if model_runner_output.kv_connector_output:
            self._pulls.observe_rate(model_runner_output.kv_connector_output.kv_connector_stats)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        iteration, proposals = None, []
        measured = self._timer.stop(scheduler_output)
        if measured is not None:
            batch, iteration = measured
            self._selection.observe(iteration)
            if self._plan.policy.uses_latency:
                shape = batch.make_shape()
                if self._plan.policy.records_iterations:
                    self._plan.policy.record_iteration(shape, iteration.duration_s)
                self._plan.latency.observe(shape, iteration.duration_s)
            if self._recorder is not None:
                self._recorder.note_end(iteration.duration_s)
            proposals = self._propose_moves(scheduler_output, batch)
        self._outbox.send(outputs, self._measure_load(), iteration, proposals, self._prefixes.take())
        return outputs

    def _propose_moves(
        self, scheduler_output: SchedulerOutput, batch: ScheduledBatch
    ) -> list[core_messages.ProposedMove]:
        now_s = time.monotonic()
        self._moves.advance(scheduler_output.num_scheduled_tokens)
        for tracked in batch.new_decodes:
            # It may have ended with its first token, or been preempted since it was scheduled.
            if tracked.request.status == RequestStatus.RUNNING and tracked.kind is RequestKind.DECODE:
                self._moves.join(tracked, now_s)
        return self._moves.propose(now_s, self._kv_usage.measure())

    def _is_compiling(self) -> bool:
        """Whether no iteration is due, although there are requests: one waits for its grammar, and nothing runs."""
        waits = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return not self.running and any(tracked.request.status == waits for tracked in self._tracker.by_id.values())

    def _measure_load(self) -> core_messages.SchedulerLoad:
        now_s = time.monotonic()
        return measure_load(
            self._plan.command,
            self._tracker,
            self._kv_usage.measure(),
            pulls=self._pulls,
            hand_offs=self._hand_offs,
            num_preemptions=self._num_preemptions,
            num_suspended=self._selection.num_suspended,
            now_s=now_s,
            phase=self._phases.describe(now_s, is_prefilling=self._is_prefilling()),
            num_phase_switches=self._phases.num_switches,
            under_way=self._timer.describe_under_way(),
        )

    def _is_prefilling(self) -> bool:
        """True while prefills wait or run."""
        return self._tracker.num_queued > 0 or self._timer.has_prefills()

    # --- preempt ---------------------------------------------------------------------------------------------------

    def _order_running(self) -> None:
        """Puts the running list in the batch policy's order, where it makes a difference.

        When a decode finds no block, vLLM preempts the last request, and gives nothing to those behind that decode.
        """
        may_preempt = self.kv_cache_manager.block_pool.get_num_free_blocks() < len(self.running)
        if may_preempt or len(self.running) != self._tracker.count(RequestKind.DECODE):
            self.running.sort(key=self._tracker.running_key)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:  # noqa: FBT001, FBT002
        tracked = self._tracker.by_id[request.request_id]
        if self._hand_offs.cancel(request):
            self._outbox.note_refused(request.request_id, "preempted")
        self._moves.leave(request.request_id)
        self._num_preemptions += 1
        # Before vLLM's own method, which puts the request into the waiting heap.
        self._tracker.change_kind(tracked, RequestKind.RECOMPUTE)
        self._tracker.place(tracked)
        super()._preempt_request(request, timestamp, drop_stale_output)
        # After it, because it sets the computed tokens to 0.
        self._tracker.recount(tracked)

    # --- finish ----------------------------------------------------------------------------------------------------

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:  # noqa: FBT001, FBT002
        request_id = request.request_id
        self._hand_offs.settle(request)
        if self._tracker.discard(request_id) is not None:
            self._moves.leave(request_id)
        self._grants.close(request_id)
        result = super()._free_request(request, delay_free_blocks)
        # With parameters for a reader and its record kept, the request's blocks wait to be read.
        if result[0] is not None and request_id in self.requests:
            self._hand_offs.pin(request_id, self._kv_usage.count_blocks_of(request_id))
            if self._recorder is not None:
                self._recorder.note_hand_off(request_id)
        return result

    def _free_blocks(self, request: Request) -> None:
        self._hand_offs.unpin(request.request_id)
        super()._free_blocks(request)

    def _update_from_kv_xfer_finished(self, kv_connector_output: KVConnectorOutput) -> None:
        sent = self._offers.take_ended(kv_connector_output.finished_sending)
        kv_connector_output.finished_sending = self._hand_offs.drop_released(sent)
        kv_connector_output.finished_recving, answers = self._part_pulls.take_ended(
            kv_connector_output.finished_recving, kv_connector_output.failed_recving, time.monotonic()
        )
        for answer in answers:
            self._note_pulled(answer)
        super()._update_from_kv_xfer_finished(kv_connector_output)

    def has_finished_requests(self) -> bool:
        """Also True while something waits to be reported, or parts are read, so that an iteration hears of it."""
        has_news = self._outbox.has_news or self._part_pulls.is_reading
        return has_news or super().has_finished_requests()


class SluiceScheduler(SluiceMixin, Scheduler):  # type: ignore[misc]
    """For engines that schedule an iteration when the one before it has ended."""


class SluiceAsyncScheduler(SluiceMixin, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule an iteration while another runs."""
