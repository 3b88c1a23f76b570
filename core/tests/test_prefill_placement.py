"""Placement of prefills (TaiChi, Algorithm 2): the chosen engine, ties, and what waits."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_harness import (
    BUSY,
    FULL,
    GONE,
    NO_HITS,
    OFF,
    RANDOM,
    REJECT,
    SHORT,
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

from sluice_core.latency import TRANSFER_LATENCY_S
from sluice_core.records import EngineId, Hold, Place, Reject
from sluice_core.router_shares import SHARE_MARGIN_TOKENS
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.scheduling.engine_table import PROVEN_OBSERVATIONS
from sluice_core.scheduling.placement_records import explain
from sluice_core.strategy_parameters import EarlyRejection


def choose_by_the_book(table, request, now):
    """All engines that Algorithm 2 may return, ties to P-heavy applied; empty: none is feasible."""
    feasible = []
    for state in table:
        q, e, t = estimate_by_the_book(state, table, request, now)
        is_close = abs(now + q + e + t - request.arrival_s - request.slo.ttft_s) < 1e-9
        if is_close:
            return None  # rounding decides: the formulas add in different orders
        if now + q + e + t < request.arrival_s + request.slo.ttft_s and fits_by_the_book(state, request):
            feasible.append(state)
    is_ranked = len({s.chunk_size_tokens for s in table if not s.is_draining}) > 1

    def key(state):
        queue = state.load.queued_prefill_tokens + sum(p.tokens for p in state.in_flight.values())
        queue += SHARE_MARGIN_TOKENS if state.load.is_of_others else 0  # beyond the paper
        return queue, is_ranked and state.role is D

    least = min(map(key, feasible), default=None)
    return {state.engine_id for state in feasible if key(state) == least}


@settings(max_examples=150, deadline=None)
@given(
    engines=st.lists(engine_states, min_size=1, max_size=8),
    requests=st.lists(st.tuples(st.integers(1, 6000), st.floats(0.01, 10)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_the_ordered_walk_chooses_what_algorithm_2_chooses(engines, requests, seed):
    table, policy = make_table(*engines, observations=2), make_policy(seed=seed)
    for number, (tokens, ttft_s) in enumerate(requests):
        now = 0.01 * number
        request = make_request(number, tokens=tokens, ttft_s=ttft_s, arrival_s=now)
        expected = choose_by_the_book(table, request, now)
        fitting = [state for state in table if fits_by_the_book(state, request)]
        least = min((sum(estimate_by_the_book(state, table, request, now)) for state in fitting), default=None)
        decision = decide(table, request, policy, now)
        if expected is None:
            continue
        is_feasible = isinstance(decision, Place) and decision.is_feasible
        assert is_feasible == bool(expected)
        if isinstance(decision, Place) and not is_feasible:
            assert decision.predicted_ttft_s == pytest.approx(least)
        if is_feasible:
            assert decision.engine_id in expected
            assert decision.reason == "feasible"
            assert decision.predicted_ttft_s < ttft_s


@pytest.mark.parametrize("cached_tokens", [{}, NO_HITS], ids=["plain", "prefix cache"])
def test_an_objective_met_exactly_is_not_feasible(cached_tokens):
    request = make_request()
    predicted = decide(make_table({}), request).predicted_ttft_s
    # Algorithm 2, line 6: strictly less.
    exact = make_request(ttft_s=predicted, cached_tokens=cached_tokens)
    more = make_request(ttft_s=predicted * (1 + 1e-9), cached_tokens=cached_tokens)
    assert not decide(make_table({}), exact).is_feasible
    assert decide(make_table({}), more).is_feasible


@settings(max_examples=100, deadline=None)
@given(engine=engine_states, tokens=st.integers(1, 6000))
def test_the_walk_and_the_estimate_agree_to_the_nanosecond(engine, tokens):
    engine = engine | {"is_draining": False, "kv_blocks_used": 0}
    other = {"role": D, "chunk": 100, "iteration_remaining_s": 1e6}  # keeps roles alive, never feasible
    decision = decide(make_table(engine, other, observations=2), make_request(tokens=tokens, ttft_s=0.0))
    if decision.engine_id != "e0":
        return  # no room
    for nudge_s in (-1e-9, 1e-9):
        request = make_request(tokens=tokens, ttft_s=decision.predicted_ttft_s + nudge_s)
        assert decide(make_table(engine, other, observations=2), request).is_feasible == (nudge_s > 0)


def test_the_clock_starts_at_arrival():
    predicted = decide(make_table({}), make_request()).predicted_ttft_s
    late = decide(make_table({}), make_request(ttft_s=predicted + 0.5), now=1.0)
    assert not late.is_feasible
    assert late.predicted_ttft_s == pytest.approx(predicted + 1.0)


def test_fewest_queued_tokens_win_over_the_earliest_first_token():
    table = make_table({"role": P, "queued_prefill_tokens": 800}, {"role": D, "queued_prefill_tokens": 700})
    assert decide(table, make_request()).engine_id == "e1"


def test_a_long_prompt_goes_where_it_is_feasible_though_more_is_queued():
    table = make_table({"role": P, "queued_prefill_tokens": 800}, {"role": D, "queued_prefill_tokens": 700})
    policy = make_policy()
    decide(table, make_request(tokens=6000), policy)
    d_heavy, p_heavy = (c.queue_s + c.execute_s + c.transfer_s for c in explain(policy.records[0]))
    assert p_heavy < d_heavy
    table = make_table({"role": P, "queued_prefill_tokens": 800}, {"role": D, "queued_prefill_tokens": 700})
    assert decide(table, make_request(tokens=6000, ttft_s=(p_heavy + d_heavy) / 2)).engine_id == "e0"


@pytest.mark.parametrize(
    ("own_queue", "chosen"),
    [(0, "e0"), (SHARE_MARGIN_TOKENS - 1, "e0"), (SHARE_MARGIN_TOKENS + 1, "e1")],
    ids=["equal", "hardly busier", "busier"],
)
def test_engines_of_other_routers_are_taken_when_ones_own_are_busier(own_queue, chosen):
    table = make_table({"queued_prefill_tokens": own_queue}, {"is_of_others": True})
    assert decide(table, make_request()).engine_id == chosen


def test_share_is_a_preference_and_no_permission():
    """What one's own engines cannot take goes to the others', and an idle one is never a reason to reject."""
    late, full = {"iteration_remaining_s": 60.0}, {"kv_blocks_used": 10_000}
    policy = make_policy(EarlyRejection.REJECT)
    decision = decide(make_table(late, full, {"is_of_others": True}), make_request(), policy)
    assert (decision.engine_id, decision.reason) == ("e2", "feasible")
    assert [candidate.is_of_others for candidate in explain(policy.records[0])] == [False, False, True]
    idle = {"is_of_others": True, "iteration_remaining_s": 60.0}
    assert decide(make_table(idle), make_request(), make_policy(EarlyRejection.REJECT)).reason == "unproven"


def test_ties_go_to_p_heavy_engines():
    for seed in range(20):
        table = make_table({"role": D}, {"role": P}, {"role": D})
        assert decide(table, make_request(), make_policy(seed=seed)).engine_id == "e1"


def test_ties_among_equals_with_equal_kv_are_broken_uniformly_over_the_feasible_ones():
    policy, counts = make_policy(seed=5), Counter()
    slow = {"iteration_remaining_s": 60.0}
    table = make_table({}, slow, {}, slow, slow, {}, slow, slow, slow, slow, slow, slow, {"role": D})
    for number in range(1500):
        decision = decide(table, make_request(number), policy)
        counts[decision.engine_id] += 1
        table.cancel_placement(decision.engine_id, decision.request_id, 0.0)
    assert set(counts) == {"e0", "e2", "e5"}
    assert min(counts.values()) > 400


@pytest.mark.parametrize(("queued", "used"), [(0, 0), (480, 0), (0, 9900)], ids=["idle", "busy", "just enough KV"])
def test_both_of_two_tied_engines_are_drawn(queued, used):
    tied = {"queued_prefill_tokens": queued, "kv_blocks_used": used}
    engines, request = (tied, tied, {"queued_prefill_tokens": 500}), make_request(tokens=1600)
    chosen = {decide(make_table(*engines), request, make_policy(seed=seed)).engine_id for seed in range(20)}
    assert chosen == {"e0", "e1"}


def test_of_equally_late_engines_the_first_is_taken():
    assert decide(make_table(BUSY, BUSY), make_request(ttft_s=SHORT)).engine_id == "e0"


def test_ties_go_to_more_kv_left_of_two_draws():
    """The fullest of three is chosen only when both draws hit it, the emptiest unless both miss it."""
    policy, counts = make_policy(seed=5), Counter()
    table = make_table({"kv_blocks_used": 200}, {"kv_blocks_used": 0}, {"kv_blocks_used": 100})
    for number in range(1800):
        decision = decide(table, make_request(number), policy)
        counts[decision.engine_id] += 1
        table.cancel_placement(decision.engine_id, decision.request_id, 0.0)
    assert [counts[name] / 1800 for name in ("e0", "e2", "e1")] == pytest.approx([1 / 9, 3 / 9, 5 / 9], abs=0.04)


def test_equal_seeds_decide_equally():
    choices = []
    for _ in range(2):
        table, policy = make_table(*[{}] * 8), make_policy(seed=3)
        choices.append([decide(table, make_request(n), policy).engine_id for n in range(20)])
    assert choices[0] == choices[1]
    assert len(set(choices[0])) == 8  # placements of one moment spread


@pytest.mark.parametrize("role", [P, D])
def test_aggregation_ignores_roles_and_transfers_nothing(role):
    table = make_table({"role": role, "chunk": 512}, {"role": D, "chunk": 512, "queued_prefill_tokens": 100})
    policy = make_policy()
    assert decide(table, make_request(), policy).engine_id == "e0"
    assert {c.transfer_s for c in explain(policy.records[0])} == {0.0}


def test_disaggregation_never_prefills_on_an_engine_with_chunk_size_0():
    table = make_table({"role": P, "queued_prefill_tokens": 50_000}, {"role": D, "chunk": 0})
    policy = make_policy()
    decision = decide(table, make_request(ttft_s=0.5), policy)
    assert (decision.engine_id, decision.reason) == ("e0", "least_late")
    blocked = explain(policy.records[0])[1]
    assert (blocked.reason, blocked.queue_s, blocked.execute_s, blocked.transfer_s) == ("room", math.inf, math.inf, 0.0)


def test_a_room_of_one_token_is_a_room():
    decision = decide(make_table({"chunk": 17, "running_decodes": 16}), make_request(tokens=10, ttft_s=100.0))
    assert decision.is_feasible
    assert decision.predicted_ttft_s < math.inf


def test_own_placements_are_seen_by_the_next_decision():
    table = make_table({}, {})
    decisions = make_policy().assign(0.0, [make_request(0), make_request(1)], table)
    assert {d.engine_id for d in decisions} == {"e0", "e1"}


UNFITTED = {"observations": PROVEN_OBSERVATIONS - 1}


# Which engine wins, or the kind of decision, when nothing is feasible.
@pytest.mark.parametrize(
    ("policy", "engines", "ttft_s", "expected"),
    [
        (OFF, [BUSY | {"queued_prefill_tokens": 60_000}, BUSY], SHORT, ("e1", "least_late")),
        (OFF, [BUSY, BUSY | FULL], SHORT, ("e0", "least_late")),
        (OFF, [BUSY | FULL], SHORT, "kv"),
        (OFF, [FULL], 10.0, "kv"),
        (RANDOM, [BUSY], SHORT, ("e0", "random")),
        (RANDOM, [BUSY | FULL, BUSY], SHORT, ("e1", "random")),
        (RANDOM, [BUSY | FULL], SHORT, "kv"),
        (REJECT, [BUSY, BUSY], SHORT, "slo_infeasible"),
        (REJECT, [BUSY, {}], GONE, ("e1", "unproven")),
        (REJECT, [BUSY, BUSY | UNFITTED], SHORT, ("e1", "unproven")),
        (REJECT, [BUSY, FULL], GONE, "kv"),
        (REJECT, [BUSY, BUSY | FULL], SHORT, "slo_infeasible"),
        (REJECT, [BUSY, {"queued_prefill_tokens": 1} | FULL], 10.0 - 6.5, "kv"),
        (REJECT, [BUSY, {"is_draining": True}], SHORT, "slo_infeasible"),
        (REJECT, [{"is_draining": True}], SHORT, "no_engine"),
        (REJECT, [{"running_decodes": 2048}], SHORT, "room"),
        (REJECT, [], SHORT, "no_engine"),
    ],
    ids=[
        "off: smallest predicted TTFT",
        "off: among those with KV",
        "off: no KV is late",
        "off: no KV in time",
        "random: any",
        "random: with KV",
        "random: no KV",
        "reject: all busy and fitted",
        "reject: not because of an idle engine",
        "reject: not because of a barely fitted engine",
        "reject: idle, but no KV yet",
        "reject: late even with KV",
        "reject: in time once it has KV",
        "reject: draining engines do not save it",
        "nobody but a draining engine",
        "decodes fill the chunk",
        "nobody",
    ],
)
def test_what_happens_when_nothing_is_feasible(policy, engines, ttft_s, expected):
    decision = decide(make_table(*engines), make_request(ttft_s=ttft_s), make_policy(policy))
    assert decision.request_id == "r0"
    if isinstance(expected, tuple):
        assert (decision.engine_id, decision.reason) == expected
        assert decision.is_feasible is False
    else:
        assert decision.reason == expected
        assert isinstance(decision, Reject if expected == "slo_infeasible" else Hold)


@pytest.mark.parametrize("cached_tokens", [{}, NO_HITS], ids=["plain", "prefix cache"])
@pytest.mark.parametrize(
    ("policy", "engines", "fields"),
    [
        (OFF, [{}], {}),
        (OFF, [{}, {}], {}),
        (OFF, [BUSY], {"ttft_s": GONE}),
        (RANDOM, [BUSY], {"ttft_s": GONE}),
        (REJECT, [{}], {"ttft_s": GONE}),
        (OFF, [{}], {"is_recovery": True}),
    ],
    ids=["feasible", "a tie", "late", "late, at random", "late, but unproven", "a recovery"],
)
def test_a_prompt_fits_into_exactly_its_blocks(policy, engines, fields, cached_tokens):
    for tokens, fits in ((1600, True), (1601, False)):
        tight = [
            {"kv_blocks_used": 9900 - -(-engine.get("queued_prefill_tokens", 0) // 16)} | engine for engine in engines
        ]
        request = make_request(tokens=tokens, cached_tokens=cached_tokens, **fields)
        placement = make_policy(policy)
        decision = decide(make_table(*tight), request, placement)
        assert isinstance(decision, Place) == fits
        assert (explain(placement.records[0])[0].reason == "kv") == (not fits)


def test_feasible_engines_are_drawn_uniformly_from_a_crowd_of_others():
    """Random picks will mostly miss the two, so that all are looked at."""
    slow = {"iteration_remaining_s": 60.0}
    table, policy, counts = make_table({}, *[slow] * 60, {}, observations=1), make_policy(seed=5), Counter()
    for number in range(400):
        decision = decide(table, make_request(number), policy)
        counts[decision.engine_id] += 1
        table.cancel_placement(decision.engine_id, decision.request_id, 0.0)
    assert set(counts) == {"e0", "e61"}
    assert min(counts.values()) > 130


def test_a_tied_engine_that_meets_the_objective_exactly_is_not_drawn():
    later = {"iteration_remaining_s": 0.5}
    ttft_s = decide(make_table(later), make_request()).predicted_ttft_s
    for seed in range(20):
        assert decide(make_table({}, later), make_request(ttft_s=ttft_s), make_policy(seed=seed)).engine_id == "e0"
    assert {
        decide(make_table({}, later), make_request(ttft_s=ttft_s + 1e-9), make_policy(seed=seed)).engine_id
        for seed in range(20)
    } == {"e0", "e1"}


def test_of_unproven_engines_the_one_that_is_done_first_is_tried():
    table = make_table(UNFITTED | {"iteration_remaining_s": 9.0}, UNFITTED | {"iteration_remaining_s": 5.0})
    assert decide(table, make_request(ttft_s=GONE), make_policy(REJECT)).engine_id == "e1"


def test_a_request_that_would_be_late_by_nothing_is_rejected():
    """Done exactly at the deadline is not in time; then no KV is worth waiting for."""
    ttft_s = decide(make_table(BUSY), make_request(ttft_s=SHORT)).predicted_ttft_s
    rejection = decide(make_table(BUSY), make_request(ttft_s=ttft_s), make_policy(REJECT))
    assert (type(rejection), rejection.retry_after_s) == (Reject, 0.0)


def test_retry_after_is_the_smallest_lateness():
    engines = [BUSY, BUSY | {"queued_prefill_tokens": 90_000}]
    least_late = decide(make_table(*engines), make_request(ttft_s=SHORT)).predicted_ttft_s
    rejection = decide(make_table(*engines), make_request(ttft_s=SHORT), make_policy(REJECT))
    assert rejection.retry_after_s == pytest.approx(least_late - SHORT)


def test_lateness_includes_the_transfer():
    """The P-heavy engine would be the first to be done, and hands the decode over."""
    engines = [BUSY, BUSY | {"role": D, "queued_prefill_tokens": 90_000}]
    least_late = decide(make_table(*engines), make_request(ttft_s=SHORT))
    rejection = decide(make_table(*engines), make_request(ttft_s=SHORT), make_policy(REJECT))
    assert least_late.engine_id == "e0"
    assert rejection.retry_after_s == pytest.approx(least_late.predicted_ttft_s - SHORT)


def test_random_reaches_every_engine():
    counts = Counter(
        decide(make_table(BUSY, BUSY, BUSY), make_request(ttft_s=SHORT), make_policy(RANDOM, seed)).engine_id
        for seed in range(60)
    )
    assert len(counts) == 3


def test_excluded_engines_are_not_used():
    table, policy = make_table({}, BUSY), make_policy()
    assert decide(table, make_request(excluded=frozenset({EngineId("e0")})), policy).engine_id == "e1"
    assert explain(policy.records[0])[0].reason == "excluded"
    assert decide(table, make_request(1, excluded=frozenset({EngineId("e0"), EngineId("e1")}))).reason == "no_engine"


def test_waiting_requests_go_by_arrival_and_a_level_of_priority_is_a_head_start_of_10_s_as_on_engines():
    waiting = [
        make_request(0, arrival_s=10.0),
        make_request(1, arrival_s=9.0),
        make_request(2, arrival_s=18.5, priority=1),
        make_request(3, arrival_s=20.5, priority=1),
    ]
    decisions = make_policy().assign(21.0, waiting, make_table({}))
    assert [d.request_id for d in decisions] == ["r2", "r1", "r0", "r3"]
    order = ChunkedPrefillPolicy().order_key
    on_engine = sorted(waiting, key=lambda r: order(RequestKind.NEW_PROMPT, r.arrival_s, r.priority))
    assert [request.request_id for request in on_engine] == ["r2", "r1", "r0", "r3"]


def test_two_waiting_requests_are_ordered_too():
    waiting = [make_request(0, arrival_s=1.0), make_request(1, arrival_s=0.0)]
    assert [d.request_id for d in make_policy().assign(3.0, waiting, make_table({}))] == ["r1", "r0"]


def test_a_prompt_that_waits_too_long_for_kv_is_not_overtaken_any_more():
    table, policy = make_table({"kv_blocks_used": 9950}), make_policy()
    large, small = make_request(0, tokens=5000, ttft_s=1.0), make_request(1, tokens=100, ttft_s=9.0)
    young = policy.assign(0.5, [large, small], table)
    assert [type(d) for d in young] == [Hold, Place]
    old = policy.assign(1.5, [large, make_request(2, tokens=100, ttft_s=9.0)], table)
    assert [(d.request_id, d.reason) for d in old] == [("r0", "kv"), ("r2", "kv")]


def test_a_late_request_is_rejected_though_one_before_it_waits_for_kv():
    table = make_table({"queued_prefill_tokens": 1} | FULL, BUSY)
    decisions = make_policy(REJECT).assign(0.0, [make_request(0, ttft_s=3.5), make_request(1, ttft_s=GONE)], table)
    assert [type(d) for d in decisions] == [Hold, Reject]


def test_a_prompt_behind_one_that_waits_too_long_does_not_open_the_way():
    table = make_table({"kv_blocks_used": 9950})
    waiting = [make_request(0, tokens=5000, ttft_s=1.0)]
    waiting += [make_request(number, tokens=100 - number, ttft_s=9.0, arrival_s=0.1 * number) for number in (1, 2)]
    assert [(type(d), d.reason) for d in make_policy().assign(1.5, waiting, table)] == [(Hold, "kv")] * 3


def test_a_prompt_that_fits_one_engine_of_several_waits_for_it():
    table = make_table({"kv_blocks_used": 9950}, {"kv_blocks_total": 100})
    waiting = [make_request(0, tokens=5000, ttft_s=1.0), make_request(1, tokens=100, ttft_s=9.0)]
    assert [type(d) for d in make_policy().assign(1.5, waiting, table)] == [Hold, Hold]


def test_an_engine_behind_one_that_is_too_slow_is_seen():
    """In the order of queues: late, later by any bound, in time."""
    table = make_table(
        {"queued_prefill_tokens": 10, "iteration_remaining_s": 20.0},
        {"queued_prefill_tokens": 20, "iteration_remaining_s": 60.0},
        {"queued_prefill_tokens": 30},
    )
    assert decide(table, make_request()).engine_id == "e2"


def test_a_transfer_alone_can_make_an_engine_late_in_the_walk():
    engines = ({"role": P}, {"role": D, "queued_prefill_tokens": 700})
    policy = make_policy()
    decision = decide(make_table(*engines), make_request(), policy)
    (chosen,) = (each for each in explain(policy.records[0]) if each.engine_id == decision.engine_id)
    assert decision.engine_id == "e0"
    late = decide(make_table(*engines), make_request(ttft_s=decision.predicted_ttft_s - 0.1 * chosen.transfer_s))
    assert not (late.engine_id == "e0" and late.is_feasible)


def test_a_tied_engine_without_kv_is_not_drawn():
    """The one that is drawn first is feasible; of the other only its emptiness speaks."""
    full = {"kv_blocks_used": 9950}
    for seed in range(30):
        table = make_table({"kv_blocks_used": 9000}, full, full, full)
        assert decide(table, make_request(tokens=2000), make_policy(seed=seed)).engine_id == "e0"


def test_the_predicted_ttft_counts_from_arrival():
    early, late = (decide(make_table({}), make_request(arrival_s=arrival_s), now=7.0) for arrival_s in (3.0, 7.0))
    assert early.predicted_ttft_s == pytest.approx(late.predicted_ttft_s + 4.0)
    assert early.predicted_ttft_s > 4.0


def test_a_transfer_takes_its_latency_and_its_bytes():
    policy = make_policy()
    decide(make_table({"role": P}, {"role": D}), make_request(tokens=3000), policy)
    (transfer_s,) = (each.transfer_s for each in explain(policy.records[0]) if each.engine_id == "e0")
    assert transfer_s == pytest.approx(TRANSFER_LATENCY_S + 3000 * 200_000 / 10e9)


def test_a_prompt_waits_from_its_arrival():
    table = make_table({"kv_blocks_used": 9950})
    large = make_request(0, tokens=5000, ttft_s=1.0, arrival_s=3.0)
    for now, kind in ((3.5, Place), (4.0, Place), (4.5, Hold)):
        small = make_request(1, tokens=10, ttft_s=9.0, arrival_s=now)
        assert [type(d) for d in make_policy().assign(now, [large, small], table)] == [Hold, kind]


def test_a_prompt_as_large_as_an_engine_fits_one_day():
    for tokens, kind in ((160_000, Hold), (160_001, Place)):
        waiting = [make_request(0, tokens=tokens, ttft_s=1.0), make_request(1, tokens=100, ttft_s=9.0)]
        table = make_table({"kv_blocks_used": 10})
        assert [type(d) for d in make_policy().assign(5.0, waiting, table)] == [Hold, kind]


def test_a_prompt_that_never_fits_stops_nobody():
    table, policy = make_table({}), make_policy()
    endless, small = make_request(0, tokens=10**7, ttft_s=1.0), make_request(1, tokens=100, ttft_s=9.0)
    assert [type(d) for d in policy.assign(5.0, [endless, small], table)] == [Hold, Place]
