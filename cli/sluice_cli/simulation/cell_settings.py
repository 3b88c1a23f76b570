"""What a simulated cluster is, as flags and manifests say it: model, GPU, engines, strategy, parameters, objectives.

``--engines 2x1024,2x256`` is two P-heavy engines with chunk size 1024 and two D-heavy ones with 256; one group alone is
aggregation; ``max`` is the largest chunk size, 0 takes no prompts.
"""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from sluice_core.latency.catalog import Assumptions, ProfileKind, load_model_on_gpu, parse_gpus
from sluice_core.latency.transfer import LINKS, LinkSpeed
from sluice_core.records import EarlyRejection, EngineId, FlowParameters, Role, Slo, SloClass
from sluice_core.sim.cell import (
    BLOCK_SIZE_TOKENS,
    MAX_BATCH_TOKENS,
    MAX_NUM_SEQS,
    MESSAGE_S,
    Cell,
    EngineSetup,
    NoGrant,
    SimOptions,
    TransferLink,
    TtftEnd,
)
from sluice_core.sim.traces import HASH_BLOCK_TOKENS, TraceError, TraceRow, parse_trace
from sluice_core.strategies import PLACEMENTS, get_strategy
from sluice_operator.api.sliders import resolve_sliders
from sluice_router.settings import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from sluice_core.latency import ModelOnGpu
    from sluice_operator.api.serving_cluster import ServingCluster

_GROUP = re.compile(r"([1-9][0-9]{0,4})x(max|[0-9]{1,7})")
AHEAD, IN_STEP = "ahead", "in_step"
_ROLES = (Role.PREFILL_HEAVY, Role.DECODE_HEAVY)


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
class CellSettings:
    """Parameters of a cell that ``--set NAME=VALUE`` changes; the defaults are the product's.

    Args:
        watermark: M, a share of KV blocks and of max_num_seqs.
        approaching_factor: Alpha, a share of the TPOT objective.
        early_rejection: What happens to a request that no engine can serve in time.
        min_tokens_between_moves: Output tokens between two moves of a request.
        no_grant: What a finished prefill does when no engine grants it blocks: ``in_place`` or ``wait``.
        ttft_end: When TTFT ends: ``first_token`` or ``decode_join``.
        budget: What the chunk size counts: ``all`` tokens or those of ``prefill`` only.
        scheduling: ``ahead``: engines schedule an iteration while another runs, as vLLM does; ``in_step``: papers.
        wait_limit_s: Longest wait at the router before a request is refused; None: for ever.
        message_s: Time of a message between an engine's scheduler and a router, with ``ahead``.
        placement: Where prefills run; None: as the strategy says.
        flow: False: requests decode where their prefill ran.
        max_num_seqs: Most running requests of an engine.
        max_batch_tokens: Largest chunk size.
        block_size: Tokens per KV block.
        kv_scale: Scales the KV capacity.
        link: Kind of the links that KV moves over: a key of ``LINKS``.
        link_bytes_per_s: Bandwidth of each; None: that of the kind.
        link_latency_s: Latency of each transfer; None: that of the kind.
        link_shared: All engines share one link.
        host_iteration_s: The host's work per iteration; None: as the profile assumes.
        profile: Where the profile comes from; None: the best one there is.
        prefix_reuse: Engines reuse the KV of prompts that begin alike, as the trace's hashes say; False: they do not, and the
            requests are the same. None: hashes are not looked at. A flag of its own.
    """

    watermark: float = 0.95
    approaching_factor: float = 0.96
    early_rejection: EarlyRejection = EarlyRejection.OFF
    min_tokens_between_moves: int = 16
    no_grant: NoGrant = NoGrant.IN_PLACE
    ttft_end: TtftEnd = TtftEnd.FIRST_TOKEN
    budget: str = "all"
    scheduling: str = IN_STEP
    wait_limit_s: float | None = None
    message_s: float = MESSAGE_S
    placement: str | None = None
    flow: bool = True
    max_num_seqs: int = MAX_NUM_SEQS
    max_batch_tokens: int = MAX_BATCH_TOKENS
    block_size: int = BLOCK_SIZE_TOKENS
    kv_scale: float = 1.0
    link: str = "nvlink"
    link_bytes_per_s: float | None = None
    link_latency_s: float | None = None
    link_shared: bool = False
    host_iteration_s: float | None = None
    profile: ProfileKind | None = None
    prefix_reuse: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """A cell in words and numbers; what goes to worker processes.

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
    settings: CellSettings = CellSettings()
    classes: tuple[SloClass, ...] = ()


def parse_engines(text: str) -> tuple[EngineGroup, ...]:
    """Reads ``COUNTxCHUNK[,COUNTxCHUNK]``.

    Raises:
        ValueError: Something else.
    """
    matches = [_GROUP.fullmatch(part) for part in text.split(",")]
    if len(matches) > len(_ROLES) or not all(matches):
        raise ValueError(f"{text!r} is not COUNTxCHUNK or COUNTxCHUNK,COUNTxCHUNK, such as 2x1024,2x256 or 2xmax,2x0")
    return tuple(
        EngineGroup(count=int(match[1]), chunk_size_tokens=None if match[2] == "max" else int(match[2]))
        for match in matches
        if match
    )


def format_engines(engines: Iterable[EngineGroup]) -> str:
    """Writes what ``parse_engines`` reads."""
    return ",".join(map(str, engines))


def _read_switch(text: str) -> bool:
    switches = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
    if text.lower() not in switches:
        raise ValueError("on or off is needed")
    return switches[text.lower()]


def _read_number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(f"{low:g} to {high:g} is allowed")
        return value

    return read


def _read_count(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"{low} to {high} is allowed")
        return value

    return read


def _read_choice(choices: Iterable[str]) -> Callable[[str], str]:
    known = {choice.lower(): choice for choice in choices}

    def read(text: str) -> str:
        if text.lower() not in known:
            raise ValueError(f"known are {', '.join(known)}")
        return known[text.lower()]

    return read


_READERS: dict[str, Callable[[str], object]] = {
    "watermark": _read_number(0.0, 1.0),
    "approaching_factor": _read_number(0.0, 10.0),
    "early_rejection": lambda text: EarlyRejection(_read_choice(EarlyRejection)(text)),
    "min_tokens_between_moves": _read_count(0, 1_000_000),
    "no_grant": lambda text: NoGrant(_read_choice(NoGrant)(text)),
    "ttft_end": lambda text: TtftEnd(_read_choice(TtftEnd)(text)),
    "budget": _read_choice(("all", "prefill")),
    "scheduling": _read_choice((AHEAD, IN_STEP)),
    "wait_limit_s": _read_number(1e-3, 1e9),
    "message_s": _read_number(0.0, 10.0),
    "placement": _read_choice(PLACEMENTS),
    "flow": _read_switch,
    "max_num_seqs": _read_count(1, 1_000_000),
    "max_batch_tokens": _read_count(16, 1_000_000),
    "block_size": _read_count(1, 1024),
    "kv_scale": _read_number(1e-3, 1e3),
    "link": _read_choice(LINKS),
    "link_bytes_per_s": _read_number(1e3, 1e15),
    "link_latency_s": _read_number(0.0, 10.0),
    "link_shared": _read_switch,
    "host_iteration_s": _read_number(0.0, 10.0),
    "profile": lambda text: ProfileKind(_read_choice(ProfileKind)(text)),
}


def change_settings(settings: CellSettings, changes: Iterable[str]) -> CellSettings:
    """Applies ``NAME=VALUE`` pairs.

    Raises:
        ValueError: Names what is unknown or out of range.
    """
    values: dict[str, object] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in _READERS:
            raise ValueError(f"{change!r} is not NAME=VALUE with a known name; known are {', '.join(_READERS)}")
        try:
            values[name] = _READERS[name](text)
        except ValueError as error:
            raise ValueError(f"{name} is {text!r}; {error}") from error
    return replace(settings, **values)  # type: ignore[arg-type]


def describe_manifest(manifest: ServingCluster, model: str | None, gpu: str | None) -> CellSpec:
    """Makes the cell of a manifest.

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
        raise ValueError("a manifest does not say what its engines run on: give --model and --gpu")
    sliders = resolve_sliders(spec)
    groups = [
        EngineGroup(count=sliders.num_prefill_heavy, chunk_size_tokens=sliders.prefill_heavy_tokens),
        EngineGroup(count=spec.replicas - sliders.num_prefill_heavy, chunk_size_tokens=sliders.decode_heavy_tokens),
    ]
    if sliders.prefill_heavy_tokens == sliders.decode_heavy_tokens:
        groups = [EngineGroup(count=spec.replicas, chunk_size_tokens=sliders.prefill_heavy_tokens)]
    parameters = spec.parameters
    return CellSpec(
        model=model,
        gpu=gpu,
        tensor_parallel=num_gpus,
        strategy=spec.strategy.lower(),
        engines=tuple(group for group in groups if group.count),
        slo=Slo(ttft_s=spec.slo.ttft_milliseconds / 1e3, tpot_s=spec.slo.tpot_milliseconds / 1e3),
        settings=CellSettings(
            watermark=parameters.watermark_percent / 100,
            approaching_factor=parameters.approaching_factor_percent / 100,
            early_rejection=EarlyRejection(parameters.early_rejection),
            min_tokens_between_moves=parameters.min_tokens_between_moves,
            max_batch_tokens=spec.engine.max_batch_tokens,
            scheduling=AHEAD,
            wait_limit_s=Limits().wait_limit_s,  # a manifest cannot change it
        ),
        classes=tuple(
            SloClass(
                name=slo_class.name,
                slo=Slo(ttft_s=slo_class.ttft_milliseconds / 1e3, tpot_s=slo_class.tpot_milliseconds / 1e3),
                priority=slo_class.priority,
            )
            for slo_class in spec.slo.classes
        ),
    )


def build_cell(spec: CellSpec, seed: int) -> Cell:
    """Builds the cluster.

    Raises:
        ValueError: An unknown name, or numbers that contradict one another.
    """
    settings = spec.settings
    strategy = get_strategy(spec.strategy)
    return Cell(
        engines=build_engines(spec),
        strategy=strategy.vary(placement=settings.placement, flows=None if settings.flow else False),
        parameters=FlowParameters(
            watermark=settings.watermark,
            approaching_factor=settings.approaching_factor,
            early_rejection=settings.early_rejection,
            min_tokens_between_moves=settings.min_tokens_between_moves,
        ),
        options=make_options(settings),
        seed=seed,
    )


def make_options(settings: CellSettings) -> SimOptions:
    """Makes the semantics; prefills that wait for a grant are those of papers, whose engines do not schedule ahead."""
    return SimOptions(
        no_grant=settings.no_grant,
        ttft_end=settings.ttft_end,
        counts_decodes=settings.budget == "all",
        schedules_ahead=settings.scheduling == AHEAD and settings.no_grant is not NoGrant.WAIT,
        hash_block_tokens=HASH_BLOCK_TOKENS if settings.prefix_reuse else None,
        wait_limit_s=settings.wait_limit_s,
        message_s=settings.message_s,
    )


def build_engines(spec: CellSpec) -> list[EngineSetup]:
    """Builds the engines: P-heavy ones first."""
    settings = spec.settings
    target = _load(spec.model, spec.gpu, spec.tensor_parallel, settings.profile, settings.host_iteration_s)
    speed = LINKS[settings.link]
    speed = LinkSpeed(
        bytes_per_s=settings.link_bytes_per_s or speed.bytes_per_s,
        latency_s=speed.latency_s if settings.link_latency_s is None else settings.link_latency_s,
    )
    link = TransferLink(name="shared" if settings.link_shared else "", speed=speed)
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
        )
        for role, group in zip(_ROLES, spec.engines, strict=False)
        for number in range(group.count)
    ]


@cache
def _load(
    model: str, gpu: str, tensor_parallel: int, kind: ProfileKind | None, host_iteration_s: float | None
) -> ModelOnGpu:
    assumptions = Assumptions() if host_iteration_s is None else Assumptions(host_iteration_s=host_iteration_s)
    return load_model_on_gpu(model, gpu, tensor_parallel, kind=kind, assumptions=assumptions)


def read_trace(path: Path, *, skips_unanswered: bool = False, reads_hashes: bool = False) -> list[TraceRow]:
    """Reads a trace, gzipped if its name ends so.

    Args:
        path: The file.
        skips_unanswered: Leave out requests whose answer has no tokens.
        reads_hashes: Every row needs hashes of its prompt.

    Raises:
        TraceError: Names the file and the line.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return parse_trace(text.decode().splitlines(), skips_unanswered=skips_unanswered, reads_hashes=reads_hashes)
    except TraceError as error:
        raise TraceError(f"{path}, {error}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
