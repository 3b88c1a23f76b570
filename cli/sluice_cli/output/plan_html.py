"""The page of ``sluice plan --html``: one file that needs nothing else."""

from __future__ import annotations

from html import escape
from string import Template
from typing import TYPE_CHECKING

from sluice_cli.output.plan_report import (
    RESOURCES,
    format_candidate_engines,
    make_patch_command,
    name_candidate,
    show_interval,
)
from sluice_cli.output.svg_charts import COLOURS, Axis, draw_heat_map, draw_lines, draw_scatter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sluice_cli.simulation.plan_inputs import PlanInputs
    from sluice_core.planning.candidates import SliderCandidate
    from sluice_core.planning.planner import PlanResult

_FACTORS = (0.6, 0.75, 0.85, 0.92, 1.0, 1.08, 1.2)  # of the plan's goodput
_MOST_LINES = len(COLOURS)
_LEAST_CELLS = 4  # of a heat map that shows something
_MOST_POINTS = 2000  # of the scatter: more make the page slow and the picture no clearer

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1320px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.05em; margin: 0 0 .4em }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 2em }
svg { width: 100%; height: auto } svg text { font-size: 12px; fill: #333 } svg text.light { fill: #fff }
.grid { stroke: #e4e4e4 } .limit { stroke: #555; stroke-dasharray: 5 4 } .box { fill: #e8f3ea }
table { border-collapse: collapse } td, th { padding: .2em .9em .2em 0; text-align: left; vertical-align: top }
pre { background: #f5f5f5; padding: .8em; white-space: pre-wrap } .key { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
</style></head><body>
<h1>$title</h1>
<table>$facts</table>
<pre>$command</pre>
<div class="charts">
<section><h2>Attainment against the rate</h2>$lines<p>$legend<br>Dashed: the target.</p></section>
<section><h2>Requests at $rate requests/s, and the objectives</h2>$scatter
<p><span class="key" style="background:$met"></span>meets both objectives, <span class="key" style="background:$missed"></span>misses one;
points beyond an axis stand at its end.</p></section>
$heat
</div>
<h2>Next best</h2><table><tr><th>plan</th><th>goodput</th><th>against the plan</th></tr>$alternatives</table>
</body></html>
""")


def choose_shown(result: PlanResult) -> tuple[list[SliderCandidate], list[float]]:
    """Chooses the candidates whose attainment is drawn, and the rates, around the plan's goodput."""
    candidates = [ranked.candidate for ranked in result.found.ranking[:_MOST_LINES]]
    return candidates, [factor * result.goodput_rps.mean for factor in _FACTORS]


def make_page(
    inputs: PlanInputs, result: PlanResult, curves: Mapping[SliderCandidate, Sequence[tuple[float, float]]]
) -> str:
    """Makes the page.

    Args:
        inputs: The task.
        result: The plan.
        curves: Attainment by rate of the candidates of ``choose_shown``.
    """
    series = {
        name_candidate(candidate): [(rate, 100 * attainment) for rate, attainment in points]
        for candidate, points in curves.items()
    }
    spec, binding = inputs.spec, result.bottleneck
    facts = {
        "Goodput": f"{show_interval(result.goodput_rps, '.2f')} requests/s at {100 * inputs.goal.target:g} % attainment",
        "Attainment": f"{show_interval(result.prediction.attainment, '.1f', 100)} % at {result.prediction.rate_rps:.2f} requests/s",
        "Objectives": f"TTFT {spec.slo.ttft_s * 1e3:g} ms, TPOT {spec.slo.tpot_s * 1e3:g} ms",
        "Binds": f"{binding.objective.upper()}; {RESOURCES[binding.resource]}",
        "Engines": f"{format_candidate_engines(result.chosen)}, {result.chosen.num_gpus} GPUs {spec.gpu}",
    }
    return _PAGE.substitute(
        title=escape(f"Plan for {spec.model} on {spec.gpu}: {name_candidate(result.chosen)}"),
        facts="".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in facts.items()),
        command=escape(make_patch_command(inputs, result)),
        lines=_draw_lines(inputs, series),
        legend="<br>".join(
            f'<span class="key" style="background:{colour}"></span>{escape(name)}'
            for name, colour in zip(series, COLOURS, strict=False)
        ),
        rate=f"{result.prediction.rate_rps:.2f}",
        scatter=_draw_scatter(inputs, result),
        met=COLOURS[0],
        missed=COLOURS[1],
        heat=_draw_heat(result),
        alternatives="".join(
            f"<tr><td>{escape(name_candidate(other.ranked.candidate))}</td>"
            f"<td>{other.ranked.goodput_rps:.2f}</td><td>{show_interval(other.difference, '+.1f', 100)} %</td></tr>"
            for other in result.alternatives
        ),
    )


def _draw_lines(inputs: PlanInputs, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    rates = [rate for points in series.values() for rate, _ in points]
    low, high = min(rates), max(rates)
    margin = 0.05 * (high - low)
    return draw_lines(
        series,
        Axis(label="requests per second", low=max(0.0, low - margin), high=high + margin),
        Axis(label="attainment, %", low=0.0, high=100.0),
        target=100 * inputs.goal.target,
    )


def _draw_scatter(inputs: PlanInputs, result: PlanResult) -> str:
    slo = inputs.spec.slo
    latencies = [pair for detail in result.prediction.details for pair in detail.latencies_s]
    shown = latencies[:: len(latencies) // _MOST_POINTS + 1]
    return draw_scatter(
        [(ttft_s, tpot_s * 1e3) for ttft_s, tpot_s in shown],
        Axis(label="TTFT, s", low=0.0, high=2.0 * slo.ttft_s),
        Axis(label="TPOT, ms", low=0.0, high=2e3 * slo.tpot_s),
        box=(slo.ttft_s, slo.tpot_s * 1e3),
    )


def _draw_heat(result: PlanResult) -> str:
    """Chunk sizes against one another, at the plan's number of P-heavy engines; of M and alpha the best.

    Large clusters are scouted on fewer engines, so the number nearest to the plan's is taken at which enough was tried.
    """
    chosen = result.chosen
    by_count: dict[int, dict[tuple[int, int], float]] = {}
    for ranked in result.found.explored:
        candidate = ranked.candidate
        if (candidate.strategy, candidate.replicas) == (chosen.strategy, chosen.replicas):
            values = by_count.setdefault(candidate.num_prefill_heavy, {})
            place = (candidate.prefill_heavy_tokens, candidate.decode_heavy_tokens)
            values[place] = max(values.get(place, 0.0), ranked.goodput_rps)
    count = max(by_count, key=lambda one: (len(by_count[one]) >= _LEAST_CELLS, -abs(one - chosen.num_prefill_heavy)))
    marked = (chosen.prefill_heavy_tokens, chosen.decode_heavy_tokens)
    labels = ("chunk size of P-heavy engines, tokens", "chunk size of D-heavy engines, tokens")
    chart = draw_heat_map(by_count[count], *labels, marked=marked)
    title = f"Goodput by chunk sizes, {count} P-heavy and {chosen.replicas - count} D-heavy engines"
    return f"<section><h2>{title}</h2>{chart}<p>Requests/s on short runs, framed: the plan; blank: not tried.</p></section>"
