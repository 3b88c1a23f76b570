"""Disaggregation: prefills on P-heavy engines only, decodes on D-heavy ones only."""

from __future__ import annotations

from sluice_core.strategies.interface import SliderUse, Strategy
from sluice_core.strategies.parameters import EARLY_REJECTION, WATERMARK
from sluice_core.strategies.roles import FlowRules

DISAGGREGATED = Strategy(
    name="disaggregated",
    title="Disaggregated",
    parameters=(EARLY_REJECTION, WATERMARK),
    sliders=SliderUse(varies_ratio=True, varies_prefill_tokens=False, varies_decode_tokens=False, decode_tokens=0),
    policies=FlowRules(moves_first_decodes=True),
)
