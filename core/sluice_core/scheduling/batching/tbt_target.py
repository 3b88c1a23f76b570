"""All decodes, and as many prefill tokens beside them as the target for the time between tokens allows.

Source: DynaServe, section 4.2, Algorithm 2. Without decodes there is no token to be late: the chunk size alone limits
an iteration then. Where decodes alone take as long as the target, prefills get the least progress of every strategy
(``ChunkedPrefillPolicy``).
"""

from __future__ import annotations

import math

from sluice_core.latency import LatencyModel
from sluice_core.records import IterationShape, MoveCause, MoveProposal
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.batching.profile_table import ProfileTable
from sluice_core.scheduling.decode_flow import make_proposal, propose_all
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import EngineBatch
from sluice_core.strategy_parameters import StrategyParameters


class SloBatching(ChunkedPrefillPolicy):
    """See the module. Until ``bind`` it batches by chunk size.

    Args:
        parameters: Of the strategy.
        counts_decodes: See ``ChunkedPrefillPolicy``.
    """

    uses_latency = True
    records_iterations = True

    def __init__(self, parameters: StrategyParameters, *, counts_decodes: bool = True) -> None:
        super().__init__(counts_decodes=counts_decodes)
        self._target_s = parameters.tbt_target_s
        self._decodes: DecodeSet | None = None
        self._table: ProfileTable | None = None

    def bind(self, decodes: DecodeSet, latency: LatencyModel) -> None:
        """See ``EnginePolicy.bind``."""
        self._decodes = decodes
        self._table = ProfileTable(latency)

    def record_iteration(self, shape: IterationShape, duration_s: float) -> None:
        """See ``EnginePolicy.record_iteration``: line 1."""
        if self._table is not None:
            self._table.record(shape, duration_s)

    def bound_room(self, now: float, engine: EngineBatch, room_tokens: int) -> int:
        """See ``ChunkedPrefillPolicy.bound_room``: M of line 2. What fills it, lines 3 to 8, is every strategy's."""
        del now
        self._room_per_work = 0.0
        num_decodes = engine.num_decodes + engine.num_joining
        num_prefills = engine.num_new_prompts + engine.num_started_prefills + engine.num_recomputing
        if self._decodes is None or self._table is None or not (num_decodes and num_prefills and room_tokens):
            return room_tokens
        target_s = self._target_s or self._decodes.least_tpot_slo_s
        if target_s == math.inf:
            return room_tokens
        room = self._table.find_most_prefill(target_s, room_tokens, num_decodes, engine.decode_context_tokens)
        self._room_per_work = room.per_work
        return room.tokens

    def propose(self, now: float, engine: DecodeSet) -> list[MoveProposal]:
        """See ``EnginePolicy.propose``: decodes whose part here ends, as planned."""
        if engine.is_draining:
            return propose_all(now, engine)
        return [make_proposal(engine, decode, MoveCause.SPLIT) for decode in engine.take_due_splits()]
