"""The simulated day of autoscaling: the same day each time, what engines cost, and what its rivals ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.autoscaling.day_trace import DAY, DayTrace, count_arrivals, digest
from benchmarks.autoscaling.fleet import Fleet, FleetFigures, compute_figures, simulate_fleet
from benchmarks.autoscaling.policies import (
    FleetView,
    HpaPolicy,
    Policy,
    ScalerPolicy,
    SchedulePolicy,
    make_oracle_schedule,
)
from benchmarks.autoscaling.run import TRACES

from sluice_cli.simulation.trace_cache import load_rows
from sluice_core.autoscaling.capacity_curve import CapacityCurve
from sluice_core.latency import IterationProfile
from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.sim_setup import Arrival, EngineSetup
from sluice_core.sim.traces import TraceRow
from sluice_operator.api.sliders import Sliders

SLO = Slo(ttft_s=2.0, tpot_s=0.1)
ENGINE = EngineSetup(
    engine_id=EngineId("any"),
    profile=IterationProfile(
        linear_s=(0.0, *(0.01 + 1e-4 * 8 * row for row in range(1, 257))),
        slope_s=1e-4,
        prefill_work_s=2e-9,
        decode_base_s=1e-3,
        decode_context_s=1e-7,
    ),
    role=Role.DECODE_HEAVY,
    chunk_size_tokens=0,
    kv_blocks_total=2000,
    kv_bytes_per_token=100_000,
)
SLIDERS = Sliders(num_prefill_heavy=2, prefill_heavy_tokens=512, decode_heavy_tokens=128, strategy="taichi")
VIEW = FleetView(
    now=0.0, num_arrived=0, num_waiting=0, num_queued=0, num_inside=0, kv_use=0.0, num_serving=4, replicas=4
)


def test_the_day_is_the_same_each_time() -> None:
    arrivals = DAY.make_arrivals(load_rows(TRACES / "azure2023_conv.csv.gz"), SLO, 1.0)
    assert (len(arrivals), digest(arrivals)) == (23936, "d538a29696324db9")
    assert sum(count_arrivals(arrivals, 60.0)) == len(arrivals)


def test_parts_of_an_hour_come_in_a_drawn_order() -> None:
    """Requests of an hour that come in every other ten seconds do so within each part, and not where parts meet."""
    rows = [
        TraceRow(arrival_s=20.0 * number + part, prompt_tokens=10, output_tokens=10)
        for number in range(180)
        for part in (0.0, 5.0)
    ]
    for part_s, least, most in ((None, 0, 0), (600.0, 10, 25)):
        day = DayTrace(seed=3, peak_rps=5.0, part_s=part_s)
        counts = count_arrivals(day.make_arrivals(rows, SLO, 6.0), 10.0)
        breaks = [number for number in range(1, 2160) if bool(counts[number]) == bool(counts[number - 1])]
        assert least <= len(breaks) <= most
        assert all(number % 60 == 0 for number in breaks)


def run(policy: Policy, duration_s: float, gap_s: float, *, first: int, start_s: float) -> FleetFigures:
    arrivals = [
        Arrival(at_s=gap_s * number, prompt_tokens=200, output_tokens=20, slo=SLO)
        for number in range(round(duration_s / gap_s))
    ]
    fleet = Fleet(ENGINE, SLIDERS, 4, policy, start_s)
    return compute_figures(simulate_fleet(arrivals, fleet, first), fleet)


def test_engines_cost_from_being_asked_for_until_they_are_gone() -> None:
    """Two for ten minutes; two more from 60 s to 300 s, of which they serve the last 120 s."""
    figures = run(SchedulePolicy(schedule=[(0.0, 2), (60.0, 4), (300.0, 2)]), 600.0, 0.5, first=2, start_s=120.0)
    assert figures.engine_hours == pytest.approx((2 * 600 + 2 * 240) / 3600, abs=2 * 20 / 3600)
    assert figures.attainment == 1.0
    assert figures.peak_engines == 4


def test_a_run_gives_up_at_the_first_window_that_is_too_bad() -> None:
    """From ten minutes on nobody can meet the objective: of three such windows, one is looked at."""
    arrivals = [
        Arrival(
            at_s=at_s, prompt_tokens=200, output_tokens=20, slo=SLO if at_s < 600.0 else Slo(ttft_s=1e-6, tpot_s=0.1)
        )
        for at_s in range(1500)
    ]
    fleets = [
        Fleet(ENGINE, SLIDERS, 4, SchedulePolicy(schedule=[(0.0, 2)]), 0.0, gives_up=gives_up)
        for gives_up in (False, True)
    ]
    whole, part = (compute_figures(simulate_fleet(arrivals, fleet, 2), fleet) for fleet in fleets)
    assert (whole.bad_windows, part.bad_windows) == (3, 1)
    assert whole.attainment == pytest.approx(0.4)
    assert part.attainment == pytest.approx(2 / 3)
    assert whole.hours == pytest.approx(1500.0 / 3600)
    assert part.hours == pytest.approx(1200.0 / 3600)
    assert part.engine_hours == pytest.approx(2 * 1200.0 / 3600)


def test_engines_that_are_no_longer_wanted_while_they_start_go_at_once() -> None:
    figures = run(SchedulePolicy(schedule=[(0.0, 2), (60.0, 6), (120.0, 2)]), 600.0, 0.5, first=2, start_s=300.0)
    assert figures.engine_hours == pytest.approx((2 * 600 + 4 * 60) / 3600, abs=4 * 20 / 3600)


def test_the_scaler_adds_engines_before_the_promise_breaks() -> None:
    """A rate that one engine of the curve's serves a fifth of: four more come, and all requests end."""
    policy = ScalerPolicy(capacity=CapacityCurve(((1, 0.5),)), start_s=30.0, ttft_slo_s=SLO.ttft_s, max_replicas=8)
    figures = run(policy, 900.0, 0.4, first=1, start_s=30.0)
    assert 5 <= figures.peak_engines <= 7  # 2.5 requests/s at 0.5 each, and the first headroom
    assert figures.attainment > 0.95


@pytest.mark.parametrize(
    ("metric", "target", "view", "wanted"),
    [
        ("queue", 1.0, {"num_waiting": 3, "num_queued": 5}, 8),
        ("queue", 2.0, {"num_waiting": 3, "num_queued": 5}, 4),
        ("queue", 2.0, {"num_waiting": 0, "num_queued": 1}, 1),
        ("kv", 0.5, {"kv_use": 4 * 0.52}, 4),
        ("kv", 0.5, {"kv_use": 4 * 0.7}, 6),
        ("kv", 0.5, {"kv_use": 4 * 0.7, "replicas": 6}, 6),
        ("kv", 0.5, {"kv_use": 4 * 0.2}, 2),
    ],
)
def test_an_hpa_asks_for_what_its_formula_says(metric: str, target: float, view: dict[str, Any], wanted: int) -> None:
    seen = replace(VIEW, **view)
    hpa = HpaPolicy(metric=metric, target=target, max_replicas=20)
    assert hpa.choose(seen) == max(wanted, seen.replicas)
    assert hpa.choose(replace(seen, now=301.0)) == wanted


def test_an_oracle_asks_so_much_ahead_and_keeps_engines_through_short_gaps() -> None:
    curve = CapacityCurve(((1, 1.0),))
    schedule = make_oracle_schedule(
        [1.0, 1.0, 3.0, 1.0, 3.0, 1.0, 1.0, 1.0, 2.0], 60.0, curve, 60.0, most=9, factor=1.0
    )
    assert schedule == [(0.0, 1), (60.0, 3), (300.0, 1), (420.0, 2), (540.0, 1)]
