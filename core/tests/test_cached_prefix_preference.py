"""Placement beside prefix caches: what cached tokens are worth."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_harness import E0, E1, GONE, NO_HITS, decide, engine_states, make_policy, make_request, make_table

from sluice_core.records import EngineId
from sluice_core.scheduling.cached_prefix_preference import CACHED_TOKEN_WEIGHT, find_cached
from sluice_core.scheduling.engine_state import get_view
from sluice_core.scheduling.placement_records import explain
from sluice_core.scheduling.prefill_feasibility import AssignPass
from sluice_core.strategy_parameters import EarlyRejection


@settings(max_examples=60, deadline=None)
@given(
    engines=st.lists(engine_states, min_size=1, max_size=6),
    tokens=st.integers(1, 6000),
    ttft_s=st.sampled_from([0.001, 0.2, 1.0, 10.0]),
    rejection=st.sampled_from(EarlyRejection),
)
def test_without_hits_a_prefix_cache_changes_no_decision(engines, tokens, ttft_s, rejection):
    tables = [make_table(*engines, observations=2) for _ in range(2)]
    plain = decide(tables[0], make_request(tokens=tokens, ttft_s=ttft_s), make_policy(rejection))
    request = make_request(tokens=tokens, ttft_s=ttft_s, cached_tokens=NO_HITS)
    decision = decide(tables[1], request, make_policy(rejection))
    # Of engines that are late by the same time another may be taken.
    same = decision == plain
    assert same or decision.predicted_ttft_s == pytest.approx(plain.predicted_ttft_s)


@settings(max_examples=150, deadline=None)
@given(
    engines=st.lists(engine_states, min_size=1, max_size=6),
    tokens=st.integers(1, 6000),
    shares=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.9, 1.0]), min_size=6, max_size=6),
    ttft_s=st.sampled_from([0.001, 0.2, 1.0, 10.0]),
)
def test_choices_beside_caches_are_those_of_a_plain_search(engines, tokens, shares, ttft_s):
    table = make_table(*engines, observations=2)
    cached = {EngineId(f"e{number}"): int(share * tokens) for number, share in enumerate(shares) if share * tokens >= 1}
    request = make_request(tokens=tokens, ttft_s=ttft_s, cached_tokens={**NO_HITS, **cached})
    assign_pass = AssignPass(0.0, table, EarlyRejection.OFF)
    deadline_s = request.arrival_s + ttft_s
    entries = list(table.order)

    def done_s(entry):
        return assign_pass.estimate_done_s(request, get_view(entry))

    def score(entry):
        return entry[0] - CACHED_TOKEN_WEIGHT * cached.get(get_view(entry).engine_id, 0)

    assert all(assign_pass.bound_done_s(request, entry) <= done_s(entry) + 1e-9 for entry in entries)
    fitting = [entry for entry in entries if get_view(entry).available_tokens >= tokens]
    found = assign_pass.find_least_late(request, entries)
    assert found == (entries.index(min(fitting, key=done_s)) if fitting else -1)
    known = [entry for entry in fitting if get_view(entry).engine_id in cached and done_s(entry) < deadline_s]
    for plain in (None, *entries):
        better = [entry for entry in known if plain is None or score(entry) < score(plain)]
        # Of equal ones the one with the shorter queue.
        assert find_cached(assign_pass, request, deadline_s, plain) == min(better, key=score, default=None)


def test_a_feasible_engine_has_room_for_all_of_the_prompt_and_is_done_before_the_deadline():
    table = make_table({}, observations=2)
    assign_pass, view = AssignPass(0.0, table, EarlyRejection.OFF), get_view(table.order[0])
    fitting, larger = (make_request(tokens=view.available_tokens + more, cached_tokens=NO_HITS) for more in (0, 1))
    done_s = assign_pass.estimate_done_s(fitting, view)
    assert assign_pass.is_feasible(fitting, view, math.nextafter(done_s, math.inf))
    assert not assign_pass.is_feasible(fitting, view, done_s)
    assert not assign_pass.is_feasible(larger, view, math.inf)


def test_expected_prefix_hits_shorten_the_prefill_not_the_kv():
    policy = make_policy()
    # e0 has the shorter queue; only e1, which knows the prompt, is in time.
    table = make_table({}, {"queued_prefill_tokens": 50})
    request = make_request(tokens=6000, ttft_s=0.3, cached_tokens={EngineId("e1"): 5000})
    decision = decide(table, request, policy)
    assert decision.engine_id == "e1"
    assert table[EngineId("e1")].queued_prefill_tokens == 50 + 1000
    assert table[EngineId("e1")].reserved_kv_blocks == -(-50 // 16) + 375
    slow, quick = explain(policy.records[0])
    assert slow.execute_s > 3 * quick.execute_s


def test_a_prompt_that_is_cached_whole_computes_its_last_token():
    table = make_table({})
    decide(table, make_request(cached_tokens={EngineId("e0"): 1000}))
    assert table[EngineId("e0")].queued_prefill_tokens == 1


@pytest.mark.parametrize(("excess", "chosen"), [(-1, "e1"), (0, "e0"), (1, "e0")], ids=["less", "as much", "more"])
def test_cached_tokens_make_up_for_queued_ones(excess, chosen):
    table = make_table({}, {"queued_prefill_tokens": int(CACHED_TOKEN_WEIGHT * 100) + excess})
    policy = make_policy()
    assert decide(table, make_request(cached_tokens={E1: 100}), policy).engine_id == chosen
    assert [candidate.cached_tokens for candidate in explain(policy.records[0])] == [0, 100]


def test_of_two_caches_the_one_that_has_more_is_taken():
    for cached in ({E0: 320, E1: 160}, {E1: 160, E0: 320}):
        assert decide(make_table({}, {}), make_request(cached_tokens=cached)).engine_id == "e0"


def test_a_cache_is_of_no_use_where_the_first_token_would_be_late():
    table = make_table({}, {"iteration_remaining_s": 60.0})
    assert decide(table, make_request(cached_tokens={E1: 900})).engine_id == "e0"


def test_a_cache_is_of_no_use_where_the_prompt_finds_no_blocks():
    table = make_table({}, {"kv_blocks_used": 9990})
    assert decide(table, make_request(cached_tokens={E1: 900})).engine_id == "e0"


@pytest.mark.parametrize("engine", [{"is_draining": True}, {"running_decodes": 5000}], ids=["draining", "no room"])
def test_caches_of_engines_that_take_nothing_do_not_count(engine):
    assert decide(make_table({}, engine), make_request(cached_tokens={E1: 900})).engine_id == "e0"


def test_caches_of_excluded_and_unknown_engines_do_not_count():
    request = make_request(cached_tokens={E1: 900, EngineId("gone"): 900}, excluded=frozenset({E1}))
    assert decide(make_table({}, {}), request).engine_id == "e0"


def test_of_late_engines_the_least_late_is_found_by_what_they_have_cached():
    table = make_table({"queued_prefill_tokens": 500}, {"queued_prefill_tokens": 800})
    decision = decide(table, make_request(tokens=6000, ttft_s=GONE, cached_tokens={E1: 5000}))
    assert (decision.engine_id, decision.reason, decision.is_feasible) == ("e1", "least_late", False)


def test_a_cached_prompt_that_fits_nowhere_waits_for_kv():
    table = make_table({"kv_blocks_used": 9990})
    assert decide(table, make_request(ttft_s=GONE, cached_tokens={E0: 900})).reason == "kv"
