"""Scales one cluster: keeps the state of ``decision``, and runs the searches for what fleets of several sizes serve.

The operator has one scaler per cluster. ``watch`` counts what arrives and decides; ``update`` does so for a reconcile,
and says how many engines there are to be.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice.v1 import control_pb2
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.autoscaling import decision
from sluice_operator.autoscaling.arrivals import ArrivalCounter
from sluice_operator.autoscaling.capacity_messages import list_sizes, make_capacity_request
from sluice_operator.autoscaling.condition import ScaleStatus, describe_scale
from sluice_operator.autoscaling.decision import ScalerObservation, ScalerState
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.autotune.decision import MAX_REST_S, MIN_REST_S, RETRY_S
from sluice_operator.autotune.engine_facts import find_engine_facts
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.autotune.workload import MIN_REQUESTS, read_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_operator.api.serving_cluster import ServingCluster, ServingClusterSpec
    from sluice_operator.api.sliders import Sliders
    from sluice_operator.autoscaling.capacity_messages import CapacityRequest, CapacityResult
    from sluice_operator.autoscaling.capacity_process import RunCapacitySearch

logger = logging.getLogger(__name__)

# Statuses come every second; the scaler decides less often.
CHECK_INTERVAL_S = 2.0
# So long after more was wanted than maxReplicas serve, the condition says so.
AT_MAXIMUM_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerInputs:
    """What a scaler decides by.

    Args:
        cluster: The manifest, as the user wrote it.
        statuses: Newest status of each router that answers.
        find_sliders: Finds the sliders in force for a spec of some size.
        start_s: How long engines took to start, of those that serve; None: none is known.
        is_trial: Whether sliders are on trial.
        stored: What an earlier process left.
    """

    cluster: ServingCluster
    statuses: Sequence[control_pb2.GetStatusResponse]
    find_sliders: Callable[[ServingClusterSpec], Sliders] = resolve_sliders
    start_s: float | None = None
    is_trial: bool = False
    stored: StoredScale | None = None


class Scaler:
    """The scaler of one cluster.

    Args:
        run_search: Runs a search for capacity.
        enqueue: Called when a search has ended, for a reconcile.
        now: Monotonic seconds.
    """

    def __init__(self, run_search: RunCapacitySearch, *, enqueue: Callable[[], None], now: Callable[[], float]) -> None:
        self._run_search = run_search
        self._enqueue = enqueue
        self._now = now
        self._arrivals = ArrivalCounter()
        self._state = ScalerState()
        self._scale: StoredScale | None = None
        self._inputs: ScalerInputs | None = None
        self._checked_s = self._over_s = float("-inf")
        # The newest search: what it was for, when it began and ended, and why it failed.
        self._request: CapacityRequest | None = None
        self._missing: tuple[Reason, str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._started_s = self._ended_s = float("-inf")
        self._failure = ""

    @property
    def stored(self) -> StoredScale | None:
        """What is to be stored with the plan; None: nothing is scaled."""
        return self._scale

    @property
    def capacity(self) -> CapacityResult | None:
        """What fleets of several sizes serve, as far as a search has found it."""
        return self._scale.capacity if self._scale else None

    def take(self, status: control_pb2.GetStatusResponse) -> None:
        """Counts what arrived at a router."""
        self._arrivals.take(status)

    def keep_routers(self, router_ids: set[str]) -> None:
        """Forgets routers that are gone."""
        self._arrivals.keep_routers(router_ids)

    def update(self, inputs: ScalerInputs) -> int:
        """Decides; returns how many engines there are to be.

        Args:
            inputs: What is known at a reconcile.
        """
        spec = inputs.cluster.spec
        self._inputs = inputs
        if spec.autoscaling.mode == "Disabled":
            self._reset()
            return spec.replicas
        self._scale = self._begin(inputs).note_start(inputs.start_s)
        self._decide(inputs)
        return self._scale.replicas if spec.autoscaling.mode == "Apply" else spec.replicas

    def find_sliders(self, replicas: int) -> Sliders | None:
        """Finds the sliders that the newest search found for so many engines; None: it is not over, or found none."""
        is_over = self._request is not None and self._task is None and not self._failure
        if not is_over or self._request is None or not self._request.may_tune or self.capacity is None:
            return None
        return self.capacity.find_sliders(replicas)

    def search_if_due(self) -> None:
        """Starts the search that is due; called when the sliders in force are known."""
        if self._inputs is None or self._scale is None:
            return
        request, self._missing = self._make_request(self._inputs)
        if request is None or not self._needs_search(request):
            return
        self.stop()
        self._request, self._started_s = request, self._now()
        self._task = asyncio.create_task(self._search(request), name="search for capacity")

    def watch(self, statuses: Sequence[control_pb2.GetStatusResponse]) -> bool:
        """Decides between reconciles, every ``CHECK_INTERVAL_S`` at most; returns whether one is needed.

        Args:
            statuses: Newest status of each router that answers.
        """
        now = self._now()
        if self._inputs is None or self._scale is None:
            return False
        # The first request of a cluster without engines does not wait.
        is_wanted = not self._scale.replicas and any(status.num_requests for status in statuses)
        if now - self._checked_s < CHECK_INTERVAL_S and not is_wanted:
            return False
        before = self._scale, self.describe_status()
        inputs = replace(self._inputs, statuses=statuses)
        self._decide(inputs)
        request, missing = self._make_request(inputs)
        is_search_due = request is not None and self._needs_search(request)
        self._missing = missing
        return is_search_due or before != (self._scale, self.describe_status())

    def describe_status(self) -> ScaleStatus | None:
        """Describes the scaling for the condition Autoscaled; None before the first update.

        A message stays the same while the reason and the number do: each change is a status write.
        """
        if self._inputs is None:
            return None
        if self._scale is None:
            return ScaleStatus(is_true=False, reason=Reason.OFF, message="autoscaling is disabled")
        return describe_scale(
            self._inputs.cluster.spec,
            self._scale,
            is_over=self._now() - self._over_s < AT_MAXIMUM_S,
            failure=self._failure,
            missing=self._missing,
        )

    def stop(self) -> None:
        """Ends the search under way."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _reset(self) -> None:
        self.stop()
        self._scale = self._request = self._missing = None
        self._state, self._failure = ScalerState(), ""
        self._ended_s = float("-inf")

    def _begin(self, inputs: ScalerInputs) -> StoredScale:
        """Returns the number to go on with: the own, an earlier process's, or after an edit the spec's."""
        replicas = inputs.cluster.spec.replicas
        known = self._scale or inputs.stored
        if known is not None and known.basis == replicas:
            return known
        self._state = decision.restart(self._state, self._now())
        fresh = StoredScale(basis=replicas, replicas=replicas, reason="the number of spec.replicas")
        return fresh if known is None else replace(fresh, start_s=known.start_s, capacity=known.capacity)

    def _decide(self, inputs: ScalerInputs) -> None:
        assert self._scale is not None, "autoscaling is on"
        self._checked_s = self._now()
        if any(map(is_older, inputs.statuses)):
            return
        observation = self._observe(inputs, self._scale)
        self._state = decision.decide(self._state, observation)
        replicas = self._state.replicas
        assert replicas is not None, "it has been decided"
        capacity = observation.capacity
        rate_rps = decision.compute_rate_rps(self._state, observation)
        if capacity is not None and rate_rps > capacity.estimate_goodput_rps(observation.max_replicas):
            self._over_s = observation.now
        if replicas != self._scale.replicas:
            self._scale = replace(
                self._scale, replicas=replicas, reason=decision.explain(self._state, observation, replicas)
            )

    def _observe(self, inputs: ScalerInputs, scale: StoredScale) -> ScalerObservation:
        scaling = inputs.cluster.spec.autoscaling
        assert scaling.max_replicas is not None, "required by every mode but Disabled"
        return ScalerObservation(
            now=self._now(),
            num_arrived=float(self._arrivals.total),
            num_waiting=sum(status.num_waiting for status in inputs.statuses),
            num_inside=sum(status.num_requests for status in inputs.statuses),
            num_serving=count_serving(inputs.statuses),
            replicas=scale.replicas,
            capacity=scale.capacity.curve if scale.capacity else None,
            start_s=scale.start_s,
            ttft_slo_s=inputs.cluster.spec.slo.ttft_milliseconds / 1e3,
            attainment=inputs.cluster.spec.slo.attainment_share,
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            up_window_s=float(scaling.scale_up.stabilization_window_seconds),
            down_window_s=scaling.scale_down.stabilization_window_seconds,
            least_serving=count_least_serving(inputs.cluster.spec),
            is_trial=inputs.is_trial,
        )

    # The search for what fleets of several sizes serve.

    def _needs_search(self, request: CapacityRequest) -> bool:
        last = self._request
        if last is None or last.differs(request):
            return True
        if self._task is not None:
            return False
        quiet_s = self._now() - self._ended_s
        if self._failure:
            return quiet_s >= RETRY_S
        rest_s = min(max(self._ended_s - self._started_s, MIN_REST_S), MAX_REST_S)
        return quiet_s >= rest_s and last.has_shifted(request)

    def _make_request(self, inputs: ScalerInputs) -> tuple[CapacityRequest | None, tuple[Reason, str] | None]:
        """Makes the request for a search; or says what is missing."""
        spec, most = inputs.cluster.spec, inputs.cluster.spec.autoscaling.max_replicas
        assert most is not None, "required by every mode but Disabled"
        if any(map(is_older, inputs.statuses)):
            message = "routers are older than the operator and do not count what arrives; the number stays as it is"
            return None, (Reason.NO_SAMPLE, message)
        workload = read_workload(inputs.statuses)
        if workload is None:
            message = f"routers have sampled fewer than {MIN_REQUESTS} requests; the number stays within its bounds"
            return None, (Reason.NO_SAMPLE, message)
        engine, missing = find_engine_facts(spec, inputs.statuses)
        if engine is None:
            return None, (Reason.NO_LATENCY_MODEL, missing)
        sizes = list_sizes(count_least_serving(spec), most)
        return make_capacity_request(spec, sizes, inputs.find_sliders, workload, engine), None

    async def _search(self, request: CapacityRequest) -> None:
        try:
            result = await self._run_search(request)
        except SearchError as error:
            self._failure = str(error)
        except Exception as error:  # outermost frame of this task: the fault becomes a condition
            logger.exception("the search for capacity failed")
            self._failure = f"the search failed: {error}"
        else:
            self._failure = ""
            if self._scale is not None:
                self._scale = replace(self._scale, capacity=result)
        self._task, self._ended_s = None, self._now()
        self._enqueue()


def is_older(status: control_pb2.GetStatusResponse) -> bool:
    """Whether a router is of a release that does not count what arrives: it would look idle."""
    return not status.num_arrived and any(counters.num_finished for counters in status.classes)


def count_serving(statuses: Sequence[control_pb2.GetStatusResponse]) -> int:
    """Counts the engines that take requests of some router."""
    ready = control_pb2.ENGINE_STATE_READY
    return len({engine.engine_id for status in statuses for engine in status.engines if engine.state == ready})


def count_least_serving(spec: ServingClusterSpec) -> int:
    """Counts the fewest engines that serve: two, where one kind takes the prefills and the other the decodes."""
    return 2 if resolve_sliders(spec).decode_heavy_tokens == 0 else 1


def apply_replicas(cluster: ServingCluster, replicas: int) -> ServingCluster:
    """Returns the cluster as if its spec asked for so many engines."""
    if replicas == cluster.spec.replicas:
        return cluster
    return cluster.model_copy(update={"spec": cluster.spec.model_copy(update={"replicas": replicas})})
