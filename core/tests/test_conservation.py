"""Tokens, blocks and requests of every row of the table, with two fifths of the KV: none is lost or counted twice."""

import random

import pytest
from test_sim_bookkeeping import check
from test_simulation import make_arrivals, make_engines

from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import Cell, RouterSetup, SimOptions
from sluice_core.sim.simulation import Simulation, Steering
from sluice_core.strategies import STRATEGIES

ENOUGH_BLOCKS, KV_SHARE = 60, 0.4  # of an engine: what is left holds the longest request alone
CHECK_EVERY_S = 0.31


def make_cell(strategy, *, schedules_ahead, num_routers):
    prefill, decode = strategy.sliders.resolve(256, 48, 2048)
    shape = ((2, prefill), (2, decode)) if strategy.sliders.has_roles else ((4, prefill),)
    return Cell(
        engines=make_engines(shape, blocks=int(KV_SHARE * ENOUGH_BLOCKS)),
        strategy=strategy,
        options=SimOptions(schedules_ahead=schedules_ahead, report_s=0.05 if num_routers > 1 else 0.0),
        routers=(RouterSetup(),) * num_routers,
        seed=1,
    )


@pytest.mark.parametrize("num_routers", [1, 4])
@pytest.mark.parametrize("schedules_ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_nothing_is_lost_with_two_fifths_of_the_kv(strategy, schedules_ahead, num_routers):
    cell = make_cell(strategy, schedules_ahead=schedules_ahead, num_routers=num_routers)
    arrivals = make_arrivals(random.Random(14), number=150, rate=25.0)
    num_checks = 0

    def steer(simulation):
        nonlocal num_checks
        check(simulation)
        num_checks += 1
        return ()

    simulation = Simulation(cell, arrivals, steering=Steering(interval_s=CHECK_EVERY_S, steer=steer))
    assert simulation.run()
    assert num_checks > 20
    assert {request.state for request in simulation.requests} == {RequestState.FINISHED}
    counters = [engine.counters for engine in simulation.engines]
    assert sum(each.num_output_tokens for each in counters) == sum(arrival.output_tokens for arrival in arrivals)
    # What is computed is of prompts, or is computed again: nobody's prompt is left out.
    computed = sum(each.num_completed_prefill_tokens for each in counters)
    assert computed >= sum(arrival.prompt_tokens for arrival in arrivals)
    # KV is scarce.
    peaks = [
        each.peak_blocks / engine.setup.kv_blocks_total
        for each, engine in zip(counters, simulation.engines, strict=True)
    ]
    assert max(peaks) > 0.9
