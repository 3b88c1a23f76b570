"""What ``sluice parallelism`` searches for: a model, GPUs, objectives and a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_cli.simulation.cluster_builder import load_model, make_link_speed
from sluice_cli.simulation.simulation_settings import SimulationSettings, change_settings
from sluice_core.latency.interface import ModelTooLargeError, UnknownModelError
from sluice_core.latency.known_models import find_model
from sluice_core.planning.parallelism.instances import GpuNodes, ModelInstance, Parallelism, list_parallelisms
from sluice_core.planning.parallelism.phase_runs import PhaseWorkload
from sluice_core.planning.parallelism.placement_search import PlacementProblem
from sluice_core.planning.workload_shift import WorkloadMeans, estimate_means
from sluice_core.records import Slo
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_core.sim.traces import TraceRow

SETTINGS = (
    "prefill_batch_tokens",
    "max_num_seqs",
    "block_size",
    "kv_scale",
    "link",
    "link_bytes_per_s",
    "link_latency_s",
    "host_iteration_s",
    "profile",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismFlags:
    """What the command line of ``sluice parallelism`` says.

    Args:
        model: Name or path.
        gpu: Name.
        num_nodes: Nodes.
        gpus_per_node: GPUs of each.
        ttft_ms: Objective.
        tpot_ms: Objective.
        target: Attainment.
        rate_rps: Rate to serve; None: the trace's own.
        tensor_parallels: Degrees to choose from; None: all that there are measurements of.
        pipeline_parallels: Degrees to choose from; None: all.
        changes: Settings, as ``NAME=VALUE``.
        seeds: Of the runs.
        duration_s: Length of each run; None: as the rate asks for.
    """

    model: str
    gpu: str
    num_nodes: int
    gpus_per_node: int
    ttft_ms: float
    tpot_ms: float
    target: float | None = None
    rate_rps: float | None = None
    tensor_parallels: tuple[int, ...] | None = None
    pipeline_parallels: tuple[int, ...] | None = None
    changes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1, 2)
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismInputs:
    """A task.

    Args:
        problem: What is searched for.
        left_out: Why parallelisms are not compared, with the parallelisms.
    """

    problem: PlacementProblem
    left_out: dict[str, list[Parallelism]]


def make_parallelism_inputs(flags: ParallelismFlags, rows: Sequence[TraceRow]) -> ParallelismInputs:
    """Makes the task.

    Raises:
        ValueError: Something is unknown, out of range, or was not measured.
    """
    settings = _read_settings(flags.changes)
    nodes = GpuNodes(num_nodes=flags.num_nodes, gpus_per_node=flags.gpus_per_node)
    workload = PhaseWorkload(
        rows=rows,
        slo=Slo(ttft_s=flags.ttft_ms / 1e3, tpot_s=flags.tpot_ms / 1e3),
        target=DEFAULT_ATTAINMENT if flags.target is None else flags.target,
        link=make_link_speed(settings),
        prefill_batch_tokens=settings.parameters.prefill_batch_tokens,
        max_num_seqs=settings.max_num_seqs,
        block_size_tokens=settings.block_size,
    )
    instances, left_out = _load_instances(flags, settings, nodes)
    problem = PlacementProblem(
        workload=workload,
        instances=instances,
        nodes=nodes,
        rate_rps=read_trace_rate(rows) if flags.rate_rps is None else flags.rate_rps,
        seeds=flags.seeds,
        duration_s=flags.duration_s,
    )
    return ParallelismInputs(problem=problem, left_out=left_out)


def read_trace_rate(rows: Sequence[TraceRow]) -> float:
    """Reads the mean rate of a trace.

    Raises:
        ValueError: Its rows have no times, or all the same.
    """
    first_s, last_s = rows[0].arrival_s, rows[-1].arrival_s
    if first_s is None or last_s is None or last_s <= first_s:
        raise ValueError("the trace does not say when its requests came; --rate is needed")
    return (len(rows) - 1) / (last_s - first_s)


def make_trace_means(rows: Sequence[TraceRow], rate_rps: float | None = None) -> WorkloadMeans:
    """Makes the means of a trace, at its own rate or at a given one.

    Raises:
        ValueError: Neither is known.
    """
    return estimate_means(
        [row.prompt_tokens for row in rows],
        [row.output_tokens for row in rows],
        read_trace_rate(rows) if rate_rps is None else rate_rps,
    )


def _read_settings(changes: Sequence[str]) -> SimulationSettings:
    for change in changes:
        name = change.partition("=")[0]
        if name not in SETTINGS:
            raise ValueError(f"--set {change!r}: {name!r} does not count here; known are {', '.join(SETTINGS)}")
    return change_settings(SimulationSettings(), changes)


def _load_instances(
    flags: ParallelismFlags, settings: SimulationSettings, nodes: GpuNodes
) -> tuple[dict[Parallelism, ModelInstance], dict[str, list[Parallelism]]]:
    """Loads all parallelisms that fit and that there are measurements of; asked-for ones without any are an error."""
    instances: dict[Parallelism, ModelInstance] = {}
    left_out: dict[str, list[Parallelism]] = {}
    for parallelism in _list_wanted(flags, nodes):
        try:
            instances[parallelism] = _load_instance(flags, settings, parallelism)
        except UnknownModelError as error:
            if flags.tensor_parallels and not isinstance(error, ModelTooLargeError):
                raise
            left_out.setdefault(str(error), []).append(parallelism)
    if not instances:
        raise ValueError(f"no parallelism can be simulated: {'; '.join(left_out)}")
    return instances, left_out


def _list_wanted(flags: ParallelismFlags, nodes: GpuNodes) -> list[Parallelism]:
    """Lists the parallelisms of the nodes that flags allow."""
    _, shape = find_model(flags.model)
    every = list_parallelisms(nodes, shape.num_layers)
    for flag, wanted, known in (
        ("--tensor-parallel", flags.tensor_parallels, sorted({each.tensor for each in every})),
        ("--pipeline-parallel", flags.pipeline_parallels, sorted({each.pipeline for each in every})),
    ):
        for degree in wanted or ():
            if degree not in known:
                raise ValueError(
                    f"{flag} {degree} is not possible with {nodes.num_nodes} node(s) of {nodes.gpus_per_node} GPUs "
                    f"and {shape.num_layers} layers; possible are {', '.join(map(str, known))}"
                )
    return [
        each
        for each in every
        if each.tensor in (flags.tensor_parallels or (each.tensor,))
        and each.pipeline in (flags.pipeline_parallels or (each.pipeline,))
    ]


def _load_instance(flags: ParallelismFlags, settings: SimulationSettings, parallelism: Parallelism) -> ModelInstance:
    model = load_model(flags.model, flags.gpu, parallelism.tensor, settings, parallelism.pipeline)
    return ModelInstance(
        parallelism=parallelism,
        stage=model.profile,
        kv_capacity_tokens=int(model.kv_capacity_tokens * settings.kv_scale),
        kv_bytes_per_token=model.kv_bytes_per_token,
    )
