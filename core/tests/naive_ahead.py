"""The plain simulator again, for engines that schedule an iteration while another runs, as vLLM does.

What comes to an engine says from which iteration on it is known (``first_iteration``); an iteration is made of what is
known to it. The rest is a loop over all that runs, as in vLLM's ``schedule``.
"""

from dataclasses import dataclass, field

from naive_simulation import NaiveEngine, NaiveRequest, NaiveSimulation

from sluice_core.kv_blocks import KvBlocks, blocks_for_tokens
from sluice_core.records import MoveCause, Role
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.decode_set import SPLIT_LEAD_TOKENS
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.sim.sim_setup import NoGrant, TtftEnd

# Ends of iterations that a busy engine takes to carry out what it is told (docs/internals/simulator.md).
TO_GRANT, TO_HAND_OFF, TO_PULL, TO_NOTICE, TO_JOIN, TO_RELEASE = 1, 2, 1, 1, 3, 3
TO_OFFER, TO_HEAR = 1, 3
TAIL_TOKENS = 64  # what is computed rather than pulled; engines of the tests have blocks of up to half as many


@dataclass(eq=False)
class AheadRequest(NaiveRequest):
    first_iteration: int = 0  # that may hold its prefill
    last_iteration: int = 0  # that held it
    is_started: bool = False
    is_decoding: bool = False
    is_leaving: bool = False
    stays: int = 0  # how often it left a decode batch
    engine: object = None  # that has it


@dataclass(eq=False)
class NaiveMove:
    number: int
    request: AheadRequest
    source: object
    target: object
    cause: MoveCause
    num_blocks: int
    stay: int
    arriving: int = 0  # blocks that the target has set aside
    blocks: int = 0  # that the source has pinned
    copied: int = 0  # tokens whose KV the target has
    offered: int = 0
    parts: int = 0


@dataclass
class Plan:
    """What an iteration will hold."""

    decodes: list = field(default_factory=list)
    chunks: list = field(default_factory=list)  # request, tokens, tokens before
    has_preempted: bool = False
    is_cut: bool = False  # somebody found no block: nobody behind has a token
    is_alone: bool = False  # prefills, while decodes wait
    lost_tokens: int = 0  # of the prefill budget, given to somebody who cannot use them

    def reserved(self):
        return sum(need for _, _, need in self.chunks)

    def drop(self, request):
        self.decodes = [other for other in self.decodes if other is not request]
        self.lost_tokens += sum(tokens for other, tokens, _ in self.chunks if other is request)
        self.chunks = [chunk for chunk in self.chunks if chunk[0] is not request]


class AheadEngine(NaiveEngine):
    def __init__(self, setup, policy, hash_block_tokens=None):
        super().__init__(setup, policy, hash_block_tokens)
        self.number = 0  # iterations that have begun
        self.num_ended = 0
        self.is_running = self.is_between = False
        self.in_flight = 0  # the iteration that ran while the next was scheduled; 0: none
        self.ended_in_flight = []
        self.limbo = []  # first iteration that may use them, blocks, whose they were
        self.errands = []  # ends of iterations until then, what to do
        self.log = []
        self.members.split_lead_tokens = SPLIT_LEAD_TOKENS

    # --- blocks: the table of a request or move is what it holds ---

    def used(self):
        return self.pool.used() - self.granted() - sum(blocks for _, blocks, owner in self.limbo if owner)

    def free_for(self, number):
        return self.free() - sum(blocks for first, blocks, _ in self.limbo if first > number)

    def next_open(self):
        """The first iteration that is not scheduled yet."""
        return self.number + 2 if self.is_running or self.is_between else self.number + 1

    def free_later(self, owner):
        self.limbo.append((self.next_open(), len(self.pool.tables[owner]), owner))

    def settle(self, number):
        """Put the blocks into the free queue that an iteration may use."""
        for first, _, owner in self.limbo:
            if first <= number and owner:
                self.pool.release(owner)
        self.limbo = [entry for entry in self.limbo if entry[0] > number]

    def grant(self, move, num_blocks):
        if num_blocks > len(self.pool.free):
            # It may have what is not schedulable yet.
            for position, (first, blocks, owner) in enumerate(self.limbo):
                if owner:
                    self.pool.release(owner)
                self.limbo[position] = (first, blocks, None)
        if move not in self.incoming:
            self.incoming.append(move)
            self.pool.open(move, [])
        move.arriving += num_blocks
        self.pool.take(move, move.arriving)

    def ungrant(self, move):
        self.incoming.remove(move)
        self.pool.release(move)

    def load(self, now):
        load = super().load(now)
        if self.is_running and not self.current.is_alone:
            # As engines have it: all decodes count, and the contexts of those in the iteration under way.
            left_out = [request for request in self.decodes if request not in self.current.decodes]
            load.decode_context_tokens -= sum(request.kv_tokens + 1 for request in left_out)
        return load

    # --- requests ---

    def defers(self):
        return self.is_running

    def enqueue(self, request, kind):
        super().enqueue(request, kind)
        request.first_iteration = self.number + 2 if self.is_running else self.number + 1
        request.is_started = False
        request.engine = self

    def join(self, request, now):
        request.is_decoding = True
        request.engine = self
        super().join(request, now)

    def leave(self, request):
        request.is_decoding = False
        request.stays += 1
        super().leave(request)

    def preempt(self, victim, plan):
        plan.has_preempted = True
        plan.drop(victim)
        if victim in self.decodes:
            self.leave(victim)
            # A full block is known by its tokens, the last of which came with the iteration before.
            self.pool.fill(victim, max(victim.to_compute, victim.kv_tokens - 1))
        else:
            self.queue.remove(victim)
            self.deselect(victim)
        self.free_blocks_of(victim)
        victim.preemptions += 1
        self.enqueue(victim, RequestKind.RECOMPUTE)

    # --- an iteration ---

    def start(self, now, *, joins_end_ttft):
        self.joins_end_ttft = joins_end_ttft
        for request in self.arrived:
            if joins_end_ttft and len(request.tokens) == 1:
                request.first_s = now
            request.is_moved_in = True
            self.join(request, now)
        self.arrived = []
        number = self.number + 1
        self.settle(number)
        plan = self.plan(now, number)
        self.settle(number + 1)
        is_first = True
        while not plan.decodes and not plan.chunks and (is_first or plan.has_preempted):
            # Nothing was scheduled ahead. The engine looks again when the iteration has ended.
            is_first = False
            self.in_flight, self.ended_in_flight = 0, []
            for request in self.queue:
                request.first_iteration = min(request.first_iteration, number)
            plan = self.plan(now, number)
        if plan.chunks or not any(r.computed < r.to_compute for r in self.queue):
            self.last_prefill_s = now
        if not plan.decodes and not plan.chunks:
            self.in_flight, self.ended_in_flight = 0, []
            return None
        return self.run(plan, now, number)

    def run(self, plan, now, number):
        self.number, self.is_running, self.current = number, True, plan
        self.batch = [r for r, _, _ in plan.chunks if r.computed == r.to_compute]
        self.queue = [r for r in self.queue if r not in self.batch]
        for request in [*plan.decodes, *(r for r, _, _ in plan.chunks)]:
            request.last_iteration = number
        prefill_tokens = sum(tokens for _, tokens, _ in plan.chunks)
        self.last_batch = (len(plan.decodes), prefill_tokens)
        if self.policy.separates_phases:
            self.policy.note_batch(now, has_prefills=prefill_tokens > 0)
            for request in plan.decodes:
                if self.joins_end_ttft and len(request.tokens) == 1:
                    request.first_s = now
        context = sum(r.kv_tokens + 1 for r in plan.decodes)
        self.note_shape(plan.decodes, [(tokens, before) for _, tokens, before in plan.chunks])
        time_s = self.setup.profile.estimate_iteration_s(
            prefill_tokens + len(plan.decodes),
            len(plan.chunks),
            prefill_tokens,
            sum(tokens * (before + tokens / 2) for _, tokens, before in plan.chunks),
            len(plan.decodes),
            context,
        )
        self.ends_at_s, self.duration_s = now + time_s, time_s
        self.log.append((now, time_s, len(plan.decodes), prefill_tokens, len(plan.chunks), self.used(), context))
        return self.ends_at_s

    def plan(self, now, number):
        """Choose what iteration ``number`` holds."""
        self.is_stalled = False
        if self.policy.separates_phases and self.decodes and self.queue:
            plan, limits = Plan(is_alone=True), self.limits(now, number)
            self.feed_and_fill(plan, limits, number)
            if plan.chunks:
                return plan
            self.is_stalled = True
        plan, limits = Plan(), self.limits(now, number)
        for request in sorted(self.decodes, key=self.victim_order):
            if plan.is_cut or not request.is_decoding:
                break  # vLLM: whoever finds no block ends the loop
            if self.find_blocks(request, self.grows(request), plan, number):
                request.blocks += self.grows(request)
                self.pool.take(request, request.blocks)
                plan.decodes.append(request)
        self.feed_and_fill(plan, limits, number)
        return plan

    def feed_and_fill(self, plan, limits, number):
        fed = self.feed_started(plan, limits, number)
        plan.chunks = []
        self.fill_room(plan, limits, number, fed)

    def find_known(self, waiting):
        return [r for r in waiting if r.first_iteration <= self.number + 1]

    def limits(self, now, number):
        known = [r for r in self.queue if r.first_iteration <= number]
        batch = self.make_batch(known)
        self.known, self.asked = known, (now, batch)
        self.offer(known)
        return self.policy.limits(now, batch)

    def choose(self, number, *, needs_seat):
        now, batch = self.asked

        def fits(request):
            return (self.has_seat() or not needs_seat) and self.has_blocks(request, self.free_for(number))

        self.select(now, self.known, batch, fits)

    def victim_order(self, request):
        return self.policy.victim_key(request.arrival.at_s, request.arrival.priority), request.index

    def started(self):
        return sorted((r for r in self.queue if r.is_started), key=self.key)

    def runnable(self):
        return list(filter(self.may_run, self.started()))

    def find_blocks(self, request, need, plan, number):
        """Preempt until a request has its blocks; False: it gets nothing, nor does anybody behind it."""
        while need and need + plan.reserved() > self.free_for(number):
            victim = max([*self.decodes, *self.started(), *self.ended_in_flight], key=self.victim_order)
            if self.in_flight and (victim in self.ended_in_flight or victim.last_iteration == self.in_flight):
                plan.is_cut = True  # the iteration under way may still write to its blocks
                return False
            self.preempt(victim, plan)
            if victim is request:
                plan.is_cut = True
                return False
        return True

    def feed_started(self, plan, limits, number):
        """Give the prefills that have started the blocks of their chunks; returns those that have them."""
        room = limits.prefill_budget_tokens
        self.choose(number, needs_seat=False)
        for request in self.runnable():
            if plan.is_cut or room <= 0:
                break
            if not request.is_started:
                continue
            if not limits.has_place_for(request.to_compute - request.computed, room):
                break
            most = limits.fit_chunk(room, request.computed, self.block)
            tokens = min(most, limits.max_tokens_per_prefill, request.to_compute - request.computed)
            need = blocks_for_tokens(request.computed + tokens, self.block) - len(self.pool.tables[request])
            if self.find_blocks(request, need, plan, number):
                plan.chunks.append((request, tokens, need))
                room -= limits.count_room(tokens, request.computed)
            elif request.is_started:
                plan.lost_tokens += tokens
        return [r for r, _, _ in plan.chunks] if plan.is_cut else self.runnable()

    def fill_room(self, plan, limits, number, fed):
        room, is_blocked = limits.prefill_budget_tokens - plan.lost_tokens, plan.has_preempted
        self.choose(number, needs_seat=True)
        for request in sorted(filter(self.may_run, self.queue), key=self.key):
            if room <= 0:
                break
            if not request.is_started and (is_blocked or request.first_iteration > number):
                continue
            if request.is_started and request not in fed:
                continue
            if not limits.has_place_for(request.to_compute - request.computed, room + plan.lost_tokens):
                break
            if not request.is_started and not self.admit(request, plan, limits, number):
                is_blocked = True
                continue
            most = (len(self.pool.tables[request]) + self.free_for(number)) * self.block - request.computed
            most = min(most, limits.fit_chunk(room, request.computed, self.block))
            tokens = min(limits.max_tokens_per_prefill, request.to_compute - request.computed, most)
            if tokens <= 0:
                continue
            room -= limits.count_room(tokens, request.computed)
            plan.chunks.append((request, tokens, request.computed))
            request.computed += tokens
            request.blocks = blocks_for_tokens(request.computed, self.block)
            self.pool.take(request, request.blocks)
            self.pool.fill(request, request.computed)
            if request.kind is RequestKind.NEW_PROMPT:
                request.kind = RequestKind.STARTED_PREFILL
            self.note_chunk(request)

    def admit(self, request, plan, limits, number):
        blocks = blocks_for_tokens(request.to_compute, self.block)
        seats = len(self.decodes) + len(self.incoming) + len(self.started())
        found = self.pool.find(request, request.to_compute - 1)
        need = blocks - len(found) + (self.pool.idle(found) if found else 0)
        if limits.hides(request.kind) or seats >= self.setup.max_num_seqs or need > self.free_for(number):
            return False
        self.pool.open(request, found)
        request.blocks = len(found)
        request.computed = request.cached = len(found) * self.block
        if request.kind is RequestKind.NEW_PROMPT:
            self.pool.queries += request.to_compute
            self.pool.hits += request.cached
        request.is_started = True
        return True

    def end(self, now):
        self.is_running, self.is_between = False, True
        self.num_ended += 1
        plan, batch, self.batch = self.current, self.batch, None
        self.policy.record_iteration(self.shape, self.duration_s)
        if not plan.is_alone:
            self.members.advance([r.name for r in self.decodes if r not in plan.decodes])
        self.in_flight, self.ended_in_flight = self.number, []
        for request in plan.decodes:
            request.tokens.append(now)
            self.end_request(request, now)
        for request in batch:
            request.tokens.append(now)
            if len(request.tokens) == 1:
                request.first_s = now
            if not self.end_request(request, now):
                self.begin_decode(request, now)
        pinned = min(self.used(), sum(request.blocks for request in self.pinned))
        self.members.observe_kv(KvBlocks(total=self.setup.kv_blocks_total, used=self.used(), pinned=pinned))

    def end_request(self, request, now):
        if len(request.tokens) < request.arrival.output_tokens:
            return False
        self.finished.append(request)
        if request in self.decodes:
            self.leave(request)
        self.pool.fill(request, request.kv_tokens)
        self.free_later(request)
        self.ended_in_flight.append(request)
        return True


class NaiveAheadSimulation(NaiveSimulation):
    engine_class, request_class = AheadEngine, AheadRequest

    def __init__(self, cell, arrivals):
        super().__init__(cell, arrivals)
        self.moves, self.transfers, self.num_blocked = [], [], 0

    def start_engine(self, engine):
        if engine.is_running:
            return
        joins = self.options.ttft_end is TtftEnd.DECODE_JOIN
        ends_at_s = engine.start(self.now, joins_end_ttft=joins)
        while ends_at_s is None and engine.errands:
            self.do_errands(engine, engine.errands)  # an idle engine does everything at once
            ends_at_s = engine.start(self.now, joins_end_ttft=joins)
        engine.is_between = False
        if ends_at_s is not None:
            self.at(ends_at_s, self.end, engine)

    def do_errands(self, engine, errands):
        engine.errands = [errand for errand in engine.errands if errand not in errands]
        engine.is_between = True
        for _, call, move in errands:
            call(move)

    def end(self, engine):
        engine.end(self.now)
        self.note_finished(engine)
        for request in engine.prefilled:
            engine.pool.fill(request, request.kv_tokens)
        self.park_prefilled(engine)
        if engine.decodes:
            for proposal in self.choose_leaving(engine):
                self.propose_move(engine, proposal)
        self.do_errands(engine, [errand for errand in engine.errands if errand[0] <= engine.num_ended])
        self.place_parked()
        self.start_engine(engine)
        self.look_again()

    # --- moves: each step waits until its engine looks ---

    def tell(self, engine, num_ends, call, move):
        if call == self.hand_off and move.cause is MoveCause.SPLIT and move.request.is_decoding:
            num_ends = max(num_ends, move.request.split - len(move.request.tokens))  # where it was planned
        if engine.is_running or engine.is_between:
            engine.errands.append((engine.num_ended + num_ends, call, move))
        else:
            call(move)
            self.start_engine(engine)

    def send(self, engine, num_ends, call, move):
        """A message by way of the router."""
        if self.options.message_s:
            self.at(self.now + 2 * self.options.message_s, self.tell, engine, num_ends, call, move)
        else:
            self.tell(engine, num_ends, call, move)

    def hands_off(self, engine):
        role, waits = engine.setup.role, self.options.no_grant is NoGrant.WAIT
        return super().hands_off(engine) or (waits and self.router.moves_first_decode(role, self.table))

    def place_parked(self):
        for request in list(self.parked):
            if not request.is_leaving and not self.ask(request, request.source, MoveCause.PREFILL_DONE):
                return

    def unpin(self, request, source):
        source.pinned.remove(request)
        request.is_leaving = False
        if self.options.hash_block_tokens is None:
            source.pool.forget(request)
        kept = object()
        source.pool.tables[kept] = source.pool.tables.pop(request)
        source.free_later(kept)

    def propose_move(self, source, proposal):
        request = self.requests[int(proposal.request_id)]
        if not request.is_leaving and not self.ask(request, source, proposal.cause):
            self.num_blocked += 1

    def ask(self, request, source, cause):
        """Ask a target for a grant, if there is one."""
        self.report()
        blocks = blocks_for_tokens(request.kv_tokens, source.block)
        asked = FlowRequest(
            cause=cause,
            source=source.setup.engine_id,
            num_blocks=blocks,
            tpot_slo_s=request.arrival.slo.tpot_s,
            planned_target=request.route[1].engine_id if request.route else None,
        )
        target = self.router.target(self.now, asked, self.table)
        if target is None:
            return False
        request.is_leaving = True
        number = len(self.moves) + 1
        move = NaiveMove(number, request, source, self.engines[target], cause, blocks, request.stays)
        self.moves.append(move)
        self.table.record_grant_request(target, move.number, blocks)
        self.send(move.target, TO_GRANT, self.grant_parked if request in self.parked else self.grant, move)
        return True

    def grant_parked(self, move):
        request, source, target = move.request, move.source, move.target
        self.table.record_grant_answer(target.setup.engine_id, move.number)
        if request not in self.parked:
            return
        request.is_leaving = False
        if not self.has_room(move):
            self.num_blocked += 1
            return
        self.parked.remove(request)
        source.pinned[source.pinned.index(request)] = move
        source.pool.tables[move] = source.pool.tables.pop(request)
        move.blocks = len(source.pool.tables[move])
        target.grant(move, move.num_blocks)
        self.send(target, TO_PULL, self.pull, move)

    def grant(self, move):
        self.table.record_grant_answer(move.target.setup.engine_id, move.number)
        if not self.is_still_there(move):
            move.request.is_leaving = False
        elif self.has_room(move):
            move.target.grant(move, move.num_blocks)
            is_planned = move.cause is MoveCause.SPLIT
            if self.options.copies_kv and not is_planned and self.count_tokens(move) > move.source.block:
                self.send(move.source, TO_OFFER, self.offer, move)
            else:
                self.send(move.source, TO_HAND_OFF, self.hand_off, move)
        else:
            move.request.is_leaving = False
            self.num_blocked += 1

    def count_tokens(self, move):
        return move.request.arrival.prompt_tokens + len(move.request.tokens)

    def offer(self, move):
        if not self.is_still_there(move):
            self.give_up(move)
            return
        move.offered = (self.count_tokens(move) - 1) // move.source.block * move.source.block
        if move.offered == move.copied:
            self.send(move.source, TO_HAND_OFF, self.hand_off, move)
        else:
            self.send(move.target, TO_PULL, self.pull_part, move)

    def pull_part(self, move):
        if not self.is_still_there(move):
            self.give_up(move)
            return
        move.parts += 1
        arrives_at_s = self.use_link(move.source, move.offered - move.copied)
        self.at(arrives_at_s, self.tell, move.target, TO_HEAR, self.hear, move)

    def hear(self, move):
        if not self.is_still_there(move):
            self.give_up(move)
            return
        move.copied = move.offered
        # The source makes some more until it hands off.
        if move.parts < 4 and self.count_tokens(move) + 4 - move.copied > TAIL_TOKENS:
            self.send(move.source, TO_OFFER, self.offer, move)
        else:
            self.send(move.source, TO_HAND_OFF, self.hand_off, move)

    def give_up(self, move):
        move.request.is_leaving = False
        move.target.ungrant(move)
        if not move.target.is_between:
            self.start_engine(move.target)

    def use_link(self, source, num_tokens):
        link = source.setup.link
        name = link.name or source.setup.engine_id
        bytes_s = num_tokens * source.setup.kv_bytes_per_token / link.speed.bytes_per_s
        self.links[name] = max(self.now, self.links.get(name, 0.0)) + bytes_s
        return self.links[name] + link.speed.latency_s

    def is_still_there(self, move):
        return move.request.is_decoding and move.request.stays == move.stay

    def has_room(self, move):
        """Refuse what engines refuse (``sluice_engine.kv_transfer.grants``)."""
        target, total = move.target, move.target.setup.kv_blocks_total
        seats = len(target.decodes) + len(target.started()) + len(target.incoming) + len(target.arrived)
        to_come = sum(blocks_for_tokens(r.to_compute, target.block) - r.blocks for r in target.started())
        waits = any(r.kind is RequestKind.RECOMPUTE and not r.is_started for r in target.queue)
        taken = target.used() + target.granted() + move.num_blocks
        is_degraded = move.cause is MoveCause.DEGRADE and target.setup.role is Role.PREFILL_HEAVY
        if is_degraded and taken > self.cell.parameters.watermark * total:
            return False
        return seats < target.setup.max_num_seqs and taken + to_come <= total and not waits

    def hand_off(self, move):
        request, source, target = move.request, move.source, move.target
        more = blocks_for_tokens(request.kv_tokens, source.block) - move.num_blocks
        if not self.is_still_there(move) or more > target.free():
            self.give_up(move)
            return
        source.leave(request)
        request.route = ()
        source.pool.fill(request, request.kv_tokens)
        source.pool.tables[move] = source.pool.tables.pop(request)
        source.pinned.append(move)
        move.blocks = len(source.pool.tables[move])
        if move.cause is MoveCause.BACKFLOW:
            request.reset = len(request.tokens)
        request.is_leaving = False
        target.grant(move, more)
        self.send(target, TO_PULL, self.pull, move)

    def pull(self, move):
        request, source, target = move.request, move.source, move.target
        missing = request.kv_tokens - move.copied
        most = TAIL_TOKENS if move.copied else target.block - 1
        if self.options.copies_kv and missing <= most:
            self.tell(source, TO_RELEASE, self.release, move)
            self.take_in(move)
            return
        arrives_at_s = self.use_link(source, missing)
        row = request.name, move.cause.value, self.now, arrives_at_s, source.setup.engine_id, target.setup.engine_id
        self.transfers.append(row)
        self.at(arrives_at_s, self.tell, target, TO_NOTICE, self.notice, move)

    def notice(self, move):
        self.tell(move.source, TO_RELEASE, self.release, move)
        self.tell(move.target, TO_JOIN, self.take_in, move)

    def release(self, move):
        move.source.pinned.remove(move)
        move.source.free_later(move)

    def take_in(self, move):
        request, target = move.request, move.target
        target.incoming.remove(move)
        target.pool.tables[request] = target.pool.tables.pop(move)
        request.moves += 1
        request.last_iteration = 0  # none of the target's
        target.pool.fill(request, request.kv_tokens)
        target.arrived.append(request)
