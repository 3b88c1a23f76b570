"""FlowPrefill: its order, its batches, what preempts what, and what that is worth in the simulator."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulation import A100_14B, SLO, make_arrivals, make_engines, run

from sluice_core.records import RequestId, Role, Slo
from sluice_core.scheduling.engine_policy import EngineBatch
from sluice_core.scheduling.prefill_order.deadline_selection import DeadlineSelector
from sluice_core.scheduling.prefill_order.event_driven_selection import EventDrivenSelector
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor, QueuedPrefill, SlackOrder
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import Arrival, Cell, ConfigureEvent, SimOptions
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import PrefillOrder, StrategyParameters

FLOWPREFILL, AGGREGATED = get_strategy("flowprefill"), get_strategy("aggregated")
CHUNK = 512
BATCH = EngineBatch(chunk_size_tokens=CHUNK, last_chunk_size_tokens=CHUNK, max_batch_tokens=2048, block_size_tokens=16)


def predict_s(tokens, computed=0):
    predictor = PrefillPredictor(A100_14B)
    predictor.renew(CHUNK, 0)
    left = tokens - computed
    return predictor.predict_s(left, left * (computed + left / 2))


def make_selector(budget=4096, **options):
    """Make a selector, and what adds a prompt to it in few words."""
    selector = EventDrivenSelector(PrefillPredictor(A100_14B), budget, **options)

    def put(name, ttft_slo_s, tokens=100, arrival_s=0.0, priority=0):
        selector.add(RequestId(name), arrival_s=arrival_s, ttft_slo_s=ttft_slo_s, priority=priority, tokens=tokens)

    return selector, put


def test_a_prediction_is_the_time_of_the_iterations_of_a_prompt():
    # Two full iterations beside nothing: what the profile says of them, within the secant's error.
    exact_s = sum(
        A100_14B.estimate_iteration_s(CHUNK, 1, CHUNK, CHUNK * (context + CHUNK / 2), 0, 0) for context in (0, CHUNK)
    )
    assert predict_s(2 * CHUNK) == pytest.approx(exact_s, rel=0.02)
    assert predict_s(2 * CHUNK, CHUNK) < predict_s(2 * CHUNK) / 1.9


def test_a_prediction_follows_the_model_up_and_down():
    predictor = PrefillPredictor(A100_14B)
    times_s = []
    for num_decodes, has_changed in ((0, True), (0, False), (200, True), (0, True)):
        assert predictor.renew(CHUNK, num_decodes) is has_changed
        times_s.append(predictor.predict_s(CHUNK, 0.0))
    assert times_s[0] == times_s[1] == times_s[3] < times_s[2]


@pytest.mark.parametrize(
    ("slos_s", "order"),
    [
        ((3.0, 1.0, 2.0), "bca"),  # all in time: by deadline
        ((3.0, 0.01, 2.0), "cab"),  # b cannot be in time
        ((0.02, 0.01, 2.0), "cba"),  # of late ones the earliest first
        ((math.inf, 0.01, 2.0), "cab"),  # no objective: before those that are late
    ],
    ids=["in time", "one late", "two late", "no objective"],
)
def test_prompts_go_by_deadline_and_late_ones_last(slos_s, order):
    selector, put = make_selector(budget=0)
    for name, slo_s in zip("abc", slos_s, strict=True):
        put(name, slo_s)
    served = []
    while True:
        selected = selector.select(0.0, BATCH)
        if not selected:
            break
        served += selected
        selector.remove(selected[0])
    assert "".join(served) == order


def test_formula_3_serves_the_late_one_with_the_latest_deadline_first():
    selector, put = make_selector(budget=0, order=PrefillOrder.FORMULA_3)
    put("a", 0.02)
    put("b", 0.01)
    assert selector.select(0.0, BATCH) == ["a"]


@pytest.mark.parametrize(
    ("order", "served"),
    [
        (PrefillOrder.S_EDF, ["timely", "passed", "hopeless"]),
        (PrefillOrder.FORMULA_3, ["timely", "hopeless", "passed"]),
        (PrefillOrder.D_EDF, ["hopeless", "timely", "passed"]),
        (PrefillOrder.EDF, ["passed", "hopeless", "timely"]),
        (PrefillOrder.CHUNKED_EDF, ["passed", "hopeless", "timely"]),
    ],
)
def test_orders_differ_in_who_counts_as_late(order, served):
    """One deadline has passed, one will be missed, one can be met (section 6.3)."""
    slacks = SlackOrder(PrefillPredictor(A100_14B), order)
    deadlines_s = {"passed": 0.9, "hopeless": 1.0 + predict_s(400) / 2, "timely": 9.0}
    for number, (name, at_s) in enumerate(deadlines_s.items()):
        slacks.add(
            QueuedPrefill(RequestId(name), number=number, deadline_s=at_s, urgency_s=at_s, allowed_s=1.0, tokens=400)
        )
    slacks.update(1.0, CHUNK, 0)
    assert [prefill.request_id for prefill in slacks] == served


def test_a_deadline_selector_fills_an_iteration_by_deadline_whatever_has_started():
    selector = DeadlineSelector(PrefillPredictor(A100_14B), PrefillOrder.CHUNKED_EDF)
    for name, slo_s, tokens in (("a", 30.0, 1500), ("b", 20.0, 500), ("c", 40.0, 500), ("d", 50.0, 9)):
        selector.add(RequestId(name), arrival_s=0.0, ttft_slo_s=slo_s, priority=0, tokens=tokens)
    assert selector.select(99.0, BATCH) == ["b", "a", "c"]  # an iteration holds 2048 tokens at most
    selector.advance(RequestId("a"), 512)
    assert selector.select(99.0, BATCH) == ["b", "a", "c", "d"]
    assert selector.rank_started() == ["a"]
    selector.remove(RequestId("b"))
    selector.remove(RequestId("b"))
    assert selector.select(99.0, BATCH)[0] == "a"


def test_a_prompt_is_late_from_the_moment_on_at_which_it_cannot_be_in_time():
    moment_s = 1.0 - predict_s(100)
    for now, first in ((moment_s - 1e-6, "soon"), (moment_s, "later")):
        selector, put = make_selector(budget=0)
        put("soon", 1.0)
        put("later", 50.0)
        assert selector.select(now, BATCH) == [first]


def test_a_level_of_priority_is_worth_ten_seconds_and_makes_nobody_late():
    selector, put = make_selector(budget=0)
    put("a", 15.0)
    put("b", 20.0, priority=1)
    assert selector.select(0.0, BATCH) == ["b"]


def test_a_batch_takes_by_deadline_what_stays_below_its_budget():
    selector, put = make_selector(budget=1001)
    for slo_s, (name, tokens) in enumerate((("a", 400), ("b", 601), ("c", 500), ("d", 100), ("e", 1)), 50):
        put(name, float(slo_s), tokens)
    assert selector.select(0.0, BATCH) == ["a", "c", "d"]


def test_a_batch_ends_before_the_deadline_of_its_head():
    both_s = predict_s(800)
    for slo_s, batch in ((both_s * 1.01, ["head", "other"]), (both_s * 0.99, ["head"])):
        selector, put = make_selector()
        put("head", slo_s, 400)
        put("other", 60.0, 400)
        assert selector.select(0.0, BATCH) == batch


def test_a_started_prompt_is_preempted_resumed_and_not_batched():
    """The example of section 5.2, Figure 8, with a third prompt."""
    selector, put = make_selector()
    put("a", 60.0, 3000)
    assert selector.select(0.0, BATCH) == ["a"]
    selector.advance(RequestId("a"), 512)
    put("b", 2.0, 300)
    put("c", 50.0, 300)
    assert selector.select(0.1, BATCH) == ["b", "c"]
    assert (selector.num_suspended, selector.rank_started()) == (1, ["a"])
    selector.remove(RequestId("b"))
    selector.remove(RequestId("c"))
    assert selector.select(0.3, BATCH) == ["a"]
    assert selector.num_suspended == 1
    selector.remove(RequestId("a"))
    assert selector.select(0.4, BATCH) == []


def test_what_of_a_preempted_batch_has_not_started_waits_again():
    selector, put = make_selector()
    put("a", 50.0, 300)
    put("b", 60.0, 300)
    assert selector.select(0.0, BATCH) == ["a", "b"]
    put("urgent", predict_s(100) * 1.1)
    assert selector.select(0.0, BATCH) == ["urgent"]
    assert selector.num_suspended == 0  # nobody had started
    selector.remove(RequestId("urgent"))
    assert selector.select(0.1, BATCH) == ["a", "b"]


def test_nothing_is_reconsidered_without_an_arrival_or_an_end():
    selector, put = make_selector(budget=0)
    put("soon", 1.0, 600)
    put("later", 60.0)
    assert selector.select(0.0, BATCH) == ["soon"]
    selector.advance(RequestId("soon"), 512)
    assert selector.select(30.0, BATCH) == ["soon"]  # long late, but nothing has happened
    put("other", 90.0)
    assert selector.select(30.0, BATCH) == ["later"]


def test_an_unknown_prompt_may_leave():
    selector, _ = make_selector()
    selector.remove(RequestId("nobody"))
    assert selector.select(0.0, BATCH) == []


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(1, 4000), st.integers(0, 3)), min_size=1, max_size=12),
    steps=st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 11), st.booleans()), max_size=20),
    latest=st.booleans(),
)
def test_the_order_is_that_of_a_plain_sort_whatever_happens(prompts, steps, latest):
    order = SlackOrder(PrefillPredictor(A100_14B), PrefillOrder.FORMULA_3 if latest else PrefillOrder.S_EDF)
    queued = []
    for number, (slo_s, tokens, priority) in enumerate(prompts):
        prefill = QueuedPrefill(
            RequestId(str(number)),
            number=number,
            deadline_s=slo_s,
            urgency_s=slo_s - priority,
            allowed_s=slo_s - priority,
            tokens=tokens,
        )
        order.add(prefill)
        queued.append(prefill)
    now = 0.0
    for later_s, index, ends in steps:
        now += later_s
        prefill = queued[index % len(queued)] if queued else None
        if prefill is not None:
            order.remove(prefill)
            if ends:
                queued.remove(prefill)
            else:
                prefill.num_computed_tokens = min(prefill.tokens - 1, prefill.num_computed_tokens + 300)
                order.add(prefill)
        order.update(now, CHUNK, 0)

        def key(one, now=now):
            is_late = one.deadline_s - predict_s(one.tokens, one.num_computed_tokens) <= now
            return is_late, -one.urgency_s if is_late and latest else one.urgency_s, one.number

        assert list(order) == sorted(queued, key=key)
        assert order.first() is (min(queued, key=key) if queued else None)


# --- in the simulator ----------------------------------------------------------------------------------------------


def count_suspended(simulation):
    return sum(engine.prefills._selector.num_suspended for engine in simulation.engines)


SLOS = (Slo(ttft_s=0.6, tpot_s=1.0), Slo(ttft_s=8.0, tpot_s=1.0))


def make_two_classes(rate, number=400, seed=5):
    """Many short prompts with a tight objective, and some long ones with a loose one (section 6.1, Table 2)."""
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(number):
        at_s += rng.expovariate(rate)
        is_long = rng.random() < 0.2
        tokens = rng.randint(2000, 8000) if is_long else rng.randint(50, 900)
        arrivals.append(Arrival(at_s=at_s, prompt_tokens=tokens, output_tokens=1, slo=SLOS[is_long]))
    return arrivals


@pytest.mark.parametrize("schedules_ahead", [False, True], ids=["in step", "ahead"])
def test_started_prefills_make_way_and_more_requests_meet_their_objectives(schedules_ahead):
    engines = make_engines(((1, CHUNK),), blocks=4000, max_num_seqs=64)
    options = SimOptions(schedules_ahead=schedules_ahead)
    attainments = {}
    for strategy in (AGGREGATED, FLOWPREFILL):
        simulation = run(Cell(engines=engines, strategy=strategy, options=options), make_two_classes(rate=4.0))
        attainments[strategy.name] = sum(r.has_met_slo for r in simulation.requests) / len(simulation.requests)
    assert count_suspended(simulation) >= 20
    assert sum(engine.counters.num_preemptions for engine in simulation.engines) == 0
    computed = sum(engine.counters.num_prefill_tokens for engine in simulation.engines)
    assert computed == sum(request.prompt_tokens for request in simulation.requests)  # nothing twice
    assert attainments["flowprefill"] > 0.9
    assert attainments["aggregated"] < 0.6


def test_urgent_prompts_are_served_in_time_however_many_late_ones_wait():
    """The late ones would fill the KV cache twice; no prompt waits at the router for them to leave."""
    engines = make_engines(((1, CHUNK),), blocks=1500, max_num_seqs=64)
    simulation = run(Cell(engines=engines, strategy=FLOWPREFILL), make_two_classes(rate=12.0))
    met = {slo: [r.has_met_slo for r in simulation.requests if r.slo == slo] for slo in SLOS}
    assert sum(met[SLOS[1]]) < 0.5 * len(met[SLOS[1]])  # long ones are given up
    assert sum(met[SLOS[0]]) > 0.9 * len(met[SLOS[0]])


@pytest.mark.parametrize("shape", [((3, 96),), ((2, 256), (2, 0)), ((2, 256), (2, 48))], ids=["one", "PD", "hybrid"])
@pytest.mark.parametrize("schedules_ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("order", PrefillOrder)
def test_everybody_is_served_with_too_few_blocks(schedules_ahead, shape, order):
    """``Simulation.check`` finds what is lost, left over or counted twice."""
    peak_blocks = 0
    for seed in range(2):
        arrivals = make_arrivals(random.Random(seed), number=40, rate=12.0, slos=(*SLOS, Slo(ttft_s=0.1, tpot_s=0.05)))
        cell = Cell(
            engines=make_engines(shape, blocks=24),
            strategy=FLOWPREFILL,
            parameters=StrategyParameters(prefill_order=order),
            options=SimOptions(schedules_ahead=schedules_ahead),
            seed=seed,
        )
        simulation = run(cell, arrivals)
        fitting = [r for r in simulation.requests if r.prompt_tokens + r.output_tokens <= 24 * 16]
        assert all(request.state is RequestState.FINISHED for request in fitting)
        peak_blocks = max(peak_blocks, *(engine.counters.peak_blocks for engine in simulation.engines))
    assert peak_blocks == 24


@pytest.mark.parametrize(
    ("seed", "schedules_ahead", "order"),
    [(12, False, PrefillOrder.EDF), (85, True, PrefillOrder.S_EDF), (85, True, PrefillOrder.D_EDF)],
    ids=["edf, in step", "s_edf, ahead", "d_edf, ahead"],
)
def test_who_has_started_goes_on_where_a_recompute_waits_for_the_blocks_that_it_holds(seed, schedules_ahead, order):
    """No prompt overtakes the recompute: a selected one that has not started waits too, although it would fit."""
    slos = (SLO, Slo(ttft_s=0.4, tpot_s=0.03), Slo(ttft_s=9.0, tpot_s=0.2))
    priorities = (0, 0, 1, -1)
    arrivals = make_arrivals(
        random.Random(seed), number=25, rate=8.0, longest_output=200, slos=slos, priorities=priorities
    )
    cell = Cell(
        engines=make_engines(((1, 64),), blocks=32, max_num_seqs=6),
        strategy=FLOWPREFILL,
        parameters=StrategyParameters(prefill_order=order, prefill_batch_tokens=600),
        options=SimOptions(schedules_ahead=schedules_ahead),
    )
    simulation = run(cell, arrivals)
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)
    assert any(request.num_preemptions for request in simulation.requests)


@pytest.mark.parametrize("schedules_ahead", [False, True], ids=["in step", "ahead"])
def test_an_engine_that_drains_gives_back_what_has_not_started(schedules_ahead):
    arrivals = [Arrival(at_s=0.01 * number, prompt_tokens=300, output_tokens=4, slo=SLOS[1]) for number in range(20)]
    cell = Cell(
        engines=make_engines(((2, 64),), blocks=400),
        strategy=FLOWPREFILL,
        options=SimOptions(schedules_ahead=schedules_ahead),
    )
    first = cell.engines[0].engine_id
    drain = ConfigureEvent(at_s=0.4, engine_id=first, role=Role.PREFILL_HEAVY, chunk_size_tokens=64, is_draining=True)
    simulation = run(replace(cell, events=(drain,)), arrivals)
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)
    # 64 tokens take 24.5 ms: the fourth prompt has started by then.
    assert [engine.counters.num_prefill_tokens // 300 for engine in simulation.engines] == [4, 16]


def test_a_batch_of_short_prompts_is_one_iteration():
    arrivals = [Arrival(at_s=0.0, prompt_tokens=64, output_tokens=1, slo=SLOS[1]) for _ in range(8)]
    for budget, num_iterations in ((65, 8), (129, 5), (4096, 2)):
        cell = Cell(
            engines=make_engines(((1, CHUNK),)),
            strategy=FLOWPREFILL,
            parameters=StrategyParameters(batch_token_budget=budget),
        )
        # The first is alone: nobody else was there when its iteration began.
        assert run(cell, arrivals).engines[0].counters.num_iterations == num_iterations
