"""Simulated runs as a whole: against the plain implementation, against theory, and what always holds."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_simulation import NaiveSimulation

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.transfer import LinkSpeed
from sluice_core.records import EngineId, MoveCause, Role, Slo
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import (
    AddEngineEvent,
    Arrival,
    Cell,
    ConfigureEvent,
    EngineSetup,
    FailEvent,
    NoGrant,
    SimOptions,
    TransferLink,
    TtftEnd,
)
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy
from sluice_core.strategies.dynaserve import DynaServeRules
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY
# Qwen2.5-14B on an A100, linear interpolation between its points.
POINTS_MS = ((0, 22.7), (8, 22.7), (64, 24.5), (128, 28.0), (256, 39.5), (512, 66.9), (1024, 115), (2048, 211))


def interpolate_ms(num_tokens):
    for (low, low_ms), (high, high_ms) in pairwise(POINTS_MS):
        if num_tokens <= high:
            return low_ms + (high_ms - low_ms) * (num_tokens - low) / (high - low)
    raise AssertionError(num_tokens)


A100_14B = IterationProfile(
    linear_s=(0.0, *(interpolate_ms(tokens) / 1e3 for tokens in range(8, 2049, 8))),
    slope_s=98.5e-6,
    prefill_base_s=358e-6,
    prefill_token_s=2.18e-6,
    prefill_work_s=5.16e-9,
    decode_base_s=902e-6,
    decode_request_s=1.86e-6,
    decode_context_s=132e-9,
    host_sequence_s=10e-6,
)
STRATEGIES = {
    "taichi": (get_strategy("taichi"), ((2, 256), (2, 48))),
    "taichi, round robin": (get_strategy("taichi").vary(placement="round_robin"), ((1, 256), (2, 48))),
    "architecture alone": (get_strategy("taichi").vary(placement="round_robin", flows=False), ((2, 256), (2, 48))),
    "aggregated": (get_strategy("aggregated"), ((3, 96),)),
    "aggregated, round robin": (get_strategy("aggregated").vary(placement="round_robin"), ((3, 96),)),
    "aggregated, least work": (get_strategy("aggregated").vary(placement="least_work"), ((3, 96),)),
    "disaggregated": (get_strategy("disaggregated"), ((2, 2048), (2, 0))),
    "sluice": (get_strategy("sluice"), ((3, 2048),)),
    "dynaserve": (replace(get_strategy("dynaserve"), policies=DynaServeRules(cuts_prompts=False)), ((3, 2048),)),
    "ecoserve": (get_strategy("ecoserve"), ((3, 2048),)),
    "disaggregated, 1:3": (get_strategy("disaggregated"), ((1, 2048), (3, 0))),
}
SLO = Slo(ttft_s=1.5, tpot_s=0.045)


def make_engines(shape, *, blocks=60, max_num_seqs=12, **changes):
    return [
        EngineSetup(
            engine_id=EngineId(f"{role.value[0]}{chunk}-{number}"),
            profile=A100_14B,
            role=role,
            chunk_size_tokens=chunk,
            kv_blocks_total=blocks,
            kv_bytes_per_token=196_608,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=2048,
            **changes,
        )
        for (count, chunk), role in zip(shape, (P, D), strict=False)
        for number in range(count)
    ]


def make_arrivals(rng, *, number=40, rate=6.0, longest_prompt=300, longest_output=60, slos=(SLO,), priorities=(0,)):
    at_s, arrivals = 0.0, []
    for _ in range(number):
        at_s += rng.expovariate(rate)
        arrivals.append(
            Arrival(
                at_s=at_s,
                prompt_tokens=rng.randint(1, longest_prompt),
                output_tokens=rng.choice((1, 2, rng.randint(1, longest_output))),
                slo=rng.choice(slos),
                priority=rng.choice(priorities),
            )
        )
    return arrivals


def run(cell, arrivals):
    simulation = Simulation(cell, arrivals)
    assert simulation.run()
    return simulation


def assert_equal_to_naive(cell, arrivals):
    fast, naive = run(cell, arrivals), NaiveSimulation(cell, arrivals).run()
    for ours, theirs in zip(fast.requests, naive.requests, strict=True):
        assert (ours.state is RequestState.REJECTED) == theirs.is_rejected
        if theirs.is_rejected:
            continue
        assert len(theirs.tokens) == theirs.arrival.output_tokens
        assert ours.first_token_s == pytest.approx(theirs.first_s, abs=1e-9)
        assert ours.last_token_s == pytest.approx(theirs.tokens[-1], abs=1e-9)
        assert (ours.num_moves, ours.num_preemptions) == (theirs.moves, theirs.preemptions)
    return fast


@pytest.mark.parametrize("name", STRATEGIES)
@example(
    seed=1327,
    rate=25.0,
    blocks=26,
    options=SimOptions(counts_decodes=False),
    rejection=EarlyRejection.OFF,
    shared=False,
)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rate=st.sampled_from((2.0, 8.0, 25.0)),
    blocks=st.sampled_from((26, 60, 400)),
    options=st.builds(
        SimOptions, no_grant=st.sampled_from(NoGrant), ttft_end=st.sampled_from(TtftEnd), counts_decodes=st.booleans()
    ),
    rejection=st.sampled_from(EarlyRejection),
    shared=st.booleans(),
)
def test_the_fast_simulator_agrees_with_the_plain_one(name, seed, rate, blocks, options, rejection, shared):
    rng = random.Random(seed)
    strategy, shape = STRATEGIES[name]
    slos = (SLO, Slo(ttft_s=0.4, tpot_s=0.03), Slo(ttft_s=9.0, tpot_s=0.2))
    arrivals = make_arrivals(rng, rate=rate, slos=slos, priorities=(0, 0, 1, -1))
    link = TransferLink(name="switch" if shared else "", speed=LinkSpeed(bytes_per_s=rng.choice((1e8, 1e9, 150e9))))
    cell = Cell(
        engines=make_engines(shape, blocks=blocks, link=link),
        strategy=strategy,
        parameters=StrategyParameters(
            early_rejection=rejection,
            watermark=rng.choice((0.5, 0.95)),
            prefill_batch_tokens=8 * blocks,
            grant_wait_s=rng.choice((0.3, 3.0)),
        ),
        options=options,
        seed=seed,
    )
    assert_equal_to_naive(cell, arrivals)


def test_moves_of_every_cause_and_preemptions_are_among_what_is_compared():
    strategy, shape = STRATEGIES["taichi"]
    seen, num_preemptions = set(), 0
    for seed in range(4):
        rng = random.Random(seed)
        cell = Cell(
            engines=make_engines(shape, blocks=40),
            strategy=strategy,
            parameters=StrategyParameters(watermark=0.5),
            seed=seed,
        )
        fast = assert_equal_to_naive(cell, make_arrivals(rng, rate=25.0, number=100))
        seen |= {cause for cause, number in fast.num_moves.items() if number}
        num_preemptions += sum(request.num_preemptions for request in fast.requests)
    assert {cause.value for cause in seen} == {"prefill_done", "degrade", "backflow"}
    assert num_preemptions > 0


def test_wait_at_one_engine_is_that_of_a_queue_with_constant_service():
    """M/D/1: mean wait is rho / (2 (1 - rho)) services, within 3 %."""
    prompt_tokens, utilization = 512, 0.5
    service_s = A100_14B.estimate_iteration_s(prompt_tokens, 1, prompt_tokens, prompt_tokens**2 / 2, 0, 0)
    rng, at_s, arrivals = random.Random(1), 0.0, []
    for _ in range(30_000):
        at_s += rng.expovariate(utilization / service_s)
        arrivals.append(Arrival(at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=1, slo=SLO))
    cell = Cell(
        engines=make_engines(((1, prompt_tokens),), blocks=100_000),
        strategy=get_strategy("aggregated").vary(placement="round_robin"),
    )
    waits_s = [request.ttft_s - service_s for request in run(cell, arrivals).requests]
    expected_s = utilization / (2 * (1 - utilization)) * service_s
    assert sum(waits_s) / len(waits_s) == pytest.approx(expected_s, rel=0.03)


def describe(simulation):
    return [(r.first_token_s, r.last_token_s, r.num_moves, r.num_preemptions, r.state) for r in simulation.requests]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("no_grant", NoGrant)
def test_nothing_is_left_when_kv_is_scarce(name, no_grant):
    """``run`` asserts that blocks, queues and tokens add up; here KV is scarce enough that preemption is common."""
    strategy, shape = STRATEGIES[name]
    arrivals = make_arrivals(random.Random(3), number=300, rate=25.0)
    cell = Cell(
        engines=make_engines(shape, blocks=24), strategy=strategy, options=SimOptions(no_grant=no_grant), seed=1
    )
    simulation = run(cell, arrivals)
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)


def test_the_same_seed_gives_the_same_run():
    strategy, shape = STRATEGIES["taichi"]
    arrivals = make_arrivals(random.Random(5), rate=25.0)
    cell = Cell(engines=make_engines(shape, blocks=40), strategy=strategy, seed=7)
    assert describe(run(cell, arrivals)) == describe(run(cell, arrivals))


def test_a_request_alone_takes_one_iteration_per_chunk_and_token():
    """The whole trace: 250 prompt tokens in chunks of 100, then a token per iteration."""
    arrival = Arrival(at_s=1.0, prompt_tokens=250, output_tokens=3, slo=SLO)
    request = run(Cell(engines=make_engines(((1, 100),)), strategy=get_strategy("aggregated")), [arrival]).requests[0]
    estimate = A100_14B.estimate_iteration_s
    chunks = ((100, 0), (100, 100), (50, 200))
    prefill_s = sum(estimate(c, 1, c, c * (ctx + c / 2), 0, 0) for c, ctx in chunks)
    decode_s = estimate(1, 0, 0, 0.0, 1, 251) + estimate(1, 0, 0, 0.0, 1, 252)
    assert request.first_token_s == pytest.approx(1.0 + prefill_s, abs=1e-12)
    assert request.last_token_s == pytest.approx(1.0 + prefill_s + decode_s, abs=1e-12)
    assert request.tpot_s == pytest.approx(decode_s / 2)


def test_decodes_are_never_cut_and_prefills_take_the_rest():
    """An arrival during an iteration waits for the next one, and shares it with the decode."""
    first = Arrival(at_s=0.0, prompt_tokens=64, output_tokens=50, slo=SLO)
    second = Arrival(at_s=0.1, prompt_tokens=150, output_tokens=1, slo=SLO)
    simulation = run(Cell(engines=make_engines(((1, 100),)), strategy=get_strategy("aggregated")), [first, second])
    estimate = A100_14B.estimate_iteration_s
    now, decodes = estimate(64, 1, 64, 64 * 32, 0, 0), 0
    while now <= 0.1:
        decodes += 1
        now += estimate(1, 0, 0, 0.0, 1, 64 + decodes)
    now += estimate(100, 1, 99, 99 * 49.5, 1, 64 + decodes + 1)
    now += estimate(52, 1, 51, 51 * (99 + 25.5), 1, 64 + decodes + 2)
    assert simulation.requests[1].first_token_s == pytest.approx(now, abs=1e-12)


def test_transfers_over_a_shared_link_wait_for_one_another():
    bytes_per_s = 196_608 * 1000.0  # 1000 tokens per second
    arrivals = [Arrival(at_s=0.0, prompt_tokens=200, output_tokens=2, slo=SLO) for _ in range(2)]
    times = {}
    for name in ("", "switch"):
        link = TransferLink(name=name, speed=LinkSpeed(bytes_per_s=bytes_per_s, latency_s=0.0))
        cell = Cell(
            engines=make_engines(((2, 2048), (1, 0)), link=link),
            strategy=get_strategy("disaggregated").vary(placement="round_robin"),
        )
        times[name] = sorted(request.tpot_s for request in run(cell, arrivals).requests)
    assert times[""][1] < 0.2 + 0.2
    assert times["switch"][1] == pytest.approx(times["switch"][0] + 0.2, abs=0.03)


@pytest.mark.parametrize("no_grant", NoGrant)
def test_without_a_grant_a_prefill_decodes_in_place_or_waits(no_grant):
    """The only D-heavy engine has room for one request at a time."""
    arrivals = [Arrival(at_s=0.0, prompt_tokens=160, output_tokens=40, slo=SLO) for _ in range(2)]
    big, small = make_engines(((1, 2048), (1, 0)), blocks=100)
    cell = Cell(
        engines=[big, replace(small, kv_blocks_total=15)],
        strategy=get_strategy("taichi"),
        options=SimOptions(no_grant=no_grant, ttft_end=TtftEnd.DECODE_JOIN),
    )
    simulation = run(cell, arrivals)
    first, second = sorted(simulation.requests, key=lambda request: request.last_token_s)
    if no_grant is NoGrant.WAIT:
        assert second.first_token_s >= first.last_token_s
        assert simulation.num_moves[MoveCause.PREFILL_DONE] == 2
    else:
        assert second.first_token_s < first.last_token_s
        assert simulation.num_blocked_moves > 0


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])


def make_full_cell(*, ahead, grant_wait_s=10.0, events=(), decode_blocks=15):
    """A prefill engine, and a decode engine with room for one request at a time."""
    big, small = make_engines(((1, 2048), (1, 0)), blocks=100)
    return Cell(
        engines=[big, replace(small, kv_blocks_total=decode_blocks)],
        strategy=get_strategy("disaggregated"),
        parameters=StrategyParameters(grant_wait_s=grant_wait_s),
        options=SimOptions(schedules_ahead=ahead),
        events=events,
    )


FOUR = [Arrival(at_s=0.01 * number, prompt_tokens=160, output_tokens=40, slo=SLO) for number in range(4)]


@AHEAD
def test_finished_prefills_wait_for_the_decode_engine_with_their_kv_where_it_is(ahead):
    """DistServe, section 4.3: first come, first served, and no decode on the prefill engine."""
    timeline = Timeline()
    simulation = Simulation(make_full_cell(ahead=ahead), FOUR, timeline)
    assert simulation.run()
    assert simulation.num_moves[MoveCause.PREFILL_DONE] == 4
    assert [iteration.num_decodes for iteration in timeline.iterations if iteration.engine_id == "P2048-0"] == [0, 0]
    ends_s = [request.last_token_s for request in simulation.requests]
    begins_s = [start_s for _, _, start_s, _, _, _ in timeline.transfers]
    assert all(begin_s >= end_s for begin_s, end_s in zip(begins_s[1:], ends_s, strict=False))
    assert [transfer[0] for transfer in timeline.transfers] == ["0", "1", "2", "3"]


@AHEAD
def test_a_wait_for_a_grant_ends_with_a_recompute_that_decodes_in_place(ahead):
    simulation = run(make_full_cell(ahead=ahead, grant_wait_s=0.5), FOUR)
    prefill_engine = simulation.engines[0]
    assert prefill_engine.counters.num_completed_prefill_tokens == 4 * 160 + 3 * 161
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)


@AHEAD
def test_prefills_that_wait_go_on_in_place_when_the_decode_engine_dies(ahead):
    events = [FailEvent(at_s=0.6, engine_id=EngineId("D0-0"))]
    simulation = run(make_full_cell(ahead=ahead, events=events), FOUR)
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)
    assert simulation.num_moves[MoveCause.PREFILL_DONE] == 1
    assert max(request.last_token_s for request in simulation.requests) < 5.0, "nobody waits for the time limit"


@AHEAD
def test_prefills_that_wait_on_an_engine_that_dies_are_recovered_elsewhere(ahead):
    one, other, small = make_engines(((2, 2048), (1, 0)), blocks=100)
    cell = replace(
        make_full_cell(ahead=ahead, events=[FailEvent(at_s=0.6, engine_id=one.engine_id)]),
        engines=[one, other, replace(small, kv_blocks_total=15)],
    )
    simulation = run(cell, FOUR)
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), ahead=st.booleans(), blocks=st.sampled_from((26, 40, 90)))
def test_nothing_is_lost_whatever_dies_while_prefills_wait(seed, ahead, blocks):
    rng = random.Random(seed)
    engines = make_engines(((2, 2048), (2, 0)), blocks=blocks)
    events = [FailEvent(at_s=rng.uniform(0.0, 6.0), engine_id=engine.engine_id) for engine in rng.sample(engines, k=2)]
    if {event.engine_id for event in events} == {engine.engine_id for engine in engines[:2]}:
        events.pop()  # somebody must prefill
    cell = Cell(
        engines=engines,
        strategy=get_strategy("disaggregated"),
        parameters=StrategyParameters(grant_wait_s=rng.choice((0.05, 0.5, 10.0))),
        options=SimOptions(schedules_ahead=ahead),
        events=events,
    )
    simulation = run(cell, make_arrivals(rng, rate=20.0, number=60))
    assert all(request.state is not RequestState.PARKED for request in simulation.requests)


@AHEAD
@pytest.mark.parametrize(("saturation", "batches"), [(400, [350, 300, 500, 60]), (0, [1210])])
def test_prompts_are_batched_whole_until_the_gpu_is_saturated(ahead, saturation, batches):
    """DistServe, section 4.3. The first prompt runs alone, so that the others wait together."""
    sizes = (10, 150, 200, 300, 500, 60)
    arrivals = [Arrival(at_s=0.001 * n, prompt_tokens=size, output_tokens=1, slo=SLO) for n, size in enumerate(sizes)]
    cell = Cell(
        engines=make_engines(((1, 2048), (1, 0)), blocks=400),
        strategy=get_strategy("disaggregated"),
        parameters=StrategyParameters(prefill_batch_tokens=saturation),
        options=SimOptions(schedules_ahead=ahead, message_s=0.0),
    )
    timeline = Timeline()
    assert Simulation(cell, arrivals, timeline).run()
    assert [iteration.prefill_tokens for iteration in timeline.iterations] == [10, *batches]


def test_a_request_that_no_engine_can_hold_is_rejected():
    arrivals = [Arrival(at_s=0.0, prompt_tokens=900, output_tokens=200, slo=SLO)]
    simulation = run(Cell(engines=make_engines(((2, 256),)), strategy=get_strategy("aggregated")), arrivals)
    assert simulation.requests[0].state is RequestState.REJECTED
    assert not simulation.requests[0].has_met_slo


@pytest.mark.parametrize("name", ["taichi", "aggregated", "disaggregated"])
def test_a_failed_engines_requests_end_elsewhere(name):
    strategy, shape = STRATEGIES[name]
    arrivals = make_arrivals(random.Random(2), number=150, rate=12.0)
    engines = make_engines(shape, blocks=200)
    events = [FailEvent(at_s=4.0, engine_id=engines[0].engine_id), FailEvent(at_s=6.0, engine_id=engines[-1].engine_id)]
    simulation = run(Cell(engines=engines, strategy=strategy, events=events), arrivals)
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)
    num_lost = sum(engine.counters.num_lost_prefill_tokens for engine in simulation.engines if engine.is_dead)
    # The engine that dies in the midst of prompts is one of Disaggregated's for decodes alone.
    assert (num_lost > 0) == (name != "disaggregated")
    assert {engine.engine_id for engine in simulation.engines if engine.is_dead} == {e.engine_id for e in events}


def test_an_added_engine_takes_requests():
    engines = make_engines(((2, 96),), blocks=200)
    arrivals = make_arrivals(random.Random(2), number=200, rate=12.0)
    events = [AddEngineEvent(at_s=5.0, setup=replace(engines[1], engine_id=EngineId("late")))]
    cell = Cell(engines=engines[:1], strategy=get_strategy("aggregated"), events=events)
    late = run(cell, arrivals).engines[1]
    assert late.counters.num_output_tokens > 0


def test_roles_flip_and_sliders_change_under_load():
    """P-heavy and D-heavy swap: nothing is lost, and first decodes go to what is D-heavy now."""
    engines = make_engines(((1, 256), (1, 48)), blocks=400)
    prefill, decode = engines
    events = [
        ConfigureEvent(at_s=3.0, engine_id=prefill.engine_id, role=D, chunk_size_tokens=0),
        ConfigureEvent(at_s=3.0, engine_id=decode.engine_id, role=P, chunk_size_tokens=512),
    ]
    arrivals = make_arrivals(random.Random(2), number=150, rate=12.0)
    cell = Cell(engines=engines, strategy=get_strategy("taichi"), events=events)
    simulation = run(cell, arrivals)
    after = [r for r in simulation.requests if r.arrival_s > 4.0 and r.output_tokens > 1]
    assert after
    assert {request.target for request in after if request.num_moves} == {prefill.engine_id}


def test_a_drained_engine_hands_its_decodes_over():
    engines = make_engines(((2, 96),), blocks=400)
    drain = ConfigureEvent(at_s=3.0, engine_id=engines[0].engine_id, role=P, chunk_size_tokens=96, is_draining=True)
    arrivals = make_arrivals(random.Random(2), number=100, rate=12.0)
    simulation = run(Cell(engines=engines, strategy=get_strategy("aggregated"), events=[drain]), arrivals)
    assert simulation.num_moves[MoveCause.DRAIN] > 0
    late = [request for request in simulation.requests if request.arrival_s > 3.0]
    assert {request.target for request in late} == {engines[1].engine_id}


def test_a_chunk_size_of_zero_sends_unstarted_prompts_back():
    engines = make_engines(((2, 48),), blocks=400)
    stop = ConfigureEvent(at_s=0.1, engine_id=engines[0].engine_id, role=D, chunk_size_tokens=0)
    arrivals = [Arrival(at_s=0.0, prompt_tokens=300, output_tokens=2, slo=SLO) for _ in range(8)]
    simulation = run(Cell(engines=engines, strategy=get_strategy("aggregated"), events=[stop]), arrivals)
    per_engine = [engine.counters.num_completed_prefill_tokens for engine in simulation.engines]
    assert per_engine == [300, 7 * 300]


def test_giving_up_needs_more_misses_than_allowed():
    arrivals = make_arrivals(random.Random(1), number=50, slos=(Slo(ttft_s=1e-6, tpot_s=1.0),))
    cell = Cell(engines=make_engines(((1, 96),), blocks=400), strategy=get_strategy("aggregated"))
    assert not Simulation(cell, arrivals).run(most_missed=49)
    assert Simulation(cell, arrivals).run(most_missed=50)


def test_arrivals_out_of_order_are_refused():
    arrivals = [Arrival(at_s=at_s, prompt_tokens=1, output_tokens=1, slo=SLO) for at_s in (1.0, 0.5)]
    with pytest.raises(ValueError, match=r"request 1 at 0.5 s after one at 1.0 s"):
        Simulation(Cell(engines=make_engines(((1, 96),)), strategy=get_strategy("aggregated")), arrivals)


def test_an_engine_twice_is_refused():
    engines = make_engines(((1, 96),)) * 2
    with pytest.raises(ValueError, match="is there twice"):
        Simulation(Cell(engines=engines, strategy=get_strategy("aggregated")), [])


@st.composite
def cluster_events(draw, engines):
    """Failures, additions, flips, drains of all engines but the first, which keeps serving."""
    events = []
    for number, setup in enumerate(engines[1:]):
        at_s = draw(st.floats(0.0, 8.0))
        kind = draw(st.sampled_from(("fail", "flip", "drain", "none")))
        if kind == "fail":
            events.append(FailEvent(at_s=at_s, engine_id=setup.engine_id))
        elif kind != "none":
            change = ConfigureEvent(
                at_s=at_s,
                engine_id=setup.engine_id,
                role=P if setup.role is D else D,
                chunk_size_tokens=draw(st.sampled_from((0, 32, 300))),
                is_draining=kind == "drain",
            )
            events.append(change)
            if draw(st.booleans()):
                events.append(
                    replace(change, at_s=at_s + 2.0, role=setup.role, chunk_size_tokens=64, is_draining=False)
                )
        if draw(st.booleans()):
            late = replace(setup, engine_id=EngineId(f"late-{number}"))
            events.append(AddEngineEvent(at_s=draw(st.floats(0.0, 8.0)), setup=late))
    return events


@pytest.mark.parametrize("name", ["taichi", "aggregated", "aggregated, least work", "disaggregated", "ecoserve"])
@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), no_grant=st.sampled_from(NoGrant))
def test_every_request_ends_whatever_happens_to_the_cluster(name, data, seed, no_grant):
    strategy, shape = STRATEGIES[name]
    slow = TransferLink(speed=LinkSpeed(bytes_per_s=1e8))  # transfers take long enough to be hit
    engines = make_engines(shape, blocks=60, link=slow)
    cell = Cell(
        engines=engines,
        strategy=strategy,
        options=SimOptions(no_grant=no_grant),
        events=data.draw(cluster_events(engines)),
        seed=seed,
    )
    simulation = run(cell, make_arrivals(random.Random(seed), number=60, rate=10.0))
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)


OPEN_AT_2_S = ConfigureEvent(at_s=2.0, engine_id=EngineId("P96-0"), role=Role.PREFILL_HEAVY, chunk_size_tokens=96)


def test_what_waits_in_an_overfull_queue_goes_by_urgency_as_at_the_router():
    """One pass looks at 256 requests; the most urgent of 301 came last."""
    arrivals = [Arrival(at_s=0.001 * n, prompt_tokens=96, output_tokens=1, slo=SLO) for n in range(300)]
    arrivals.append(Arrival(at_s=1.0, prompt_tokens=96, output_tokens=1, slo=SLO, priority=1))
    engines = [replace(make_engines(((1, 96),), blocks=7)[0], chunk_size_tokens=0)]
    cell = Cell(engines=engines, strategy=get_strategy("aggregated"), events=[OPEN_AT_2_S])
    requests = run(cell, arrivals).requests
    assert min(requests, key=lambda request: request.first_token_s) is requests[-1]


def test_a_request_that_came_back_waits_its_time_anew_as_at_the_router():
    """The engine gives the second prompt back at 0.5 s or a little later, and takes it again at 2 s."""
    arrivals = [
        Arrival(at_s=at_s, prompt_tokens=tokens, output_tokens=1, slo=SLO) for at_s, tokens in ((0.0, 4000), (0.1, 96))
    ]
    close = replace(OPEN_AT_2_S, at_s=0.5, chunk_size_tokens=0)
    cell = Cell(
        engines=make_engines(((1, 96),), blocks=400),
        strategy=get_strategy("aggregated"),
        events=[close, OPEN_AT_2_S],
        options=SimOptions(wait_limit_s=1.8),
    )
    second = run(cell, arrivals).requests[1]
    assert second.state is RequestState.FINISHED
    assert second.first_token_s > 2.0
