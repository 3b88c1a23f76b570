"""What a router knows of one engine: what the engine says and reports, its state, and how a placement sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from sluice_core.latency import LatencyModel
from sluice_core.records import EngineId, RequestId, Role


class EngineConfig(NamedTuple):
    """What an engine says about itself in its first message.

    Args:
        block_size_tokens: Tokens per KV block.
        kv_bytes_per_token: Bytes of KV cache per token.
        max_num_seqs: Most running requests.
        max_batch_tokens: Largest chunk size that it can run.
        cuts_prompts: It computes first parts of prompts, and goes on where another engine did (``Need.PARTS``).
    """

    block_size_tokens: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_batch_tokens: int
    cuts_prompts: bool = False


class DuePrefills(NamedTuple):
    """Prompts that an engine computes by deadline: a new one of a shorter objective that is due sooner passes them.

    Args:
        due_s: They are due no sooner, priorities counted; on the clock of whoever reads it.
        allowed_s: From their arrival until then, at least.
        requests: The prompts.
        tokens: Their tokens that are not computed.
        attention_work: Of these tokens, as in ``IterationShape``.
    """

    due_s: float
    allowed_s: float
    requests: int
    tokens: int
    attention_work: float


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """An engine's load report: sums, so that its size does not depend on the queues.

    Not frozen, so that a simulated engine can keep one: it changes it when it reports, and at no other time.

    Args:
        last_submit_number: Last submit of this router that the report includes.
        queued_prefill_tokens: Prefill tokens not yet computed, waiting and running.
        queued_requests: Requests with such tokens.
        queued_attention_work: Their attention work, as in ``IterationShape``.
        late_prefill_tokens: Of these tokens, those that it computes after all others (``LatePrefills``).
        late_requests: Their requests.
        late_attention_work: Their attention work.
        due: The others by when they are due, on the caller's clock; empty where they are computed in another order.
        running_decodes: Decodes that run.
        decode_context_tokens: Sum of their contexts.
        kv_blocks_total: KV blocks of the engine.
        kv_blocks_used: Blocks that requests hold, pinned ones included.
        kv_blocks_granted: Blocks reserved by grants.
        kv_blocks_pinned: Blocks handed off and not yet released.
        iteration_remaining_s: Expected rest of the iteration under way.
        pull_bytes_per_s: Measured rate of KV pulls; 0 when none was measured.
        is_of_others: The engine belongs to the share of another router, which tries it first.
        prefill_phase_s: For how long its phase of prefills has gone on; 0: it is in none (``PhaseReport``).
        saved_tpot_s: Mean saved TPOT of the decodes that were there before; ``math.inf`` without any.
    """

    last_submit_number: int = 0
    queued_prefill_tokens: int = 0
    queued_requests: int = 0
    queued_attention_work: float = 0.0
    late_prefill_tokens: int = 0
    late_requests: int = 0
    late_attention_work: float = 0.0
    due: list[DuePrefills] = field(default_factory=list)
    running_decodes: int = 0
    decode_context_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_granted: int = 0
    kv_blocks_pinned: int = 0
    iteration_remaining_s: float = 0.0
    pull_bytes_per_s: float = 0.0
    is_of_others: bool = False
    prefill_phase_s: float = 0.0
    saved_tpot_s: float = math.inf

    @property
    def timely_requests(self) -> int:
        """Queued requests that do not go last."""
        return self.queued_requests - self.late_requests


# A queued prompt that others pass: when it is due on the caller's clock, the time from its arrival until then, and how
# long it takes.
Passable: TypeAlias = tuple[float, float, float]


class EngineView:
    """An engine as a placement sees it at one moment; never changed. Times in seconds.

    A plain class: compiled, it takes a fifth of the time of a named tuple to make.

    Args:
        engine_id: The engine.
        role: Its role.
        queued_prefill_tokens: Its queue, own placements included.
        free_at_s: When the queue is empty but for what goes behind all others, on the caller's clock.
        late_s: How long that takes.
        later: The queued prompts that others pass, own placements included.
        per_token_s: Prefill time per token.
        per_work_s: Prefill time per token pair of attention.
        per_iteration_s: Time of each iteration beside its prefill tokens.
        room_tokens: Prefill budget.
        kv_tokens: Tokens that the KV cache holds.
        available_tokens: Tokens of a prompt for which KV blocks are left. Prompts that go last have taken none.
        num_seats: Requests that it may have at a time.
        available_seqs: Of these, seats beside those that run, wait in time or are on their way.
        late_tokens: Tokens of the prompts that go last: a late one finds so many fewer.
        late_requests: These prompts.
        transfer_latency_s: Fixed part of T; 0 where decode stays.
        transfer_per_token_s: Part of T per prompt token; 0 where decode stays.
        is_proven: Its latency model has seen ``PROVEN_OBSERVATIONS`` iterations.
        blocked_reason: Why it takes no prefill: ``draining``, ``no_report`` or ``room``; empty when it does.
        is_of_others: It belongs to the share of another router, which tries it first.
    """

    __slots__ = (
        "available_seqs",
        "available_tokens",
        "blocked_reason",
        "engine_id",
        "free_at_s",
        "is_of_others",
        "is_proven",
        "kv_tokens",
        "late_requests",
        "late_s",
        "late_tokens",
        "later",
        "num_seats",
        "per_iteration_s",
        "per_token_s",
        "per_work_s",
        "queued_prefill_tokens",
        "role",
        "room_tokens",
        "transfer_latency_s",
        "transfer_per_token_s",
    )

    def __init__(
        self,
        *,
        engine_id: EngineId,
        role: Role,
        queued_prefill_tokens: int,
        free_at_s: float,
        late_s: float,
        later: tuple[Passable, ...],
        per_token_s: float,
        per_work_s: float,
        per_iteration_s: float,
        room_tokens: int,
        kv_tokens: int,
        available_tokens: int,
        num_seats: int,
        available_seqs: int,
        late_tokens: int,
        late_requests: int,
        transfer_latency_s: float,
        transfer_per_token_s: float,
        is_proven: bool,
        blocked_reason: str,
        is_of_others: bool,
    ) -> None:
        self.engine_id = engine_id
        self.role = role
        self.queued_prefill_tokens = queued_prefill_tokens
        self.free_at_s = free_at_s
        self.late_s = late_s
        self.later = later
        self.per_token_s = per_token_s
        self.per_work_s = per_work_s
        self.per_iteration_s = per_iteration_s
        self.room_tokens = room_tokens
        self.kv_tokens = kv_tokens
        self.available_tokens = available_tokens
        self.num_seats = num_seats
        self.available_seqs = available_seqs
        self.late_tokens = late_tokens
        self.late_requests = late_requests
        self.transfer_latency_s = transfer_latency_s
        self.transfer_per_token_s = transfer_per_token_s
        self.is_proven = is_proven
        self.blocked_reason = blocked_reason
        self.is_of_others = is_of_others


# An engine in ``EngineTable.order``. A plain tuple: the walk of a placement unpacks it once per engine, several times
# faster than it could read the attributes of a class.
Entry: TypeAlias = tuple[
    int,  # queued prefill tokens, plus the margin for an engine of another router's share
    int,  # rank among equal queues: 0 for P-heavy engines and where all chunk sizes are equal, 1 for D-heavy ones
    int,  # number, unique per engine; the order ends here
    float,  # free_at_s: see ``EngineView``
    float,  # least_token_s: seconds per prompt token at least, with transfer and the share of a full iteration
    float,  # square_s: seconds per squared prompt token (attention)
    float,  # token_s: seconds per prompt token, with transfer
    float,  # iteration_s: seconds per iteration beside its prefill tokens
    int,  # room_tokens: prefill budget
    int,  # available_tokens: tokens of a prompt for which KV blocks are left
    float,  # latency_s: fixed part of the transfer time
    EngineView,
]


def get_view(entry: Entry) -> EngineView:
    """Return the engine of an entry by field names."""
    return entry[-1]


def count_passed_s(view: EngineView, due_s: float, allowed_s: float) -> float:
    """Count how long an engine's queued prompts take that another one passes, in seconds.

    Args:
        view: The engine.
        due_s: When the other one is due, on the caller's clock.
        allowed_s: From its arrival until then.
    """
    passed_s = 0.0
    for queued_due_s, queued_allowed_s, execute_s in view.later:
        if queued_due_s > due_s and queued_allowed_s > allowed_s:
            passed_s += execute_s
    return passed_s


def get_queue_rank(entry: Entry) -> tuple[int, int]:
    """Return what engines are tied by: queued prefill tokens, and rank."""
    return entry[0], entry[1]


class InFlight:
    """An own placement that no report includes yet; mutable, changed by ``EngineTable`` only."""

    __slots__ = ("blocks", "execute_s", "passable", "placed_at_s", "submit_number", "tokens")

    def __init__(
        self, *, placed_at_s: float, tokens: int, execute_s: float, blocks: int, passable: Passable | None
    ) -> None:
        self.submit_number: int | None = None
        self.placed_at_s = placed_at_s
        self.tokens = tokens
        self.execute_s = execute_s
        self.blocks = blocks
        self.passable = passable


@dataclass(slots=True, kw_only=True, eq=False)
class EngineState:
    """One engine; mutable, changed by ``EngineTable`` only. Read it freely.

    Args:
        engine_id: The engine.
        config: What it says about itself.
        number: Unique in the table.
        latency: Its latency model.
        role: Role in force.
        chunk_size_tokens: Chunk size in force.
        is_draining: Takes nothing new.
        load: Last report.
        reported_at_s: When it was received, on the caller's clock; None before the first.
        room_tokens: Prefill budget beside the reported decodes.
        queued_prefill_tokens: Reported queue plus own placements since.
        free_at_s: When that queue is empty but for what goes behind all others, on the caller's clock.
        late_s: How long that takes.
        reserved_kv_blocks: KV blocks that queued prompts and own placements will take.
        recovery_free_at_s: When its recoveries are done at ``RECOVERY_SHARE`` of its time.
        in_flight: Own placements that no report includes yet, oldest first.
        pending_grants: Blocks asked for and not yet answered, by grant id.
        view: What placements see.
        entry: The same, as it stands in the table's order.
    """

    engine_id: EngineId
    config: EngineConfig
    number: int
    latency: LatencyModel
    role: Role
    chunk_size_tokens: int
    is_draining: bool = False
    load: EngineLoad = field(default_factory=EngineLoad)
    reported_at_s: float | None = None
    room_tokens: int = 0
    queued_prefill_tokens: int = 0
    free_at_s: float = 0.0
    late_s: float = 0.0
    reserved_kv_blocks: int = 0
    recovery_free_at_s: float = 0.0
    in_flight: dict[RequestId, InFlight] = field(default_factory=dict)
    pending_grants: dict[int, int] = field(default_factory=dict)
    view: EngineView | None = None
    entry: Entry | None = None

    @property
    def committed_kv_blocks(self) -> int:
        """KV blocks used or promised to moves: reported ones, grants and own grant requests."""
        committed = self.load.kv_blocks_used + self.load.kv_blocks_granted
        return committed + sum(self.pending_grants.values()) if self.pending_grants else committed

    @property
    def num_committed_seqs(self) -> int:
        """Decodes that run or may arrive by own grant requests."""
        return self.load.running_decodes + len(self.pending_grants)


def count_placement(view: EngineView, state: EngineState, blocks: int, later: tuple[Passable, ...]) -> EngineView:
    """Make the view after a placement that took ``blocks``. Spelled out: ``_replace`` takes three times as long."""
    return EngineView(
        engine_id=view.engine_id,
        role=view.role,
        queued_prefill_tokens=state.queued_prefill_tokens,
        free_at_s=state.free_at_s,
        late_s=view.late_s,
        later=later,
        per_token_s=view.per_token_s,
        per_work_s=view.per_work_s,
        per_iteration_s=view.per_iteration_s,
        room_tokens=view.room_tokens,
        kv_tokens=view.kv_tokens,
        available_tokens=view.available_tokens - blocks * state.config.block_size_tokens,
        num_seats=view.num_seats,
        available_seqs=view.available_seqs - 1,
        late_tokens=view.late_tokens,
        late_requests=view.late_requests,
        transfer_latency_s=view.transfer_latency_s,
        transfer_per_token_s=view.transfer_per_token_s,
        is_proven=view.is_proven,
        blocked_reason=view.blocked_reason,
        is_of_others=view.is_of_others,
    )
