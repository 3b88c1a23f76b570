"""Strategy DynaServe: the pair of engines, which part runs where, and which prompts are cut."""

import math
import random

import pytest
from test_dynaserve_splits import CONFIG, DYNASERVE, NOW, make_busy, make_load, make_request, make_table

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import EngineId, Hold, Leg, MoveCause, Place, Reject, RequestId, Role, Slo
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.splitting.predicted_output_lengths import KnownLengths
from sluice_core.scheduling.splitting.split_placement import LEAST_PART_TOKENS, SplitPlacement
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

# --- the pair ------------------------------------------------------------------------------------------------------


def make_placement(**changes):
    placement = SplitPlacement(StrategyParameters(**changes), random.Random(1))
    placement.lengths = KnownLengths({RequestId("r"): 1000})
    return placement


def place(table, placement=None, now=NOW, **changes):
    (decision,) = (placement or make_placement()).assign(now, [make_request(**changes)], table)
    return decision


def test_a_request_is_split_over_the_least_busy_engine_of_each_side():
    table = make_table(make_busy(4000), make_busy(3000), make_busy(2000), make_busy(2500))
    decision = place(table)
    assert isinstance(decision, Place)
    assert (decision.engine_id, decision.reason) == ("e2", "split")
    first, second = decision.route
    assert (first.engine_id, second.engine_id) == ("e2", "e3")
    # 20 more than predicted, less the last token, which never has KV.
    assert 1000 <= first.end_token < second.end_token == 2019


def test_the_answer_is_never_longer_than_was_asked_for():
    decision = place(make_table(make_load(), make_load()), limit=300)
    assert decision.route == (Leg(EngineId("e0"), 1000), Leg(EngineId("e1"), 1299))


def test_the_pair_is_turned_where_that_is_sooner():
    """No cut of the answer makes up for a prompt behind a long queue."""
    table = make_table(make_busy(9000), make_load())
    assert place(table).engine_id == "e1"
    bound = SplitPlacement(StrategyParameters(), random.Random(1), is_bound_to_sides=True)
    bound.lengths = KnownLengths({RequestId("r"): 1000})
    assert place(make_table(make_busy(9000), make_load()), bound).engine_id == "e0"


@pytest.mark.parametrize(("token", "engine"), [(1100, "e1"), (1900, "e0")])
def test_a_fixed_cut_gives_the_longer_part_to_the_engine_with_less_to_do(token, engine):
    fixed = SplitPlacement(StrategyParameters(), random.Random(1), fixed_token=token)
    fixed.lengths = KnownLengths({RequestId("r"): 1000})
    decision = place(make_table(make_load(), make_busy(3000)), fixed)
    assert (decision.route[0].engine_id, decision.route[0].end_token) == (engine, token)


def test_a_part_that_is_too_short_is_left_to_the_other_engine():
    table = make_table(make_load(), make_busy(100))
    decision = place(table, limit=LEAST_PART_TOKENS)
    assert (decision.engine_id, decision.reason, decision.route) == ("e0", "whole", ())


@pytest.mark.parametrize(
    ("loads", "engine"),
    [
        ([make_load()], "e0"),
        ([make_load(), make_load(kv_blocks_used=999)], "e0"),
        ([make_load(kv_blocks_used=999), make_load()], "e1"),
    ],
)
def test_one_engine_with_room_has_the_whole_request(loads, engine):
    decision = place(make_table(*loads))
    assert (decision.engine_id, decision.route) == (engine, ())


def test_without_room_or_engines_a_request_waits():
    full = make_table(make_load(kv_blocks_used=999), make_load(kv_blocks_used=999))
    assert place(full) == Hold(request_id=RequestId("r"), reason="kv")
    assert place(make_table()) == Hold(request_id=RequestId("r"), reason="no_engine")


@pytest.mark.parametrize("tokens", [0, 4000])
def test_a_recovery_is_not_split(tokens):
    decision = place(make_table(make_load(), make_busy(tokens)), is_recovery=True)
    assert (decision.engine_id, decision.reason, decision.route) == ("e0", "recovery", ())


@pytest.mark.parametrize(("used_blocks", "is_placed"), [(980, True), (981, False)])
def test_a_prompt_that_just_fits_is_placed(used_blocks, is_placed):
    decision = place(make_table(make_load(kv_blocks_used=used_blocks)), prompt=320)
    assert isinstance(decision, Place) is is_placed


@pytest.mark.parametrize(("limit", "ends"), [(1, []), (16, []), (17, [1, 17])])
def test_a_part_of_just_enough_tokens_is_one(limit, ends):
    """The last token of an answer never gets KV."""
    placement = SplitPlacement(StrategyParameters(), random.Random(1), fixed_token=1)
    decision = place(make_table(make_load(), make_load()), placement, prompt=1, limit=limit)
    assert [leg.end_token for leg in decision.route] == ends


def test_an_answer_of_one_token_is_one_that_gets_kv():
    placement = SplitPlacement(StrategyParameters(), random.Random(1), fixed_token=100)
    decision = place(make_table(make_load(), make_load(), cutting=(0, 1)), placement, prompt=200, limit=1)
    assert [leg.end_token for leg in decision.route] == [100, 201]


def test_nobody_or_requests_without_an_objective_leave_the_length_of_iterations_as_it_is():
    table = make_table(make_load())
    free = table[EngineId("e0")].room_tokens
    placement = make_placement()
    place(table, placement, slo=Slo(ttft_s=9.0, tpot_s=0.05))
    bounded = table[EngineId("e0")].room_tokens
    assert placement.assign(NOW, [], table) == []
    place(table, placement)
    assert table[EngineId("e0")].room_tokens == bounded < free


@pytest.mark.parametrize("fixed_token", [1, 40])
@pytest.mark.parametrize(("token_s", "engine"), [(0.05, "e0"), (0.1, "e1")])
def test_a_fixed_cut_has_the_prompt_where_it_is_computed_sooner(fixed_token, token_s, engine):
    """A prompt of one token, on an idle engine or on one that has 70 ms of work; decodes cost nothing."""
    profiles = [IterationProfile(linear_s=(0.0, 0.01), prefill_token_s=each_s) for each_s in (token_s, 1e-4)]
    table = EngineTable(lambda engine_id: profiles[int(engine_id[1:])])
    for number, load in enumerate((make_load(), make_busy(700))):
        table.add(EngineId(f"e{number}"), CONFIG, role=Role.PREFILL_HEAVY, chunk_size_tokens=2048)
        table.report(EngineId(f"e{number}"), load, NOW)
    placement = SplitPlacement(StrategyParameters(), random.Random(1), fixed_token=fixed_token)
    decision = place(table, placement, prompt=1, limit=100)
    assert decision.engine_id == engine
    assert [leg.end_token for leg in decision.route] == [fixed_token, 100]


@pytest.mark.parametrize(("rejection", "kind"), [(EarlyRejection.OFF, Place), (EarlyRejection.REJECT, Reject)])
def test_a_request_that_would_be_late_is_refused_where_that_is_wanted(rejection, kind):
    table = make_table(make_busy(50_000, kv_blocks_total=10_000), make_busy(50_000, kv_blocks_total=10_000))
    for number in range(2):
        table[EngineId(f"e{number}")].view.is_proven = True  # a profile has seen no iteration
    slo = Slo(ttft_s=0.01, tpot_s=math.inf)
    assert isinstance(place(table, make_placement(early_rejection=rejection), slo=slo), kind)


def test_what_is_committed_moves_the_next_cut():
    """The first of two equal requests has the pair to itself, the second one not."""
    table, placement = make_table(make_load(), make_load()), make_placement()
    placement.lengths = KnownLengths({RequestId(name): 1000 for name in "abc"})
    (first,) = placement.assign(NOW, [make_request("a")], table)
    (second,) = placement.assign(NOW, [make_request("b")], table)
    assert first.route[0].end_token == 1000
    assert (second.route[0].engine_id, second.route[0].end_token) != (first.route[0].engine_id, 1000)
    # What has ended no longer counts, and is learned from.
    for name, place_ in (("a", first), ("b", second)):
        table.cancel_placement(place_.engine_id, RequestId(name), NOW)
        placement.note_finished(RequestId(name), 0)
    (third,) = placement.assign(NOW, [make_request("c")], table)
    assert third.route[0] == first.route[0]


def test_a_second_part_is_decoded_once_the_first_one_has_been():
    """Until then its engine has all of it to do: what was predicted does not melt away."""
    table = make_table(make_load(running_decodes=4, decode_context_tokens=4000), make_busy(8000))
    placement = make_placement()
    predictor, engine = placement._predictor, table[EngineId("e1")]
    token_s = predictor.read_clock(NOW, table[EngineId("e0")]).pass_s
    first, second = place(table, placement).route
    assert (first.engine_id, second.engine_id) == ("e0", "e1")
    num_tokens = first.end_token - 1000
    assert num_tokens > 100
    whole_s = predictor.read_clock(NOW, engine).decode_s
    assert whole_s > 0.0
    assert predictor.read_clock(NOW + 0.9 * num_tokens * token_s, engine).decode_s == whole_s
    assert predictor.read_clock(NOW + 2.0 * num_tokens * token_s, engine).decode_s < whole_s


@pytest.mark.parametrize("is_recovery", [False, True])
def test_a_request_that_is_placed_again_is_no_longer_committed_where_it_was(is_recovery):
    table, placement = make_table(make_load(), make_load()), make_placement()
    placement.lengths = KnownLengths({RequestId(name): 1000 for name in "ab"})

    def place_once(name, **changes):
        placed = place(table, placement, name=name, **changes)
        table.cancel_placement(placed.engine_id, placed.request_id, NOW)
        return placed.route

    first = place_once("a")
    assert place_once("a", is_recovery=is_recovery) == (() if is_recovery else first)
    if not is_recovery:
        placement.note_finished(RequestId("a"), 0)
    assert place_once("b") == first


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({}, "e1"),
        ({"planned_target": None}, None),
        ({"planned_target": EngineId("gone")}, None),
        ({"planned_target": EngineId("e0")}, None),
        ({"excluded": frozenset({EngineId("e1")})}, None),
        ({"num_blocks": 501}, None),
        ({"planned_target": EngineId("e3")}, "e3"),
        ({"planned_target": EngineId("e4")}, None),
        ({"cause": MoveCause.MANUAL, "num_blocks": 400}, "e1"),
    ],
)
def test_the_second_part_runs_where_it_was_planned_to(changes, target):
    router = DYNASERVE.make_router(StrategyParameters(), random.Random(1))
    table = make_table(
        make_load(),
        make_load(kv_blocks_used=500),
        make_load(kv_blocks_used=900),
        *(make_load(running_decodes=number) for number in (7, 8)),  # of 8 seats
    )
    values = {
        "cause": MoveCause.SPLIT,
        "source": EngineId("e0"),
        "num_blocks": 500,
        "planned_target": EngineId("e1"),
    }
    assert router.target(NOW, FlowRequest(**values | changes), table) == target


def test_another_strategy_carries_no_plan_out():
    router = get_strategy("taichi").make_router(StrategyParameters(), random.Random(1))
    request = FlowRequest(
        cause=MoveCause.SPLIT,
        source=EngineId("e0"),
        num_blocks=1,
        planned_target=EngineId("e1"),
    )
    table = make_table(make_load(), make_load(), roles=[Role.PREFILL_HEAVY, Role.DECODE_HEAVY])
    table.configure(EngineId("e1"), role=Role.DECODE_HEAVY, chunk_size_tokens=64)
    assert router.target(NOW, request, table) is None


# --- which prompts are cut -----------------------------------------------------------------------------------------


def place_cut(*, cuts_prompts, cutting, **changes):
    """Place a prompt that both engines would share; returns where it is cut, 0: behind its end."""
    busy = make_load(queued_prefill_tokens=300, queued_requests=1, queued_attention_work=45_000.0)
    table = make_table(busy, make_load(), cutting=cutting)
    placement = SplitPlacement(StrategyParameters(), random.Random(1), cuts_prompts=cuts_prompts)
    request = make_request(prompt=3000, limit=20, **changes)
    (place,) = placement.assign(NOW, [request], table)
    return place.route[0].end_token if place.route and place.route[0].end_token < 3000 else 0


@pytest.mark.parametrize("cutting", [(), (0,), (1,), (0, 1)])
def test_prompts_are_cut_where_both_engines_can_do_their_part(cutting):
    token = place_cut(cuts_prompts=None, cutting=cutting)
    assert 1000 < token < 2000 if len(cutting) == 2 else token == 0
    assert place_cut(cuts_prompts=False, cutting=cutting) == 0
    assert 1000 < place_cut(cuts_prompts=True, cutting=cutting) < 2000


@pytest.mark.parametrize("cuts_prompts", [None, True])
def test_a_prompt_that_was_refused_room_is_not_cut_again(cuts_prompts):
    assert place_cut(cuts_prompts=cuts_prompts, cutting=(0, 1), is_whole=True) == 0
    assert place_cut(cuts_prompts=cuts_prompts, cutting=(0, 1), is_recovery=True) == 0
