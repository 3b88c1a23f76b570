"""TaiChi: engines with large and with small chunks, between which decodes flow.

Source: Prefill-Decode Aggregation or Disaggregation? Unifying Both for Goodput-Optimized LLM Serving
(arXiv:2508.01989), sections 3.1 to 3.4.
"""

from __future__ import annotations

from sluice_core.strategies.interface import SliderUse, Strategy
from sluice_core.strategies.role_policies import FlowRules
from sluice_core.strategy_parameters import EARLY_REJECTION, WATERMARK, Parameter

APPROACHING_FACTOR = Parameter(
    name="approaching_factor_percent",
    field="approaching_factor",
    low=50,
    high=100,
    unit="percent",
    source="TaiChi, section 4.1",
)
MIN_TOKENS_BETWEEN_MOVES = Parameter(
    name="min_tokens_between_moves", field="min_tokens_between_moves", low=0, high=65_536, unit="tokens"
)

TAICHI = Strategy(
    name="taichi",
    title="TaiChi",
    parameters=(APPROACHING_FACTOR, EARLY_REJECTION, MIN_TOKENS_BETWEEN_MOVES, WATERMARK),
    sliders=SliderUse(varies_ratio=True, varies_prefill_tokens=True, varies_decode_tokens=True),
    policies=FlowRules(moves_first_decodes=True, degrades=True, flows_back=True),
)
