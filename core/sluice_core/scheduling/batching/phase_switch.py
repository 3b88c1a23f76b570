"""Prefills and decodes by turns: an iteration holds either prefills or decodes, and prefills go first.

Source: EcoServe (arXiv:2504.18154), sections 3.2.1 (temporal disaggregation) and 3.4 (the instance scheduler). What
bounds a phase of prefills is the router, which gives an engine no more prompts than its decodes can wait for
(``rolling_activation``).
"""

from __future__ import annotations

import math
from typing import Final

from sluice_core.latency import LatencyModel
from sluice_core.records import MoveProposal
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.decode_flow import propose_all
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import BatchLimits, EngineBatch, PhaseReport

_LEAST_PHASE_S: Final = 1e-9  # of a phase that begins at this moment: 0 says that there is none


class PhaseBatching(ChunkedPrefillPolicy):
    """See the module. The chunk size is the most tokens of an iteration of prefills; decodes have no part in it.

    A request that arrives with its KV has one token in whichever iteration it joins. Where no prefill finds a seat and
    blocks, decodes go on.
    """

    separates_phases = True

    def __init__(self) -> None:
        super().__init__()
        self._decodes: DecodeSet | None = None
        self._is_prefill_phase = False
        self._since_s = 0.0
        self._num_switches = 0

    def bind(self, decodes: DecodeSet, latency: LatencyModel) -> None:
        """See ``EnginePolicy.bind``."""
        del latency
        self._decodes = decodes

    def limits(self, now: float, engine: EngineBatch) -> BatchLimits:
        """See ``EnginePolicy.limits``."""
        num_decodes = engine.num_decodes
        if not engine.is_stalled:
            engine.num_decodes = 0
            limits = super().limits(now, engine)
            engine.num_decodes = num_decodes
            if limits.prefill_budget_tokens and _has_prefills(limits, engine):
                limits.withholds_decodes = True
                return limits
        ahead = num_decodes + engine.num_joining
        return BatchLimits(
            token_budget=ahead,
            prefill_budget_tokens=0,
            max_tokens_per_prefill=0,
            runs_recompute=False,
            runs_started_prefills=False,
            runs_new_prompts=False,
            returns_new_prompts=engine.chunk_size_tokens == 0 or engine.is_draining,
        )

    def propose(self, now: float, engine: DecodeSet) -> list[MoveProposal]:
        """See ``EnginePolicy.propose``: nothing moves but what drains (EcoServe, section 3.1: no KV is transferred)."""
        return propose_all(now, engine) if engine.is_draining else []

    def note_batch(self, now: float, *, has_prefills: bool) -> None:
        """See ``EnginePolicy.note_batch``."""
        if has_prefills is not self._is_prefill_phase:
            self._is_prefill_phase = has_prefills
            self._since_s = now
            self._num_switches += 1

    def describe_phase(self, now: float, *, is_prefilling: bool) -> PhaseReport | None:
        """See ``EnginePolicy.describe_phase``."""
        is_phase = self._is_prefill_phase and is_prefilling
        return PhaseReport(
            prefill_phase_s=max(_LEAST_PHASE_S, now - self._since_s) if is_phase else 0.0,
            saved_tpot_s=math.inf if self._decodes is None else self._decodes.compute_mean_saved_tpot_s(now),
            num_switches=self._num_switches,
        )


def _has_prefills(limits: BatchLimits, engine: EngineBatch) -> bool:
    """Say whether prefills wait that an iteration within some limits may compute."""
    waiting = engine.num_recomputing + engine.num_started_prefills
    return waiting + (engine.num_new_prompts if limits.runs_new_prompts else 0) > 0
