"""Where prefills run: TaiChi's Algorithm 2 as an ordered walk.

Algorithm 2 takes, among the engines whose Q + E + T stays within the TTFT SLO, the one with the fewest queued prefill
tokens. That is the first feasible engine in ascending order of queued prefill tokens. Ties go to P-heavy engines, then
to one of the feasible at random. Aggregation and disaggregation are the same code: with equal chunk sizes roles are
void and nothing is transferred; an engine with chunk size 0 has no room and is never feasible.

Decisions are kept in a bounded ring as tuples and formatted on demand (``explain``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sluice_core.records import Candidate, Decision, EngineId, FlowParameters, PrefillRequest, RequestId

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from sluice_core.engines import EngineTable

CachedTokens = Callable[[PrefillRequest, EngineId], int]
"""Prompt tokens expected in an engine's prefix cache; the seam for prefix-aware routing."""


class PlacementPolicy(Protocol):
    """Decides where waiting prefills run."""

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
        cached_tokens: CachedTokens | None = None,
    ) -> list[Decision]:
        """Decide about each waiting request; placements are recorded in ``engines`` at once.

        The caller submits each ``Place`` and calls ``engines.mark_submitted`` (or ``cancel_placement``); it keeps each
        ``Hold`` and asks again after the next report.

        Args:
            now: Seconds on the caller's monotonic clock.
            waiting: Requests in any order.
            engines: The engines.
            cached_tokens: Expected prefix-cache hits; None: none.

        Returns:
            One decision per request, in the order in which they were made.
        """
        ...


class PlacementRecord(NamedTuple):
    """A decision and what it saw, kept in a ring; ``explain`` formats it."""

    now: float
    request: PrefillRequest
    decision: Decision
    entries: tuple[tuple[object, ...], ...]


class LengthAwarePlacement:
    """Algorithm 2 (taichi.txt, section 3.4) with early rejection, KV fit and recoveries (router.md, section 3).

    Args:
        parameters: Live parameters; replace the attribute on a plan change.
        rng: Breaks ties; seeded by the caller.
        num_records: Decisions kept for explanations.
    """

    def __init__(self, parameters: FlowParameters, rng: random.Random, *, num_records: int = 4096) -> None:
        self.parameters = parameters
        self.records: deque[PlacementRecord] = deque(maxlen=num_records)
        self._rng = rng

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
        cached_tokens: CachedTokens | None = None,
    ) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        raise NotImplementedError

    def find_records(self, request_id: RequestId) -> list[PlacementRecord]:
        """Find the decisions about a request that are still kept, oldest first."""
        return [record for record in self.records if record.request.request_id == request_id]


def explain(record: PlacementRecord) -> Sequence[Candidate]:
    """Reconstruct the engines that a decision saw, in the order of the walk.

    Args:
        record: From ``LengthAwarePlacement.records``.

    Returns:
        One candidate per engine recorded.
    """
    raise NotImplementedError
