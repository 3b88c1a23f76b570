"""What ``sluice plan`` plans for: a manifest with its bounds, or flags, or a manifest that flags change."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice_cli.simulation.cluster_builder import build_engines, make_options, make_routers
from sluice_cli.simulation.cluster_spec import ClusterFlags, ClusterSpec, EngineGroup, choose_cluster_spec
from sluice_core.planning.planner import Goal
from sluice_core.planning.slider_candidates import (
    APPROACHING_FACTORS,
    LEAST_CHUNK_TOKENS,
    WATERMARKS,
    PrefillHeavyBounds,
    SearchSpace,
    SliderCandidate,
    list_chunk_sizes,
)
from sluice_core.planning.trials import PlanningProblem
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_core.strategies import STRATEGIES, get_strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_core.sim.traces import TraceRow
    from sluice_operator.api.fields_and_defaults.autotune_spec import TokenBounds
    from sluice_operator.api.serving_cluster import ServingCluster

_RANGE = re.compile(r"([0-9]{1,7})(%?)(?:-([0-9]{1,7})(%?))?")
_MOST_REPLICAS = 1024  # as many as a manifest may ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """What the command line of ``sluice plan`` says; None: nothing.

    Args:
        model: Name or path.
        gpu: Name.
        tensor_parallels: GPUs that an engine may have.
        strategies: Strategies to choose from.
        engines: Engines in force, such as ``2x1024,2x256``.
        replicas: Engines: a number, or least and most.
        prefill_heavy: Bounds of the P-heavy engines.
        prefill_chunks: Bounds of their chunk size.
        decode_chunks: Bounds of the others' chunk size.
        ttft_ms: Objective.
        tpot_ms: Objective.
        rate_rps: Rate to serve.
        target: Attainment.
        changes: Settings, as ``NAME=VALUE``; M and alpha given here are not searched.
        prefix_reuse: See ``SimulationSettings``.
    """

    model: str | None = None
    gpu: str | None = None
    tensor_parallels: tuple[int, ...] | None = None
    strategies: tuple[str, ...] | None = None
    engines: str | None = None
    replicas: tuple[int, int] | None = None
    prefill_heavy: PrefillHeavyBounds | None = None
    prefill_chunks: tuple[int, int] | None = None
    decode_chunks: tuple[int, int] | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    rate_rps: float | None = None
    target: float | None = None
    changes: tuple[str, ...] = ()
    prefix_reuse: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """A planning task.

    Args:
        spec: The cluster that it starts from.
        problem: What is planned for.
        space: What may be chosen.
        goal: What to reach.
        in_force: What runs now; None: nothing.
        manifest: The manifest; None: there is none.
    """

    spec: ClusterSpec
    problem: PlanningProblem
    space: SearchSpace
    goal: Goal
    in_force: SliderCandidate | None
    manifest: ServingCluster | None


def parse_range(text: str) -> tuple[int, int, bool]:
    """Reads ``N``, ``LOW-HIGH`` or either in percent; returns least, most and whether it is percent.

    Raises:
        ValueError: Something else.
    """
    match = _RANGE.fullmatch(text)
    if not match or (match[3] and match[2] != match[4]):
        raise ValueError(f"{text!r} is neither a number such as 4 nor a range such as 2-8")
    low, high = int(match[1]), int(match[3] or match[1])
    if low > high:
        raise ValueError(f"{text!r} ends below its start; swap the two")
    return low, high, bool(match[2])


def make_inputs(manifest: ServingCluster | None, flags: PlanFlags, rows: Sequence[TraceRow]) -> PlanInputs:
    """Makes the task of manifest and flags; flags win.

    Raises:
        ValueError: Something is missing, unknown, or contradicts something else.
    """
    spec = _choose_spec(manifest, flags)
    parallels = flags.tensor_parallels or (spec.tensor_parallel,)
    spec = replace(spec, tensor_parallel=parallels[0])
    settings = spec.settings
    problem = PlanningProblem(
        rows=rows,
        slo=spec.slo,
        engines={parallel: build_engines(_with_engine(spec, parallel))[0] for parallel in parallels},
        strategies={
            name: get_strategy(name).vary(placement=settings.placement, flows=None if settings.flow else False)
            for name in STRATEGIES
        },
        # Those that candidates vary are each candidate's own.
        parameters=settings.parameters,
        options=make_options(settings),
        classes=spec.classes,
        routers=make_routers(settings),
        burstiness=settings.burstiness,
    )
    return PlanInputs(
        spec=spec,
        problem=problem,
        space=_make_space(manifest, flags, spec),
        goal=_make_goal(manifest, flags, spec, parallels),
        in_force=_make_candidate(spec) if spec.engines else None,
        manifest=manifest,
    )


def _choose_spec(manifest: ServingCluster | None, flags: PlanFlags) -> ClusterSpec:
    cluster_flags = ClusterFlags(
        model=flags.model,
        gpu=flags.gpu,
        # A manifest's strategy stays the one in force; flags only say what to choose from.
        strategy=flags.strategies[0] if flags.strategies and manifest is None else None,
        engines=flags.engines,
        ttft_ms=flags.ttft_ms,
        tpot_ms=flags.tpot_ms,
        changes=flags.changes,
        prefix_reuse=flags.prefix_reuse,
    )
    return choose_cluster_spec(
        manifest, cluster_flags, {"--replicas": flags.replicas or flags.engines or flags.rate_rps}
    )


def _with_engine(spec: ClusterSpec, tensor_parallel: int) -> ClusterSpec:
    group = EngineGroup(count=1, chunk_size_tokens=LEAST_CHUNK_TOKENS)
    return replace(spec, tensor_parallel=tensor_parallel, engines=(group,))


def _make_candidate(spec: ClusterSpec) -> SliderCandidate:
    """Makes the candidate that a cluster is; one group of engines is aggregation, whatever its strategy says."""
    most = spec.settings.max_batch_tokens
    sizes = [most if group.chunk_size_tokens is None else group.chunk_size_tokens for group in spec.engines]
    is_single = len(spec.engines) == 1
    return SliderCandidate(
        strategy="aggregated" if is_single and get_strategy(spec.strategy).sliders.has_roles else spec.strategy,
        num_prefill_heavy=spec.engines[0].count,
        num_decode_heavy=0 if is_single else spec.engines[1].count,
        prefill_heavy_tokens=sizes[0],
        decode_heavy_tokens=0 if is_single else sizes[1],
        tensor_parallel=spec.tensor_parallel,
        watermark=spec.settings.parameters.watermark,
        approaching_factor=spec.settings.parameters.approaching_factor,
    )


def _make_space(manifest: ServingCluster | None, flags: PlanFlags, spec: ClusterSpec) -> SearchSpace:
    most = spec.settings.max_batch_tokens
    bounds = manifest.spec.autotune.bounds if manifest else None
    chunks = bounds.chunk_sizes if bounds else None
    prefill = flags.prefill_chunks or _read_bounds(chunks.prefill_heavy if chunks else None) or (64, most)
    decode = flags.decode_chunks or _read_bounds(chunks.decode_heavy if chunks else None) or (0, most)
    prefill_heavy = flags.prefill_heavy or PrefillHeavyBounds()
    if bounds and bounds.prefill_heavy and not flags.prefill_heavy:
        low, high, is_percent = parse_range(f"{bounds.prefill_heavy.min}-{bounds.prefill_heavy.max}")
        prefill_heavy = PrefillHeavyBounds(low=low, high=high, is_percent=is_percent)
    in_force = [group.chunk_size_tokens or 0 for group in spec.engines]
    named = {change.partition("=")[0] for change in flags.changes}
    parameters = spec.settings.parameters
    return SearchSpace(
        strategies=flags.strategies or tuple(STRATEGIES),
        prefill_heavy_tokens=list_chunk_sizes(prefill[0], min(prefill[1], most), in_force[:1]),
        decode_heavy_tokens=list_chunk_sizes(decode[0], min(decode[1], most), in_force[1:]),
        max_batch_tokens=most,
        prefill_heavy=prefill_heavy,
        watermarks=_choose(WATERMARKS, parameters.watermark, is_fixed="watermark" in named),
        approaching_factors=_choose(
            APPROACHING_FACTORS, parameters.approaching_factor, is_fixed="approaching_factor" in named
        ),
    )


def _read_bounds(bounds: TokenBounds | None) -> tuple[int, int] | None:
    return None if bounds is None else (bounds.min, bounds.max)


def _choose(values: tuple[float, ...], in_force: float, *, is_fixed: bool) -> tuple[float, ...]:
    return (in_force,) if is_fixed else tuple(sorted({*values, in_force}))


def _make_goal(
    manifest: ServingCluster | None, flags: PlanFlags, spec: ClusterSpec, tensor_parallels: tuple[int, ...]
) -> Goal:
    bounds = manifest.spec.autotune.bounds.replicas if manifest else None
    present = sum(group.count for group in spec.engines) or None
    if flags.replicas:
        low, high = flags.replicas
        # A number alone is a most with a rate: fewer engines may serve it too.
        low = 1 if low == high and flags.rate_rps else low
    elif flags.rate_rps:
        low, high = (bounds.min, bounds.max) if bounds else (1, _MOST_REPLICAS)
    else:
        low = high = present or 1
    target = flags.target
    if target is None:
        target = manifest.spec.slo.attainment_share if manifest else DEFAULT_ATTAINMENT
    return Goal(
        target=target,
        rate_rps=flags.rate_rps,
        least_replicas=low,
        most_replicas=high,
        tensor_parallels=tensor_parallels,
    )
