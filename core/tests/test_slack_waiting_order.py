"""In which order prompts wait under Sluice, and what late ones may take from others."""

import random
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_slack_strategy import SLUICE, assign, make_prefill, make_table

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import EngineId, Hold, Place, PrefillRequest, Role
from sluice_core.scheduling.engine_state import EngineLoad, get_view
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.scheduling.slack.slack_waiting_order import WaitingOrder
from sluice_core.scheduling.waiting_order import MAX_ASSIGNED_AT_ONCE, select_urgent
from sluice_core.strategy_parameters import StrategyParameters


def count_in_time(order: list[PrefillRequest], start_s: float) -> int:
    """Count the prompts that one engine ends in time, one after the other, at 0.1 ms per token."""
    end_s, count = start_s, 0
    for request in order:
        end_s += 1e-4 * request.prompt_tokens
        count += end_s <= request.arrival_s + request.slo.ttft_s
    return count


@given(
    prompts=st.lists(st.tuples(st.integers(100, 20_000), st.integers(0, 40_000)), min_size=1, max_size=6),
    busy=st.integers(0, 10_000),
)
def test_no_order_of_waiting_prompts_has_more_of_them_in_time(prompts, busy):
    busy_s = 1e-4 * busy
    line = IterationProfile(linear_s=(0.0,), slope_s=1e-4, prefill_work_s=0.0)
    table = EngineTable(lambda _: line)
    table.add(EngineId("e0"), EngineConfig(16, 1000, 64, 16_384), role=Role.DECODE_HEAVY, chunk_size_tokens=16_384)
    table.report(EngineId("e0"), EngineLoad(kv_blocks_total=10_000, iteration_remaining_s=busy_s), 10.0)
    # Each of them alone could be in time, two iterations of the engine before it. Half a tick to spare: nothing hangs
    # on the last bit of a sum.
    iterations_s = 2 * get_view(table.order[0]).per_iteration_s
    waiting = [
        make_prefill(str(number), tokens=tokens, ttft_s=1e-4 * (tokens + spare + 0.5) + iterations_s)
        for number, (tokens, spare) in enumerate(prompts)
    ]
    found = WaitingOrder(StrategyParameters()).sort(10.0, list(waiting), table)
    assert sorted(found, key=id) == sorted(waiting, key=id)
    start_s = 10.0 + busy_s + iterations_s
    assert count_in_time(found, start_s) == max(count_in_time(list(order), start_s) for order in permutations(waiting))


def test_late_prompts_get_their_share_of_the_prefill_time_while_others_can_be_in_time():
    order = WaitingOrder(StrategyParameters(late_share=0.2))
    table = make_table(EngineLoad())
    first, seconds = [], {"late": 0.0, "fresh": 0.0}
    for number in range(200):
        now = 100.0 + number
        late, fresh = make_prefill("late", arrival_s=0.0), make_prefill("fresh", arrival_s=now)
        placed = order.sort(now, [fresh, late], table)[0]
        order.note_placed(now, placed, 0.5)
        first.append(placed.request_id)
        seconds[placed.request_id] += 0.5
    assert seconds["late"] / 100.0 == pytest.approx(0.2, abs=0.03)
    assert "late" in first[-6:]
    alone = order.sort(400.0, [make_prefill("late", arrival_s=0.0), make_prefill("later", arrival_s=1.0)], table)
    before = [order.compute_urgency(400.0, arrival_s=0.0, ttft_slo_s=4.0, prompt_tokens=9, priority=0)]
    for request in alone:
        order.note_placed(400.0, request, 0.5)  # nobody else waits: it costs nobody anything
    assert before == [order.compute_urgency(400.0, arrival_s=0.0, ttft_slo_s=4.0, prompt_tokens=9, priority=0)]


def test_owners_take_turns_whatever_the_length_of_their_prompts():
    long, short = make_prefill("long", tokens=60_000), make_prefill("short", tokens=100, ttft_s=0.2)
    table = make_table(EngineLoad())
    by_length = WaitingOrder(StrategyParameters()).sort(10.0, [long, short], table)
    assert [one.request_id for one in by_length] == ["short", "long"]
    turns = [replace(long, turn=0), replace(short, turn=1)]
    assert [one.request_id for one in WaitingOrder(StrategyParameters()).sort(10.0, turns, table)] == ["long", "short"]


def make_line_table(number: int = 1, **costs_s: float) -> EngineTable:
    line = IterationProfile(linear_s=(0.0,), **{"slope_s": 1e-4} | costs_s)
    table = EngineTable(lambda _: line)
    for index in range(number):
        engine_id = EngineId(f"e{index}")
        table.add(engine_id, EngineConfig(16, 1000, 64, 16_384), role=Role.DECODE_HEAVY, chunk_size_tokens=16_384)
        table.report(engine_id, EngineLoad(kv_blocks_total=10_000), 10.0)
    return table


def sort_names(table: EngineTable, *waiting: PrefillRequest) -> list[str]:
    return [one.request_id for one in WaitingOrder(StrategyParameters()).sort(10.0, list(waiting), table)]


def test_turns_of_owners_come_before_lengths_and_after_recoveries():
    """2 s and 0.2 s of prefill, and each has 100 ms more: together the long one goes behind."""
    long, short = make_prefill("long", tokens=20_000, ttft_s=2.05), make_prefill("short", tokens=2000, ttft_s=2.1)
    assert sort_names(make_line_table(), long, short) == ["short", "long"]
    assert sort_names(make_line_table(), replace(long, turn=0), replace(short, turn=1)) == ["long", "short"]
    recoveries = [replace(make_prefill(name), is_recovery=True) for name in ("r1", "r2")]
    turns = (replace(long, turn=1), replace(short, turn=2))
    assert sort_names(make_line_table(), *turns, *recoveries) == ["r1", "r2", "long", "short"]


def test_recoveries_are_not_late_whatever_their_arrival():
    recoveries = [
        replace(make_prefill(name, arrival_s=0.0), is_recovery=True, next_token_due_s=due_s)
        for name, due_s in (("r1", 1.0), ("r2", 2.0))
    ]
    assert sort_names(make_line_table(), make_prefill("new"), *recoveries) == ["r1", "r2", "new"]


@pytest.mark.parametrize(("ttft_s", "order"), [(1.7, "abc"), (1.5, "bca")])
def test_several_engines_compute_attention_as_one_that_is_as_fast_as_they_together(ttft_s, order):
    """10 ns per squared token. On four engines a, b and c count for 0.3025, 0.25 and 0.25 s; c alone takes 1 s."""
    waiting = [make_prefill("a", tokens=11_000, ttft_s=1.25), make_prefill("b", tokens=10_000, ttft_s=1.4)]
    waiting.append(make_prefill("c", tokens=10_000, ttft_s=ttft_s))
    table = make_line_table(4, slope_s=0.0, prefill_token_s=1e-9, prefill_work_s=2e-8)
    assert "".join(sort_names(table, *waiting)) == order


def is_late_first(order: WaitingOrder, table: EngineTable) -> bool:
    late, fresh = make_prefill("late", arrival_s=0.0), make_prefill("fresh", arrival_s=100.0)
    return order.sort(100.0, [fresh, late], table)[0] is late


def test_late_prompts_wait_for_their_turn_once_their_credit_of_a_second_is_spent():
    late = make_prefill("late", arrival_s=0.0)
    order, table = WaitingOrder(StrategyParameters(late_share=0.5)), make_line_table()
    first = [is_late_first(order, table)]
    for execute_s in (1.0, 0.5, 0.5):
        order.note_placed(100.0, late, execute_s)
        first.append(is_late_first(order, table))
    assert first == [True, True, True, False]


def test_a_late_prompt_with_credit_goes_by_its_second_deadline():
    order, table = WaitingOrder(StrategyParameters(late_share=0.5)), make_line_table()
    fresh = make_prefill("fresh", arrival_s=99.0)  # due at 103 s, and the late ones at 102.9 and 103.1 s
    for arrival_s, is_first in ((90.9, True), (91.1, False)):
        late = make_prefill("late", arrival_s=arrival_s)
        assert (order.sort(100.0, [fresh, late], table)[0] is late) == is_first
    for priority, is_first in ((0, True), (1, False)):
        late = make_prefill("late", arrival_s=90.9)
        assert (order.sort(100.0, [replace(fresh, priority=priority), late], table)[0] is late) == is_first
    recovery = replace(fresh, is_recovery=True)
    assert order.sort(100.0, [recovery, make_prefill("late", arrival_s=0.0)], table)[0] is recovery


@pytest.mark.parametrize("late_share", [0.0, 0.5])
def test_prompts_in_time_are_seen_behind_any_number_of_late_ones(late_share):
    """A pass looks at the most urgent alone. Late prompts used to be among these as long as they had credit."""
    router = SLUICE.make_router(StrategyParameters(late_share=late_share), random.Random(1))
    late = [make_prefill(f"late {number}", arrival_s=0.0) for number in range(MAX_ASSIGNED_AT_ONCE)]
    fresh = make_prefill("fresh", arrival_s=100.0)

    def compute_urgency(request):
        return router.compute_urgency(
            100.0,
            is_recovery=False,
            next_token_due_s=0.0,
            priority=0,
            arrival_s=request.arrival_s,
            ttft_slo_s=request.slo.ttft_s,
            prompt_tokens=request.prompt_tokens,
        )

    assert fresh in select_urgent([*late, fresh], compute_urgency)


def test_a_late_prompt_that_waits_alone_costs_nobody_anything():
    late = make_prefill("late", arrival_s=0.0)
    order, table = WaitingOrder(StrategyParameters(late_share=0.5)), make_line_table()
    order.sort(100.0, [late, make_prefill("later", arrival_s=1.0)], table)
    order.note_placed(100.0, late, 5.0)
    assert is_late_first(order, table)


def test_an_engine_that_has_been_idle_costs_late_prompts_no_more_than_their_prefill():
    router = SLUICE.make_router(StrategyParameters(late_share=0.01, credit_s=0.0), random.Random(1))
    for _ in range(2):  # the table is of 90 s ago
        late, fresh = make_prefill("late", arrival_s=0.0), make_prefill("fresh", arrival_s=100.0)
        decisions = router.assign(100.0, [fresh, late], make_line_table(2))
        assert [one.request_id for one in decisions] == ["late", "fresh"]


def test_an_engine_gets_prompts_that_fit_and_until_it_is_a_whole_credit_behind():
    for busy_s, kind in ((0.5, Place), (0.51, Hold)):
        (decision,) = assign(make_table(EngineLoad(iteration_remaining_s=busy_s)), make_prefill("a"), credit_s=0.5)
        assert isinstance(decision, kind)
    for used_blocks, kind in ((980, Place), (981, Hold)):
        (decision,) = assign(make_table(EngineLoad(kv_blocks_used=used_blocks)), make_prefill("a", tokens=320))
        assert isinstance(decision, kind)
