import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import EngineId, IterationShape, PrefillRequest, RequestId, Role, Slo
from sluice_core.scheduling.engine_state import EngineLoad, get_queue_rank, get_view
from sluice_core.scheduling.engine_table import PROVEN_OBSERVATIONS, EngineConfig, EngineTable
from sluice_core.scheduling.iteration_limits import IterationLimits
from sluice_core.scheduling.prefill_feasibility import estimate_prefill, record_prefill

SPEC = EngineConfig(block_size_tokens=16, kv_bytes_per_token=1000, max_num_seqs=64, max_batch_tokens=8192)
A, B = EngineId("a"), EngineId("b")


def make_table(*sizes):
    table = EngineTable()
    for number, (role, chunk) in enumerate(sizes):
        table.add(EngineId("ab"[number]), SPEC, role=role, chunk_size_tokens=chunk)
    return table


def load(**changes):
    return EngineLoad(**({"kv_blocks_total": 1000} | changes))


def place(table, engine_id, request_id, now=0.0, tokens=160, execute_s=0.5):
    table.record_placement(
        engine_id,
        RequestId(request_id),
        now,
        tokens=tokens,
        kv_tokens=tokens,
        execute_s=execute_s,
        is_recovery=False,
    )


def list_fields(view):
    return {name: getattr(view, name) for name in dir(view) if not name.startswith("_")}


@pytest.fixture
def table():
    table = make_table((Role.PREFILL_HEAVY, 2048), (Role.DECODE_HEAVY, 256))
    table.report(A, load(), 0.0)
    table.report(B, load(), 0.0)
    return table


def test_an_engine_takes_placements_from_its_first_report_on():
    table = make_table((Role.PREFILL_HEAVY, 2048))
    assert [view.blocked_reason for view in table.blocked.values()] == ["no_report"]
    table.report(A, load(), 0.0)
    assert not table.blocked
    assert len(table.order) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.configure(A, role=Role.PREFILL_HEAVY, chunk_size_tokens=2048, is_draining=True), "draining"),
        (lambda t: t.configure(A, role=Role.PREFILL_HEAVY, chunk_size_tokens=0), "room"),
        (lambda t: t.report(A, load(running_decodes=2048), 1.0), "room"),
    ],
    ids=["draining", "chunk size 0", "decodes fill the chunk"],
)
def test_an_engine_that_can_take_nothing_leaves_the_order(table, change, reason):
    change(table)
    assert table.blocked[A].blocked_reason == reason
    assert [get_view(entry).engine_id for entry in table.order] == [B]


def test_a_prompt_that_goes_where_its_beginning_is_counts_without_it(table):
    prompt = PrefillRequest(
        request_id=RequestId("r1"),
        arrival_s=0.0,
        prompt_tokens=400,
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        cached_tokens={A: 160},
    )
    before_s = max(1.0, table[A].free_at_s)
    _, execute_s, transfer_s = estimate_prefill(1.0, prompt, table[A].view)
    record_prefill(1.0, prompt, table, A)
    waiting = table[A].in_flight[RequestId("r1")]
    assert (waiting.tokens, waiting.blocks, waiting.placed_at_s) == (240, 25, 1.0)
    assert table[A].free_at_s == pytest.approx(before_s + waiting.execute_s)
    assert waiting.execute_s == execute_s > transfer_s


def test_a_prompt_counts_on_an_engine_that_has_just_lost_its_room(table):
    table.configure(A, role=Role.PREFILL_HEAVY, chunk_size_tokens=0)
    prompt = PrefillRequest(
        request_id=RequestId("r1"), arrival_s=0.0, prompt_tokens=400, slo=Slo(ttft_s=1.0, tpot_s=0.1)
    )
    record_prefill(1.0, prompt, table, A)
    assert (table[A].queued_prefill_tokens, table[A].in_flight[RequestId("r1")].execute_s) == (400, 0.0)


def test_own_placements_count_until_a_report_includes_them(table):
    place(table, A, "r1")
    place(table, A, "r2")
    assert table[A].queued_prefill_tokens == 320
    assert table[A].free_at_s == pytest.approx(1.0)
    assert table[A].reserved_kv_blocks == 20
    table.mark_submitted(A, RequestId("r1"), 1)
    table.mark_submitted(A, RequestId("r2"), 2)
    table.report(A, load(last_submit_number=1, queued_prefill_tokens=100, queued_requests=1), 1.0)
    assert list(table[A].in_flight) == ["r2"]
    assert table[A].queued_prefill_tokens == 100 + 160
    table.report(A, load(last_submit_number=2), 2.0)
    assert not table[A].in_flight
    assert (table[A].queued_prefill_tokens, table[A].free_at_s, table[A].reserved_kv_blocks) == (0, 2.0, 0)


def test_a_placement_that_is_not_submitted_yet_outlives_reports(table):
    place(table, A, "r1")
    table.report(A, load(last_submit_number=7), 1.0)
    assert list(table[A].in_flight) == ["r1"]


def test_a_cancelled_placement_leaves_nothing_behind(table):
    before = list_fields(table[A].view)
    place(table, A, "r1")
    table.cancel_placement(A, RequestId("r1"), 1.0)
    table.cancel_placement(A, RequestId("r1"), 1.0)
    table.cancel_placement(EngineId("gone"), RequestId("r1"), 1.0)
    assert list_fields(table[A].view) == before


def test_work_begins_now_on_an_engine_that_was_free_long_ago(table):
    place(table, A, "r1", now=100.0)
    assert table[A].free_at_s == pytest.approx(100.5)


def test_a_grant_does_not_change_when_the_queue_is_empty(table):
    place(table, A, "r1", now=100.0)
    place(table, A, "r2", now=100.1)
    table.record_grant_request(A, 1, 3)
    assert table[A].free_at_s == pytest.approx(101.0)


def test_marking_an_unknown_placement_is_refused(table):
    with pytest.raises(ValueError, match="'r9'"):
        table.mark_submitted(A, RequestId("r9"), 1)


def test_adding_an_engine_twice_is_refused(table):
    with pytest.raises(ValueError, match="'a'"):
        table.add(A, SPEC, role=Role.PREFILL_HEAVY, chunk_size_tokens=1)


def test_a_removed_engine_is_forgotten(table):
    table.remove(A)
    table.remove(A)
    assert A not in table
    assert table.get(A) is None
    assert [get_view(entry).engine_id for entry in table.order] == [B]


def test_a_limit_of_iterations_leaves_less_room_and_its_end_gives_it_back(table):
    assert table[A].room_tokens == 2048
    table.limit_iterations(IterationLimits(0.05))
    assert 0 < table[A].room_tokens < 2048
    table.limit_iterations(IterationLimits(math.inf))
    assert table[A].room_tokens == 2048


LINE = IterationProfile(  # 10 ms, and 1 ms + 100 us for each decode of 100 tokens
    linear_s=(0.0, 0.01), decode_request_s=1e-3, decode_context_s=1e-6, num_observations=PROVEN_OBSERVATIONS
)


def make_decodes(number, each_tokens=100):
    return load(running_decodes=number, decode_context_tokens=number * each_tokens)


def make_limited(profile=LINE, decodes_s=math.inf):
    """A table with one engine of 64 seats, whose first 1000 tokens of an iteration take no time of their own."""
    profile = replace(profile, linear_s=(0.0,) + (0.01,) * 125)
    table = EngineTable(lambda _: profile)
    table.add(A, SPEC, role=Role.PREFILL_HEAVY, chunk_size_tokens=2048)
    table.limit_iterations(IterationLimits(0.05, decodes_s=decodes_s))
    return table


def count_seats(table, number, each_tokens=100):
    table.report(A, make_decodes(number, each_tokens), 1.0)
    view = table[A].view
    assert view.available_seqs == view.num_seats - number
    return view.num_seats


@pytest.mark.parametrize(
    ("limit_s", "seats"),
    [(math.inf, 64), (1.0, 64), (0.0541, 40), (0.0539, 39), (0.0321, 20), (0.0112, 4)],
    ids=["no limit", "more than it takes", "forty", "one less", "twenty", "a sixteenth at least"],
)
@pytest.mark.parametrize("number", [1, 10, 50])
def test_an_engine_has_seats_for_the_decodes_that_an_iteration_may_hold(limit_s, seats, number):
    assert count_seats(make_limited(decodes_s=limit_s), number) == seats


def test_longer_decodes_have_fewer_seats():
    """Each takes 1 ms + 1 us per token of the 44.1 ms beside the iteration's 10 ms."""
    table = make_limited(decodes_s=0.0541)
    assert [count_seats(table, 10, tokens) for tokens in (0, 100, 1000, 3000)] == [44, 40, 22, 11]


def test_an_engine_without_decodes_has_all_its_seats():
    assert count_seats(make_limited(decodes_s=0.0321), 0) == 64


def test_what_waits_in_time_and_what_is_on_its_way_take_seats_too():
    table = make_limited(decodes_s=0.0541)
    report = make_decodes(10)
    report.queued_requests, report.queued_prefill_tokens = 5, 500
    table.report(A, report, 1.0)
    assert (table[A].view.num_seats, table[A].view.available_seqs) == (40, 25)
    place(table, A, "r")
    assert (table[A].view.num_seats, table[A].view.available_seqs) == (40, 24)


@pytest.mark.parametrize(
    "profile",
    [
        replace(LINE, decode_request_s=0.5),
        replace(LINE, decode_request_s=0.0, decode_context_s=0.0),
        replace(LINE, num_observations=PROVEN_OBSERVATIONS - 1),
    ],
    ids=["one is too many", "they cost nothing", "hardly measured"],
)
def test_seats_are_not_limited_where_that_would_help_nobody(profile):
    """Prompts would wait for nothing, or because of a guess."""
    assert count_seats(make_limited(profile, decodes_s=0.0321), 10) == 64


def test_a_limit_that_no_iteration_keeps_binds_beside_decodes_alone(table):
    """Nothing would ever be placed on an engine that idles."""
    table.limit_iterations(IterationLimits(1e-6))
    assert (table[A].room_tokens, set(table.blocked)) == (2048, set())
    table.report(A, load(running_decodes=3, decode_context_tokens=900), 1.0)
    assert (table[A].room_tokens, set(table.blocked)) == (0, {A})
    table.report(A, load(), 2.0)
    assert (table[A].room_tokens, set(table.blocked)) == (2048, set())


def test_equal_chunk_sizes_are_uniform_whatever_the_roles(table):
    assert not table.has_uniform_chunk_size
    assert table[A].view.transfer_per_token_s > 0
    table.configure(B, role=Role.DECODE_HEAVY, chunk_size_tokens=2048)
    assert table.has_uniform_chunk_size
    assert table[A].view.transfer_per_token_s == table[A].view.transfer_latency_s == 0
    assert {get_queue_rank(entry)[1] for entry in table.order} == {0}


def test_an_engine_that_is_gone_does_not_keep_roles_alive(table):
    assert not table.has_uniform_chunk_size
    table.remove(B)
    assert table.has_uniform_chunk_size
    table.add(B, SPEC, role=Role.DECODE_HEAVY, chunk_size_tokens=256)
    assert not table.has_uniform_chunk_size


def test_a_draining_engine_does_not_keep_roles_alive(table):
    table.configure(B, role=Role.DECODE_HEAVY, chunk_size_tokens=256, is_draining=True)
    assert table.has_uniform_chunk_size


def test_the_measured_pull_rate_sets_the_transfer_time(table):
    table.report(B, load(pull_bytes_per_s=1e6), 1.0)
    table.report(A, load(), 1.0)
    assert table[A].view.transfer_per_token_s == pytest.approx(1000 / 1e6)


def test_queue_time_is_the_models_estimate_of_the_reported_sums(table):
    for _ in range(3):
        table.observe_iteration(A, IterationShape(num_decodes=8, decode_context_tokens=800), 0.05)
    sums = {"queued_prefill_tokens": 5000, "queued_attention_work": 1e7, "queued_requests": 2}
    table.report(A, load(running_decodes=8, decode_context_tokens=800, iteration_remaining_s=0.01, **sums), 3.0)
    queue_s = table[A].latency.estimate_prefill_s(
        tokens=5000, attention_work=1e7, num_prompts=2, room_tokens=2040, num_decodes=8, decode_context_tokens=800
    )
    assert table[A].free_at_s == pytest.approx(3.01 + queue_s)


def test_pending_grants_count_until_they_are_answered(table):
    table.record_grant_request(B, 7, 10)
    assert table[B].committed_kv_blocks == 10
    table.record_grant_answer(B, 7)
    table.record_grant_answer(B, 7)
    table.record_grant_answer(EngineId("gone"), 7)
    assert table[B].committed_kv_blocks == 0


def configure(table, engine_id, rng, now):
    is_draining = rng.random() < 0.3
    chunk = rng.choice([0, 256, 2048])
    table.configure(engine_id, role=rng.choice(list(Role)), chunk_size_tokens=chunk, is_draining=is_draining)


def report(table, engine_id, rng, now):
    tokens = rng.choice([0, 0, 500, 5000])
    fields = {
        "last_submit_number": rng.randrange(10),
        "queued_prefill_tokens": tokens,
        "queued_requests": min(tokens, 1),
        "running_decodes": rng.choice([0, 10, 256]),
        "kv_blocks_used": rng.randrange(1000),
        "is_of_others": rng.random() < 0.5,
    }
    table.report(engine_id, load(**fields), now)


def place_any(table, engine_id, rng, now):
    if engine_id not in table.blocked:
        place(table, engine_id, f"r{now}", now, tokens=rng.randrange(1, 3000))


def submit(table, engine_id, rng, now):
    if table[engine_id].in_flight:
        table.mark_submitted(engine_id, rng.choice(list(table[engine_id].in_flight)), rng.randrange(10))


def cancel(table, engine_id, rng, now):
    if table[engine_id].in_flight:
        table.cancel_placement(engine_id, rng.choice(list(table[engine_id].in_flight)), now)


EVENTS = {
    "remove": lambda table, engine_id, rng, now: table.remove(engine_id),
    "configure": configure,
    "report": report,
    "place": place_any,
    "submit": submit,
    "cancel": cancel,
    "grant": lambda table, engine_id, rng, now: table.record_grant_request(
        engine_id, rng.randrange(4), rng.randrange(50)
    ),
    "answer": lambda table, engine_id, rng, now: table.record_grant_answer(engine_id, rng.randrange(4)),
}


@settings(max_examples=200)
@given(
    events=st.lists(
        st.tuples(st.sampled_from([*EVENTS, "place", "report"]), st.integers(0, 5), st.integers(0, 2**31)), max_size=60
    )
)
def test_order_and_sums_hold_after_any_history(events):
    table = EngineTable()
    for step, (event, engine, seed) in enumerate(events):
        engine_id = EngineId(f"e{engine}")
        if engine_id not in table:
            table.add(engine_id, SPEC, role=Role.DECODE_HEAVY, chunk_size_tokens=256)
        EVENTS[event](table, engine_id, random.Random(seed), float(step))
        assert table.order == sorted(table.order)
        assert len(table.order) + len(table.blocked) == len(table)
        assert table.num_of_others == sum(state.load.is_of_others for state in table)
        for state in table:
            placements = state.in_flight.values()
            assert state.queued_prefill_tokens == state.load.queued_prefill_tokens + sum(p.tokens for p in placements)
            assert (state.entry is None) == (state.engine_id in table.blocked)
            assert state.view.queued_prefill_tokens == state.queued_prefill_tokens
            assert state.view.free_at_s == state.free_at_s
            queued = blocks_for_tokens(state.load.queued_prefill_tokens, 16)
            assert state.reserved_kv_blocks == queued + sum(p.blocks for p in placements)
            free = 1000 - state.load.kv_blocks_used - sum(state.pending_grants.values()) - state.reserved_kv_blocks
            if state.reported_at_s is not None:
                assert state.view.available_tokens == free * 16
            assert state.room_tokens > 0 or state.engine_id in table.blocked
            assert math.isfinite(state.free_at_s) or state.engine_id in table.blocked
