"""What iterations take by what is in them: a table that measured iterations keep up to date.

Source: DynaServe, section 4.2, Algorithm 2, lines 1 and 2. The paper profiles offline and refines the table as it runs.
Here a latency model stands for the profile, and each cell of the table holds how much longer the iterations that fall
into it really take, at the 99th percentile. A cell without an iteration takes as long as the model says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sluice_core.latency import LatencyModel
from sluice_core.records import IterationShape
from sluice_core.scheduling.iteration_limits import PrefillBudget, fit_prefill_budget

PERCENTILE: Final = 0.99
# Of a cell's factor, per iteration: up by 0.99 of it, down by 0.01 of it, which rests where 1 % are above.
_STEP: Final = 0.05
_LEAST_FACTOR: Final = 0.5
_MOST_FACTOR: Final = 4.0

Cell = tuple[int, int, int]


class ProfileTable:
    """The table of one engine; mutable. Keys: prefill tokens, mean context and number of decodes, in powers of two.

    Args:
        latency: What iterations take as far as nothing was measured.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency
        self._factors: dict[Cell, float] = {}

    def __len__(self) -> int:
        return len(self._factors)

    def record(self, shape: IterationShape, duration_s: float) -> None:
        """Take a measured iteration in (line 1): O(1)."""
        # As it was planned: with one chunk. What more chunks take is for the table to know.
        planned = replace(shape, num_chunks=min(1, shape.num_chunks))
        expected_s = self._latency.estimate_shape_s(planned)
        if duration_s <= 0.0 or expected_s <= 0.0:
            return
        cell = _find_cell(shape.prefill_tokens, shape.decode_context_tokens, shape.num_decodes)
        ratio = duration_s / expected_s
        factor = self._factors.get(cell)
        if factor is None:
            factor = ratio
        elif ratio > factor:
            factor += _STEP * PERCENTILE * min(1.0, (ratio - factor) / _STEP)
        else:
            factor -= _STEP * (1.0 - PERCENTILE) * min(1.0, (factor - ratio) / _STEP)
        self._factors[cell] = min(_MOST_FACTOR, max(_LEAST_FACTOR, factor))

    def get_factor(self, prefill_tokens: int, decode_context_tokens: int, num_decodes: int) -> float:
        """Return by what an iteration takes longer than the latency model says."""
        return self._factors.get(_find_cell(prefill_tokens, decode_context_tokens, num_decodes), 1.0)

    def find_most_prefill(
        self, limit_s: float, most_tokens: int, num_decodes: int, decode_context_tokens: int
    ) -> PrefillBudget:
        """Find the most prefill tokens beside decodes within a limit: MaxPrefillAllowed (line 2).

        Args:
            limit_s: S, what the iteration may take at the 99th percentile.
            most_tokens: Most tokens to try.
            num_decodes: Decodes.
            decode_context_tokens: Sum of their contexts.
        """
        room = fit_prefill_budget(self._latency, limit_s, most_tokens, num_decodes, decode_context_tokens)
        # The cell depends on the tokens, and the tokens on the cell: down until a cell allows them.
        while room.tokens:
            factor = self.get_factor(room.tokens, decode_context_tokens, num_decodes)
            fitted = fit_prefill_budget(
                self._latency, limit_s / factor, most_tokens, num_decodes, decode_context_tokens
            )
            if fitted.tokens >= room.tokens or _find_size(fitted.tokens) == _find_size(room.tokens):
                return fitted if fitted.tokens < room.tokens or factor < 1.0 else room
            # A factor holds in its own cell alone, and those between the two have not been asked.
            most_tokens, room = (1 << _find_size(fitted.tokens)) - 1, fitted
        return room


def _find_cell(prefill_tokens: int, decode_context_tokens: int, num_decodes: int) -> Cell:
    mean_context = decode_context_tokens // num_decodes if num_decodes else 0
    return _find_size(prefill_tokens), _find_size(mean_context), _find_size(num_decodes)


def _find_size(number: int) -> int:
    return number.bit_length()
