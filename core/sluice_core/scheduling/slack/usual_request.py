"""What requests are usually like, as one router learns when they are placed and when they end."""

from __future__ import annotations

import math
from typing import Final

GUESSED_OUTPUT_TOKENS: Final = 256  # before the first answer has ended
_LEAST_GAIN: Final = 0.02  # weight of the newest length in a running mean
_REMEMBERED: Final = 1000  # an objective that nobody of so many has had is forgotten, twice as many at most


class UsualRequest:
    """Running means of lengths, and the shortest objective; mutable.

    Attributes:
        prompt_tokens: Of prompts that were placed; 0 before the first.
        least_ttft_s: The shortest TTFT objective of the last that were placed; ``math.inf`` before the first.
        output_tokens: Of answers that have ended; ``GUESSED_OUTPUT_TOKENS`` before the first.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0.0
        self.least_ttft_s = math.inf
        self.output_tokens = float(GUESSED_OUTPUT_TOKENS)
        self._newest_ttft_s = math.inf  # the least since it was forgotten last
        self._num_placed = 0
        self._num_finished = 0

    def note_placed(self, prompt_tokens: int, ttft_slo_s: float) -> None:
        """Learn from a prompt that was placed."""
        self._num_placed += 1
        self.prompt_tokens = _draw_to(prompt_tokens, self.prompt_tokens, self._num_placed)
        self._newest_ttft_s = min(self._newest_ttft_s, ttft_slo_s)
        if self._num_placed % _REMEMBERED:
            self.least_ttft_s = min(self.least_ttft_s, ttft_slo_s)
        else:
            self.least_ttft_s, self._newest_ttft_s = self._newest_ttft_s, math.inf

    def note_finished(self, output_tokens: int) -> None:
        """Learn from a request that has ended; 0 output tokens: it was given up."""
        if output_tokens:
            self._num_finished += 1
            self.output_tokens = _draw_to(output_tokens, self.output_tokens, self._num_finished)


def _draw_to(newest: int, mean: float, number: int) -> float:
    """Draw a mean to the newest length, of as many as there have been."""
    return mean + max(_LEAST_GAIN, 1.0 / number) * (newest - mean)
