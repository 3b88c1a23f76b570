"""What ``sluice plan`` prints: JSON, a manifest patch, and a summary for people."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sluice_cli.simulation.cluster_spec import EngineGroup, format_engines
from sluice_core.sim.run_summary import make_report
from sluice_core.strategies import get_strategy

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sluice_cli.simulation.plan_inputs import PlanInputs
    from sluice_core.planning.planner import Alternative, PlanResult
    from sluice_core.planning.prediction import Interval
    from sluice_core.planning.slider_candidates import SliderCandidate

RESOURCES = {
    "prefill": "prefill capacity",
    "decode": "decode capacity",
    "kv": "KV cache",
    "none": "no single resource",
}


def format_candidate_engines(candidate: SliderCandidate) -> str:
    """Writes a candidate's engines as ``--engines`` reads them."""
    is_whole = candidate.strategy == "disaggregated"
    groups = [
        EngineGroup(
            count=candidate.num_prefill_heavy, chunk_size_tokens=None if is_whole else candidate.prefill_heavy_tokens
        )
    ]
    if candidate.num_decode_heavy:
        groups.append(EngineGroup(count=candidate.num_decode_heavy, chunk_size_tokens=candidate.decode_heavy_tokens))
    return format_engines(groups)


def name_candidate(candidate: SliderCandidate) -> str:
    """Names a candidate for people."""
    return f"{candidate.strategy} {format_candidate_engines(candidate)}{_parameters_of(candidate)}"


def make_patch(candidate: SliderCandidate, inputs: PlanInputs) -> dict[str, Any]:
    """Makes the merge patch of a ServingCluster that puts a candidate in force.

    What a strategy does not use stays as the manifest has it.
    """
    strategy = get_strategy(candidate.strategy)
    spec: dict[str, Any] = {"strategy": strategy.title, "replicas": candidate.replicas}
    sliders = strategy.sliders
    if sliders.varies_prefill_tokens:
        spec["chunkSizes"] = {"prefillHeavy": candidate.prefill_heavy_tokens}
    if sliders.varies_decode_tokens:
        spec["chunkSizes"]["decodeHeavy"] = candidate.decode_heavy_tokens
    if candidate.num_decode_heavy:
        spec["prefillHeavy"] = candidate.num_prefill_heavy
    if candidate.strategy == "taichi":
        spec["parameters"] = {
            "watermarkPercent": round(candidate.watermark * 100),
            "approachingFactorPercent": round(candidate.approaching_factor * 100),
        }
    elif inputs.manifest is not None and isinstance(inputs.manifest.spec.prefill_heavy, int):
        spec["prefillHeavy"] = min(candidate.num_prefill_heavy, candidate.replicas)
    present = inputs.manifest.spec.engine.tensor_parallel_size if inputs.manifest else candidate.tensor_parallel
    if candidate.tensor_parallel != present:
        spec["engine"] = {"tensorParallelSize": candidate.tensor_parallel}
    return {"spec": spec}


def describe_candidate(candidate: SliderCandidate) -> dict[str, Any]:
    """Describes a candidate in the words of ``sluice simulate``'s flags."""
    return {
        "engines": format_candidate_engines(candidate),
        "strategy": candidate.strategy,
        "tensor_parallel": candidate.tensor_parallel,
        "gpus": candidate.num_gpus,
        "parameters": {"watermark": candidate.watermark, "approaching_factor": candidate.approaching_factor},
    }


def make_plan_report(inputs: PlanInputs, result: PlanResult) -> dict[str, Any]:
    """Makes the JSON that ``--json`` prints."""
    spec, goal, binding = inputs.spec, inputs.goal, result.bottleneck
    metrics = make_report([detail.summary for detail in result.prediction.details])
    return {
        **describe_candidate(result.chosen),
        "model": spec.model,
        "gpu": spec.gpu,
        "ttft_ms": spec.slo.ttft_s * 1e3,
        "tpot_ms": spec.slo.tpot_s * 1e3,
        "target": goal.target,
        "rate_rps": goal.rate_rps,
        "is_met": result.is_met,
        "predicted": {
            "goodput_rps": result.goodput_rps.mean,
            "goodput_interval": list_ends(result.goodput_rps),
            "goodput_per_seed": list(result.found.best.goodputs_rps),
            "rate_rps": result.prediction.rate_rps,
            "attainment": result.prediction.attainment.mean,
            "attainment_interval": list_ends(result.prediction.attainment),
            **{
                name: metrics[name]
                for name in ("attainment_ttft", "attainment_tpot", "attainment_longest_tenth", "ttft_s", "tpot_s")
            },
            **{name: metrics[name] for name in ("moves", "preemptions", "rejected", "prefix_hit_rate")},
        },
        "binds": {
            "objective": binding.objective,
            "resource": binding.resource,
            "rate_rps": binding.rate_rps,
            "missed": binding.missed,
            "relief": binding.attainment_gains,
        },
        "alternatives": [_describe_alternative(alternative) for alternative in result.alternatives],
        "in_force": None if result.in_force is None else describe_candidate(result.in_force.candidate),
        "patch": make_patch(result.chosen, inputs),
        "seeds": list(result.found.fidelity.seeds),
        "duration_s": result.found.fidelity.duration_s,
        "trials": result.num_trials,
        "iterations": result.num_iterations,
    }


def _describe_alternative(alternative: Alternative) -> dict[str, Any]:
    return {
        **describe_candidate(alternative.ranked.candidate),
        "goodput_rps": alternative.ranked.goodput_rps,
        "difference": alternative.difference.mean,
        "difference_interval": list_ends(alternative.difference),
    }


def list_ends(interval: Interval) -> list[float | None]:
    """Lists an interval's ends for JSON, which has no infinity."""
    return [end if abs(end) < float("inf") else None for end in (interval.low, interval.high)]


def make_plan_summary(inputs: PlanInputs, result: PlanResult) -> RenderableType:
    """Shows the plan on a terminal."""
    table = Table(box=None, show_header=False, pad_edge=False)
    chosen, prediction, binding = result.chosen, result.prediction, result.bottleneck
    gpus = f"{chosen.num_gpus} GPUs"
    table.add_row("plan", f"{chosen.strategy} {format_candidate_engines(chosen)} on {gpus}{_parameters_of(chosen)}")
    table.add_row("goodput", f"{show_interval(result.goodput_rps, '.2f')} requests/s at {100 * inputs.goal.target:g} %")
    table.add_row(
        "attainment",
        f"{show_interval(prediction.attainment, '.1f', 100)} % at {prediction.rate_rps:.2f} requests/s,"
        " on requests that the search has not seen",
    )
    ttfts = sorted(value for detail in prediction.details for value in detail.summary.ttfts_s)
    tpots = sorted(value for detail in prediction.details for value in detail.summary.tpots_s)
    for name, values, slo_s in (("TTFT", ttfts, inputs.spec.slo.ttft_s), ("TPOT", tpots, inputs.spec.slo.tpot_s)):
        if len(values) > 1:
            median, ninetieth = statistics.median(values), values[len(values) * 9 // 10]
            shown = f"p50 {median * 1e3:.0f} ms, p90 {ninetieth * 1e3:.0f} ms, objective {slo_s * 1e3:.0f} ms"
            table.add_row(name, shown)
    num_queried_tokens = sum(detail.summary.num_queried_tokens for detail in prediction.details)
    if num_queried_tokens:
        num_hit_tokens = sum(detail.summary.num_hit_tokens for detail in prediction.details)
        table.add_row("prefix hit rate", f"{100 * num_hit_tokens / num_queried_tokens:.1f} % of prompt tokens")
    missed = ", ".join(f"{name} {100 * share:.1f} %" for name, share in binding.missed.items())
    table.add_row(
        "limited by",
        f"{binding.objective.upper()}; {RESOURCES[binding.resource]} (at {binding.rate_rps:.2f}/s missed: {missed})",
    )
    parts: list[RenderableType] = [table]
    if result.alternatives:
        parts += [Text(""), _make_alternatives_table(result)]
    return Group(*parts, Text(""), Text(make_patch_command(inputs, result)))


def make_patch_command(inputs: PlanInputs, result: PlanResult) -> str:
    """Writes the command that puts the plan in force."""
    name = inputs.manifest.metadata.name if inputs.manifest else "NAME"
    return f"kubectl patch servingcluster {name} --type merge -p '{json.dumps(make_patch(result.chosen, inputs))}'"


def _make_alternatives_table(result: PlanResult) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("next best", "engines", "goodput", "against the plan"):
        table.add_column(name)
    for alternative in result.alternatives:
        candidate = alternative.ranked.candidate
        in_force = result.in_force is not None and candidate == result.in_force.candidate
        table.add_row(
            candidate.strategy + (" (in force)" if in_force else ""),
            format_candidate_engines(candidate) + _parameters_of(candidate),
            f"{alternative.ranked.goodput_rps:.2f}",
            f"{show_interval(alternative.difference, '+.1f', 100)} %",
        )
    return table


def _parameters_of(candidate: SliderCandidate) -> str:
    if candidate.strategy != "taichi":
        return ""
    return f", M {candidate.watermark:g}, alpha {candidate.approaching_factor:g}"


def show_interval(interval: Interval, form: str, factor: float = 1.0) -> str:
    """Writes a mean and its interval."""
    ends = [f"{factor * end:{form}}" if abs(end) < float("inf") else "?" for end in (interval.low, interval.high)]
    return f"{factor * interval.mean:{form}} ({ends[0]} to {ends[1]})"
