"""Hand-offs of prompts that are cut, where engines schedule ahead: each step waits for the end of an iteration.

The steps are those of ``hand_offs``, as long as they take there. The source proposes when the beginning has got its
first chunk, and hands off at the cut by itself:

    target grants ──► source offers ──► target pulls ──► target has them ──► source offers ...
    source is done ──► request joins, if but a tail is missing, which is computed there; else target pulls
                   ──► asked again, if there is no grant; refused, the source computes the rest too

An engine that has nothing to offer offers again when its next iteration has ended. What is on its way when the
beginning ends is waited for.

Source: the router's ``migration``, ``copy_progress`` and ``kept_prefills``.
"""

from __future__ import annotations

from typing import Final

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.kv_copy_rules import count_tail_tokens
from sluice_core.records import MoveCause
from sluice_core.sim.cluster import SimCluster
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.moves.hand_offs import HandOffStep, SimHandOffs, SimMove
from sluice_core.sim.requests import SimRequest

GRANT_TTL_S: Final = 2.0  # of a grant, from its answer and from each part on; as engines have it


class CutHandOffs(SimHandOffs):
    """All moves under way, those of prompts that are cut included; mutable.

    A move holds for its request as long as the request has its number. Each message is for one number, so that none is
    taken for another one.

    Args:
        cluster: Whose engines they are between.
    """

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(cluster)
        self._moves: dict[int, SimMove] = {}  # of cut prompts
        self._kept: dict[int, SimRequest] = {}  # their beginning has ended, and is submitted nowhere yet

    def begin_parts(self, source: SimEngine, begun: list[SimRequest]) -> None:
        """Ask for room for beginnings that have got their first chunk, between two iterations of the source."""
        outer, self._at_boundary = self._at_boundary, source
        for request in begun:
            self._ask_for_part(request, source)
        self._at_boundary = outer

    def end_parts(self, source: SimEngine, computing: list[SimRequest], parted: list[SimRequest]) -> None:
        """Go on with beginnings at the end of an iteration.

        Args:
            source: Where they are, between two iterations.
            computing: Those that have not ended.
            parted: Those that have.
        """
        outer, self._at_boundary = self._at_boundary, source
        for request in computing:
            move = self._moves.get(request.index)
            if move is None or move.number != request.part_move or not move.is_granted:
                continue
            if self._cluster.now - move.renewed_s > GRANT_TTL_S and not move.is_reading:
                self._end_part_move(request)
            elif move.is_waiting:
                move.is_waiting = False
                self._send(HandOffStep.OFFER, move)
        for request in parted:
            request.source = source.engine_id
            self._kept[request.index] = request
            move = self._moves.get(request.index)
            if move is None or not self._holds(move):
                self._ask_once_more(request, source)
            elif move.target.is_dead:
                self._lose_target(move)
            elif move.is_granted and not move.is_reading:
                self._submit_part(move)
        self._at_boundary = outer

    def fail(self, engine: SimEngine) -> None:
        """See ``SimHandOffs.fail``."""
        super().fail(engine)
        lost = [request for request in self._kept.values() if request.source == engine.engine_id]
        for request in lost:
            del self._kept[request.index]
            self._cluster.hold(request)

    def receive(self, move: SimMove) -> None:
        """See ``SimHandOffs.receive``."""
        if not move.is_cut:
            super().receive(move)
        elif move.step is HandOffStep.WHOLE:
            if self._holds(move):
                self._go_on_whole(move.request, move.source)
        elif move.step is not HandOffStep.NOTICE or not self._settle_dead_engine(move):
            engine = move.source if move.step is HandOffStep.OFFER else move.target
            if engine.is_dead:
                self._drop_step(move.step, move)
            else:
                self._queue_step(engine, move.step, move)

    def _ask_for_part(self, request: SimRequest, source: SimEngine) -> bool:
        """Ask the planned engine for room; returns whether there is one to ask."""
        cluster = self._cluster
        num_blocks = blocks_for_tokens(request.prompt_tokens + 1, source.setup.block_size_tokens)
        target = cluster.find_target(request, MoveCause.SPLIT, source, num_blocks)
        if target is None:
            cluster.num_blocked_moves += 1
            return False
        move = self._begin_part(request, source, target, num_blocks)
        cluster.note_grant_request(request, target, move.number, num_blocks)
        self._send(HandOffStep.GRANT, move)
        return True

    def _begin_part(self, request: SimRequest, source: SimEngine, target: SimEngine, num_blocks: int) -> SimMove:
        self._num_moves += 1
        request.part_move = self._num_moves
        move = self._moves[request.index] = SimMove(
            number=self._num_moves,
            request=request,
            source=source,
            target=target,
            cause=MoveCause.SPLIT,
            num_blocks=num_blocks,
        )
        move.is_cut = True
        move.renewed_s = self._cluster.now
        return move

    def _drop_step(self, step: HandOffStep, move: SimMove) -> None:
        if not move.is_cut:
            super()._drop_step(step, move)
        elif step is HandOffStep.SUBMIT or step is HandOffStep.NOTICE:
            self._settle_dead_engine(move)
        elif step is HandOffStep.JOIN:
            self._cluster.recover(move.request)
        else:
            self._lose_target(move)

    def _run_step(self, step: HandOffStep, move: SimMove) -> None:
        if not move.is_cut or step is HandOffStep.RELEASE:
            super()._run_step(step, move)
        elif step is HandOffStep.SUBMIT:
            if not self._settle_dead_engine(move):
                self._take_over(move)
        elif step is HandOffStep.NOTICE:
            if not self._settle_dead_engine(move):
                self._queue_step(move.source, HandOffStep.RELEASE, move)
                self._queue_step(move.target, HandOffStep.JOIN, move)
        elif step is HandOffStep.JOIN:
            self._join(move, move.num_kv_tokens)
        elif step is HandOffStep.GRANT:
            self._grant_part(move)
        elif self._holds(move):
            self._copy_part(step, move)

    def _grant_part(self, move: SimMove) -> None:
        request, cluster = move.request, self._cluster
        cluster.note_grant_answer(request, move.target, move.number)
        if not self._holds(move):
            return
        if not self._may_grant(move):
            cluster.num_blocked_moves += 1
            request.part_move = 0
            if request.index in self._kept:
                self._send_whole(request, move.source)
            return
        move.target.keep_room(request, move.num_blocks)
        move.is_granted = True
        move.renewed_s = cluster.now
        move.num_copied_tokens = request.sent_tokens
        options = cluster.cell.options
        if request.index in self._kept:
            self._submit_part(move)
        elif options.copies_kv and options.sends_parts and request.split_token > move.source.setup.block_size_tokens:
            self._send(HandOffStep.OFFER, move)

    def _copy_part(self, step: HandOffStep, move: SimMove) -> None:
        """Run a step of the copy that follows the beginning."""
        source, request = move.source, move.request
        block_size = source.setup.block_size_tokens
        if step is HandOffStep.OFFER:
            if move.target.is_dead:
                self._lose_target(move)
                return
            num_tokens = min(request.num_computed_tokens, request.split_token) // block_size * block_size
            if num_tokens <= move.num_copied_tokens:
                move.is_waiting = True
                return
            move.num_offered_tokens = num_tokens
            move.is_reading = True
            self._send(HandOffStep.PULL, move)
        elif step is HandOffStep.PULL:
            move.step = HandOffStep.COPIED
            move.num_parts += 1
            num_tokens = move.num_offered_tokens - move.num_copied_tokens
            self._cluster.copy(source, num_tokens, move, is_ahead=True)
        else:
            move.num_copied_tokens = move.num_offered_tokens
            move.is_reading = False
            move.renewed_s = self._cluster.now
            if request.index in self._kept:
                self._submit_part(move)
            elif move.num_copied_tokens + block_size <= request.split_token:
                self._send(HandOffStep.OFFER, move)

    def _submit_part(self, move: SimMove) -> None:
        """Submit a prompt whose beginning waits to the engine that has granted it room.

        Under a new number: what was asked of the source meanwhile is not waited for.
        """
        request = move.request
        del self._kept[request.index]
        submit = self._begin_part(request, move.source, move.target, move.num_blocks)
        submit.is_granted = True
        submit.num_copied_tokens, submit.num_parts = move.num_copied_tokens, move.num_parts
        submit.num_kv_tokens, submit.table = request.part_tokens, request.source_table
        request.source_table = None
        submit.num_blocks = request.num_blocks  # that the source has, from now on
        request.target = move.target.engine_id
        self._send(HandOffStep.SUBMIT, submit)

    def _take_over(self, move: SimMove) -> None:
        """Let a prompt go on, if but a tail of its beginning is missing; else the KV follows."""
        cluster, num_copied = self._cluster, move.num_copied_tokens
        num_missing = move.num_kv_tokens - num_copied
        move.request.num_moves += 1
        cluster.num_moves[MoveCause.SPLIT] += 1
        if num_missing <= 0 or count_tail_tokens(num_missing, num_copied, move.target.setup.block_size_tokens):
            self._queue_step(move.source, HandOffStep.RELEASE, move)
            self._join(move, min(num_copied, move.num_kv_tokens))
            return
        move.step = HandOffStep.NOTICE
        cluster.send_part(move.request, move.source, num_missing, move)

    def _join(self, move: SimMove, num_tokens: int) -> None:
        self._cluster.num_cut += 1
        del self._moves[move.request.index]
        move.target.take_part(move.request, num_tokens)

    def _ask_once_more(self, request: SimRequest, source: SimEngine) -> None:
        if not self._ask_for_part(request, source):
            self._send_whole(request, source)

    def _send_whole(self, request: SimRequest, source: SimEngine) -> None:
        """Let the source compute the rest too."""
        move = self._begin_part(request, source, source, 0)
        self._send(HandOffStep.WHOLE, move)

    def _go_on_whole(self, request: SimRequest, source: SimEngine) -> None:
        del self._kept[request.index], self._moves[request.index]
        request.part_move = 0
        self._cluster.go_on_whole(request, source)
        if source is not self._at_boundary:
            self._cluster.start_engine(source)

    def _holds(self, move: SimMove) -> bool:
        """Say whether a move is the one that its request waits for, and its source lives."""
        return move.request.part_move == move.number and not move.source.is_dead

    def _end_part_move(self, request: SimRequest) -> None:
        """Give up room that was granted while the beginning is computed; at the cut it is asked for again."""
        request.part_move = 0
        if request.part_blocks:
            self._cluster.take_room_back(request)

    def _lose_target(self, move: SimMove) -> None:
        """Go on without the second engine, which has died before the beginning was submitted there."""
        if not self._holds(move):
            return
        self._end_part_move(move.request)
        if move.request.index in self._kept:
            self._ask_once_more(move.request, move.source)

    def _settle_dead_engine(self, move: SimMove) -> bool:
        """Place a prompt again one of whose engines has died before the KV had come; say whether that is so."""
        if not move.source.is_dead and not move.target.is_dead:
            return False
        self._place_again(move)
        return True
