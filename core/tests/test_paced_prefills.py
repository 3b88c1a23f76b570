"""Prompts that take their time beside decodes near their objective, and those that go behind all others."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_simulation import make_engines
from test_slack_strategy import assign, bind, make_batch, make_decodes, make_prefill, make_table

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, IterationShape, Place, RequestId, Slo
from sluice_core.scheduling.batching.tpot_slack import SCARCE_SHARE
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import NONE_LATE, LatePrefills
from sluice_core.scheduling.engine_state import EngineLoad, get_view
from sluice_core.scheduling.iteration_limits import estimate_chunk_s
from sluice_core.scheduling.prefill_order.deadline_selection import DeadlineSelector
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor
from sluice_core.sim.sim_setup import Arrival, Cell, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import PrefillOrder, StrategyParameters

A100 = load_model_on_gpu("qwen2.5-14b", "a100-80g", 1).profile
H100 = load_model_on_gpu("qwen2.5-14b", "h100-80g", 1).profile
NOW = 10.0


def make_selector(*prompts, order=PrefillOrder.S_EDF):
    """Each prompt: name, seconds to its deadline, tokens."""
    selector = DeadlineSelector(PrefillPredictor(A100), order)
    for name, left_s, tokens in prompts:
        selector.add(RequestId(name), arrival_s=NOW, ttft_slo_s=left_s, priority=0, tokens=tokens)
    selector.select(NOW, make_batch())
    return selector


@pytest.mark.parametrize(
    ("prompts", "pace"),
    [
        ((), 0.0),
        ((("a", 2.0, 1000),), 500.0),
        ((("a", 2.0, 1000), ("b", 4.0, 4000)), 1250.0),
        ((("b", 4.0, 400), ("a", 2.0, 1000)), 500.0),
        ((("a", 2.0, 1000), ("hopeless", 0.01, 1000)), math.inf),
    ],
)
def test_the_pace_is_that_of_the_hardest_deadline_with_all_that_goes_before_it(prompts, pace):
    assert make_selector(*prompts).find_pace(NOW) == pytest.approx(pace)


def test_the_pace_grows_with_time_and_falls_with_what_is_computed():
    selector = make_selector(("a", 2.0, 1000))
    assert selector.find_pace(NOW + 1.0) == pytest.approx(1000.0)
    assert selector.find_pace(NOW + 2.0) == math.inf  # before anybody has found out that it is late
    selector.advance(RequestId("a"), 600)
    assert selector.find_pace(NOW) == pytest.approx(200.0)


def test_late_prompts_are_counted_with_what_is_left_of_them_also_before_the_next_selection():
    selector = make_selector(("hopeless", 0.01, 1000), ("timely", 9.0, 500))
    assert selector.count_late(NOW) == LatePrefills(1, 1000, 500_000.0)
    selector.advance(RequestId("hopeless"), 600)
    assert selector.count_late(NOW) == LatePrefills(1, 400, 400 * (600 + 200.0))
    other = make_selector(("hopeless", 0.01, 1000), ("timely", 9.0, 500))
    other.remove(RequestId("hopeless"))
    assert other.count_late(NOW) == NONE_LATE
    assert selector.count_late(NOW + 9.0) == LatePrefills(2, 900, 400 * 800.0 + 125_000.0)
    assert make_selector(("hopeless", 0.01, 1000), order=PrefillOrder.EDF).count_late(NOW + 9.0) == NONE_LATE


def test_the_next_moment_at_which_a_prompt_becomes_late_is_known():
    selector = make_selector(("soon", 2.0, 1000), ("later", 9.0, 500))
    late_s = selector.find_next_late_s()
    assert NOW < late_s < NOW + 2.0
    assert selector.count_late(late_s - 1e-6) == NONE_LATE
    assert selector.count_late(late_s).tokens == 1000
    assert NOW + 2.0 < selector.find_next_late_s() < NOW + 9.0
    assert make_selector().find_next_late_s() == math.inf


# --- batches ---------------------------------------------------------------------------------------------------------


def bind_near_objective(tpot_slo_s, *prompts, num_decodes=100, profile=H100, **parameters):
    """Make Sluice's engine with decodes that are behind, so that prompts have their share of the objective alone."""
    decodes = make_decodes(*((f"d{number}", NOW - 100 * tpot_slo_s, 100, tpot_slo_s) for number in range(num_decodes)))
    policy = bind(decodes, least_prefill_share=1.0, **parameters)
    policy.bind(decodes, profile)
    selector = policy.make_selector(profile)
    for name, left_s, tokens in prompts:
        selector.add(RequestId(name), arrival_s=NOW, ttft_slo_s=left_s, priority=0, tokens=tokens)
    batch = make_batch(num_decodes=num_decodes, num_new_prompts=len(prompts))
    selector.select(NOW, batch)
    return policy, batch


def get_budget(*args, **options):
    policy, batch = bind_near_objective(*args, **options)
    return policy.limits(NOW, batch).prefill_budget_tokens


@given(
    num_decodes=st.integers(1, 255),
    gpu=st.sampled_from(["a100", "h100"]),
    tokens=st.integers(1, 4000),
    left_s=st.floats(0.3, 20.0),
)
def test_a_chunk_is_the_cheapest_of_those_with_which_prompts_are_in_time(num_decodes, gpu, tokens, left_s):
    profile = {"a100": A100, "h100": H100}[gpu]
    alone_s = profile.estimate_shape_s(IterationShape(num_decodes=num_decodes))
    slo_s = alone_s / (SCARCE_SHARE + 0.001)
    prompt = ("a", left_s, tokens)
    most = get_budget(slo_s, prompt, num_decodes=num_decodes, profile=profile, pace_share=0.0)
    budget = get_budget(slo_s, prompt, num_decodes=num_decodes, profile=profile)
    assert 0 < budget <= most
    needed = tokens / (0.8 * left_s) * estimate_chunk_s(profile, most, num_decodes, 0)
    if budget == most:
        return
    assert budget >= int(needed)

    def cost(chunk):
        return (estimate_chunk_s(profile, chunk, num_decodes, 0) - alone_s) / chunk

    first = -(-(max(int(needed), 1) + num_decodes) // 16) * 16 - num_decodes
    cheapest = min(cost(chunk) for chunk in range(first, min(most, first + 112) + 1, 16))
    assert cost(budget) <= cheapest * (1 + 1e-9)


def test_prompts_get_what_decodes_spare_unless_these_near_their_objective():
    alone_s = H100.estimate_shape_s(IterationShape(num_decodes=100))
    relaxed = ("a", 9.0, 1000)
    near_s, far_s = alone_s / (SCARCE_SHARE + 0.001), alone_s / (SCARCE_SHARE - 0.001)
    full = get_budget(far_s, relaxed, pace_share=0.0)
    assert get_budget(near_s, relaxed) < 200 < full
    assert get_budget(far_s, relaxed) == full
    most = get_budget(near_s, relaxed, pace_share=0.0)
    assert most > 200
    assert get_budget(near_s, relaxed, ("hopeless", 0.01, 4000)) == most
    assert 400 < get_budget(near_s, relaxed, ("urgent", 0.1, 1000)) < most
    assert get_budget(near_s, relaxed, selects_by_slack=True) < 200


def test_contexts_of_decodes_count():
    """They bring decodes near their objective, and make iterations long: fewer of them are left until a deadline."""
    alone_s = H100.estimate_shape_s(IterationShape(num_decodes=100))
    contexts = 300_000
    with_contexts_s = H100.estimate_shape_s(IterationShape(num_decodes=100, decode_context_tokens=contexts))
    assert with_contexts_s > 1.5 * alone_s
    batches = [make_batch(num_decodes=100, num_new_prompts=1, decode_context_tokens=tokens) for tokens in (0, contexts)]

    def get_budgets(tpot_slo_s, prompt, **parameters):
        policy, _ = bind_near_objective(tpot_slo_s, prompt, **parameters)
        return [policy.limits(NOW, batch).prefill_budget_tokens for batch in batches]

    near_with_contexts_alone_s = with_contexts_s / (SCARCE_SHARE + 0.001)
    far, near = get_budgets(near_with_contexts_alone_s, ("a", 9.0, 1000))
    assert near < 200 < far
    most = get_budgets(near_with_contexts_alone_s, ("a", 9.0, 1000), pace_share=0.0)[1]
    room_s = estimate_chunk_s(H100, most, 100, contexts)
    for tokens in range(500, 4000, 100):
        needed = min(most, int(tokens / 0.8 * room_s))
        assert get_budgets(near_with_contexts_alone_s, ("a", 1.0, tokens))[1] >= needed


def test_the_iteration_under_way_leaves_prompts_less_time():
    alone_s = H100.estimate_shape_s(IterationShape(num_decodes=100))
    policy, batch = bind_near_objective(alone_s / (SCARCE_SHARE + 0.001), ("a", 2.0, 1000))
    at_once = policy.limits(NOW, batch).prefill_budget_tokens
    behind = make_batch(num_decodes=100, num_new_prompts=1, num_under_way=1, under_way_s=1.9)
    assert policy.limits(NOW, behind).prefill_budget_tokens > 2 * at_once


def test_what_is_computed_anew_is_not_kept_waiting():
    alone_s = H100.estimate_shape_s(IterationShape(num_decodes=100))
    policy, batch = bind_near_objective(alone_s / (SCARCE_SHARE + 0.001), ("a", 9.0, 1000))
    paced = policy.limits(NOW, batch).prefill_budget_tokens
    recomputing = make_batch(num_decodes=100, num_new_prompts=1, num_recomputing=1)
    assert policy.limits(NOW, recomputing).prefill_budget_tokens > 2 * paced


@pytest.mark.parametrize("num_decodes", [0, 1], ids=["none", "one that has not begun"])
def test_an_engine_without_known_decodes_computes_prompts_at_once(num_decodes):
    policy = bind(DecodeSet(block_size_tokens=16, max_num_seqs=256))
    selector = policy.make_selector(A100)
    selector.add(RequestId("a"), arrival_s=NOW, ttft_slo_s=9.0, priority=0, tokens=1000)
    batch = make_batch(num_decodes=num_decodes)
    selector.select(NOW, batch)
    assert policy.limits(NOW, batch).prefill_budget_tokens == 2048 - num_decodes


@pytest.mark.parametrize("schedules_ahead", [False, True])
def test_more_answers_are_in_time_where_prompts_take_their_time(schedules_ahead):
    """Answers of 400 tokens near their objective: prompts of 600 tokens have a second each."""
    met = []
    slo = Slo(ttft_s=1.0, tpot_s=0.02)
    arrivals = [Arrival(at_s=0.15 * number, prompt_tokens=600, output_tokens=400, slo=slo) for number in range(200)]
    for pace_share in (0.0, 0.8):
        (engine,) = make_engines(((1, 2048),), blocks=20_000, max_num_seqs=256)
        cell = Cell(
            engines=[replace(engine, profile=H100)],
            strategy=get_strategy("sluice"),
            parameters=StrategyParameters(pace_share=pace_share, decode_share=0.0),
            options=SimOptions(schedules_ahead=schedules_ahead),
        )
        simulation = Simulation(cell, arrivals)
        assert simulation.run()
        met.append(sum(request.has_met_slo for request in simulation.requests))
    assert met[1] > 1.1 * met[0]


# --- placement -------------------------------------------------------------------------------------------------------

LATE = EngineLoad(
    queued_prefill_tokens=8_000,
    queued_requests=8,
    queued_attention_work=3.2e7,
    late_prefill_tokens=8_000,
    late_requests=8,
    late_attention_work=3.2e7,
)


def test_a_new_prompt_does_not_wait_for_those_that_go_behind_it_and_a_late_one_does():
    timely, late = make_prefill("timely", arrival_s=NOW), make_prefill("late", arrival_s=NOW - 9.0)
    (placed,) = assign(make_table(LATE), timely, now=NOW)
    assert (type(placed), placed.reason) == (Place, "feasible")
    (held,) = assign(make_table(LATE), late, now=NOW)
    assert held.reason == "late_binding"
    (placed,) = assign(make_table(EngineLoad()), late, now=NOW)
    assert placed.reason == "least_late"
    (placed,) = assign(make_table(LATE, EngineLoad(iteration_remaining_s=0.05)), timely, now=NOW)
    assert placed.engine_id == EngineId("e0")


def test_late_prompts_are_still_there_after_a_placement():
    view = get_view(make_table(LATE).order[0])
    timely, late = make_prefill("timely", arrival_s=NOW, tokens=10), make_prefill("late", arrival_s=NOW - 4.1)
    placed, held = assign(make_table(LATE), timely, late, now=NOW, credit_s=0.9 * view.late_s)
    assert (placed.request_id, type(placed)) == ("timely", Place)
    assert held.reason == "late_binding"
    placed, also = assign(make_table(LATE), timely, late, now=NOW, credit_s=1.5 * view.late_s)
    assert (type(placed), type(also)) == (Place, Place)


def test_late_prompts_take_the_time_that_the_model_says_and_no_blocks_or_seats_from_others():
    timely = EngineLoad(queued_prefill_tokens=8_000, queued_requests=8, queued_attention_work=3.2e7)
    view, waiting, empty = (get_view(make_table(load).order[0]) for load in (LATE, timely, EngineLoad()))
    assert (view.free_at_s, waiting.late_s, empty.late_s) == (empty.free_at_s, 0.0, 0.0)
    assert view.late_s == pytest.approx(waiting.free_at_s - empty.free_at_s)
    assert waiting.available_tokens < view.available_tokens == empty.available_tokens
    assert waiting.available_seqs < view.available_seqs == empty.available_seqs
    assert (view.late_tokens, view.late_requests) == (8_000, 8)
    assert (waiting.late_tokens, waiting.late_requests) == (0, 0)


# --- iterations without decodes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_decodes", "chunk_tokens", "alone_tokens", "budget"),
    [(0, 8192, 2048, 2048), (0, 8192, 0, 8192), (0, 512, 2048, 512), (1, 8192, 2048, None)],
)
def test_an_iteration_without_decodes_is_no_larger_than_full_speed_asks_for(
    num_decodes, chunk_tokens, alone_tokens, budget
):
    policy = bind(make_decodes(), alone_tokens=alone_tokens)
    batch = make_batch(num_decodes=num_decodes, chunk_size_tokens=chunk_tokens, max_batch_tokens=8192)
    assert policy.limits(NOW, batch).prefill_budget_tokens == (budget or chunk_tokens - num_decodes)


def test_a_router_knows_how_large_iterations_without_decodes_are():
    loads = EngineLoad(), EngineLoad(running_decodes=1, decode_context_tokens=100)
    for alone_tokens, rooms in ((2048, (2048, 500)), (300, (300, 500)), (0, (510, 500))):
        table = make_table(*loads)
        assign(table, make_prefill("a", arrival_s=NOW), now=NOW, alone_tokens=alone_tokens)
        found = tuple(table[EngineId(name)].room_tokens for name in ("e0", "e1"))
        assert found == (pytest.approx(rooms[0], rel=0.1), pytest.approx(rooms[1], rel=0.1))


@pytest.mark.parametrize("schedules_ahead", [False, True])
def test_prompts_do_not_wait_for_those_that_share_a_large_iteration(schedules_ahead):
    """Five prompts of 3,000 tokens come at once, to an engine that can compute them in one iteration."""
    first_s = []
    slo = Slo(ttft_s=9.0, tpot_s=0.2)
    arrivals = [Arrival(at_s=0.0, prompt_tokens=3000, output_tokens=1, slo=slo) for _ in range(5)]
    for alone_tokens in (0, 2048):
        (engine,) = make_engines(((1, 2048),), blocks=20_000, max_num_seqs=256)
        cell = Cell(
            engines=[replace(engine, profile=A100, chunk_size_tokens=16_384, max_batch_tokens=16_384)],
            strategy=get_strategy("sluice"),
            parameters=StrategyParameters(alone_tokens=alone_tokens, credit_s=0.0),
            options=SimOptions(schedules_ahead=schedules_ahead),
        )
        simulation = Simulation(cell, arrivals)
        assert simulation.run()
        first_s.append(sorted(request.first_token_s for request in simulation.requests))
    assert sum(first_s[1]) < 0.8 * sum(first_s[0])
    assert first_s[1][-1] < 1.06 * first_s[0][-1]
