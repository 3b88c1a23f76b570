"""Edges of what an iteration holds and of which prompts go first, each with the number that it turns on."""

import math
from dataclasses import replace

import pytest

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import IterationShape, RequestId
from sluice_core.saved_tpot import NO_OBJECTIVE_S, SavedTpot
from sluice_core.scheduling.batching.profile_table import ProfileTable
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import EngineBatch
from sluice_core.scheduling.iteration_limits import fit_prefill_budget
from sluice_core.scheduling.prefill_order.deadline_selection import DeadlineSelector
from sluice_core.scheduling.prefill_order.event_driven_selection import EventDrivenSelector
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor, QueuedPrefill, SlackOrder
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import PrefillOrder, StrategyParameters

# 10 ms, and 0.1 ms per token of which no eight cost the same.
LINE = IterationProfile(linear_s=(0.01,), slope_s=1e-4)
# 1 ms for each eight tokens that have begun.
STEPS = IterationProfile(linear_s=tuple(1e-3 * row for row in range(300)))


# --- profile table -------------------------------------------------------------------------------------------------


def make_shape(tokens=400, **changes):
    return IterationShape(**{"prefill_tokens": tokens, "num_chunks": 1} | changes)


def make_learned(*rows, profile=LINE):
    """Make a table of iterations, each of so many prefill tokens, and so much longer than the profile says."""
    table = ProfileTable(profile)
    for tokens, factor in rows:
        table.record(make_shape(tokens), factor * profile.estimate_shape_s(make_shape(tokens)))
    return table


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [
        (2.0, 1.0 + 0.99 * 0.05),
        (1.02, 1.0 + 0.99 * 0.02),
        (1.0, 1.0),
        (0.98, 1.0 - 0.01 * 0.02),
        (0.6, 1.0 - 0.01 * 0.05),
    ],
)
def test_a_cell_follows_an_iteration_by_a_small_step_up_or_a_hundredth_of_it_down(ratio, factor):
    table = make_learned((400, 1.0), (400, ratio))
    assert table.get_factor(400, 0, 0) == pytest.approx(factor, abs=1e-9)


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_what_further_chunks_take_is_for_the_table_to_know(num_chunks):
    profile = IterationProfile(linear_s=(0.01,), slope_s=1e-4, prefill_base_s=0.02)
    table = ProfileTable(profile)
    planned_s = profile.estimate_shape_s(make_shape(num_chunks=min(1, num_chunks)))
    table.record(make_shape(num_chunks=num_chunks), 1.2 * planned_s)
    assert table.get_factor(400, 0, 0) == pytest.approx(1.2)


def test_a_cell_is_of_the_mean_context_of_its_decodes():
    table, shape = ProfileTable(LINE), make_shape(num_decodes=20, decode_context_tokens=20_000)
    table.record(shape, 1.5 * LINE.estimate_shape_s(shape))
    assert table.get_factor(400, 17 * 600, 17) == pytest.approx(1.5)
    assert table.get_factor(400, 17 * 500, 17) == 1.0


def test_a_limit_that_an_iteration_passes_without_prefills_leaves_no_room():
    assert make_learned((400, 1.5)).find_most_prefill(0.005, 2048, 0, 0).tokens == 0


def test_a_faster_cell_has_more_room():
    room = make_learned((400, 0.8)).find_most_prefill(0.042, 2048, 0, 0).tokens
    assert room == fit_prefill_budget(LINE, 0.042 / 0.8, 2048, 0, 0).tokens > 400


@pytest.mark.parametrize("smaller", [1.0, 1.2])
def test_a_cell_that_is_too_slow_says_how_far_down_the_room_goes(smaller):
    table = make_learned((600, 1.5), (400, smaller))
    expected = fit_prefill_budget(LINE, 0.062 / 1.5, 2048, 0, 0).tokens
    assert fit_prefill_budget(LINE, 0.062, 2048, 0, 0).tokens > 512 > expected > 256
    assert table.find_most_prefill(0.062, 2048, 0, 0).tokens == expected


def test_a_faster_cell_below_a_slow_one_has_no_room_in_the_slow_one():
    table = make_learned((600, 1.5), (400, 0.8))
    assert fit_prefill_budget(LINE, 0.062 / 0.8, 2048, 0, 0).tokens > 512
    assert table.find_most_prefill(0.062, 2048, 0, 0).tokens == 511


# --- room within a time --------------------------------------------------------------------------------------------


def test_a_limit_that_the_most_tokens_just_keep_allows_them():
    assert fit_prefill_budget(LINE, LINE.estimate_shape_s(make_shape(2048)), 2048, 0, 0).tokens == 2048


@pytest.mark.parametrize(("limit_s", "tokens"), [(0.0005, 0), (0.001, 0), (0.002, 15)])
def test_decodes_that_fill_a_limit_leave_no_room_for_tokens_that_cost_nothing(limit_s, tokens):
    """A decode and seven tokens take 1 ms together, and so does the decode alone."""
    assert fit_prefill_budget(STEPS, limit_s, 2048, 1, 0).tokens == tokens
    assert fit_prefill_budget(STEPS, limit_s, 7, 1, 0).tokens == (7 if limit_s >= 0.001 else 0)


def test_without_decodes_there_is_nothing_beside_which_prefills_have_time_of_their_own():
    plain = fit_prefill_budget(LINE, 0.03, 2048, 0, 0).tokens
    assert fit_prefill_budget(LINE, 0.03, 2048, 0, 0, least_prefill_s=0.1).tokens == plain < 250
    assert fit_prefill_budget(LINE, 0.03, 2048, 1, 0, least_prefill_s=0.1).tokens > 900


# --- slack ---------------------------------------------------------------------------------------------------------


def make_batch(**changes):
    values = {"chunk_size_tokens": 2048, "last_chunk_size_tokens": 2048, "max_batch_tokens": 4096}
    return EngineBatch(**values | {"block_size_tokens": 16, "last_prefill_s": 10.0, "num_new_prompts": 1} | changes)


def bind(*decodes, is_moved_in=False, **parameters):
    """Make Sluice's engine with decodes of a first token at some time, output tokens and TPOT objective."""
    joined = DecodeSet(block_size_tokens=16, max_num_seqs=64)
    for number, (first_token_s, output_tokens, tpot_slo_s) in enumerate(decodes):
        joined.join(
            RequestId(str(number)),
            prompt_tokens=10,
            output_tokens=output_tokens,
            output_tokens_since_reset=output_tokens,
            first_token_s=first_token_s,
            tpot_slo_s=tpot_slo_s,
            is_moved_in=is_moved_in,
        )
    values = {"tpot_share": 1.0, "least_prefill_share": 0.0}
    policy = get_strategy("sluice").make_engine(StrategyParameters(**values | parameters))
    policy.bind(joined, LINE)
    return policy


def get_room_s(policy, **changes):
    """Return how long an iteration with all the room may take."""
    batch = make_batch(**{"num_decodes": 1} | changes)
    tokens = policy.limits(10.0, batch).prefill_budget_tokens
    return LINE.estimate_shape_s(make_shape(tokens, num_decodes=batch.num_decodes + batch.num_joining))


@pytest.mark.parametrize("is_moved_in", [False, True])
def test_a_decode_counts_from_its_first_iteration_on(is_moved_in):
    """Its next token is due in 20 ms."""
    policy = bind((9.92, 1, 0.1), is_moved_in=is_moved_in)
    assert get_room_s(policy) == pytest.approx(0.1 - 0.08, rel=0.02)


def test_decodes_wait_for_no_prompts_where_none_are():
    assert bind((9.9, 1, 0.1)).limits(10.0, make_batch(num_decodes=1)).prefill_budget_tokens < 1000
    idle = make_batch(num_decodes=1, num_new_prompts=0)
    assert bind((9.9, 1, 0.1)).limits(10.0, idle).prefill_budget_tokens == 2047


def test_a_decode_that_has_just_come_has_one_gap():
    """Its gap is 50 ms; the other one has nothing of that kind."""
    assert get_room_s(bind((8.0, 100, 0.05)), num_joining=1) == pytest.approx(0.05, rel=0.02)


# --- saved TPOT ----------------------------------------------------------------------------------------------------


def test_an_objective_from_the_limit_on_is_none():
    saved = SavedTpot()
    saved.add(NO_OBJECTIVE_S, 0, 9.0)
    assert saved.compute_mean_s(10.0, 5) == math.inf
    saved.add(0.5, 0, 9.0)
    saved.remove(NO_OBJECTIVE_S, 0, 9.0)
    assert saved.compute_mean_s(10.0, 5) == pytest.approx(5 * 0.5 - 1.0)


# --- which prompts go first ----------------------------------------------------------------------------------------


def add(selector, name, ttft_slo_s, tokens, arrival_s=0.0):
    selector.add(RequestId(name), arrival_s=arrival_s, ttft_slo_s=ttft_slo_s, priority=0, tokens=tokens)


@pytest.mark.parametrize(("tokens", "selected"), [(547, "abc"), (548, "ab"), (549, "ab")])
def test_prompts_by_deadline_are_no_more_than_fill_the_largest_iteration(tokens, selected):
    selector = DeadlineSelector(PrefillPredictor(LINE), PrefillOrder.CHUNKED_EDF)
    for number, (name, length) in enumerate((("a", 1500), ("b", tokens), ("c", 9))):
        add(selector, name, 1.0 + number, length)
    assert "".join(selector.select(0.0, make_batch(max_batch_tokens=2048))) == selected


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, "soon"),
        ({"last_chunk_size_tokens": 16}, "soon"),
        ({"chunk_size_tokens": 0}, "soon"),
        ({"chunk_size_tokens": 16}, "later"),
        ({"chunk_size_tokens": 0, "last_chunk_size_tokens": 16}, "later"),
        ({"num_decodes": 480}, "later"),
    ],
)
def test_a_prompt_is_late_by_the_iterations_that_the_room_beside_decodes_makes_of_it(changes, first):
    """1,024 tokens take 0.12 s in two iterations, and 0.74 s in 64."""
    batch = replace(make_batch(chunk_size_tokens=512, last_chunk_size_tokens=512), **changes)
    selector = EventDrivenSelector(PrefillPredictor(LINE), 1)
    add(selector, "soon", 0.3, 1024)
    add(selector, "later", 9.0, 100)
    assert selector.select(0.0, batch) == [first]


def test_a_prompt_that_runs_and_stays_the_first_preempts_nobody():
    selector, batch = EventDrivenSelector(PrefillPredictor(LINE), 1), make_batch()
    add(selector, "a", 5.0, 3000)
    assert selector.select(0.0, batch) == ["a"]
    selector.advance(RequestId("a"), 512)
    add(selector, "b", 9.0, 100)
    assert selector.select(0.1, batch) == ["a"]
    assert selector.num_suspended == 0


@pytest.mark.parametrize(("ttft_slo_s", "batched"), [(0.12, ["head", "other"]), (0.08, ["head"])])
def test_a_batch_ends_before_the_deadline_of_its_head_whatever_the_time(ttft_slo_s, batched):
    """800 tokens take 0.09 s."""
    selector = EventDrivenSelector(PrefillPredictor(LINE), 4096)
    add(selector, "head", ttft_slo_s, 400, arrival_s=50.0)
    add(selector, "other", 60.0, 400, arrival_s=50.0)
    assert selector.select(50.0, make_batch()) == batched


def test_a_batch_takes_what_leaves_one_token_of_its_budget():
    selector = EventDrivenSelector(PrefillPredictor(LINE), 1001)
    for number, tokens in enumerate((400, 599, 1, 1)):
        add(selector, str(number), 50.0 + number, tokens)
    assert selector.select(0.0, make_batch()) == ["0", "1", "2"]


def test_of_prompts_with_one_deadline_the_first_to_come_goes_first():
    selector = EventDrivenSelector(PrefillPredictor(LINE), 1)
    for name in "bac":
        add(selector, name, 5.0, 100)
    assert selector.select(0.0, make_batch()) == ["b"]


def test_what_has_left_is_late_no_more_whenever_it_would_have_been():
    slacks = SlackOrder(PrefillPredictor(LINE), PrefillOrder.D_EDF)
    gone, stays = (
        QueuedPrefill(RequestId(name), number=number, deadline_s=1.0, urgency_s=1.0, allowed_s=1.0, tokens=100)
        for number, name in enumerate(("gone", "stays"))
    )
    slacks.update(0.0, 512, 0)
    slacks.add(gone)
    slacks.add(stays)
    slacks.remove(gone)
    slacks.update(2.0, 512, 0)
    assert list(slacks) == [stays]


def test_a_prediction_is_of_iterations_as_small_as_one_token_and_of_decodes_without_a_context():
    profile = IterationProfile(linear_s=(0.01,), decode_context_s=1.0)
    for room_tokens, num_iterations in ((0, 4), (1, 4), (2, 2)):
        predictor = PrefillPredictor(profile)
        predictor.renew(room_tokens, 3)
        assert predictor.predict_s(4, 0.0) == pytest.approx(num_iterations * 0.01)
