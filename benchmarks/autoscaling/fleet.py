"""A fleet whose size a policy chooses: engines start, take their roles, drain and leave, and what that costs."""

from __future__ import annotations

import bisect
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from benchmarks.autoscaling.policies import FleetView

from sluice_core.records import EngineId, Role
from sluice_core.scheduling.router_wait_limit import ROUTER_WAIT_LIMIT_S
from sluice_core.sim.sim_setup import AddEngineEvent, Cell, ConfigureEvent, LeaveEvent, SimOptions
from sluice_core.sim.simulation import Simulation, Steering
from sluice_core.strategies import get_strategy
from sluice_operator.planning.roles import decide_roles
from sluice_operator.planning.scale_down import RemovableEngine, choose_victims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.autoscaling.policies import Policy

    from sluice_core.sim.sim_setup import Arrival, ClusterEvent, EngineSetup
    from sluice_operator.api.sliders import Sliders

TICK_S = 5.0
WINDOW_S = 300.0
# Windows with fewer requests say nothing of a share.
MIN_WINDOW_REQUESTS = 30
# Wanted of each window.
LEAST_SHARE = 0.8
# Requests have ended so long after they came: they wait 30 s at most.
SETTLED_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """What a run came to.

    Args:
        attainment: Share of all requests that met both objectives.
        worst_window: The least share of a window of five minutes.
        bad_windows: Windows below 80 %.
        engine_hours: From being asked for until gone, over all engines.
        peak_engines: Most engines at once.
        hours: How long the run was, in simulated hours.
    """

    attainment: float
    worst_window: float
    bad_windows: int
    engine_hours: float
    peak_engines: int
    hours: float


class BrokenPromiseError(Exception):
    """A window had too small a share of requests that met both objectives."""


class Fleet:
    """Carries a policy's choice out; mutable, used for one run.

    Args:
        template: An engine; name, role and chunk size do not count.
        sliders: Of a fleet of ``sliders_for`` engines, with their strategy; the mix is scaled from there.
        sliders_for: See there.
        policy: Chooses the number of engines.
        start_s: From being asked for until it serves.
        gives_up: Whether the run ends at the first window that has too small a share.
    """

    def __init__(
        self,
        template: EngineSetup,
        sliders: Sliders,
        sliders_for: int,
        policy: Policy,
        start_s: float,
        *,
        gives_up: bool = False,
    ) -> None:
        self._template, self._sliders, self._sliders_for = template, sliders, sliders_for
        self._policy, self._start_s = policy, start_s
        self.strategy = get_strategy(sliders.strategy)
        self._starting: list[tuple[float, EngineId]] = []
        self._asked_s: dict[EngineId, float] = {}
        self._roles: dict[EngineId, Role] = {}
        self._leaving: set[EngineId] = set()
        self._num_named = 0
        self._gives_up = gives_up
        self._settled_s = 0.0
        self.judged_s = math.inf  # requests count that came before; the last ones of a run that gave up have not ended
        self.peak_engines = 0
        self.engine_s = 0.0

    def begin(self, number: int) -> list[EngineSetup]:
        """Makes the engines that serve at the start."""
        names = [self._name() for _ in range(number)]
        for name in names:
            self._asked_s[name] = 0.0
        self._roles = self._assign(names)
        return [self._make(name) for name in names]

    def steer(self, simulation: Simulation) -> Sequence[ClusterEvent]:
        """Asks the policy, and says what is to happen."""
        now = simulation.now
        if self._gives_up and now >= self._settled_s + WINDOW_S + SETTLED_S:
            self._settled_s += WINDOW_S
            if not self._has_held(simulation):
                self.judged_s = self._settled_s
                raise BrokenPromiseError
        engines = {engine.engine_id: engine for engine in simulation.list_engines()}
        for gone in [name for name in self._leaving if name not in engines]:
            self._leaving.remove(gone)
            self.engine_s += now - self._asked_s.pop(gone)
        serving = [name for name in engines if name not in self._leaving]
        staying = [engines[name] for name in serving]
        view = FleetView(
            now=now,
            num_arrived=simulation.num_arrived,
            num_waiting=simulation.num_held,
            num_queued=sum(engine.prefills.num_queued for engine in staying),
            num_inside=simulation.num_held + sum(engine.count_running() for engine in engines.values()),
            kv_use=sum(engine.used_blocks / engine.total_blocks for engine in staying),
            num_serving=len(serving),
            replicas=len(serving) + len(self._starting),
        )
        return self._change(now, serving, self._policy.choose(view), {e.engine_id: e.count_running() for e in staying})

    def _has_held(self, simulation: Simulation) -> bool:
        """Whether the window that has settled last kept the promise."""
        windows = list_windows(simulation, self._settled_s - WINDOW_S, self._settled_s)
        return all(met >= LEAST_SHARE * num for num, met in windows if num >= MIN_WINDOW_REQUESTS)

    def end(self, now: float) -> float:
        """Ends the run; returns the engines' hours."""
        return (self.engine_s + sum(now - asked_s for asked_s in self._asked_s.values())) / 3600.0

    def _change(
        self, now: float, serving: list[EngineId], wanted: int, loads: dict[EngineId, int]
    ) -> list[ClusterEvent]:
        events: list[ClusterEvent] = []
        for _ in range(wanted - len(serving) - len(self._starting)):
            name = self._name()
            self._asked_s[name] = now
            self._starting.append((now + self._start_s, name))
        # Those that start go first: they serve nobody.
        while self._starting and len(serving) + len(self._starting) > wanted:
            self.engine_s += now - self._asked_s.pop(self._starting.pop()[1])
        self.peak_engines = max(self.peak_engines, len(serving) + len(self._starting) + len(self._leaving))
        victims = self._choose(serving, len(serving) - wanted, loads)
        events += [LeaveEvent(at_s=now, engine_id=name) for name in victims]
        self._leaving |= set(victims)
        ready = [name for at_s, name in self._starting if at_s <= now]
        self._starting = [item for item in self._starting if item[0] > now]
        staying = [name for name in serving if name not in victims] + ready
        if victims or ready:
            before, self._roles = self._roles, self._assign(staying, loads)
            events += [AddEngineEvent(at_s=now, setup=self._make(name)) for name in ready]
            changed = [name for name in staying if name in before and before[name] is not self._roles[name]]
            events += [
                ConfigureEvent(
                    at_s=now,
                    engine_id=name,
                    role=self._roles[name],
                    chunk_size_tokens=self._sliders.chunk_size_tokens(self._roles[name]),
                )
                for name in changed
            ]
        return events

    def _choose(self, serving: list[EngineId], number: int, loads: dict[EngineId, int]) -> list[EngineId]:
        if number <= 0:
            return []
        engines = [
            RemovableEngine(engine_id=name, role=self._roles.get(name), load=loads.get(name, 0), is_serving=True)
            for name in serving
        ]
        share = self._sliders.num_prefill_heavy / self._sliders_for
        return choose_victims(engines, number, round(share * (len(serving) - number)))

    def _assign(self, names: list[EngineId], loads: dict[EngineId, int] | None = None) -> dict[EngineId, Role]:
        return decide_roles(
            self._roles,
            serving=sorted(names),
            away=[],
            sliders=self._sliders,
            replicas=self._sliders_for,
            loads=loads or {},
        )

    def _name(self) -> EngineId:
        self._num_named += 1
        return EngineId(f"e{self._num_named:04}")

    def _make(self, name: EngineId) -> EngineSetup:
        role = self._roles[name]
        return replace(
            self._template, engine_id=name, role=role, chunk_size_tokens=self._sliders.chunk_size_tokens(role)
        )


def simulate_fleet(arrivals: Sequence[Arrival], fleet: Fleet, first: int) -> Simulation:
    """Runs requests on a fleet, to the end or as long as it does not give up.

    Args:
        arrivals: The requests.
        fleet: Not used yet.
        first: Engines that serve at the start.
    """
    cell = Cell(
        engines=fleet.begin(first),
        strategy=fleet.strategy,
        options=SimOptions(wait_limit_s=ROUTER_WAIT_LIMIT_S),
    )
    simulation = Simulation(cell, arrivals, steering=Steering(interval_s=TICK_S, steer=fleet.steer))
    with suppress(BrokenPromiseError):
        simulation.run()
    return simulation


def list_windows(simulation: Simulation, begin_s: float, end_s: float) -> list[tuple[int, int]]:
    """Lists the requests of each window that has some, and how many met both objectives.

    Args:
        simulation: Run.
        begin_s: When the first window begins.
        end_s: When the last one ends.
    """
    requests, arrival_s = simulation.requests, attrgetter("arrival_s")
    low = bisect.bisect_left(requests, begin_s, key=arrival_s)
    windows: dict[int, list[int]] = {}
    for request in requests[low : bisect.bisect_left(requests, end_s, key=arrival_s)]:
        counts = windows.setdefault(int(request.arrival_s / WINDOW_S), [0, 0])
        counts[0] += 1
        counts[1] += request.has_met_slo
    return [(num, met) for num, met in windows.values()]


def compute_figures(simulation: Simulation, fleet: Fleet) -> FleetFigures:
    """Computes what a run came to."""
    windows = list_windows(simulation, 0.0, fleet.judged_s)
    shares = [met / num for num, met in windows if num >= MIN_WINDOW_REQUESTS]
    return FleetFigures(
        attainment=sum(met for _, met in windows) / sum(num for num, _ in windows),
        worst_window=min(shares),
        bad_windows=sum(share < LEAST_SHARE for share in shares),
        engine_hours=fleet.end(simulation.now),
        peak_engines=fleet.peak_engines,
        hours=simulation.now / 3600.0,
    )
