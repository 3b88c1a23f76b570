"""Classes, orders and sums of an engine's requests, and what an iteration changes in them; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_grant_table import Pool

from sluice_core.kv_blocks import KvBlocks
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters
from sluice_engine.core_messages import ConfigureCommand, RequestExtras, SchedulerLoad
from sluice_engine.kv_transfer.grants import GrantTable
from sluice_engine.request_tracker import RequestTracker, TrackedRequest, track_request
from sluice_engine.scheduling.iteration_timer import IterationTimer
from sluice_engine.scheduling.kv_usage import KvUsage
from sluice_engine.scheduling.load_report import measure_load
from sluice_engine.scheduling.prefill_chunks import PrefillChunks
from sluice_engine.scheduling.scheduled_batch import describe_batch, settle_batch

NOW_S = 100.0
BLOCK_SIZE = 32


def make_request(name: str, num_tokens: int = 300, num_computed_tokens: int = 0, **fields: Any) -> Any:
    defaults = {
        "num_prompt_tokens": num_tokens,
        "max_tokens": 50,
        "num_output_placeholders": 0,
        "is_prefill_chunk": True,
        "priority": 0,
        "arrival_time": 0.0,
    }
    return SimpleNamespace(
        request_id=name, num_tokens=num_tokens, num_computed_tokens=num_computed_tokens, **(defaults | fields)
    )


def make_tracker() -> RequestTracker:
    return RequestTracker(get_strategy("taichi").make_engine(StrategyParameters()))


def add(
    tracker: RequestTracker,
    name: str,
    kind: RequestKind,
    *tokens: int,
    arrival_s: float = NOW_S,
    user_priority: int = 0,
    **fields: Any,
) -> TrackedRequest:
    tracked = TrackedRequest(
        request=make_request(name, *tokens, **fields),
        extras=RequestExtras(),
        kind=kind,
        arrival_s=arrival_s,
        user_priority=user_priority,
    )
    tracker.add(tracked)
    return tracked


def sums(tracker: RequestTracker) -> tuple[int, float, int]:
    return tracker.queued_prefill_tokens, tracker.queued_attention_work, tracker.num_queued


@pytest.mark.parametrize(("arrival_s", "since_s"), [(None, NOW_S), (90.0, 90.0)])
def test_what_comes_with_a_request_is_read(arrival_s: float | None, since_s: float) -> None:
    extras = RequestExtras(arrival_s=arrival_s, first_token_s=95.0, grant_key="one")
    request = make_request("a", priority=3, sampling_params=SimpleNamespace(extra_args=extras.encode()))
    tracked = track_request(request, NOW_S)
    assert (tracked.request, tracked.extras, tracked.kind) == (request, extras, RequestKind.NEW_PROMPT)
    assert (tracked.arrival_s, tracked.user_priority, tracked.first_token_s) == (since_s, 3, 95.0)
    assert not tracked.is_moved_in


@pytest.mark.parametrize("kind", RequestKind)
def test_only_prefills_count_as_queued(kind: RequestKind) -> None:
    tracker = make_tracker()
    tracked = add(tracker, "a", kind, 300, 100)
    is_prefill = kind not in (RequestKind.DECODE, RequestKind.JOINING)
    # 200 tokens after a context of 100, of which each sees half of the 200 on average.
    assert sums(tracker) == ((200, 200 * (100 + 100), 1) if is_prefill else (0, 0.0, 0))
    assert (tracker.count(kind), list(tracker.of_kind(kind))) == (1, [tracked])
    assert tracker.discard("a") is tracked
    assert tracker.discard("a") is None
    assert sums(tracker) == (0, 0.0, 0)
    assert (tracker.count(kind), tracker.by_id) == (0, {})


def test_sums_follow_what_is_computed_and_the_class() -> None:
    tracker = make_tracker()
    a, b = add(tracker, "a", RequestKind.NEW_PROMPT, 300), add(tracker, "b", RequestKind.RECOMPUTE, 100)
    assert sums(tracker) == (400, 300 * 150 + 100 * 50, 2)
    a.request.num_computed_tokens = 200
    tracker.recount(a)
    assert sums(tracker) == (200, 100 * 250 + 100 * 50, 2)
    a.request.num_computed_tokens = 301
    tracker.recount(a)
    assert sums(tracker) == (100, 100 * 50, 2)
    tracker.change_kind(b, RequestKind.JOINING)
    assert sums(tracker) == (0, 0.0, 1)
    tracker.change_kind(b, RequestKind.RECOVERY)
    assert sums(tracker) == (100, 100 * 50, 2)
    assert [tracker.count(kind) for kind in RequestKind] == [0, 0, 0, 1, 0, 1]


def test_a_decode_that_leaves_takes_its_context_out_of_the_sum() -> None:
    tracker = make_tracker()
    for name, kind in (("a", RequestKind.DECODE), ("b", RequestKind.DECODE), ("c", RequestKind.JOINING)):
        add(tracker, name, kind, 300, 100)
    tracker.decode_context_tokens = 250
    tracker.discard("c")
    assert tracker.decode_context_tokens == 250
    tracker.change_kind(tracker.by_id["a"], RequestKind.RECOMPUTE)
    assert tracker.decode_context_tokens == 150
    tracker.discard("b")
    assert tracker.decode_context_tokens == 50


def test_a_class_may_change_while_it_is_read() -> None:
    tracker = make_tracker()
    for name in "abc":
        add(tracker, name, RequestKind.NEW_PROMPT)
    for tracked in tracker.of_kind(RequestKind.NEW_PROMPT):
        tracker.change_kind(tracked, RequestKind.STARTED_PREFILL)
    assert tracker.count(RequestKind.STARTED_PREFILL) == 3


def test_vllm_gets_the_waiting_order_and_the_victim_order() -> None:
    tracker = make_tracker()
    early = add(tracker, "early", RequestKind.NEW_PROMPT, arrival_s=NOW_S)
    urgent = add(tracker, "urgent", RequestKind.NEW_PROMPT, arrival_s=NOW_S + 5, user_priority=1)
    recompute = add(tracker, "recompute", RequestKind.RECOMPUTE, arrival_s=NOW_S + 50)
    # vLLM serves the smallest pair first.
    waiting = sorted([early, urgent, recompute], key=lambda each: (each.request.priority, each.request.arrival_time))
    assert waiting == [recompute, urgent, early]
    assert (early.request.priority, early.request.arrival_time) == (RequestKind.NEW_PROMPT, NOW_S)
    for tracked in (early, urgent, recompute):
        tracker.place_running(tracked)
        assert tracked.request.priority == RequestKind.DECODE
    # It preempts the largest.
    assert max([early, urgent, recompute], key=lambda each: each.request.arrival_time) is recompute
    assert urgent.request.arrival_time < early.request.arrival_time
    tracker.change_kind(early, RequestKind.DECODE)
    assert sorted((each.request for each in (recompute, urgent, early)), key=tracker.running_key) == [
        early.request,
        recompute.request,
        urgent.request,
    ]


def schedule(tracker: RequestTracker, **num_tokens: int) -> Any:
    """Counts tokens as computed, as vLLM does when it has scheduled them."""
    for name, number in num_tokens.items():
        tracker.by_id[name].request.num_computed_tokens += number
    return SimpleNamespace(num_scheduled_tokens=num_tokens)


def test_an_iteration_is_summed_up_by_class_and_settled() -> None:
    tracker = make_tracker()
    decode = add(tracker, "decode", RequestKind.DECODE, 300, 310)
    joining = add(tracker, "joining", RequestKind.JOINING, 200, 199, is_prefill_chunk=False)
    started = add(tracker, "started", RequestKind.STARTED_PREFILL, 300, 100)
    new = add(tracker, "new", RequestKind.NEW_PROMPT, 300, 0)
    last = add(tracker, "last", RequestKind.RECOMPUTE, 80, 40, is_prefill_chunk=False)
    waiting = add(tracker, "waiting", RequestKind.NEW_PROMPT, 300, 0)
    batch = describe_batch(schedule(tracker, decode=1, joining=1, started=60, new=20, last=40), tracker, 7.5)
    assert (batch.started_s, batch.num_decodes, batch.decode_context_tokens) == (7.5, 2, 311 + 200)
    assert (batch.prefill_tokens, batch.num_chunks) == (120, 3)
    assert batch.attention_work == 60 * (100 + 30) + 20 * 10 + 40 * (40 + 20)
    assert (batch.computing, batch.new_decodes) == ([joining, started, new, last], [])
    settle_batch(batch, tracker)
    assert batch.new_decodes == [joining, last]
    kinds = [tracked.kind.name for tracked in (decode, joining, started, new, last, waiting)]
    assert kinds == ["DECODE", "DECODE", "STARTED_PREFILL", "STARTED_PREFILL", "DECODE", "NEW_PROMPT"]
    assert tracker.decode_context_tokens == 511
    assert tracker.queued_prefill_tokens == 140 + 280 + 300
    assert [tracked.request.priority for tracked in (joining, started, new, last)] == [RequestKind.DECODE] * 4
    assert waiting.request.priority == RequestKind.NEW_PROMPT


def test_the_load_says_what_waits_runs_and_has_moved() -> None:
    tracker = make_tracker()
    add(tracker, "decode", RequestKind.DECODE, 300, 310)
    for name in "ab":
        add(tracker, name, RequestKind.JOINING, 300)
    for name in "xyz":
        add(tracker, name, RequestKind.NEW_PROMPT, 100)
    tracker.decode_context_tokens = 310
    pulls: Any = SimpleNamespace(bytes_per_s=5e6, num_moved_in=4, num_recomputed=5)
    hand_offs: Any = SimpleNamespace(num_moved_out=6)
    plan = ConfigureCommand(generation=9, role="D-heavy", chunk_size_tokens=256, is_draining=True, strategy="taichi")
    kv = KvBlocks(total=99, used=50, granted=7, pinned=8)
    expected = SchedulerLoad(
        queued_prefill_tokens=300,
        queued_requests=3,
        queued_attention_work=3 * 100 * 50.0,
        running_decodes=1,
        decode_context_tokens=310,
        pulling_requests=2,
        kv_blocks_total=99,
        kv_blocks_used=50,
        kv_blocks_granted=7,
        kv_blocks_pinned=8,
        chunk_size_tokens=256,
        is_draining=True,
        generation=9,
        pull_bytes_per_s=5e6,
        num_preemptions=3,
        num_suspended_prefills=8,
        num_moved_in=4,
        num_moved_out=6,
        num_recomputed_pulls=5,
    )
    assert (
        measure_load(plan, tracker, kv, pulls=pulls, hand_offs=hand_offs, num_preemptions=3, num_suspended=8, now_s=0.0)
        == expected
    )
    tracker.decode_context_tokens = -5
    load = measure_load(
        plan, tracker, kv, pulls=pulls, hand_offs=hand_offs, num_preemptions=3, num_suspended=8, now_s=0.0
    )
    assert load.decode_context_tokens == 0


def test_the_load_says_which_prompts_go_behind_all_others_and_when_the_others_are_due() -> None:
    tracker = RequestTracker(get_strategy("sluice").make_engine(StrategyParameters()))
    tracker.adopt(tracker.policy, load_model_on_gpu("qwen2.5-14b", "a100-80g", 1).profile)
    for name, ttft_slo_s in (("late", 1.0), ("timely", 9.0)):
        tracker.add(
            TrackedRequest(
                request=make_request(name, 100),
                extras=RequestExtras(ttft_slo_s=ttft_slo_s),
                kind=RequestKind.NEW_PROMPT,
                arrival_s=NOW_S,
                user_priority=0,
            )
        )
    none: Any = SimpleNamespace(bytes_per_s=0.0, num_moved_in=0, num_recomputed=0, num_moved_out=0)
    plan = ConfigureCommand(generation=9, role="P-heavy", chunk_size_tokens=256, is_draining=False, strategy="sluice")

    def measure(now_s: float) -> tuple[object, ...]:
        load = measure_load(
            plan,
            tracker,
            KvBlocks(total=99, used=50),
            pulls=none,
            hand_offs=none,
            num_preemptions=0,
            num_suspended=0,
            now_s=now_s,
        )
        late = load.late_prefill_tokens, load.late_requests, load.late_attention_work
        return load.queued_prefill_tokens, late, [(item.due_s, item.allowed_s, item.tokens) for item in load.due]

    assert measure(NOW_S) == (200, (0, 0, 0.0), [(1.0, 1.0, 100), (9.0, 9.0, 100)])
    assert measure(NOW_S + 2.0) == (200, (100, 1, 5000.0), [(7.0, 9.0, 100)])


def test_kv_counts_grants_apart_and_shared_pinned_blocks_once() -> None:
    pool: Any = Pool(10)
    pool.num_gpu_blocks = 11
    grants = GrantTable(pool)
    manager: Any = SimpleNamespace(block_pool=pool, get_block_ids=lambda name: ([1, 2, 3], [4]))
    hand_offs: Any = SimpleNamespace(num_pinned_blocks=2)
    usage = KvUsage(manager, grants, hand_offs)
    assert usage.measure() == KvBlocks(total=10, used=0)
    assert grants.reserve("a", 3, expires_s=1.0)
    pool.get_new_blocks(4)
    assert usage.measure() == KvBlocks(total=10, used=4, granted=3, pinned=2)
    hand_offs.num_pinned_blocks = 9
    assert usage.measure().pinned == 4
    assert usage.count_blocks_of("a") == 3


def test_the_oldest_iteration_that_has_not_ended_is_under_way() -> None:
    timer = IterationTimer()
    assert timer.describe_under_way() is None
    outputs: list[Any] = [SimpleNamespace() for _ in range(2)]
    for number, output in enumerate(outputs, 1):
        batch = describe_batch(SimpleNamespace(num_scheduled_tokens={}), make_tracker(), 0.0)
        batch.prefill_tokens = number
        timer.start(output, batch)
    for number, output in enumerate(outputs, 1):
        under_way = timer.describe_under_way()
        assert under_way is not None
        assert (under_way.prefill_tokens, under_way.number, under_way.duration_s) == (number, 0, 0.0)
        timer.stop(output)
    assert timer.describe_under_way() is None


def test_an_iteration_takes_its_time_from_the_end_of_the_one_before_it() -> None:
    timer = IterationTimer()
    outputs: list[Any] = [SimpleNamespace() for _ in range(3)]
    batches: list[Any] = [describe_batch(SimpleNamespace(num_scheduled_tokens={}), make_tracker(), 0.0) for _ in "ab"]
    batches[0].started_s = batches[1].started_s = -1e6
    batches[0].prefill_tokens, batches[0].attention_work, batches[0].num_chunks = 1, 2.0, 3
    batches[0].num_decodes, batches[0].decode_context_tokens = 4, 5
    for output, batch in zip(outputs, batches, strict=False):
        timer.start(output, batch)
    assert timer.stop(outputs[2]) is None
    first, second = timer.stop(outputs[0]), timer.stop(outputs[1])
    assert first is not None
    assert second is not None
    assert first[0] is batches[0]
    report = first[1]
    assert (report.number, second[1].number) == (1, 2)
    assert (report.prefill_tokens, report.attention_work, report.num_chunks) == (1, 2.0, 3)
    assert (report.num_decodes, report.decode_context_tokens) == (4, 5)
    # The clock of the process, whatever it is, is at 0 or later; the second iteration ran after the first had ended.
    assert 0.0 <= second[1].duration_s < report.duration_s
    assert timer.stop(outputs[0]) is None


class Room:
    """The prefill budget of an engine with 20 blocks free."""

    def __init__(self) -> None:
        self.tracker = make_tracker()
        self.free_blocks = 20
        usage: Any = SimpleNamespace(measure=lambda: KvBlocks(total=self.free_blocks, used=0))
        manager: Any = SimpleNamespace(get_computed_blocks=lambda request: (None, request.num_cached_tokens, False))
        self.room = PrefillChunks(
            self.tracker, manager, usage, max_batch_tokens=512, block_size_tokens=BLOCK_SIZE, now_s=NOW_S
        )

    def renew(self, chunk_size_tokens: int = 256, now_s: float = NOW_S, *, last: int = 256, **plan: Any) -> int:
        command = ConfigureCommand(
            generation=1, role="D-heavy", chunk_size_tokens=chunk_size_tokens, strategy="taichi", **plan
        )
        return self.room.renew(command, last, now_s).prefill_budget_tokens


def test_decodes_and_arrivals_leave_the_rest_of_the_chunk() -> None:
    room = Room()
    for index in range(3):
        add(room.tracker, f"decode {index}", RequestKind.DECODE, 300, 310)
    # Its last token comes with the iteration under way: 298 + 2 - 1 is the prompt's 249 and 50 more.
    add(room.tracker, "ending", RequestKind.DECODE, 298, 298, num_prompt_tokens=249, num_output_placeholders=1)
    add(room.tracker, "joining", RequestKind.JOINING, 300)
    add(room.tracker, "prompt", RequestKind.NEW_PROMPT, 300)
    assert room.renew() == 256 - 3 - 1


@pytest.mark.parametrize(
    ("in_flight", "num_computed_tokens", "num_ending"),
    [(0, 1000, 0), (1, 298, 1), (1, 297, 0), (2, 299, 1), (2, 298, 0)],
)
def test_a_decode_whose_last_token_is_under_way_is_left_out(
    in_flight: int, num_computed_tokens: int, num_ending: int
) -> None:
    tracker = make_tracker()
    fields = {"num_prompt_tokens": 249, "num_output_placeholders": in_flight}
    add(tracker, "a", RequestKind.DECODE, 298, num_computed_tokens, **fields)
    add(tracker, "b", RequestKind.STARTED_PREFILL, 298, 1000, **fields)
    assert tracker.ending.count() == num_ending


@pytest.mark.parametrize(
    ("kind", "room_tokens"),
    [
        (RequestKind.STARTED_PREFILL, 100),
        (RequestKind.RECOMPUTE, 512),
        (RequestKind.RECOVERY, 512),
        (RequestKind.NEW_PROMPT, 0),
        (RequestKind.JOINING, 0),
    ],
)
def test_chunk_size_0_lets_what_has_started_end(kind: RequestKind, room_tokens: int) -> None:
    room = Room()
    add(room.tracker, "a", kind, 300, 10)
    assert room.renew(0, last=100) == room_tokens


def test_room_is_given_out_once_and_no_more_than_is_asked_for() -> None:
    room = Room()
    add(room.tracker, "a", RequestKind.STARTED_PREFILL, 300, 10)
    add(room.tracker, "b", RequestKind.NEW_PROMPT, 300)
    room.renew()
    assert room.room.take(RequestKind.STARTED_PREFILL, 100, 100, None) == 100
    assert room.room.take(RequestKind.NEW_PROMPT, 300, 300, None) == 156
    assert room.room.take(RequestKind.NEW_PROMPT, 300, 300, None) == 0
    room.renew()
    assert room.room.take(RequestKind.RECOMPUTE, 300, 300, None) == 256


def test_prompts_are_batched_whole_up_to_what_saturates_the_gpu() -> None:
    room = Room()
    room.tracker.policy = get_strategy("disaggregated").make_engine(StrategyParameters(prefill_batch_tokens=200))
    room.renew()
    assert room.room.take(RequestKind.NEW_PROMPT, 120, 120, None) == 120
    # vLLM may have cut what it could use: what it has left counts.
    assert room.room.take(RequestKind.NEW_PROMPT, 80, 90, None) == 0
    assert room.room.take(RequestKind.NEW_PROMPT, 10, 10, None) == 0, "nobody goes ahead of the one that waits"
    room.renew()
    assert room.room.take(RequestKind.NEW_PROMPT, 80, 80, None) == 80
    assert room.room.take(RequestKind.NEW_PROMPT, 120, 120, None) == 120
    room.renew()
    assert room.room.take(RequestKind.NEW_PROMPT, 900, 900, None) == 256, "a longer prompt alone, within the chunk"


@pytest.mark.parametrize("plan", [{"is_draining": True}, {}], ids=["draining", "chunk size 0"])
def test_new_prompts_stay_out_of_an_engine_that_takes_none(plan: dict[str, Any]) -> None:
    room = Room()
    add(room.tracker, "a", RequestKind.STARTED_PREFILL, 300, 10)
    room.renew(256 if plan else 0, **plan)
    assert room.room.take(RequestKind.NEW_PROMPT, 300, 300, None) == 0
    assert room.room.take(RequestKind.STARTED_PREFILL, 300, 300, None) == 256


@pytest.mark.parametrize(
    ("kind", "num_cached_tokens", "free_blocks", "left"),
    [
        (RequestKind.RECOMPUTE, 0, 20, 156),
        (RequestKind.RECOVERY, 0, 20, 156),
        (RequestKind.RECOMPUTE, 60, 20, 216),
        # 100 tokens need 4 blocks.
        (RequestKind.RECOMPUTE, 0, 4, 156),
        (RequestKind.RECOMPUTE, 0, 3, 256),
        (RequestKind.NEW_PROMPT, 0, 20, 256),
    ],
)
@pytest.mark.parametrize("asks", [RequestKind.STARTED_PREFILL, RequestKind.NEW_PROMPT])
def test_a_waiting_recompute_goes_ahead_of_running_prefills(
    kind: RequestKind, num_cached_tokens: int, free_blocks: int, left: int, asks: RequestKind
) -> None:
    room = Room()
    room.free_blocks = free_blocks
    next_one = add(room.tracker, "next", kind, 100, num_cached_tokens=num_cached_tokens)
    add(room.tracker, "a", asks, 900)

    class Waiting(list[Any]):
        def peek_request(self) -> Any:
            return self[0]

    room.renew()
    waiting = Waiting([next_one.request])
    assert room.room.take(asks, 900, 900, waiting) == left
    assert room.room.take(RequestKind.RECOMPUTE, 100, 100, Waiting()) == min(100, 256 - left)


def test_progress_is_due_a_quarter_second_after_the_last_prefill_or_since_prefills_wait() -> None:
    room = Room()
    for index in range(300):
        add(room.tracker, f"decode {index}", RequestKind.DECODE, 300, 310)
    assert room.renew(now_s=NOW_S + 5) == 0
    add(room.tracker, "a", RequestKind.NEW_PROMPT, 300)
    assert room.renew(now_s=NOW_S + 5.2) == 0
    assert room.renew(now_s=NOW_S + 5.25) == 128
    assert room.room.take(RequestKind.NEW_PROMPT, 300, 300, None) == 128
    room.room.note_prefill(NOW_S + 5.25)
    assert room.renew(now_s=NOW_S + 5.49) == 0
    assert room.renew(now_s=NOW_S + 5.5) == 128
