"""The plain simulator of engines that schedule ahead, for prompts that two of them compute; without prefix reuse."""

from dataclasses import dataclass, field

from naive_ahead import (
    TAIL_TOKENS,
    TO_GRANT,
    TO_HEAR,
    TO_JOIN,
    TO_NOTICE,
    TO_OFFER,
    TO_PULL,
    TO_RELEASE,
    AheadEngine,
    AheadRequest,
    NaiveAheadSimulation,
    NaiveMove,
)

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.records import MoveCause, PrefillRequest
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.scheduling.prefill_feasibility import record_prefill

GRANT_S = 2.0  # without progress


@dataclass(eq=False)
class CutRequest(AheadRequest):
    cut_move: object = None  # that asks for room, copies, or has submitted it
    has_begun: bool = False
    is_kept: bool = False  # its first part has ended, and it is submitted nowhere yet

    @property
    def cut(self):
        """Tokens of its first part; 0: it is whole, or the second part runs."""
        return self.route[0].end_token if self.route and self.route[0].end_token < self.arrival.prompt_tokens else 0


@dataclass(eq=False)
class CutMove(NaiveMove):
    is_granted: bool = False
    is_pulling: bool = False
    has_nothing: bool = False  # to offer, before the source's next iteration ends
    renewed_s: float = 0.0
    granted: object = field(default=None)  # whose blocks the target has set aside


class CutEngine(AheadEngine):
    def __init__(self, setup, policy, hash_block_tokens=None):
        super().__init__(setup, policy, hash_block_tokens)
        self.begun, self.parted = [], []

    def enqueue(self, request, kind):
        super().enqueue(request, kind)
        request.to_compute = request.cut or request.to_compute
        if kind is RequestKind.NEW_PROMPT:
            request.has_begun = False

    def run(self, plan, now, number):
        for request, _, _ in plan.chunks:
            if request.cut and not request.has_begun:
                request.has_begun = True
                self.begun.append(request)
        return super().run(plan, now, number)

    def end(self, now):
        self.parted = [request for request in self.batch if request.cut]
        self.batch = [request for request in self.batch if not request.cut]
        self.pinned += self.parted
        super().end(now)


class NaiveCuttingSimulation(NaiveAheadSimulation):
    engine_class, request_class = CutEngine, CutRequest
    num_cut = num_whole = num_again = 0

    def park_prefilled(self, engine):
        super().park_prefilled(engine)
        self.ask_for_begun(engine)
        computing = [request for request in self.requests if request.engine is engine and request.cut_move]
        for request in sorted(computing, key=lambda request: request.cut_move.number):
            if request.cut and request not in engine.parted:
                self.copy_on(request, request.cut_move)
        for request in engine.parted:
            request.is_kept = True
            move = request.cut_move
            if move is None:
                self.ask_again(request, engine)
            elif move.is_granted and not move.is_pulling:
                self.submit(move)

    def start_engine(self, engine):
        was_between = engine.is_between
        super().start_engine(engine)
        if was_between:  # else it says so with its next output
            self.ask_for_begun(engine)

    def ask_for_begun(self, engine):
        begun, engine.begun = engine.begun, []
        for request in begun:
            self.ask_for_part(request, engine)

    def ask_for_part(self, request, source):
        self.report()
        blocks = blocks_for_tokens(request.arrival.prompt_tokens + 1, source.block)
        asked = FlowRequest(
            cause=MoveCause.SPLIT,
            source=source.setup.engine_id,
            num_blocks=blocks,
            tpot_slo_s=request.arrival.slo.tpot_s,
            planned_target=request.route[1].engine_id,
        )
        target = self.router.target(self.now, asked, self.table)
        if target is None:
            self.num_blocked += 1
            return False
        number = len(self.moves) + 1
        move = CutMove(number, request, source, self.engines[target], MoveCause.SPLIT, blocks, request.stays)
        self.moves.append(move)
        request.cut_move = move
        self.table.record_grant_request(target, number, blocks)
        self.send(move.target, TO_GRANT, self.grant_part, move)
        return True

    def ask_again(self, request, source):
        self.num_again += 1
        if not self.ask_for_part(request, source):
            self.tell_whole(request, source)

    def grant_part(self, move):
        request = move.request
        self.table.record_grant_answer(move.target.setup.engine_id, move.number)
        if not self.has_room(move):
            self.num_blocked += 1
            request.cut_move = None
            if request.is_kept:
                self.tell_whole(request, move.source)
            return
        move.target.grant(move, move.num_blocks)
        move.is_granted, move.renewed_s, move.granted = True, self.now, move
        if request.is_kept:
            self.submit(move)
        elif self.options.copies_kv and self.options.sends_parts and request.cut > move.source.block:
            self.send(move.source, TO_OFFER, self.offer_part, move)

    def copy_on(self, request, move):
        if not move.is_granted:
            return
        if self.now - move.renewed_s > GRANT_S and not move.is_pulling:
            request.cut_move = None
            move.target.ungrant(move)
            self.start_engine(move.target)
        elif move.has_nothing:
            move.has_nothing = False
            self.send(move.source, TO_OFFER, self.offer_part, move)

    def offer_part(self, move):
        if move.request.cut_move is not move:
            return
        move.offered = move.request.computed // move.source.block * move.source.block
        move.is_pulling = move.offered > move.copied
        move.has_nothing = not move.is_pulling
        if move.is_pulling:
            self.send(move.target, TO_PULL, self.pull_of_part, move)

    def pull_of_part(self, move):
        self.at(self.use_link(move.source, move.offered - move.copied), self.tell, move.target, TO_HEAR, self.had, move)

    def had(self, move):
        move.copied, move.is_pulling, move.renewed_s = move.offered, False, self.now
        if move.request.is_kept:
            self.submit(move)
        elif move.copied + move.source.block <= move.request.cut:
            self.send(move.source, TO_OFFER, self.offer_part, move)

    def submit(self, asked):
        request, source = asked.request, asked.source
        request.is_kept = False
        move = CutMove(asked.number, request, source, asked.target, asked.cause, asked.num_blocks, asked.stay)
        move.copied, move.granted = asked.copied, asked
        request.cut_move = move
        move.blocks = request.blocks
        source.pinned[source.pinned.index(request)] = move
        source.pool.tables[move] = source.pool.tables.pop(request)
        self.send(move.target, TO_PULL, self.take_part, move)

    def take_part(self, move):
        request, source, target = move.request, move.source, move.target
        missing = request.cut - move.copied
        if missing <= (TAIL_TOKENS if move.copied else target.block - 1):
            self.tell(source, TO_RELEASE, self.release, move)
            self.go_on(move, min(move.copied, request.cut))
            return
        arrives_at_s = self.use_link(source, missing)
        row = request.name, move.cause.value, self.now, arrives_at_s, source.setup.engine_id, target.setup.engine_id
        self.transfers.append(row)
        self.at(arrives_at_s, self.tell, target, TO_NOTICE, self.notice_part, move)

    def notice_part(self, move):
        self.tell(move.source, TO_RELEASE, self.release, move)
        self.tell(move.target, TO_JOIN, self.join_part, move)

    def join_part(self, move):
        self.go_on(move, move.request.cut)

    def go_on(self, move, num_tokens):
        request, target = move.request, move.target
        self.num_cut += 1
        target.ungrant(move.granted)
        request.moves += 1
        target.pool.open(request, [])
        target.pool.take(request, blocks_for_tokens(num_tokens, target.block))
        target.pool.fill(request, num_tokens)
        request.blocks = len(target.pool.tables[request])
        request.computed = request.cached = num_tokens
        request.last_iteration = 0  # none of the target's
        request.to_compute, request.route, request.cut_move = request.arrival.prompt_tokens, (), None
        request.kind, request.is_started, request.engine, request.first_iteration = (
            RequestKind.STARTED_PREFILL,
            True,
            target,
            0,
        )
        target.queue.append(request)

    def tell_whole(self, request, source):
        if self.options.message_s:
            self.at(self.now + 2 * self.options.message_s, self.go_whole, request, source)
        else:
            self.go_whole(request, source)

    def go_whole(self, request, source):
        self.num_whole += 1
        self.report()
        found = {source.setup.engine_id: request.cut // source.block * source.block}
        prompt = PrefillRequest(
            request_id=request.name,
            arrival_s=request.arrival.at_s,
            prompt_tokens=request.arrival.prompt_tokens,
            slo=request.arrival.slo,
            cached_tokens=found,
        )
        record_prefill(self.now, prompt, self.table, source.setup.engine_id)
        source.pinned.remove(request)
        kept = object()
        source.pool.tables[kept] = source.pool.tables.pop(request)
        source.free_later(kept)
        request.route, request.cut_move, request.is_kept = (), None, False
        source.submits += 1
        source.enqueue(request, RequestKind.NEW_PROMPT)
        request.first_iteration = source.next_open()
        self.table.mark_submitted(source.setup.engine_id, request.name, source.submits)
        if not source.is_between:
            self.start_engine(source)
