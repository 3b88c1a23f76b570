"""Several simulated routers: each knows what reports told it, and owns its requests and its share of the engines."""

import random
from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_routers import NaiveRouters
from test_simulation import SLO, STRATEGIES, describe, make_arrivals, make_engines, run

from sluice_core.latency import OnlineLatencyModel
from sluice_core.latency.scaled_latency_model import ScaledLatencyModel
from sluice_core.records import IterationShape, Slo
from sluice_core.router_shares import choose_owner
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import Cell, NoGrant, RouterSetup, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

SLOS = (SLO, Slo(ttft_s=0.4, tpot_s=0.03), Slo(ttft_s=9.0, tpot_s=0.2))
FOUR = (
    RouterSetup(),
    RouterSetup(),
    RouterSetup(arrival_share=3.0, latency_factor=0.85),
    RouterSetup(latency_factor=1.15),
)


def make_cell(rng, name, routers, *, blocks, **options):
    strategy, shape = STRATEGIES[name]
    return Cell(
        engines=make_engines(shape, blocks=blocks),
        strategy=strategy,
        parameters=StrategyParameters(
            early_rejection=rng.choice(list(EarlyRejection)),
            prefill_batch_tokens=8 * blocks,
            grant_wait_s=rng.choice((0.3, 3.0)),
        ),
        options=SimOptions(**options),
        seed=rng.randrange(99),
        routers=routers,
    )


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.sampled_from((26, 60, 400)),
    routers=st.sampled_from((FOUR[:1], FOUR[:2], FOUR)),
    report_s=st.sampled_from((0.0, 0.013, 0.05)),
    no_grant=st.sampled_from(NoGrant),
)
# A refused request asked a second time within an iteration, when blocks had become free before it.
@example(seed=0, blocks=26, routers=FOUR, report_s=0.05, no_grant=NoGrant.WAIT)
def test_several_routers_decide_as_the_plain_simulator_has_it(name, seed, blocks, routers, **options):
    rng = random.Random(seed)
    cell = make_cell(rng, name, routers, blocks=blocks, **options)
    arrivals = make_arrivals(rng, rate=rng.choice((2.0, 8.0, 25.0)), slos=SLOS, priorities=(0, 0, 1, -1))
    fast, naive = run(cell, arrivals), NaiveRouters(cell, arrivals).run()
    for ours, theirs in zip(fast.requests, naive.requests, strict=True):
        assert (ours.state is RequestState.REJECTED) == theirs.is_rejected
        if not theirs.is_rejected:
            assert ours.first_token_s == pytest.approx(theirs.first_s, abs=1e-9)
            assert ours.last_token_s == pytest.approx(theirs.tokens[-1], abs=1e-9)
            assert (ours.num_moves, ours.num_preemptions) == (theirs.moves, theirs.preemptions)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("schedules_ahead", [False, True], ids=["in step", "ahead"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from((24, 60)), report_s=st.sampled_from((0.0, 0.05, 0.4)))
# EcoServe: the last decode was preempted, for want of blocks, in an iteration that was to be of decodes alone.
@example(seed=127, blocks=24, report_s=0.05)
def test_nothing_is_lost_between_several_routers(name, schedules_ahead, seed, blocks, report_s):
    """``run`` asserts that requests, blocks and tokens add up."""
    rng = random.Random(seed)
    cell = make_cell(rng, name, FOUR, blocks=blocks, schedules_ahead=schedules_ahead, report_s=report_s)
    arrivals = make_arrivals(rng, number=60, rate=25.0, slos=SLOS)
    simulation = run(cell, arrivals)
    may_reject = cell.parameters.early_rejection is EarlyRejection.REJECT
    assert may_reject or all(request.state is RequestState.FINISHED for request in simulation.requests)


def test_requests_come_to_each_router_in_proportion_to_its_share():
    arrivals = make_arrivals(random.Random(1), number=3000, rate=2000.0)
    simulation = Simulation(make_cell(random.Random(2), "aggregated", FOUR, blocks=60), arrivals)
    counts = Counter(simulation.routers.of_request(index).number for index in range(len(arrivals)))
    assert [counts[number] / 3000 for number in range(4)] == pytest.approx([1 / 6, 1 / 6, 1 / 2, 1 / 6], abs=0.03)


def test_each_engine_is_of_one_routers_share_and_says_so_to_the_others():
    simulation = run(
        make_cell(random.Random(3), "aggregated", FOUR, blocks=60), make_arrivals(random.Random(4), number=30)
    )
    ids = [router.router_id for router in simulation.routers.routers]
    for engine in simulation.engines:
        loads = [router.table[engine.engine_id].load for router in simulation.routers.routers]
        own = [router_id for router_id, load in zip(ids, loads, strict=True) if not load.is_of_others]
        assert own == [choose_owner(engine.engine_id, ids)]


def test_old_reports_cost_attainment_and_one_router_with_fresh_ones_costs_none():
    arrivals = make_arrivals(random.Random(5), number=400, rate=9.0, slos=(Slo(ttft_s=0.5, tpot_s=0.05),))
    cell = Cell(engines=make_engines(((6, 512),), blocks=400), strategy=STRATEGIES["aggregated"][0])
    plain = describe(run(cell, arrivals))
    assert describe(run(replace(cell, routers=(RouterSetup(),)), arrivals)) == plain
    late = replace(cell, routers=(RouterSetup(),) * 4, options=SimOptions(report_s=0.5))
    num_met = [sum(r.has_met_slo for r in run(each, arrivals).requests) for each in (cell, late)]
    assert num_met[0] > num_met[1]


def test_engines_that_learn_what_iterations_take_tell_the_routers():
    arrivals = make_arrivals(random.Random(6), number=60)
    setups = make_engines(((2, 256),), blocks=400, learns_latency=True)
    routers = (RouterSetup(), RouterSetup(latency_factor=1.15))
    simulation = run(Cell(engines=setups, strategy=STRATEGIES["sluice"][0], routers=routers), arrivals)
    first, second = simulation.routers.routers
    shape = IterationShape(prefill_tokens=200, num_chunks=1, attention_work=20_000.0, num_decodes=2)
    for engine in simulation.engines:
        assert engine.latency.num_observations == engine.counters.num_iterations
        assert engine.latency.relative_error > 0.0
        learned_s = engine.latency.estimate_shape_s(shape)
        assert learned_s != engine.setup.profile.estimate_shape_s(shape)
        assert first.table[engine.engine_id].latency.estimate_shape_s(shape) == learned_s
        assert second.table[engine.engine_id].latency.estimate_shape_s(shape) == pytest.approx(1.15 * learned_s)


def test_routers_go_by_what_engines_hold_true_of_themselves_also_where_it_is_wrong():
    arrivals = make_arrivals(random.Random(6), number=60)
    setups = [replace(setup, latency_factor=1.2) for setup in make_engines(((2, 256),), blocks=400)]
    cell = Cell(
        engines=setups, strategy=STRATEGIES["sluice"][0], routers=(RouterSetup(), RouterSetup(latency_factor=0.5))
    )
    simulation = run(cell, arrivals)
    shape = IterationShape(prefill_tokens=200, num_chunks=1, attention_work=20_000.0, num_decodes=2)
    for engine in simulation.engines:
        exact_s = engine.setup.profile.estimate_shape_s(shape)
        assert engine.latency.estimate_shape_s(shape) == pytest.approx(1.2 * exact_s)
        known_s = [one.table[engine.engine_id].latency.estimate_shape_s(shape) for one in simulation.routers.routers]
        assert known_s == pytest.approx([1.2 * exact_s, 0.6 * exact_s])
    exact = replace(cell, engines=[replace(setup, latency_factor=1.0) for setup in setups])
    assert describe(run(exact, arrivals)) != describe(simulation)


def test_what_clients_ask_for_bounds_the_lengths_that_a_router_predicts():
    arrivals = [replace(arrival, output_tokens=9) for arrival in make_arrivals(random.Random(7), number=40)]
    asked = [replace(arrival, max_output_tokens=9) for arrival in arrivals]
    cell = Cell(engines=make_engines(((2, 256),), blocks=400), strategy=STRATEGIES["dynaserve"][0])
    described = [request.describe_prefill().max_output_tokens for request in run(cell, asked).requests]
    assert set(described) == {9}
    assert describe(run(cell, asked)) != describe(run(cell, arrivals))


def test_a_wrong_model_is_wrong_by_its_factor():
    profile = make_engines(((1, 512),))[0].profile
    scaled = ScaledLatencyModel(profile, 1.15)
    shape = IterationShape(prefill_tokens=100, num_chunks=1, attention_work=5000.0)
    assert scaled.estimate_shape_s(shape) == pytest.approx(1.15 * profile.estimate_shape_s(shape))
    estimated, exact = (asdict(model.compute_prefill_coefficients(3, 900, 256)) for model in (scaled, profile))
    assert estimated == pytest.approx({name: 1.15 * value for name, value in exact.items()})
    queued = {
        "tokens": 900,
        "attention_work": 9000.0,
        "num_prompts": 2,
        "room_tokens": 256,
        "num_decodes": 3,
        "decode_context_tokens": 900,
    }
    assert scaled.estimate_prefill_s(**queued) == pytest.approx(1.15 * profile.estimate_prefill_s(**queued))
    scaled.observe(shape, 9.0)
    fit = OnlineLatencyModel()
    for _ in range(3):
        fit.observe(shape, 0.02)
    fit.observe(shape, 0.04)
    of_fit = ScaledLatencyModel(fit, 1.15)
    assert (of_fit.num_observations, of_fit.relative_error) == (4, fit.relative_error)
    assert fit.relative_error > 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: RouterSetup(arrival_share=0.0),
        lambda: RouterSetup(latency_factor=-1.0),
        lambda: replace(make_engines(((1, 256),))[0], latency_factor=0.0),
        lambda: SimOptions(report_s=-0.1),
        lambda: Cell(engines=(), strategy=STRATEGIES["sluice"][0], routers=()),
    ],
)
def test_routers_that_cannot_be_are_refused(make):
    with pytest.raises(ValueError, match=r"positive|at least|above 0"):
        make()


def test_simulated_routers_keep_no_records_of_their_decisions():
    """Nobody asks for them, and they would cost a tenth of a run."""
    cell = make_cell(random.Random(1), "taichi", FOUR, blocks=60)
    simulation = run(cell, make_arrivals(random.Random(1), rate=8.0))
    assert [router.policy.take_records(1) for router in simulation.routers.routers] == [[None]] * 4
