"""Engines that schedule an iteration while another runs: when things are seen, and what a move takes."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_simulation import A100_14B, SLO, STRATEGIES, make_arrivals, make_engines, run

from sluice_core.latency.transfer import LinkSpeed
from sluice_core.records import MoveCause, Slo
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.engine.gap_histogram import GapHistogram
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.sim_setup import Arrival, Cell, ConfigureEvent, FailEvent, SimOptions, TransferLink
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy

AHEAD = SimOptions(schedules_ahead=True)
estimate = A100_14B.estimate_iteration_s


def list_batches(cell, arrivals):
    timeline = Timeline()
    simulation = Simulation(cell, arrivals, timeline)
    simulation.run()
    batches = {}
    for each in timeline.iterations:
        batches.setdefault(each.engine_id, []).append((each.start_s, each.num_decodes, each.prefill_tokens))
    return simulation, batches


def test_an_arrival_waits_for_the_iteration_under_way_and_for_the_one_scheduled_already():
    """The second prompt comes during iteration 1 and is in iteration 3; in iteration 2 the first one decodes alone."""
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=150, output_tokens=9, slo=SLO),
        Arrival(at_s=0.001, prompt_tokens=40, output_tokens=1, slo=SLO),
    ]
    cell = Cell(engines=make_engines(((1, 200),)), strategy=get_strategy("aggregated"), options=AHEAD)
    simulation, batches = list_batches(cell, arrivals)
    assert [batch[1:] for batch in batches["P200-0"][:4]] == [(0, 150), (1, 0), (1, 40), (1, 0)]
    first_s = estimate(150, 1, 150, 150 * 75, 0, 0)
    second_s = estimate(1, 0, 0, 0.0, 1, 151)
    third_s = estimate(41, 1, 40, 40 * 20, 1, 152)
    assert simulation.requests[1].first_token_s == pytest.approx(first_s + second_s + third_s, abs=1e-12)


def test_an_arrival_at_an_engine_that_will_idle_is_scheduled_at_once():
    """Nothing was scheduled ahead, because nothing was there."""
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=150, output_tokens=1, slo=SLO),
        Arrival(at_s=0.001, prompt_tokens=40, output_tokens=1, slo=SLO),
    ]
    cell = Cell(engines=make_engines(((1, 200),)), strategy=get_strategy("aggregated"), options=AHEAD)
    _, batches = list_batches(cell, arrivals)
    assert [batch[1:] for batch in batches["P200-0"]] == [(0, 150), (0, 40)]


def test_blocks_that_an_iteration_frees_are_not_in_the_next_one():
    """Twelve blocks, of which a long prompt needs seven; the first ends with iteration 1, the short one decodes on."""
    (setup,) = make_engines(((1, 200),), blocks=12)
    engine = SimEngine(setup, ChunkedPrefillPolicy(), GapHistogram(), [], schedules_ahead=True)
    lengths = ((100, 2), (30, 9), (100, 1))
    for index, (prompt, output) in enumerate(lengths):
        arrival = Arrival(at_s=0.0, prompt_tokens=prompt, output_tokens=output, slo=SLO)
        engine.submit(SimRequest(index, arrival), RequestKind.NEW_PROMPT)
    now, batches = 0.0, []
    for _ in range(4):
        now += engine.start(now)
        batches.append((engine.batch.num_decodes, engine.prefills.num_tokens))
        engine.end(now)
    assert batches == [(0, 130), (2, 0), (1, 0), (1, 100)]


def count_ends(times, after_s, before_s):
    return sum(after_s < time_s <= before_s for time_s in times)


@pytest.mark.parametrize(
    ("copies_kv", "num_decoded", "num_ends"),
    [
        # While its blocks are copied it decodes on, and joins with the next iteration of the target.
        pytest.param(True, 5, 1, id="parts"),
        # 1 end of the target's iterations until it pulls, 1 until it notices, 3 until the request joins.
        pytest.param(False, 1, 1 + 1 + 3, id="whole"),
    ],
)
def test_a_move_pauses_the_request_for_as_many_iterations_as_messages_take(copies_kv, num_decoded, num_ends):
    """One engine prefills, the other decodes another request meanwhile; the link takes no time."""
    slo = Slo(ttft_s=9.0, tpot_s=9.0)
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=64, output_tokens=200, slo=slo),
        Arrival(at_s=1.0, prompt_tokens=64, output_tokens=40, slo=slo),
    ]
    link = TransferLink(speed=LinkSpeed(bytes_per_s=1e15, latency_s=0.0))
    cell = Cell(
        engines=make_engines(((1, 2048), (1, 0)), blocks=200, link=link),
        strategy=get_strategy("taichi"),
        options=SimOptions(schedules_ahead=True, copies_kv=copies_kv),
    )
    timeline = Timeline()
    simulation = Simulation(cell, arrivals, timeline)
    simulation.run()
    assert simulation.num_moves[MoveCause.PREFILL_DONE] == 2
    source = [each for each in timeline.iterations if each.engine_id == "P2048-0" and each.start_s >= 1.0]
    # The prefill, then the target's iteration passes, then the iteration that was scheduled already.
    assert [each.num_decodes for each in source][:2] == [0, 1]
    left_s = source[-1].start_s + source[-1].duration_s
    target = [each for each in timeline.iterations if each.engine_id == "D0-0"]
    joined = next(each for each in target if each.num_decodes == 2)
    ends = [each.start_s + each.duration_s for each in target]
    assert count_ends(ends, left_s, joined.start_s) == num_ends
    assert len(source) - 1 >= num_decoded


@pytest.mark.parametrize("copies_kv", [False, True])
@pytest.mark.parametrize("message_s", [0.0, 0.05])
def test_messages_of_a_move_take_their_time(message_s, copies_kv):
    """The target idles, so it does at once what it is told: grant, later pull, and decode."""
    options = SimOptions(schedules_ahead=True, message_s=message_s, copies_kv=copies_kv)
    engines = make_engines(((1, 2048), (1, 0)), blocks=200)
    cell = Cell(engines=engines, strategy=get_strategy("taichi"), options=options)
    arrival = Arrival(at_s=0.0, prompt_tokens=64, output_tokens=60, slo=Slo(ttft_s=9.0, tpot_s=9.0))
    timeline = Timeline()
    simulation = Simulation(cell, [arrival], timeline)
    simulation.run()
    (prefill, *decodes) = [each for each in timeline.iterations if each.engine_id == "P2048-0"]
    granted_s = prefill.start_s + prefill.duration_s + 4 * message_s
    ends = [each.start_s + each.duration_s for each in decodes]
    told_s = granted_s
    if copies_kv:
        # The source offers its blocks when it looks; the target copies them, and the source is told to hand off.
        offered_s = next(end_s for end_s in ends if end_s > granted_s)
        told_s = offered_s + 2 * message_s + simulation.links.transfer_s + 2 * message_s
    assert count_ends(ends, told_s, ends[-1]) == 2
    joined_s = next(each.start_s for each in timeline.iterations if each.engine_id == "D0-0")
    pulled_s = 0.0 if copies_kv else simulation.links.transfer_s
    assert joined_s == pytest.approx(ends[-1] + 2 * message_s + pulled_s, abs=1e-9)


def test_there_is_no_message_before_it_is_sent():
    with pytest.raises(ValueError, match="message_s is -1"):
        SimOptions(message_s=-1.0)


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), rate=st.sampled_from((4.0, 25.0)), blocks=st.sampled_from((26, 60, 400)))
# An idle engine has promised the blocks that a prompt waits for to a move that is cancelled.
@example(seed=41, rate=25.0, blocks=26)
def test_nothing_is_lost_however_scarce_kv_is(name, seed, rate, blocks):
    """``run`` asserts that blocks, queues and tokens add up."""
    strategy, shape = STRATEGIES[name]
    slos = (SLO, Slo(ttft_s=0.4, tpot_s=0.03))
    arrivals = make_arrivals(random.Random(seed), number=80, rate=rate, slos=slos, priorities=(0, 1))
    cell = Cell(engines=make_engines(shape, blocks=blocks), strategy=strategy, options=AHEAD, seed=seed)
    simulation = run(cell, arrivals)
    assert all(
        request.state is RequestState.FINISHED or arrival.prompt_tokens + arrival.output_tokens > blocks * 16
        for request, arrival in zip(simulation.requests, arrivals, strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), at_s=st.floats(0.2, 8.0), victim=st.integers(0, 3), flips=st.booleans())
def test_a_move_survives_the_death_of_either_engine_at_any_step(seed, at_s, victim, flips):
    strategy, shape = STRATEGIES["taichi"]
    engines = make_engines(shape, blocks=60)
    arrivals = make_arrivals(random.Random(seed), number=100, rate=12.0, slos=(Slo(ttft_s=1.5, tpot_s=0.03),))
    events = [FailEvent(at_s=at_s, engine_id=engines[victim].engine_id)]
    if flips:
        flipped = engines[(victim + 1) % 4]
        events.append(
            ConfigureEvent(at_s=at_s / 2, engine_id=flipped.engine_id, role=engines[0].role, chunk_size_tokens=0)
        )
    cell = Cell(engines=engines, strategy=strategy, options=AHEAD, events=events, seed=1)
    simulation = run(cell, arrivals)
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)


@pytest.mark.parametrize(("copies_kv", "num_moves"), [(False, 1), (True, 0)])
def test_a_request_whose_target_dies_during_the_transfer_ends_where_it_began(copies_kv, num_moves):
    """Its KV takes 0.3 s. While it is copied the request decodes on; after its hand-off it is recovered."""
    engines = make_engines(((1, 256), (2, 64)), link=TransferLink(speed=LinkSpeed(bytes_per_s=1e8)))
    cell = Cell(
        engines=engines,
        strategy=get_strategy("taichi"),
        options=SimOptions(schedules_ahead=True, copies_kv=copies_kv),
        events=[FailEvent(at_s=0.25, engine_id=engine.engine_id) for engine in engines[1:]],
    )
    (request,) = run(cell, [Arrival(at_s=0.0, prompt_tokens=160, output_tokens=9, slo=SLO)]).requests
    assert request.state is RequestState.FINISHED
    assert request.num_moves == num_moves
