"""Iterations as long as the running decodes can spare: prefills in what their slack allows.

A decode's *slack* is the time until its TPOT so far passes its share of the objective. An iteration gets as many
prefill tokens as end before the least slack of all is used up. Without decodes it gets ``alone_tokens``: GPUs compute
these at nearly full speed, and more would only delay the prompts that end first, and those that come meanwhile.

Prompts get a share of the TPOT objective in any case. Decodes that have just begun have no slack yet, and one that is
behind catches up by a millisecond or two an iteration: prompts that waited for these would be late by seconds.

Where decodes alone take most of their TPOT objective, prompts get no more than they need (``_find_cheapest``). Up to
some tens of tokens a chunk costs an iteration hardly any time, since it waits for memory. So prompts that have time
until their deadlines take it, in chunks that are cheap.
"""

from __future__ import annotations

import math
from typing import Final

from sluice_core.latency import LatencyModel
from sluice_core.records import IterationShape, MoveCause, MoveProposal
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.decode_flow import MAX_STANDING_PROPOSALS, make_proposal, propose_all
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import EngineBatch, PrefillSelector
from sluice_core.scheduling.iteration_limits import estimate_chunk_s, fit_prefill_budget
from sluice_core.strategy_parameters import StrategyParameters

SCARCE_SHARE: Final = 0.8  # of the TPOT objective that decodes alone take, from which on prompts get what they need
SCARCE_SEATS: Final = 0.5  # of the seats that decodes have, from which on the same holds: faster ones free them sooner
LOST_SLACK_S: Final = 1.0  # nobody waits for a decode that is behind by more: that would take dozens of iterations
_STEP_TOKENS: Final = 16
_TRIED_PER_STEP: Final = 8  # chunks that are tried before the steps double


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
        self._pace_share = parameters.pace_share
        self._alone_tokens = parameters.alone_tokens
        self._packs = parameters.pack_share > 0.0
        self._decodes: DecodeSet | None = None
        self._latency: LatencyModel | None = None
        self._prompts: PrefillSelector | None = None  # whose deadlines are known

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
        latency, decodes = self._latency, self._decodes
        num_decodes = engine.num_decodes + engine.num_joining
        if not num_decodes and self._alone_tokens:
            room_tokens = min(room_tokens, self._alone_tokens)
        tpot_slo_s = decodes.least_tpot_slo_s if len(decodes) else 0.0
        room = fit_prefill_budget(
            latency,
            self._find_limit_s(now, engine, decodes),
            room_tokens,
            num_decodes,
            engine.decode_context_tokens,
            least_prefill_s=self._least_prefill_share * tpot_slo_s,
        )
        self._room_per_work = room.per_work
        if self._prompts is None or engine.num_recomputing or not self._is_scarce(engine, latency, decodes):
            return room.tokens
        room_s = estimate_chunk_s(latency, room.tokens, num_decodes, engine.decode_context_tokens)
        need = self._prompts.find_pace(now + engine.under_way_s) / self._pace_share * room_s
        return room.tokens if need >= room.tokens else _find_cheapest(latency, int(need), room.tokens, num_decodes)

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

    def _is_scarce(self, engine: EngineBatch, latency: LatencyModel, decodes: DecodeSet) -> bool:
        """Say whether each prefill token counts: decodes alone take much of their objective, or of the seats."""
        if not self._pace_share or not engine.num_decodes or not len(decodes):
            return False
        if engine.num_decodes >= SCARCE_SEATS * decodes.max_num_seqs:
            return True
        alone = IterationShape(num_decodes=engine.num_decodes, decode_context_tokens=engine.decode_context_tokens)
        return latency.estimate_shape_s(alone) >= SCARCE_SHARE * decodes.least_tpot_slo_s

    def _find_limit_s(self, now: float, engine: EngineBatch, decodes: DecodeSet) -> float:
        """Find how long the next iteration may take."""
        decodes.refresh_ranking(now, min_tokens=0, alpha=self._tpot_share)
        limit_s = decodes.find_least_slack_s(now, 1 + engine.num_under_way, LOST_SLACK_S) - engine.under_way_s
        if engine.num_decodes + engine.num_joining > len(decodes):
            # Some begin with the iteration under way, or have just come: they have one gap.
            limit_s = min(limit_s, self._tpot_share * decodes.least_tpot_slo_s)
        return limit_s


def _find_cheapest(latency: LatencyModel, least_tokens: int, most_tokens: int, num_decodes: int) -> int:
    """Find the chunk whose tokens cost decodes the least time each, of those with which prompts are in time.

    Tokens of all kinds go through the same multiplications, which take steps of 16 tokens. So chunks end at these.

    Args:
        latency: How long the engine's iterations take.
        least_tokens: What prompts need.
        most_tokens: What decodes spare.
        num_decodes: Decodes of the iteration.
    """
    alone_s = latency.estimate_shape_s(IterationShape(num_decodes=num_decodes))
    best, least_s = most_tokens, math.inf
    step, num_tried = _STEP_TOKENS, 0
    tokens = -(-(max(1, least_tokens) + num_decodes) // step) * step - num_decodes
    while tokens <= most_tokens:
        token_s = (estimate_chunk_s(latency, tokens, num_decodes, 0) - alone_s) / tokens
        if token_s < least_s:
            best, least_s = tokens, token_s
        num_tried += 1
        if num_tried % _TRIED_PER_STEP == 0:
            step *= 2
        tokens += step
    return best
