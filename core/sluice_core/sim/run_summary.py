"""The metrics of a run: attainment, TTFT, TPOT, ITL, moves, use of engines.

Percentiles are nearest-rank over all finished requests of all runs; a one-token answer has no TPOT and meets it. A
rejected request met nothing. A request whose prompt is among the longest tenth of its run counts for
``attainment_longest_tenth``: an average hides that strategies give up long prompts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sluice_core.records import EngineId, MoveCause
from sluice_core.sim.engine.gap_histogram import GapHistogram
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.simulation import Simulation

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """How an engine was used, over the time until the last request ended.

    Args:
        engine_id: The engine.
        utilization: Share of the time in iterations.
        kv_use_mean: Mean share of its KV blocks in use, idle time included.
        kv_use_peak: Largest share.
        num_iterations: Iterations.
        num_output_tokens: Tokens that it generated.
        num_prefill_tokens: Prompt tokens that it computed, recompute included.
        num_preemptions: Preemptions.
    """

    engine_id: EngineId
    utilization: float
    kv_use_mean: float
    kv_use_peak: float
    num_iterations: int
    num_output_tokens: int
    num_prefill_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What is kept of a run; small enough to go between processes.

    Args:
        num_requests: Requests.
        duration_s: Until the last one ended.
        num_met: Met all their objectives.
        num_met_ttft: Met TTFT.
        num_met_tpot: Met TPOT.
        num_rejected: Were rejected.
        num_longest: Requests among the longest tenth of prompts.
        num_met_longest: Of these, met all.
        ttfts_s: Of all finished requests.
        tpots_s: Of all finished requests with more than one token.
        itl_s: Percentiles of the gaps between tokens, by share; empty without gaps.
        moves: Moves by cause.
        num_blocked_moves: Proposals without a target.
        num_preemptions: Preemptions.
        transfer_share: Share of the requests' time that went into transfers.
        engines: Use of each engine.
        num_queried_tokens: Tokens of the prompts that were looked up in a prefix cache; 0 without prefix reuse.
        num_hit_tokens: Of these, tokens that were found.
        num_host_hit_tokens: Of these, tokens that were loaded from the engines' hosts, beside ``num_hit_tokens``.
    """

    num_requests: int
    duration_s: float
    num_met: int
    num_met_ttft: int
    num_met_tpot: int
    num_rejected: int
    num_longest: int
    num_met_longest: int
    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]
    itl_s: dict[str, float]
    moves: dict[str, int]
    num_blocked_moves: int
    num_preemptions: int
    transfer_share: float
    engines: tuple[EngineUse, ...]
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0

    @property
    def attainment(self) -> float:
        """Share of requests that met every objective of theirs."""
        return self.num_met / self.num_requests

    @property
    def attainment_longest_tenth(self) -> float:
        """The same among the longest tenth of prompts."""
        return self.num_met_longest / self.num_longest


def summarize(simulation: Simulation) -> RunSummary:
    """Sum up a run that has ended.

    Raises:
        ValueError: A run without requests.
    """
    requests = simulation.requests
    if not requests:
        raise ValueError("a run without requests has no metrics")
    finished = [request for request in requests if request.state is RequestState.FINISHED]
    outcomes = [request.slo_outcome for request in requests]
    tpots_s = [request.tpot_s for request in finished]
    longest = list_longest_tenth(requests)
    served_s = sum(request.last_token_s - request.arrival_s for request in finished)
    caches = [engine.cache for engine in simulation.engines if engine.cache is not None]
    return RunSummary(
        num_requests=len(requests),
        duration_s=simulation.now,
        num_met=sum(outcome.met_both for outcome in outcomes),
        num_met_ttft=sum(outcome.met_ttft for outcome in outcomes),
        num_met_tpot=sum(outcome.met_tpot for outcome in outcomes),
        num_rejected=len(requests) - len(finished),
        num_longest=len(longest),
        num_met_longest=sum(request.has_met_slo for request in longest),
        ttfts_s=tuple(request.ttft_s for request in finished),
        tpots_s=tuple(tpot_s for tpot_s in tpots_s if tpot_s is not None),
        itl_s=_list_gaps(simulation.gaps),
        moves={cause.value: number for cause, number in simulation.num_moves.items() if number},
        num_blocked_moves=simulation.num_blocked_moves,
        num_preemptions=sum(engine.counters.num_preemptions for engine in simulation.engines),
        transfer_share=simulation.links.transfer_s / served_s if served_s > 0 else 0.0,
        engines=tuple(_describe_use(engine, simulation.now) for engine in simulation.engines),
        num_queried_tokens=sum(cache.num_queried_tokens for cache in caches),
        num_hit_tokens=sum(cache.num_hit_tokens for cache in caches),
        num_host_hit_tokens=sum(engine.host.num_hit_tokens for engine in simulation.engines if engine.host is not None),
    )


def list_latencies(requests: Sequence[SimRequest]) -> tuple[tuple[float, float], ...]:
    """List TTFT and TPOT, in seconds, of the finished requests that have both; in the order given."""
    return tuple(
        (request.ttft_s, request.tpot_s)
        for request in requests
        if request.state is RequestState.FINISHED and request.tpot_s is not None
    )


def list_longest_tenth(requests: Sequence[SimRequest]) -> list[SimRequest]:
    """List the longest tenth of prompts, at least one; of equally long ones the earlier."""
    ordered = sorted(requests, key=lambda request: (-request.prompt_tokens, request.index))
    return ordered[: max(1, len(ordered) // 10)]


def compute_percentile(values: Sequence[float], share: float) -> float | None:
    """Compute a percentile by nearest rank; None without values.

    Args:
        values: In ascending order.
        share: 0 to 1.
    """
    if not values:
        return None
    return values[max(1, math.ceil(share * len(values))) - 1]


def make_report(runs: Sequence[RunSummary]) -> dict[str, object]:
    """Make the metrics of some runs of one cell, as ``sluice simulate --json`` prints them.

    Attainments are means over the runs, percentiles are over all their requests, counts are sums; engines are those of
    the first run.

    Args:
        runs: At least one.
    """
    ttfts_s = sorted(value for run in runs for value in run.ttfts_s)
    tpots_s = sorted(value for run in runs for value in run.tpots_s)
    first = runs[0]
    num_queried_tokens = sum(run.num_queried_tokens for run in runs)
    num_found_tokens = sum(run.num_hit_tokens + run.num_host_hit_tokens for run in runs)
    return {
        "attainment": statistics.fmean(run.attainment for run in runs),
        "attainment_per_seed": [run.attainment for run in runs],
        "attainment_ttft": statistics.fmean(run.num_met_ttft / run.num_requests for run in runs),
        "attainment_tpot": statistics.fmean(run.num_met_tpot / run.num_requests for run in runs),
        "attainment_longest_tenth": statistics.fmean(run.attainment_longest_tenth for run in runs),
        "ttft_s": _list_percentiles(ttfts_s),
        "tpot_s": _list_percentiles(tpots_s),
        "itl_s": first.itl_s,
        "moves": {cause.value: sum(run.moves.get(cause.value, 0) for run in runs) for cause in MoveCause},
        "blocked_moves": sum(run.num_blocked_moves for run in runs),
        "preemptions": sum(run.num_preemptions for run in runs),
        "rejected": sum(run.num_rejected for run in runs),
        "requests": sum(run.num_requests for run in runs),
        "prefix_hit_rate": num_found_tokens / num_queried_tokens if num_queried_tokens else None,
        "transfer_share": statistics.fmean(run.transfer_share for run in runs),
        "engine_use": [
            {
                "name": use.engine_id,
                "utilization": use.utilization,
                "kv_use_mean": use.kv_use_mean,
                "kv_use_peak": use.kv_use_peak,
                "iterations": use.num_iterations,
                "output_tokens": use.num_output_tokens,
                "prefill_tokens": use.num_prefill_tokens,
                "preemptions": use.num_preemptions,
            }
            for use in first.engines
        ],
    }


def _list_percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{share * 100:g}": compute_percentile(values, share) for share in SHARES}


def _list_gaps(gaps: GapHistogram) -> dict[str, float]:
    percentiles = {f"p{share * 100:g}": gaps.compute_percentile_s(share) for share in SHARES}
    return {name: value for name, value in percentiles.items() if value is not None}


def _describe_use(engine: SimEngine, duration_s: float) -> EngineUse:
    return EngineUse(
        engine_id=engine.engine_id,
        utilization=engine.counters.busy_s / duration_s if duration_s > 0 else 0.0,
        kv_use_mean=engine.counters.kv_block_seconds / engine.total_blocks / duration_s if duration_s > 0 else 0.0,
        kv_use_peak=engine.counters.peak_blocks / engine.total_blocks,
        num_iterations=engine.counters.num_iterations,
        num_output_tokens=engine.counters.num_output_tokens,
        num_prefill_tokens=engine.counters.num_prefill_tokens,
        num_preemptions=engine.counters.num_preemptions,
    )
