"""Simulates one instance of a phase, or a pair of both.

Prefills run in a ``PrefillPipeline``. Decodes run in the simulator of whole clusters, behind a source of finished
prefills that takes no time: so KV is pulled as there is room for it, and decodes are preempted, as in the product. What
a request waits for its decodes counts for its TPOT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.pipeline_stages import make_lockstep_profile
from sluice_core.latency.transfer import LINKS, LinkSpeed
from sluice_core.planning.parallelism.instances import ModelInstance
from sluice_core.records import EngineId, Role, Slo, SloClass
from sluice_core.sim.prefill_pipeline import PrefillPipeline, simulate_prefills
from sluice_core.sim.sim_setup import (
    BLOCK_SIZE_TOKENS,
    MAX_BATCH_TOKENS,
    MAX_NUM_SEQS,
    Arrival,
    Cell,
    EngineSetup,
    NoGrant,
    SimOptions,
    TransferLink,
)
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.traces import TraceRow
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_core.strategies.disaggregated import DISAGGREGATED
from sluice_core.strategy_parameters import StrategyParameters

_NO_TIME = IterationProfile(linear_s=(0.0, 0.0))
_NO_LIMIT = 10**12  # of blocks and requests


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWorkload:
    """What instances are to serve, and everything else that does not differ between them.

    Args:
        rows: Requests.
        slo: Objectives.
        target: Least attainment.
        classes: Objectives of request classes.
        link: What KV leaves a prefill instance by.
        prefill_batch_tokens: Tokens up to which whole prompts share a batch.
        max_num_seqs: Most running requests of a decode instance.
        block_size_tokens: Tokens per KV block.

    Raises:
        ValueError: Names the field that is empty or out of range.
    """

    rows: Sequence[TraceRow]
    slo: Slo
    target: float = DEFAULT_ATTAINMENT
    classes: Sequence[SloClass] = ()
    link: LinkSpeed = LINKS["nvlink"]
    prefill_batch_tokens: int = StrategyParameters().prefill_batch_tokens
    max_num_seqs: int = MAX_NUM_SEQS
    block_size_tokens: int = BLOCK_SIZE_TOKENS

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is empty; at least one request is needed")
        if not 0.0 < self.target <= 1.0:
            raise ValueError(f"target is {self.target}; above 0 and up to 1 is allowed")
        for name, value in (("slo.ttft_s", self.slo.ttft_s), ("slo.tpot_s", self.slo.tpot_s)):
            if not value > 0.0:
                raise ValueError(f"{name} is {value}; it is above 0")
        for field in ("prefill_batch_tokens", "max_num_seqs", "block_size_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; at least 1 is needed")


def run_prefills(
    workload: PhaseWorkload, instance: ModelInstance, arrivals: Sequence[Arrival], most_missed: int
) -> list[float] | None:
    """Simulate prefills; see ``simulate_prefills``."""
    pipeline = PrefillPipeline(
        stage=instance.stage,
        num_stages=instance.parallelism.pipeline,
        batch_tokens=workload.prefill_batch_tokens,
        kv_capacity_tokens=instance.kv_capacity_tokens,
    )
    return simulate_prefills(pipeline, arrivals, most_missed)


def run_decodes(
    workload: PhaseWorkload, instance: ModelInstance, arrivals: Sequence[Arrival], most_missed: int
) -> bool:
    """Simulate decodes; says whether no more than ``most_missed`` requests missed their TPOT.

    Args:
        workload: What they are of.
        instance: The instance.
        arrivals: Requests, in the order in which their prefills end; ``at_s`` is when.
        most_missed: Most requests that may miss, those among them that the KV cache cannot hold.
    """
    num_blocks = instance.kv_capacity_tokens // workload.block_size_tokens
    fitting = [
        replace(each, slo=Slo(ttft_s=math.inf, tpot_s=each.slo.tpot_s))
        for each in arrivals
        if each.prompt_tokens + each.output_tokens <= num_blocks * workload.block_size_tokens
    ]
    most_missed -= len(arrivals) - len(fitting)
    if most_missed < 0:
        return False
    return Simulation(_make_decode_cell(workload, instance, num_blocks), fitting).run(most_missed=most_missed)


def run_pair(
    workload: PhaseWorkload,
    prefill: ModelInstance,
    decode: ModelInstance,
    arrivals: Sequence[Arrival],
    most_missed: int,
) -> bool:
    """Simulate a prefill and a decode instance; says whether no more than ``most_missed`` requests missed anything."""
    ends_s = run_prefills(workload, prefill, arrivals, most_missed)
    if ends_s is None:
        return False
    handed_over: list[Arrival] = []
    for end_s, arrival in zip(ends_s, arrivals, strict=True):
        is_late = end_s - arrival.at_s > arrival.slo.ttft_s
        most_missed -= is_late
        if end_s < math.inf:
            # It has missed already, and decodes like the others.
            tpot_s = math.inf if is_late else arrival.slo.tpot_s
            handed_over.append(replace(arrival, at_s=end_s, slo=Slo(ttft_s=math.inf, tpot_s=tpot_s)))
    return run_decodes(workload, decode, handed_over, most_missed)


def _make_decode_cell(workload: PhaseWorkload, instance: ModelInstance, num_blocks: int) -> Cell:
    """Make a source of finished prefills, and the instance that decodes."""
    source = EngineSetup(
        engine_id=EngineId("source"),
        profile=_NO_TIME,
        role=Role.PREFILL_HEAVY,
        chunk_size_tokens=MAX_BATCH_TOKENS,
        kv_blocks_total=_NO_LIMIT,
        kv_bytes_per_token=instance.kv_bytes_per_token,
        block_size_tokens=workload.block_size_tokens,
        max_num_seqs=_NO_LIMIT,
        link=TransferLink(speed=workload.link),
    )
    target = replace(
        source,
        engine_id=EngineId("target"),
        profile=make_lockstep_profile(instance.stage, instance.parallelism.pipeline),
        role=Role.DECODE_HEAVY,
        chunk_size_tokens=0,
        kv_blocks_total=num_blocks,
        max_num_seqs=workload.max_num_seqs,
    )
    return Cell(engines=(source, target), strategy=DISAGGREGATED, options=SimOptions(no_grant=NoGrant.WAIT))
