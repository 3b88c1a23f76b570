"""Which prompts the next iteration computes where the policy selects them, and their order in vLLM's waiting heap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from test_request_tracker import add

from sluice_core.kv_blocks import KvBlocks
from sluice_core.latency import OnlineLatencyModel
from sluice_core.records import IterationShape
from sluice_core.scheduling.engine_policy import PrefillSelector, RequestKind
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters
from sluice_engine.core_messages import IterationReport
from sluice_engine.request_tracker import RequestTracker
from sluice_engine.scheduling.prefill_selection import PrefillSelection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_core.latency import LatencyModel

BLOCK_SIZE = 32
NOW_S = 500.0


class PlayedSelector(PrefillSelector):
    """Selects what a test says."""

    def __init__(self, latency: LatencyModel | None = None) -> None:
        self.latency = latency
        self.selected: list[str] = []
        self.started: list[str] = []
        self.asked: list[tuple[float, Any]] = []
        self.prompts: dict[str, Any] = {}

    def add(self, request_id: str, **fields: Any) -> None:
        self.prompts[request_id] = fields

    def advance(self, request_id: str, num_computed_tokens: int) -> None:
        self.prompts[request_id] = num_computed_tokens

    def remove(self, request_id: str) -> None:
        self.prompts.pop(request_id, None)

    def select(self, now: float, engine: Any) -> list[Any]:
        self.asked.append((now, engine))
        return list(self.selected)

    def rank_started(self) -> list[Any]:
        return list(self.started)


class Heap:
    """vLLM's waiting heap, whose requests must not change their place while it holds them."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[Any, int, float]] = {}
        self.num_changes = 0

    def add_request(self, request: Any) -> None:
        assert request.request_id not in self.held
        self.held[request.request_id] = request, request.priority, request.arrival_time
        self.num_changes += 1

    def remove_request(self, request: Any) -> None:
        assert self.held.pop(request.request_id)[1:] == (request.priority, request.arrival_time)

    def __len__(self) -> int:
        return len(self.held)

    def peek_request(self) -> Any:
        return self.held[self.order[0]][0]

    @property
    def order(self) -> list[str]:
        """Ids in vLLM's order."""
        for request, *place in self.held.values():
            assert place == [request.priority, request.arrival_time]
        return [name for name, _ in sorted(self.held.items(), key=lambda item: item[1][1:])]


class Table:
    """Prompts of an engine: each waits, or has started, as a test says."""

    def __init__(self, *, waiting: Sequence[str] = "", started: Sequence[str] = "", selects: bool = True) -> None:
        self.tracker = RequestTracker(get_strategy("taichi").make_engine(StrategyParameters()))
        self.free_blocks = 4
        usage: Any = SimpleNamespace(measure=lambda: KvBlocks(total=self.free_blocks, used=0))
        self.selection = PrefillSelection(self.tracker, usage)
        self.heap = Heap()
        for index, name in enumerate(waiting):
            # 100 tokens take four blocks.
            self.heap.add_request(add(self.tracker, name, RequestKind.NEW_PROMPT, 100, arrival_s=NOW_S + index).request)
        for name in started:
            add(self.tracker, name, RequestKind.STARTED_PREFILL, 100, 40)
        self.selector = PlayedSelector()
        if selects:
            self.adopt(self.selector)

    def adopt(self, selector: PlayedSelector | None) -> None:
        def make(latency: LatencyModel) -> PlayedSelector | None:
            if selector is not None:
                selector.latency = latency
            return selector

        policy = get_strategy("taichi").make_engine(StrategyParameters())
        self.selection.adopt(SimpleNamespace(make_selector=make, order_key=policy.order_key))  # type: ignore[arg-type]

    def renew(self, *selected: str, has_seat: bool = True) -> None:
        self.selector.selected = list(selected)
        batch: Any = SimpleNamespace(block_size_tokens=BLOCK_SIZE)
        self.selection.renew(NOW_S, batch, self.heap, has_seat=has_seat)

    @property
    def shown(self) -> list[str]:
        """Who is not hidden, in the order of the places."""
        by_id = self.tracker.by_id
        found = [tracked for tracked in by_id.values() if not self.selection.hides(tracked)]
        return [tracked.request.request_id for tracked in sorted(found, key=lambda each: each.selected_place or 0)]


def test_what_waits_goes_in_the_order_in_which_it_is_selected() -> None:
    table = Table(waiting="abcd")
    assert table.heap.order == ["a", "b", "c", "d"]
    assert table.shown == []
    table.renew("c", "b")
    assert table.heap.order == ["c", "b", "a", "d"]
    assert table.shown == ["c", "b"]
    ((now_s, batch),) = table.selector.asked
    assert (now_s, batch.block_size_tokens) == (NOW_S, BLOCK_SIZE)
    table.renew("b", "d")
    assert table.heap.order == ["b", "d", "a", "c"]
    table.renew()
    assert (table.heap.order, table.shown) == (["a", "b", "c", "d"], [])


def test_a_selected_prompt_waits_behind_requests_to_recompute_and_ahead_of_everything_else() -> None:
    table = Table(waiting="ab")
    recompute = add(table.tracker, "recompute", RequestKind.RECOMPUTE, 100, arrival_s=NOW_S + 99)
    table.heap.add_request(recompute.request)
    table.renew("b")
    assert table.heap.order == ["recompute", "b", "a"]
    assert table.tracker.by_id["b"].request.priority == RequestKind.STARTED_PREFILL


def test_who_keeps_its_place_is_not_moved() -> None:
    table = Table(waiting="abc")
    table.renew("a", "b")
    num_changes = table.heap.num_changes
    table.renew("a", "b")
    assert table.heap.num_changes == num_changes
    table.renew("a", "c")
    assert table.heap.num_changes == num_changes + 2


def test_one_that_has_ended_since_needs_no_place() -> None:
    table = Table(waiting="ab")
    table.renew("a", "b")
    table.heap.remove_request(table.tracker.by_id["a"].request)
    table.tracker.discard("a")
    table.renew("b")
    assert (table.heap.order, table.shown) == (["b"], ["b"])


def test_what_has_started_keeps_its_place_in_vllms_running_list() -> None:
    table = Table(waiting="a", started="xy")
    before = {name: vars(table.tracker.by_id[name].request).copy() for name in "xy"}
    table.renew("y", "a")
    assert table.shown == ["y", "a"]
    assert table.heap.order == ["a"]
    assert {name: vars(table.tracker.by_id[name].request) for name in "xy"} == before
    table.renew("x")
    assert table.shown == ["x"]


@pytest.mark.parametrize("kind", [kind for kind in RequestKind if kind.name not in ("NEW_PROMPT", "STARTED_PREFILL")])
def test_only_prompts_without_a_token_are_hidden(kind: RequestKind) -> None:
    table = Table()
    assert not table.selection.hides(add(table.tracker, "a", kind, 100, 40))


@pytest.mark.parametrize("kind", [RequestKind.NEW_PROMPT, RequestKind.STARTED_PREFILL])
def test_nothing_is_hidden_where_nothing_is_selected(kind: RequestKind) -> None:
    table = Table(selects=False)
    tracked = add(table.tracker, "a", kind, 100)
    table.renew("a")
    assert not table.selection.hides(tracked)
    assert (tracked.selected_place, table.selector.asked) == (None, [])


BLOCKED = [
    # selected, has a seat, free blocks, the last iteration was empty, shown
    (["a", "b"], True, 4, False, ["a", "b"]),
    (["a", "b"], True, 3, False, ["y", "x"]),
    (["a", "b"], False, 4, False, ["y", "x"]),
    (["a", "b"], True, 4, True, ["y", "x"]),
    (["a", "x"], False, 0, True, ["a", "x"]),
    (["x", "a"], False, 0, True, ["x", "a"]),
    ([], False, 0, True, []),
]


@pytest.mark.parametrize(("selected", "has_seat", "free_blocks", "has_idled", "shown"), BLOCKED)
def test_what_has_started_goes_on_where_nothing_that_is_selected_can_start(
    *, selected: list[str], has_seat: bool, free_blocks: int, has_idled: bool, shown: list[str]
) -> None:
    table = Table(waiting="ab", started="xy")
    table.selector.started, table.free_blocks = ["y", "x"], free_blocks
    table.selection.note_scheduled(0 if has_idled else 1)
    table.renew(*selected, has_seat=has_seat)
    assert table.shown == shown


def test_the_first_of_those_selected_says_whether_the_blocks_suffice() -> None:
    table = Table(waiting="ab", started="x")
    table.selector.started, table.free_blocks = ["x"], 3
    table.tracker.by_id["b"].request.num_tokens = 96
    table.renew("b", "a")
    assert table.shown == ["b", "a"]
    table.renew("a", "b")
    assert table.shown == ["x"]


@pytest.mark.parametrize("kind", [RequestKind.RECOMPUTE, RequestKind.RECOVERY])
@pytest.mark.parametrize(("tokens", "shown"), [(128, ["a"]), (129, ["x"])])
def test_what_has_started_goes_on_where_a_recompute_ahead_of_all_prompts_finds_too_few_blocks(
    kind: RequestKind, tokens: int, shown: list[str]
) -> None:
    """It waits for blocks that what has started may hold, and no prompt overtakes it."""
    table = Table(waiting="a", started="x")
    table.selector.started = ["x"]
    ahead = add(table.tracker, "ahead", kind, tokens)
    table.heap.add_request(ahead.request)
    table.renew("a")
    assert [name for name in table.shown if name != "ahead"] == shown


def test_what_is_blocked_stays_selected_where_nothing_has_started() -> None:
    table = Table(waiting="a")
    table.renew("a", has_seat=False)
    assert table.shown == ["a"]


def test_an_iteration_with_tokens_ends_the_time_of_empty_ones() -> None:
    table = Table(waiting="a", started="x")
    table.selector.started = ["x"]
    table.selection.note_scheduled(0)
    table.selection.note_scheduled(5)
    table.renew("a")
    assert table.shown == ["a"]


def test_suspended_prompts_are_counted_over_all_policies() -> None:
    table = Table(waiting="a")
    assert table.selection.num_suspended == 0
    table.selector.num_suspended = 3
    assert table.selection.num_suspended == 3
    second = PlayedSelector()
    table.adopt(second)
    second.num_suspended = 2
    assert table.selection.num_suspended == 5
    table.adopt(None)
    assert table.selection.num_suspended == 5


def test_a_new_policy_selects_anew() -> None:
    table = Table(waiting="ab")
    table.renew("b")
    second = table.selector = PlayedSelector()
    for tracked in table.tracker.by_id.values():
        table.heap.remove_request(tracked.request)
    table.adopt(second)
    assert set(second.prompts) == {"a", "b"}
    for tracked in table.tracker.by_id.values():
        assert tracked.selected_place is None
        table.tracker.place(tracked)
        table.heap.add_request(tracked.request)
    assert table.heap.order == ["a", "b"]
    table.renew("b")
    assert table.heap.order == ["b", "a"]


def report(number: int, duration_s: float) -> IterationReport:
    return IterationReport(
        number=number,
        prefill_tokens=100 * number,
        attention_work=5000.0 * number,
        num_chunks=2,
        num_decodes=3 * number,
        decode_context_tokens=700,
        duration_s=duration_s,
    )


@pytest.mark.parametrize("selects", [True, False])
def test_the_selector_learns_how_long_iterations_take(*, selects: bool) -> None:
    table = Table(selects=False)
    latency: list[LatencyModel] = []
    if selects:
        table.adopt(table.selector)
    reports = [report(number, 0.05 * number) for number in (1, 2, 3, 4, 5)]
    for each in reports:
        table.selection.observe(each)
    if not selects:
        table.adopt(table.selector)
    assert table.selector.latency is not None
    latency.append(table.selector.latency)
    expected = OnlineLatencyModel()
    shapes = [
        IterationShape(
            prefill_tokens=each.prefill_tokens,
            attention_work=each.attention_work,
            num_chunks=each.num_chunks,
            num_decodes=each.num_decodes,
            decode_context_tokens=each.decode_context_tokens,
        )
        for each in reports
    ]
    for shape, each in zip(shapes, reports, strict=True):
        if selects:
            expected.observe(shape, each.duration_s)
    untouched = OnlineLatencyModel()
    assert latency[0].estimate_shape_s(shapes[2]) == expected.estimate_shape_s(shapes[2])
    assert (expected.estimate_shape_s(shapes[2]) != untouched.estimate_shape_s(shapes[2])) is selects
