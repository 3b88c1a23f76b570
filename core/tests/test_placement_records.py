"""Records of placements: what a decision is explained by."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_harness import (
    FULL,
    D,
    P,
    decide,
    engine_states,
    estimate_by_the_book,
    fits_by_the_book,
    make_policy,
    make_request,
    make_table,
)

from sluice_core.records import EngineId, Place
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.placement_records import MAX_RECORDED_ENGINES, explain
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement
from sluice_core.strategy_parameters import StrategyParameters


@settings(max_examples=100, deadline=None)
@given(engines=st.lists(engine_states, min_size=1, max_size=8), tokens=st.integers(1, 6000), ttft_s=st.floats(0.01, 10))
def test_a_decision_is_explained_by_what_it_saw(engines, tokens, ttft_s):
    table, policy = make_table(*engines, observations=2), make_policy()
    request = make_request(tokens=tokens, ttft_s=ttft_s)
    expected = {state.engine_id: estimate_by_the_book(state, table, request, 0.0) for state in table}
    fits = {state.engine_id: fits_by_the_book(state, request) for state in table}
    decision = decide(table, request, policy)
    table.report(EngineId("e0"), EngineLoad(), 9.0)  # later events change nothing
    (record,) = policy.find_records(request.request_id)
    candidates = explain(record)
    assert {c.engine_id for c in candidates} == set(expected)
    for candidate in candidates:
        times = (candidate.queue_s, candidate.execute_s, candidate.transfer_s)
        if candidate.reason not in {"room", "draining"}:
            assert times == pytest.approx(expected[candidate.engine_id])
            assert (candidate.reason == "kv") == (not fits[candidate.engine_id])
        if candidate.is_feasible:
            assert sum(times) < ttft_s
    if isinstance(decision, Place):
        (chosen,) = (c for c in candidates if c.engine_id == decision.engine_id)
        assert chosen.is_feasible == decision.is_feasible
        total = chosen.queue_s + chosen.execute_s + chosen.transfer_s
        assert decision.predicted_ttft_s == pytest.approx(total)


def test_a_candidate_is_explained_in_full():
    engines = ({"role": P, "queued_prefill_tokens": 300}, {"role": D, "queued_prefill_tokens": 200})
    policy = make_policy()
    decide(make_table(*engines), make_request(), policy)
    decode_heavy, prefill_heavy = explain(policy.records[0])
    assert (decode_heavy.role, decode_heavy.queued_prefill_tokens, decode_heavy.reason) == (D, 200, "feasible")
    assert (prefill_heavy.role, prefill_heavy.queued_prefill_tokens, prefill_heavy.reason) == (P, 300, "feasible")
    assert (decode_heavy.transfer_s, prefill_heavy.transfer_s > 0) == (0.0, True)
    # The transfer alone makes it late; and an objective met exactly is not met.
    done_s = prefill_heavy.queue_s + prefill_heavy.execute_s + prefill_heavy.transfer_s
    for ttft_s, reason in ((done_s, "ttft"), (done_s - prefill_heavy.transfer_s, "ttft"), (done_s + 1e-9, "feasible")):
        policy = make_policy()
        decide(make_table(*engines), make_request(ttft_s=ttft_s), policy)
        assert explain(policy.records[0])[1].reason == reason


def test_a_chosen_engine_among_as_many_as_are_recorded_is_recorded_once():
    policy = make_policy()
    decide(make_table(*[{}] * MAX_RECORDED_ENGINES), make_request(), policy)
    assert len(explain(policy.records[0])) == MAX_RECORDED_ENGINES


def test_records_are_bounded_and_include_the_chosen_engine():
    late = {"iteration_remaining_s": 60.0}
    table = make_table(*[late] * (MAX_RECORDED_ENGINES + 5), {"queued_prefill_tokens": 10}, observations=1)
    policy = LengthAwarePlacement(StrategyParameters(), random.Random(0), num_records=3)
    for number in range(5):
        decision = decide(table, make_request(number, ttft_s=9.0), policy)
        assert decision.engine_id == f"e{MAX_RECORDED_ENGINES + 5}"
    assert [r.request.request_id for r in policy.records] == ["r2", "r3", "r4"]
    candidates = explain(policy.records[-1])
    assert len(candidates) == MAX_RECORDED_ENGINES + 1
    assert candidates[-1].engine_id == decision.engine_id


def test_a_hold_of_many_full_engines_is_recorded():
    policy = make_policy()
    decision = decide(make_table(*[FULL] * (MAX_RECORDED_ENGINES + 2), observations=1), make_request(), policy)
    (record,) = policy.records
    assert record.decision is decision
    assert [candidate.reason for candidate in explain(record)] == ["kv"] * MAX_RECORDED_ENGINES


def test_thousands_of_decisions_are_kept():
    assert make_policy().records.maxlen == 4096
