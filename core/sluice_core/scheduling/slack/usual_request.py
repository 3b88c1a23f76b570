"""What requests are usually like, as one router learns when they are placed and when they end."""

from __future__ import annotations

from typing import Final

GUESSED_OUTPUT_TOKENS: Final = 256  # before the first answer has ended
_LEAST_GAIN: Final = 0.02  # weight of the newest length in a running mean


class UsualRequest:
    """Running means of lengths; mutable.

    Attributes:
        prompt_tokens: Of prompts that were placed; 0 before the first.
        output_tokens: Of answers that have ended; ``GUESSED_OUTPUT_TOKENS`` before the first.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0.0
        self.output_tokens = float(GUESSED_OUTPUT_TOKENS)
        self._num_placed = 0
        self._num_finished = 0

    def note_placed(self, prompt_tokens: int) -> None:
        """Learn from a prompt that was placed."""
        self._num_placed += 1
        self.prompt_tokens = _draw_to(prompt_tokens, self.prompt_tokens, self._num_placed)

    def note_finished(self, output_tokens: int) -> None:
        """Learn from a request that has ended; 0 output tokens: it was given up."""
        if output_tokens:
            self._num_finished += 1
            self.output_tokens = _draw_to(output_tokens, self.output_tokens, self._num_finished)


def _draw_to(newest: int, mean: float, number: int) -> float:
    """Draw a mean to the newest length, of as many as there have been."""
    return mean + max(_LEAST_GAIN, 1.0 / number) * (newest - mean)
