"""Decides how many engines a cluster should have. Pure: state and observation give the next state.

Wanted are the fewest engines whose goodput, as the search found it, covers what will arrive by the time that an engine
asked for now serves. Stabilization windows are those of a HorizontalPodAutoscaler: more engines are asked for only when
so many were wanted throughout the one window, fewer only when no more were wanted within the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sluice_core.planning.demand_forecast import DemandForecast

if TYPE_CHECKING:
    from sluice_core.planning.capacity_curve import CapacityCurve

# What waits at the routers is to be gone within so long, beside what arrives.
BACKLOG_S = 30.0
# Recommendations are remembered at most once in so long.
RECORD_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerObservation:
    """What the scaler observes at one moment.

    Args:
        now: Monotonic seconds.
        num_arrived: Requests that have arrived so far; only grows while routers live.
        num_waiting: Requests that wait at the routers for an engine.
        num_inside: Requests in the routers, waiting ones included.
        replicas: Engines that there are to be now.
        capacity: Goodput by engines; None: no search has found one.
        start_s: How long an engine takes from being asked for until it serves.
        min_replicas: ``autoscaling.minReplicas``.
        max_replicas: ``autoscaling.maxReplicas``.
        up_window_s: ``autoscaling.scaleUp.stabilizationWindowSeconds``.
        down_window_s: ``autoscaling.scaleDown.stabilizationWindowSeconds``.
    """

    now: float
    num_arrived: float
    num_waiting: int
    num_inside: int
    replicas: int
    capacity: CapacityCurve | None
    start_s: float
    min_replicas: int
    max_replicas: int
    up_window_s: float = 0.0
    down_window_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """The scaler's state of one cluster.

    Args:
        demand: What arrives.
        num_arrived: Arrivals at the last call; None: there was none.
        began_s: When it began to watch.
        recommendations: When how many engines were wanted, the newest last.
        replicas: Engines to have; None: nothing was decided yet.
    """

    demand: DemandForecast = field(default_factory=lambda: DemandForecast(lead_s=0.0))
    num_arrived: float | None = None
    began_s: float = 0.0
    recommendations: tuple[tuple[float, int], ...] = ()
    replicas: int | None = None


def decide(state: ScalerState, observation: ScalerObservation) -> ScalerState:
    """Decides the number of engines."""
    now = observation.now
    if state.num_arrived is None:
        demand = state.demand.count(now, 0.0)
        state = replace(state, demand=demand, num_arrived=observation.num_arrived, began_s=now)
    # A router that is gone takes its counters along.
    new = max(0.0, observation.num_arrived - (state.num_arrived or 0.0))
    demand = replace(state.demand, lead_s=observation.start_s).count(now, new)
    state = replace(state, demand=demand, num_arrived=observation.num_arrived)
    wanted = count_wanted(state, observation)
    if wanted is None:
        return replace(state, replicas=_clamp(observation.replicas, observation))
    kept = max(observation.up_window_s, observation.down_window_s)
    state = replace(state, recommendations=_remember(state.recommendations, now, wanted, kept))
    return replace(state, replicas=_stabilize(state, observation, wanted))


def count_wanted(state: ScalerState, observation: ScalerObservation) -> int | None:
    """Counts the engines that what arrives needs; None: nothing says how much an engine does.

    Args:
        state: Arrivals, counted up to now.
        observation: See there.
    """
    is_idle = not observation.num_inside and not state.demand.bin_count and not any(state.demand.counts)
    # An operator that has just begun leaves a fleet of none as it is, and any other one for a window.
    if is_idle and (not observation.replicas or observation.now - state.began_s >= observation.down_window_s):
        return observation.min_replicas
    if observation.capacity is None:
        # What waits needs an engine, how much it may do.
        return _clamp(max(observation.replicas, 1), observation)
    demand = state.demand
    rate_rps = demand.forecast_rps * demand.headroom + observation.num_waiting / BACKLOG_S
    needed = observation.capacity.count_engines(rate_rps, 1, max(observation.max_replicas, 1))
    return _clamp(needed, observation)


def _stabilize(state: ScalerState, observation: ScalerObservation, wanted: int) -> int:
    now, replicas = observation.now, observation.replicas
    if not replicas:
        # Requests wait at the routers: there is nothing to be stabilized.
        return wanted
    if wanted > replicas:
        recent = [number for at_s, number in state.recommendations if at_s > now - observation.up_window_s]
        is_old = now - state.began_s >= observation.up_window_s
        return max(min([*recent, wanted]), replicas) if is_old else replicas
    recent = [number for at_s, number in state.recommendations if at_s > now - observation.down_window_s]
    is_old = now - state.began_s >= observation.down_window_s
    return _clamp(min(max([*recent, wanted]), replicas) if is_old else replicas, observation)


def _clamp(number: int, observation: ScalerObservation) -> int:
    return min(max(number, observation.min_replicas), observation.max_replicas)


def _remember(
    recommendations: tuple[tuple[float, int], ...], now: float, wanted: int, kept_s: float
) -> tuple[tuple[float, int], ...]:
    """Remembers a recommendation; of those within one interval that are alike, the first and the last."""
    kept = [item for item in recommendations if item[0] > now - kept_s]
    if len(kept) >= 2 and kept[-1][1] == kept[-2][1] == wanted and now - kept[-2][0] < RECORD_INTERVAL_S:
        kept.pop()
    return (*kept, (now, wanted))
