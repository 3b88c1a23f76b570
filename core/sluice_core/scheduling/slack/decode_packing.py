"""Where decodes go when engines size their iterations by slack.

A decode goes to the fullest engine on which an iteration of decodes alone stays within ``pack_share`` of its TPOT
objective. Engines that are left without decodes compute prompts in larger iterations.

A prompt that is done within a few gaps beside decodes gains little by an engine of its own, less than moves cost. So
decodes gather only if a usual prompt takes ``pack_prompt_share`` of the TPOT objective.
"""

from __future__ import annotations

import math

from sluice_core.records import EngineId, IterationShape
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.engine_state import EngineState
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.slack.usual_request import UsualRequest
from sluice_core.strategy_parameters import StrategyParameters


class DecodePacking:
    """Picks the engine of a decode; see the module.

    Args:
        parameters: Of the strategy.
        usual: What requests are like.
    """

    def __init__(self, parameters: StrategyParameters, usual: UsualRequest) -> None:
        self._share = parameters.pack_share
        self._prompt_share = parameters.pack_prompt_share
        self._watermark = parameters.watermark
        self._usual = usual

    def target(self, request: FlowRequest, engines: EngineTable) -> EngineId | None:
        """Pick the fullest engine that still meets the objective.

        Args:
            request: A request whose prefill has ended.
            engines: The engines.

        Returns:
            The target; None: it stays where it is.
        """
        source = engines.peek(request.source)
        if source is None or request.tpot_slo_s == math.inf:
            return None
        tokens = round(self._usual.prompt_tokens)
        prompt = IterationShape(prefill_tokens=tokens, attention_work=tokens * tokens / 2, num_chunks=min(1, tokens))
        prompt_s = source.latency.estimate_shape_s(prompt)
        if prompt_s < self._prompt_share * request.tpot_slo_s:
            return None
        limit_s = self._share * request.tpot_slo_s
        best, most_s = None, _estimate_decodes_s(source, 0, 0)
        if most_s > limit_s:
            most_s = 0.0  # any engine within the limit is better
        for state in engines.list_loads():
            if state is source or not self._has_room(state, request):
                continue
            fullness_s = _estimate_decodes_s(state, 0, 0)
            if fullness_s > most_s:
                tokens = request.num_blocks * state.config.block_size_tokens
                if _estimate_decodes_s(state, 1, tokens) <= limit_s:
                    best, most_s = state.engine_id, fullness_s
        return best

    def _has_room(self, state: EngineState, request: FlowRequest) -> bool:
        return (
            not state.is_draining
            and state.engine_id not in request.excluded
            and state.committed_kv_blocks + request.num_blocks <= self._watermark * state.load.kv_blocks_total
            and state.num_committed_seqs + 1 <= self._watermark * state.config.max_num_seqs
        )


def _estimate_decodes_s(state: EngineState, num_more: int, more_tokens: int) -> float:
    """Estimate an iteration of an engine's decodes alone, with some more, in seconds."""
    return state.latency.estimate_shape_s(
        IterationShape(
            num_decodes=state.num_committed_seqs + num_more,
            decode_context_tokens=state.load.decode_context_tokens + more_tokens,
        )
    )
