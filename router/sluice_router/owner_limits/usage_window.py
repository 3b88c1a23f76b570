"""What an owner of API keys has used of a minute, in buckets of a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

WINDOW_S = 60
# A request at the end of a bucket's second counts for the whole minute that follows it.
NUM_BUCKETS = WINDOW_S + 1


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Requests that were admitted in one second, and their tokens."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class OwnerUsage:
    """The last minute of one owner on one router; mutable.

    Args:
        running: Requests that have not ended.
        requests: Sum over the buckets.
        tokens: Sum over the buckets.
        buckets: By second, oldest first.
    """

    running: int = 0
    requests: int = 0
    tokens: int = 0
    buckets: dict[int, Bucket] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, and the last minute is empty."""
        return not self.buckets and not self.running

    def advance(self, second: int) -> None:
        """Forgets what is older than a minute."""
        while self.buckets:
            oldest = next(iter(self.buckets))
            if second - oldest < NUM_BUCKETS:
                return
            bucket = self.buckets.pop(oldest)
            self.requests -= bucket.requests
            self.tokens -= bucket.tokens

    def add(self, second: int, requests: int, tokens: int) -> None:
        """Counts in a second that is not older than the newest bucket; tokens may be negative."""
        bucket = self.buckets.get(second)
        if bucket is None:
            bucket = self.buckets[second] = Bucket()
        bucket.requests += requests
        bucket.tokens += tokens
        self.requests += requests
        self.tokens += tokens

    def replace(self, second: int, requests: int, tokens: int) -> None:
        """Sets what a second holds; seconds may come in any order."""
        old = self.buckets.get(second)
        is_newest = not self.buckets or second >= next(reversed(self.buckets))
        self.requests += requests - (old.requests if old else 0)
        self.tokens += tokens - (old.tokens if old else 0)
        self.buckets[second] = Bucket(requests=requests, tokens=tokens)
        if old is None and not is_newest:
            self.buckets = dict(sorted(self.buckets.items()))

    def list_ends(self) -> Iterator[tuple[int, Bucket]]:
        """Lists in which second each bucket is forgotten, oldest first."""
        for second, bucket in self.buckets.items():
            yield second + NUM_BUCKETS, bucket


def count_computed(
    prompt_tokens: int, output_tokens: int, *, has_run: bool, is_adopted: bool, num_adopted_tokens: int
) -> tuple[int, int]:
    """Counts the tokens that were computed for an owner, whatever the end; without a first token it is none.

    Those of a request that another router had first count there, up to where this one went on.

    Args:
        prompt_tokens: Of the request.
        output_tokens: Of the request, over all routers.
        has_run: Whether there was a first token.
        is_adopted: Whether another router had the request first.
        num_adopted_tokens: Output tokens until then.

    Returns:
        Prompt and output tokens.
    """
    return (prompt_tokens if has_run and not is_adopted else 0), max(0, output_tokens - num_adopted_tokens)
