"""Messages between the serving process and the EngineCore process; nothing else crosses.

- *Commands* go down in batches, as calls of the EngineCore utility ``UTILITY``, and each has an answer.
- *Extras* of a request go down in ``SamplingParams.extra_args[EXTRAS_KEY]``.
- *Reports* come up, one per iteration, as an ``EngineCoreOutput`` with the id ``REPORT_ID``.

All are plain msgpack once encoded (``core_encoding``). Durations cross, and times on the machine's monotonic clock;
never a wall clock's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sluice_core.scheduling.engine_state import DuePrefills  # noqa: TC001 - msgspec looks it up
from sluice_core.strategies.interface import Need

# Name of the EngineCore utility that carries commands.
UTILITY = "sluice"
# Key of the extras in SamplingParams.extra_args.
EXTRAS_KEY = "sluice"
# Request id of the reserved output that carries a report. Ids of real requests never begin with a NUL.
REPORT_ID = "\0sluice"
# Key that marks kv_transfer_params as ours, and says how many tokens they cover.
NUM_TOKENS_KEY = "sluice_num_tokens"
# Key of the tokens before the first offered block.
FIRST_TOKEN_KEY = "sluice_first_token"  # noqa: S105


# What this engine can do for a strategy beyond chunked prefill and hand-offs of whole requests.
CAPABILITIES: frozenset[Need] = frozenset({Need.PARTS, Need.PHASES, Need.SPLIT})

# --- commands ----------------------------------------------------------------------------------------------------


class ConfigureCommand(msgspec.Struct, frozen=True, kw_only=True, tag="configure"):
    """The engine's part of a plan. A generation lower than the one in force changes nothing.

    Args:
        generation: Generation of the plan.
        role: ``"P-heavy"``, ``"D-heavy"`` (``sluice_core.records.Role``).
        chunk_size_tokens: Tokens per iteration, decodes included; 0: no new prompts.
        is_draining: True: no new prompts, no grants, every decode is proposed with the cause ``drain``.
        strategy: Name of a row of ``sluice_core.strategies``.
        parameters: Its parameters, by their names in the row.
        chunk_sizes_tokens: Chunk sizes of the plan's engines that do not drain, each once.
    """

    generation: int
    role: str
    chunk_size_tokens: int
    is_draining: bool = False
    strategy: str
    parameters: dict[str, str] = {}
    chunk_sizes_tokens: list[int] = []


class GrantCommand(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """Requests room. The blocks leave the pool at once, and go to the request that names ``key``.

    Args:
        key: Chosen by the serving process, unique over all routers.
        num_tokens: Tokens the request will hold when it arrives, one more included.
        cause: ``sluice_core.records.MoveCause``.
        ttl_s: Seconds until the reservation lapses.
    """

    key: str
    num_tokens: int
    cause: str
    ttl_s: float


class ReleaseGrantCommand(msgspec.Struct, frozen=True, kw_only=True, tag="release_grant"):
    """Gives a reservation back; an unknown key is no error (it lapsed, or it was used).

    Args:
        key: Key of the grant.
    """

    key: str


class HandOffCommand(msgspec.Struct, frozen=True, kw_only=True, tag="hand_off"):
    """Ends a request's part here at the next iteration boundary; its KV blocks stay until they are read or released.

    Args:
        request_id: The engine's id of the request.
        num_output_tokens: Output tokens of the whole request with which the part ends, if there are fewer so far.
    """

    request_id: str
    num_output_tokens: int = 0


class ReleaseCommand(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Frees the KV blocks of a handed-off request now; an unknown request is no error (its blocks are free).

    Args:
        request_id: The engine's id of the request.
    """

    request_id: str


class ReadLoadCommand(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Reads the load between iterations (idle reports); lapsed grants are dropped first."""


class OfferCommand(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Pins the full blocks that a request has computed, for a reader; the request runs on.

    Args:
        key: Chosen by the serving process, unique over all routers.
        request_id: The engine's id of the request.
        first_token: Tokens that the reader has: full blocks. The offer begins with the next one.
    """

    key: str
    request_id: str
    first_token: int = 0


class ReleaseOfferCommand(msgspec.Struct, frozen=True, kw_only=True, tag="release_offer"):
    """Ends an offer that nobody reads any more; an unknown key is no error.

    Args:
        key: Key of the offer.
    """

    key: str


class PullPartCommand(msgspec.Struct, frozen=True, kw_only=True, tag="pull_part"):
    """Pulls an offer into the blocks of a grant; ``SchedulerReport.pulled_parts`` says what came of it.

    Args:
        key: Key of the grant.
        token_ids: Tokens after those of the grant's parts before, up to the end of this part.
        transfer_params: Where the part lies, of ``OfferAnswer``; empty: of another fingerprint.
        cache_salt: Salt of the request's prompt; empty: none.
    """

    key: str
    token_ids: list[int]
    transfer_params: str
    cache_salt: str = ""


Command = (
    ConfigureCommand
    | GrantCommand
    | ReleaseGrantCommand
    | HandOffCommand
    | ReleaseCommand
    | ReadLoadCommand
    | OfferCommand
    | ReleaseOfferCommand
    | PullPartCommand
)

# --- answers -----------------------------------------------------------------------------------------------------


class ConfigureAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="configured"):
    """What is in force from the next iteration on.

    Args:
        generation: Generation in force.
        role: Role in force.
        chunk_size_tokens: Chunk size in force.
        error: Why the command was refused; empty when it was taken (or was older than what is in force).
    """

    generation: int
    role: str
    chunk_size_tokens: int
    error: str = ""


class GrantAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="granted"):
    """Answer to ``GrantCommand``.

    Args:
        key: Key of the grant.
        is_granted: False: no room.
        reason: Why not: ``kv``, ``seqs``, ``draining``, ``watermark``.
        ttl_s: Seconds until the reservation lapses.
    """

    key: str
    is_granted: bool
    reason: str = ""
    ttl_s: float = 0.0


class HandOffAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="hand_off_answer"):
    """Answer to ``HandOffCommand``. An accepted one can still be refused later, in ``SchedulerReport.refused``.

    Args:
        request_id: The engine's id of the request.
        is_accepted: True: its Finished comes with KV, or, if it ends by itself at that boundary, without.
        reason: Why not: ``unknown``, ``prefill``, ``preempted``, ``waiting``.
    """

    request_id: str
    is_accepted: bool
    reason: str = ""


class OfferAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="offered"):
    """Answer to ``OfferCommand``.

    Args:
        key: Key of the offer.
        num_tokens: Where the offered blocks end, in tokens from the request's first one.
        transfer_params: ``transfer_params_json`` of the wire.
        reason: Why nothing is offered: ``unknown``, ``preempted``, ``waiting``, ``none``; empty: it is.
    """

    key: str
    num_tokens: int = 0
    transfer_params: str = ""
    reason: str = ""


class EmptyAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Answer to commands without a result."""


class SchedulerLoad(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Sums, not queues (``LoadReport`` of the wire; the serving process adds the rest).

    Args:
        queued_prefill_tokens: Prefill tokens not yet computed, waiting and running, pulls left out.
        queued_requests: Requests with such tokens.
        queued_attention_work: Sum over them of ``c * (context + c / 2)``, in token pairs.
        late_prefill_tokens: Of these tokens, those that are computed after all others, since they will miss their TTFT
            SLO in any case.
        late_requests: Requests with such tokens.
        late_attention_work: Their attention work.
        due: The others by when they are due, in seconds from now; empty where they are computed in another order.
        running_decodes: Decodes that run.
        decode_context_tokens: Sum of their contexts.
        pulling_requests: Requests that wait for KV from another engine.
        kv_blocks_total: KV blocks of the engine.
        kv_blocks_used: Blocks that requests hold, pinned ones included, granted ones not.
        kv_blocks_granted: Blocks reserved by grants.
        kv_blocks_pinned: Blocks handed off, neither read nor released.
        chunk_size_tokens: Chunk size in force.
        is_draining: True while draining.
        generation: Plan generation in force.
        pull_bytes_per_s: Measured rate of KV pulls; 0: none yet.
        num_preemptions: Since the start.
        num_suspended_prefills: Prefills that had started and made way for a more urgent one, since the start.
        num_phase_switches: Times that it went from prefills to decodes or back, since the start; of a strategy that
            separates these phases.
        prefill_phase_s: For how long its phase of prefills has gone on; 0: it is in none.
        saved_tpot_s: Mean saved TPOT of the decodes that were there before; None without any.
        num_moved_in: Requests that arrived with KV, since the start.
        num_moved_out: Requests handed off, since the start.
        num_recomputed_pulls: Pulls that failed, came too late or were malformed, and were recomputed, since the start.
        under_way: What the iteration under way computes, which are no queued tokens any more; None: nothing is.
    """

    queued_prefill_tokens: int = 0
    queued_requests: int = 0
    queued_attention_work: float = 0.0
    late_prefill_tokens: int = 0
    late_requests: int = 0
    late_attention_work: float = 0.0
    due: list[DuePrefills] = []
    running_decodes: int = 0
    decode_context_tokens: int = 0
    pulling_requests: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_granted: int = 0
    kv_blocks_pinned: int = 0
    chunk_size_tokens: int = 0
    is_draining: bool = False
    generation: int = 0
    pull_bytes_per_s: float = 0.0
    num_preemptions: int = 0
    num_suspended_prefills: int = 0
    num_phase_switches: int = 0
    prefill_phase_s: float = 0.0
    saved_tpot_s: float | None = None
    num_moved_in: int = 0
    num_moved_out: int = 0
    num_recomputed_pulls: int = 0
    under_way: IterationReport | None = None


class CompilingAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="compiling"):
    """The load while no iteration is due: a request waits for its grammar, and nothing runs.

    Args:
        load: The load.
    """

    load: SchedulerLoad


Answer = ConfigureAnswer | GrantAnswer | HandOffAnswer | OfferAnswer | EmptyAnswer | SchedulerLoad | CompilingAnswer

# --- extras of a request -----------------------------------------------------------------------------------------


class RequestExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM's own request record has no place for.

    ``EngineCoreRequest.prompt_token_ids`` is the prompt without generated tokens, but ``max_tokens``, ``min_tokens``,
    the penalties and the seed belong to the whole request. ``priority`` is the wire's: higher goes first. Request ids
    are never used twice in the life of an engine.

    Args:
        stream_number: Number of the router's stream, chosen by the serving process; reports echo submit numbers per
            stream.
        submit_number: Counts the stream's submits from 1.
        output_token_ids: Tokens generated so far elsewhere, in order.
        transfer_params: KV handle of the source (``transfer_params_json`` of the wire), checked for fingerprint by the
            serving process and for everything else here; empty: prefill here.
        grant_key: Grant that reserves the room; empty: none.
        ttft_slo_s: TTFT objective, in seconds.
        tpot_slo_s: TPOT objective, in seconds; 0: none.
        arrival_s: When the request arrived at its router, on the machine's monotonic clock, which is alike in all
            processes: requests wait for the scheduler, and an age would be out of date by then. None: now.
        first_token_s: When the client got its first token, on the same clock; None before it.
        output_tokens_since_reset: Output tokens since the last move that reset the length.
        is_recovery: True: ahead of other prefills, and never returned.
        split_output_tokens: Output tokens of the whole request at which its part here is planned to end; 0: it is not.
        is_first_part: The prompt is the first part of a longer one: its KV is handed off, the token after it is void.
    """

    stream_number: int = 0
    submit_number: int = 0
    output_token_ids: list[int] = []
    transfer_params: str = ""
    grant_key: str = ""
    ttft_slo_s: float = 0.0
    tpot_slo_s: float = 0.0
    arrival_s: float | None = None
    first_token_s: float | None = None
    output_tokens_since_reset: int = 0
    is_recovery: bool = False
    split_output_tokens: int = 0
    is_first_part: bool = False

    def encode(self) -> dict[str, Any]:
        """Plain data for ``SamplingParams.extra_args[EXTRAS_KEY]``."""
        return {EXTRAS_KEY: msgspec.to_builtins(self)}


# --- reports -----------------------------------------------------------------------------------------------------


class IterationReport(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration that computed something.

    Args:
        number: Counts from 1 since the start of the engine.
        prefill_tokens: Prefill tokens computed, recomputed ones included.
        attention_work: Sum over the prefill chunks of ``c * (context + c / 2)``, in token pairs.
        num_chunks: Prefill chunks.
        num_decodes: Decodes.
        decode_context_tokens: Sum of their contexts.
        duration_s: Measured wall time, from the later of its own scheduling and the end of the iteration before.
    """

    number: int
    prefill_tokens: int
    attention_work: float
    num_chunks: int
    num_decodes: int
    decode_context_tokens: int
    duration_s: float


class ProposedMove(msgspec.Struct, frozen=True, kw_only=True):
    """A request that should leave; it runs on until a ``HandOffCommand``.

    Args:
        request_id: The engine's id of the request.
        cause: ``sluice_core.records.MoveCause``.
        num_output_tokens: Output tokens so far, over all engines.
        num_blocks: KV blocks it holds.
    """

    request_id: str
    cause: str
    num_output_tokens: int
    num_blocks: int


class RefusedHandOff(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted hand-off that was given up; the request goes on here.

    Args:
        request_id: The engine's id of the request.
        reason: ``preempted``.
    """

    request_id: str
    reason: str


class PulledPart(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a ``PullPartCommand``, or of the KV that a prompt brought whose first part another engine computed.

    Args:
        key: Key of the grant.
        num_tokens: Tokens from the request's first one on whose KV is here.
        reason: Why the part did not come: ``lapsed``, ``handle``, ``gap``, ``failed``; empty: it did.
    """

    key: str
    num_tokens: int
    reason: str = ""


class PrefixChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What entered the prefix cache and what left it since the last report; nothing is in both.

    Args:
        stored: Hashes of blocks, the lower 64 bits of vLLM's.
        removed: The same.
    """

    stored: list[int] = []
    removed: list[int] = []


class SchedulerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an iteration reports beside its tokens. An iteration that computed nothing reports only changes.

    A returned request ends by being named in ``returned`` alone: vLLM sends no output for it.

    Args:
        load: Load after it.
        iteration: What it computed; None when it computed nothing.
        proposals: Requests that should leave.
        returned: Requests that ended because chunk size 0 or a drain sends unstarted prompts back to their routers.
        refused: Accepted hand-offs that were given up.
        last_submit_numbers: By stream number, the last submit that the load includes; only streams that have submitted
            since the last report.
        prefixes: Changes of the prefix cache; None: there are none.
        pulled_parts: Parts that have come, or will not.
    """

    load: SchedulerLoad
    iteration: IterationReport | None = None
    proposals: list[ProposedMove] = []
    returned: list[str] = []
    refused: list[RefusedHandOff] = []
    last_submit_numbers: dict[int, int] = {}
    prefixes: PrefixChanges | None = None
    pulled_parts: list[PulledPart] = []


class HandedOffKv(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of a handed-off request lies.

    Such a request ends with vLLM's finish reason "length": look for this first, then believe the reason.

    Args:
        num_tokens: Tokens whose KV is complete: prompt + output - 1.
        transfer_params: ``transfer_params_json`` of the wire.
    """

    num_tokens: int
    transfer_params: str
