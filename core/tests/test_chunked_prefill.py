import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_core.records import MoveCause, Role
from sluice_core.scheduling.batching.chunked_prefill import (
    MIN_PROGRESS_INTERVAL_S,
    MIN_PROGRESS_TOKENS,
    RECOMPUTE_TOKENS,
    ChunkedPrefillPolicy,
)
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import BatchLimits, EngineBatch, EnginePolicy, RequestKind
from sluice_core.scheduling.waiting_order import PRIORITY_HEAD_START_S

POLICY = ChunkedPrefillPolicy()
NOW = 100.0


def make_batch(**changes):
    values = {
        "chunk_size_tokens": 256,
        "last_chunk_size_tokens": 256,
        "max_batch_tokens": 8192,
        "block_size_tokens": 16,
        "last_prefill_s": NOW,
    }
    return EngineBatch(**(values | changes))


counts = st.integers(0, 300)
batches = st.builds(
    EngineBatch,
    chunk_size_tokens=st.integers(0, 4096),
    last_chunk_size_tokens=st.integers(1, 4096),
    max_batch_tokens=st.integers(1024, 8192),
    block_size_tokens=st.sampled_from([16, 32, 128]),
    num_decodes=counts,
    num_joining=counts,
    num_recomputing=counts,
    num_started_prefills=counts,
    num_new_prompts=counts,
    last_prefill_s=st.floats(NOW - 1, NOW),
    is_draining=st.booleans(),
)


@pytest.mark.parametrize(
    ("saturation", "taken", "next_tokens", "has_place"),
    [
        (400, 0, 500, True),
        (400, 300, 100, True),
        (400, 300, 101, False),
        (400, 401, 1, False),
        (0, 300, 500, True),
    ],
    ids=["the first, however long", "up to saturation", "beyond it", "saturated by one", "without a limit"],
)
def test_whole_prompts_are_batched_until_they_saturate_the_gpu(saturation, taken, next_tokens, has_place):
    limits = POLICY.limits(NOW, make_batch(chunk_size_tokens=1024, num_new_prompts=1))
    limits.saturation_tokens = saturation
    assert limits.has_place_for(next_tokens, limits.prefill_budget_tokens - taken) is has_place


@pytest.mark.parametrize(
    ("decodes", "joining", "room"),
    [(0, 0, 256), (100, 0, 156), (100, 50, 106), (256, 0, 0), (200, 100, 0)],
    ids=["empty", "decodes", "joining count too", "full", "overfull"],
)
def test_room_is_what_decodes_and_joining_requests_leave_of_the_chunk(decodes, joining, room):
    limits = POLICY.limits(NOW, make_batch(num_decodes=decodes, num_joining=joining, num_new_prompts=1))
    assert limits.prefill_budget_tokens == room
    assert limits.token_budget == decodes + joining + room
    assert limits.max_tokens_per_prefill == room
    assert limits.hides(RequestKind.NEW_PROMPT) == (room == 0)
    assert not limits.is_minimum_progress


@pytest.mark.parametrize("chunk", [1, 2])
def test_the_smallest_chunk_sizes_and_rooms_are_used(chunk):
    limits = POLICY.limits(NOW, make_batch(chunk_size_tokens=chunk, num_decodes=chunk - 1, num_new_prompts=1))
    assert (limits.prefill_budget_tokens, limits.token_budget, limits.returns_new_prompts) == (1, chunk, False)
    assert not any(limits.hides(kind) for kind in RequestKind)


def test_papers_count_prefill_tokens_alone():
    """Up to what the engine can batch, which is tokens of all kinds."""
    policy = ChunkedPrefillPolicy(counts_decodes=False)
    batch = make_batch(num_decodes=100, num_joining=20, num_new_prompts=1)
    for product in (ChunkedPrefillPolicy(), ChunkedPrefillPolicy(counts_decodes=True)):
        assert product.limits(NOW, batch).prefill_budget_tokens == 136
    limits = policy.limits(NOW, batch)
    assert (limits.prefill_budget_tokens, limits.token_budget) == (256, 376)
    assert policy.limits(NOW, make_batch(num_decodes=100, max_batch_tokens=300)).prefill_budget_tokens == 200


@pytest.mark.parametrize(
    ("room", "context", "least", "tokens"),
    [
        (-4096, 0, 16, -4096),
        (0, 0, 16, 0),
        (1, 0, 16, 1),
        (640, 0, 16, 512),
        (639, 0, 16, 511),
        (896, 512, 16, 512),
        (895, 512, 16, 511),
        (64, 1 << 20, 16, 16),
        (8, 1 << 20, 16, 8),
    ],
    ids=[
        "overdrawn",
        "none",
        "a token",
        "attention of its own",
        "a room of one less",
        "attention to a context",
        "a room of one less than that",
        "the least progress",
        "of a smaller room",
    ],
)
def test_a_chunk_fills_the_room_with_its_attention(room, context, least, tokens):
    """A token pair takes 1/1024: a chunk of 512 takes 128 for its own pairs, and 256 for those with 512 before it."""
    limits = POLICY.limits(NOW, make_batch(num_new_prompts=1))
    assert limits.fit_chunk(room, context, least) == room
    assert limits.count_room(512, 512) == 512
    limits.room_per_work = 1 / 1024
    assert limits.fit_chunk(room, context, least) == tokens
    assert limits.count_room(512, 512) == 512 + 128 + 256


@pytest.mark.parametrize(
    "hidden", [RequestKind.DECODE, RequestKind.RECOMPUTE, RequestKind.STARTED_PREFILL, RequestKind.NEW_PROMPT]
)
def test_each_class_is_hidden_by_its_own_switch(hidden):
    limits = BatchLimits(
        token_budget=1,
        prefill_budget_tokens=1,
        max_tokens_per_prefill=1,
        runs_recompute=hidden is not RequestKind.RECOMPUTE,
        runs_started_prefills=hidden is not RequestKind.STARTED_PREFILL,
        runs_new_prompts=hidden is not RequestKind.NEW_PROMPT,
        returns_new_prompts=False,
        withholds_decodes=hidden is RequestKind.DECODE,
    )
    assert not limits.is_minimum_progress
    also = {RequestKind.RECOVERY} if hidden is RequestKind.RECOMPUTE else set()
    assert {kind for kind in RequestKind if limits.hides(kind)} == {hidden} | also


@pytest.mark.parametrize(
    ("started", "recomputing", "room"),
    [(0, 0, 0), (1, 0, 200 - 30), (0, 1, RECOMPUTE_TOKENS), (1, 1, RECOMPUTE_TOKENS)],
    ids=["only new prompts", "started at the last size", "recompute", "both"],
)
def test_chunk_size_zero_ends_what_has_started_and_begins_nothing(started, recomputing, room):
    limits = POLICY.limits(
        NOW,
        make_batch(
            chunk_size_tokens=0,
            last_chunk_size_tokens=200,
            num_decodes=30,
            num_started_prefills=started,
            num_recomputing=recomputing,
            num_new_prompts=5,
            last_prefill_s=NOW - 60,
        ),
    )
    assert limits.prefill_budget_tokens == room
    assert limits.hides(RequestKind.NEW_PROMPT)
    assert limits.returns_new_prompts
    assert limits.hides(RequestKind.STARTED_PREFILL) == (room == 0)
    assert limits.hides(RequestKind.RECOMPUTE) == (room == 0)


def test_a_started_prefill_of_an_engine_that_never_had_a_chunk_ends_as_recompute_does():
    batch = make_batch(chunk_size_tokens=0, last_chunk_size_tokens=0, num_decodes=40, num_started_prefills=1)
    assert POLICY.limits(NOW, batch).prefill_budget_tokens == RECOMPUTE_TOKENS - 40


def test_draining_returns_new_prompts_and_ends_started_ones():
    limits = POLICY.limits(NOW, make_batch(is_draining=True, num_started_prefills=1, num_new_prompts=1))
    assert limits.returns_new_prompts
    assert limits.hides(RequestKind.NEW_PROMPT)
    assert not limits.hides(RequestKind.STARTED_PREFILL)


@given(batch=batches)
def test_decodes_and_joining_requests_are_never_cut(batch):
    limits = POLICY.limits(NOW, batch)
    assert limits.token_budget == batch.num_decodes + batch.num_joining + limits.prefill_budget_tokens
    assert limits.prefill_budget_tokens >= 0
    assert not limits.hides(RequestKind.DECODE)
    assert not limits.hides(RequestKind.JOINING)


@given(batch=batches)
def test_no_iteration_exceeds_the_engine_or_the_chunk(batch):
    limits = POLICY.limits(NOW, batch)
    ahead = batch.num_decodes + batch.num_joining
    assert limits.token_budget <= max(batch.max_batch_tokens, ahead)
    if batch.chunk_size_tokens and not limits.is_minimum_progress:
        assert limits.token_budget <= max(batch.chunk_size_tokens, ahead)


@given(batch=batches)
def test_waiting_prefills_progress_at_least_once_per_interval(batch):
    limits = POLICY.limits(batch.last_prefill_s + MIN_PROGRESS_INTERVAL_S, batch)
    takes_new = batch.chunk_size_tokens > 0 and not batch.is_draining
    waiting = batch.num_recomputing + batch.num_started_prefills + (batch.num_new_prompts if takes_new else 0)
    if waiting:
        assert limits.prefill_budget_tokens > 0
    if limits.is_minimum_progress:
        assert limits.prefill_budget_tokens <= max(MIN_PROGRESS_TOKENS, batch.block_size_tokens)


def test_minimum_progress_waits_for_its_interval():
    full = make_batch(num_decodes=256, num_new_prompts=1, last_prefill_s=NOW - MIN_PROGRESS_INTERVAL_S / 2)
    assert POLICY.limits(NOW, full).prefill_budget_tokens == 0
    limits = POLICY.limits(NOW + MIN_PROGRESS_INTERVAL_S, full)
    assert (limits.prefill_budget_tokens, limits.is_minimum_progress) == (MIN_PROGRESS_TOKENS, True)


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        ({"chunk_size_tokens": 24, "last_chunk_size_tokens": 64, "num_decodes": 24, "num_new_prompts": 1}, 24),
        ({"chunk_size_tokens": 8, "last_chunk_size_tokens": 8, "num_decodes": 8, "num_new_prompts": 1}, 16),
        ({"chunk_size_tokens": 0, "last_chunk_size_tokens": 64, "num_decodes": 64, "num_started_prefills": 1}, 64),
        (
            {
                "chunk_size_tokens": 0,
                "last_chunk_size_tokens": 0,
                "num_decodes": RECOMPUTE_TOKENS,
                "num_started_prefills": 1,
            },
            MIN_PROGRESS_TOKENS,
        ),
        ({"num_decodes": 256, "num_new_prompts": 1, "max_batch_tokens": 300}, 44),
        ({"num_decodes": 300, "num_new_prompts": 1, "max_batch_tokens": 300}, 0),
    ],
    ids=[
        "at most a chunk",
        "at least a block",
        "the last chunk",
        "no chunk ever",
        "engine's maximum",
        "engine is full",
    ],
)
def test_minimum_progress_is_bounded(changes, room):
    limits = POLICY.limits(NOW, make_batch(last_prefill_s=NOW - MIN_PROGRESS_INTERVAL_S, **changes))
    assert (limits.prefill_budget_tokens, limits.is_minimum_progress) == (room, True)


def test_classes_are_served_in_order_and_within_a_class_by_arrival():
    keys = [POLICY.order_key(kind, 1.0, 0) for kind in RequestKind]
    assert keys == sorted(keys)
    assert POLICY.order_key(RequestKind.NEW_PROMPT, 1.0, 0) < POLICY.order_key(RequestKind.NEW_PROMPT, 2.0, 0)


def test_priority_is_a_head_start_not_a_licence_to_starve():
    patient = POLICY.order_key(RequestKind.NEW_PROMPT, 0.0, 0)
    assert POLICY.order_key(RequestKind.NEW_PROMPT, 1.0, 1) < patient
    assert POLICY.order_key(RequestKind.NEW_PROMPT, PRIORITY_HEAD_START_S + 1.0, 1) > patient


@given(requests=st.lists(st.tuples(st.floats(0, 100), st.integers(-2, 2)), min_size=1, unique=True))
def test_the_request_served_first_is_the_last_victim(requests):
    first = min(requests, key=lambda r: POLICY.order_key(RequestKind.DECODE, *r))
    victims = sorted(requests, key=lambda r: POLICY.victim_key(*r), reverse=True)
    assert POLICY.victim_key(*victims[-1]) == POLICY.victim_key(*first)


@pytest.mark.parametrize("policy", [EnginePolicy(), POLICY])
def test_a_policy_of_its_own_moves_nothing_and_fills_all_of_its_kv(policy):
    decodes = DecodeSet(block_size_tokens=16, max_num_seqs=8)
    decodes.is_draining = True
    assert policy.propose(NOW, decodes) == []
    assert {policy.share_for(role, cause) for role in Role for cause in MoveCause} == {1.0}
