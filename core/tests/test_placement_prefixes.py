"""Placement beside prefix caches: what cached tokens are worth."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_harness import E0, E1, GONE, NO_HITS, decide, engine_states, make_policy, make_request, make_table

from sluice_core.records import (
    EarlyRejection,
    EngineId,
)
from sluice_core.scheduling.placement_records import explain
from sluice_core.scheduling.prefix_placement import CACHED_TOKEN_WEIGHT


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
