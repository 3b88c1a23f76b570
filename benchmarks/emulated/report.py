"""Tables of the emulated benchmark: what each strategy did, and how the others compare with TaiChi."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.local_cluster.figures import format_number, format_table, to_json_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.emulated.phases import Phase

REFERENCE = "TaiChi"
HEADER = (
    "strategy",
    "rate/s",
    "seed",
    "requests",
    "failed",
    "TTFT p50",
    "p90",
    "p99 ms",
    "TPOT p50",
    "p90",
    "p99 ms",
    "TTFT met",
    "TPOT met",
    "both met",
    "placed P/D",
    "engines",
    "router",
    "load",
    "machine",
)
RATIO_HEADER = ("against TaiChi", "rate/s", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "attainment")
# A machine this busy is late with iterations: the figures are then its own and not the emulated GPU's.
BUSY_SHARE_LIMIT = 0.9
LAG_LIMIT_MS = 50.0


def format_phases(phases: Sequence[Phase], *, ttft_slo_s: float, tpot_slo_s: float) -> str:
    """Formats one line per strategy, rate and seed."""
    rows = []
    for phase in phases:
        placed = phase.counters["placements"]
        cores = phase.cores
        rows.append(
            [
                phase.strategy,
                f"{phase.rate:g}",
                str(phase.seed),
                str(len(phase.answers)),
                str(len(phase.answers) - len(phase.good)),
                *(format_number(phase.compute_ttft_ms(percent), 0) for percent in (50, 90, 99)),
                *(format_number(phase.compute_tpot_ms(percent)) for percent in (50, 90, 99)),
                _percent(phase.compute_share(ttft_slo_s=ttft_slo_s)),
                _percent(phase.compute_share(tpot_slo_s=tpot_slo_s)),
                _percent(phase.attainment),
                "/".join(str(int(count)) for count in _order_roles(placed)),
                *(f"{value:.2f}" for value in (cores.engines, cores.router, cores.load, cores.busy)),
            ]
        )
    return format_table(HEADER, rows)


def format_moves(phases: Sequence[Phase]) -> str:
    """Formats moves by cause, and what else the router counted, one line per phase."""
    lines = []
    for phase in phases:
        parts = [f"{cause} {count}" for cause, count in phase.count_moves().items()] or ["none"]
        failed = {key: count for key, count in phase.counters["moves"].items() if key[1] != "done"}
        parts += [f"{cause} ended by {result} {int(count)}" for (cause, result), count in sorted(failed.items())]
        blocked = sum(phase.counters["flow_blocked"].values())
        parts += [f"blocked {int(blocked)}"] if blocked else []
        for name, text in (("recoveries", "recoveries"), ("engine_losses", "engine losses")):
            total = sum(phase.counters[name].values())
            parts += [f"{text.upper()} {int(total)}"] if total else []
        reasons = {key: count for key, count in phase.counters["placement_reasons"].items() if key[1]}
        placed = ", ".join(f"{role} {reason} {int(count)}" for (role, reason), count in sorted(reasons.items()))
        lines.append(f"{phase.strategy} at {phase.rate:g}/s: moves: {', '.join(parts)}; placements: {placed}")
    return "\n".join(lines)


def compute_ratios(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Computes each strategy's figures over TaiChi's, by rate: paired by seed, then the median and the range.

    Above 1 is worse for latencies; for attainment, below 1 is.
    """
    known = {(phase.strategy, phase.rate, phase.seed): phase for phase in phases}
    groups: dict[tuple[str, float], list[tuple[Phase, Phase]]] = {}
    for (strategy, rate, seed), phase in known.items():
        reference = known.get((REFERENCE, rate, seed))
        if strategy != REFERENCE and reference is not None:
            groups.setdefault((strategy, rate), []).append((phase, reference))
    return [
        {
            "strategy": strategy,
            "rate": rate,
            "num_pairs": len(pairs),
            "ttft_p50": _spread([_divide(a.compute_ttft_ms(50), b.compute_ttft_ms(50)) for a, b in pairs]),
            "ttft_p90": _spread([_divide(a.compute_ttft_ms(90), b.compute_ttft_ms(90)) for a, b in pairs]),
            "tpot_p50": _spread([_divide(a.compute_tpot_ms(50), b.compute_tpot_ms(50)) for a, b in pairs]),
            "tpot_p90": _spread([_divide(a.compute_tpot_ms(90), b.compute_tpot_ms(90)) for a, b in pairs]),
            "attainment": _spread([_divide(a.attainment, b.attainment) for a, b in pairs]),
        }
        for (strategy, rate), pairs in groups.items()
    ]


def format_ratios(ratios: Sequence[dict[str, Any]]) -> str:
    """Formats the ratios."""
    names = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "attainment")
    rows = [
        [ratio["strategy"], f"{ratio['rate']:g}", *(_format_spread(ratio[name], ratio["num_pairs"]) for name in names)]
        for ratio in ratios
    ]
    return format_table(RATIO_HEADER, rows)


def find_warnings(phases: Sequence[Phase], num_cores: int) -> list[str]:
    """Finds what makes a phase's figures doubtful."""
    warnings = []
    for phase in phases:
        label = f"{phase.strategy} at {phase.rate:g}/s, seed {phase.seed}"
        figures = phase.as_json()
        if phase.cores.busy > BUSY_SHARE_LIMIT * num_cores:
            warnings.append(
                f"{label}: {phase.cores.busy:.2f} of {num_cores} cores were busy; the clocks of the engines ran late"
            )
        if (figures["send_lag_p99_ms"] or 0.0) > LAG_LIMIT_MS:
            warnings.append(f"{label}: requests were sent up to {figures['send_lag_p99_ms']:.0f} ms late (p99)")
        if figures["num_failed"]:
            warnings.append(f"{label}: {figures['num_failed']} requests failed: {figures['errors']}")
    return warnings


def _order_roles(placed: dict[tuple[str, ...], float]) -> list[float]:
    """P-heavy engines' count, then that of all others."""
    heavy = sum(count for (role,), count in placed.items() if role.lower().startswith("p"))
    return [heavy, sum(placed.values()) - heavy]


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def _divide(value: float, reference: float) -> float:
    return value / reference if reference else math.nan


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    known = [value for value in values if not math.isnan(value)] or [math.nan]
    return {
        "median": to_json_number(median(known)),
        "low": to_json_number(min(known)),
        "high": to_json_number(max(known)),
    }


def _format_spread(spread: dict[str, float | None], num_pairs: int) -> str:
    if spread["median"] is None:
        return "-"
    text = f"{spread['median']:.2f}"
    return text if num_pairs == 1 else f"{text} [{spread['low']:.2f}-{spread['high']:.2f}]"
