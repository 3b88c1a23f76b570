"""Several routers on the same engines queue little more than one, by shares and by news of each other's submits."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from statistics import fmean

from sluice_core.latency import PrefillCoefficients
from sluice_core.records import EngineId, PrefillRequest, RequestId, Role, Slo
from sluice_core.router_shares import choose_owner
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement
from sluice_core.strategy_parameters import StrategyParameters

NUM_ENGINES = 16
TOKEN_S = 250e-6
MEAN_TOKENS = 1000
LOAD = 0.85
REPORT_S = 0.03
REPORT_AGE_S = 0.005
NEVER_LATE = Slo(ttft_s=1e6, tpot_s=1.0)
SPEC = EngineConfig(block_size_tokens=16, kv_bytes_per_token=1000, max_num_seqs=256, max_batch_tokens=8192)


class LinearModel:
    """Prefill time in proportion to tokens."""

    num_observations, relative_error = 1000, 0.0

    def observe(self, shape, duration_s):
        """Learns nothing."""

    def compute_prefill_coefficients(self, num_decodes, decode_context_tokens, room_tokens):
        return PrefillCoefficients(TOKEN_S, 0.0, 0.0)

    def estimate_prefill_s(self, *, tokens, **_rest):
        return tokens * TOKEN_S

    def estimate_iteration_s(self, shape):
        return 0.0


class Fifo:
    """Engines that prefill one prompt after the other, and report to routers that place by the product's policy."""

    def __init__(self, num_routers: int, *, has_shares: bool, has_news: bool, seed: int) -> None:
        self.rng = random.Random(seed)
        self.has_news = has_news
        self.names = [EngineId(f"e{number}") for number in range(NUM_ENGINES)]
        self.owners = {name: self._choose_owner(name, num_routers) if has_shares else None for name in self.names}
        self.tables = [self._make_table() for _ in range(num_routers)]
        self.policies = [
            LengthAwarePlacement(StrategyParameters(), random.Random(seed + n)) for n in range(num_routers)
        ]
        self.jobs = {name: [] for name in self.names}
        self.submits = {name: [0] * num_routers for name in self.names}
        self.events: list[tuple[float, int, tuple]] = []
        self.counter = itertools.count()
        self.delays_s: list[float] = []

    @staticmethod
    def _choose_owner(name: str, num_routers: int) -> int:
        return max(range(num_routers), key=lambda router: hashlib.sha256(f"{router}/{name}".encode()).digest())

    def _make_table(self) -> EngineTable:
        table = EngineTable(lambda _: LinearModel())
        for name in self.names:
            table.add(name, SPEC, role=Role.DECODE_HEAVY, chunk_size_tokens=8192)
        return table

    def run(self, duration_s: float) -> float:
        """Returns the mean queueing delay, in seconds."""
        for name in self.names:
            self._push(self.rng.random() * REPORT_S, self._report_again, name)
        self._push(0.1, self._arrive)
        while self.events and self.events[0][0] < duration_s:
            now, _, (call, *arguments) = heapq.heappop(self.events)
            call(now, *arguments)
        return fmean(self.delays_s)

    def _push(self, at_s: float, *event: object) -> None:
        heapq.heappush(self.events, (at_s, next(self.counter), event))

    def _arrive(self, now: float) -> None:
        router = self.rng.randrange(len(self.tables))
        tokens = 1 + int(self.rng.expovariate(1 / MEAN_TOKENS))
        request_id = RequestId(str(len(self.delays_s)))
        request = PrefillRequest(request_id=request_id, arrival_s=now, prompt_tokens=tokens, slo=NEVER_LATE)
        [decision] = self.policies[router].assign(now, [request], self.tables[router])
        name = decision.engine_id
        self.submits[name][router] += 1
        self.tables[router].mark_submitted(name, request_id, self.submits[name][router])
        jobs = self.jobs[name]
        start_s = max(now, jobs[-1][0]) if jobs else now
        jobs.append((start_s + tokens * TOKEN_S, tokens))
        self.delays_s.append(start_s - now)
        if self.has_news:
            self._report(now, name)
        rate = LOAD * NUM_ENGINES / (MEAN_TOKENS * TOKEN_S)
        self._push(now + self.rng.expovariate(rate), self._arrive)

    def _report_again(self, now: float, name: EngineId) -> None:
        self._report(now, name)
        self._push(now + REPORT_S, self._report_again, name)

    def _report(self, now: float, name: EngineId) -> None:
        jobs = self.jobs[name] = [job for job in self.jobs[name] if job[0] > now]
        queued = sum(tokens for _, tokens in jobs[1:]) + (round((jobs[0][0] - now) / TOKEN_S) if jobs else 0)
        for router in range(len(self.tables)):
            load = EngineLoad(
                last_submit_number=self.submits[name][router],
                queued_prefill_tokens=min(queued, sum(tokens for _, tokens in jobs)),
                queued_requests=len(jobs),
                kv_blocks_total=10**7,
                is_of_others=self.owners[name] not in {router, None},
            )
            self._push(now + REPORT_AGE_S, self._receive, router, name, load)

    def _receive(self, now: float, router: int, name: EngineId, load: EngineLoad) -> None:
        self.tables[router].report(name, load, now)


def measure(num_routers: int, *, has_shares: bool = False, has_news: bool = False) -> float:
    seeds = range(1, 4)
    return fmean(Fifo(num_routers, has_shares=has_shares, has_news=has_news, seed=seed).run(12.0) for seed in seeds)


def test_an_engine_without_routers_is_in_nobodys_share():
    assert choose_owner("e0", []) == ""
    assert {choose_owner(f"e{number}", ["a", "b"]) for number in range(20)} == {"a", "b"}


def test_shares_and_news_take_most_of_what_a_second_router_costs():
    one = measure(1)
    two = measure(2)
    shared = measure(2, has_shares=True)
    both = measure(2, has_shares=True, has_news=True)
    assert one < both < shared < two
    assert both - one < 0.4 * (two - one)
