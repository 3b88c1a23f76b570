"""The simulator again, as plainly as possible: every iteration looks at every request, and nothing is kept as a sum.

It shares the policies with ``sluice_core.sim``, and neither engine nor event loop. Cluster events are left out.
"""

import random
from dataclasses import dataclass, field

from sluice_core.kv_blocks import KvBlocks, blocks_for_tokens
from sluice_core.records import Hold, IterationShape, MoveCause, Place, PrefillRequest, RequestId
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import EngineBatch, LatePrefills, RequestKind
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.sim.cluster import ASSIGN_INTERVAL_S
from sluice_core.sim.sim_setup import NoGrant, TtftEnd


class NaivePool:
    """An engine's KV blocks one by one: who refers to each, under which hash it is cached, in which order they go."""

    def __init__(self, setup, hash_block_tokens):
        self.block, self.hash_block = setup.block_size_tokens, hash_block_tokens
        self.blocks = [[None, 0] for _ in range(setup.kv_blocks_total)]  # hash, references
        self.free = list(self.blocks)
        self.cached = []  # blocks with a hash, in the order in which they got it
        self.tables = {}  # of the requests
        self.hits = self.queries = 0

    def used(self):
        return sum(references > 0 for _, references in self.blocks)

    def hash_of(self, request, number):
        end = (number + 1) * self.block
        if self.hash_block is None:  # found again after a preemption here, by nobody else, and not after a move
            return request.name, request.moves, end
        hashes, prompt_tokens = request.arrival.block_hashes, request.arrival.prompt_tokens
        knows_answer = len(hashes) > -(-prompt_tokens // self.hash_block)
        if hashes and (end <= prompt_tokens or knows_answer):
            return hashes[: -(-end // self.hash_block)], end
        return request.name, end

    def find(self, request, num_tokens):
        found = []
        for number in range(num_tokens // self.block):
            match = [block for block in self.cached if block[0] == self.hash_of(request, number)]
            if not match:
                break
            found.append(match[0])
        return found

    def idle(self, found):
        return sum(block[1] == 0 for block in found)

    def open(self, request, found):
        for block in found:
            if block[1] == 0:
                self.free = [other for other in self.free if other is not block]
            block[1] += 1
        self.tables[request] = found

    def take(self, request, num_blocks):
        for _ in range(num_blocks - len(self.tables[request])):
            block = self.free.pop(0)
            self.cached = [other for other in self.cached if other is not block]
            block[:] = None, 1
            self.tables[request].append(block)

    def fill(self, request, num_tokens):
        for number, block in enumerate(self.tables[request][: num_tokens // self.block]):
            if block[0] is None:
                block[0] = self.hash_of(request, number)
                self.cached.append(block)

    def forget(self, request):
        """Without prefix reuse a request that is recomputed finds nothing of what it had."""
        for block in self.tables[request]:
            block[0] = None
        self.cached = [block for block in self.cached if block[0] is not None]

    def release(self, request):
        for block in reversed(self.tables.pop(request)):
            block[1] -= 1
            if block[1] == 0:
                self.free.insert(len(self.free) if block[0] else 0, block)


@dataclass(eq=False)
class NaiveRequest:
    index: int
    arrival: object
    tokens: list = field(default_factory=list)  # when each came
    kind: RequestKind = RequestKind.NEW_PROMPT
    computed: int = 0
    cached: int = 0  # tokens found where its prefill runs
    to_compute: int = 0
    blocks: int = 0
    reset: int = 0
    moves: int = 0
    preemptions: int = 0
    is_moved_in: bool = False
    is_rejected: bool = False
    first_s: float = -1.0
    source: object = None
    target: object = None
    arriving: int = 0  # blocks on their way
    route: tuple = ()  # its parts, while the first one runs

    @property
    def name(self):
        return RequestId(str(self.index))

    @property
    def split(self):
        return self.route[0].end_token - self.arrival.prompt_tokens + 1 if self.route else 0

    @property
    def kv_tokens(self):
        return self.arrival.prompt_tokens + len(self.tokens) - 1


class NaiveEngine:
    def __init__(self, setup, policy, hash_block_tokens=None):
        self.setup, self.policy = setup, policy
        self.pool = NaivePool(setup, hash_block_tokens)
        self.block = setup.block_size_tokens
        self.queue, self.decodes, self.arrived, self.incoming, self.pinned = [], [], [], [], []
        self.batch, self.prefilled, self.hands_off = None, [], False
        self.submits = 0
        self.last_prefill_s = 0.0
        self.ends_at_s = 0.0
        self.freed = False
        self.members = DecodeSet(block_size_tokens=self.block, max_num_seqs=setup.max_num_seqs)
        self.members.role = setup.role
        self.members.split_lead_tokens = 0
        self.last_batch = (0, 0)
        self.finished, self.shape, self.duration_s = [], None, 0.0
        self.selector = policy.make_selector(setup.profile)
        self.selectable, self.selected = {}, {}  # by request id; of those selected their places

    def used(self):
        promised = sum(r.blocks - len(self.pool.tables[r]) for r in self.queue if r.blocks)
        return self.pool.used() - self.granted() + promised

    def granted(self):
        return sum(r.arriving for r in self.incoming)

    def free_blocks_of(self, request):
        self.pool.release(request)

    def free(self):
        return self.setup.kv_blocks_total - self.used() - self.granted()

    def enqueue(self, request, kind):
        request.kind, request.computed, request.blocks = kind, 0, 0
        request.to_compute = request.arrival.prompt_tokens + len(request.tokens)
        self.queue.append(request)
        if not self.defers():
            self.offer([request])

    def defers(self):
        """Whether what comes now is known only when the next iteration is chosen."""
        return False

    def key(self, request):
        if request.name in self.selected:
            return int(RequestKind.STARTED_PREFILL), self.selected[request.name], request.index
        return (
            *self.policy.order_key(request.kind, request.arrival.at_s, request.arrival.priority),
            request.index,
        )

    def join(self, request, now):
        self.decodes.append(request)
        self.members.join(
            request.name,
            prompt_tokens=request.arrival.prompt_tokens,
            output_tokens=len(request.tokens),
            output_tokens_since_reset=len(request.tokens) - request.reset,
            first_token_s=request.first_s,
            tpot_slo_s=request.arrival.slo.tpot_s,
            is_moved_in=request.is_moved_in,
            split_tokens=request.split,
        )

    def begin_decode(self, request, now):
        if self.hands_off and len(request.tokens) == 1:
            self.prefilled.append(request)
        else:
            self.join(request, now)

    def leave(self, request):
        self.decodes.remove(request)
        self.members.leave(request.name)

    def start(self, now, *, joins_end_ttft):
        self.joins_end_ttft = joins_end_ttft
        for request in self.arrived:
            if joins_end_ttft and len(request.tokens) == 1:
                request.first_s = now
            request.is_moved_in = True
            self.join(request, now)
        self.arrived = []
        self.is_stalled = False
        if self.policy.separates_phases and self.decodes and self.queue:
            chunks = self.schedule(now)
            if chunks:
                self.last_prefill_s = now
                return self.run(now, chunks, [])
            self.is_stalled = True
        while self.free() < sum(self.grows(r) for r in self.decodes):
            victim = max(
                self.decodes, key=lambda r: (self.policy.victim_key(r.arrival.at_s, r.arrival.priority), r.index)
            )
            self.leave(victim)
            self.free_blocks_of(victim)
            victim.preemptions += 1
            self.enqueue(victim, RequestKind.RECOMPUTE)
        for request in self.decodes:
            request.blocks += self.grows(request)
            self.pool.take(request, request.blocks)
            self.pool.fill(request, request.kv_tokens + 1)
        chunks = self.schedule(now) if self.queue else []
        if not any(r.computed < r.to_compute for r in self.queue) or chunks:
            self.last_prefill_s = now
        if not self.decodes and not chunks:
            return None
        return self.run(now, chunks, list(self.decodes))

    def run(self, now, chunks, decodes):
        self.running = decodes
        if self.joins_end_ttft and self.policy.separates_phases:
            for request in decodes:
                if len(request.tokens) == 1:
                    request.first_s = now
        if self.policy.separates_phases:
            self.policy.note_batch(now, has_prefills=bool(chunks))
        self.batch = [r for r, _, _ in chunks if r.computed == r.to_compute]
        self.queue = [r for r in self.queue if r not in self.batch]
        prefill_tokens = sum(c for _, c, _ in chunks)
        self.note_shape(decodes, [(c, before) for _, c, before in chunks])
        time_s = self.setup.profile.estimate_iteration_s(
            prefill_tokens + len(decodes),
            len(chunks),
            prefill_tokens,
            sum(c * (before + c / 2) for _, c, before in chunks),
            len(decodes),
            sum(r.kv_tokens + 1 for r in decodes),
        )
        self.ends_at_s, self.duration_s = now + time_s, time_s
        self.last_batch = (len(decodes), prefill_tokens)
        return self.ends_at_s

    def note_shape(self, decodes, chunks):
        self.shape = IterationShape(
            prefill_tokens=sum(c for c, _ in chunks),
            attention_work=sum(c * (before + c / 2) for c, before in chunks),
            num_chunks=len(chunks),
            num_decodes=len(decodes),
            decode_context_tokens=sum(r.kv_tokens + 1 for r in decodes),
        )

    def grows(self, request):
        return int(request.kv_tokens % self.block == 0)

    def count_context(self):
        return sum(request.arrival.prompt_tokens + len(request.tokens) for request in self.decodes)

    def find_known(self, waiting):
        """Find those of the prompts here that the policy may know of by now."""
        return waiting

    def offer(self, known):
        """Let the policy know the prompts that have come, where it selects them."""
        for request in known if self.selector is not None else ():
            if request.kind is RequestKind.NEW_PROMPT and request.name not in self.selectable:
                self.selectable[request.name] = request
                arrival = request.arrival
                self.selector.add(
                    request.name,
                    arrival_s=arrival.at_s,
                    ttft_slo_s=arrival.slo.ttft_s,
                    priority=arrival.priority,
                    tokens=request.to_compute,
                )

    def select(self, now, known, batch, fits):
        """Ask the policy which prompts the iteration may compute, where it selects them; else what has started."""
        if self.selector is None:
            return
        chosen = self.selector.select(now, batch)
        requests = [self.selectable[name] for name in chosen]
        ahead = sorted((r for r in known if r.name not in self.selectable and not r.blocks), key=self.key)
        may_start = all(fits(r) for r in [*ahead[:1], *requests[:1]])
        if requests and all(r.kind is RequestKind.NEW_PROMPT for r in requests) and not may_start:
            chosen = self.selector.rank_started()
        self.selected = {name: place for place, name in enumerate(chosen)}

    def may_run(self, request):
        return request.name not in self.selectable or request.name in self.selected

    def note_chunk(self, request):
        if request.name in self.selectable and request.computed < request.to_compute:
            self.selector.advance(request.name, request.computed)
        else:
            self.deselect(request)

    def deselect(self, request):
        if self.selectable.pop(request.name, None):
            self.selected.pop(request.name, None)
            self.selector.remove(request.name)

    def has_seat(self):
        seats = len(self.decodes) + len(self.incoming) + sum(r.blocks > 0 for r in self.queue)
        return seats < self.setup.max_num_seqs

    def has_blocks(self, request, free):
        return blocks_for_tokens(request.to_compute, self.block) <= free

    def make_batch(self, known):
        recompute = [r for r in known if r.kind in (RequestKind.RECOMPUTE, RequestKind.RECOVERY)]
        return EngineBatch(
            chunk_size_tokens=self.setup.chunk_size_tokens,
            last_chunk_size_tokens=self.setup.chunk_size_tokens,
            max_batch_tokens=self.setup.max_batch_tokens,
            block_size_tokens=self.block,
            num_decodes=len(self.decodes),
            decode_context_tokens=self.count_context(),
            num_recomputing=len(recompute),
            num_started_prefills=sum(r.kind is RequestKind.STARTED_PREFILL for r in known),
            num_new_prompts=sum(r.kind is RequestKind.NEW_PROMPT for r in known),
            last_prefill_s=self.last_prefill_s,
            is_stalled=self.is_stalled,
        )

    def schedule(self, now):
        batch = self.make_batch(self.queue)
        limits = self.policy.limits(now, batch)
        self.select(now, self.queue, batch, lambda r: self.has_seat() and self.has_blocks(r, self.free()))
        room, is_blocked, chunks = limits.prefill_budget_tokens, False, []
        for request in sorted(filter(self.may_run, self.queue), key=self.key):
            if room <= 0 or not limits.has_place_for(request.to_compute - request.computed, room):
                break
            if not request.blocks:
                blocks = blocks_for_tokens(request.to_compute, self.block)
                seats = len(self.decodes) + len(self.incoming) + sum(r.blocks > 0 for r in self.queue)
                found = self.pool.find(request, request.to_compute - 1)
                need = blocks - len(found) + (self.pool.idle(found) if found else 0)
                if is_blocked or limits.hides(request.kind) or seats >= self.setup.max_num_seqs or need > self.free():
                    is_blocked = True
                    continue
                request.blocks = blocks
                self.pool.open(request, found)
                request.computed = request.cached = len(found) * self.block
                if request.kind is RequestKind.NEW_PROMPT:
                    self.pool.queries += request.to_compute
                    self.pool.hits += request.cached
            most = limits.fit_chunk(room, request.computed, self.block)
            tokens = min(most, limits.max_tokens_per_prefill, request.to_compute - request.computed)
            room -= limits.count_room(tokens, request.computed)
            chunks.append((request, tokens, request.computed))
            request.computed += tokens
            self.pool.take(request, blocks_for_tokens(request.computed, self.block))
            self.pool.fill(request, request.computed)
            if request.kind is RequestKind.NEW_PROMPT:
                request.kind = RequestKind.STARTED_PREFILL
            self.note_chunk(request)
        return chunks

    def end(self, now):
        batch, self.batch = self.batch, None
        self.policy.record_iteration(self.shape, self.duration_s)
        if self.running or not self.decodes:
            self.members.advance()
        for request in self.running:
            request.tokens.append(now)
        for request in self.running:
            if len(request.tokens) == request.arrival.output_tokens:
                self.leave(request)
                self.free_blocks_of(request)
                self.freed = True
                self.finished.append(request)
        for request in batch:
            request.tokens.append(now)
            if len(request.tokens) == 1:
                request.first_s = now
            if len(request.tokens) == request.arrival.output_tokens:
                self.free_blocks_of(request)
                self.freed = True
                self.finished.append(request)
            else:
                self.begin_decode(request, now)
        self.members.observe_kv(
            KvBlocks(
                total=self.setup.kv_blocks_total,
                used=self.used(),
                pinned=min(self.used(), sum(request.blocks for request in self.pinned)),
            )
        )

    def load(self, now):
        waiting = [r for r in self.queue if r.computed < r.to_compute]
        is_prefilling = bool(waiting) or (self.batch is not None and self.last_batch[1] > 0)
        phase = self.policy.describe_phase(now, is_prefilling=is_prefilling)
        phases = {} if phase is None else {"prefill_phase_s": phase[0], "saved_tpot_s": phase[1]}
        self.offer(self.find_known(waiting))
        late = LatePrefills() if self.selector is None else self.selector.count_late(now)
        due = [] if self.selector is None else self.selector.list_due()
        return EngineLoad(
            **phases,
            late_requests=late.requests,
            late_prefill_tokens=late.tokens,
            late_attention_work=late.attention_work,
            due=due,
            last_submit_number=self.submits,
            queued_prefill_tokens=sum(r.to_compute - r.computed for r in waiting),
            queued_requests=len(waiting),
            queued_attention_work=sum((r.to_compute**2 - r.computed**2) / 2 for r in waiting),
            running_decodes=len(self.decodes) + len(self.incoming) + len(self.arrived),
            decode_context_tokens=sum(r.kv_tokens + 1 for r in self.decodes),
            kv_blocks_total=self.setup.kv_blocks_total,
            kv_blocks_used=self.used(),
            kv_blocks_granted=self.granted(),
            kv_blocks_pinned=min(self.used(), sum(r.blocks for r in self.pinned)),
            iteration_remaining_s=self.ends_at_s - now if self.batch is not None else 0.0,
            pull_bytes_per_s=self.setup.link.speed.bytes_per_s,
        )


def urgency(request):
    """What is recovered goes first, by when its next token is due; a level of priority is worth 10 s."""
    if request.tokens:
        return 0, due_s(request), request.arrival.at_s
    return 1, request.arrival.at_s - 10.0 * request.arrival.priority, request.arrival.at_s


def due_s(request):
    return request.first_s + request.arrival.slo.tpot_s * len(request.tokens)


class NaiveSimulation:
    engine_class, request_class = NaiveEngine, NaiveRequest

    def __init__(self, cell, arrivals):
        self.cell, self.options = cell, cell.options
        rng = random.Random(cell.seed)
        self.router = cell.strategy.make_router(cell.parameters, rng)
        self.engines = {}
        for setup in cell.engines:
            policy = cell.strategy.make_engine(cell.parameters, counts_decodes=self.options.counts_decodes)
            engine = self.engine_class(setup, policy, self.options.hash_block_tokens)
            policy.bind(engine.members, setup.profile)
            self.engines[setup.engine_id] = engine
        self.table = EngineTable(
            lambda engine_id: self.engines[engine_id].setup.profile, counts_decodes=self.options.counts_decodes
        )
        for s in cell.engines:
            spec = EngineConfig(s.block_size_tokens, s.kv_bytes_per_token, s.max_num_seqs, s.max_batch_tokens)
            self.table.add(s.engine_id, spec, role=s.role, chunk_size_tokens=s.chunk_size_tokens)
        self.requests = [self.request_class(index, arrival) for index, arrival in enumerate(arrivals)]
        self.events, self.held, self.parked, self.links = [], [], [], {}
        self.last_assign_s, self.is_retry_due, self.now = -1.0, False, 0.0
        self.num_moves = 0
        chunk_sizes = {setup.chunk_size_tokens for setup in cell.engines}
        for engine in self.engines.values():
            engine.policy.observe_chunk_sizes(chunk_sizes)
            engine.hands_off = self.hands_off(engine)

    def hands_off(self, engine):
        return engine.policy.hands_off_prefills(engine.setup.role)

    def run(self):
        for request in self.requests:
            self.at(request.arrival.at_s, self.arrive, request)
        while self.events:
            event = min(self.events, key=lambda e: e[:2])
            self.events.remove(event)
            self.now = event[0]
            event[2](*event[3])
        return self

    def at(self, time_s, call, *arguments):
        self.num_events = getattr(self, "num_events", 0) + 1
        self.events.append((time_s, self.num_events, call, arguments))

    def arrive(self, request):
        need = request.arrival.prompt_tokens + request.arrival.output_tokens
        if all(need > e.setup.kv_blocks_total * e.block for e in self.engines.values()):
            request.is_rejected = True
            return
        self.held.append(request)
        if len(self.held) == 1:
            self.assign()
        else:
            self.retry_later()

    def retry_later(self):
        if not self.is_retry_due:
            self.is_retry_due = True
            self.at(max(self.now, self.last_assign_s + ASSIGN_INTERVAL_S), self.retry)

    def retry(self):
        self.is_retry_due = False
        self.assign()

    def report(self):
        for engine_id, engine in self.engines.items():
            self.table.report(engine_id, engine.load(self.now), self.now)

    def refuse_late(self):
        limit_s = self.options.wait_limit_s
        new = [r for r in self.held if not r.tokens]
        for request in [r for r in new if limit_s is not None and r.arrival.at_s <= self.now - limit_s]:
            request.is_rejected = True
            self.held.remove(request)

    def assign(self):
        self.refuse_late()
        if not self.held:
            return
        self.last_assign_s = self.now
        self.report()
        waiting = [
            PrefillRequest(
                request_id=r.name,
                arrival_s=r.arrival.at_s,
                prompt_tokens=r.arrival.prompt_tokens + len(r.tokens),
                slo=r.arrival.slo,
                priority=r.arrival.priority,
                is_recovery=bool(r.tokens),
                next_token_due_s=due_s(r) if r.tokens else 0.0,
            )
            for r in sorted(self.held, key=urgency)[:256]
        ]
        for decision in self.router.assign(self.now, waiting, self.table):
            if isinstance(decision, Hold):
                continue
            (request,) = [r for r in self.held if r.name == decision.request_id]
            self.held.remove(request)
            if isinstance(decision, Place):
                engine = self.engines[decision.engine_id]
                engine.submits += 1
                request.route = decision.route
                engine.enqueue(request, RequestKind.RECOVERY if request.tokens else RequestKind.NEW_PROMPT)
                self.table.mark_submitted(decision.engine_id, request.name, engine.submits)
                self.start_engine(engine)
            else:
                request.is_rejected = True

    def start_engine(self, engine):
        if engine.batch is None:
            ends_at_s = engine.start(self.now, joins_end_ttft=self.options.ttft_end is TtftEnd.DECODE_JOIN)
            if ends_at_s is not None:
                self.at(ends_at_s, self.end, engine)

    def end(self, engine):
        engine.end(self.now)
        self.note_finished(engine)
        may_place = engine.freed or engine.prefilled
        self.park_prefilled(engine)
        if engine.decodes:
            self.propose(engine)
        engine.freed = False
        if may_place:
            self.place_parked()
        self.start_engine(engine)
        self.look_again()

    def note_finished(self, engine):
        for request in engine.finished:
            self.router.note_finished(request.name, len(request.tokens))
        engine.finished = []

    def look_again(self):
        if self.held:
            if self.now - self.last_assign_s >= ASSIGN_INTERVAL_S:
                self.assign()
            else:
                self.retry_later()

    def propose(self, engine):
        proposals = self.choose_leaving(engine)
        while proposals:
            gone = sum(self.move(engine, proposal) for proposal in proposals)
            waits = self.options.no_grant is NoGrant.WAIT and gone
            proposals = self.choose_leaving(engine) if waits else []

    def choose_leaving(self, engine):
        engine.policy.observe_chunk_sizes({state.chunk_size_tokens for state in self.table if not state.is_draining})
        return engine.policy.propose(self.now, engine.members)

    def move(self, engine, proposal):
        request = self.requests[int(proposal.request_id)]
        waits = self.options.no_grant is NoGrant.WAIT and proposal.cause is MoveCause.PREFILL_DONE
        waits = waits and not self.table.has_uniform_chunk_size  # else its decode may stay
        target = None if waits and self.parked else self.find_target(request, engine, proposal.cause)
        if target is None and not waits:
            return False
        engine.leave(request)
        request.route = ()
        engine.pinned.append(request)
        request.source = engine
        if proposal.cause is MoveCause.BACKFLOW:
            request.reset = len(request.tokens)
        if target is None:
            self.parked.append(request)
        else:
            self.transfer(request, engine, target)
        return True

    def park_prefilled(self, engine):
        for request in engine.prefilled:
            request.source = engine
            engine.pinned.append(request)
            self.parked.append(request)
            if self.options.no_grant is not NoGrant.WAIT:
                self.at(self.now + self.cell.parameters.grant_wait_s, self.expire, request)
        engine.prefilled = []

    def expire(self, request):
        if request in self.parked:
            self.parked.remove(request)
            self.unpin(request, request.source)
            self.start_engine(request.source)
            self.held.append(request)
            self.retry_later()

    def unpin(self, request, source):
        source.pinned.remove(request)
        if self.options.hash_block_tokens is None:
            source.pool.forget(request)
        source.free_blocks_of(request)
        source.freed = True

    def find_target(self, request, source, cause):
        self.report()
        blocks = blocks_for_tokens(request.kv_tokens, source.block)
        assert blocks == request.blocks
        asked = FlowRequest(
            cause=cause,
            source=source.setup.engine_id,
            num_blocks=request.blocks,
            tpot_slo_s=request.arrival.slo.tpot_s,
            planned_target=request.route[1].engine_id if request.route else None,
        )
        engine_id = self.router.target(self.now, asked, self.table)
        return None if engine_id is None else self.engines[engine_id]

    def place_parked(self):
        while self.parked:
            request = self.parked[0]
            target = self.find_target(request, request.source, MoveCause.PREFILL_DONE)
            if target is None:
                return
            self.parked.pop(0)
            self.transfer(request, request.source, target)

    def transfer(self, request, source, target):
        target.incoming.append(request)
        request.moves += 1
        request.target = target
        link = source.setup.link
        name = link.name or source.setup.engine_id
        num_tokens = request.kv_tokens
        found = target.pool.find(request, num_tokens)
        num_tokens -= len(found) * target.block
        request.arriving = request.blocks - len(found)
        target.pool.open(request, found)
        target.pool.take(request, request.blocks)
        bytes_s = num_tokens * source.setup.kv_bytes_per_token / link.speed.bytes_per_s
        self.links[name] = max(self.now, self.links.get(name, 0.0)) + bytes_s
        self.at(self.links[name] + link.speed.latency_s, self.arrived, request)

    def arrived(self, request):
        source, target = request.source, request.target
        source.pinned.remove(request)
        target.incoming.remove(request)
        target.arrived.append(request)
        source.free_blocks_of(request)
        target.pool.fill(request, request.kv_tokens)
        self.start_engine(target)
        self.start_engine(source)
        if self.parked:
            self.place_parked()
        self.look_again()
