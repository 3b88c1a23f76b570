"""The running decodes, and those of them that the policy in force wants to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.records import MoveCause, RequestId
from sluice_engine.core_messages import ProposedMove

if TYPE_CHECKING:
    from sluice_core.kv_blocks import KvBlocks
    from sluice_core.scheduling.decode_set import DecodeSet
    from sluice_engine.request_tracker import TrackedRequest
    from sluice_engine.scheduling.received_plan import ReceivedPlan


# Stands for no objective: a finite number, by which no decode is ever late.
NO_OBJECTIVE_S = 1e9


class MoveProposer:
    """Running decodes of one engine.

    Args:
        decodes: The decodes, none yet.
        plan: The plan in force; its policy says which leave.
    """

    def __init__(self, decodes: DecodeSet, plan: ReceivedPlan) -> None:
        self._decodes = decodes
        self._plan = plan
        self._members: set[RequestId] = set()
        self._begun: list[ProposedMove] = []

    def join(self, tracked: TrackedRequest, now_s: float) -> None:
        """Adds a decode that has just got its first token here."""
        request, extras = tracked.request, tracked.extras
        if tracked.first_token_s is None:
            tracked.first_token_s = now_s
        self._members.add(RequestId(request.request_id))
        self._decodes.join(
            RequestId(request.request_id),
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            output_tokens_since_reset=max(
                0, extras.output_tokens_since_reset + request.num_output_tokens - len(extras.output_token_ids)
            ),
            first_token_s=tracked.first_token_s,
            tpot_slo_s=extras.tpot_slo_s or NO_OBJECTIVE_S,
            is_moved_in=tracked.is_moved_in,
            split_tokens=extras.split_output_tokens,
        )

    def begin(self, tracked: TrackedRequest, num_blocks: int) -> None:
        """Proposes the move of a prompt's first part, which has just begun: KV can follow while it is computed."""
        self._begun.append(
            ProposedMove(
                request_id=tracked.request.request_id,
                cause=MoveCause.SPLIT,
                num_output_tokens=0,
                num_blocks=num_blocks,
            )
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
        """Requests that should leave: decodes, and the first parts of prompts."""
        self._decodes.observe_kv(kv)
        begun, self._begun = self._begun, []
        return begun + [
            ProposedMove(
                request_id=move.request_id,
                cause=move.cause,
                num_output_tokens=move.output_tokens,
                num_blocks=move.num_blocks,
            )
            for move in self._plan.policy.propose(now_s, self._decodes)
        ]
