"""Simulated runs as a whole: against the plain implementation, against theory, and what always holds."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_simulation import NaiveSimulation

from sluice_core.latency import IterationProfile
from sluice_core.records import EarlyRejection, EngineId, FlowParameters, Role, Slo
from sluice_core.sim.requests import RequestState
from sluice_core.sim.setup import Arrival, Cell, EngineSetup, Link, NoGrant, SimOptions, TtftEnd
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy

P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY
# Qwen2.5-14B on an A100: simulation.md section 1, linear interpolation between its points.
POINTS_MS = ((0, 22.7), (8, 22.7), (64, 24.5), (128, 28.0), (256, 39.5), (512, 66.9), (1024, 115), (2048, 211))


def interpolate_ms(num_tokens):
    for (low, low_ms), (high, high_ms) in pairwise(POINTS_MS):
        if num_tokens <= high:
            return low_ms + (high_ms - low_ms) * (num_tokens - low) / (high - low)
    raise AssertionError(num_tokens)


A100_14B = IterationProfile(
    linear_s=(0.0, *(interpolate_ms(tokens) / 1e3 for tokens in range(8, 2049, 8))),
    slope_s=98.5e-6,
    prefill_base_s=358e-6,
    prefill_token_s=2.18e-6,
    prefill_work_s=5.16e-9,
    decode_base_s=902e-6,
    decode_request_s=1.86e-6,
    decode_context_s=132e-9,
    host_sequence_s=10e-6,
)
STRATEGIES = {
    "taichi": (get_strategy("taichi"), ((2, 256), (2, 48))),
    "taichi, round robin": (get_strategy("taichi").vary(placement="round_robin"), ((1, 256), (2, 48))),
    "architecture alone": (get_strategy("taichi").vary(placement="round_robin", flows=False), ((2, 256), (2, 48))),
    "aggregated": (get_strategy("aggregated"), ((3, 96),)),
    "aggregated, round robin": (get_strategy("aggregated").vary(placement="round_robin"), ((3, 96),)),
    "aggregated, least work": (get_strategy("aggregated").vary(placement="least_work"), ((3, 96),)),
    "disaggregated": (get_strategy("disaggregated"), ((2, 2048), (2, 0))),
    "disaggregated, 1:3": (get_strategy("disaggregated"), ((1, 2048), (3, 0))),
}
SLO = Slo(ttft_s=1.5, tpot_s=0.045)


def make_engines(shape, *, blocks=60, max_num_seqs=12, **changes):
    return [
        EngineSetup(
            engine_id=EngineId(f"{role.value[0]}{chunk}-{number}"),
            profile=A100_14B,
            role=role,
            chunk_size_tokens=chunk,
            kv_blocks_total=blocks,
            kv_bytes_per_token=196_608,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=2048,
            **changes,
        )
        for (count, chunk), role in zip(shape, (P, D), strict=False)
        for number in range(count)
    ]


def make_arrivals(rng, *, number=40, rate=6.0, longest_prompt=300, longest_output=60, slos=(SLO,), priorities=(0,)):
    at_s, arrivals = 0.0, []
    for _ in range(number):
        at_s += rng.expovariate(rate)
        arrivals.append(
            Arrival(
                at_s=at_s,
                prompt_tokens=rng.randint(1, longest_prompt),
                output_tokens=rng.choice((1, 2, rng.randint(1, longest_output))),
                slo=rng.choice(slos),
                priority=rng.choice(priorities),
            )
        )
    return arrivals


def run(cell, arrivals):
    simulation = Simulation(cell, arrivals)
    assert simulation.run()
    return simulation


def assert_equal_to_naive(cell, arrivals):
    fast, naive = run(cell, arrivals), NaiveSimulation(cell, arrivals).run()
    for ours, theirs in zip(fast.requests, naive.requests, strict=True):
        assert (ours.state is RequestState.REJECTED) == theirs.is_rejected
        if theirs.is_rejected:
            continue
        assert len(theirs.tokens) == theirs.arrival.output_tokens
        assert ours.first_token_s == pytest.approx(theirs.first_s, abs=1e-9)
        assert ours.last_token_s == pytest.approx(theirs.tokens[-1], abs=1e-9)
        assert (ours.num_moves, ours.num_preemptions) == (theirs.moves, theirs.preemptions)
    return fast


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rate=st.sampled_from((2.0, 8.0, 25.0)),
    blocks=st.sampled_from((26, 60, 400)),
    options=st.builds(
        SimOptions, no_grant=st.sampled_from(NoGrant), ttft_end=st.sampled_from(TtftEnd), counts_decodes=st.booleans()
    ),
    rejection=st.sampled_from(EarlyRejection),
    shared=st.booleans(),
)
def test_the_fast_simulator_agrees_with_the_plain_one(name, seed, rate, blocks, options, rejection, shared):
    rng = random.Random(seed)
    strategy, shape = STRATEGIES[name]
    slos = (SLO, Slo(ttft_s=0.4, tpot_s=0.03), Slo(ttft_s=9.0, tpot_s=0.2))
    arrivals = make_arrivals(rng, rate=rate, slos=slos, priorities=(0, 0, 1, -1))
    link = Link(name="switch" if shared else "", bytes_per_s=rng.choice((1e8, 1e9, 150e9)))
    cell = Cell(
        engines=make_engines(shape, blocks=blocks, link=link),
        strategy=strategy,
        parameters=FlowParameters(early_rejection=rejection, watermark=rng.choice((0.5, 0.95))),
        options=options,
        seed=seed,
    )
    assert_equal_to_naive(cell, arrivals)


def test_moves_of_every_cause_and_preemptions_are_among_what_is_compared():
    strategy, shape = STRATEGIES["taichi"]
    seen, num_preemptions = set(), 0
    for seed in range(4):
        rng = random.Random(seed)
        cell = Cell(
            engines=make_engines(shape, blocks=40),
            strategy=strategy,
            parameters=FlowParameters(watermark=0.5),
            seed=seed,
        )
        fast = assert_equal_to_naive(cell, make_arrivals(rng, rate=25.0, number=100))
        seen |= {cause for cause, number in fast.num_moves.items() if number}
        num_preemptions += sum(request.num_preemptions for request in fast.requests)
    assert {cause.value for cause in seen} == {"prefill_done", "degrade", "backflow"}
    assert num_preemptions > 0
