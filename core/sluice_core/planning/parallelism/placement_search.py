"""DistServe's two placement algorithms.

Both enumerate how instances may share the model among their GPUs, find the goodput of each by simulation, keep what has
the highest goodput per GPU, and replicate it for the wanted rate. Where nodes have fast links to one another, each
phase is chosen by itself (Algorithm 1). Where they have not, the prefill and the decode part of a stage share a node,
so that KV stays within it: then pairs of instances are chosen (Algorithm 2).

Source: DistServe, sections 4.1 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice_core.planning.parallelism.instances import GpuNodes, ModelInstance, Parallelism, Phase, count_nodes
from sluice_core.planning.parallelism.phase_goodput import (
    LEAST_REQUESTS,
    MOST_DURATION_S,
    GoodputTask,
    compute_alone_decode_s,
    compute_alone_prefill_s,
)
from sluice_core.planning.parallelism.phase_runs import PhaseWorkload

RunTasks = Callable[[Sequence[GoodputTask]], Sequence[float]]
_ROUNDING = 1e-9  # of a number of instances: a rate that is a multiple of the goodput needs no further one


class NodeAffinity(StrEnum):
    """Whether KV may cross between nodes: ``high`` with fast links between all of them."""

    HIGH = "high"
    LOW = "low"


class NoPlacementError(ValueError):
    """No parallelism meets the objectives at any rate, or none fits into the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """What is placed.

    Args:
        workload: What is to be served.
        instances: What there is to choose from.
        nodes: Where.
        rate_rps: Requests per second to serve.
        seeds: Of the runs.
        duration_s: Length of each run; None: as the rate asks for.

    Raises:
        ValueError: A rate that is not positive and finite.
    """

    workload: PhaseWorkload
    instances: Mapping[Parallelism, ModelInstance]
    nodes: GpuNodes
    rate_rps: float
    seeds: tuple[int, ...] = (1, 2)
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.rate_rps < math.inf:
            raise ValueError(f"rate_rps is {self.rate_rps}; it is above 0 and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What was simulated.

    Args:
        parallelism: Of each phase in it: one, or both of a pair.
        num_groups: Stages that share a node with those of the other phase; 0: phases are placed apart.
        goodput_rps: Of one instance, or of one pair; 0: no rate meets the objectives.
    """

    parallelism: Mapping[Phase, Parallelism]
    goodput_rps: float
    num_groups: int = 0

    @property
    def num_gpus(self) -> int:
        """GPUs of the instance, or of the pair."""
        return sum(each.num_gpus for each in self.parallelism.values())

    @property
    def goodput_per_gpu_rps(self) -> float:
        """Goodput per GPU."""
        return self.goodput_rps / self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenInstances:
    """A candidate, replicated.

    Args:
        candidate: The candidate.
        num_instances: How many of it serve the rate.
    """

    candidate: Candidate
    num_instances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlacement:
    """What to run.

    Args:
        chosen: Instances of each phase (Algorithm 1), or pairs (Algorithm 2).
        num_gpus: GPUs of all.
        num_nodes: Nodes that hold them.
        candidates: All whose goodput was compared, in the order of enumeration.
    """

    chosen: tuple[ChosenInstances, ...]
    num_gpus: int
    num_nodes: int
    candidates: tuple[Candidate, ...]


def place_phases(problem: PlacementProblem, affinity: NodeAffinity, run_tasks: RunTasks) -> PhasePlacement:
    """Place prefills and decodes.

    Args:
        problem: What is placed.
        affinity: Chooses the algorithm.
        run_tasks: Finds goodputs, in any number of processes (``GoodputMeter.measure``).

    Raises:
        NoPlacementError: Nothing fits, or nothing meets the objectives; says how close it comes.
    """
    if not problem.instances:
        raise NoPlacementError("no parallelism is left to choose from")
    prefills = _measure_phase(problem, Phase.PREFILL, run_tasks)
    if affinity is NodeAffinity.LOW:
        return _place_pairs(problem, prefills, run_tasks)
    return _place_apart(problem, prefills, _measure_phase(problem, Phase.DECODE, run_tasks))


def _measure_phase(problem: PlacementProblem, phase: Phase, run_tasks: RunTasks) -> list[Candidate]:
    """Find the goodput of each parallelism in a phase; a phase that no rate passes is refused."""
    tasks = [
        _make_task(problem, prefill=instance) if phase is Phase.PREFILL else _make_task(problem, decode=instance)
        for instance in problem.instances.values()
    ]
    candidates = [
        Candidate(parallelism={phase: parallelism}, goodput_rps=goodput_rps)
        for parallelism, goodput_rps in zip(problem.instances, run_tasks(tasks), strict=True)
    ]
    if not any(candidate.goodput_rps for candidate in candidates):
        raise NoPlacementError(_explain_unmet(problem, phase))
    return candidates


def _make_task(
    problem: PlacementProblem,
    *,
    prefill: ModelInstance | None = None,
    decode: ModelInstance | None = None,
    beats_rps: float = 0.0,
) -> GoodputTask:
    return GoodputTask(
        prefill=prefill, decode=decode, seeds=problem.seeds, duration_s=problem.duration_s, beats_rps=beats_rps
    )


def _place_apart(
    problem: PlacementProblem, prefills: Sequence[Candidate], decodes: Sequence[Candidate]
) -> PhasePlacement:
    """Place the best of each phase.

    Source: DistServe, Algorithm 1.
    """
    chosen = tuple(_replicate(_find_best(candidates), problem.rate_rps) for candidates in (prefills, decodes))
    stages = [
        parallelism.tensor
        for each in chosen
        for parallelism in each.candidate.parallelism.values()
        for _ in range(each.num_instances * parallelism.pipeline)
    ]
    return PhasePlacement(
        chosen=chosen,
        num_gpus=sum(stages),
        num_nodes=count_nodes(stages, problem.nodes.gpus_per_node),
        candidates=(*prefills, *decodes),
    )


def _place_pairs(problem: PlacementProblem, prefills: Sequence[Candidate], run_tasks: RunTasks) -> PhasePlacement:
    """Place the best pair.

    A pair serves no more than its prefill instance alone, so pairs are tried in the order of that bound, until none
    left can win. One that does not pass at a rate at which it would win is not looked at further.

    Source: DistServe, Algorithm 2.
    """
    bounds_rps = {candidate.parallelism[Phase.PREFILL]: candidate.goodput_rps for candidate in prefills}
    pairs = list_pairs(problem.nodes, list(problem.instances))
    if not pairs:
        raise NoPlacementError(
            f"no prefill and decode instance fit into nodes of {problem.nodes.gpus_per_node} GPUs together"
        )
    best: Candidate | None = None
    tried: dict[int, Candidate] = {}
    bounds = [bounds_rps[pair[Phase.PREFILL]] / _count_gpus(pair) for pair, _ in pairs]
    for position in sorted(range(len(pairs)), key=lambda each: -bounds[each]):
        pair, num_groups = pairs[position]
        least_rps = best.goodput_per_gpu_rps if best is not None else 0.0
        if bounds[position] <= least_rps:
            break
        task = _make_task(
            problem,
            prefill=problem.instances[pair[Phase.PREFILL]],
            decode=problem.instances[pair[Phase.DECODE]],
            beats_rps=least_rps * _count_gpus(pair),
        )
        candidate = Candidate(parallelism=pair, num_groups=num_groups, goodput_rps=run_tasks([task])[0])
        tried[position] = candidate
        if candidate.goodput_per_gpu_rps > least_rps:
            best = candidate
    if best is None:
        raise NoPlacementError(_explain_unmet(problem, Phase.DECODE))
    chosen = _replicate(best, problem.rate_rps)
    segments = [best.num_gpus // best.num_groups] * (chosen.num_instances * best.num_groups)
    return PhasePlacement(
        chosen=(chosen,),
        num_gpus=sum(segments),
        num_nodes=count_nodes(segments, problem.nodes.gpus_per_node),
        candidates=tuple(candidate for _, candidate in sorted(tried.items())),
    )


def list_pairs(nodes: GpuNodes, parallelisms: Sequence[Parallelism]) -> list[tuple[dict[Phase, Parallelism], int]]:
    """List pairs of a prefill and a decode instance whose corresponding layers can share nodes.

    Layers are divided among groups of stages, one to a node. Within it each phase has its own parallelism. Of several
    divisions of one pair the first one is listed, with the fewest nodes.

    Returns:
        Pairs, and the number of their groups.

    Source: DistServe, Algorithm 2, lines 2 to 4.
    """
    found: dict[tuple[Parallelism, Parallelism], int] = {}
    for groups in range(1, nodes.num_nodes + 1):
        segments = [each for each in parallelisms if each.pipeline % groups == 0]
        for prefill in segments:
            for decode in segments:
                if (prefill.num_gpus + decode.num_gpus) // groups <= nodes.gpus_per_node:
                    found.setdefault((prefill, decode), groups)
    return [({Phase.PREFILL: pair[0], Phase.DECODE: pair[1]}, groups) for pair, groups in found.items()]


def _count_gpus(pair: Mapping[Phase, Parallelism]) -> int:
    return sum(parallelism.num_gpus for parallelism in pair.values())


def _find_best(candidates: Sequence[Candidate]) -> Candidate:
    """Find the highest goodput per GPU; of equal ones the first."""
    return max(candidates, key=lambda candidate: candidate.goodput_per_gpu_rps)


def _replicate(candidate: Candidate, rate_rps: float) -> ChosenInstances:
    return ChosenInstances(
        candidate=candidate, num_instances=math.ceil(rate_rps / candidate.goodput_rps * (1.0 - _ROUNDING))
    )


def _describe_objectives(problem: PlacementProblem) -> str:
    slo = problem.workload.slo
    return (
        f"a TTFT of {1e3 * slo.ttft_s:.4g} ms and a TPOT of {1e3 * slo.tpot_s:.4g} ms "
        f"for {problem.workload.target:.4g} of the requests"
    )


def _explain_unmet(problem: PlacementProblem, phase: Phase) -> str:
    """Say how far the objective of a phase is from what idle instances do."""
    rows, target = problem.workload.rows, problem.workload.target
    needed_s: dict[Parallelism, float] = {}
    for parallelism, instance in problem.instances.items():
        if phase is Phase.PREFILL:
            alone_s = sorted(compute_alone_prefill_s(instance, row.prompt_tokens) for row in rows)
        else:
            alone_s = sorted(compute_alone_decode_s(instance, row.prompt_tokens) for row in rows)
        needed_s[parallelism] = alone_s[math.ceil(target * len(alone_s)) - 1]
    closest = min(needed_s, key=lambda each: needed_s[each])
    name = "TTFT" if phase is Phase.PREFILL else "TPOT"
    limit_s = problem.workload.slo.ttft_s if phase is Phase.PREFILL else problem.workload.slo.tpot_s
    if needed_s[closest] <= limit_s:
        return (
            f"no parallelism meets {_describe_objectives(problem)} at a rate that brings {LEAST_REQUESTS} requests "
            f"into runs of {problem.duration_s or MOST_DURATION_S:g} s; longer ones show lower rates"
        )
    return (
        f"no parallelism meets {_describe_objectives(problem)} at any rate; TP {closest.tensor} PP {closest.pipeline} "
        f"comes closest and needs a {name} of {1e3 * needed_s[closest]:.4g} ms even when it idles"
    )
