"""Decides how many engines a cluster should have. Pure: state and observation give the next state.

Wanted are the fewest engines whose goodput, as the search found it, covers what will arrive by the time that an engine
asked for now serves. Stabilization windows are those of a HorizontalPodAutoscaler: more engines are asked for only when
so many were wanted throughout the one window, fewer only when no more were wanted within the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sluice_core.autoscaling.demand_forecast import DemandForecast
from sluice_core.scheduling.router_wait_limit import ROUTER_WAIT_LIMIT_S
from sluice_operator.autoscaling.scale_down_window import ScaleDownWindow

if TYPE_CHECKING:
    from sluice_core.autoscaling.capacity_curve import CapacityCurve

# What waits at the routers for want of engines is to be gone within so long, beside what arrives.
BACKLOG_S = 30.0
# Strategies that bind late keep prompts at the router, and place them in time: what arrives waits for so long, of the
# TTFT objective.
USUAL_WAIT_SHARE = 0.5
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
        num_serving: Engines that take requests now.
        replicas: Engines that there are to be now.
        capacity: Goodput by engines; None: no search has found one.
        start_s: How long an engine takes from being asked for until it serves.
        ttft_slo_s: TTFT objective.
        attainment: Share of requests that are to meet both objectives.
        min_replicas: ``autoscaling.minReplicas``.
        max_replicas: ``autoscaling.maxReplicas``.
        up_window_s: ``autoscaling.scaleUp.stabilizationWindowSeconds``.
        down_window_s: ``autoscaling.scaleDown.stabilizationWindowSeconds``; None: see ``ScaleDownWindow``.
        least_serving: Fewest engines that can serve at all.
        is_trial: Whether sliders are on trial: fewer engines would spoil what is measured, so none leave.
    """

    now: float
    num_arrived: float
    num_waiting: int
    num_inside: int
    num_serving: int
    replicas: int
    capacity: CapacityCurve | None
    start_s: float
    ttft_slo_s: float
    attainment: float
    min_replicas: int
    max_replicas: int
    up_window_s: float
    down_window_s: float | None
    least_serving: int = 1
    is_trial: bool = False

    @property
    def down_window(self) -> ScaleDownWindow:
        """How long engines stay that are not needed."""
        return ScaleDownWindow(given_s=self.down_window_s, start_s=self.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """The scaler's state of one cluster.

    Args:
        demand: What arrives.
        num_arrived: Arrivals at the last call; None: there was none.
        began_s: When it began to watch.
        active_s: When something arrived or ran last.
        recommendations: When how many engines were wanted, the newest last.
        replicas: Engines to have; None: nothing was decided yet.
    """

    demand: DemandForecast = field(default_factory=lambda: DemandForecast(lead_s=0.0))
    num_arrived: float | None = None
    began_s: float = 0.0
    active_s: float = 0.0
    recommendations: tuple[tuple[float, int], ...] = ()
    replicas: int | None = None


def decide(state: ScalerState, observation: ScalerObservation) -> ScalerState:
    """Decides the number of engines."""
    now = observation.now
    if state.num_arrived is None:
        demand = state.demand.count(now, 0.0)
        state = replace(state, demand=demand, num_arrived=observation.num_arrived, began_s=now, active_s=now)
    # A router that is gone takes its counters along.
    new = max(0.0, observation.num_arrived - (state.num_arrived or 0.0))
    demand = replace(state.demand, lead_s=observation.start_s, ttft_slo_s=observation.ttft_slo_s).count(now, new)
    active_s = now if new or observation.num_inside else state.active_s
    state = replace(state, demand=demand, num_arrived=observation.num_arrived, active_s=active_s)
    wanted = count_wanted(state, observation)
    kept = max(observation.up_window_s, observation.down_window.keep_s)
    state = replace(state, recommendations=_remember(state.recommendations, now, wanted, kept))
    return replace(state, replicas=_stabilize(state, observation, wanted))


def restart(state: ScalerState, now: float) -> ScalerState:
    """Begins anew with another number of engines; what is known of the demand stays."""
    return replace(state, began_s=now, active_s=now, recommendations=(), replicas=None)


def is_idle(state: ScalerState, observation: ScalerObservation) -> bool:
    """Whether nothing arrived or ran for the scale-down window; of a fleet of none, whether nothing waits now."""
    if not observation.replicas:
        return not observation.num_inside
    return observation.now - state.active_s >= observation.down_window.idle_s and not observation.num_inside


def compute_rate_rps(state: ScalerState, observation: ScalerObservation) -> float:
    """Computes the rate that engines are wanted for: what is expected, with headroom, and what waits for engines."""
    return state.demand.planned_rps + _compute_backlog_rps(state, observation)


def _compute_backlog_rps(state: ScalerState, observation: ScalerObservation) -> float:
    # Those that may come late wait until the router refuses them, where others go first.
    usual_s = USUAL_WAIT_SHARE * observation.ttft_slo_s + (1.0 - observation.attainment) * ROUTER_WAIT_LIMIT_S
    num_lacking = observation.num_waiting - state.demand.minute_rps * usual_s
    return max(0.0, num_lacking) / BACKLOG_S


def count_wanted(state: ScalerState, observation: ScalerObservation) -> int:
    """Counts the engines that what arrives needs.

    Args:
        state: Arrivals, counted up to now.
        observation: See there.
    """
    if is_idle(state, observation):
        return observation.min_replicas
    if observation.capacity is None:
        # What waits needs an engine, how much it may do.
        return _clamp(max(observation.replicas, 1), observation)
    most, count_engines = max(observation.max_replicas, 1), observation.capacity.count_engines
    wanted = count_engines(compute_rate_rps(state, observation), 1, most)
    if observation.num_serving:
        # Engines that start already will serve it: what waits asks for more beside those that serve.
        planned = count_engines(state.demand.planned_rps, 1, most)
        for_backlog = count_engines(_compute_backlog_rps(state, observation), 1, most)
        wanted = min(wanted, max(planned, observation.num_serving + for_backlog))
    return _clamp(wanted, observation)


def _stabilize(state: ScalerState, observation: ScalerObservation, wanted: int) -> int:
    now, replicas = observation.now, observation.replicas
    if not replicas:
        # Requests wait at the routers: there is nothing to be stabilized.
        return wanted
    if wanted > replicas:
        recent = [number for at_s, number in state.recommendations if at_s > now - observation.up_window_s]
        is_old = now - state.began_s >= observation.up_window_s
        return _clamp(max(min([*recent, wanted]), replicas) if is_old else replicas, observation)
    if observation.is_trial:
        return _clamp(replicas, observation)
    if is_idle(state, observation):
        # No more were needed for the window, whatever was wanted for what might have come.
        return wanted
    kept = observation.down_window.count_kept(wanted, replicas, state.recommendations, began_s=state.began_s, now=now)
    return _clamp(kept, observation)


def _clamp(number: int, observation: ScalerObservation) -> int:
    bounded = min(max(number, observation.min_replicas), observation.max_replicas)
    return max(bounded, observation.least_serving) if bounded else 0


def _remember(
    recommendations: tuple[tuple[float, int], ...], now: float, wanted: int, kept_s: float
) -> tuple[tuple[float, int], ...]:
    """Remembers a recommendation; of those within one interval that are alike, the first and the last."""
    kept = [item for item in recommendations if item[0] > now - kept_s]
    if len(kept) >= 2 and kept[-1][1] == kept[-2][1] == wanted and now - kept[-2][0] < RECORD_INTERVAL_S:
        kept.pop()
    return (*kept, (now, wanted))


def explain(state: ScalerState, observation: ScalerObservation, replicas: int) -> str:
    """Says what a number was chosen for."""
    if is_idle(state, observation):
        return "no request arrived or ran for the scale-down window"
    if observation.capacity is None:
        return "what engines serve is not known yet; the number is kept within its bounds"
    return (
        f"{state.demand.minute_rps:.2f} requests/s arrive and {observation.num_waiting} wait; with headroom "
        f"{compute_rate_rps(state, observation):.2f} requests/s are planned for while an engine starts "
        f"({observation.start_s:.0f} s); {replicas} engines serve "
        f"{observation.capacity.estimate_goodput_rps(replicas):.2f}"
    )
