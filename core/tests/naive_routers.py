"""The plain simulator with several routers: one at a time is at work, and what is the others' is put aside."""

import random
from dataclasses import fields, replace

from naive_simulation import NaiveSimulation

from sluice_core.latency.scaled_latency_model import ScaledLatencyModel
from sluice_core.router_shares import choose_owner
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable

OWN = ("router", "table", "held", "parked", "last_assign_s", "is_retry_due", "letters")


class NaiveRouters(NaiveSimulation):
    def __init__(self, cell, arrivals):
        super().__init__(cell, arrivals)
        numbers = range(len(cell.routers))
        self.others = [self.make_router(number) for number in numbers]
        self.at_work = 0
        weights = [router.arrival_share for router in cell.routers]
        drawn = random.Random(f"{cell.seed} routers").choices(numbers, weights, k=len(arrivals))
        self.router_of = drawn if len(numbers) > 1 else [0] * len(arrivals)
        ids = [f"router-{number}" for number in numbers]
        self.owners = {name: ids.index(choose_owner(name, ids)) for name in self.engines}
        self.last_sent = dict.fromkeys(self.engines)
        self.num_transfers = 0
        for name in OWN:
            setattr(self, name, self.others[0][name])

    def make_router(self, number):
        rng = random.Random(self.cell.seed if number == 0 else f"{self.cell.seed} router {number}")
        factor = self.cell.routers[number].latency_factor
        table = EngineTable(
            lambda name: ScaledLatencyModel(self.engines[name].setup.profile, factor),
            counts_decodes=self.options.counts_decodes,
        )
        for s in self.cell.engines:
            spec = EngineConfig(s.block_size_tokens, s.kv_bytes_per_token, s.max_num_seqs, s.max_batch_tokens)
            table.add(s.engine_id, spec, role=s.role, chunk_size_tokens=s.chunk_size_tokens)
        router = self.cell.strategy.make_router(self.cell.parameters, rng)
        return dict(zip(OWN, (router, table, [], [], -1.0, False, []), strict=True))

    def use(self, number):
        for name in OWN:
            self.others[self.at_work][name] = getattr(self, name)
            setattr(self, name, self.others[number][name])
        self.at_work = number

    def for_each(self, call):
        before = self.at_work
        for number in range(len(self.others)):
            self.use(number)
            call()
        self.use(before)

    def use_of(self, request):
        self.use(self.router_of[request.index])

    # --- reports ---

    def run(self):
        for request in self.requests:
            self.at(request.arrival.at_s, self.arrive, request)
        self.send_reports()
        while self.events:
            event = min(self.events, key=lambda e: e[:2])
            self.events.remove(event)
            self.now = event[0]
            event[2](*event[3])
            self.send_reports()
        assert not any(other["held"] or other["parked"] for other in self.others)
        return self

    def send_reports(self):
        if not self.options.report_s:
            return
        changed = []
        for engine_id, engine in self.engines.items():
            load = engine.load(self.now)
            # What changes with the clock alone is no change.
            names = {field.name for field in fields(load)} - {"saved_tpot_s", "prefill_phase_s"}
            values = {name: getattr(load, name) for name in names}
            values["iteration_remaining_s"] = engine.batch is not None and engine.ends_at_s
            if values != self.last_sent[engine_id]:
                self.last_sent[engine_id] = values
                changed.append((self.now + self.options.report_s, engine_id, load, 0))
        if changed:
            self.for_each(lambda: self.take_letters(changed))

    def take_letters(self, changed):
        for at_s, engine_id, load, grant in changed:
            copy = replace(load, is_of_others=self.owners[engine_id] != self.at_work)
            self.letters.append((at_s, engine_id, copy, grant))
        if self.held or self.parked:
            self.retry_later(changed[0][0])

    def report(self):
        if not self.options.report_s:
            for engine_id, engine in self.engines.items():
                load = replace(engine.load(self.now), is_of_others=self.owners[engine_id] != self.at_work)
                self.table.report(engine_id, load, self.now)
            return
        while self.letters and self.letters[0][0] <= self.now:
            at_s, engine_id, load, grant = self.letters.pop(0)
            if load is None:
                self.table.record_grant_answer(engine_id, grant)
            else:
                self.table.report(engine_id, load, at_s)

    # --- what a router does ---

    def arrive(self, request):
        self.use_of(request)
        super().arrive(request)

    def retry_later(self, not_before_s=0.0):
        if not self.is_retry_due:
            self.is_retry_due = True
            self.at(max(self.now, self.last_assign_s + 0.005, not_before_s), self.retry, self.at_work)

    def retry(self, number):
        self.use(number)
        super().retry()
        if self.options.report_s:
            super().place_parked()
            self.report()
            if self.letters and (self.held or self.parked):
                self.retry_later(self.letters[0][0])

    def look_again(self):
        if not self.options.report_s:
            self.for_each(super().look_again)

    def move(self, engine, proposal):
        self.use_of(self.requests[int(proposal.request_id)])
        return super().move(engine, proposal)

    def note_finished(self, engine):
        finished = engine.finished
        for request in finished:
            self.use_of(request)
            engine.finished = [request]
            super().note_finished(engine)
        engine.finished = []

    def park_prefilled(self, engine):
        prefilled = engine.prefilled
        for request in prefilled:
            self.use_of(request)
            engine.prefilled = [request]
            super().park_prefilled(engine)
        engine.prefilled = []

    def place_parked(self):
        self.for_each(super().place_parked)

    def expire(self, request):
        self.use_of(request)
        super().expire(request)

    def find_target(self, request, source, cause):
        self.use_of(request)
        target = super().find_target(request, source, cause)
        if target is None or not self.options.report_s:
            return target
        seats = len(target.decodes) + len(target.incoming) + len(target.arrived)
        seats += sum(r.blocks > 0 for r in target.queue)
        is_full = request.blocks > target.free() or seats >= target.setup.max_num_seqs
        return None if is_full else target

    def transfer(self, request, source, target):
        if self.options.report_s:
            self.num_transfers += 1
            self.table.record_grant_request(target.setup.engine_id, -self.num_transfers, request.blocks)
            letter = self.now + self.options.report_s, target.setup.engine_id, None, -self.num_transfers
            self.letters.append(letter)
        super().transfer(request, source, target)

    def arrived(self, request):
        waiting = [number for number in range(len(self.others)) if self.has_parked(number)]
        if waiting:
            self.use(waiting[0])
        super().arrived(request)

    def has_parked(self, number):
        return bool(self.parked if number == self.at_work else self.others[number]["parked"])
