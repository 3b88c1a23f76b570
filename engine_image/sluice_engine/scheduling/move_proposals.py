"""The plan in force, its strategy's policy, and the decodes that this policy wants to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.latency import OnlineLatencyModel
from sluice_core.records import RequestId, Role
from sluice_core.scheduling.decode_order import DecodeSet
from sluice_core.strategies import INITIAL_STRATEGY, get_strategy
from sluice_engine.core_messages import CAPABILITIES, ConfigureAnswer, ConfigureCommand, ProposedMove

if TYPE_CHECKING:
    from sluice_core.kv import KvBlocks
    from sluice_core.scheduling.batching import EnginePolicy
    from sluice_engine.scheduling.request_tracker import TrackedRequest


# Stands for no objective: a finite number, by which no decode is ever late.
NO_OBJECTIVE_S = 1e9


class MoveProposer:
    """Plan in force and running decodes of one engine.

    Args:
        max_batch_tokens: Largest chunk size; in force until the first plan.
        block_size_tokens: Tokens per KV block.
        max_num_seqs: Most running requests.

    Attributes:
        latency: How long the engine's iterations take, as far as a policy in force has needed it.
    """

    def __init__(self, *, max_batch_tokens: int, block_size_tokens: int, max_num_seqs: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self.latency = OnlineLatencyModel()
        self._members: set[RequestId] = set()
        self._decodes = DecodeSet(block_size_tokens=block_size_tokens, max_num_seqs=max_num_seqs)
        self.last_chunk_size_tokens = max_batch_tokens
        self.configure(
            ConfigureCommand(
                generation=0,
                role=Role.DECODE_HEAVY,
                chunk_size_tokens=max_batch_tokens,
                strategy=INITIAL_STRATEGY.name,
            )
        )

    plan: ConfigureCommand
    role: Role
    policy: EnginePolicy

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
        strategy = get_strategy(plan.strategy)
        strategy.check_capabilities(CAPABILITIES)
        policy = strategy.make_engine(strategy.read_parameters(plan.parameters))
        policy.bind(self._decodes, self.latency)
        policy.observe_chunk_sizes(plan.chunk_sizes_tokens)
        self.plan, self.role, self.policy = plan, role, policy
        if plan.chunk_size_tokens:
            self.last_chunk_size_tokens = plan.chunk_size_tokens
        self._decodes.role = role
        self._decodes.is_draining = plan.is_draining

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
            split_tokens=extras.split_output_tokens,
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
        skipped = self._members.difference(scheduled)
        if not skipped or len(skipped) < len(self._members):  # else it was one of prefills alone
            self._decodes.advance(skipped)

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
            for move in self.policy.propose(now_s, self._decodes)
        ]
