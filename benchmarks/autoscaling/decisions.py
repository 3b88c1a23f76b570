"""Engine hours that the scaler's decisions cost over the simulated day: in seconds, since no request is simulated.

    .venv/bin/python -m benchmarks.autoscaling.decisions [--strategy sluice|taichi] [--drawn] [--hours 24]
        [--start-s 30 120 600]

Engines come ``--start-s`` after they are asked for and leave at once, and nothing ever waits. Beside it stands the
schedule of somebody who knows the rate of each minute. A window of five minutes is short of engines where less could be
served than arrived: ``benchmarks.autoscaling.run`` shows what that does to objectives.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.autoscaling.day_trace import DAY, DRAWN_DAY, count_arrivals
from benchmarks.autoscaling.fleet import TICK_S, WINDOW_S
from benchmarks.autoscaling.policies import FleetView, ScalerPolicy, make_oracle_schedule
from benchmarks.autoscaling.run import MOST_ENGINES, ORACLE_BIN_S, TRACES

from sluice_cli.simulation.trace_cache import load_rows
from sluice_core.autoscaling.capacity_curve import CapacityCurve
from sluice_core.records import Slo

if TYPE_CHECKING:
    from collections.abc import Sequence

# As ``run`` searches them, by strategy: Qwen2.5-32B on an A100, TTFT 2 s, TPOT 100 ms, 90 %.
CAPACITIES = {
    "sluice": CapacityCurve(((2, 3.43), (4, 7.18), (8, 14.36), (16, 29.57))),
    "taichi": CapacityCurve(((2, 2.71), (4, 5.35), (8, 11.02), (16, 22.70))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFigures:
    """What decisions came to.

    Args:
        engine_hours: From being asked for until gone, over all engines.
        num_windows: Windows of five minutes.
        short_windows: Of these, with less goodput than arrivals.
        least_margin: Goodput over arrivals, of the window where it is least.
    """

    engine_hours: float
    num_windows: int
    short_windows: int
    least_margin: float


def follow(policy: ScalerPolicy, counts: Sequence[int], start_s: float) -> DecisionFigures:
    """Has a policy decide about a fleet whose requests are served at once; arguments as ``list_sizes``."""
    engine_s = could = came = 0.0
    margins: list[float] = []
    for number, (serving, starting) in enumerate(list_sizes(policy, counts, start_s)):
        engine_s += (serving + starting) * TICK_S
        could += policy.capacity.estimate_goodput_rps(serving) * TICK_S
        came += counts[number]
        if (number + 1) % int(WINDOW_S / TICK_S) == 0:
            margins.append(could / max(came, 1.0))
            could = came = 0.0
    return DecisionFigures(
        engine_hours=engine_s / 3600.0,
        num_windows=len(margins),
        short_windows=sum(margin < 1.0 for margin in margins),
        least_margin=min(margins),
    )


def list_sizes(policy: ScalerPolicy, counts: Sequence[int], start_s: float) -> list[tuple[int, int]]:
    """Lists how many engines serve and how many start, after each ``TICK_S``.

    Args:
        policy: Decides.
        counts: Arrivals of each ``TICK_S``.
        start_s: From being asked for until it serves.
    """
    serving = policy.capacity.count_engines(sum(counts[: int(WINDOW_S / TICK_S)]) / WINDOW_S, 1, MOST_ENGINES)
    starting: list[float] = []
    sizes: list[tuple[int, int]] = []
    num_arrived = 0
    for number, count in enumerate(counts):
        now = number * TICK_S
        wanted = policy.choose(_view(now, num_arrived, serving, serving + len(starting)))
        num_arrived += count
        starting += [now + start_s] * (wanted - serving - len(starting))
        # Those that start go first, as in the fleet.
        while starting and serving + len(starting) > wanted:
            starting.pop()
        serving = min(serving, wanted) + sum(ready_s <= now for ready_s in starting)
        starting = [ready_s for ready_s in starting if ready_s > now]
        sizes.append((serving, len(starting)))
    return sizes


def _view(now: float, num_arrived: int, serving: int, replicas: int) -> FleetView:
    return FleetView(
        now=now,
        num_arrived=num_arrived,
        num_waiting=0,
        num_queued=0,
        num_inside=1,
        kv_use=0.0,
        num_serving=serving,
        replicas=replicas,
    )


def count_schedule_hours(schedule: Sequence[tuple[float, int]], end_s: float) -> float:
    """Counts the engine hours of a schedule."""
    times = [*schedule, (end_s, 0)]
    return sum(number * (min(after, end_s) - at_s) for (at_s, number), (after, _) in pairwise(times)) / 3600.0


def main() -> None:
    """Prints a line for each start time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=CAPACITIES, default="sluice")
    parser.add_argument("--start-s", type=float, nargs="+", default=[30.0, 120.0, 600.0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--drawn", action="store_true", help="parts of the hour of bursts come in a drawn order")
    arguments = parser.parse_args()
    rows = load_rows(TRACES / "azure2023_conv.csv.gz")
    day = DRAWN_DAY if arguments.drawn else DAY
    slo = Slo(ttft_s=2.0, tpot_s=0.1)
    arrivals = day.make_arrivals(rows, slo, arguments.hours)
    counts = count_arrivals(arrivals, TICK_S)
    rates = [count / ORACLE_BIN_S for count in count_arrivals(arrivals, ORACLE_BIN_S)]
    capacity = CAPACITIES[arguments.strategy]
    for start_s in arguments.start_s:
        policy = ScalerPolicy(capacity=capacity, start_s=start_s, ttft_slo_s=slo.ttft_s, max_replicas=MOST_ENGINES)
        found = follow(policy, counts, start_s)
        schedule = make_oracle_schedule(rates, ORACLE_BIN_S, capacity, start_s, most=MOST_ENGINES, factor=1.0)
        oracle_hours = count_schedule_hours(schedule, 3600.0 * arguments.hours)
        sys.stdout.write(
            f"{start_s:5.0f} s  {found.engine_hours:6.1f} engine hours, {found.engine_hours / oracle_hours:.3f} of "
            f"{oracle_hours:.1f}; {found.short_windows} of {found.num_windows} windows short of engines, "
            f"the worst has {found.least_margin:.0%} of what it needs\n"
        )


if __name__ == "__main__":
    main()
