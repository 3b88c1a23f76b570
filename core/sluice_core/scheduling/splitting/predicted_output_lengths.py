"""How long answers will be, as far as anybody can know.

Source: DynaServe, sections 3.1 and 5: the output length is predicted. The paper refers to learned predictors; routers
here know what requests asked for and what their answers were.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol

from sluice_core.records import PrefillRequest, RequestId

QUANTILE: Final = 0.5
WINDOW: Final = 256  # answers that a running quantile remembers
UNKNOWN_TOKENS: Final = 256  # before the first answer, where the request sets no limit


class OutputLengths(Protocol):
    """Predicts output lengths."""

    def predict(self, request: PrefillRequest) -> int:
        """Predict a request's output, in tokens, at least 1; ``predict_output_tokens`` has the limit."""
        ...

    def observe(self, output_tokens: int) -> None:
        """Learn from an answer that has ended."""
        ...


class RunningQuantile:
    """A quantile of the last answers, whoever asked. Before the first it is what the request allows.

    Args:
        quantile: Share of the answers that are no longer.
        window: Answers that count.
    """

    def __init__(self, quantile: float = QUANTILE, window: int = WINDOW) -> None:
        self._quantile = quantile
        self._window = window
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []

    def predict(self, request: PrefillRequest) -> int:
        """See ``OutputLengths.predict``."""
        if not self._sorted:
            return request.max_output_tokens or UNKNOWN_TOKENS
        index = min(len(self._sorted) - 1, int(self._quantile * len(self._sorted)))
        return self._sorted[index]

    def observe(self, output_tokens: int) -> None:
        """See ``OutputLengths.observe``: O(window)."""
        self._newest.append(output_tokens)
        insort(self._sorted, output_tokens)
        if len(self._newest) > self._window:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]


class KnownLengths:
    """An oracle, for simulations alone.

    Args:
        output_tokens: The lengths.
    """

    def __init__(self, output_tokens: Mapping[RequestId, int]) -> None:
        self._output_tokens = output_tokens

    def predict(self, request: PrefillRequest) -> int:
        """See ``OutputLengths.predict``."""
        return self._output_tokens[request.request_id]

    def observe(self, output_tokens: int) -> None:
        """See ``OutputLengths.observe``: there is nothing to learn."""


class NoisyLengths:
    """A prediction with normal errors (DynaServe, section 6.6, Table 4).

    Args:
        lengths: What is right.
        deviation_tokens: Standard deviation of the errors.
        rng: Draws them.
    """

    def __init__(self, lengths: OutputLengths, deviation_tokens: float, rng: random.Random) -> None:
        self._lengths = lengths
        self._deviation_tokens = deviation_tokens
        self._rng = rng

    def predict(self, request: PrefillRequest) -> int:
        """See ``OutputLengths.predict``."""
        return max(1, round(self._rng.gauss(self._lengths.predict(request), self._deviation_tokens)))

    def observe(self, output_tokens: int) -> None:
        """See ``OutputLengths.observe``."""
        self._lengths.observe(output_tokens)


def predict_output_tokens(lengths: OutputLengths, request: PrefillRequest, margin_tokens: int) -> int:
    """Predict a request's output with a margin, and at most its ``max_output_tokens``."""
    tokens = lengths.predict(request) + margin_tokens
    return min(tokens, request.max_output_tokens or tokens)
