"""Chunk sizes, and the parameters of strategies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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


class ParametersSpec(ManifestModel):
    """Parameters of the strategies."""

    watermark_percent: Annotated[int, Field(strict=True, ge=50, le=99)] = 95
    """Watermark M: share of KV blocks above which a D-heavy engine degrades its longest outputs."""
    approaching_factor_percent: Annotated[int, Field(strict=True, ge=50, le=100)] = 96
    """Alpha: share of the TPOT objective above which a decode on a P-heavy engine flows back."""
    early_rejection: Annotated[EarlyRejectionName, *DISABLED_IS_OFF] = "Off"
    """What happens to a request that no engine can serve within its TTFT objective.
    Disabled: it goes where it is least late. Random: it goes to any engine. Reject: it is refused, with a time to try
    again. Off is the older name of Disabled."""
    min_tokens_between_moves: Annotated[int, Field(strict=True, ge=0, le=65_536)] = 16
    """Output tokens between two moves of one request, unless its objective is at stake."""
    prefill_batch_tokens: Annotated[int, Field(strict=True, ge=0, le=1_048_576)] = 2048
    """Disaggregated: prompt tokens that saturate a GPU, up to which a P-heavy engine batches whole prompts.
    A longer prompt runs alone. 0: an iteration is filled to engine.maxBatchTokens."""
    batch_token_budget: Annotated[int, Field(strict=True, ge=16, le=1_048_576)] = 4096
    """Prompt tokens that FlowPrefill batches stay below; a single longer prompt still runs."""
    grant_wait_milliseconds: Annotated[int, Field(strict=True, ge=1, le=25_000)] = 10_000
    """Disaggregated: longest time that a finished prefill waits for a D-heavy engine with room, its KV where it is.
    Then it is recomputed and decodes where that is done."""
    tpot_share_percent: Annotated[int, Field(strict=True, ge=50, le=100)] = 98
    """Sluice: share of the TPOT objective that prefills may use up."""
    least_prefill_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 10
    """Sluice: share of the TPOT objective that prompts get in each iteration."""
    late_ttft_factor_percent: Annotated[int, Field(strict=True, ge=100, le=400)] = 300
    """Sluice: late prompts wait as if their TTFT objective were so much longer."""
    late_share_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 10
    """Sluice: share of the prefill time for late prompts while others can be in time."""
    overload_order: Literal["LongestLast", "Deadline"] = "LongestLast"
    """Sluice: who waits in overload. LongestLast: long prompts. Deadline: the last due."""
    pack_share_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 85
    """Sluice: share of the TPOT objective up to which decodes gather on one engine."""
    credit_milliseconds: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 100
    """Sluice: prefill work that an engine gets ahead; the rest waits at the router. 0: none does."""
    macro_instance_least: Annotated[int, Field(strict=True, ge=1, le=256)] = 4
    """EcoServe: engines of the macro instance that a split makes (N_l)."""
    macro_instance_most: Annotated[int, Field(strict=True, ge=1, le=1024)] = 16
    """EcoServe: most engines of a macro instance (N_u). Less than twice macroInstanceLeast less 1 counts as that."""
    split_search_steps: Annotated[int, Field(strict=True, ge=1, le=16)] = 6
    """DynaServe: most steps of the search for where a request is split (K)."""
    split_margin_tokens: Annotated[int, Field(strict=True, ge=0, le=65_536)] = 20
    """DynaServe: tokens that an answer is taken to be longer than predicted."""
    tbt_target_milliseconds: Annotated[int, Field(strict=True, ge=0, le=60_000)] = 0
    """DynaServe: how long an iteration with decodes may take, at the 99th percentile.
    0: the least objective for the time per output token among them."""
