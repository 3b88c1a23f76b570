"""Which decodes move, and where to: flowing decode scheduling (TaiChi, section 3.3, Algorithm 1) in O(moved).

The engine keeps its decodes in a ``DecodeSet``, which knows those that near their TPOT SLO (alpha). It calls
``FlowPolicy.propose`` after each iteration; the router calls ``FlowPolicy.target`` for the engine that shall take a
proposed request.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from sluice_core.records import EngineId, MoveCause, MoveProposal, Role
from sluice_core.scheduling.decode_set import Decode, DecodeSet
from sluice_core.scheduling.engine_table import EngineState, EngineTable
from sluice_core.strategy_parameters import StrategyParameters

__all__ = ["DecodeSet", "FlowPolicy", "FlowRequest"]

MAX_STANDING_PROPOSALS: Final = 16  # of one engine at a time
PROPOSAL_BACKOFF_S: Final = 0.25  # before an unanswered proposal is made again; doubles each time
MAX_PROPOSAL_BACKOFF_S: Final = 2.0  # as long as an engine keeps a grant that nobody uses
# Compiled, a name of the module costs less than an attribute of the enumeration; these are asked for in each iteration.
_PREFILL_HEAVY: Final = Role.PREFILL_HEAVY
_DECODE_HEAVY: Final = Role.DECODE_HEAVY
_MAX_DOUBLINGS: Final = 8  # beyond the longest back-off, and far from overflow


@dataclass(init=False, slots=True, kw_only=True)
class FlowRequest:
    """A request that needs a target.

    Args:
        cause: Why it moves.
        source: Where it runs.
        num_blocks: KV blocks it needs on the target.
        tpot_slo_s: Its TPOT objective; ``math.inf``: none.
        excluded: Engines that must not get it (they refused it, or it failed there).
        planned_target: Where its next part was planned to run; None: it has none.
    """

    cause: Final[MoveCause]
    source: Final[EngineId]
    num_blocks: Final[int]
    tpot_slo_s: Final[float]
    excluded: Final[frozenset[EngineId]]
    planned_target: Final[EngineId | None]

    def __init__(
        self,
        *,
        cause: MoveCause,
        source: EngineId,
        num_blocks: int,
        tpot_slo_s: float = math.inf,
        excluded: frozenset[EngineId] = frozenset(),
        planned_target: EngineId | None = None,
    ) -> None:
        self.cause = cause
        self.source = source
        self.num_blocks = num_blocks
        self.tpot_slo_s = tpot_slo_s
        self.excluded = excluded
        self.planned_target = planned_target


class FlowPolicy:
    """Algorithm 1 and the choice of targets (TaiChi, section 3.3), with rules against ping-pong.

    Beyond the paper: a request moves again only ``min_tokens_between_moves`` output tokens after its last move, unless
    its TPOT has passed the SLO itself; a request that would flow back at once is not degraded; an engine has a bounded
    number of standing proposals, which are not repeated until their back-off has passed.

    Without roles (all chunk sizes equal) nothing is proposed but what drains.

    Args:
        parameters: Live parameters; replace the attribute on a plan change.
        rng: Breaks ties between targets; seeded by the caller.
        moves_first_decodes: Decodes prefilled on a P-heavy engine are proposed to move (``prefill_done``).
        degrades: D-heavy engines above the watermark propose their longest outputs (``degrade``).
        flows_back: P-heavy engines propose decodes that near their TPOT SLO (``backflow``).

    Attributes:
        has_roles: The cluster's chunk sizes differ; for ``propose``, which sees one engine only.
    """

    def __init__(
        self,
        parameters: StrategyParameters,
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
        self.has_roles = True
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
        parameters = self.parameters
        engine.refresh_ranking(now, min_tokens=parameters.min_tokens_between_moves, alpha=parameters.approaching_factor)
        limit = MAX_STANDING_PROPOSALS - engine.num_proposed
        if limit <= 0:
            return []
        if engine.is_draining:  # beyond the paper: the engine is about to go, so every decode leaves
            return propose_all(now, engine)
        if not self.has_roles:
            return []
        if engine.role is _DECODE_HEAVY:  # line 4
            return self._degrade(now, engine, limit) if self.degrades else []
        proposals = self._flow_back(now, engine, limit) if self.flows_back else []  # line 1
        # Stage 1 of section 3.3: a decode begins on a D-heavy engine, wherever its prompt was computed.
        if self.moves_first_decodes:
            prefilled_here = engine.list_prefilled_here(limit - len(proposals))
            proposals += [_propose(now, engine, decode, MoveCause.PREFILL_DONE) for decode in prefilled_here]
        return proposals

    def target(
        self,
        now: float,  # noqa: ARG002 - another policy may need the time
        request: FlowRequest,
        engines: EngineTable,
    ) -> EngineId | None:
        """Pick the engine to ask for a grant.

        First decode and backflow: the D-heavy engine with the least KV used, grants included, and physical room.
        Degradation: the P-heavy engine with the fewest used blocks, bounded by the watermark. Drain and manual: the
        same role first, then any with room. Where all chunk sizes are equal only drain and manual find a target.

        Args:
            now: Seconds on the caller's clock.
            request: What moves and why.
            engines: The engines.

        Returns:
            The target; None: it stays where it is.
        """
        source = engines.peek(request.source)
        if request.cause in {MoveCause.DRAIN, MoveCause.MANUAL}:
            others = self._list_with_room(request, engines)
            same_role = [state for state in others if source is not None and state.role is source.role]
            return self._pick_least_used(same_role or others)
        if request.cause is MoveCause.SPLIT:
            return None  # of another strategy, which was in force until now
        role = _PREFILL_HEAVY if request.cause is MoveCause.DEGRADE else _DECODE_HEAVY
        if engines.has_uniform_chunk_size or (source is not None and source.role is role):
            return None
        return self._pick_least_used(self._list_with_room(request, engines, role))

    def is_too_soon(self, cause: MoveCause, tokens_since_move: int | None) -> bool:
        """Say whether a move follows the last one too closely: requests must not go back and forth.

        Args:
            cause: Why the request should move.
            tokens_since_move: Output tokens since its last move; None: it has not moved yet.
        """
        if cause is not MoveCause.DEGRADE or tokens_since_move is None:
            return False
        return tokens_since_move < self.parameters.min_tokens_between_moves

    def _flow_back(self, now: float, engine: DecodeSet, limit: int) -> list[MoveProposal]:
        """Select decodes whose TPOT so far nears the SLO, the furthest beyond it first.

        Source: TaiChi, section 3.3, Algorithm 1, lines 1 to 3.
        """
        # Line 2, r_tpot > tau_tpot * alpha.
        slow = engine.list_near_tpot_slo(now, limit)
        # Beyond the paper: a decode that has just come goes back only when it misses its SLO, else it would move to and
        # fro.
        slow += [decode for decode in engine.list_recently_moved() if engine.has_tpot_above(decode, now, 1.0)]
        if not slow:
            return []
        slow.sort(key=lambda decode: engine.compute_tpot_share(decode, now), reverse=True)
        return [_propose(now, engine, decode, MoveCause.BACKFLOW) for decode in slow[:limit]]

    def _degrade(self, now: float, engine: DecodeSet, limit: int) -> list[MoveProposal]:
        """Select the longest outputs until usage is down to the watermark.

        Source: TaiChi, section 3.3, Algorithm 1, lines 4 to 12; usage is that of KV blocks, and beyond the paper that
        of ``max_num_seqs``, which binds first where outputs are short.
        """
        watermark, alpha = self.parameters.watermark, self.parameters.approaching_factor
        max_blocks, max_seqs = watermark * engine.kv_blocks_total, watermark * engine.max_num_seqs
        used_blocks = engine.kv_blocks_held
        proposals: list[MoveProposal] = []
        # Line 7, m - m_release > M: what proposals that stand will release counts as released.
        while len(proposals) < limit and (
            used_blocks - engine.proposed_blocks > max_blocks or len(engine) - engine.num_proposed > max_seqs
        ):
            decode = engine.get_longest()  # line 8
            if decode is None:
                break
            if engine.has_tpot_above(decode, now, alpha):
                # Beyond the paper: on a P-heavy engine it would be above alpha at once and flow back.
                engine.back_off(decode, now + PROPOSAL_BACKOFF_S)
            else:
                proposals.append(_propose(now, engine, decode, MoveCause.DEGRADE))  # lines 9 and 10
        return proposals

    def _list_with_room(
        self, request: FlowRequest, engines: EngineTable, role: Role | None = None
    ) -> list[EngineState]:
        """List the engines, of one role if it is given, that could take a request.

        Room is physical on D-heavy engines; on P-heavy ones it ends at the watermark.
        """
        source, excluded, num_blocks = engines.peek(request.source), request.excluded, request.num_blocks
        watermark = self.parameters.watermark
        found = []
        for state in engines.list_loads():
            if role is not None and state.role is not role:
                continue
            share = watermark if state.role is _PREFILL_HEAVY else 1.0
            if (
                state is not source
                and not state.is_draining
                and state.committed_kv_blocks + num_blocks <= share * state.load.kv_blocks_total
                and state.num_committed_seqs + 1 <= share * state.config.max_num_seqs
                and state.engine_id not in excluded
            ):
                found.append(state)
        return found

    def _pick_least_used(self, states: list[EngineState]) -> EngineId | None:
        """Pick the engine with the smallest share of its KV blocks committed; at random among equals."""
        least, best = 2.0, list[EngineId]()
        for state in states:
            share = state.committed_kv_blocks / state.load.kv_blocks_total
            if share < least:
                least, best = share, []
            if share == least:
                best.append(state.engine_id)
        return best[int(self._rng.random() * len(best))] if best else None


def propose_all(now: float, engine: DecodeSet) -> list[MoveProposal]:
    """Propose every decode of an engine that drains, as many at once as may stand, and again where none was granted."""
    engine.withdraw_lapsed(now)
    limit = max(0, MAX_STANDING_PROPOSALS - engine.num_proposed)
    return [_propose(now, engine, decode, MoveCause.DRAIN) for decode in engine.list_without_proposal(limit)]


def _propose(now: float, engine: DecodeSet, decode: Decode, cause: MoveCause) -> MoveProposal:
    """Make a proposal and let it stand."""
    doublings = min(decode.num_proposals, _MAX_DOUBLINGS)
    backoff_s = min(MAX_PROPOSAL_BACKOFF_S, PROPOSAL_BACKOFF_S * 2.0**doublings)
    engine.propose(decode, now + backoff_s)
    return make_proposal(engine, decode, cause)


def make_proposal(engine: DecodeSet, decode: Decode, cause: MoveCause) -> MoveProposal:
    """Make a proposal to move a decode as it is now."""
    return MoveProposal(
        request_id=decode.request_id,
        cause=cause,
        output_tokens=engine.output_tokens(decode.request_id),
        num_blocks=engine.count_blocks(decode),
    )
