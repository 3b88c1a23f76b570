"""The table of stamps: when a stub read each request and sent each token. The load generator reads it.

The layout is that of ``bench.h``; a row belongs to request number r modulo the number of rows. Times are
CLOCK_MONOTONIC nanoseconds, which all processes of one machine share.
"""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAGIC = 0x53544D50
HEADER_WORDS = 8
WORD_BYTES = 8
TOKENS_SENT, REQUESTS_READ = 3, 4
# More rows than requests ever run at once. Untouched rows take no memory.
DEFAULT_ROWS = 32768


def make_stamps(path: Path, *, num_tokens: int, rows: int = DEFAULT_ROWS) -> None:
    """Makes an empty table.

    Args:
        path: Path of the table. A memory file system avoids disk writes.
        num_tokens: Longest answer, in tokens.
        rows: Most requests that run at once.
    """
    columns = num_tokens + 2
    header = [MAGIC, rows, columns, 0, 0, 0, 0, 0]
    with path.open("wb") as file:
        file.write(b"".join(word.to_bytes(WORD_BYTES, "little") for word in header))
        file.truncate(WORD_BYTES * (HEADER_WORDS + rows * columns))


class Stamps:
    """A mapped table.

    Args:
        words: The file's words.
    """

    def __init__(self, words: memoryview[int]) -> None:
        if words[0] != MAGIC:
            raise ValueError("not a table of stamps")
        self._words = words
        self._rows, self._columns = words[1], words[2]

    @property
    def max_tokens(self) -> int:
        """Longest answer that fits, in tokens."""
        return self._columns - 1

    def mark_read(self, request: int, now_ns: int) -> None:
        """Notes that a stub has read a request."""
        self._words[HEADER_WORDS + (request % self._rows) * self._columns] = now_ns
        self._words[REQUESTS_READ] += 1

    def mark_sent(self, request: int, index: int, now_ns: int) -> None:
        """Notes that a stub sends a token."""
        self._words[HEADER_WORDS + (request % self._rows) * self._columns + 1 + index] = now_ns

    def count_sent(self, num_tokens: int) -> None:
        """Adds to the number of tokens sent."""
        self._words[TOKENS_SENT] += num_tokens

    @property
    def tokens_sent(self) -> int:
        """Number of tokens sent in all."""
        return self._words[TOKENS_SENT]

    def sent_at_ns(self, request: int, index: int) -> int:
        """Reads when a token was sent; 0 if it was not yet."""
        return self._words[HEADER_WORDS + (request % self._rows) * self._columns + 1 + index]


@contextmanager
def open_stamps(path: Path) -> Iterator[Stamps]:
    """Maps a table.

    Raises:
        ValueError: The file is not a table of stamps.
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory, memoryview(memory) as view:
        words = view.cast("Q")
        try:
            yield Stamps(words)
        finally:
            words.release()
