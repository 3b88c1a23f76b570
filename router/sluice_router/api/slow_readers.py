"""Clients that read slower than their engine generates: their text is kept within limits, then they are cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

MAX_PAUSED_S = 30.0


class SlowReader(Protocol):
    """A paused stream."""

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for the client, the transport's included."""
        ...

    @property
    def paused_since_s(self) -> float:
        """When the client's transport was found full, in seconds on the data plane's clock."""
        ...

    def shed(self) -> None:
        """Cancels the request and closes the connection."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowReaderLimits:
    """What slow clients may cost.

    Args:
        max_stream_bytes: Held for one stream.
        max_paused_s: How long a client may stay paused.
        max_total_bytes: Held for all paused streams of the process.
    """

    max_stream_bytes: int = 256 * 1024
    max_paused_s: float = MAX_PAUSED_S
    max_total_bytes: int = 64 * 1024 * 1024


class SlowReaders:
    """The paused streams of this process. Nothing waits for them: no engine's stream, no other client.

    A client that exceeds a limit is shed: cancelled, closed, counted. For the limit on all, the largest goes first.

    Args:
        limits: What they may cost.
    """

    def __init__(self, limits: SlowReaderLimits) -> None:
        self._limits = limits
        self._readers: dict[SlowReader, None] = {}
        self.num_shed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._readers)

    def add(self, reader: SlowReader) -> None:
        """Takes a stream in that was found paused."""
        self._readers[reader] = None

    def discard(self, reader: SlowReader) -> None:
        """Lets a stream go that drained or ended."""
        self._readers.pop(reader, None)

    def check(self, reader: SlowReader) -> None:
        """Sheds a stream that holds too much; called for each token kept."""
        if reader.num_buffered_bytes > self._limits.max_stream_bytes:
            self._shed(reader, "stream_bytes")

    def sweep(self, now: float) -> None:
        """Sheds who is paused for too long, and the largest ones while all together hold too much.

        Args:
            now: In seconds, on the data plane's clock.
        """
        for reader in list(self._readers):
            if now - reader.paused_since_s > self._limits.max_paused_s:
                self._shed(reader, "paused")
        held = {reader: reader.num_buffered_bytes for reader in self._readers}
        total = sum(held.values())
        for reader in sorted(held, key=lambda reader: held[reader], reverse=True):
            if total <= self._limits.max_total_bytes:
                return
            total -= held[reader]
            self._shed(reader, "total_bytes")

    def _shed(self, reader: SlowReader, limit: str) -> None:
        self.discard(reader)
        self.num_shed[limit] += 1
        reader.shed()
