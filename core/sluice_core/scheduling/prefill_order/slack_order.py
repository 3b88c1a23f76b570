"""Slack of prefills, and the order that it gives them: slack-aware earliest deadline first (S-EDF).

The slack of a prefill is the time from its predicted end to its deadline (FlowPrefill, arXiv:2602.16603, section 5.2).
What waits loses slack at one second per second, so the moment at which it becomes late is known in advance.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Final

from sluice_core.latency import LatencyModel, PrefillCoefficients, compute_attention_work
from sluice_core.records import RequestId
from sluice_core.strategy_parameters import PrefillOrder

_CHANGED: Final = 0.1  # relative change of a prediction beyond which all slacks are predicted again
_SAMPLE_TOKENS: Final = 1024  # of the prefill whose prediction is compared


class PrefillPredictor:
    """Predicts how long the rest of a prefill takes (FlowPrefill, section 6.4); mutable: ``renew``.

    Args:
        model: Latency of the engine's iterations.
    """

    def __init__(self, model: LatencyModel) -> None:
        self._model = model
        self._room_tokens = 1
        self._coefficients = PrefillCoefficients(0.0, 0.0, 0.0)
        self._sample_s = 0.0

    def renew(self, room_tokens: int, num_decodes: int) -> bool:
        """Take the model's newest coefficients, if they have changed enough to matter.

        Args:
            room_tokens: Prefill budget of each iteration.
            num_decodes: Decodes that run beside.

        Returns:
            Whether predictions have changed.
        """
        room_tokens = max(1, room_tokens)
        coefficients = self._model.compute_prefill_coefficients(num_decodes, 0, room_tokens)
        sample_s = coefficients.compute_s(_SAMPLE_TOKENS, 0.0, room_tokens)
        if abs(sample_s - self._sample_s) <= _CHANGED * self._sample_s:
            return False
        self._room_tokens, self._coefficients, self._sample_s = room_tokens, coefficients, sample_s
        return True

    def predict_s(self, tokens: int, attention_work: float) -> float:
        """Predict the time of prefills that are computed one after the other, in seconds.

        Args:
            tokens: Their tokens that are not computed.
            attention_work: Of these tokens, as in ``IterationShape``.
        """
        return self._coefficients.compute_s(tokens, attention_work, self._room_tokens)


class QueuedPrefill:
    """A prompt without its first token; mutable, changed by ``SlackOrder`` and its owner.

    Args:
        request_id: The request.
        number: Counts the requests of an engine; breaks ties.
        deadline_s: When its first token is due, on the engine's clock.
        urgency_s: Its place: the deadline, brought forward by a user's priority.
        allowed_s: From its arrival until then.
        tokens: Tokens of the prompt.

    Attributes:
        num_computed_tokens: Those of them that have KV.
        late_from_s: From when on it cannot meet its deadline any more, if it is not computed before.
        is_late: It is among the late ones of its ``SlackOrder``.
    """

    __slots__ = (
        "allowed_s",
        "deadline_s",
        "is_late",
        "late_from_s",
        "num_computed_tokens",
        "number",
        "request_id",
        "tokens",
        "urgency_s",
    )

    def __init__(
        self, request_id: RequestId, *, number: int, deadline_s: float, urgency_s: float, allowed_s: float, tokens: int
    ) -> None:
        self.request_id = request_id
        self.allowed_s = allowed_s
        self.number = number
        self.deadline_s = deadline_s
        self.urgency_s = urgency_s
        self.tokens = tokens
        self.num_computed_tokens = 0
        self.late_from_s = 0.0
        self.is_late = False

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are not computed."""
        return self.tokens - self.num_computed_tokens

    @property
    def remaining_work(self) -> float:
        """Their attention work."""
        return compute_attention_work(self.remaining_tokens, self.num_computed_tokens)


_Place = tuple[float, int, QueuedPrefill]


class SlackOrder:
    """Prefills by deadline, those that will be late last (FlowPrefill, section 5.2, formula 3).

    Formula 3, ``sgn(slack) / deadline``, puts the late one with the latest deadline first; see ``PrefillOrder``.

    A change costs O(log n) comparisons: two sorted lists, and a heap of the moments at which slacks change sign.

    Args:
        predictor: Predicts what is left of a prefill.
        order: Who is late, and which of these goes first.
    """

    def __init__(self, predictor: PrefillPredictor, order: PrefillOrder = PrefillOrder.S_EDF) -> None:
        self._predictor = predictor
        self._kind = order
        self._late_sign = -1.0 if order is PrefillOrder.FORMULA_3 else 1.0
        self._timely: list[_Place] = []
        self._late: list[_Place] = []
        self._moments: list[_Place] = []

    def __iter__(self) -> Iterator[QueuedPrefill]:
        """Iterate in order; ``update`` first."""
        for place in chain(self._timely, self._late):
            yield place[2]

    def first(self) -> QueuedPrefill | None:
        """Return the first; ``update`` first."""
        if self._timely:
            return self._timely[0][2]
        return self._late[0][2] if self._late else None

    @property
    def puts_late_last(self) -> bool:
        """Whether it tells late prompts from others at all."""
        return self._kind not in {PrefillOrder.EDF, PrefillOrder.CHUNKED_EDF}

    def list_timely(self) -> list[QueuedPrefill]:
        """List those that were not late when that was asked for last, first to last: O(those)."""
        return [place[2] for place in self._timely]

    def find_late(self, now: float) -> list[QueuedPrefill]:
        """Find those that are late by the predictions that there are, first to last: O(those).

        Args:
            now: Seconds on the caller's clock.
        """
        self._note_late(now)
        return [place[2] for place in self._late]

    def find_next_late_s(self) -> float:
        """Find the first moment at which a prefill may become late; ``math.inf``: none does."""
        return self._moments[0][0] if self._moments else math.inf

    def add(self, prefill: QueuedPrefill) -> None:
        """Add a prefill; ``update`` finds out whether it is late."""
        prefill.is_late = False
        prefill.late_from_s = self._find_late_from_s(prefill)
        insort(self._timely, (prefill.urgency_s, prefill.number, prefill))
        if prefill.late_from_s < math.inf:
            heappush(self._moments, (prefill.late_from_s, prefill.number, prefill))

    def _find_late_from_s(self, prefill: QueuedPrefill) -> float:
        """Find from when on a prefill counts as late, in seconds on the caller's clock."""
        if not self.puts_late_last:
            return math.inf
        if self._kind is PrefillOrder.D_EDF:
            return prefill.deadline_s
        return prefill.deadline_s - self._predictor.predict_s(prefill.remaining_tokens, prefill.remaining_work)

    def remove(self, prefill: QueuedPrefill) -> None:
        """Remove a prefill; what its old moments say is forgotten when they come."""
        places = self._late if prefill.is_late else self._timely
        key = self._late_sign * prefill.urgency_s if prefill.is_late else prefill.urgency_s
        # Numbers are unique, so that the prefills themselves are never compared.
        position = bisect_left(places, (key, prefill.number))
        assert places[position][2] is prefill
        del places[position]
        prefill.late_from_s = -1.0  # matches no moment

    def update(self, now: float, room_tokens: int, num_decodes: int) -> None:
        """Find out who has become late.

        Args:
            now: Seconds on the caller's clock.
            room_tokens: Prefill budget of each iteration.
            num_decodes: Decodes that run beside.
        """
        if self._predictor.renew(room_tokens, num_decodes):
            self._predict_again()
        self._note_late(now)

    def _note_late(self, now: float) -> None:
        """Move those that have become late behind the others."""
        moments = self._moments
        while moments and moments[0][0] <= now:
            late_from_s, number, prefill = heappop(moments)
            # An entry is stale when the prefill has left, or was added again with another moment.
            if prefill.late_from_s == late_from_s and not prefill.is_late:
                self.remove(prefill)
                prefill.is_late, prefill.late_from_s = True, late_from_s
                insort(self._late, (self._late_sign * prefill.urgency_s, number, prefill))

    def _predict_again(self) -> None:
        """Predict all slacks again; the engine has become slower or faster."""
        places = self._timely + self._late
        self._timely, self._late, self._moments = [], [], []
        for _, _, prefill in places:
            self.add(prefill)
