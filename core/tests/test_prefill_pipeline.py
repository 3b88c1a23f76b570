"""Prefills in a pipeline: against the simulator of whole clusters, closed forms, and traces played by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.prefill_pipeline import PrefillPipeline, simulate_prefills
from sluice_core.sim.sim_setup import Arrival, Cell, EngineSetup
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy

SLO = Slo(ttft_s=1.0, tpot_s=1.0)
PROFILE = IterationProfile(linear_s=(0.0, 0.01), slope_s=1e-4, prefill_base_s=1e-3, prefill_work_s=2e-8)


def make_arrivals(times_and_tokens: list[tuple[float, int]], ttft_s: float = 1.0) -> list[Arrival]:
    slo = Slo(ttft_s=ttft_s, tpot_s=1.0)
    return [Arrival(at_s=at_s, prompt_tokens=tokens, output_tokens=1, slo=slo) for at_s, tokens in times_and_tokens]


def make_pipeline(**changes: object) -> PrefillPipeline:
    fields = {"stage": PROFILE, "num_stages": 1, "batch_tokens": 2048, "kv_capacity_tokens": 100_000}
    return PrefillPipeline(**{**fields, **changes})  # type: ignore[arg-type]


def simulate(pipeline: PrefillPipeline, arrivals: list[Arrival]) -> list[float]:
    ends_s = simulate_prefills(pipeline, arrivals)
    assert ends_s is not None
    return ends_s


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), rate_rps=st.floats(0.5, 30.0), batch_tokens=st.sampled_from([1, 512, 2048, 5000]))
def test_one_stage_does_what_the_prefill_engine_of_a_cluster_does(
    seed: int, rate_rps: float, batch_tokens: int
) -> None:
    rng = random.Random(seed)
    at_s, drawn = 0.0, []
    for _ in range(60):
        at_s += rng.expovariate(rate_rps)
        drawn.append((at_s, rng.randint(1, 4000)))
    arrivals = make_arrivals(drawn)
    setup = EngineSetup(
        engine_id=EngineId("p"),
        profile=PROFILE,
        role=Role.PREFILL_HEAVY,
        chunk_size_tokens=16_384,
        kv_blocks_total=100_000,
        kv_bytes_per_token=1,
    )
    decode = EngineSetup(
        engine_id=EngineId("d"),
        profile=PROFILE,
        role=Role.DECODE_HEAVY,
        chunk_size_tokens=0,
        kv_blocks_total=100_000,
        kv_bytes_per_token=1,
    )
    strategy = get_strategy("disaggregated")
    parameters = type(Cell(engines=[setup], strategy=strategy).parameters)(prefill_batch_tokens=batch_tokens)
    simulation = Simulation(Cell(engines=[setup, decode], strategy=strategy, parameters=parameters), arrivals)
    simulation.run()
    expected = [request.first_token_s for request in simulation.requests]
    assert simulate(make_pipeline(batch_tokens=batch_tokens), arrivals) == pytest.approx(expected)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_mean_ttft_of_equal_prompts_is_that_of_section_3(num_stages: int) -> None:
    """D + R D_m^2 / (2 (1 - R D_m)), with the stage's time D_m = D / k."""
    stage_s = 0.1
    load, num = 0.6, 60_000
    rate_rps = load / stage_s
    rng = random.Random(7)
    at_s, drawn = 0.0, []
    for _ in range(num):
        at_s += rng.expovariate(rate_rps)
        drawn.append((at_s, 8))
    arrivals = make_arrivals(drawn)
    pipeline = make_pipeline(stage=IterationProfile(linear_s=(0.0, stage_s)), num_stages=num_stages, batch_tokens=1)
    ttfts_s = [end_s - each.at_s for end_s, each in zip(simulate(pipeline, arrivals), arrivals, strict=True)]
    expected_s = num_stages * stage_s + rate_rps * stage_s**2 / (2 * (1 - load))
    assert statistics.fmean(ttfts_s) == pytest.approx(expected_s, rel=0.02)


def test_a_short_prompt_behind_a_long_one_waits_at_every_stage() -> None:
    """A stage takes 1 s per 8 tokens here: the pipeline has bubbles where lengths differ."""
    pipeline = make_pipeline(stage=IterationProfile(linear_s=(0.0, 1.0, 2.0, 3.0)), num_stages=3, batch_tokens=1)
    assert simulate(pipeline, make_arrivals([(0.0, 24), (0.5, 8), (1.0, 24)])) == [9.0, 10.0, 13.0]


def test_prompts_that_wait_share_a_batch_until_it_saturates_and_a_long_one_is_alone() -> None:
    pipeline = make_pipeline(stage=IterationProfile(linear_s=(0.0, 1.0), slope_s=0.125), batch_tokens=24)
    arrivals = make_arrivals([(0.0, 8), (0.1, 8), (0.2, 16), (0.3, 8), (0.4, 40), (0.5, 8)])
    assert simulate(pipeline, arrivals) == [1.0, 4.0, 4.0, 5.0, 10.0, 11.0]


def test_a_prompt_that_no_memory_holds_is_missed_and_the_others_go_on() -> None:
    pipeline = make_pipeline(stage=IterationProfile(linear_s=(0.0, 1.0)), kv_capacity_tokens=10, batch_tokens=1)
    arrivals = make_arrivals([(0.0, 11), (0.0, 10)], ttft_s=1.0)
    assert simulate(pipeline, arrivals) == [math.inf, 1.0]
    assert simulate_prefills(pipeline, arrivals, most_missed=1) == [math.inf, 1.0]
    assert simulate_prefills(pipeline, arrivals, most_missed=0) is None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_stages=st.integers(1, 4),
    batch_tokens=st.sampled_from([1, 1000, 3000]),
    ttft_s=st.floats(0.05, 2.0),
)
def test_a_run_gives_up_exactly_when_more_than_allowed_have_missed(
    seed: int, num_stages: int, batch_tokens: int, ttft_s: float
) -> None:
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, 5) for _ in range(30))
    arrivals = make_arrivals([(at_s, rng.randint(1, 3000)) for at_s in times], ttft_s)
    pipeline = make_pipeline(num_stages=num_stages, batch_tokens=batch_tokens, kv_capacity_tokens=2800)
    ends_s = simulate(pipeline, arrivals)
    assert all(end_s > each.at_s for end_s, each in zip(ends_s, arrivals, strict=True))
    fitting = [end_s for end_s in ends_s if end_s < math.inf]
    assert fitting == sorted(fitting)
    missed = sum(end_s - each.at_s > ttft_s for end_s, each in zip(ends_s, arrivals, strict=True))
    assert simulate_prefills(pipeline, arrivals, most_missed=missed) == ends_s
    if missed:
        assert simulate_prefills(pipeline, arrivals, most_missed=missed - 1) is None


@pytest.mark.parametrize("name", ["num_stages", "batch_tokens"])
def test_a_pipeline_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; at least 1 is needed"):
        make_pipeline(**{name: 0})
