"""Engines with too few KV blocks: who is preempted, and what is left of its blocks."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulation import A100_14B, SLO, STRATEGIES, make_arrivals, make_engines, run

from sluice_core.records import EngineId, Role
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.sim.engine.freed_blocks import FreedBlocks
from sluice_core.sim.engine.gap_histogram import GapHistogram
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.sim_setup import Arrival, Cell, EngineSetup, SimOptions


class Queue:
    """Free blocks one by one: of whom, and None for those that nobody looks for."""

    def __init__(self, num_free):
        self.blocks = deque([None] * num_free)

    def take(self, num_blocks):
        for _ in range(num_blocks):
            self.blocks.popleft()

    def free(self, index, num_blocks, num_cached):
        self.blocks.extendleft([None] * (num_blocks - num_cached))
        self.blocks.extend((index, position) for position in reversed(range(num_cached)))

    def find(self, index):
        found = []
        while (index, len(found)) in self.blocks:
            self.blocks.remove((index, len(found)))
            found.append(len(found))
        return len(found)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_freed_blocks_match_a_queue_of_single_blocks(data):
    num_free = data.draw(st.integers(0, 30))
    queue, freed = Queue(num_free), FreedBlocks(num_free)
    waiting = []
    for index in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(("preempt", "free", "take", "reclaim")))
        if what in {"preempt", "free"}:
            num_blocks = data.draw(st.integers(1, 12))
            num_cached = num_blocks - data.draw(st.integers(0, 1))
            if what == "preempt":
                freed.free_preempted(index, num_blocks, num_cached)
                queue.free(index, num_blocks, num_cached)
                waiting.append(index)
            else:
                freed.free(num_blocks, num_cached)
                queue.free(None, num_blocks, num_cached)
        elif what == "take":
            num_blocks = data.draw(st.integers(0, len(queue.blocks)))
            freed.take(num_blocks)
            queue.take(num_blocks)
        elif waiting:
            found = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            assert freed.reclaim(found) == queue.find(found)
        assert freed.is_needed == bool(waiting)


@pytest.mark.parametrize("name", ["aggregated", "aggregated, least work"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from((40, 60, 90)), rate=st.sampled_from((10.0, 40.0)))
def test_freed_blocks_match_a_prefix_cache_of_prompts_that_share_nothing(name, seed, blocks, rate):
    strategy, shape = STRATEGIES[name]
    arrivals = make_arrivals(random.Random(seed), number=60, rate=rate, longest_output=150)
    runs = []
    for hash_block_tokens in (None, 16):
        options = SimOptions(hash_block_tokens=hash_block_tokens)
        cell = Cell(engines=make_engines(shape, blocks=blocks), strategy=strategy, options=options, seed=seed)
        runs.append(run(cell, arrivals))
    for ours, theirs in zip(*(simulation.requests for simulation in runs), strict=True):
        assert ours.first_token_s == pytest.approx(theirs.first_token_s, abs=1e-9)
        assert ours.last_token_s == pytest.approx(theirs.last_token_s, abs=1e-9)
    computed = [[engine.counters.num_prefill_tokens for engine in simulation.engines] for simulation in runs]
    assert computed[0] == computed[1]


def test_preemptions_are_among_what_is_compared():
    strategy, shape = STRATEGIES["aggregated"]
    arrivals = make_arrivals(random.Random(1), number=100, rate=40.0, longest_output=150)
    simulation = run(Cell(engines=make_engines(shape, blocks=40), strategy=strategy), arrivals)
    num_tokens = sum(request.prompt_tokens for request in simulation.requests)
    num_computed = sum(engine.counters.num_prefill_tokens for engine in simulation.engines)
    num_whole = sum(request.prompt_tokens * request.num_preemptions for request in simulation.requests)
    assert sum(request.num_preemptions for request in simulation.requests) > 10
    assert num_tokens < num_computed < num_tokens + num_whole


class Ahead:
    """An engine that schedules ahead, step by step; requests are (prompt, output) tokens, in order of arrival."""

    def __init__(self, blocks, chunk_size, *requests):
        setup = EngineSetup(
            engine_id=EngineId("a"),
            profile=A100_14B,
            role=Role.DECODE_HEAVY,
            chunk_size_tokens=chunk_size,
            kv_blocks_total=blocks,
            kv_bytes_per_token=1,
        )
        self.engine = SimEngine(setup, ChunkedPrefillPolicy(), GapHistogram(), [], schedules_ahead=True)
        self.requests = [
            SimRequest(index, Arrival(at_s=float(index), prompt_tokens=prompt, output_tokens=output, slo=SLO))
            for index, (prompt, output) in enumerate(requests)
        ]
        self.now = 100.0

    def submit(self, *indices):
        for index in indices:
            self.engine.submit(self.requests[index], RequestKind.NEW_PROMPT)

    def step(self, number=1):
        """Run iterations; returns the decodes and the prefill tokens of the last one."""
        for _ in range(number):
            duration_s = self.engine.start(self.now)
            assert duration_s > 0.0
            self.now += duration_s
            batch = self.engine.batch.num_decodes, self.engine.prefills.num_tokens
            self.engine.end(self.now)
        return batch

    def run(self):
        while self.engine.start(self.now) > 0.0:
            self.now = self.engine.ends_at_s
            self.engine.end(self.now)
        self.engine.check_idle()

    @property
    def preemptions(self):
        return [request.num_preemptions for request in self.requests]


def test_an_engine_that_schedules_ahead_pauses_a_starved_decode_and_all_behind_it_before_it_preempts():
    """The iteration under way holds the last request: it goes one later, when it was left out as well."""
    ahead = Ahead(12, 200, (46, 20), (62, 20), (62, 20))
    ahead.submit(0, 1, 2)  # 3, 4 and 4 blocks; one is left
    assert ahead.step() == (0, 170)
    assert [ahead.step()[0] for _ in range(5)] == [3, 3, 1, 2, 2]
    ahead.run()
    assert ahead.preemptions == [0, 0, 1]


def test_a_decode_takes_the_block_that_a_prefill_was_to_have_and_the_prefill_goes():
    """A prompt that has started is promised nothing; it is the last, and finds what it had computed again."""
    ahead = Ahead(12, 33, (63, 40), (110, 5))
    ahead.submit(0)
    ahead.step(16)  # its prompt of two chunks, and 14 decodes: 78 tokens in five blocks
    ahead.submit(1)  # takes the seven others in four chunks, before which the decode takes its sixth
    assert [ahead.step() for _ in range(6)] == [(1, 32), (1, 32), (1, 32), (1, 0), (1, 0), (1, 0)]
    ahead.run()
    assert ahead.preemptions == [0, 1]
    assert ahead.engine.counters.num_lost_prefill_tokens > 0
    assert ahead.engine.counters.num_prefill_tokens < 63 + 2 * 110


def test_nothing_is_admitted_in_an_iteration_with_a_preemption():
    ahead = Ahead(10, 200, (62, 40), (62, 40), (10, 2))
    ahead.submit(0, 1)
    ahead.step()
    ahead.submit(2)
    admitted = []
    while ahead.engine.start(ahead.now) > 0.0:
        is_paused, before = bool(ahead.engine.batch.paused), sum(ahead.preemptions)
        admitted.append((ahead.engine.prefills.num_chunks, is_paused, before))
        ahead.now = ahead.engine.ends_at_s
        ahead.engine.end(ahead.now)
    assert sum(ahead.preemptions) == 1
    assert all(not chunks for chunks, is_paused, _ in admitted if is_paused)
    first = next(number for number, (_, _, preempted) in enumerate(admitted) if preempted)
    assert admitted[first][0] == 0
    ahead.engine.check_idle()


def test_blocks_that_just_became_free_may_be_granted_while_a_preempted_request_waits():
    """The queue hears of them when the next iteration is scheduled."""
    ahead = Ahead(12, 200, (46, 8), (62, 20), (62, 20))
    ahead.submit(0, 1, 2)
    prefills = ahead.engine.prefills
    while prefills.freed is None or not prefills.deferred_blocks:
        ahead.step()
    granted = ahead.engine.free_blocks
    assert granted > ahead.engine.count_schedulable_blocks()
    ahead.engine.reserve(granted)
    assert prefills.freed.num_overdrawn > 0
    ahead.step()
    assert prefills.freed is not None
    assert prefills.freed.num_overdrawn == 0
    ahead.engine.cancel_grant(granted)
    ahead.run()
    assert [request.state for request in ahead.requests] == [RequestState.FINISHED] * 3


def test_a_decode_that_goes_at_once_gives_the_block_back_that_it_was_to_grow_into():
    """It joins with three full blocks and takes a fourth, and a prompt lacks two: the fourth, and its third."""
    ahead = Ahead(9, 33, (65, 1), (48, 3))
    ahead.submit(0)
    ahead.step()  # 33 tokens in three blocks
    ahead.engine.reserve(2)
    moved = ahead.requests[1]
    moved.generated_tokens, moved.first_token_s, moved.num_blocks = 1, 1.0, 3
    ahead.engine.reserve(3)
    ahead.engine.receive(moved)
    assert ahead.step() == (0, 32)
    assert ahead.preemptions == [0, 1]
    ahead.engine.cancel_grant(2)
    assert ahead.step() == (0, 49 - 2 * 16)
    assert (moved.num_cached_tokens, moved.num_blocks) == (32, 4)
    ahead.run()


def test_a_decode_that_preempts_itself_ends_the_iteration_for_prefills_behind_it():
    """One that joins with three full blocks finds no fourth; the prompt that has started waits for one iteration."""
    ahead = Ahead(8, 34, (30, 20), (65, 1), (48, 3))
    ahead.submit(0)
    assert ahead.step() == (0, 30)
    ahead.submit(1)
    assert ahead.step() == (1, 33)
    moved = ahead.requests[2]
    moved.generated_tokens, moved.first_token_s, moved.num_blocks = 1, 1.0, 3
    ahead.engine.reserve(3)
    ahead.engine.receive(moved)
    assert ahead.step() == (1, 0)
    assert ahead.preemptions == [0, 0, 1]
    assert ahead.step() == (1, 32)
    ahead.run()


@pytest.mark.parametrize(("num_free", "tokens"), [(4, 8), (5, 24), (6, 40)])
def test_a_prefill_computes_what_its_blocks_hold_when_one_before_it_has_taken_the_others(num_free, tokens):
    """40 tokens of 160 are left, eight of them in its last block; who recomputes 64 tokens goes first."""
    ahead = Ahead(8 + num_free, 120, (160, 2), (64, 2))
    ahead.submit(0)
    assert ahead.step() == (0, 120)
    ahead.engine.submit(ahead.requests[1], RequestKind.RECOMPUTE)
    assert ahead.step() == (0, 64 + tokens)
    assert ahead.requests[0].num_blocks == 8 + num_free - 4
    ahead.run()
    assert ahead.engine.counters.num_output_tokens == 4


def test_an_overdraft_is_covered_by_the_next_freed_blocks():
    freed = FreedBlocks(-3)
    freed.free_preempted(7, 4, 4)
    assert freed.num_overdrawn == 3
    freed.free(5, 4)
    assert freed.num_overdrawn == 0
    freed.take(1)
    assert freed.reclaim(7) == 4


def test_requests_that_wait_for_too_long_are_refused():
    """The second prompt finds no room until the first request has ended."""
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=100, output_tokens=90, slo=SLO),
        Arrival(at_s=0.1, prompt_tokens=100, output_tokens=2, slo=SLO),
    ]
    states = {}
    for wait_limit_s in (None, 1.0, 60.0):
        options = SimOptions(schedules_ahead=True, wait_limit_s=wait_limit_s)
        strategy, _ = STRATEGIES["aggregated"]
        simulation = run(
            Cell(engines=make_engines(((1, 200),), blocks=12), strategy=strategy, options=options), arrivals
        )
        states[wait_limit_s] = [request.state for request in simulation.requests]
    finished = RequestState.FINISHED
    assert states == {None: [finished] * 2, 1.0: [finished, RequestState.REJECTED], 60.0: [finished] * 2}


def test_a_wait_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="wait_limit_s is 0"):
        SimOptions(wait_limit_s=0.0)
