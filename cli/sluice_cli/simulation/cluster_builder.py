"""Builds the simulator's cluster from its description."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sluice_cli.simulation.simulation_settings import AHEAD
from sluice_core.latency.measured_profiles import Assumptions, ProfileKind, load_model_on_gpu
from sluice_core.latency.transfer import LINKS, LinkSpeed
from sluice_core.records import EngineId, Role
from sluice_core.sim.sim_setup import Cell, EngineSetup, RouterSetup, SimOptions, TransferLink, count_host_blocks
from sluice_core.sim.traces import HASH_BLOCK_TOKENS
from sluice_core.strategies import get_strategy

if TYPE_CHECKING:
    from sluice_cli.simulation.cluster_spec import ClusterSpec
    from sluice_cli.simulation.simulation_settings import SimulationSettings
    from sluice_core.latency import ModelOnGpu

_ROLES = (Role.PREFILL_HEAVY, Role.DECODE_HEAVY)  # of a description's groups of engines


def build_cluster(spec: ClusterSpec, seed: int) -> Cell:
    """Builds the cluster.

    Raises:
        ValueError: An unknown name, or numbers that contradict one another.
    """
    settings = spec.settings
    strategy = get_strategy(spec.strategy)
    return Cell(
        engines=build_engines(spec),
        strategy=strategy.vary(placement=settings.placement, flows=None if settings.flow else False),
        parameters=settings.parameters,
        options=make_options(settings),
        seed=seed,
        routers=make_routers(settings),
    )


def make_options(settings: SimulationSettings) -> SimOptions:
    """Makes the simulator's options."""
    return SimOptions(
        no_grant=settings.no_grant,
        ttft_end=settings.ttft_end,
        counts_decodes=settings.budget == "all",
        schedules_ahead=settings.scheduling == AHEAD,
        hash_block_tokens=HASH_BLOCK_TOKENS if settings.prefix_reuse else None,
        wait_limit_s=settings.wait_limit_s,
        message_s=settings.message_s,
        output_lengths=settings.output_lengths,
        length_deviation_tokens=settings.length_deviation_tokens,
        prefix_report_s=settings.prefix_report_s if settings.prefix_reuse else None,
        report_s=settings.report_s,
        knows_host_kv=settings.knows_host_kv,
    )


def make_routers(settings: SimulationSettings) -> tuple[RouterSetup, ...]:
    """Makes the routers."""
    return (RouterSetup(latency_factor=settings.router_latency_factor),) * settings.routers


def build_engines(spec: ClusterSpec) -> list[EngineSetup]:
    """Builds the engines: P-heavy ones first."""
    settings = spec.settings
    target = load_model(spec.model, spec.gpu, spec.tensor_parallel, settings)
    link = TransferLink(name="shared" if settings.link_shared else "", speed=make_link_speed(settings))
    return [
        EngineSetup(
            engine_id=EngineId(f"{role.value[0].lower()}{number}"),
            profile=target.profile,
            role=role,
            chunk_size_tokens=settings.max_batch_tokens if group.chunk_size_tokens is None else group.chunk_size_tokens,
            kv_blocks_total=int(target.kv_capacity_tokens * settings.kv_scale) // settings.block_size,
            kv_bytes_per_token=target.kv_bytes_per_token,
            block_size_tokens=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_batch_tokens=settings.max_batch_tokens,
            link=link,
            operators_per_iteration=settings.operators_per_iteration,
            latency_factor=settings.engine_latency_factor,
            host_kv_blocks=_find_host_blocks(settings, target.kv_bytes_per_token),
            host_bytes_per_s=settings.host_bytes_per_s,
        )
        for role, group in zip(_ROLES, spec.engines, strict=False)
        for number in range(group.count)
    ]


def _find_host_blocks(settings: SimulationSettings, kv_bytes_per_token: int) -> int | None:
    """Finds how many KV blocks of an engine its host's memory has room for; None: it keeps none."""
    if settings.host_kv_gib is None or not settings.prefix_reuse:
        return None
    return count_host_blocks(settings.host_kv_gib, kv_bytes_per_token, settings.block_size)


def make_link_speed(settings: SimulationSettings) -> LinkSpeed:
    """Makes the speed of the links that KV moves over."""
    speed = LINKS[settings.link]
    return LinkSpeed(
        bytes_per_s=settings.link_bytes_per_s or speed.bytes_per_s,
        latency_s=speed.latency_s if settings.link_latency_s is None else settings.link_latency_s,
    )


def load_model(
    model: str, gpu: str, tensor_parallel: int, settings: SimulationSettings, pipeline_parallel: int = 1
) -> ModelOnGpu:
    """Loads a model on the GPUs of an engine, once per process.

    Raises:
        UnknownModelError: There is no such profile.
    """
    return _load(model, gpu, tensor_parallel, pipeline_parallel, settings.profile, settings.host_iteration_s)


@cache
def _load(  # noqa: PLR0917 - the key of a cache
    model: str,
    gpu: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    kind: ProfileKind | None,
    host_iteration_s: float | None,
) -> ModelOnGpu:
    assumptions = Assumptions() if host_iteration_s is None else Assumptions(host_iteration_s=host_iteration_s)
    return load_model_on_gpu(
        model, gpu, tensor_parallel, pipeline_parallel=pipeline_parallel, kind=kind, assumptions=assumptions
    )
