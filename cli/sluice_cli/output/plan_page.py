"""The page of ``sluice plan --html``: one file without scripts that fetches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2

from sluice_cli.output.plan_charts import draw_attainment, draw_goodput_by_chunk_sizes, draw_latencies
from sluice_cli.output.plan_report import (
    RESOURCES,
    format_candidate_engines,
    make_patch_command,
    name_candidate,
    show_interval,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sluice_cli.simulation.plan_inputs import PlanInputs
    from sluice_core.planning.planner import PlanResult
    from sluice_core.planning.slider_candidates import SliderCandidate

_FEWEST_CELLS = 4  # of a heat map that shows something
_MOST_POINTS = 2000  # of the latency chart: more make the page slow and the picture no clearer


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChart:
    """A chart of the page.

    Args:
        title: What it shows.
        svg: The drawing.
        note: How to read it.
    """

    title: str
    svg: str
    note: str


def make_page(
    inputs: PlanInputs, result: PlanResult, curves: Mapping[SliderCandidate, Sequence[tuple[float, float]]]
) -> str:
    """Makes the page.

    Args:
        inputs: The task.
        result: The plan.
        curves: Attainment (0 to 1) by rate of the best candidates.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sluice_cli.output", "."),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("plan_page.html.jinja").render(
        title=f"Plan for {inputs.spec.model} on {inputs.spec.gpu}: {name_candidate(result.chosen)}",
        facts=_describe_plan(inputs, result),
        command=make_patch_command(inputs, result),
        charts=[
            _chart_attainment(inputs, curves),
            _chart_latencies(inputs, result),
            _chart_chunk_sizes(result),
        ],
        alternatives=[
            (
                name_candidate(other.ranked.candidate),
                f"{other.ranked.goodput_rps:.2f}",
                f"{show_interval(other.difference, '+.1f', 100)} %",
            )
            for other in result.alternatives
        ],
    )


def _describe_plan(inputs: PlanInputs, result: PlanResult) -> dict[str, str]:
    spec, binding, prediction = inputs.spec, result.bottleneck, result.prediction
    goodput, attainment = show_interval(result.goodput_rps, ".2f"), show_interval(prediction.attainment, ".1f", 100)
    return {
        "Goodput": f"{goodput} requests/s at {100 * inputs.goal.target:g} % attainment",
        "Attainment": f"{attainment} % at {prediction.rate_rps:.2f} requests/s",
        "Objectives": f"TTFT {spec.slo.ttft_s * 1e3:g} ms, TPOT {spec.slo.tpot_s * 1e3:g} ms",
        "Limited by": f"{binding.objective.upper()}; {RESOURCES[binding.resource]}",
        "Engines": f"{format_candidate_engines(result.chosen)}, {result.chosen.num_gpus} GPUs {spec.gpu}",
    }


def _chart_attainment(inputs: PlanInputs, curves: Mapping[SliderCandidate, Sequence[tuple[float, float]]]) -> PageChart:
    percents = {
        name_candidate(candidate): [(rate, 100 * attainment) for rate, attainment in points]
        for candidate, points in curves.items()
    }
    return PageChart(
        title="Attainment against the rate",
        svg=draw_attainment(percents, 100 * inputs.goal.target),
        note="Share of requests that meet both objectives, of the plan and the next best.",
    )


def _chart_latencies(inputs: PlanInputs, result: PlanResult) -> PageChart:
    slo = inputs.spec.slo
    latencies = [pair for detail in result.prediction.details for pair in detail.latencies_s]
    shown = latencies[:: len(latencies) // _MOST_POINTS + 1]
    points = [(ttft_s, tpot_s * 1e3) for ttft_s, tpot_s in shown]
    return PageChart(
        title=f"Requests at {result.prediction.rate_rps:.2f} requests/s, and the objectives",
        svg=draw_latencies(points, slo.ttft_s, slo.tpot_s * 1e3),
        note="Dashed: the objectives. Points beyond an axis stand at its end.",
    )


def _chart_chunk_sizes(result: PlanResult) -> PageChart:
    chosen = result.chosen
    num_prefill_heavy, goodputs_rps = choose_explored(result)
    num_decode_heavy = chosen.replicas - num_prefill_heavy
    return PageChart(
        title=f"Goodput by chunk sizes, {num_prefill_heavy} P-heavy and {num_decode_heavy} D-heavy engines",
        svg=draw_goodput_by_chunk_sizes(goodputs_rps, (chosen.prefill_heavy_tokens, chosen.decode_heavy_tokens)),
        note="Requests per second in short runs. Framed: the plan. Blank: not tried.",
    )


def choose_explored(result: PlanResult) -> tuple[int, dict[tuple[int, int], float]]:
    """Chooses what the heat map shows: the goodputs found for one number of P-heavy engines.

    Returns:
        The number, and the goodput by chunk sizes of P-heavy and D-heavy engines; of M and alpha the best.
    """
    chosen = result.chosen
    by_count: dict[int, dict[tuple[int, int], float]] = {}
    for ranked in result.found.explored:
        candidate = ranked.candidate
        if (candidate.strategy, candidate.replicas) == (chosen.strategy, chosen.replicas):
            goodputs_rps = by_count.setdefault(candidate.num_prefill_heavy, {})
            sizes = (candidate.prefill_heavy_tokens, candidate.decode_heavy_tokens)
            goodputs_rps[sizes] = max(goodputs_rps.get(sizes, 0.0), ranked.goodput_rps)
    # Large clusters are explored on fewer engines, so little may have been tried at the plan's own number of P-heavy
    # engines. The nearest number with enough cells is taken.
    count = max(by_count, key=lambda one: (len(by_count[one]) >= _FEWEST_CELLS, -abs(one - chosen.num_prefill_heavy)))
    return count, by_count[count]
