"""Hand-offs where engines schedule ahead: each step waits for the end of an iteration.

Source: vLLM 0.32, ``EngineCore.step_with_batch_queue`` with a queue of 2; ``benchmarks/fidelity`` compares.
"""

from __future__ import annotations

from enum import IntEnum

from sluice_core.kv_copy_rules import count_tail_tokens, is_copy_close
from sluice_core.records import MoveCause, MoveProposal, Role
from sluice_core.sim.block_table import BlockTable
from sluice_core.sim.cluster import SimCluster
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.requests import RequestState, SimRequest


class HandOffStep(IntEnum):
    """The steps of a move, each carried out by its source or its target."""

    GRANT = 0
    HAND_OFF = 1
    SUBMIT = 2
    NOTICE = 3
    JOIN = 4
    RELEASE = 5
    OFFER = 6
    PULL = 7
    COPIED = 8
    WHOLE = 9


# An engine handles messages between two iterations, when the next one is scheduled already. So, counting ends of
# iterations (of an engine at work; an idle one does everything at once):
#
#     source proposes ──► target grants     after 1 of the target's
#                     ──► source offers     after 1 of its own: the full blocks that it has then
#                     ──► target pulls      after 1: they go over the link
#                     ──► target has them   after 3 from their arrival: it asks when it makes up an iteration, and
#                                           hears with that one's output
#                     ──► source hands off  after 2 of its own: the one scheduled already still has the request
#                     ──► request joins     after 1 of the target's, which waits for it before it schedules on
#                     ──► source is free    after 3 of its own
#
# Offer and pull are repeated while much is missing. They are left out for less than a block, and without
# ``SimOptions.copies_kv``. What is left then is more than a tail, and the target pulls it after the hand-off:
#
#                     ──► target pulls      after 1: the KV goes over the link
#                     ──► target notices    after 1 from the KV's arrival
#                     ──► request joins     after 3 more: it hears as above, when another one is scheduled already
#
# Each step up to the last message begins with a message from one engine to the router and on to the other one, which
# takes twice ``SimOptions.message_s``. The request decodes where it is until it is handed off, and pauses until it has
# joined. The tail's own computation, of some tokens in that iteration, takes no time here.
#
# Ends of iterations that each step waits for, on an engine at work.
ITERATION_ENDS = {
    HandOffStep.GRANT: 1,
    HandOffStep.HAND_OFF: 2,
    HandOffStep.SUBMIT: 1,
    HandOffStep.NOTICE: 1,
    HandOffStep.JOIN: 3,
    HandOffStep.RELEASE: 3,
    HandOffStep.OFFER: 1,
    HandOffStep.PULL: 1,
    HandOffStep.COPIED: 3,
    HandOffStep.WHOLE: 0,
}
_AT_SOURCE = (HandOffStep.HAND_OFF, HandOffStep.OFFER)
_WHILE_IT_DECODES = (
    HandOffStep.GRANT,
    HandOffStep.OFFER,
    HandOffStep.PULL,
    HandOffStep.COPIED,
    HandOffStep.HAND_OFF,
)


class SimMove:
    """A move under way; mutable, changed by ``SimHandOffs`` only.

    Args:
        number: Counts the moves.
        request: The request.
        source: Where it runs.
        target: Where it goes.
        cause: Why.
        num_blocks: KV blocks to reserve.
    """

    __slots__ = (
        "batch_epoch",
        "cause",
        "is_cut",
        "is_granted",
        "is_handed_off",
        "is_reading",
        "is_waiting",
        "num_blocks",
        "num_copied_tokens",
        "num_kv_tokens",
        "num_offered_tokens",
        "num_parts",
        "number",
        "renewed_s",
        "request",
        "source",
        "step",
        "table",
        "target",
    )

    def __init__(
        self,
        *,
        number: int,
        request: SimRequest,
        source: SimEngine,
        target: SimEngine,
        cause: MoveCause,
        num_blocks: int,
    ) -> None:
        self.number = number
        self.request = request
        self.batch_epoch = request.batch_epoch
        self.source = source
        self.target = target
        self.cause = cause
        self.num_blocks = num_blocks
        self.is_granted = False
        self.is_handed_off = False  # before there was a target: a finished prefill that waits for a grant
        self.step = HandOffStep.GRANT  # the step that the message or the KV under way leads to
        self.num_kv_tokens = 0  # that the source holds, once it was handed off
        self.table: BlockTable | None = None  # what the source holds, with prefix reuse
        self.num_offered_tokens = self.num_copied_tokens = 0  # from the first one on
        self.num_parts = 0
        self.is_cut = False  # of a prompt whose first part the source computes (``cut_hand_offs``)
        self.is_reading = False  # then: a part of its KV is on its way
        self.is_waiting = False  # then: there is nothing to send before the source's next iteration ends
        self.renewed_s = 0.0  # then: when the grant was given, or the last part came


class SimHandOffs:
    """All moves under way; mutable.

    Args:
        cluster: Whose engines they are between.
    """

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._relay_s = 2.0 * cluster.cell.options.message_s
        self._pending_steps: dict[str, list[tuple[int, HandOffStep, SimMove]]] = {}
        self._at_boundary: SimEngine | None = None
        self._num_moves = 0

    def propose(self, source: SimEngine, proposals: list[MoveProposal]) -> None:
        """Ask targets for grants, between two iterations of the source."""
        outer, self._at_boundary = self._at_boundary, source
        for proposal in proposals:
            self._request_grant(source, proposal)
        self._at_boundary = outer

    def end_iteration(self, engine: SimEngine) -> None:
        """Run the steps of an engine that have waited for enough iterations."""
        pending = self._pending_steps.get(engine.engine_id)
        if pending:
            due = [entry for entry in pending if entry[0] <= engine.iteration]
            if due:
                self._pending_steps[engine.engine_id] = [entry for entry in pending if entry[0] > engine.iteration]
                self._run_steps(engine, due)

    def run_pending_steps(self, engine: SimEngine) -> bool:
        """Run all steps of an engine that has nothing else to do; returns whether there was any."""
        due = self._pending_steps.pop(engine.engine_id, None)
        if not due:
            return False
        self._run_steps(engine, due)
        return True

    def fail(self, engine: SimEngine) -> None:
        """Drop the steps of a dead engine."""
        for _, step, move in self._pending_steps.pop(engine.engine_id, []):
            self._drop_step(step, move)

    def receive(self, move: SimMove) -> None:
        """Take what ``SimMove.step`` says: a message, or the KV."""
        step = move.step
        if step is HandOffStep.NOTICE and self._recover_from_dead_engine(move):
            return
        engine = move.source if step in _AT_SOURCE else move.target
        if engine.is_dead:
            self._drop_step(step, move)
        else:
            self._queue_step(engine, step, move)

    def _request_grant(self, source: SimEngine, proposal: MoveProposal) -> None:
        cluster = self._cluster
        request = cluster.requests[int(proposal.request_id)]
        if request.is_leaving:
            return
        target = cluster.find_target(request, proposal.cause, source, proposal.num_blocks)
        if target is None:
            cluster.num_blocked_moves += 1
            return
        move = self._begin_move(request, source, target, proposal.cause, proposal.num_blocks)
        cluster.note_grant_request(request, target, move.number, move.num_blocks)
        self._send(HandOffStep.GRANT, move)

    def _begin_move(
        self, request: SimRequest, source: SimEngine, target: SimEngine, cause: MoveCause, num_blocks: int
    ) -> SimMove:
        """Make a numbered move of a request, which from now on counts as leaving."""
        self._num_moves += 1
        request.is_leaving = True
        return SimMove(
            number=self._num_moves,
            request=request,
            source=source,
            target=target,
            cause=cause,
            num_blocks=num_blocks,
        )

    def ask_for_room(
        self, request: SimRequest, source: SimEngine, target: SimEngine, at_boundary: SimEngine | None
    ) -> None:
        """Ask for a grant for a finished prefill that was handed off to nobody yet.

        Args:
            request: It.
            source: Where its KV waits.
            target: Where it may go.
            at_boundary: An engine that is between two iterations.
        """
        move = self._begin_move(request, source, target, MoveCause.PREFILL_DONE, request.num_blocks)
        move.is_handed_off = True
        move.num_kv_tokens, move.table = request.num_kv_tokens, request.source_table
        self._cluster.note_grant_request(request, target, move.number, move.num_blocks)
        outer, self._at_boundary = self._at_boundary, at_boundary
        self._send(HandOffStep.GRANT, move)
        self._at_boundary = outer

    def _send(self, step: HandOffStep, move: SimMove) -> None:
        """Send a step to the other engine of a move, through the router."""
        move.step = step
        if self._relay_s:
            self._cluster.send_message(move, self._relay_s)
        else:
            self.receive(move)

    def _drop_step(self, step: HandOffStep, move: SimMove) -> None:
        """Drop a step of a dead engine: the request stays, is recovered, or is recomputed."""
        if step in _WHILE_IT_DECODES:
            self._cancel(move)
        elif step is HandOffStep.SUBMIT or step is HandOffStep.NOTICE:
            self._recover_from_dead_engine(move)
        elif step is HandOffStep.JOIN:
            self._cluster.recover(move.request)

    def _queue_step(self, engine: SimEngine, step: HandOffStep, move: SimMove) -> None:
        """Queue a step of an engine; an idle one runs it at once."""
        due = engine.iteration + ITERATION_ENDS[step]
        if step is HandOffStep.HAND_OFF:
            due = max(due, self._find_planned_end(move))
        if engine.is_running or engine is self._at_boundary:
            self._pending_steps.setdefault(engine.engine_id, []).append((due, step, move))
        else:
            self._run_step(step, move)
            self._cluster.start_engine(engine)

    @staticmethod
    def _find_planned_end(move: SimMove) -> int:
        """Find the iteration with which a part that was planned ends."""
        request = move.request
        if move.cause is not MoveCause.SPLIT or request.state is not RequestState.DECODING:
            return 0
        return request.start_iteration + request.split_tokens

    def _run_steps(self, engine: SimEngine, due: list[tuple[int, HandOffStep, SimMove]]) -> None:
        outer, self._at_boundary = self._at_boundary, engine
        for _, step, move in due:
            self._run_step(step, move)
        self._at_boundary = outer

    def _run_step(self, step: HandOffStep, move: SimMove) -> None:
        if step is HandOffStep.GRANT:
            self._grant(move)
        elif step is HandOffStep.HAND_OFF:
            self._hand_off(move)
        elif step is HandOffStep.OFFER or step is HandOffStep.PULL or step is HandOffStep.COPIED:
            self._copy(step, move)
        elif step is HandOffStep.SUBMIT:
            if not self._recover_from_dead_engine(move):
                self._submit(move)
        elif step is HandOffStep.NOTICE:
            if not self._recover_from_dead_engine(move):
                self._queue_step(move.source, HandOffStep.RELEASE, move)
                self._queue_step(move.target, HandOffStep.JOIN, move)
        elif step is HandOffStep.JOIN:
            move.target.receive(move.request)
        elif not move.source.is_dead:
            move.source.release(move.num_blocks, move.num_kv_tokens, move.table)

    def _grant(self, move: SimMove) -> None:
        target = move.target
        self._cluster.note_grant_answer(move.request, target, move.number)
        if move.is_handed_off:
            self._grant_to_handed_off(move)
        elif not self._still_decodes_at_source(move):
            move.request.is_leaving = False
        elif self._may_grant(move):
            target.reserve(move.num_blocks)
            move.is_granted = True
            num_tokens = move.source.count_tokens(move.request)
            is_copied = (
                self._cluster.cell.options.copies_kv
                and move.cause is not MoveCause.SPLIT  # the source must know its end before it comes there
                and num_tokens > move.source.setup.block_size_tokens
            )
            self._send(HandOffStep.OFFER if is_copied else HandOffStep.HAND_OFF, move)
        else:
            move.request.is_leaving = False
            self._cluster.num_blocked_moves += 1

    def _copy(self, step: HandOffStep, move: SimMove) -> None:
        """Run a step of a copy, while the request still decodes at its source."""
        source = move.source
        if move.target.is_dead or not self._still_decodes_at_source(move):
            self._cancel(move)
            return
        num_tokens, block_size = source.count_tokens(move.request), source.setup.block_size_tokens
        if step is HandOffStep.OFFER:
            move.num_offered_tokens = (num_tokens - 1) // block_size * block_size
            has_more = move.num_offered_tokens > move.num_copied_tokens
            self._send(HandOffStep.PULL if has_more else HandOffStep.HAND_OFF, move)
        elif step is HandOffStep.PULL:
            move.step = HandOffStep.COPIED
            move.num_parts += 1
            self._cluster.copy(source, move.num_offered_tokens - move.num_copied_tokens, move)
        else:
            move.num_copied_tokens = move.num_offered_tokens
            is_close = is_copy_close(num_tokens, move.num_copied_tokens, move.num_parts, block_size)
            self._send(HandOffStep.HAND_OFF if is_close else HandOffStep.OFFER, move)

    def _submit(self, move: SimMove) -> None:
        """Let a request that was handed off join, if but a tail of it is missing; else its KV follows."""
        request, num_copied = move.request, move.num_copied_tokens
        num_missing = request.num_kv_tokens - num_copied
        if self._cluster.cell.options.copies_kv and (
            num_missing <= 0 or count_tail_tokens(num_missing, num_copied, move.target.setup.block_size_tokens)
        ):
            self._cluster.begin_move(request, move.cause)
            self._queue_step(move.source, HandOffStep.RELEASE, move)
            move.target.receive(request)
            return
        move.step = HandOffStep.NOTICE
        self._cluster.send(request, move.source, move.cause, move, num_copied)

    def _grant_to_handed_off(self, move: SimMove) -> None:
        request, target = move.request, move.target
        if request.state is not RequestState.PARKED:
            return  # its wait has ended, or its source has died
        request.is_leaving = False
        if not self._may_grant(move):
            self._cluster.num_blocked_moves += 1
            return
        target.reserve(move.num_blocks)
        request.state = RequestState.MOVING
        request.target = target.engine_id
        self._send(HandOffStep.SUBMIT, move)

    def _may_grant(self, move: SimMove) -> bool:
        """Say whether the target has the room now that its router believed it to have, as the engine's grants do."""
        target, prefills = move.target, move.target.prefills
        if target.is_draining or target.num_incoming + target.count_running() >= target.setup.max_num_seqs:
            return False
        if target.role is Role.PREFILL_HEAVY and move.cause is MoveCause.DEGRADE:
            most_blocks = self._cluster.cell.parameters.watermark * target.total_blocks
            if target.used_blocks + target.granted_blocks + move.num_blocks > most_blocks:
                return False
        # Prefills under way need their rest, and whoever waits for room to recompute goes first.
        num_needed = move.num_blocks + prefills.count_blocks_to_come()
        return num_needed <= target.free_blocks and not prefills.has_waiting_recompute()

    def _hand_off(self, move: SimMove) -> None:
        request, target = move.request, move.target
        if target.is_dead or not self._still_decodes_at_source(move):
            self._cancel(move)
            return
        more = move.source.count_blocks(request) - move.num_blocks
        if more > target.free_blocks:
            self._cancel(move)
            return
        move.source.hand_off(request.request_id, self._cluster.now)
        move.table = request.source_table
        move.num_kv_tokens = request.num_kv_tokens
        target.reserve_more(more)
        move.num_blocks += more
        assert move.num_blocks == request.num_blocks
        request.is_leaving = False
        request.state = RequestState.MOVING
        request.source, request.target = move.source.engine_id, target.engine_id
        if move.cause is MoveCause.BACKFLOW:
            request.reset_tokens = request.generated_tokens
        self._send(HandOffStep.SUBMIT, move)

    def _still_decodes_at_source(self, move: SimMove) -> bool:
        request = move.request
        return (
            request.state is RequestState.DECODING
            and request.batch_epoch == move.batch_epoch
            and not move.source.is_dead
        )

    def _cancel(self, move: SimMove) -> None:
        """Cancel a move; the request stays where it is, or has ended there."""
        move.request.is_leaving = False
        target = move.target
        if move.is_granted and not target.is_dead:
            target.cancel_grant(move.num_blocks)
            if target is not self._at_boundary:
                self._cluster.start_engine(target)  # it may have idled for want of these blocks

    def _recover_from_dead_engine(self, move: SimMove) -> bool:
        """Settle a move after the hand-off one of whose engines has died; say whether that is so."""
        target = move.target
        if target.is_dead:
            self._place_again(move)
            return True
        if move.source.is_dead:
            target.recompute_arrival(move.request)
            self._cluster.start_engine(target)
            return True
        return False

    def _place_again(self, move: SimMove) -> None:
        """Place a request again that was handed off in vain; its source frees the KV, if it lives."""
        source = move.source
        if not source.is_dead:
            source.release(move.num_blocks, move.num_kv_tokens, move.table)
            self._cluster.start_engine(source)
        self._cluster.recover(move.request)
