"""Chunk sizes, and the parameters of strategies; their defaults and bounds are the core's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sluice_core.strategies import PARAMETERS
from sluice_core.strategy_parameters import StrategyParameters, format_parameters
from sluice_operator.api.field_types import DISABLED_IS_OFF, ManifestModel

# Largest chunk size of all, in tokens.
MAX_BATCH_TOKENS = 1_048_576


EarlyRejectionName = Literal["Disabled", "Off", "Random", "Reject"]


class ChunkSizes(ManifestModel):
    """Most tokens that one iteration processes, decodes included, by role (sliders S_P and S_D)."""

    prefill_heavy: Annotated[int, Field(strict=True, ge=16, le=MAX_BATCH_TOKENS)] = 1024
    """Chunk size of P-heavy engines (slider S_P), in tokens; 16 to engine.maxBatchTokens."""
    decode_heavy: Annotated[int, Field(strict=True, ge=0, le=MAX_BATCH_TOKENS)] = 256
    """Chunk size of D-heavy engines (slider S_D), in tokens; 16 to engine.maxBatchTokens, or 0: no prefills there.
    Equal to prefillHeavy it makes roles void."""


_ROWS = {row.name: row for row in PARAMETERS}
DEFAULTS = format_parameters(PARAMETERS, StrategyParameters())


def _default(name: str) -> int:
    return int(DEFAULTS[name])


def _bounds(name: str) -> Any:
    return Field(strict=True, ge=_ROWS[name].low, le=_ROWS[name].high)


class ParametersSpec(ManifestModel):
    """Parameters of the strategies."""

    watermark_percent: Annotated[int, _bounds("watermark_percent")] = _default("watermark_percent")
    """Watermark M: share of KV blocks above which a D-heavy engine degrades its longest outputs."""
    approaching_factor_percent: Annotated[int, _bounds("approaching_factor_percent")] = _default(
        "approaching_factor_percent"
    )
    """Alpha: share of the TPOT objective above which a decode on a P-heavy engine flows back."""
    early_rejection: Annotated[EarlyRejectionName, *DISABLED_IS_OFF] = "Off"
    """What happens to a request that no engine can serve within its TTFT objective.
    Disabled: it goes where it is least late. Random: it goes to any engine. Reject: it is refused, with a time to try
    again. Off is the older name of Disabled."""
    min_tokens_between_moves: Annotated[int, _bounds("min_tokens_between_moves")] = _default("min_tokens_between_moves")
    """Output tokens between two moves of one request, unless its objective is at stake."""
    prefill_batch_tokens: Annotated[int, _bounds("prefill_batch_tokens")] = _default("prefill_batch_tokens")
    """Disaggregated: prompt tokens that saturate a GPU, up to which a P-heavy engine batches whole prompts.
    A longer prompt runs alone. 0: an iteration is filled to engine.maxBatchTokens."""
    batch_token_budget: Annotated[int, _bounds("batch_token_budget")] = _default("batch_token_budget")
    """Prompt tokens that FlowPrefill batches stay below; a single longer prompt still runs."""
    grant_wait_milliseconds: Annotated[int, _bounds("grant_wait_milliseconds")] = _default("grant_wait_milliseconds")
    """Disaggregated: longest time that a finished prefill waits for a D-heavy engine with room, its KV where it is.
    Then it is recomputed and decodes where that is done."""
    tpot_share_percent: Annotated[int, _bounds("tpot_share_percent")] = _default("tpot_share_percent")
    """Sluice: share of the TPOT objective that prefills may use up."""
    least_prefill_percent: Annotated[int, _bounds("least_prefill_percent")] = _default("least_prefill_percent")
    """Sluice: share of the TPOT objective that prompts get in each iteration."""
    late_ttft_factor_percent: Annotated[int, _bounds("late_ttft_factor_percent")] = _default("late_ttft_factor_percent")
    """Sluice: late prompts wait as if their TTFT objective were so much longer."""
    late_share_percent: Annotated[int, _bounds("late_share_percent")] = _default("late_share_percent")
    """Sluice: share of the prefill time for late prompts while others can be in time."""
    overload_order: Literal["LongestLast", "Deadline"] = "LongestLast"
    """Sluice: who waits in overload. LongestLast: long prompts. Deadline: the last due."""
    pack_share_percent: Annotated[int, _bounds("pack_share_percent")] = _default("pack_share_percent")
    """Sluice: share of the TPOT objective up to which decodes gather on one engine."""
    credit_milliseconds: Annotated[int, _bounds("credit_milliseconds")] = _default("credit_milliseconds")
    """Sluice: prefill work that an engine gets ahead; the rest waits at the router. 0: none does."""
    macro_instance_least: Annotated[int, _bounds("macro_instance_least")] = _default("macro_instance_least")
    """EcoServe: engines of the macro instance that a split makes (N_l)."""
    macro_instance_most: Annotated[int, _bounds("macro_instance_most")] = _default("macro_instance_most")
    """EcoServe: most engines of a macro instance (N_u). Less than twice macroInstanceLeast less 1 counts as that."""
    split_search_steps: Annotated[int, _bounds("split_search_steps")] = _default("split_search_steps")
    """DynaServe: most steps of the search for where a request is split (K)."""
    split_margin_tokens: Annotated[int, _bounds("split_margin_tokens")] = _default("split_margin_tokens")
    """DynaServe: tokens that an answer is taken to be longer than predicted."""
    tbt_target_milliseconds: Annotated[int, _bounds("tbt_target_milliseconds")] = _default("tbt_target_milliseconds")
    """DynaServe: how long an iteration with decodes may take, at the 99th percentile.
    0: the least objective for the time per output token among them."""
