"""Who gets a seat and KV blocks under Sluice where they are short: prompts that can be in time, and one router's."""

import math

import pytest
from test_paced_prefills import H100, NOW, bind_near_objective
from test_slack_strategy import assign, make_prefill, make_table

from sluice_core.records import EngineId, Place
from sluice_core.scheduling.batching.tpot_slack import SCARCE_SEATS
from sluice_core.scheduling.engine_state import EngineLoad, get_view
from sluice_core.scheduling.slack.slack_placement import SPARE_OF_OTHERS
from sluice_core.scheduling.slack.slack_waiting_order import WaitingOrder
from sluice_core.strategy_parameters import StrategyParameters

SEATS = 64  # of each engine of ``make_table``, whose KV has 16,000 tokens


def describe(decisions):
    return [(one.request_id, "placed" if isinstance(one, Place) else one.reason) for one in decisions]


def make_late(num_requests, tokens, **others):
    """A load with prompts that go last."""
    return EngineLoad(
        queued_requests=num_requests,
        queued_prefill_tokens=tokens,
        late_requests=num_requests,
        late_prefill_tokens=tokens,
        **others,
    )


@pytest.mark.parametrize(
    ("load", "place"),
    [
        (make_late(1, 100, running_decodes=SEATS - 1), "seats"),
        (make_late(1, 100, running_decodes=SEATS - 2), "placed"),
        (make_late(2, 15_500), "seats"),
        (make_late(2, 15_000), "placed"),
    ],
    ids=["one seat", "two seats", "blocks for one", "blocks for both"],
)
def test_a_prompt_in_time_passes_late_ones_that_wait_for_a_seat_or_blocks(load, place):
    timely, late = make_prefill("timely", arrival_s=NOW), make_prefill("late", arrival_s=NOW - 9.0)
    assert describe(assign(make_table(load), timely, credit_s=0.0)) == [("timely", "placed")]
    assert describe(assign(make_table(load), late, credit_s=0.0)) == [("late", place)]


def test_late_prompts_that_wait_count_beside_a_placement_too():
    load = make_late(2, 200, running_decodes=SEATS - 4)
    timely, late = make_prefill("timely", arrival_s=NOW), make_prefill("late", arrival_s=NOW - 9.0)
    also = make_prefill("also", arrival_s=NOW - 9.0)
    found = describe(assign(make_table(load), timely, late, also, credit_s=0.0))
    assert sorted(found) == [("also", "seats"), ("late", "placed"), ("timely", "placed")]


def test_a_late_prompt_without_blocks_lets_others_pass():
    """One that waits for KV beyond its objective is not passed any more under the other strategies."""
    large = make_prefill("large", arrival_s=NOW - 9.0, tokens=12_000)
    load = EngineLoad(kv_blocks_used=500)
    # The second deadline has passed, and late prompts have a share: so the large one goes first.
    found = describe(assign(make_table(load), large, make_prefill("small", arrival_s=NOW), late_share=0.5))
    assert found == [("large", "seats"), ("small", "placed")]
    waiting = make_prefill("waiting", arrival_s=NOW, tokens=12_000, ttft_s=60.0)
    assert describe(assign(make_table(load), waiting)) == [("waiting", "kv")]


@pytest.mark.parametrize("lacks", ["seats", "kv"])
def test_an_engine_of_another_router_needs_room_for_what_all_routers_send(lacks):
    def make_load(num_free, *, is_of_others):
        if lacks == "seats":
            return EngineLoad(running_decodes=SEATS - num_free, is_of_others=is_of_others)
        return EngineLoad(kv_blocks_used=1000 - math.ceil(num_free * 1000 / 16), is_of_others=is_of_others)

    def is_placed(*loads):
        return isinstance(assign(make_table(*loads), make_prefill("a", arrival_s=NOW))[0], Place)

    full = make_load(0, is_of_others=False)
    assert is_placed(make_load(1, is_of_others=False))
    assert not is_placed(full, make_load(1, is_of_others=True))
    assert not is_placed(full, make_load(SPARE_OF_OTHERS, is_of_others=True))
    assert is_placed(full, make_load(1 + SPARE_OF_OTHERS, is_of_others=True))
    assert is_placed(make_load(1, is_of_others=True)), "a router without an engine of its own waits for none"


def test_a_prompt_that_no_engine_of_its_router_holds_takes_what_there_is_elsewhere():
    table = make_table(EngineLoad(), EngineLoad(is_of_others=True))
    table.report(EngineId("e0"), EngineLoad(kv_blocks_total=100), 10.0)
    (placed,) = assign(table, make_prefill("a", arrival_s=NOW, tokens=8000))
    assert placed.engine_id == EngineId("e1")


def test_a_prompt_is_late_when_two_iterations_and_its_own_do_not_fit_any_more():
    table = make_table(EngineLoad(running_decodes=30, decode_context_tokens=30_000))
    view = get_view(table.order[0])
    prompts = [make_prefill("a", arrival_s=NOW), make_prefill("b", arrival_s=NOW)]
    order = WaitingOrder(StrategyParameters())
    order.sort(NOW, list(prompts), table)
    token_s = view.per_token_s + view.per_iteration_s / view.room_tokens
    alone_s = 1000 * token_s + 0.5 * view.per_work_s * 1000**2 + 2 * view.per_iteration_s
    assert not order.is_late(NOW + 4.0 - alone_s - 1e-6, prompts[0])
    assert order.is_late(NOW + 4.0 - alone_s + 1e-6, prompts[0])


@pytest.mark.parametrize(("num_decodes", "takes_time"), [(128, True), (127, False)])
def test_prompts_take_their_time_where_half_of_the_seats_are_taken(num_decodes, takes_time):
    """Decodes that an iteration takes less time from end sooner, and free their seats."""
    assert SCARCE_SEATS * 256 == 128
    budgets = []
    for pace_share in (0.8, 0.0):
        policy, batch = bind_near_objective(
            1.0, ("a", 20.0, 1000), num_decodes=num_decodes, profile=H100, pace_share=pace_share
        )
        budgets.append(policy.limits(NOW, batch).prefill_budget_tokens)
    assert (budgets[0] < budgets[1]) is takes_time
