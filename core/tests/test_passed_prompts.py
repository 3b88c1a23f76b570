"""Prompts of short objectives that pass those of long ones on an engine: no router holds them back for these."""

import math
from dataclasses import replace

import pytest
from test_paced_prefills import A100, NOW, make_selector
from test_simulation import make_engines
from test_slack_strategy import assign, make_prefill, make_table

from sluice_core.records import Place, RequestId, Slo
from sluice_core.scheduling.engine_policy import PrefillSelector
from sluice_core.scheduling.engine_state import DuePrefills, EngineLoad, get_view
from sluice_core.scheduling.prefill_order.deadline_selection import DUE_STEP_S, MOST_DUE
from sluice_core.scheduling.waiting_order import PRIORITY_HEAD_START_S
from sluice_core.sim.sim_setup import Arrival, Cell, RouterSetup, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy

# --- what engines say ------------------------------------------------------------------------------------------------


def test_prompts_are_listed_by_when_they_are_due_with_what_is_left_of_them():
    selector = make_selector(("late", 0.01, 1000), ("soon", 2.1, 400), ("long", 9.0, 2000))
    selector.advance(RequestId("long"), 500)
    assert selector.count_late(NOW).requests == 1
    assert selector.list_due() == [
        DuePrefills(NOW + 2.0, 2.1, 1, 400, 80_000.0),
        DuePrefills(NOW + 9.0, 9.0, 1, 1500, 1500 * (500 + 750.0)),
    ]
    assert PrefillSelector().list_due() == []


def test_prompts_of_one_objective_that_are_due_together_are_one_entry():
    selector = make_selector(("a", 2.0, 100), ("b", 2.1, 300))
    selector.add(RequestId("c"), arrival_s=NOW - 1.9, ttft_slo_s=4.0, priority=0, tokens=50)
    for name in "de":
        selector.add(
            RequestId(name), arrival_s=NOW - 1.8 - DUE_STEP_S * (name == "e"), ttft_slo_s=4.0, priority=0, tokens=50
        )
    due = selector.list_due()
    assert [(item.due_s - NOW, item.allowed_s, item.requests, item.tokens) for item in due] == [
        (1.75, 4.0, 1, 50),
        (2.0, 2.0, 1, 100),
        (2.0, 2.1, 1, 300),
        (2.0, 4.0, 2, 100),
    ]


def test_the_last_entry_has_the_rest_and_promises_no_more_than_holds_for_all_of_it():
    prompts = [(f"p{number}", 2.0 + number, 100) for number in range(MOST_DUE + 2)]
    due = make_selector(*prompts).list_due()
    assert [item.requests for item in due] == [1] * (MOST_DUE - 1) + [3]
    assert (due[-1].due_s, due[-1].allowed_s, due[-1].tokens) == (NOW + 2.0 + 7, 2.0 + 7, 300)
    assert due[-1].attention_work == 3 * 5000.0


def test_a_prompt_without_objective_is_due_at_no_time():
    (due,) = make_selector(("never", math.inf, 100)).list_due()
    assert (due.due_s, due.allowed_s) == (math.inf, math.inf)


# --- placement -------------------------------------------------------------------------------------------------------

# Two seconds of an engine, due in eight, of an objective of nine.
BUSY = {"queued_prefill_tokens": 12_000, "queued_requests": 8, "queued_attention_work": 9e6}
LONG = EngineLoad(**BUSY, due=[DuePrefills(NOW + 8.0, 9.0, 8, 12_000, 9e6)])


@pytest.mark.parametrize(
    ("load", "ttft_s", "arrival_s", "is_placed"),
    [
        (EngineLoad(**BUSY), 0.5, NOW, False),
        (LONG, 0.5, NOW, True),
        (LONG, 8.9, NOW - 1.0, True),
        (LONG, 9.0, NOW - 4.0, False),
        (LONG, 8.9, NOW, False),
        (LONG, 20.0, NOW - 15.0, False),
        (LONG, math.inf, NOW, False),
    ],
    ids=["by arrival", "urgent", "a little sooner", "same objective", "due later", "longer objective", "none"],
)
def test_a_prompt_is_not_held_for_those_of_longer_objectives_that_are_due_later(load, ttft_s, arrival_s, is_placed):
    (decision,) = assign(make_table(load), make_prefill("a", arrival_s=arrival_s, ttft_s=ttft_s), now=NOW)
    assert isinstance(decision, Place) == is_placed
    if is_placed:
        assert decision.is_feasible
        assert decision.predicted_ttft_s < NOW - arrival_s + 0.4
    else:
        assert decision.reason in ("late_binding", "seats")


def test_a_priority_passes_as_an_earlier_deadline_does():
    plain = make_prefill("a", ttft_s=9.0, arrival_s=NOW)
    (held,) = assign(make_table(LONG), plain, now=NOW)
    assert held.reason == "late_binding"
    (placed,) = assign(make_table(LONG), replace(plain, priority=1), now=NOW)
    assert isinstance(placed, Place)
    low = EngineLoad(
        **BUSY, due=[DuePrefills(NOW + 8.0 + PRIORITY_HEAD_START_S, 9.0 + PRIORITY_HEAD_START_S, 8, 12_000, 9e6)]
    )
    (placed,) = assign(make_table(low), plain, now=NOW)
    assert isinstance(placed, Place)


def test_own_placements_are_passed_before_a_report_has_them():
    table = make_table(EngineLoad())
    assign(table, make_prefill("long", arrival_s=NOW, tokens=8000, ttft_s=9.0), now=NOW)
    (view,) = map(get_view, table.order)
    ((due_s, allowed_s, execute_s),) = view.later
    assert (due_s, allowed_s) == (NOW + 9.0, 9.0)
    assert execute_s == pytest.approx(view.free_at_s - NOW)
    (held,) = assign(table, make_prefill("same", arrival_s=NOW, ttft_s=9.0), now=NOW)
    assert held.reason == "late_binding"
    (placed,) = assign(table, make_prefill("urgent", arrival_s=NOW, ttft_s=0.5), now=NOW)
    assert isinstance(placed, Place)
    table.report(placed.engine_id, EngineLoad(kv_blocks_total=1000), NOW)
    assert {item[:2] for item in get_view(table.order[0]).later} == {(NOW + 9.0, 9.0), (NOW + 0.5, 0.5)}


def test_nobody_passes_a_late_prompt_or_engines_that_compute_by_arrival():
    table = make_table(EngineLoad())
    (placed,) = assign(table, make_prefill("late", arrival_s=NOW - 9.5, tokens=8000, ttft_s=9.0), now=NOW)
    assert not placed.is_feasible
    assert get_view(table.order[0]).later == ()
    table = make_table(EngineLoad())
    assign(table, make_prefill("long", arrival_s=NOW, tokens=8000, ttft_s=9.0), now=NOW, selects_by_slack=False)
    assert get_view(table.order[0]).later == ()


# --- a cluster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_routers", [1, 4])
def test_urgent_prompts_do_not_wait_at_routers_behind_long_objectives(num_routers: int):
    """Engines are never idle: prompts of 6,000 tokens have nine seconds each, and short ones 400 ms."""
    long, urgent = Slo(ttft_s=9.0, tpot_s=0.07), Slo(ttft_s=0.4, tpot_s=0.07)
    arrivals = [
        Arrival(at_s=0.12 * number, prompt_tokens=6000 if number % 5 == 0 else 300, output_tokens=100, slo=slo)
        for number in range(400)
        for slo in [long if number % 5 == 0 else urgent]
    ]
    engines = make_engines(((2, 2048),), blocks=8_000, max_num_seqs=256)
    cell = Cell(
        engines=[replace(engine, profile=A100) for engine in engines],
        strategy=get_strategy("sluice"),
        options=SimOptions(report_s=0.05),
        routers=[RouterSetup()] * num_routers,
    )
    simulation = Simulation(cell, arrivals)
    assert simulation.run()
    for slo in (long, urgent):
        met = [request.has_met_slo for request in simulation.requests if request.ttft_slo_s == slo.ttft_s]
        assert sum(met) > 0.95 * len(met)
