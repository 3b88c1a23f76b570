"""Tunes the sliders of one cluster: keeps the state of ``autotune`` and runs its searches.

Operator and ``sluice up`` have one tuner per cluster. ``update`` decides; ``needs_update`` is its cheap check.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice_core.strategies import get_strategy
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.sliders import AUTO, resolve_sliders, resolve_strategy, scale_sliders
from sluice_operator.autotune import decision
from sluice_operator.autotune.condition import describe_status
from sluice_operator.autotune.engine_facts import find_engine_facts
from sluice_operator.autotune.search_constraints import make_constraints
from sluice_operator.autotune.search_messages import SearchRequest
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.autotune.stored_sliders import StoredSliders, StoredTrial
from sluice_operator.autotune.tuner_state import TunerObservation, TunerState
from sluice_operator.autotune.workload import MIN_REQUESTS, read_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice.v1 import control_pb2
    from sluice_core.slo_attainment import SloCounts
    from sluice_operator.api.serving_cluster import ServingCluster, ServingClusterSpec
    from sluice_operator.api.sliders import Sliders
    from sluice_operator.autotune.condition import AutotuneStatus
    from sluice_operator.autotune.search_messages import SearchResult
    from sluice_operator.autotune.search_process import RunSearch

logger = logging.getLogger(__name__)

# Statuses come every second; samples are read less often.
CHECK_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerInputs:
    """What a tuner decides by.

    Args:
        cluster: The manifest, as the user wrote it, but for the number of engines where autoscaling says it.
        statuses: Newest status of each router that answers.
        counts: Requests finished so far; only grows.
        is_settled: Every engine has taken the newest plan, and none comes or goes.
        stored: What an earlier process left.
        sized: Sliders that a search for capacity found for so many engines; None: none has.
    """

    cluster: ServingCluster
    statuses: Sequence[control_pb2.GetStatusResponse]
    counts: SloCounts
    is_settled: bool
    stored: StoredSliders | None = None
    sized: Sliders | None = None


class Tuner:
    """The tuner of one cluster.

    Args:
        run_search: Runs a search.
        enqueue: Called when a search has ended, for a reconcile.
        now: Monotonic seconds.
        wall_s: The time, in seconds since 1970.
    """

    def __init__(
        self,
        run_search: RunSearch,
        *,
        enqueue: Callable[[], None],
        now: Callable[[], float],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._run_search = run_search
        self._enqueue = enqueue
        self._now = now
        self._wall_s = wall_s
        self._state = TunerState()
        self._observation: TunerObservation | None = None
        self._task: asyncio.Task[None] | None = None
        self._checked_s = float("-inf")

    @property
    def result(self) -> SearchResult | None:
        """What the newest search found."""
        return self._state.result

    @property
    def stored(self) -> StoredSliders | None:
        """The tuned sliders to store with the plan; None: the spec's are in force."""
        state = self._state
        if state.tuned is None:
            return None
        trial = None
        if state.trial is not None:
            on_trial = state.trial
            trial = StoredTrial(former=on_trial.former, before=on_trial.before, began_s=on_trial.began_s)
        replicas, sliders = state.home or (state.replicas, state.tuned)
        return StoredSliders(basis=state.basis, replicas=replicas, sliders=sliders, trial=trial)

    @property
    def is_on_trial(self) -> bool:
        """Whether sliders are on trial."""
        return self._state.trial is not None

    def find_sliders(self, spec: ServingClusterSpec) -> Sliders:
        """Finds the sliders in force for a spec of some size."""
        state = self._state
        if state.tuned is None:
            return resolve_sliders(spec)
        replicas, sliders = state.home or (state.replicas, state.tuned)
        return scale_sliders(sliders, replicas, spec.replicas)

    def update(self, inputs: TunerInputs) -> ServingCluster:
        """Decides; returns the cluster with the sliders that are to be in force."""
        observation = self._observe(inputs)
        before, self._state = self._state, decision.decide(self._state, observation)
        self._observation = observation
        if self._state.last_request is not before.last_request or not self._state.is_searching:
            self._end_search()
        if self._state.is_searching and self._task is None and self._state.last_request is not None:
            self._task = asyncio.create_task(self._search(self._state.last_request), name="search for sliders")
        return apply_sliders(inputs.cluster, self._state.tuned)

    def describe_status(self) -> AutotuneStatus | None:
        """Describes the tuning for the condition Autotuned; None before the first update."""
        return None if self._observation is None else describe_status(self._state, self._observation)

    def needs_update(self, read_inputs: Callable[[], TunerInputs | None]) -> bool:
        """Whether an update would decide something; checks every ``CHECK_INTERVAL_S`` at most."""
        if (
            self._observation is None
            or self._observation.mode == "Off"
            or self._now() - self._checked_s < CHECK_INTERVAL_S
        ):
            return False
        self._checked_s = self._now()
        inputs = read_inputs()
        if inputs is None:
            return False
        observation = self._observe(inputs)
        after = decision.decide(self._state, observation)
        return after != self._state or describe_status(after, observation) != self.describe_status()

    def stop(self) -> None:
        """Ends the search under way."""
        self._end_search()

    def _observe(self, inputs: TunerInputs) -> TunerObservation:
        spec = inputs.cluster.spec
        request, missing = self._make_search_request(inputs)
        return TunerObservation(
            now=self._now(),
            wall_s=self._wall_s(),
            mode=spec.autotune.mode,
            basis=decision.make_basis(spec),
            replicas=spec.replicas,
            cooldown_s=float(spec.autotune.cooldown_seconds),
            request=request,
            missing=missing,
            counts=inputs.counts,
            is_settled=inputs.is_settled,
            stored=inputs.stored,
            chooses_strategy=spec.strategy == AUTO,
            sized=inputs.sized,
        )

    def _make_search_request(self, inputs: TunerInputs) -> tuple[SearchRequest | None, tuple[Reason, str]]:
        spec, statuses = inputs.cluster.spec, inputs.statuses
        if spec.autotune.mode == "Off":
            return None, (Reason.OFF, "")
        if not spec.replicas:
            return None, (Reason.NO_SAMPLE, "there are no engines until a request arrives")
        constraints = make_constraints(spec)
        if constraints.is_fixed:
            strategy = resolve_strategy(spec)
            message = "autotune.bounds leave no slider a choice; name bounds of one that the strategy uses"
            if not strategy.sliders.varies_any:
                message = (
                    f"strategy {strategy.title} has no sliders; strategy Auto lets a search choose among strategies"
                )
            return None, (Reason.NOTHING_TO_TUNE, message)
        workload = read_workload(statuses)
        if workload is None:
            message = f"routers have sampled fewer than {MIN_REQUESTS} requests; send requests"
            return None, (Reason.NO_SAMPLE, message)
        engine, missing = find_engine_facts(spec, statuses)
        if engine is None:
            return None, (Reason.NO_LATENCY_MODEL, missing)
        sliders = resolve_sliders(spec)
        request = SearchRequest(
            constraints=constraints, spec_sliders=sliders, in_force=sliders, workload=workload, engine=engine
        )
        return request, (Reason.SEARCHING, "")

    async def _search(self, request: SearchRequest) -> None:
        try:
            result = await self._run_search(request)
        except SearchError as error:
            self._state = decision.record_failure(self._state, str(error), self._now())
        except Exception as error:  # outermost frame of this task: the fault becomes a condition
            logger.exception("the search for sliders failed")
            self._state = decision.record_failure(self._state, f"the search failed: {error}", self._now())
        else:
            self._state = decision.record_result(self._state, result, self._now())
        self._task = None
        self._enqueue()

    def _end_search(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


def apply_sliders(cluster: ServingCluster, sliders: Sliders | None) -> ServingCluster:
    """Returns the cluster as if its spec asked for these sliders; None: unchanged."""
    if sliders is None:
        return cluster
    spec = cluster.spec
    chunk_sizes = spec.chunk_sizes.model_copy(
        update={"prefill_heavy": sliders.prefill_heavy_tokens, "decode_heavy": sliders.decode_heavy_tokens}
    )
    update: dict[str, Any] = {"prefill_heavy": sliders.num_prefill_heavy, "chunk_sizes": chunk_sizes}
    if sliders.strategy:
        update["strategy"] = get_strategy(sliders.strategy).title
    return cluster.model_copy(update={"spec": spec.model_copy(update=update)})
