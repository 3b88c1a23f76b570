"""Goodput: the highest request rate at the wanted attainment.

Attainment falls from 0.95 to 0.5 within a tenth of the rate, so goodputs are compared, or attainments on the same
requests; never single runs at one rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sluice_core.sim.run_summary import RunSummary, summarize
from sluice_core.sim.sim_setup import Cell
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.workload import DrawnWorkload
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT

GOODPUT_PRECISION = 0.02
_GROWTH = 1.6
_MOST_STEPS = 40


class NoGoodputError(ValueError):
    """No rate passes, however low."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputRun:
    """The goodput of one seed.

    Args:
        rate_rps: The highest rate that passed.
        summary: The run at that rate.
    """

    rate_rps: float
    summary: RunSummary


def search_goodput(
    cell: Cell, workload: DrawnWorkload, *, duration_s: float, start_rps: float, target: float = DEFAULT_ATTAINMENT
) -> GoodputRun:
    """Search the goodput of one seed.

    Args:
        cell: The cluster.
        workload: The requests.
        duration_s: Length of each run; a number of requests would let an overloaded system pass.
        start_rps: Where to begin.
        target: Least attainment.

    Raises:
        NoGoodputError: No rate passes.
    """

    def attempt(rate_rps: float) -> RunSummary | None:
        arrivals = workload.make_arrivals(rate_rps, duration_s)
        if not arrivals:
            return None
        simulation = Simulation(cell, arrivals)
        if not simulation.run(most_missed=count_allowed_misses(len(arrivals), target)):
            return None
        return summarize(simulation)

    return bisect_rate(attempt, start_rps)


def count_allowed_misses(num_requests: int, target: float) -> int:
    """Count the requests that may miss their SLO where a share of ``target`` is to meet it; rounding costs nobody."""
    return math.floor(num_requests * (1.0 - target) + 1e-9)


def bisect_rate(attempt: Callable[[float], RunSummary | None], start_rps: float) -> GoodputRun:
    """Search the highest rate at which ``attempt`` passes, and keep its summary there.

    Args:
        attempt: Runs at a rate; returns None when it fails.
        start_rps: Where to begin.

    Raises:
        NoGoodputError: No rate passes.
    """
    passed: list[RunSummary] = []

    def passes(rate_rps: float) -> bool:
        summary = attempt(rate_rps)
        if summary is not None:
            passed.append(summary)
        return summary is not None

    rate_rps = find_highest_rate(passes, start_rps)
    return GoodputRun(rate_rps=rate_rps, summary=passed[-1])


def find_highest_rate(passes: Callable[[float], bool], start_rps: float) -> float:
    """Find the highest rate that passes, to ``GOODPUT_PRECISION``; it is the last one that did.

    Down until a rate passes, up until one does not, then between.

    Args:
        passes: Says whether a rate passes.
        start_rps: Where to begin.

    Raises:
        NoGoodputError: No rate passes.
    """
    rate_rps, fails_at_rps = start_rps, math.inf
    for _ in range(_MOST_STEPS):
        if passes(rate_rps):
            break
        fails_at_rps = rate_rps
        rate_rps /= 2
    else:
        if not passes(rate_rps):
            raise NoGoodputError(f"not even {rate_rps:.3g} requests/s pass")
    best_rps = rate_rps
    for _ in range(_MOST_STEPS):
        if fails_at_rps < math.inf:
            break
        rate_rps = best_rps * _GROWTH
        if passes(rate_rps):
            best_rps = rate_rps
        else:
            fails_at_rps = rate_rps
    while fails_at_rps / best_rps > 1.0 + GOODPUT_PRECISION:
        rate_rps = math.sqrt(best_rps * fails_at_rps)
        if passes(rate_rps):
            best_rps = rate_rps
        else:
            fails_at_rps = rate_rps
    return best_rps
