"""A simulated request and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from sluice_core.records import NOTHING_CACHED, EngineId, PrefillRequest, RequestId
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.sim.block_table import BlockTable
from sluice_core.sim.sim_setup import Arrival
from sluice_core.slo_attainment import MET_NOTHING, SloOutcome, check_slo, compute_tpot_s, is_tpot_met


class RequestState(IntEnum):
    """Where a request is."""

    WAITING = 0  # at the router
    QUEUED = 1  # on an engine, its prefill not complete
    DECODING = 2
    MOVING = 3  # its KV is on the way to another engine, or waits there to join
    PARKED = 4  # its prefill is done and it waits for a target, its KV on the source
    FINISHED = 5
    REJECTED = 6


class SimRequest:
    """One request; mutable, changed by the simulation and by the engine that holds it.

    Attributes:
        num_computed_tokens: Tokens of its prefill (or recompute) that have KV on the engine.
        num_cached_tokens: Of these, tokens that were found there and not computed.
        batch_number: The last of its engine's prefill batches that it was in; -1: none, it has just come.
        prefill_tokens: Tokens of this prefill (or recompute).
        generated_tokens: Output tokens so far; while it decodes as of the last time it joined a decode batch.
        reset_tokens: Output tokens when its length was last reset (Algorithm 1).
        start_iteration: While it decodes: iteration of the engine at which it had no output.
        batch_epoch: Counts how often it left a decode batch: distinguishes entries of an earlier epoch.
        num_blocks: Blocks that it holds while it does not decode.
        table: What these are where it is or goes, with prefix reuse.
        source_table: The same where it was handed off, until its KV is released there.
        is_leaving: While it decodes: a move was proposed and not yet begun or given up.
        first_token_s: End of TTFT; -1 before.
        has_missed_ttft: TTFT was over before the first token, as ``TtftDeadlines`` noticed.
        held_since_s: When it last began to wait at the router.
        last_token_s: When its last token came, as of the last time it left a decode batch or finished.
        split_token: Tokens of prompt and output whose KV its engine computes before another goes on; 0: all.
        planned_target: That other engine.
        part_tokens: Tokens of a prompt that was cut which have KV, until the other engine has it; 0: it was not cut, or
            they are being computed.
        sent_tokens: Of these, tokens whose KV has been sent or was there.
        part_blocks: Blocks that the other engine keeps for a prompt that was cut; 0: it has granted none.
        part_table: Cached blocks among these, with prefix reuse.
        part_move: Number of the move by which the other engine gets that KV; 0: none is under way.
        is_whole: Its prompt is not cut again: the other engine had no room.
    """

    __slots__ = (
        "arrival_s",
        "batch_epoch",
        "batch_number",
        "block_hashes",
        "first_token_s",
        "generated_tokens",
        "has_missed_ttft",
        "held_since_s",
        "index",
        "is_leaving",
        "is_moved_in",
        "is_whole",
        "kind",
        "last_token_s",
        "max_output_tokens",
        "num_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_moves",
        "num_preemptions",
        "order",
        "output_tokens",
        "part_blocks",
        "part_move",
        "part_table",
        "part_tokens",
        "planned_target",
        "prefill_tokens",
        "priority",
        "prompt_tokens",
        "request_id",
        "reset_tokens",
        "sent_tokens",
        "slo",
        "source",
        "source_table",
        "split_token",
        "start_iteration",
        "state",
        "table",
        "target",
        "tpot_slo_s",
        "ttft_slo_s",
    )

    def __init__(self, index: int, arrival: Arrival) -> None:
        self.index = index
        self.arrival_s = arrival.at_s
        self.request_id = RequestId(str(index))
        self.prompt_tokens = arrival.prompt_tokens
        self.output_tokens = arrival.output_tokens
        self.max_output_tokens = arrival.max_output_tokens
        self.priority = arrival.priority
        self.slo = arrival.slo
        self.ttft_slo_s = arrival.slo.ttft_s
        self.tpot_slo_s = arrival.slo.tpot_s
        self.state = RequestState.WAITING
        self.kind = RequestKind.NEW_PROMPT
        self.order: tuple[int, float, int] = (0, 0.0, 0)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.prefill_tokens = 0
        self.batch_number = 0
        self.generated_tokens = 0
        self.reset_tokens = 0
        self.start_iteration = 0
        self.batch_epoch = 0
        self.num_blocks = 0
        self.first_token_s = -1.0
        self.has_missed_ttft = False
        self.held_since_s = 0.0
        self.last_token_s = -1.0
        self.is_leaving = False
        self.is_moved_in = False
        self.num_moves = 0
        self.num_preemptions = 0
        self.block_hashes = arrival.block_hashes
        self.table: BlockTable | None = None
        self.source_table: BlockTable | None = None
        self.source: EngineId | None = None
        self.target: EngineId | None = None
        self.split_token = 0
        self.planned_target: EngineId | None = None
        self.part_tokens = 0
        self.sent_tokens = 0
        self.part_blocks = 0
        self.part_table: BlockTable | None = None
        self.part_move = 0
        self.is_whole = False

    @property
    def is_cut(self) -> bool:
        """Its engine computes the beginning of its prompt alone."""
        return 0 < self.split_token < self.prompt_tokens

    @property
    def split_tokens(self) -> int:
        """Output tokens at which its engine hands it off as planned; 0: it does not."""
        return max(0, self.split_token - self.prompt_tokens + 1) if self.split_token else 0

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that it has KV of while it neither prefills nor decodes: all but the last one."""
        return self.part_tokens or self.prompt_tokens + self.generated_tokens - 1

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token; None for one token."""
        return compute_tpot_s(self.first_token_s, self.last_token_s, self.output_tokens)

    @property
    def slo_outcome(self) -> SloOutcome:
        """Which objectives it met; none before it has finished."""
        if self.state is not RequestState.FINISHED:
            return MET_NOTHING
        return check_slo(self.slo, self.ttft_s, self.tpot_s)

    @property
    def has_met_slo(self) -> bool:
        """Finished within both objectives."""
        # The simulator asks once per request: a record would cost a hundredth of the run.
        if self.state is not RequestState.FINISHED or self.ttft_s > self.ttft_slo_s:
            return False
        return is_tpot_met(self.tpot_s, self.tpot_slo_s)

    def describe_prefill(self, cached_tokens: Mapping[EngineId, int] = NOTHING_CACHED) -> PrefillRequest:
        """Describe what is to be computed to the placement policy.

        Args:
            cached_tokens: See ``PrefillRequest``.
        """
        return PrefillRequest(
            request_id=self.request_id,
            arrival_s=self.arrival_s,
            prompt_tokens=self.prompt_tokens + self.generated_tokens,
            slo=self.slo,
            priority=self.priority,
            is_recovery=self.first_token_s >= 0.0,
            next_token_due_s=self.first_token_s + self.tpot_slo_s * self.generated_tokens,
            cached_tokens=cached_tokens,
            max_output_tokens=self.max_output_tokens,
            is_whole=self.is_whole,
        )


def check_arrivals(requests: Sequence[SimRequest], hash_block_tokens: int | None) -> None:
    """Check the requests of a run.

    Args:
        requests: In the order in which they were given.
        hash_block_tokens: See ``SimOptions``.

    Raises:
        ValueError: Out of order, without tokens, or with hashes for another prompt than theirs.
    """
    last_s = 0.0
    for request in requests:
        if request.arrival_s < last_s or request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(
                f"request {request.request_id} at {request.arrival_s} s after one at {last_s} s, with "
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens: "
                f"arrivals are in order, with at least 1 token each"
            )
        last_s = request.arrival_s
        num_hashes, prompt_tokens = len(request.block_hashes), request.prompt_tokens
        if hash_block_tokens and num_hashes:
            lengths = (prompt_tokens, prompt_tokens + request.output_tokens)
            if all(num_hashes != -(-length // hash_block_tokens) for length in lengths):
                raise ValueError(
                    f"request {request.request_id} has {num_hashes} hashes of {hash_block_tokens} tokens each for "
                    f"{prompt_tokens} prompt tokens, or {lengths[1]} with the answer"
                )


def find_expired(
    held: Mapping[RequestId, PrefillRequest], requests: Sequence[SimRequest], now: float, wait_limit_s: float | None
) -> list[SimRequest]:
    """Find what has waited at the router for too long; requests that have tokens go on waiting.

    Args:
        held: What waits, in the order in which it began to.
        requests: All requests.
        now: Seconds of the simulated clock.
        wait_limit_s: See ``SimOptions``.
    """
    late: list[SimRequest] = []
    if wait_limit_s is not None:
        for request_id, prefill in held.items():
            request = requests[int(request_id)]
            if request.held_since_s > now - wait_limit_s:
                break
            if not prefill.is_recovery:
                late.append(request)
    return late
