"""What ``sluice parallelism`` prints: a table for people, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from sluice_cli.simulation.parallelism_inputs import ParallelismInputs
    from sluice_core.planning.parallelism.instances import Parallelism, Phase
    from sluice_core.planning.parallelism.placement_search import (
        Candidate,
        ChosenInstances,
        NodeAffinity,
        PhasePlacement,
    )

NOT_DEPLOYABLE = (
    "not deployable yet: all engines of a ServingCluster have one tensor parallelism, and no pipeline parallelism"
)


def make_parallelism_report(
    inputs: ParallelismInputs, affinity: NodeAffinity, placement: PhasePlacement
) -> dict[str, Any]:
    """Makes the JSON that ``--json`` prints."""
    problem = inputs.problem
    return {
        "node_affinity": affinity.value,
        "rate_rps": problem.rate_rps,
        "ttft_ms": problem.workload.slo.ttft_s * 1e3,
        "tpot_ms": problem.workload.slo.tpot_s * 1e3,
        "target": problem.workload.target,
        "is_deployable": False,
        "phases": [row for chosen in placement.chosen for row in _describe_phases(chosen)],
        "gpus": placement.num_gpus,
        "nodes": placement.num_nodes,
        "fits": placement.num_nodes <= problem.nodes.num_nodes,
        "candidates": [_describe_candidate(candidate) for candidate in placement.candidates],
        "left_out": [
            {"reason": reason, "parallelisms": [_describe_parallelism(each) for each in parallelisms]}
            for reason, parallelisms in inputs.left_out.items()
        ],
    }


def make_parallelism_table(inputs: ParallelismInputs, placement: PhasePlacement) -> RenderableType:
    """Shows a placement on a terminal."""
    table = Table(box=None, pad_edge=False)
    for name in ("phase", "TP", "PP", "goodput per GPU", "instances", "GPUs"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for chosen in placement.chosen:
        for row in _describe_phases(chosen):
            table.add_row(
                row["phase"],
                str(row["tensor_parallel"]),
                str(row["pipeline_parallel"]),
                f"{row['goodput_per_gpu_rps']:.2f}",
                str(row["instances"]),
                str(row["gpus"]),
            )
    size, rate_rps = inputs.problem.nodes.gpus_per_node, inputs.problem.rate_rps
    lines = [
        "",
        f"{placement.num_gpus} GPUs on {placement.num_nodes} node(s) of {size} serve {rate_rps:.4g} requests/s",
        *_explain_pairs(placement.chosen),
        NOT_DEPLOYABLE,
        *(f"left out: {_name(parallelisms)}: {reason}" for reason, parallelisms in inputs.left_out.items()),
    ]
    return Group(table, *(Text(line) for line in lines))


def _describe_phases(chosen: ChosenInstances) -> list[dict[str, Any]]:
    """Describes the phases of a choice; those of a pair have one goodput together."""
    candidate = chosen.candidate
    return [
        {
            "phase": phase.value,
            **_describe_parallelism(parallelism),
            "goodput_rps": candidate.goodput_rps,
            "goodput_per_gpu_rps": candidate.goodput_per_gpu_rps,
            "instances": chosen.num_instances,
            "gpus": chosen.num_instances * parallelism.num_gpus,
        }
        for phase, parallelism in candidate.parallelism.items()
    ]


def _describe_candidate(candidate: Candidate) -> dict[str, Any]:
    described: Mapping[Phase, Parallelism] = candidate.parallelism
    return {
        **{phase.value: _describe_parallelism(parallelism) for phase, parallelism in described.items()},
        "goodput_rps": candidate.goodput_rps,
        "goodput_per_gpu_rps": candidate.goodput_per_gpu_rps,
    }


def _describe_parallelism(parallelism: Parallelism) -> dict[str, int]:
    return {"tensor_parallel": parallelism.tensor, "pipeline_parallel": parallelism.pipeline}


def _explain_pairs(chosen: Sequence[ChosenInstances]) -> list[str]:
    """Says how the instances of a pair share nodes; nothing of phases that are placed apart."""
    return [
        f"a prefill and a decode instance share {each.candidate.num_groups} node(s); goodput is that of such a pair"
        for each in chosen
        if each.candidate.num_groups
    ]


def _name(parallelisms: Sequence[Parallelism]) -> str:
    """Names parallelisms; of those of one tensor parallelism only that."""
    return ", ".join(f"TP {tensor}" for tensor in sorted({each.tensor for each in parallelisms}))
