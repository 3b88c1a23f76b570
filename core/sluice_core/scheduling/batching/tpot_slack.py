"""Iterations as long as the running decodes can spare: prefills in what their slack allows.

A decode's *slack* is the time until its TPOT so far passes its share of the objective. An iteration gets as many
prefill tokens as end before the least slack of all is used up. Without decodes the chunk size alone limits it.

TPOT is a mean over the answer. So a decode may be behind while it has fewer than ``catch_up_tokens`` tokens, as far as
iterations of decodes alone let it catch up by then.

Prompts get a share of the TPOT objective in any case. Decodes that have just begun have no slack yet, and one that is
behind catches up by a millisecond or two an iteration: prompts that waited for these would be late by seconds.
"""

from __future__ import annotations

from typing import Final

from sluice_core.latency import LatencyModel
from sluice_core.records import IterationShape, MoveCause, MoveProposal
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.decode_flow import MAX_STANDING_PROPOSALS, make_proposal, propose_all
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import EngineBatch
from sluice_core.scheduling.prefill_budget import fit_prefill_budget
from sluice_core.strategy_parameters import StrategyParameters

LOST_SLACK_S: Final = 1.0  # nobody waits for a decode that is behind by more: that would take dozens of iterations


class SlackBatching(ChunkedPrefillPolicy):
    """See the module. Until ``bind`` it batches by chunk size.

    Args:
        parameters: Of the strategy.
        counts_decodes: See ``ChunkedPrefillPolicy``.
    """

    uses_latency = True

    def __init__(self, parameters: StrategyParameters, *, counts_decodes: bool = True) -> None:
        super().__init__(counts_decodes=counts_decodes)
        self._tpot_share = parameters.tpot_share
        self._least_prefill_share = parameters.least_prefill_share
        self._catch_up_tokens = parameters.catch_up_tokens
        self._packs = parameters.pack_share > 0.0
        self._decodes: DecodeSet | None = None
        self._latency: LatencyModel | None = None

    def bind(self, decodes: DecodeSet, latency: LatencyModel) -> None:
        """See ``EnginePolicy.bind``."""
        self._decodes = decodes
        self._latency = latency

    def bound_room(self, now: float, engine: EngineBatch, room_tokens: int) -> int:
        """See ``ChunkedPrefillPolicy.bound_room``: what the least slack of the decodes allows."""
        self._room_per_work = 0.0
        num_prefills = engine.num_new_prompts + engine.num_started_prefills + engine.num_recomputing
        if self._decodes is None or self._latency is None or not num_prefills or not room_tokens:
            return room_tokens
        ahead = engine.num_decodes + engine.num_joining
        room = fit_prefill_budget(
            self._latency,
            self._find_limit_s(now, engine, self._decodes, self._latency),
            room_tokens,
            ahead,
            engine.decode_context_tokens,
            least_prefill_s=self._least_prefill_share * self._decodes.least_tpot_slo_s if len(self._decodes) else 0.0,
        )
        self._room_per_work = room.per_work
        return room.tokens

    def propose(self, now: float, engine: DecodeSet) -> list[MoveProposal]:
        """See ``EnginePolicy.propose``: each decode that begins here asks once whether it fares better elsewhere."""
        if engine.is_draining:
            return propose_all(now, engine)
        if not self._packs:
            return []
        return [
            make_proposal(engine, decode, MoveCause.PREFILL_DONE)
            for decode in engine.take_new_here(MAX_STANDING_PROPOSALS)
        ]

    def _find_limit_s(self, now: float, engine: EngineBatch, decodes: DecodeSet, latency: LatencyModel) -> float:
        """Find how long the next iteration may take."""
        decodes.refresh_ranking(now, min_tokens=0, alpha=self._tpot_share)
        decode_s = latency.estimate_shape_s(
            IterationShape(num_decodes=engine.num_decodes, decode_context_tokens=engine.decode_context_tokens)
        )
        slack_s = decodes.find_least_slack_s(
            now,
            1 + engine.num_under_way,
            LOST_SLACK_S,
            catch_up_tokens=self._catch_up_tokens,
            decode_s=decode_s,
        )
        limit_s = slack_s - engine.under_way_s
        if engine.num_decodes + engine.num_joining > len(decodes):
            # Some begin with the iteration under way, or have just come: they have one gap, and what they catch up.
            gap_s = self._tpot_share * decodes.least_tpot_slo_s
            limit_s = min(limit_s, gap_s + max(0, self._catch_up_tokens - 1) * max(0.0, gap_s - decode_s))
        return limit_s
