"""TaiChi's section 2: why neither aggregation nor disaggregation meets balanced objectives (Table 2, Figures 1, 4, 5, 6, 8)."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from benchmarks.papers.experiment import compute_mean
from benchmarks.papers.findings import Band, Chapter, Finding, Plot, PlotKind, Series, Unit, band, exactly
from benchmarks.papers.taichi import (
    CAPACITY_PROMPT_TOKENS,
    CAPACITY_SYSTEMS,
    CHUNK_SIZES,
    HYBRID,
    MOTIVATION,
    MOTIVATION_RPS,
    PD_RATIOS,
    SECTION2_AGGREGATED,
    SECTION2_DISAGGREGATED,
    TABLE2,
    CapacitySystem,
)

from sluice_cli.simulation.cell_settings import build_cell
from sluice_cli.simulation.worker_processes import load_rows
from sluice_core.records import Slo
from sluice_core.sim.cell import Arrival
from sluice_core.sim.metrics import compute_percentile
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.timeline import Timeline
from sluice_core.sim.workload import PoissonWorkload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.papers.experiment import Bench, System, Testbed
    from benchmarks.papers.trials import Outcome, Trial

_MOST_POINTS = 200  # of a scatter plot, per series
_TPOT_LIMIT_S = 0.1  # taichi.txt, section 2.3.1


def measure_table2(bench: Bench) -> Chapter:
    """Table 2, and Figure 1's claim: the hybrid is best under balanced objectives."""
    findings = []
    for row in TABLE2:
        testbed = replace(MOTIVATION, slo=row.slo)
        systems = [system for system, _, _ in row.cells]
        outcomes = bench.measure(f"table2 {row.name}", testbed, systems, rate_rps=MOTIVATION_RPS)
        for (system, stated, expected), runs in zip(row.cells, outcomes, strict=True):
            ours, spread = compute_mean([100 * outcome.run.attainment for outcome in runs])
            findings.append(
                Finding(
                    setting=f"{row.name}: {system.strategy} {system}",
                    quantity="attainment",
                    unit=Unit.PERCENT,
                    ours=ours,
                    spread=spread,
                    paper=None if stated is None else exactly(stated),
                    expected=expected,
                )
            )
    systems = [SECTION2_AGGREGATED, SECTION2_DISAGGREGATED, HYBRID]
    outcomes = bench.measure("figure1", MOTIVATION, systems, rate_rps=MOTIVATION_RPS)
    return Chapter(
        name="table2",
        title="Table 2 and Figure 1: attainment under three pairs of objectives",
        setting=_describe(MOTIVATION, bench),
        findings=tuple(findings),
        notes=(
            (
                "At 12 requests/s all of them are at saturation, so attainment moves with the length of the run; the bands cover "
                "1000 to 4000 requests."
            ),
            (
                "The hybrid's sliders (6 P-heavy engines with 2048, 2 D-heavy ones with 256) are ours: the paper does not state those "
                "of Figure 1."
            ),
        ),
        plots=(_plot_scatter(systems, outcomes),),
    )


def _describe(testbed: Testbed, bench: Bench) -> str:
    return (
        f"{testbed.model} TP{testbed.tensor_parallel} on {testbed.gpu} (vidur's profile), 8 engines, trace {testbed.trace}, "
        f"{MOTIVATION_RPS:g} requests/s for {testbed.duration_s * bench.effort.scale:.0f} s, "
        f"seeds {', '.join(map(str, bench.effort.seeds))}"
    )


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keeps evenly spaced points, so that a plot stays small."""
    return list(points[:: max(1, -(-len(points) // _MOST_POINTS))])


def _plot_scatter(systems: Sequence[System], outcomes: Sequence[Sequence[Outcome]]) -> Plot:
    series = []
    for system, runs in zip(systems, outcomes, strict=True):
        points = _thin(runs[0].latencies_s)
        name = "hybrid" if system.strategy == "taichi" else system.strategy
        series.append(
            Series(
                name=f"{name} {system.engines}",
                x=tuple(round(ttft_s, 2) for ttft_s, _ in points),
                y=tuple(round(tpot_s * 1e3, 1) for _, tpot_s in points),
            )
        )
    return Plot(
        name="taichi-figure1",
        title=f"Figure 1: requests at {MOTIVATION_RPS:g} requests/s (seed 1), balanced objectives dashed",
        x_label="TTFT, s",
        y_label="TPOT, ms",
        kind=PlotKind.POINTS,
        series=tuple(series),
        guides_x=(MOTIVATION.slo.ttft_s,),
        guides_y=(MOTIVATION.slo.tpot_s * 1e3,),
    )


# --- Figure 4 ----------------------------------------------------------------------------------------------------


def observe_interference(trial: Trial) -> list[tuple[float, float]]:
    """Runs a trial of aggregation; interference intensity (prefill tokens per output token) and TPOT (s) of each request.

    Source: taichi.txt, section 2.3.1: prefill tokens computed on the engine during a request's decode, over its output length.
    """
    workload = PoissonWorkload(load_rows(trial.trace), trial.spec.slo, trial.seed)
    timeline = Timeline()
    simulation = Simulation(
        build_cell(trial.spec, trial.seed), workload.make_arrivals(trial.rate_rps, trial.duration_s), timeline
    )
    simulation.run()
    starts_s: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    for iteration in timeline.iterations:
        starts_s.setdefault(iteration.engine_id, []).append(iteration.start_s)
        tokens.setdefault(iteration.engine_id, []).append(iteration.prefill_tokens)
    sums = {engine_id: [0, *accumulate(of_engine)] for engine_id, of_engine in tokens.items()}
    points = []
    for request in simulation.requests:
        tpot_s = request.tpot_s
        if tpot_s is None or request.target is None or request.num_preemptions:
            continue
        begin = bisect_left(starts_s[request.target], request.first_token_s)
        end = bisect_left(starts_s[request.target], request.last_token_s)
        sum_ = sums[request.target]
        points.append(((sum_[end] - sum_[begin]) / request.output_tokens, tpot_s))
    return points


def measure_figure4(bench: Bench) -> Chapter:
    """Figure 4: TPOT grows linearly with the prefill that a decode is beside."""
    trials = bench.make_trials(MOTIVATION, SECTION2_AGGREGATED, rate_rps=MOTIVATION_RPS, seeds=bench.effort.seeds)
    points = bench.laboratory.map("figure4", observe_interference, trials)
    lines = [statistics.linear_regression(*zip(*of_seed, strict=True)) for of_seed in points]
    correlations = [statistics.correlation(*zip(*of_seed, strict=True)) for of_seed in points]
    quantities: list[tuple[str, Unit, list[float], Band, Band]] = [
        (
            "TPOT without interference",
            Unit.MILLISECONDS,
            [1e3 * line.intercept for line in lines],
            exactly(44),
            band(40, 46),
        ),
        (
            "TPOT per prefill token per output token, ms",
            Unit.NONE,
            [1e3 * line.slope for line in lines],
            exactly(0.2),
            band(0.19, 0.22),
        ),
        ("R2 of the line", Unit.NONE, [value**2 for value in correlations], exactly(0.99), band(0.98)),
        (
            "prefill tokens per output token at TPOT 100 ms",
            Unit.TOKENS,
            [(_TPOT_LIMIT_S - line.intercept) / line.slope for line in lines],
            exactly(273.77),
            band(250, 300),
        ),
    ]
    findings = []
    for quantity, unit, values, stated, expected in quantities:
        ours, spread = compute_mean(values)
        findings.append(
            Finding(
                setting=f"aggregated {SECTION2_AGGREGATED}",
                quantity=quantity,
                unit=unit,
                ours=ours,
                spread=spread,
                paper=stated,
                expected=expected,
            )
        )
    return Chapter(
        name="figure4",
        title="Figure 4: TPOT against interference intensity",
        setting=_describe(MOTIVATION, bench),
        findings=tuple(findings),
        plots=(_plot_interference(points[0], lines[0].slope, lines[0].intercept),),
    )


def _plot_interference(points: Sequence[tuple[float, float]], slope: float, intercept: float) -> Plot:
    shown = _thin(points)
    highest = max(intensity for intensity, _ in shown)
    return Plot(
        name="taichi-figure4",
        title="Figure 4: TPOT against interference intensity (seed 1)",
        x_label="prefill tokens per output token",
        y_label="TPOT, ms",
        kind=PlotKind.POINTS,
        series=(
            Series(
                name="requests",
                x=tuple(round(intensity, 1) for intensity, _ in shown),
                y=tuple(round(1e3 * tpot_s, 1) for _, tpot_s in shown),
            ),
            Series(
                name="fitted line",
                x=tuple(highest * step / 60 for step in range(61)),
                y=tuple(1e3 * (intercept + slope * highest * step / 60) for step in range(61)),
            ),
        ),
        guides_y=(1e3 * _TPOT_LIMIT_S,),
    )


# --- Figures 5 and 6 ----------------------------------------------------------------------------------------------


def _percentiles(runs: Sequence[Outcome], share: float) -> tuple[list[float], list[float]]:
    """Percentiles of TTFT and TPOT, per seed, in seconds."""
    ttfts_s = [compute_percentile(sorted(outcome.run.ttfts_s), share) or 0.0 for outcome in runs]
    tpots_s = [compute_percentile(sorted(outcome.run.tpots_s), share) or 0.0 for outcome in runs]
    return ttfts_s, tpots_s


def _find_latencies(systems: Sequence[System], outcomes: Sequence[Sequence[Outcome]]) -> list[Finding]:
    """P90 TTFT and median and P90 TPOT of each system."""
    findings = []
    for system, runs in zip(systems, outcomes, strict=True):
        ttfts_s, tpots_s = _percentiles(runs, 0.9)
        medians_s = _percentiles(runs, 0.5)[1]
        for quantity, unit, values in (
            ("P90 TTFT", Unit.SECONDS, ttfts_s),
            ("P50 TPOT", Unit.MILLISECONDS, [1e3 * value for value in medians_s]),
            ("P90 TPOT", Unit.MILLISECONDS, [1e3 * value for value in tpots_s]),
        ):
            ours, spread = compute_mean(values)
            setting = f"{system.strategy} {system}"
            findings.append(Finding(setting=setting, quantity=quantity, unit=unit, ours=ours, spread=spread))
    return findings


def _compare_ttft(
    setting: str, numerator: Sequence[Outcome], denominator: Sequence[Outcome], expected: Band
) -> Finding:
    """P90 TTFT of one system over another's."""
    pairs = zip(_percentiles(numerator, 0.9)[0], _percentiles(denominator, 0.9)[0], strict=True)
    ours, spread = compute_mean([a / b for a, b in pairs])
    return Finding(setting=setting, quantity="P90 TTFT", unit=Unit.FACTOR, ours=ours, spread=spread, expected=expected)


def _plot_latencies(name: str, title: str, ticks: Sequence[str], outcomes: Sequence[Sequence[Outcome]]) -> Plot:
    ttfts_s = [statistics.fmean(_percentiles(runs, 0.9)[0]) for runs in outcomes]
    tpots_s = [statistics.fmean(_percentiles(runs, 0.9)[1]) for runs in outcomes]
    positions = tuple(float(position) for position in range(len(ticks)))
    return Plot(
        name=name,
        title=title,
        x_label="",
        y_label="share of the balanced objective",
        kind=PlotKind.BARS,
        series=(
            Series(
                name="P90 TTFT / 6 s",
                x=positions,
                y=tuple(round(value / MOTIVATION.slo.ttft_s, 3) for value in ttfts_s),
            ),
            Series(
                name="P90 TPOT / 100 ms",
                x=positions,
                y=tuple(round(value / MOTIVATION.slo.tpot_s, 3) for value in tpots_s),
            ),
        ),
        ticks=tuple(ticks),
        guides_y=(1.0,),
    )


def measure_figure5(bench: Bench) -> Chapter:
    """Figure 5: smaller chunks lower TPOT until TTFT explodes."""
    systems = [system for _, system in CHUNK_SIZES]
    outcomes = bench.measure("figure5", MOTIVATION, systems, rate_rps=MOTIVATION_RPS)
    by_name = dict(zip((name for name, _ in CHUNK_SIZES), outcomes, strict=True))
    findings = _find_latencies(systems, outcomes)
    findings = [
        finding.model_copy(update={"expected": band(117, 143)})
        if finding.setting == f"aggregated {dict(CHUNK_SIZES)['CP512']}" and finding.quantity == "P90 TPOT"
        else finding
        for finding in findings
    ]
    findings.append(_compare_ttft("CP512 / CP1024", by_name["CP512"], by_name["CP1024"], band(2.0)))
    return Chapter(
        name="figure5",
        title="Figure 5: aggregation by chunk size",
        setting=_describe(MOTIVATION, bench),
        findings=tuple(findings),
        notes=(
            "The paper shows a picture and states no figures: chunk sizes below 1024 are unsustainable at this rate.",
        ),
        plots=(
            _plot_latencies(
                "taichi-figure5", "Figure 5: aggregation by chunk size", [name for name, _ in CHUNK_SIZES], outcomes
            ),
        ),
    )


def measure_figure6(bench: Bench) -> Chapter:
    """Figure 6: TTFT of disaggregation falls with more prefill engines, until the decode engines are full."""
    systems = [system for _, system in PD_RATIOS]
    names = [name for name, _ in PD_RATIOS]
    outcomes = bench.measure("figure6", MOTIVATION, systems, rate_rps=MOTIVATION_RPS)
    longer = replace(MOTIVATION, duration_s=2 * MOTIVATION.duration_s)
    doubled = bench.measure("figure6 doubled", longer, systems, rate_rps=MOTIVATION_RPS)
    by_name = dict(zip(names, outcomes, strict=True))
    findings = _find_latencies(systems, outcomes)
    findings += [
        _compare_ttft("5:3 / 4:4", by_name["5:3"], by_name["4:4"], band(None, 1.0)),
        _compare_ttft("6:2 / 5:3", by_name["6:2"], by_name["5:3"], band(None, 1.0)),
        _compare_ttft("7:1 / 6:2", by_name["7:1"], by_name["6:2"], band(1.0)),
    ]
    overloaded = band(1.3)
    findings += [
        _compare_ttft(
            f"{name}: twice the run length / once",
            runs,
            by_name[name],
            overloaded if name in {"4:4", "7:1"} else band(None, None),
        )
        for name, runs in zip(names, doubled, strict=True)
        if name in {"4:4", "7:1"}
    ]
    return Chapter(
        name="figure6",
        title="Figure 6: disaggregation by the ratio of prefill to decode engines",
        setting=_describe(MOTIVATION, bench),
        findings=tuple(findings),
        notes=(
            (
                "TTFT ends when the request joins its decode batch, as in the paper, so a full decode engine lengthens it. An overloaded "
                "ratio shows as a TTFT that grows with the length of the run."
            ),
        ),
        plots=(_plot_latencies("taichi-figure6", "Figure 6: disaggregation by ratio", names, outcomes),),
    )


# --- Figure 8 -----------------------------------------------------------------------------------------------------

_NUM_CAPACITY_PROMPTS = 200
_DECODE_TOKENS = 4000  # of the decodes beside: longer than the measurement


def observe_capacity(system: CapacitySystem) -> float:
    """Prefill tokens per second of all engines of a system that prefill, with full queues.

    One engine is simulated: ``num_decodes`` requests that decode throughout, and prompts that end with their first token.
    """
    testbed = MOTIVATION
    slo = Slo(ttft_s=1e9, tpot_s=1e9)
    spec = system.make_spec(testbed)
    decodes = [
        Arrival(at_s=0.0, prompt_tokens=CAPACITY_PROMPT_TOKENS, output_tokens=_DECODE_TOKENS, slo=slo)
        for _ in range(system.num_decodes)
    ]
    prompts = [
        Arrival(at_s=0.0, prompt_tokens=CAPACITY_PROMPT_TOKENS, output_tokens=1, slo=slo)
        for _ in range(_NUM_CAPACITY_PROMPTS)
    ]
    simulation = Simulation(build_cell(spec, seed=1), decodes + prompts)
    simulation.run()
    ends_s = sorted(request.first_token_s for request in simulation.requests)
    # From the end of the first batch of prompts that no decode's own prefill shares.
    begin = system.num_decodes + _NUM_CAPACITY_PROMPTS // 10
    num_tokens = sum(1 for end_s in ends_s if end_s > ends_s[begin]) * CAPACITY_PROMPT_TOKENS
    return system.num_engines * num_tokens / (ends_s[-1] - ends_s[begin])


def measure_figure8(bench: Bench) -> Chapter:
    """Figure 8: prefill capacity."""
    rates = bench.laboratory.map("figure8", observe_capacity, CAPACITY_SYSTEMS)
    by_name = {system.name: rate for system, rate in zip(CAPACITY_SYSTEMS, rates, strict=True)}
    findings = [
        Finding(
            setting=system.name,
            quantity="prefill capacity",
            unit=Unit.TOKENS_PER_S,
            ours=by_name[system.name],
            paper=system.paper,
            expected=system.expected,
        )
        for system in CAPACITY_SYSTEMS
    ]
    orders = (
        ("CP512", "CP1024", band(None, 1.0)),
        ("CP1024", "CP2048", band(None, 1.0)),
        ("CP1024", "P7D1", band(0.95, 1.05)),
        ("CP1024", "P6D2", band(1.0)),
    )
    findings += [
        Finding(
            setting=f"{one} / {other}",
            quantity="prefill capacity",
            unit=Unit.FACTOR,
            ours=by_name[one] / by_name[other],
            expected=expected,
        )
        for one, other, expected in orders
    ]
    return Chapter(
        name="figure8",
        title="Figure 8: prefill capacity, batch of 16, prompts of 3000 tokens",
        setting=f"{MOTIVATION.model} TP{MOTIVATION.tensor_parallel} on {MOTIVATION.gpu} (vidur's profile), 8 engines, full queues",
        findings=tuple(findings),
        notes=(
            (
                "Section 2.5 rounds a prefill engine's capacity to 5000 tokens/s. A batch of 16 is taken as 16 running decodes beside the "
                "prefill; a prefill engine takes one prompt per iteration, which fills it (the last row: as many as 16384 tokens hold)."
            ),
        ),
        plots=(
            Plot(
                name="taichi-figure8",
                title="Figure 8: prefill capacity",
                x_label="",
                y_label="1000 tokens/s",
                kind=PlotKind.BARS,
                series=(
                    Series(
                        name="capacity",
                        x=tuple(float(index) for index in range(len(rates))),
                        y=tuple(round(rate / 1e3, 2) for rate in rates),
                    ),
                ),
                ticks=tuple(name.replace(", several prompts per iteration", " batched") for name in by_name),
            ),
        ),
    )
