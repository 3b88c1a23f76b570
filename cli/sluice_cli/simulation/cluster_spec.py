"""The description of a simulated cluster: model, GPU, engines, strategy, parameters, objectives.

It is plain data, which worker processes receive; ``cluster_builder`` makes the simulator's cluster of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sluice_cli.simulation.simulation_settings import AHEAD, SimulationSettings, change_settings
from sluice_core.latency.known_gpus import parse_gpus
from sluice_core.records import Slo, SloClass
from sluice_core.scheduling.router_wait_limit import ROUTER_WAIT_LIMIT_S
from sluice_core.strategies import DEFAULT_STRATEGY, PARAMETERS
from sluice_core.strategy_parameters import read_parameters
from sluice_operator.api.sliders import resolve_sliders, resolve_strategy, write_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sluice_operator.api.fields_and_defaults.slo_spec import SloClassSpec, SloSpec
    from sluice_operator.api.serving_cluster import ServingCluster, ServingClusterSpec

_GROUP = re.compile(r"([1-9][0-9]{0,4})x(max|[0-9]{1,7})")
_MOST_GROUPS = 2  # P-heavy engines, then D-heavy ones


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """Engines of one role.

    Args:
        count: How many.
        chunk_size_tokens: Their chunk size; None: the largest.
    """

    count: int
    chunk_size_tokens: int | None

    def __str__(self) -> str:
        return f"{self.count}x{'max' if self.chunk_size_tokens is None else self.chunk_size_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The description; worker processes receive it.

    Args:
        model: Name or path of a config.json.
        gpu: Name.
        tensor_parallel: GPUs per engine.
        strategy: Name.
        engines: P-heavy engines, then D-heavy ones.
        slo: Objectives.
        settings: Parameters.
        classes: Objectives and priorities of request classes.
    """

    model: str
    gpu: str
    tensor_parallel: int
    strategy: str
    engines: tuple[EngineGroup, ...]
    slo: Slo
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    classes: tuple[SloClass, ...] = ()


def parse_engines(text: str) -> tuple[EngineGroup, ...]:
    """Reads ``COUNTxCHUNK[,COUNTxCHUNK]``.

    Raises:
        ValueError: Something else.
    """
    matches = [_GROUP.fullmatch(part) for part in text.split(",")]
    if len(matches) > _MOST_GROUPS or not all(matches):
        raise ValueError(f"{text!r} is not COUNTxCHUNK or COUNTxCHUNK,COUNTxCHUNK, such as 2x1024,2x256 or 2xmax,2x0")
    return tuple(
        EngineGroup(count=int(match[1]), chunk_size_tokens=None if match[2] == "max" else int(match[2]))
        for match in matches
        if match
    )


def format_engines(engines: Iterable[EngineGroup]) -> str:
    """Writes what ``parse_engines`` reads."""
    return ",".join(map(str, engines))


def read_manifest_spec(manifest: ServingCluster, model: str | None, gpu: str | None) -> ClusterSpec:
    """Describes the cluster of a manifest.

    Args:
        manifest: The manifest.
        model: Model to simulate; None: the one that the manifest emulates.
        gpu: GPU to simulate; None: the one that the manifest emulates.

    Raises:
        ValueError: The manifest emulates nothing, and no model and GPU were given.
    """
    spec = manifest.spec
    emulation, num_gpus = spec.engine.emulation, spec.engine.tensor_parallel_size
    model = model or (emulation.model if emulation else None)
    if gpu is None and emulation is not None:
        gpu, num_gpus = parse_gpus(emulation.gpu)
    if model is None or gpu is None:
        raise ValueError(
            "the manifest has no spec.engine.emulation, so it names no model and GPU; give --model and --gpu"
        )
    return ClusterSpec(
        model=model,
        gpu=gpu,
        tensor_parallel=num_gpus,
        strategy=resolve_strategy(spec).name,
        engines=_group_engines(spec),
        slo=_make_slo(spec.slo),
        settings=_make_settings(spec),
        classes=tuple(SloClass(name=one.name, slo=_make_slo(one), priority=one.priority) for one in spec.slo.classes),
    )


def _group_engines(spec: ServingClusterSpec) -> tuple[EngineGroup, ...]:
    sliders = resolve_sliders(spec)
    # Engines with one chunk size are one group, which means aggregation.
    if sliders.prefill_heavy_tokens == sliders.decode_heavy_tokens:
        return (EngineGroup(count=spec.replicas, chunk_size_tokens=sliders.prefill_heavy_tokens),)
    groups = (
        EngineGroup(count=sliders.num_prefill_heavy, chunk_size_tokens=sliders.prefill_heavy_tokens),
        EngineGroup(count=spec.replicas - sliders.num_prefill_heavy, chunk_size_tokens=sliders.decode_heavy_tokens),
    )
    return tuple(group for group in groups if group.count)


def _make_slo(slo: SloSpec | SloClassSpec) -> Slo:
    return Slo(ttft_s=slo.ttft_milliseconds / 1e3, tpot_s=slo.tpot_milliseconds / 1e3)


def _make_settings(spec: ServingClusterSpec) -> SimulationSettings:
    return SimulationSettings(
        parameters=read_parameters(PARAMETERS, write_parameters(spec, PARAMETERS), spec.strategy),
        max_batch_tokens=spec.engine.max_batch_tokens,
        scheduling=AHEAD,
        wait_limit_s=ROUTER_WAIT_LIMIT_S,  # a manifest cannot change it
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """What the command line says of the simulated cluster; None: nothing.

    Args:
        model: Name, or path of a config.json.
        gpu: Name.
        tensor_parallel: GPUs per engine.
        strategy: Name.
        engines: Such as ``2x1024,2x256``.
        ttft_ms: TTFT objective, in milliseconds.
        tpot_ms: TPOT objective, in milliseconds.
        changes: Settings, as ``NAME=VALUE``.
        prefix_reuse: See ``SimulationSettings``.
    """

    model: str | None = None
    gpu: str | None = None
    tensor_parallel: int | None = None
    strategy: str | None = None
    engines: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    changes: tuple[str, ...] = ()
    prefix_reuse: bool | None = None


def choose_cluster_spec(
    manifest: ServingCluster | None, flags: ClusterFlags, also_required: Mapping[str, object]
) -> ClusterSpec:
    """Describes the cluster of a manifest, of flags, or of a manifest that flags change.

    Args:
        manifest: The manifest; None: flags say everything.
        flags: They win over the manifest.
        also_required: Values of further flags, by name, that must be there without a manifest.

    Raises:
        ValueError: A flag is missing, unknown or out of range.
    """
    if manifest is not None:
        spec = read_manifest_spec(manifest, flags.model, flags.gpu)
    else:
        spec = _make_flags_spec(flags, also_required)
    return replace(
        spec,
        slo=Slo(
            ttft_s=spec.slo.ttft_s if flags.ttft_ms is None else flags.ttft_ms / 1e3,
            tpot_s=spec.slo.tpot_s if flags.tpot_ms is None else flags.tpot_ms / 1e3,
        ),
        strategy=spec.strategy if flags.strategy is None else flags.strategy,
        tensor_parallel=spec.tensor_parallel if flags.tensor_parallel is None else flags.tensor_parallel,
        engines=spec.engines if flags.engines is None else parse_engines(flags.engines),
        settings=replace(change_settings(spec.settings, flags.changes), prefix_reuse=flags.prefix_reuse),
    )


def _make_flags_spec(flags: ClusterFlags, also_required: Mapping[str, object]) -> ClusterSpec:
    required = {
        "--model": flags.model,
        "--gpu": flags.gpu,
        **also_required,
        "--ttft-ms": flags.ttft_ms,
        "--tpot-ms": flags.tpot_ms,
    }
    missing = [flag for flag, value in required.items() if value is None]
    if missing:
        raise ValueError(f"without a manifest, {', '.join(missing)} must be given")
    return ClusterSpec(
        model=str(flags.model),
        gpu=str(flags.gpu),
        tensor_parallel=1,
        strategy=DEFAULT_STRATEGY.name,
        engines=(),
        slo=Slo(ttft_s=0, tpot_s=0),
    )
