"""Tunes the sliders of one cluster: holds the state of ``autotune``, and runs its searches.

Operator and launcher have one for each cluster. ``look`` decides; ``is_due`` says cheaply whether a look would.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice_operator.api.conditions import Reason
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.autotune import decision
from sluice_operator.autotune.decision import Seen, State, Stored, Verdict
from sluice_operator.autotune.engine_facts import find_facts
from sluice_operator.autotune.search_messages import Question, make_terms
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.autotune.workload import LEAST_REQUESTS, read_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice.v1 import control_pb2
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.api.sliders import Sliders
    from sluice_operator.autotune.search_messages import Answer
    from sluice_operator.autotune.search_process import Ask
    from sluice_operator.routers.attainment import Counts

logger = logging.getLogger(__name__)

# Statuses come every second; samples need not be read as often.
CHECK_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a tuner is told at each look.

    Args:
        cluster: The manifest, as the user wrote it.
        statuses: Newest status of each router that answers.
        counts: Requests finished so far; only grows.
        is_settled: Every engine has taken the newest plan, and none comes or goes.
        stored: What an earlier process left.
    """

    cluster: ServingCluster
    statuses: Sequence[control_pb2.GetStatusResponse]
    counts: Counts
    is_settled: bool
    stored: Stored | None = None


class Tuner:
    """See the module.

    Args:
        ask: Answers questions.
        wake: Called when a search has ended, for a look.
        now: Monotonic seconds.
    """

    def __init__(self, ask: Ask, *, wake: Callable[[], None], now: Callable[[], float]) -> None:
        self._ask = ask
        self._wake = wake
        self._now = now
        self._state = State()
        self._seen: Seen | None = None
        self._task: asyncio.Task[None] | None = None
        self._checked_s = float("-inf")

    @property
    def answer(self) -> Answer | None:
        """What the newest search found."""
        return self._state.answer

    @property
    def stored(self) -> Stored | None:
        """What is to be kept with the plan."""
        tuned = self._state.tuned
        return None if tuned is None else Stored(basis=self._state.basis, sliders=tuned)

    def look(self, circumstances: Circumstances) -> ServingCluster:
        """Decides; returns the manifest with the sliders that are to be in force."""
        seen = self._see(circumstances)
        before, self._state = self._state, decision.decide(self._state, seen)
        self._seen = seen
        if self._state.asked is not before.asked or not self._state.is_searching:
            self._end_search()
        if self._state.is_searching and self._task is None and self._state.asked is not None:
            self._task = asyncio.create_task(self._search(self._state.asked), name="search for sliders")
        return put_in_force(circumstances.cluster, self._state.tuned)

    def judge(self) -> Verdict | None:
        """What is to be said; None before the first look."""
        return None if self._seen is None else decision.judge(self._state, self._seen)

    def is_due(self, circumstances: Callable[[], Circumstances | None]) -> bool:
        """Whether a look would decide something; asked at every status, answered every ``CHECK_INTERVAL_S``."""
        if self._seen is None or self._seen.mode == "Off" or self._now() - self._checked_s < CHECK_INTERVAL_S:
            return False
        self._checked_s = self._now()
        told = circumstances()
        if told is None:
            return False
        seen = self._see(told)
        after = decision.decide(self._state, seen)
        return after != self._state or decision.judge(after, seen) != self.judge()

    def stop(self) -> None:
        """Ends the search under way."""
        self._end_search()

    def _see(self, circumstances: Circumstances) -> Seen:
        spec = circumstances.cluster.spec
        question, missing = self._make_question(circumstances)
        return Seen(
            now=self._now(),
            mode=spec.autotune.mode,
            basis=decision.make_basis(spec),
            cooldown_s=float(spec.autotune.cooldown_seconds),
            question=question,
            missing=missing,
            counts=circumstances.counts,
            is_settled=circumstances.is_settled,
            stored=circumstances.stored,
        )

    def _make_question(self, circumstances: Circumstances) -> tuple[Question | None, tuple[Reason, str]]:
        spec, statuses = circumstances.cluster.spec, circumstances.statuses
        if spec.autotune.mode == "Off":
            return None, (Reason.OFF, "")
        terms = make_terms(spec)
        if terms.is_fixed:
            message = "autotune.bounds leave no slider a choice; name bounds of one that the strategy uses"
            return None, (Reason.NOTHING_TO_TUNE, message)
        workload = read_workload(statuses)
        if workload is None:
            message = f"routers have sampled fewer than {LEAST_REQUESTS} requests; send requests"
            return None, (Reason.NO_SAMPLE, message)
        engine, missing = find_facts(spec, statuses)
        if engine is None:
            return None, (Reason.NO_LATENCY_MODEL, missing)
        sliders = resolve_sliders(spec)
        question = Question(terms=terms, spec_sliders=sliders, in_force=sliders, workload=workload, engine=engine)
        return question, (Reason.SEARCHING, "")

    async def _search(self, question: Question) -> None:
        try:
            answer = await self._ask(question)
        except SearchError as error:
            self._state = decision.take_failure(self._state, str(error), self._now())
        except Exception as error:  # outermost frame of a search: what it makes of it is a condition
            logger.exception("a search failed")
            self._state = decision.take_failure(self._state, f"the search failed: {error}", self._now())
        else:
            self._state = decision.take_answer(self._state, answer, self._now())
        self._task = None
        self._wake()

    def _end_search(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


def put_in_force(cluster: ServingCluster, sliders: Sliders | None) -> ServingCluster:
    """The manifest as if its user had asked for other sliders; None: as it is."""
    if sliders is None:
        return cluster
    spec = cluster.spec
    chunk_sizes = spec.chunk_sizes.model_copy(
        update={"prefill_heavy": sliders.prefill_heavy_tokens, "decode_heavy": sliders.decode_heavy_tokens}
    )
    update: dict[str, Any] = {"prefill_heavy": sliders.num_prefill_heavy, "chunk_sizes": chunk_sizes}
    return cluster.model_copy(update={"spec": spec.model_copy(update=update)})
