"""The cluster changes while a run goes on: engines come, are configured anew, leave and fail."""

from __future__ import annotations

from collections.abc import Sequence

from sluice_core.records import EngineId, Role
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.cluster import SimCluster
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.moves.cut_hand_offs import CutHandOffs
from sluice_core.sim.moves.cut_prompts import CutPrompts
from sluice_core.sim.moves.kept_prefills import KeptPrefills
from sluice_core.sim.sim_setup import AddEngineEvent, Arrival, Cell, ConfigureEvent, FailEvent, LeaveEvent


class ChangingCluster(SimCluster):
    """A cluster with what waits for grants and what moves in it, and the events that change it; mutable.

    Args:
        cell: The cluster.
        arrivals: The requests, in the order of their arrival.
        timeline: See ``SimCluster``.
    """

    def __init__(self, cell: Cell, arrivals: Sequence[Arrival], timeline: Timeline | None) -> None:
        super().__init__(cell, arrivals, timeline)
        self._hand_offs = CutHandOffs(self) if cell.options.schedules_ahead else None
        self._cut_prompts = CutPrompts(self, self._hand_offs)
        self._grants = [KeptPrefills(self, self._hand_offs) for _ in self.routers.routers]
        self._leaving: dict[EngineId, SimEngine] = {}
        self._find_targets()

    def _place_granted(self, at_boundary: SimEngine | None = None) -> None:
        """See ``KeptPrefills.place``."""
        for grants in self._grants:
            grants.place(at_boundary)

    def _change_cluster(self, event: object) -> None:
        if isinstance(event, AddEngineEvent):
            self._add_engine(event.setup)
        elif isinstance(event, FailEvent):
            self._fail(event.engine_id)
        elif isinstance(event, LeaveEvent):
            self._leave(event)
        else:
            assert isinstance(event, ConfigureEvent)
            self._configure(event)
        self._spread_chunk_sizes()
        self._find_targets()
        self._place_granted()
        self._schedule_retries()

    def _schedule_retries(self) -> None:
        """Let the policies be asked again whose routers hold requests."""
        for router in self.routers.routers:
            if router.held:
                self._schedule_retry(router)

    def _find_targets(self) -> None:
        """Find out whether first decodes have anywhere to go at all."""
        decode_heavy = [engine for engine in self._by_id.values() if engine.role is Role.DECODE_HEAVY]
        has_targets = not self.table.has_uniform_chunk_size and not all(engine.is_draining for engine in decode_heavy)
        for grants in self._grants:
            grants.has_targets = has_targets

    def _configure(self, event: ConfigureEvent) -> None:
        """Put a plan in force; an iteration under way keeps the batch that it has."""
        engine = self._by_id.get(event.engine_id)
        if engine is None:
            return
        engine.configure(event.role, event.chunk_size_tokens, is_draining=event.is_draining)
        for router in self.routers.routers:
            router.table.configure(
                event.engine_id,
                role=event.role,
                chunk_size_tokens=event.chunk_size_tokens,
                is_draining=event.is_draining,
            )
        self.start_engine(engine)

    def _leave(self, event: LeaveEvent) -> None:
        """Let an engine drain; the next call of the steering finds it empty."""
        engine = self._by_id.get(event.engine_id)
        if engine is None:
            return
        self._leaving[event.engine_id] = engine
        size = engine.prefills.batch.chunk_size_tokens
        self._configure(
            ConfigureEvent(
                at_s=event.at_s,
                engine_id=event.engine_id,
                role=engine.role,
                chunk_size_tokens=size,
                is_draining=True,
            )
        )

    def _fail(self, engine_id: EngineId) -> None:
        """Take an engine away; what it held is placed again, what was on its way there or from there is recomputed."""
        engine = self._by_id.pop(engine_id, None)
        self._leaving.pop(engine_id, None)
        if engine is None:
            return
        for router in self.routers.routers:
            router.table.remove(engine_id)
        if self._prefixes is not None:
            self._prefixes.remove(engine_id)
        for request in engine.clear(self.now):
            self.hold(request)
        self._cut_prompts.fail(engine)
        if self._hand_offs is not None:
            self._hand_offs.fail(engine)
        for grants in self._grants:
            grants.fail(engine)
        self._schedule_retries()
