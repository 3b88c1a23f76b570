"""The records that policies read and return.

Records are facts at one moment, and never changed. Those that each request needs have ``Final`` fields and their own
constructor: compiled, that of a frozen dataclass takes twenty times as long. The mutable state that policies keep lives
in the modules that own it (``scheduling.engine_table.EngineTable``, ``scheduling.decode_set.DecodeSet``). Times are
seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, NewType

from sluice_core.strategy_parameters import StrategyParameters

RequestId = NewType("RequestId", str)
EngineId = NewType("EngineId", str)
NOTHING_CACHED: Final[Mapping[EngineId, int]] = {}


class Role(StrEnum):
    """What an engine is at the moment; only its chunk size makes it so (TaiChi, section 3.1)."""

    PREFILL_HEAVY = "P-heavy"
    DECODE_HEAVY = "D-heavy"


class MoveCause(StrEnum):
    """Why a request should leave an engine."""

    PREFILL_DONE = "prefill_done"
    SPLIT = "split"
    DEGRADE = "degrade"
    BACKFLOW = "backflow"
    DRAIN = "drain"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency objectives of one request.

    Args:
        ttft_s: Limit for the time to first token, in seconds.
        tpot_s: Limit for the time per output token, in seconds.
    """

    ttft_s: float
    tpot_s: float


@dataclass(init=False, slots=True, kw_only=True)
class IterationShape:
    """What one engine iteration computes.

    Args:
        prefill_tokens: Prompt tokens, over all chunks.
        attention_work: Sum over the chunks of ``c * (context + c / 2)``, in token pairs.
        num_chunks: Prefill chunks.
        num_decodes: Decodes, one token each.
        decode_context_tokens: Sum of the decodes' contexts.
    """

    prefill_tokens: Final[int]
    attention_work: Final[float]
    num_chunks: Final[int]
    num_decodes: Final[int]
    decode_context_tokens: Final[int]

    def __init__(
        self,
        *,
        prefill_tokens: int = 0,
        attention_work: float = 0.0,
        num_chunks: int = 0,
        num_decodes: int = 0,
        decode_context_tokens: int = 0,
    ) -> None:
        self.prefill_tokens = prefill_tokens
        self.attention_work = attention_work
        self.num_chunks = num_chunks
        self.num_decodes = num_decodes
        self.decode_context_tokens = decode_context_tokens


@dataclass(init=False, slots=True, kw_only=True)
class PrefillRequest:
    """A request that needs a prefill placed.

    Args:
        request_id: The router's id.
        arrival_s: Arrival at the router.
        prompt_tokens: Tokens to compute; for a recovery, generated ones included.
        slo: Objectives of this request.
        priority: Higher goes first.
        is_recovery: True when the client already has tokens: the TTFT SLO no longer applies.
        excluded: Engines that must not get it (it failed there).
        next_token_due_s: For a recovery: when its next token is due by the TPOT SLO (first token + TPOT SLO * output
            tokens), on the same clock as ``arrival_s``. The earliest has the largest TPOT debt and goes first.
        cached_tokens: Of these tokens, those expected in the prefix caches of engines; 0 in those not named.
        turn: Its place where requests of several owners wait (``fair_share``); 0: only one owner's do.
        max_output_tokens: Most tokens of its answer; 0: not known.
        is_whole: Its prompt must not be cut: the engine of its second part had no room.
    """

    request_id: Final[RequestId]
    arrival_s: Final[float]
    prompt_tokens: Final[int]
    slo: Final[Slo]
    priority: Final[int]
    is_recovery: Final[bool]
    excluded: Final[frozenset[EngineId]]
    next_token_due_s: Final[float]
    cached_tokens: Final[Mapping[EngineId, int]]
    turn: Final[int]
    max_output_tokens: Final[int]
    is_whole: Final[bool]

    def __init__(
        self,
        *,
        request_id: RequestId,
        arrival_s: float,
        prompt_tokens: int,
        slo: Slo,
        priority: int = 0,
        is_recovery: bool = False,
        excluded: frozenset[EngineId] = frozenset(),
        next_token_due_s: float = 0.0,
        cached_tokens: Mapping[EngineId, int] = NOTHING_CACHED,
        turn: int = 0,
        max_output_tokens: int = 0,
        is_whole: bool = False,
    ) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.slo = slo
        self.priority = priority
        self.is_recovery = is_recovery
        self.excluded = excluded
        self.next_token_due_s = next_token_due_s
        self.cached_tokens = cached_tokens
        self.turn = turn
        self.max_output_tokens = max_output_tokens
        self.is_whole = is_whole


class Leg(NamedTuple):
    """A part of a request that one engine computes: a micro-request (DynaServe, section 3.1).

    Args:
        engine_id: The engine.
        end_token: Tokens of prompt and output, counted from the first one, of which KV is there when the part ends.
    """

    engine_id: EngineId
    end_token: int


@dataclass(init=False, slots=True, kw_only=True)
class Place:
    """Decision: the prefill goes to ``engine_id``.

    Args:
        request_id: The request.
        engine_id: The engine.
        predicted_ttft_s: Estimate from arrival at the router.
        reason: ``feasible``; ``least_late`` or ``random`` when nothing is (``EarlyRejection``); ``unproven`` when a
            rejection would rest on an idle or barely fitted engine; ``recovery``.
        is_feasible: False when the TTFT SLO will probably be missed.
        route: The parts of a request that is split, in order, the first one on ``engine_id``; empty: it is not.
    """

    request_id: Final[RequestId]
    engine_id: Final[EngineId]
    predicted_ttft_s: Final[float]
    reason: Final[str]
    is_feasible: Final[bool]
    route: Final[tuple[Leg, ...]]

    def __init__(
        self,
        *,
        request_id: RequestId,
        engine_id: EngineId,
        predicted_ttft_s: float,
        reason: str,
        is_feasible: bool,
        route: tuple[Leg, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.engine_id = engine_id
        self.predicted_ttft_s = predicted_ttft_s
        self.reason = reason
        self.is_feasible = is_feasible
        self.route = route


@dataclass(init=False, slots=True, kw_only=True)
class Hold:
    """Decision: the router keeps the request and asks again.

    Args:
        request_id: The request.
        reason: ``no_engine``, ``room`` (decodes fill every chunk), ``kv``, ``seats``, ``late_binding``,
            ``recovery_cap``, or ``saved_tpot`` (a prefill would take longer than decodes have saved, or the phase than
            the TTFT objective).
    """

    request_id: Final[RequestId]
    reason: Final[str]

    def __init__(self, *, request_id: RequestId, reason: str) -> None:
        self.request_id = request_id
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Decision: the request is refused.

    Args:
        request_id: The request.
        retry_after_s: Smallest predicted lateness over the engines.
        reason: ``slo_infeasible``.
    """

    request_id: RequestId
    retry_after_s: float
    reason: str = "slo_infeasible"


Decision = Place | Hold | Reject


@dataclass(init=False, slots=True, kw_only=True)
class MoveProposal:
    """A request that should leave its engine.

    Args:
        request_id: The request.
        cause: Why.
        output_tokens: Tokens generated so far.
        num_blocks: KV blocks it holds.
    """

    request_id: Final[RequestId]
    cause: Final[MoveCause]
    output_tokens: Final[int]
    num_blocks: Final[int]

    def __init__(self, *, request_id: RequestId, cause: MoveCause, output_tokens: int, num_blocks: int) -> None:
        self.request_id = request_id
        self.cause = cause
        self.output_tokens = output_tokens
        self.num_blocks = num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """A named objective; the default class has the empty name."""

    name: str
    slo: Slo
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimits:
    """What requests with one owner's API keys may take, over all routers together; 0: no limit.

    Args:
        requests_per_minute: Most requests in any minute.
        tokens_per_minute: Most tokens, prompts and outputs, of the requests of any minute.
        concurrent_requests: Most requests at a time.
        max_output_tokens: Most output tokens of a request.
        classes: SLO classes that requests may use; empty: all.
        weight: Share of the tokens while requests of several owners wait.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0
    max_output_tokens: int = 0
    classes: frozenset[str] = frozenset()
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One engine's part of a plan."""

    role: Role
    chunk_size_tokens: int
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the control plane hands to the data plane."""

    cluster_uid: str
    generation: int
    strategy: str
    parameters: StrategyParameters
    slo_classes: tuple[SloClass, ...]
    attainment: float
    engines: dict[EngineId, EnginePlan] = field(default_factory=dict)
    unnamed_chunk_size_tokens: int = 256
    served_model_name: str = ""
    model_fingerprint: str = ""
    num_routers: int = 1
    owner_limits: dict[str, OwnerLimits] = field(default_factory=dict)
    served_models: dict[str, str] = field(default_factory=dict)
    hold_s: float = 0.0
