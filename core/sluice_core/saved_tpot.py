"""For how long the decodes of an engine could wait and still meet their TPOT objectives (EcoServe)."""

from __future__ import annotations

import math
from typing import Final

NO_OBJECTIVE_S: Final = 1e8  # TPOT objectives from here on are none


class SavedTpot:
    """What decodes have saved against their TPOT objectives, kept as sums: O(1) per decode that joins or leaves.

    Mutable, changed by ``DecodeSet`` only. Times in seconds on its caller's clock.

    The *saved TPOT* of a decode with ``L`` output tokens is ``L * objective - (now - first token)``: the time for which
    it may get no token and still be within its objective (EcoServe, arXiv:2504.18154, section 3.4, Algorithm 2, lines
    16 to 20). All decodes of an engine gain a token per iteration, so ``L`` is the iteration less the one at which it
    was 0.
    """

    __slots__ = ("_constant_s", "_num_decodes", "_objectives_s")

    def __init__(self) -> None:
        self._num_decodes = 0
        self._objectives_s = 0.0
        self._constant_s = 0.0

    def add(self, tpot_slo_s: float, start_iteration: int, first_token_s: float) -> None:
        """Count a decode.

        Args:
            tpot_slo_s: Its objective.
            start_iteration: Iteration at which its output length was 0.
            first_token_s: When the client got its first token.
        """
        if tpot_slo_s < NO_OBJECTIVE_S:
            self._num_decodes += 1
            self._objectives_s += tpot_slo_s
            self._constant_s += first_token_s - tpot_slo_s * start_iteration

    def remove(self, tpot_slo_s: float, start_iteration: int, first_token_s: float) -> None:
        """Count a decode no more; for the arguments see ``add``."""
        if tpot_slo_s < NO_OBJECTIVE_S:
            self._num_decodes -= 1
            self._objectives_s -= tpot_slo_s
            self._constant_s -= first_token_s - tpot_slo_s * start_iteration
            if not self._num_decodes:
                self._objectives_s = self._constant_s = 0.0  # so that rounding does not add up

    def take(self, other: SavedTpot) -> None:
        """Count the decodes of another, which then has none."""
        if not other._num_decodes:
            return
        self._num_decodes += other._num_decodes
        self._objectives_s += other._objectives_s
        self._constant_s += other._constant_s
        other._num_decodes = 0
        other._objectives_s = other._constant_s = 0.0

    def compute_mean_s(self, now: float, iteration: int) -> float:
        """Compute the mean saved TPOT, in seconds; ``math.inf`` without a decode that has an objective.

        Args:
            now: On the clock of ``first_token_s``.
            iteration: Iterations so far.
        """
        if not self._num_decodes:
            return math.inf
        return (self._objectives_s * iteration + self._constant_s) / self._num_decodes - now
