"""What Sluice's scheduler decides around vLLM's own methods, each decision by itself: a stock scheduler is played."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from played_engines import import_vllm
from test_request_tracker import add, make_request, make_tracker

from sluice_core.scheduling.engine_policy import RequestKind
from sluice_engine import core_messages
from sluice_engine.request_tracker import track_request
from sluice_engine.scheduling.expected_arrivals import ExpectedArrivals


class Stock:
    """The part of vLLM's scheduler that the mixin calls."""

    calls: list[Any]
    is_ready = True

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool) -> None:  # noqa: FBT001
        self.calls.append(("preempt", request, timestamp, drop_stale_output, self.describe(request)))

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        self.calls.append(("blocked", request))
        return self.is_ready

    def add_request(self, request: Any) -> None:
        self.calls.append(("add", request))

    def has_finished_requests(self) -> bool:
        return False

    def describe(self, request: Any) -> tuple[Any, ...]:
        """A request's class, and its place in vLLM's order."""
        return self.tracker.by_id[request.request_id].kind, request.priority, request.arrival_time

    tracker: Any


class Outbox:
    """Keeps what is to be reported."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.has_news = False

    def note_refused(self, request_id: str, reason: str) -> None:
        self.notes.append((request_id, reason))


def make_scheduler(**fields: Any) -> Any:
    """A scheduler of which only what a decision needs is there."""
    mixin = import_vllm().scheduler.SluiceMixin
    scheduler = object.__new__(type("Scheduler", (mixin, Stock), {}))
    scheduler.calls, scheduler.tracker = [], make_tracker()
    scheduler._tracker = scheduler.tracker
    for name, value in fields.items():
        setattr(scheduler, name, value)
    return scheduler


@pytest.mark.parametrize(
    ("num_running", "num_joining", "num_open", "has_seat"),
    [(0, 0, 0, True), (3, 0, 0, True), (4, 0, 0, False), (2, 1, 0, True), (2, 2, 0, False), (2, 1, 1, False)],
)
def test_a_seat_is_neither_taken_nor_promised(
    *, num_running: int, num_joining: int, num_open: int, has_seat: bool
) -> None:
    scheduler = make_scheduler(
        running=[object()] * num_running, _grants=SimpleNamespace(num_open=num_open), max_num_active_reqs=4
    )
    for index in range(num_joining):
        add(scheduler.tracker, f"joining {index}", RequestKind.JOINING, 50)
    add(scheduler.tracker, "prompt", RequestKind.NEW_PROMPT, 50)
    assert scheduler._has_seat() is has_seat


@pytest.mark.parametrize(
    ("kind", "is_running", "expected"),
    [
        (None, False, False),
        (None, True, True),
        (RequestKind.NEW_PROMPT, False, True),
        (RequestKind.DECODE, False, False),
    ],
)
def test_prefills_wait_or_run(*, kind: RequestKind | None, is_running: bool, expected: bool) -> None:
    scheduler = make_scheduler(_timer=SimpleNamespace(has_prefills=lambda: is_running))
    if kind is not None:
        add(scheduler.tracker, "a", kind, 50)
    assert scheduler._is_prefilling() is expected


@pytest.mark.parametrize(
    ("kind", "status", "is_waiting"),
    [
        (RequestKind.RECOMPUTE, "PREEMPTED", True),
        (RequestKind.RECOMPUTE, "RUNNING", False),
        (RequestKind.RECOVERY, "PREEMPTED", False),
    ],
)
def test_a_preempted_request_waits_until_it_runs(*, kind: RequestKind, status: str, is_waiting: bool) -> None:
    scheduler = make_scheduler()
    statuses = import_vllm().scheduler.RequestStatus
    add(scheduler.tracker, "other", RequestKind.RECOMPUTE, 50, status=statuses.RUNNING)
    add(scheduler.tracker, "a", kind, 50, status=getattr(statuses, status))
    assert scheduler._is_recompute_waiting() is is_waiting


@pytest.mark.parametrize(
    ("num_free", "has_prefill", "is_sorted"),
    [(2, False, False), (1, False, True), (3, True, True), (2, True, True)],
    ids=["a block each", "one too few", "a prefill runs", "both"],
)
def test_the_running_list_is_put_in_order_where_it_matters(
    *, num_free: int, has_prefill: bool, is_sorted: bool
) -> None:
    pool = SimpleNamespace(get_num_free_blocks=lambda: num_free)
    scheduler = make_scheduler(kv_cache_manager=SimpleNamespace(block_pool=pool))
    late, early = (
        add(scheduler.tracker, name, RequestKind.DECODE, 50, arrival_s=arrival_s)
        for name, arrival_s in (("late", 9.0), ("early", 1.0))
    )
    members = [late, early]
    if has_prefill:
        members.insert(0, add(scheduler.tracker, "prefill", RequestKind.STARTED_PREFILL, 50))
    for tracked in members:
        scheduler.tracker.place_running(tracked)
    scheduler.running = [tracked.request for tracked in members]
    scheduler._order_running()
    expected = ["early", "late"] if is_sorted else ["late", "early"]
    assert [request.request_id for request in scheduler.running] == [*expected, *["prefill"] * has_prefill]


ROOM = [
    # class, hidden by the limits, hidden by the selection, has a seat, tokens
    (RequestKind.DECODE, False, True, False, 40),
    (RequestKind.DECODE, True, False, True, 0),
    (RequestKind.JOINING, False, True, False, 40),
    (RequestKind.NEW_PROMPT, False, False, True, 7),
    (RequestKind.NEW_PROMPT, False, False, False, 0),
    (RequestKind.NEW_PROMPT, False, True, True, 0),
    (RequestKind.STARTED_PREFILL, False, False, False, 7),
    (RequestKind.STARTED_PREFILL, False, True, True, 0),
    (RequestKind.RECOMPUTE, False, False, False, 7),
]


@pytest.mark.parametrize(("kind", "hidden", "unselected", "has_seat", "tokens"), ROOM)
def test_who_gets_tokens_of_an_iteration(
    *, kind: RequestKind, hidden: bool, unselected: bool, has_seat: bool, tokens: int
) -> None:
    asked: list[Any] = []

    def take(*given: Any, context_tokens: int) -> int:
        asked.append((*given, context_tokens))
        return 7

    scheduler = make_scheduler(
        _prefill_chunks=SimpleNamespace(hides=lambda _: hidden, withholds_decodes=hidden, take=take),
        _selection=SimpleNamespace(hides=lambda _: unselected),
        _has_seat=lambda: has_seat,
        waiting="the heap",
    )
    tracked = add(scheduler.tracker, "a", kind, 300, 100)
    assert scheduler._reserve_prefill_lookahead(tracked.request, 120, 40) == tokens
    assert asked == ([(kind, 40, 180, "the heap", 120)] if tokens == 7 else [])


@pytest.mark.parametrize("leaves", [True, False], ids=["on its way out", "stays"])
def test_a_preempted_decode_waits_to_be_recomputed_and_leaves_no_trace(*, leaves: bool) -> None:
    left: list[str] = []
    scheduler = make_scheduler(
        _hand_offs=SimpleNamespace(cancel=lambda _: leaves),
        _outbox=Outbox(),
        _moves=SimpleNamespace(leave=left.append),
        _num_preemptions=2,
    )
    tracked = add(scheduler.tracker, "a", RequestKind.DECODE, 300, 310, arrival_s=5.0)
    scheduler.tracker.place_running(tracked)

    scheduler._preempt_request(tracked.request, 77.0, True)  # noqa: FBT003
    ((_, request, timestamp, drops, place),) = scheduler.calls
    # vLLM puts it into the waiting heap, whose order it must have by then.
    assert (request, timestamp, drops) == (tracked.request, 77.0, True)
    order = scheduler.tracker.policy.order_key(RequestKind.RECOMPUTE, 5.0, 0)
    assert place == (RequestKind.RECOMPUTE, int(order[0]), order[1])
    assert scheduler._outbox.notes == ([("a", "preempted")] if leaves else [])
    assert (left, scheduler._num_preemptions) == (["a"], 3)


def test_what_a_preempted_request_has_computed_is_counted_when_vllm_has_reset_it() -> None:
    scheduler = make_scheduler(
        _hand_offs=SimpleNamespace(cancel=lambda _: False),
        _outbox=Outbox(),
        _moves=SimpleNamespace(leave=lambda _: None),
        _num_preemptions=0,
    )
    tracked = add(scheduler.tracker, "a", RequestKind.DECODE, 300, 299)
    request = tracked.request
    scheduler.describe = lambda request: setattr(request, "num_computed_tokens", 0)
    scheduler._preempt_request(request, 1.0)
    assert scheduler.tracker.queued_prefill_tokens == 300


@pytest.mark.parametrize(
    ("status", "num_running", "is_compiling"),
    [
        ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", 0, True),
        ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", 1, False),
        ("WAITING", 0, False),
    ],
)
def test_no_iteration_is_due_while_only_grammars_are_compiled(
    *, status: str, num_running: int, is_compiling: bool
) -> None:
    load = core_messages.SchedulerLoad(queued_requests=1)
    scheduler = make_scheduler(running=[object()] * num_running, _measure_load=lambda: load)
    assert scheduler._carry_out(core_messages.ReadLoadCommand()) == load
    value = getattr(import_vllm().scheduler.RequestStatus, status)
    add(scheduler.tracker, "a", RequestKind.NEW_PROMPT, 50, status=value)
    expected = core_messages.CompilingAnswer(load=load) if is_compiling else load
    assert scheduler._carry_out(core_messages.ReadLoadCommand()) == expected


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("status", ["WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING"])
@pytest.mark.parametrize("num_computed", [0, 5])
def test_who_has_waited_for_its_kv_goes_on_only_with_it(*, is_ready: bool, status: str, num_computed: int) -> None:
    replayed: list[Any] = []
    scheduler = make_scheduler(is_ready=is_ready)
    scheduler._replay_grammar = lambda request: replayed.append(request) or "replayed"
    value = getattr(import_vllm().scheduler.RequestStatus, status)
    tracked = add(scheduler.tracker, "a", RequestKind.RECOMPUTE, 50, num_computed, status=value)
    tracked.request.priority = 99
    got = scheduler._handle_blocked_waiting_request(tracked.request)
    has_failed = is_ready and status == "WAITING_FOR_REMOTE_KVS" and not num_computed
    is_grammar = is_ready and status.endswith("GRAMMAR")
    assert got == ("replayed" if is_grammar else is_ready and not has_failed)
    assert replayed == ([tracked.request] if is_grammar else [])
    # It has a place of its own among those that recompute.
    assert (tracked.request.priority == 99) is not has_failed


@pytest.mark.parametrize(("has_news", "is_reading"), [(False, False), (True, False), (False, True)])
def test_an_idle_engine_goes_on_while_something_is_to_be_heard(*, has_news: bool, is_reading: bool) -> None:
    outbox = Outbox()
    outbox.has_news = has_news
    scheduler = make_scheduler(_outbox=outbox, _part_pulls=SimpleNamespace(is_reading=is_reading))
    assert scheduler.has_finished_requests() is (has_news or is_reading)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_only_kv_that_waits_for_a_reader_is_released(*, is_pinned: bool) -> None:
    done: list[Any] = []
    scheduler = make_scheduler(
        _hand_offs=SimpleNamespace(is_pinned=lambda _: is_pinned, release=lambda name: done.append(("release", name))),
        requests={"a": "its record"},
    )
    scheduler._free_blocks = lambda request: done.append(("free", request))
    scheduler._release("a")
    assert done == ([("release", "a"), ("free", "its record")] if is_pinned else [])


def test_an_iteration_waits_no_more_for_a_request_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = SimpleNamespace(grant_key="1.5", output_token_ids=[], is_first_part=False)
    tracked, request, nothing = SimpleNamespace(extras=extras), SimpleNamespace(request_id="r"), lambda *_: 0
    monkeypatch.setattr(import_vllm().scheduler, "track_request", lambda *_: tracked)
    arrivals = ExpectedArrivals()
    for key in ("1.5", "1.6"):
        arrivals.expect(key, 0.0)
    scheduler = make_scheduler(
        _arrivals=arrivals,
        _grants=SimpleNamespace(claim=nothing, count_held=nothing),
        _pulls=SimpleNamespace(classify=lambda *_: RequestKind.JOINING),
        _tracker=SimpleNamespace(add=nothing),
        _outbox=SimpleNamespace(note_submit=nothing),
        _recorder=None,
        block_size=16,
    )
    scheduler.add_request(request)
    assert (scheduler.calls, tracked.kind) == ([("add", request)], RequestKind.JOINING)
    assert arrivals.has_any(0.0)
    arrivals.forget("1.6")
    assert not arrivals.has_any(0.0)


def test_only_what_may_still_come_is_expected() -> None:
    arrivals, notes, released = ExpectedArrivals(), [], []
    scheduler = make_scheduler(
        _arrivals=arrivals,
        _outbox=SimpleNamespace(note_pulled=notes.append),
        _grants=SimpleNamespace(release_open=released.append),
    )
    failed = core_messages.PulledPart(key="1.1", num_tokens=0, reason="failed")
    whole = core_messages.PulledPart(key="1.2", num_tokens=64, reason="")
    scheduler._note_pulled(failed)
    assert not arrivals.has_any(0.0)
    scheduler._note_pulled(whole)
    assert arrivals.has_any(0.0)
    # A grant that is given back brings nobody any more.
    assert scheduler._carry_out(core_messages.ReleaseGrantCommand(key="1.2")) == core_messages.EmptyAnswer()
    assert not arrivals.has_any(0.0)
    assert (notes, released) == ([failed, whole], ["1.2"])


@pytest.mark.parametrize(("ttft_slo_s", "deadline_s"), [(2.0, 2.0), (0.0, math.inf)], ids=["one", "none"])
def test_a_prompt_without_an_objective_has_no_deadline(ttft_slo_s: float, deadline_s: float) -> None:
    asked: list[dict[str, Any]] = []
    tracker = make_tracker()
    tracker.selector = SimpleNamespace(add=lambda _request_id, **fields: asked.append(fields))  # type: ignore[assignment]
    extras = core_messages.RequestExtras(ttft_slo_s=ttft_slo_s, arrival_s=90.0)
    request = make_request("a", priority=3, sampling_params=SimpleNamespace(extra_args=extras.encode()))
    tracker.add(track_request(request, 100.0))
    assert asked == [{"arrival_s": 90.0, "ttft_slo_s": deadline_s, "priority": 3, "tokens": 300}]


def test_a_new_policy_orders_every_queue_anew_while_no_heap_holds_its_requests() -> None:
    done: list[tuple[str, str]] = []

    class Queue(list[Any]):
        def remove_requests(self, requests: list[Any]) -> None:
            done.extend(("out", request.request_id) for request in requests)

        def add_request(self, request: Any) -> None:
            done.append(("in", request.request_id))

    requests = {name: make_request(name) for name in ("waits", "holds", "runs")}
    tracker = SimpleNamespace(
        by_id={name: name for name in requests},
        place=lambda name: done.append(("place", name)),
        place_running=lambda name: done.append(("place as running", name)),
    )
    make_scheduler(
        _tracker=tracker,
        _plan=SimpleNamespace(policy="policy"),
        _selection=SimpleNamespace(adopt=lambda policy: done.append(("adopt", policy))),
        waiting=Queue([requests["waits"]]),
        kv_holding_waiting=Queue([requests["holds"]]),
        running=[requests["runs"]],
    )._adopt_policy()
    moves = [(step, name) for name in ("waits", "holds") for step in ("out", "place", "in")]
    assert done == [("adopt", "policy"), *moves, ("place as running", "runs")]
