"""Objectives in some windows of the simulated day alone, at the sizes that decisions give: seconds per window.

    PYTHONPATH=build/compiled:. .venv/bin/python -m benchmarks.autoscaling.windows [--start-s 120] [--factor 1.0]
        [--windows 104 235]

Decisions are those of ``benchmarks.autoscaling.decisions``: nothing ever waits in them. ``--factor`` takes the schedule
of somebody who knows each minute's rate, times this, in place of the scaler. Without ``--windows`` the windows with the
least goodput over what arrives in two minutes are run. Each is run from a moment on at which no engine starts.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.autoscaling.day_trace import DAY, count_arrivals
from benchmarks.autoscaling.decisions import CAPACITY, list_sizes
from benchmarks.autoscaling.fleet import TICK_S, WINDOW_S, Fleet, list_windows, simulate_fleet
from benchmarks.autoscaling.policies import Policy, ScalerPolicy, SchedulePolicy, make_oracle_schedule
from benchmarks.autoscaling.run import MOST_ENGINES, ORACLE_BIN_S, SLIDERS, load_engine

from sluice_core.sim.sim_setup import GC_THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_core.sim.sim_setup import Arrival, EngineSetup

WARM_S = 300.0
SPAN_S = 120.0


def choose_windows(sizes: Sequence[tuple[int, int]], counts: Sequence[int], number: int) -> list[int]:
    """Chooses the windows with the least goodput over what arrives, in the two minutes where that is least."""
    span, per_window = int(SPAN_S / TICK_S), int(WINDOW_S / TICK_S)
    margins: dict[int, float] = {}
    for end in range(span, len(counts)):
        could = sum(CAPACITY.estimate_goodput_rps(serving) * TICK_S for serving, _ in sizes[end - span : end])
        window = (end - 1) // per_window
        margins[window] = min(margins.get(window, 9.0), could / max(sum(counts[end - span : end]), 1))
    return sorted(margins, key=margins.__getitem__)[:number]


def run_window(
    arrivals: Sequence[Arrival], template: EngineSetup, sizes: Sequence[tuple[int, int]], window: int, start_s: float
) -> float:
    """Runs a window; returns the share of its requests that met both objectives."""
    tick = max(int((window * WINDOW_S - WARM_S) / TICK_S), 0)
    while tick and sizes[tick][1]:
        tick -= 1
    begin_s = tick * TICK_S
    low = bisect.bisect_left(arrivals, begin_s, key=lambda arrival: arrival.at_s)
    high = bisect.bisect_left(arrivals, (window + 1) * WINDOW_S, key=lambda arrival: arrival.at_s)
    part = [replace(arrival, at_s=arrival.at_s - begin_s) for arrival in arrivals[low:high]]
    schedule = [(number * TICK_S, sum(size)) for number, size in enumerate(sizes[tick:])]
    fleet = Fleet(template, SLIDERS, 4, SchedulePolicy(schedule=schedule), start_s)
    simulation = simulate_fleet(part, fleet, sizes[tick][0])
    num, met = list_windows(simulation, window * WINDOW_S - begin_s)[0]
    return met / num


def main() -> None:
    """Prints a line for each window."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start-s", type=float, default=120.0)
    parser.add_argument("--factor", type=float)
    parser.add_argument("--windows", type=int, nargs="+")
    arguments = parser.parse_args()
    gc.set_threshold(GC_THRESHOLD)
    rows, template, slo = load_engine("day")
    arrivals = DAY.make_arrivals(rows, slo)
    counts = count_arrivals(arrivals, TICK_S)
    policy: Policy = ScalerPolicy(capacity=CAPACITY, start_s=arguments.start_s, max_replicas=MOST_ENGINES)
    if arguments.factor is not None:
        rates = [count / ORACLE_BIN_S for count in count_arrivals(arrivals, ORACLE_BIN_S)]
        policy = SchedulePolicy(
            schedule=make_oracle_schedule(
                rates, ORACLE_BIN_S, CAPACITY, arguments.start_s, most=MOST_ENGINES, factor=arguments.factor
            )
        )
    sizes = list_sizes(policy, counts, arguments.start_s)
    for window in arguments.windows or choose_windows(sizes, counts, 6):
        share = run_window(arrivals, template, sizes, window, arguments.start_s)
        sys.stdout.write(f"{arguments.start_s:5.0f} s  window {window:3}: {share:.1%}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
