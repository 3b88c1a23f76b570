"""Strategies: one file each, one row each. Nothing outside this folder knows a strategy's name.

To add one, write its file beside these and add its row to ``STRATEGIES``.
"""

from __future__ import annotations

from sluice_core.strategies.aggregated import AGGREGATED
from sluice_core.strategies.disaggregated import DISAGGREGATED
from sluice_core.strategies.dynaserve import DYNASERVE
from sluice_core.strategies.ecoserve import ECOSERVE
from sluice_core.strategies.flowprefill import FLOWPREFILL
from sluice_core.strategies.interface import Strategy
from sluice_core.strategies.sluice import SLUICE
from sluice_core.strategies.taichi import TAICHI
from sluice_core.strategy_parameters import Parameter

__all__ = ["DEFAULT_STRATEGY", "INITIAL_STRATEGY", "PARAMETERS", "STRATEGIES", "Strategy", "get_strategy"]

DEFAULT_STRATEGY: Strategy = SLUICE
# In force on an engine before its first plan: nothing moves.
INITIAL_STRATEGY: Strategy = AGGREGATED
STRATEGIES: dict[str, Strategy] = {
    row.name: row for row in (TAICHI, AGGREGATED, DISAGGREGATED, DYNASERVE, FLOWPREFILL, ECOSERVE, SLUICE)
}
# Those of all strategies, each once.
PARAMETERS: tuple[Parameter, ...] = tuple(
    {row.name: row for strategy in STRATEGIES.values() for row in strategy.parameters}.values()
)


def get_strategy(name: str) -> Strategy:
    """Look up a strategy by name, in any case (the manifest writes ``TaiChi``).

    Args:
        name: For example ``taichi``.

    Raises:
        ValueError: Unknown; names the known ones.
    """
    try:
        return STRATEGIES[name.lower()]
    except KeyError:
        raise ValueError(f"strategy {name!r} is unknown; known are {', '.join(STRATEGIES)}") from None
