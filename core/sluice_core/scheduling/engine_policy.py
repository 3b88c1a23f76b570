"""What an engine policy is told before an iteration, and what it says: the interface of all of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from sluice_core.latency import LatencyModel
from sluice_core.records import IterationShape, MoveCause, MoveProposal, RequestId, Role
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_state import DuePrefills


class RequestKind(IntEnum):
    """Classes of requests in the order in which an iteration serves them."""

    DECODE = 0
    JOINING = 1
    RECOMPUTE = 2
    RECOVERY = 3
    STARTED_PREFILL = 4
    NEW_PROMPT = 5


@dataclass(slots=True, kw_only=True)
class EngineBatch:
    """What the scheduler knows before an iteration; mutable, so that a scheduler can keep one and bring it up to date.

    Args:
        chunk_size_tokens: Chunk size in force; 0: no new prompts.
        last_chunk_size_tokens: Last non-zero chunk size in force (the same unless it is 0 now).
        max_batch_tokens: Most tokens that an iteration can ever have.
        block_size_tokens: Tokens per KV block.
        num_decodes: Running decodes.
        decode_context_tokens: Sum of their contexts.
        num_joining: Requests whose KV has arrived, or whose pull can start now: one token each.
        num_recomputing: Requests to recompute (preempted, failed pull) and recoveries.
        num_started_prefills: Prefills with computed tokens, recomputes left out.
        num_new_prompts: Prompts without.
        num_under_way: Iterations that are scheduled and have not ended.
        under_way_s: Expected rest of them, in seconds.
        last_prefill_s: When an iteration last computed a prefill token, or since when prefills have waited if that is
            later; on the caller's clock.
        is_draining: The engine takes nothing new.
        is_stalled: No prefill that waits or has started finds a seat and blocks, of engines that separate phases.
    """

    chunk_size_tokens: int
    last_chunk_size_tokens: int
    max_batch_tokens: int
    block_size_tokens: int
    num_decodes: int = 0
    decode_context_tokens: int = 0
    num_joining: int = 0
    num_recomputing: int = 0
    num_started_prefills: int = 0
    num_new_prompts: int = 0
    num_under_way: int = 0
    under_way_s: float = 0.0
    last_prefill_s: float = 0.0
    is_draining: bool = False
    is_stalled: bool = False


class BatchLimits:
    """Limits of one iteration.

    A plain class: compiled, it takes a tenth of the time that a record takes to make.

    Args:
        token_budget: Most tokens of the iteration; never under decodes + joining.
        prefill_budget_tokens: Part of it for local prefills and recompute together.
        max_tokens_per_prefill: Most tokens of one prefill or recompute chunk.
        runs_recompute: Requests to recompute may have tokens.
        runs_started_prefills: Started prefills may have tokens.
        runs_new_prompts: New prompts may start.
        returns_new_prompts: Unstarted prompts go back to their router (recoveries do not).
        is_minimum_progress: The room comes from the minimum progress rule.
        saturation_tokens: Prefill tokens from which on no further prompt starts in the iteration; 0: it fills the room,
            and cuts the last prompt.
        room_per_work: Room that a token pair of a chunk's attention takes beside its tokens; 0: none.
        withholds_decodes: Decodes get no token in this iteration; they keep their blocks.
    """

    __slots__ = (
        "is_minimum_progress",
        "max_tokens_per_prefill",
        "prefill_budget_tokens",
        "returns_new_prompts",
        "room_per_work",
        "runs_new_prompts",
        "runs_recompute",
        "runs_started_prefills",
        "saturation_tokens",
        "token_budget",
        "withholds_decodes",
    )

    def __init__(
        self,
        *,
        token_budget: int,
        prefill_budget_tokens: int,
        max_tokens_per_prefill: int,
        runs_recompute: bool,
        runs_started_prefills: bool,
        runs_new_prompts: bool,
        returns_new_prompts: bool,
        is_minimum_progress: bool = False,
        saturation_tokens: int = 0,
        room_per_work: float = 0.0,
        withholds_decodes: bool = False,
    ) -> None:
        self.withholds_decodes = withholds_decodes
        self.saturation_tokens = saturation_tokens
        self.token_budget = token_budget
        self.prefill_budget_tokens = prefill_budget_tokens
        self.max_tokens_per_prefill = max_tokens_per_prefill
        self.runs_recompute = runs_recompute
        self.runs_started_prefills = runs_started_prefills
        self.runs_new_prompts = runs_new_prompts
        self.returns_new_prompts = returns_new_prompts
        self.is_minimum_progress = is_minimum_progress
        self.room_per_work = room_per_work

    def has_place_for(self, num_tokens: int, room_tokens: int) -> bool:
        """Say whether the next prefill in order still fits into the iteration; if not, none behind it goes first.

        Args:
            num_tokens: Tokens that it has left to compute.
            room_tokens: What is left of the prefill budget.

        Source: DistServe, section 4.3: whole prompts up to what saturates the GPU, and a longer one alone.
        """
        taken = self.prefill_budget_tokens - room_tokens
        return taken == 0 or self.saturation_tokens == 0 or taken + num_tokens <= self.saturation_tokens

    def fit_chunk(self, room_tokens: int, context_tokens: int, least_tokens: int) -> int:
        """Compute the largest chunk of a prompt that a room holds together with its attention.

        Args:
            room_tokens: What is left of the prefill budget.
            context_tokens: Tokens of the prompt that are computed.
            least_tokens: Tokens by which it goes on where its context alone uses the room up.

        Returns:
            The largest c with ``c + room_per_work * c * (context + c / 2) <= room``.
        """
        if not self.room_per_work or room_tokens <= 0:
            return room_tokens
        slope = 1.0 + self.room_per_work * context_tokens
        # The root in the form that stays exact where attention takes next to nothing.
        most = 2.0 * room_tokens / (slope + math.sqrt(slope * slope + 2.0 * self.room_per_work * room_tokens))
        return max(int(most), min(least_tokens, room_tokens))

    def count_room(self, num_tokens: int, context_tokens: int) -> int:
        """Count the room that a chunk takes together with its attention; see ``fit_chunk``."""
        return num_tokens + int(self.room_per_work * num_tokens * (context_tokens + num_tokens / 2))

    def hides(self, kind: RequestKind) -> bool:
        """Say whether requests of ``kind`` stay out of this iteration (they keep blocks and position)."""
        if kind in {RequestKind.DECODE, RequestKind.JOINING}:
            return self.withholds_decodes and kind is RequestKind.DECODE
        if kind is RequestKind.NEW_PROMPT:
            return not self.runs_new_prompts
        return not (self.runs_started_prefills if kind is RequestKind.STARTED_PREFILL else self.runs_recompute)


class LatePrefills(NamedTuple):
    """What an engine computes after all other prompts, since it will miss its TTFT SLO in any case.

    Args:
        requests: Its prompts.
        tokens: Their tokens that are not computed.
        attention_work: Of these tokens, as in ``IterationShape``.
    """

    requests: int = 0
    tokens: int = 0
    attention_work: float = 0.0


NONE_LATE: Final = LatePrefills()


class PrefillSelector:
    """Chooses whose prompts an engine computes next, where that changes while they wait; kept for one engine.

    It knows the prompts without a first token. Requests to recompute and recoveries go ahead of what it selects.

    Attributes:
        num_suspended: Times that prompts that had started were preempted by a more urgent one.
    """

    num_suspended: int = 0

    def add(self, request_id: RequestId, *, arrival_s: float, ttft_slo_s: float, priority: int, tokens: int) -> None:
        """Take a prompt that has come to the engine.

        Args:
            request_id: The request.
            arrival_s: Arrival at the router, on the caller's clock.
            ttft_slo_s: Its TTFT objective; ``math.inf``: none.
            priority: Higher goes first.
            tokens: Tokens of the prompt.
        """
        raise NotImplementedError

    def advance(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Note what a prompt has computed; more than 0: it has started, and holds KV blocks."""
        raise NotImplementedError

    def count_late(self, now: float) -> LatePrefills:  # noqa: ARG002 - for overrides
        """Count the prompts that go behind all others, so that a new one in time does not wait for them.

        Args:
            now: Seconds on the caller's clock.
        """
        return NONE_LATE

    def list_due(self) -> list[DuePrefills]:
        """List the other prompts by when they are due, the first first; ``count_late`` first."""
        return []

    def find_next_late_s(self) -> float:
        """Find from when on ``count_late`` may count more, with time alone; ``math.inf``: never."""
        return math.inf

    def find_pace(self, now: float) -> float:  # noqa: ARG002 - for overrides
        """Find the tokens per second with which all prompts are in time; ``math.inf``: one will be late, or not known.

        Args:
            now: Seconds on the caller's clock.
        """
        return math.inf

    def remove(self, request_id: RequestId) -> None:
        """Forget a prompt whose last chunk was scheduled, or that leaves otherwise; an unknown one is no error."""
        raise NotImplementedError

    def select(self, now: float, engine: EngineBatch) -> list[RequestId]:
        """Select the prompts that the next iteration may compute, in the order in which they get tokens.

        Args:
            now: Seconds on the caller's clock.
            engine: What waits and runs.
        """
        raise NotImplementedError

    def rank_started(self) -> list[RequestId]:
        """Rank the prompts that have started: they run when none of those selected finds a seat and blocks."""
        raise NotImplementedError


class PhaseReport(NamedTuple):
    """Where an engine is that separates prefills from decodes in time.

    Args:
        prefill_phase_s: For how long its phase of prefills has gone on, in seconds; 0: it is in none.
        saved_tpot_s: Mean saved TPOT of the decodes that were there before it; ``math.inf`` without any.
        num_switches: Times that it went from one phase to the other.
    """

    prefill_phase_s: float
    saved_tpot_s: float
    num_switches: int


class EnginePolicy:
    """Decides what an engine batches, in which order, and which decodes should leave.

    A base class, not a protocol: compiled, a call of one of its methods takes a tenth of a call through a protocol.
    """

    uses_latency: bool = False  # of a policy that needs what ``bind`` gives
    separates_phases: bool = False  # of a policy whose iterations hold either prefills or decodes
    records_iterations: bool = False  # of a policy that needs what ``record_iteration`` gives

    def bind(self, decodes: DecodeSet, latency: LatencyModel) -> None:
        """Take what the engine knows of itself, once; most policies need neither.

        Args:
            decodes: Its running decodes; it keeps them up to date.
            latency: How long its iterations take.
        """

    def limits(self, now: float, engine: EngineBatch) -> BatchLimits:
        """Set the limits of the next iteration.

        Args:
            now: Seconds on the caller's monotonic clock.
            engine: What waits and runs.

        Returns:
            Budget, room and which classes run.
        """
        raise NotImplementedError

    def order_key(self, kind: RequestKind, arrival_s: float, priority: int) -> tuple[int, float]:
        """Order requests in an iteration: lower keys go first. Static as long as the kind stays.

        Args:
            kind: Class of the request.
            arrival_s: Arrival at the router, on the caller's clock.
            priority: Higher goes first.
        """
        raise NotImplementedError

    def victim_key(self, arrival_s: float, priority: int) -> float:
        """Order requests for preemption out of KV blocks: the highest key is preempted first.

        Args:
            arrival_s: Arrival at the router, on the caller's clock.
            priority: Higher is spared longer.
        """
        raise NotImplementedError

    def make_selector(self, latency: LatencyModel) -> PrefillSelector | None:  # noqa: ARG002 - for overrides
        """Make what selects an engine's prefills.

        Args:
            latency: How long the engine's iterations take.

        Returns:
            None, unless a policy overrides it: ``order_key`` orders them.
        """
        return None

    def propose(self, now: float, engine: DecodeSet) -> list[MoveProposal]:  # noqa: ARG002 - policies override it
        """Pick the decodes that should leave; called after each iteration. None, unless a policy overrides it.

        Args:
            now: Seconds on the caller's clock.
            engine: Its decodes, role and KV blocks.

        Returns:
            New proposals, most urgent first.
        """
        return []

    def share_for(self, role: Role, cause: MoveCause) -> float:  # noqa: ARG002 - policies override it
        """Return the share of its KV blocks that an engine fills for requests that move to it."""
        return 1.0

    def hands_off_prefills(self, role: Role) -> bool:  # noqa: ARG002 - policies override it
        """Say whether a prefill that yields a request's first token ends here, its KV kept for a decode engine.

        Args:
            role: The engine's.
        """
        return False

    def observe_chunk_sizes(self, chunk_sizes: Collection[int]) -> None:
        """Take the chunk sizes of the plan's engines that do not drain; no policy needs to."""

    def note_batch(self, now: float, *, has_prefills: bool) -> None:
        """Take note of an iteration that begins, of a policy that separates phases.

        Args:
            now: Seconds on the caller's clock.
            has_prefills: It computes prompt tokens.
        """

    def record_iteration(self, shape: IterationShape, duration_s: float) -> None:
        """Take a measured iteration in, of a policy that records them.

        Args:
            shape: What it computed.
            duration_s: What it took, in seconds.
        """

    def describe_phase(self, now: float, *, is_prefilling: bool) -> PhaseReport | None:  # noqa: ARG002 - for overrides
        """Describe the phase that the engine is in.

        Args:
            now: Seconds on the caller's clock.
            is_prefilling: Prefills wait or run.

        Returns:
            None, unless a policy that separates phases overrides it.
        """
        return None
