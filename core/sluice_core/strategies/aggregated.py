"""Aggregation: all engines have one chunk size, and requests decode where they were prefilled."""

from __future__ import annotations

from sluice_core.strategies.interface import SliderUse, Strategy
from sluice_core.strategies.role_policies import FlowRules
from sluice_core.strategy_parameters import EARLY_REJECTION, WATERMARK

AGGREGATED = Strategy(
    name="aggregated",
    title="Aggregated",
    parameters=(EARLY_REJECTION, WATERMARK),
    sliders=SliderUse(varies_ratio=False, varies_prefill_tokens=True, varies_decode_tokens=False),
    policies=FlowRules(),
    has_flow=False,
)
