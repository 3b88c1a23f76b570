"""Converts between the wire (protobuf), ``core_messages`` and vLLM's outputs.

``request_builder`` alone makes vLLM's requests, because that needs vLLM's code. Here outputs are read by attribute, so
that nothing heavy is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import plan_pb2, sampling_pb2
from sluice.wire_fields import names_by_value
from sluice_core.records import MoveCause, Role
from sluice_core.strategies import get_strategy
from sluice_engine import core_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

# Strings of the core's enums by the wire's values: members of one name.
WIRE_ROLES = {Role[name].value: value for value, name in names_by_value(plan_pb2.Role).items()}
ROLES = {
    # The plan does not name this engine: it serves with the D-heavy setting.
    plan_pb2.ROLE_UNSPECIFIED: Role.DECODE_HEAVY.value,
    **{value: role for role, value in WIRE_ROLES.items()},
}
CAUSES = {value: MoveCause[name].value for value, name in names_by_value(wire.MoveCause).items()}
WIRE_CAUSES = {name: cause for cause, name in CAUSES.items()}
# vllm.v1.engine.FinishReason: STOP, LENGTH, ABORT, ERROR, REPETITION.
FINISH_REASONS = (
    sampling_pb2.FINISH_REASON_STOP,
    sampling_pb2.FINISH_REASON_LENGTH,
    sampling_pb2.FINISH_REASON_ABORTED,
    sampling_pb2.FINISH_REASON_ERROR,
    sampling_pb2.FINISH_REASON_STOP,
)


class LogprobRows(Protocol):
    """vLLM's ``LogprobsLists``: one row per token, the sampled one first, then the most likely ones."""

    @property
    def logprob_token_ids(self) -> Any:
        """Token ids, [tokens, alternatives + 1]."""

    @property
    def logprobs(self) -> Any:
        """Their log probabilities, same shape."""

    @property
    def sampled_token_ranks(self) -> Any:
        """Ranks of the sampled tokens, [tokens]."""


def configure_command(message: wire.Configure, generation: int, is_leaving: bool) -> core_messages.ConfigureCommand:  # noqa: FBT001
    """The engine's part of a plan, for the EngineCore.

    Args:
        message: As the router sent it.
        generation: Generation for the EngineCore; see ``PlanRelay``.
        is_leaving: The process drains, whatever the plan says.

    Raises:
        ValueError: A field has no meaning here.
    """
    strategy = get_strategy(message.strategy)
    strategy.check_capabilities(core_messages.CAPABILITIES)
    strategy.read_parameters(message.strategy_parameters)
    if message.role not in ROLES:
        raise ValueError(f"role: {message.role} is none of {sorted(ROLES)}")
    return core_messages.ConfigureCommand(
        generation=generation,
        role=ROLES[message.role],
        chunk_size_tokens=message.chunk_size_tokens,
        is_draining=message.is_draining or is_leaving,
        strategy=strategy.name,
        parameters=dict(message.strategy_parameters),
        chunk_sizes_tokens=list(message.chunk_sizes_tokens),
    )


def load_report(load: core_messages.SchedulerLoad) -> wire.LoadReport:
    """The sums of a load; the sender adds what depends on the router and the moment."""
    return wire.LoadReport(
        queued_prefill_tokens=load.queued_prefill_tokens,
        queued_requests=load.queued_requests,
        queued_attention_work=load.queued_attention_work,
        late_prefill_tokens=load.late_prefill_tokens,
        late_requests=load.late_requests,
        late_attention_work=load.late_attention_work,
        due=[wire.DuePrefills(**prefills._asdict()) for prefills in load.due],
        running_decodes=load.running_decodes,
        decode_context_tokens=load.decode_context_tokens,
        pulling_requests=load.pulling_requests,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_granted=load.kv_blocks_granted,
        kv_blocks_pinned=load.kv_blocks_pinned,
        chunk_size_tokens=load.chunk_size_tokens,
        is_draining=load.is_draining,
        pull_bytes_per_s=load.pull_bytes_per_s,
        num_preemptions=load.num_preemptions,
        num_moved_in=load.num_moved_in,
        num_moved_out=load.num_moved_out,
        num_recomputed_pulls=load.num_recomputed_pulls,
        prefill_phase_s=load.prefill_phase_s,
        saved_tpot_s=load.saved_tpot_s,
        under_way=wire.Iteration() if load.under_way is None else iteration_message(load.under_way),
    )


def iteration_message(iteration: core_messages.IterationReport) -> wire.Iteration:
    """What an iteration computed."""
    return wire.Iteration(
        number=iteration.number,
        prefill_tokens=iteration.prefill_tokens,
        attention_work=iteration.attention_work,
        num_chunks=iteration.num_chunks,
        num_decodes=iteration.num_decodes,
        decode_context_tokens=iteration.decode_context_tokens,
        duration_s=iteration.duration_s,
    )


def proposal_message(slot: int, proposal: core_messages.ProposedMove) -> wire.Proposal:
    """A request that should leave."""
    return wire.Proposal(
        slot=slot,
        cause=WIRE_CAUSES[proposal.cause],
        num_output_tokens=proposal.num_output_tokens,
        num_blocks=proposal.num_blocks,
    )


def token_logprobs(rows: LogprobRows, first_column: int) -> Iterator[wire.TokenLogprobs]:
    """Logprobs of consecutive tokens of one request.

    Args:
        rows: As vLLM gives them.
        first_column: Column of the first of these tokens.
    """
    ids, logprobs, ranks = rows.logprob_token_ids.tolist(), rows.logprobs.tolist(), rows.sampled_token_ranks.tolist()
    for offset, (row_ids, row_logprobs, rank) in enumerate(zip(ids, logprobs, ranks, strict=True)):
        yield wire.TokenLogprobs(
            column=first_column + offset,
            logprob=row_logprobs[0],
            rank=rank,
            top_token_ids=row_ids[1:],
            top_logprobs=row_logprobs[1:],
        )


def request_extras(
    submit: wire.Submit, *, stream_number: int, grant_key: str, fingerprint: str, now_s: float
) -> core_messages.RequestExtras:
    """What vLLM's request has no place for.

    Args:
        submit: As the router sent it.
        stream_number: Number of its stream.
        grant_key: Key of its grant in the EngineCore; empty: none.
        fingerprint: This engine's; KV of another one is left alone, and its tokens are computed again.
        now_s: When it came, on the machine's monotonic clock.
    """
    has_kv = submit.HasField("kv") and submit.kv.fingerprint == fingerprint
    return core_messages.RequestExtras(
        stream_number=stream_number,
        submit_number=submit.submit_number,
        output_token_ids=list(submit.output_token_ids),
        transfer_params=submit.kv.transfer_params_json if has_kv else "",
        grant_key=grant_key,
        ttft_slo_s=submit.ttft_slo_s,
        tpot_slo_s=submit.tpot_slo_s,
        arrival_s=now_s - submit.age_s,
        first_token_s=now_s - submit.since_first_token_s if submit.HasField("since_first_token_s") else None,
        output_tokens_since_reset=submit.output_tokens_since_reset,
        is_recovery=submit.is_recovery,
        split_output_tokens=submit.split_output_tokens,
        is_first_part=submit.split_prompt_tokens > 0,
    )
