"""Runs whose engines come and go by what a steering decides meanwhile."""

from __future__ import annotations

import pytest
from planning_harness import PROFILE

from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import AddEngineEvent, Arrival, Cell, EngineSetup, LeaveEvent, SimOptions
from sluice_core.sim.simulation import Simulation, Steering
from sluice_core.strategies import get_strategy

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def make_engine(name: str, role: Role = Role.DECODE_HEAVY, chunk_size_tokens: int = 128) -> EngineSetup:
    return EngineSetup(
        engine_id=EngineId(name),
        profile=PROFILE,
        role=role,
        chunk_size_tokens=chunk_size_tokens,
        kv_blocks_total=2000,
        kv_bytes_per_token=100_000,
    )


def make_arrivals(number: int, gap_s: float) -> list[Arrival]:
    return [Arrival(at_s=gap_s * (1 + index), prompt_tokens=300, output_tokens=40, slo=SLO) for index in range(number)]


def run(engines, arrivals, events, *, wait_limit_s=None, interval_s=1.0) -> tuple[Simulation, list[tuple[float, int]]]:
    sizes: list[tuple[float, int]] = []

    def steer(simulation: Simulation):
        sizes.append((simulation.now, len(simulation.list_engines())))
        return events.pop(simulation.now, [])

    cell = Cell(engines=engines, strategy=get_strategy("taichi"), options=SimOptions(wait_limit_s=wait_limit_s))
    simulation = Simulation(cell, arrivals, steering=Steering(interval_s=interval_s, steer=steer))
    assert simulation.run()
    return simulation, sizes


def test_an_engine_that_leaves_ends_its_work_first():
    """Its decodes move or end, then it goes; no request is computed twice."""
    engines = [make_engine("a", Role.PREFILL_HEAVY, 256), make_engine("b"), make_engine("c")]
    events = {2.0: [LeaveEvent(at_s=2.0, engine_id=EngineId("b"))]}
    simulation, sizes = run(engines, make_arrivals(100, 0.05), events)
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)
    assert [size for at_s, size in sizes if at_s <= 2.0] == [3, 3, 3]
    assert sizes[-1][1] == 2
    assert simulation.engines[1].is_dead
    assert simulation.engines[1].counters.num_lost_prefill_tokens == 0


def test_requests_wait_while_there_is_no_engine():
    """What arrives at an empty cluster is served by the engine that comes."""
    events = {0.0: [AddEngineEvent(at_s=30.0, setup=make_engine("late"))]}
    simulation, sizes = run([], make_arrivals(3, 1.0), events, wait_limit_s=100.0)
    assert [size for at_s, size in sizes if at_s < 30.0] == [0] * 30
    assert [request.state for request in simulation.requests] == [RequestState.FINISHED] * 3
    assert min(request.first_token_s for request in simulation.requests) > 30.0


def test_requests_that_no_engine_comes_for_are_refused():
    """The wait has its limit, so that the run ends."""
    simulation, _ = run([], make_arrivals(3, 1.0), {}, wait_limit_s=20.0)
    assert [request.state for request in simulation.requests] == [RequestState.REJECTED] * 3
    assert simulation.now == pytest.approx(24.0, abs=2.0)
    assert simulation.num_held == 0


def test_a_leaving_engine_that_is_gone_may_be_named_again():
    """An event about an engine that is not there changes nothing."""
    events = {
        1.0: [LeaveEvent(at_s=1.0, engine_id=EngineId("b"))],
        30.0: [LeaveEvent(at_s=30.0, engine_id=EngineId("b"))],
    }
    simulation, sizes = run([make_engine("a"), make_engine("b")], make_arrivals(10, 4.0), events)
    assert sizes[-1][1] == 1
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)
