"""Parameters of a simulated cluster, as ``--set NAME=VALUE`` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sluice_core.latency.measured_profiles import ProfileKind
from sluice_core.latency.transfer import LINKS
from sluice_core.sim.sim_setup import (
    BLOCK_SIZE_TOKENS,
    HOST_BYTES_PER_S,
    MAX_BATCH_TOKENS,
    MAX_NUM_SEQS,
    MESSAGE_S,
    LengthsKnown,
    NoGrant,
    TtftEnd,
)
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategy_parameters import EarlyRejection, OverloadOrder, PrefillOrder, StrategyParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

AHEAD, IN_STEP = "ahead", "in_step"
PREFIX_REPORT_S = 0.05  # engines report at least so often while they compute


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """Parameters of a simulated cluster that ``--set NAME=VALUE`` changes; the defaults are the product's.

    Args:
        parameters: Parameters of the strategies. ``--set`` changes each by its own name.
        output_lengths: What a router knows of output lengths, for ``dynaserve``: ``learned`` from answers, ``exact``,
            or ``noisy``.
        length_deviation_tokens: Standard deviation of the errors of ``noisy`` lengths.
        no_grant: What a finished prefill does when no engine grants it blocks: ``in_place`` leaves it to the strategy,
            with ``wait`` it waits for ever.
        ttft_end: When TTFT ends: ``first_token`` or ``decode_join``.
        budget: What the chunk size counts: ``all`` tokens or those of ``prefill`` only.
        scheduling: ``ahead``: engines schedule an iteration while another runs, as vLLM does; ``in_step``: between
            iterations, as papers assume.
        wait_limit_s: Longest wait at the router before a request is refused; None: no limit.
        message_s: Time of a message between an engine's scheduler and a router, with ``ahead``.
        placement: Where prefills run; None: as the strategy says.
        flow: False: requests decode where their prefill ran.
        max_num_seqs: Most running requests of an engine.
        max_batch_tokens: Largest chunk size.
        operators_per_iteration: Ends of operators at which ``flowprefill`` preempts prefills; 0: where iterations end.
        block_size: Tokens per KV block.
        kv_scale: Scales the KV capacity.
        link: Kind of the links that KV moves over: a key of ``LINKS``.
        link_bytes_per_s: Bandwidth of each; None: that of the kind.
        link_latency_s: Latency of each transfer; None: that of the kind.
        link_shared: All engines share one link.
        host_iteration_s: The host's work per iteration; None: as the profile assumes.
        profile: Where the profile comes from; None: the best one there is.
        prefix_reuse: True: engines reuse the KV of prompts that begin alike, by the trace's hashes. False: the same
            requests without reuse. None: hashes are ignored. ``--prefix-reuse`` sets it.
        prefix_report_s: Time until the router knows what an iteration has cached, with prefix reuse; None: it never
            does.
        host_kv_gib: Memory of each engine's host that keeps KV with prefix reuse, as with vLLM's
            ``--kv-offloading-size``; None: none does.
        host_bytes_per_s: Between host and GPUs, in each direction.
        knows_host_kv: The router counts what is there as cached.
        routers: Routers, each with an equal share of the requests.
        report_s: Time from a change of an engine's load until the routers know.
        router_latency_factor: The routers' latency model says so many times what engines say that iterations take.
        engine_latency_factor: The engines' latency model says so many times what iterations take.
        burstiness: Of arrivals that are drawn, see ``DrawnWorkload``; 1: a Poisson process.
    """

    parameters: StrategyParameters = field(default_factory=StrategyParameters)
    output_lengths: LengthsKnown = LengthsKnown.LEARNED
    length_deviation_tokens: float = 50.0
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
    operators_per_iteration: int = 0
    block_size: int = BLOCK_SIZE_TOKENS
    kv_scale: float = 1.0
    link: str = "nvlink"
    link_bytes_per_s: float | None = None
    link_latency_s: float | None = None
    link_shared: bool = False
    host_iteration_s: float | None = None
    profile: ProfileKind | None = None
    prefix_reuse: bool | None = None
    prefix_report_s: float | None = PREFIX_REPORT_S
    host_kv_gib: float | None = None
    host_bytes_per_s: float = HOST_BYTES_PER_S
    knows_host_kv: bool = False
    routers: int = 1
    report_s: float = 0.0
    router_latency_factor: float = 1.0
    engine_latency_factor: float = 1.0
    burstiness: float = 1.0


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


def _read_report_time(text: str) -> float | None:
    return None if text.lower() == "off" else _read_number(0.0, 1e3)(text)


def _read_choice(choices: Iterable[str]) -> Callable[[str], str]:
    known = {choice.lower(): choice for choice in choices}

    def read(text: str) -> str:
        if text.lower() not in known:
            raise ValueError(f"known are {', '.join(known)}")
        return known[text.lower()]

    return read


_PARAMETER_READERS: dict[str, Callable[[str], object]] = {
    "watermark": _read_number(0.0, 1.0),
    "approaching_factor": _read_number(0.0, 10.0),
    "early_rejection": lambda text: EarlyRejection(_read_choice(EarlyRejection)(text)),
    "min_tokens_between_moves": _read_count(0, 1_000_000),
    "prefill_batch_tokens": _read_count(0, 1_048_576),
    "batch_token_budget": _read_count(1, 1_048_576),
    "prefill_order": lambda text: PrefillOrder(_read_choice(PrefillOrder)(text)),
    "grant_wait_s": _read_number(1e-3, 25.0),
    "tpot_share": _read_number(0.0, 1.0),
    "least_prefill_share": _read_number(0.0, 1.0),
    "late_ttft_factor": _read_number(1.0, 4.0),
    "decode_share": _read_number(0.0, 1.0),
    "pace_share": _read_number(0.0, 1.0),
    "alone_tokens": _read_count(0, 1_048_576),
    "late_share": _read_number(0.0, 1.0),
    "late_reserve_share": _read_number(0.0, 1.0),
    "urgent_reserve_share": _read_number(0.0, 1.0),
    "overload_order": lambda text: OverloadOrder(_read_choice(OverloadOrder)(text)),
    "pack_share": _read_number(0.0, 1.0),
    "pack_prompt_share": _read_number(0.0, 100.0),
    "credit_s": _read_number(0.0, 1e3),
    "shared_credit_share": _read_number(0.0, 1.0),
    "selects_by_slack": _read_switch,
    "macro_instance_least": _read_count(1, 256),
    "macro_instance_most": _read_count(1, 1024),
    "split_search_steps": _read_count(1, 16),
    "split_margin_tokens": _read_count(0, 65_536),
    "tbt_target_s": _read_number(0.0, 60.0),
}

_READERS: dict[str, Callable[[str], object]] = {
    **_PARAMETER_READERS,
    "output_lengths": lambda text: LengthsKnown(_read_choice(LengthsKnown)(text)),
    "length_deviation_tokens": _read_number(0.0, 1e6),
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
    "operators_per_iteration": _read_count(0, 100_000),
    "block_size": _read_count(1, 1024),
    "kv_scale": _read_number(1e-3, 1e3),
    "link": _read_choice(LINKS),
    "link_bytes_per_s": _read_number(1e3, 1e15),
    "link_latency_s": _read_number(0.0, 10.0),
    "link_shared": _read_switch,
    "host_iteration_s": _read_number(0.0, 10.0),
    "prefix_report_s": _read_report_time,
    "host_kv_gib": _read_number(0.0, 1e6),
    "host_bytes_per_s": _read_number(1e3, 1e15),
    "knows_host_kv": _read_switch,
    "routers": _read_count(1, 64),
    "report_s": _read_number(0.0, 10.0),
    "router_latency_factor": _read_number(0.1, 10.0),
    "engine_latency_factor": _read_number(0.1, 10.0),
    "burstiness": _read_number(0.01, 100.0),
    "profile": lambda text: ProfileKind(_read_choice(ProfileKind)(text)),
}


def change_settings(settings: SimulationSettings, changes: Iterable[str]) -> SimulationSettings:
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
    parameters = {name: value for name, value in values.items() if name in _PARAMETER_READERS}
    others = {name: value for name, value in values.items() if name not in _PARAMETER_READERS}
    return replace(
        settings,
        parameters=replace(settings.parameters, **parameters),  # type: ignore[arg-type]
        **others,  # type: ignore[arg-type]
    )
