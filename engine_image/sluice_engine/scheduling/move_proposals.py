"""The engine's part of the plan, and the decodes that it makes leave (TaiChi, Algorithm 1, in ``sluice_core.scheduling.decode_flow``)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from sluice_core.records import FlowParameters, RequestId, Role
from sluice_core.scheduling.decode_flow import DecodeSet
from sluice_core.strategies import get_strategy
from sluice_engine.core_messages import ConfigureAnswer, ConfigureCommand, ProposedMove, StrategyParameters

if TYPE_CHECKING:
    from sluice_core.kv import KvBlocks
    from sluice_engine.scheduling.request_tracker import TrackedRequest


# Stands for no objective: nobody is late by it, and it can be reckoned with.
NO_OBJECTIVE_S = 1e9


class MoveProposer:
    """Plan in force and running decodes of one engine.

    Args:
        max_batch_tokens: Largest chunk size; in force until the first plan.
        block_size_tokens: Tokens per KV block.
        max_num_seqs: Most running requests.
    """

    def __init__(self, *, max_batch_tokens: int, block_size_tokens: int, max_num_seqs: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._members: set[RequestId] = set()
        self._decodes = DecodeSet(block_size_tokens=block_size_tokens, max_num_seqs=max_num_seqs)
        self.last_chunk_size_tokens = max_batch_tokens
        self.configure(
            ConfigureCommand(
                generation=0, role=Role.DECODE_HEAVY, chunk_size_tokens=max_batch_tokens, strategy="aggregated"
            )
        )

    plan: ConfigureCommand
    role: Role

    def configure(self, plan: ConfigureCommand) -> ConfigureAnswer:
        """Puts a plan in force, from the next iteration on.

        Returns:
            What is in force now; an older generation, or a plan that cannot be carried out, changes nothing.
        """
        error = ""
        if plan.generation >= getattr(self, "plan", plan).generation:
            try:
                self._put_in_force(plan)
            except ValueError as refusal:
                error = str(refusal)
        return ConfigureAnswer(
            generation=self.plan.generation,
            role=self.plan.role,
            chunk_size_tokens=self.plan.chunk_size_tokens,
            error=error,
        )

    def _put_in_force(self, plan: ConfigureCommand) -> None:
        role = Role(plan.role)
        if not 0 <= plan.chunk_size_tokens <= self._max_batch_tokens:
            raise ValueError(f"chunk size {plan.chunk_size_tokens} is not in 0..{self._max_batch_tokens}")
        policy = get_strategy(plan.strategy).make_flow(_read_parameters(plan.parameters), random.Random(0))  # noqa: S311
        self.plan, self.role, self._policy = plan, role, policy
        if plan.chunk_size_tokens:
            self.last_chunk_size_tokens = plan.chunk_size_tokens
        self._decodes.role = role
        self._decodes.is_draining = plan.is_draining

    @property
    def watermark(self) -> float:
        """M, a share of KV blocks."""
        return self.plan.parameters.watermark

    def join(self, tracked: TrackedRequest, now_s: float) -> None:
        """Adds a decode that has just got its first token here."""
        request, extras = tracked.request, tracked.extras
        if tracked.first_token_s is None:
            tracked.first_token_s = now_s
        self._members.add(RequestId(request.request_id))
        self._decodes.join(
            RequestId(request.request_id),
            now=now_s,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            output_tokens_since_reset=max(
                0, extras.output_tokens_since_reset + request.num_output_tokens - len(extras.output_token_ids)
            ),
            since_first_token_s=now_s - tracked.first_token_s,
            tpot_slo_s=extras.tpot_slo_s or NO_OBJECTIVE_S,
            is_moved_in=tracked.is_moved_in,
        )

    def leave(self, request_id: str) -> None:
        """Removes a decode, if it is one."""
        self._members.discard(RequestId(request_id))
        self._decodes.leave(RequestId(request_id))

    def advance(self, scheduled: dict[str, int]) -> None:
        """Counts an iteration.

        Args:
            scheduled: Tokens of the iteration by request id.
        """
        self._decodes.advance(self._members.difference(scheduled))

    def propose(self, now_s: float, kv: KvBlocks) -> list[ProposedMove]:
        """Decodes that should leave."""
        self._decodes.observe_kv(kv)
        return [
            ProposedMove(
                request_id=move.request_id,
                cause=move.cause,
                num_output_tokens=move.output_tokens,
                num_blocks=move.num_blocks,
            )
            for move in self._policy.propose(now_s, self._decodes)
        ]


def _read_parameters(parameters: StrategyParameters) -> FlowParameters:
    return FlowParameters(
        watermark=parameters.watermark,
        approaching_factor=parameters.approaching_factor,
        min_tokens_between_moves=parameters.min_tokens_between_moves,
    )
