"""What no scheduler can exceed: by hand where that is easy, and above what strategies reach."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.strategies.ceiling import ConvexTime, compute_ceiling

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.sim_setup import MAX_BATCH_TOKENS, MAX_NUM_SEQS, Arrival, Cell, EngineSetup, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters

PROGRAM = Path(__file__).parents[1] / "strategies" / "ceiling.py"
FLAT = IterationProfile(linear_s=(0.0, *[0.01] * (MAX_BATCH_TOKENS // 8)))  # 10 ms, whatever is in an iteration


def test_all_seats_share_an_iteration_that_costs_the_same_for_any_number() -> None:
    found = compute_ceiling(FLAT, [(100, 11)], 0.01, 10**6)
    assert found.rate_rps == pytest.approx(MAX_NUM_SEQS / 10 / 0.01 / DEFAULT_ATTAINMENT)
    assert (found.num_decodes, found.mixed_share) == (MAX_NUM_SEQS, 1.0)
    assert found.iteration_s == pytest.approx(0.01)


def test_kv_and_the_objective_bound_the_decodes() -> None:
    """A decode has 105.5 tokens in the mean, and takes 1 ms beside the 10 ms of an iteration."""
    assert compute_ceiling(FLAT, [(100, 11)], 0.01, 1055).num_decodes == 10
    dear = IterationProfile(linear_s=FLAT.linear_s, decode_request_s=1e-3)
    assert compute_ceiling(dear, [(100, 11)], 0.0301, 10**6).num_decodes == 20


def test_prompts_that_cost_more_beside_decodes_are_computed_alone() -> None:
    """Each token takes 1 ms, and 20 decodes leave no time for more within 20 ms."""
    line = IterationProfile(linear_s=(0.0, *[8e-3 * number for number in range(1, MAX_BATCH_TOKENS // 8 + 1)]))
    found = compute_ceiling(line, [(100, 11)], 0.02, 10**6)
    assert found.rate_rps == pytest.approx(1 / (10 * 1e-3 + 100 * 1e-3) / DEFAULT_ATTAINMENT)


def test_the_longest_tenth_of_prompts_is_left_out() -> None:
    lengths = [(100, 11)] * 9 + [(100_000, 11)]
    alone = compute_ceiling(FLAT, [(100, 11)], 0.01, 10**6)
    assert compute_ceiling(FLAT, lengths, 0.01, 10**6).rate_rps == pytest.approx(alone.rate_rps)


def test_an_objective_that_nobody_meets_is_refused_by_its_value() -> None:
    with pytest.raises(ValueError, match="5 ms"):
        compute_ceiling(FLAT, [(100, 11)], 0.005, 10**6)


def test_the_convex_time_is_below_the_steps_of_a_table() -> None:
    steps = IterationProfile(
        linear_s=(0.0, *[0.01 * -(-number // 16) for number in range(1, MAX_BATCH_TOKENS // 8 + 1)])
    )
    convex = ConvexTime(steps)
    estimates = [convex.estimate_s(8 * number) for number in range(1, 200)]
    assert all(
        estimate <= steps.estimate_linear_s(8 * number) + 1e-12 for number, estimate in enumerate(estimates, start=1)
    )
    slopes = [late - early for early, late in pairwise(estimates)]
    assert all(early <= late + 1e-12 for early, late in pairwise(slopes))


@pytest.mark.parametrize("strategy", ["sluice", "aggregated"])
def test_no_strategy_exceeds_it(strategy: str) -> None:
    """Beyond the ceiling, fewer than nine tenths meet their objectives."""
    dear = IterationProfile(linear_s=FLAT.linear_s, decode_request_s=1e-3, prefill_token_s=2e-5)
    slo = Slo(ttft_s=0.5, tpot_s=0.03)
    rate = 1.05 * compute_ceiling(dear, [(400, 50)], slo.tpot_s, 160_000).rate_rps
    arrivals = [
        Arrival(at_s=number / rate, prompt_tokens=400, output_tokens=50, slo=slo) for number in range(int(20 * rate))
    ]
    engine = EngineSetup(
        engine_id=EngineId("e0"),
        profile=dear,
        role=Role.PREFILL_HEAVY,
        chunk_size_tokens=2048,
        kv_blocks_total=10_000,
        kv_bytes_per_token=1000,
    )
    cell = Cell(
        engines=[engine],
        strategy=get_strategy(strategy),
        parameters=StrategyParameters(),
        options=SimOptions(schedules_ahead=True),
    )
    simulation = Simulation(cell, arrivals)
    simulation.run()
    num_met = sum(request.has_met_slo for request in simulation.requests)
    assert num_met / len(arrivals) < DEFAULT_ATTAINMENT


def test_the_program_prints_a_row_per_cell() -> None:
    done = subprocess.run([sys.executable, PROGRAM, "--only", "c04"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith("| c04 | 9.27 | 97 | 30 ms | 100% |")
