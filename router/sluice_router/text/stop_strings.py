"""Cuts an output before the first stop string.

Text that may be the beginning of a stop string is held back; all other text goes out at once. Where the cut falls does
not depend on how the text was divided into tokens: it is before the stop string that is complete first.
"""

from __future__ import annotations


class StopStrings:
    """Stop strings of one request, and the tail that may begin one.

    Args:
        stops: The strings, none of them empty.
        is_included: Whether the stop string stays in the output.
    """

    __slots__ = ("_first_characters", "_held", "_is_included", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, is_included: bool = False) -> None:
        assert all(stops), "a stop string is empty"
        self._stops = stops
        self._is_included = is_included
        self._longest = max(map(len, stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """Takes new text.

        Args:
            text: What follows the text so far.
            is_armed: False while the output is shorter than ``min_tokens``: stop strings that end there do not count.

        Returns:
            The text that may go out. Once ``matched`` is set it is the last.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        whole = self._held + text
        if is_armed:
            end = self._find(whole)
            if end is not None:
                self._held = ""
                return whole[:end]
        start = self._find_possible_beginning(whole)
        self._held = whole[start:]
        return whole[:start]

    def flush(self) -> str:
        """Returns the held text; the output has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, whole: str) -> int | None:
        """Finds the stop string that is complete first, ties in the order given, and returns where to cut."""
        best_end = len(whole) + 1
        best: str | None = None
        for stop in self._stops:
            # The held text contains no whole stop string, or one that was complete before min_tokens.
            start = whole.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and start + len(stop) < best_end:
                best, best_end = stop, start + len(stop)
        if best is None:
            return None
        self.matched = best
        return best_end if self._is_included else best_end - len(best)

    def _find_possible_beginning(self, whole: str) -> int:
        for start in range(max(0, len(whole) - self._longest + 1), len(whole)):
            if whole[start] in self._first_characters and self._may_begin(whole[start:]):
                return start
        return len(whole)

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)
