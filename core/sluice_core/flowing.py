"""Which decodes move, and where to: TaiChi's Algorithm 1 in O(moved).

The engine keeps its decodes in a ``DecodeSet`` and asks ``FlowPolicy.propose`` after each iteration; the router asks
``FlowPolicy.target`` for the engine that shall take a proposed request.

All decodes of an engine gain one token per iteration, so both orders of Algorithm 1 are static and an iteration costs
nothing per running decode:

- longest output first = ascending iteration number at which the length counter was zero;
- TPOT so far above ``alpha * tau``: ``now - t_first > alpha * tau * (output_tokens - 1)`` with
  ``output_tokens = k - k0`` (k counts iterations) is ``alpha * tau * (k0 + 1) - t_first > alpha * tau * k - now``,
  whose left side never changes; one order per TPOT SLO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_core.records import EngineId, MoveCause, RequestId, Role

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from sluice_core.engines import EngineTable
    from sluice_core.kv import KvBlocks
    from sluice_core.records import FlowParameters, MoveProposal

MAX_MOVES_IN_FLIGHT = 16  # proposals and hand-offs of one engine at a time
PROPOSAL_BACKOFF_S = 0.25  # first wait before an unanswered proposal is made again; doubles
MAX_PROPOSAL_BACKOFF_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRequest:
    """A request that needs a target.

    Args:
        request_id: The request.
        cause: Why it moves.
        source: Where it runs.
        num_blocks: KV blocks it needs on the target.
        excluded: Engines that must not get it (they refused it, or it failed there).
    """

    request_id: RequestId
    cause: MoveCause
    source: EngineId
    num_blocks: int
    excluded: frozenset[EngineId] = frozenset()


class DecodeSet:
    """The running decodes of one engine, of all routers; mutable, owned by the engine's scheduler.

    Call order of an iteration: ``advance`` (every member gained a token), ``join``/``leave`` for what started or
    ended in it, then ``FlowPolicy.propose``.

    Args:
        block_size_tokens: Tokens per KV block.
        max_num_seqs: Most running requests.

    Attributes:
        role: Role in force; set it on a configure.
        is_draining: Every decode is proposed; set it on a configure.
        kv: KV blocks of the engine; set it before each ``propose``.
    """

    role: Role
    is_draining: bool
    kv: KvBlocks

    def __init__(self, *, block_size_tokens: int, max_num_seqs: int) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __contains__(self, request_id: RequestId) -> bool:
        raise NotImplementedError

    def join(
        self,
        request_id: RequestId,
        *,
        now: float,
        prompt_tokens: int,
        output_tokens: int,
        output_tokens_since_reset: int,
        since_first_token_s: float,
        tpot_slo_s: float,
        is_moved_in: bool,
    ) -> None:
        """Add a decode that has at least one output token.

        Args:
            request_id: Unique on the engine.
            now: Seconds on the caller's clock.
            prompt_tokens: Prompt length.
            output_tokens: Tokens of the whole request so far, on all engines.
            output_tokens_since_reset: Length that Algorithm 1 sorts by: tokens since the last backflow.
            since_first_token_s: Seconds since the client's first token.
            tpot_slo_s: TPOT objective, in seconds.
            is_moved_in: It came from another engine with its KV; False: it was prefilled here.

        Raises:
            ValueError: Known already, or without an output token.
        """
        raise NotImplementedError

    def leave(self, request_id: RequestId) -> None:
        """Remove a decode that finished, was handed off, preempted or aborted. Unknown ones are ignored."""
        raise NotImplementedError

    def advance(self, skipped: Iterable[RequestId] = ()) -> None:
        """Count an iteration in which every member gained one token.

        Args:
            skipped: Members that gained none (not scheduled); costs O(skipped).
        """
        raise NotImplementedError

    def set_output_tokens(self, request_id: RequestId, output_tokens: int) -> None:
        """Correct a member's output length after the current iteration (several tokens in one step)."""
        raise NotImplementedError

    def refuse(self, request_id: RequestId) -> None:
        """Note that a proposed move will not happen now; it is proposed again after its back-off."""
        raise NotImplementedError

    def output_tokens(self, request_id: RequestId) -> int:
        """Count the tokens of the whole request so far."""
        raise NotImplementedError

    def output_tokens_since_reset(self, request_id: RequestId) -> int:
        """Count the length that Algorithm 1 sorts by."""
        raise NotImplementedError


class FlowPolicy:
    """Algorithm 1 (taichi.txt, section 3.3) with router.md section 3's rules on room and ping-pong.

    Routers tell engines the strategy ``aggregated`` where roles are void, so that nothing is proposed there.

    Args:
        parameters: Live parameters; replace the attribute on a plan change.
        rng: Breaks ties between targets; seeded by the caller.
        moves_first_decodes: Decodes prefilled on a P-heavy engine are proposed to move (``prefill_done``).
        degrades: D-heavy engines above the watermark propose their longest outputs (``degrade``).
        flows_back: P-heavy engines propose decodes that near their TPOT SLO (``backflow``).
    """

    def __init__(
        self,
        parameters: FlowParameters,
        rng: random.Random,
        *,
        moves_first_decodes: bool = True,
        degrades: bool = True,
        flows_back: bool = True,
    ) -> None:
        self.parameters = parameters
        self.moves_first_decodes = moves_first_decodes
        self.degrades = degrades
        self.flows_back = flows_back
        self._rng = rng

    def propose(self, now: float, engine: DecodeSet) -> list[MoveProposal]:
        """Pick the decodes that should leave; call it after each iteration.

        A proposal stands until the request leaves or the back-off has passed; while it stands its blocks count as
        released and it is not repeated.

        Args:
            now: Seconds on the caller's clock.
            engine: Its decodes, role and KV blocks.

        Returns:
            New proposals, most urgent first.
        """
        raise NotImplementedError

    def target(self, now: float, request: FlowRequest, engines: EngineTable) -> EngineId | None:
        """Pick the engine to ask for a grant.

        First decode and backflow: the D-heavy engine with the least KV used, grants included, and physical room.
        Degradation: the P-heavy engine with the fewest used blocks, bounded by the watermark. Drain and manual: the same
        role first, then any with room. Void roles: no flow, drain alone finds a target.

        Args:
            now: Seconds on the caller's clock.
            request: What moves and why.
            engines: The engines.

        Returns:
            The target; None: it stays where it is.
        """
        raise NotImplementedError
