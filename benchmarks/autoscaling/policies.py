"""Who says how many engines there are: the operator's scaler, an HPA, a fixed number, and an oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_operator.autoscaling.decision import ScalerObservation, ScalerState, decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_core.autoscaling.capacity_curve import CapacityCurve

HPA_INTERVAL_S = 15.0
HPA_TOLERANCE = 0.1
HPA_DOWN_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """What a policy sees of the fleet.

    Args:
        now: Seconds.
        num_arrived: Requests so far.
        num_waiting: Requests at the router.
        num_queued: Requests that wait on engines.
        num_inside: Requests that have not ended.
        kv_use: Sum of the engines' shares of KV blocks in use.
        num_serving: Engines that serve.
        replicas: Engines that serve or start.
    """

    now: float
    num_arrived: int
    num_waiting: int
    num_queued: int
    num_inside: int
    kv_use: float
    num_serving: int
    replicas: int


class Policy(Protocol):
    """Says how many engines there are to be."""

    def choose(self, view: FleetView) -> int:
        """Chooses the number of engines."""
        ...


@dataclass(slots=True)
class ScalerPolicy:
    """The operator's own decision, on the observations that it would have."""

    capacity: CapacityCurve
    start_s: float
    ttft_slo_s: float
    max_replicas: int
    min_replicas: int = 1
    down_window_s: float | None = None
    state: ScalerState = field(default_factory=ScalerState)

    def choose(self, view: FleetView) -> int:
        """See ``Policy``."""
        observation = ScalerObservation(
            now=view.now,
            num_arrived=view.num_arrived,
            num_waiting=view.num_waiting,
            num_inside=view.num_inside,
            num_serving=view.num_serving,
            replicas=view.replicas,
            capacity=self.capacity,
            start_s=self.start_s,
            ttft_slo_s=self.ttft_slo_s,
            attainment=DEFAULT_ATTAINMENT,
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            up_window_s=0.0,
            down_window_s=self.down_window_s,
        )
        self.state = decide(self.state, observation)
        assert self.state.replicas is not None
        return self.state.replicas


@dataclass(slots=True)
class HpaPolicy:
    """A HorizontalPodAutoscaler with its defaults, on queue lengths or on KV use.

    Queue lengths are an external metric with an average value: wanted are all that wait over the target. KV use is a
    metric of pods: those that start count as 0 when more are wanted. The first replicas count as recommended. The
    source: Kubernetes' algorithm details.
    """

    metric: str
    target: float
    max_replicas: int
    min_replicas: int = 1
    recent: list[tuple[float, int]] = field(default_factory=list)
    next_s: float = 0.0
    chosen: int = 0

    def choose(self, view: FleetView) -> int:
        """See ``Policy``."""
        if view.now < self.next_s:
            return self.chosen
        self.next_s = view.now + HPA_INTERVAL_S
        if not self.recent:
            self.recent = [(view.now, view.replicas)]
        wanted = min(max(self._count(view), self.min_replicas), self.max_replicas)
        self.recent = [item for item in self.recent if item[0] > view.now - HPA_DOWN_WINDOW_S] + [(view.now, wanted)]
        wanted = max(number for _, number in self.recent)
        # Per period of 15 s at most as many again, or four.
        self.chosen = min(wanted, view.replicas + max(4, view.replicas))
        return self.chosen

    def _count(self, view: FleetView) -> int:
        if self.metric == "queue":
            total = view.num_waiting + view.num_queued
            ratio = total / self.target / max(view.replicas, 1)
            return view.replicas if abs(ratio - 1.0) <= HPA_TOLERANCE else math.ceil(total / self.target)
        ratio = view.kv_use / max(view.num_serving, 1) / self.target
        if abs(ratio - 1.0) <= HPA_TOLERANCE:
            return view.replicas
        if ratio < 1.0:
            return math.ceil(ratio * view.num_serving)
        with_starting = view.kv_use / max(view.replicas, 1) / self.target
        return view.replicas if with_starting <= 1.0 + HPA_TOLERANCE else math.ceil(with_starting * view.replicas)


@dataclass(slots=True)
class SchedulePolicy:
    """Follows a schedule: engines asked for by time, ascending."""

    schedule: Sequence[tuple[float, int]]
    position: int = 0

    def choose(self, view: FleetView) -> int:
        """See ``Policy``."""
        while self.position + 1 < len(self.schedule) and self.schedule[self.position + 1][0] <= view.now:
            self.position += 1
        return self.schedule[self.position][1]


def make_oracle_schedule(
    rates_rps: Sequence[float], bin_s: float, capacity: CapacityCurve, start_s: float, *, most: int, factor: float
) -> list[tuple[float, int]]:
    """Makes the schedule of somebody who knows each bin's rate, with the same start time of engines.

    Each engine is asked for ``start_s`` before it is needed, and kept through gaps that cost less than a new start.

    Args:
        rates_rps: Of each bin.
        bin_s: Its length.
        capacity: Goodput by engines.
        start_s: From being asked for until it serves.
        most: Most engines.
        factor: What rates are multiplied with: the least at which the oracle's own run keeps the promise.
    """
    needed = [capacity.count_engines(rate * factor, 1, most) for rate in rates_rps]
    changes: dict[float, int] = {}
    for level in range(1, max(needed) + 1):
        spans: list[list[float]] = []
        for number, count in enumerate(needed):
            if count < level:
                continue
            begin_s, end_s = number * bin_s, (number + 1) * bin_s
            if spans and begin_s - spans[-1][1] <= start_s:
                spans[-1][1] = end_s
            else:
                spans.append([begin_s, end_s])
        for begin_s, end_s in spans:
            asked_s = max(begin_s - start_s, 0.0)
            changes[asked_s] = changes.get(asked_s, 0) + 1
            changes[end_s] = changes.get(end_s, 0) - 1
    number, schedule = 0, []
    for at_s in sorted(changes):
        number += changes[at_s]
        schedule.append((at_s, max(number, 1)))
    return schedule
