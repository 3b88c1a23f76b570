"""Bookkeeping of hand-offs: which requests end with one, what is pinned and released; vLLM is imported, none starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine_harness
import pytest


@pytest.fixture(scope="module")
def module() -> Any:
    engine_harness.import_vllm()
    from sluice_engine.kv_transfer import outgoing_hand_offs  # noqa: PLC0415 - vLLM takes nine seconds to import

    return outgoing_hand_offs


class Connector:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def announce_hand_off(self, request_id: str) -> None:
        self.calls.append(("announce", request_id))

    def retract_hand_off(self, request_id: str) -> None:
        self.calls.append(("retract", request_id))

    def hand_off(self, request: Any) -> None:
        self.calls.append(("hand off", request.request_id))

    def release(self, request_id: str) -> None:
        self.calls.append(("release", request_id))


@pytest.fixture
def hand_offs(module: Any) -> Any:
    return module.OutgoingHandOffs(Connector(), 1000)


def make_request(status: str = "RUNNING", **changes: Any) -> Any:
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    fields = {
        "request_id": "a",
        "status": RequestStatus[status],
        "num_output_tokens": 10,
        "num_output_placeholders": 0,
        "num_tokens": 110,
        "max_tokens": 50,
        "is_prefill_chunk": False,
    } | changes
    request = SimpleNamespace(**fields)
    request.is_finished = lambda: RequestStatus.is_finished(request.status)
    return request


def end(request: Any, status: str = "FINISHED_LENGTH_CAPPED", num_tokens: int = 1) -> None:
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    request.num_output_tokens += num_tokens
    request.num_tokens += num_tokens
    request.status = RequestStatus[status]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        (None, "unknown"),
        ({"status": "FINISHED_STOPPED"}, "unknown"),
        ({"status": "PREEMPTED"}, "preempted"),
        ({"status": "WAITING"}, "waiting"),
        ({"is_prefill_chunk": True}, "prefill"),
        ({"num_output_tokens": 0}, "prefill"),
        ({"num_output_tokens": 1}, ""),
    ],
)
def test_only_a_running_decode_is_handed_off(fields: dict[str, Any] | None, reason: str, hand_offs: Any) -> None:
    request = None if fields is None else make_request(**fields)
    answer = hand_offs.request("a", request)
    assert (answer.request_id, answer.is_accepted, answer.reason) == ("a", not reason, reason)
    assert hand_offs._connector.calls == ([] if reason else [("announce", "a")])
    assert request is None or (request.max_tokens == 50) == bool(reason)


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, 11),
        ({"num_output_placeholders": 1}, 11),
        ({"num_output_placeholders": 2}, 12),
        ({"max_tokens": 11}, 11),
        ({"num_output_placeholders": 2, "max_tokens": 11}, 11),
    ],
    ids=["next token", "one under way", "two under way", "its own end", "its own end before"],
)
def test_it_ends_with_the_token_under_way_or_the_next(fields: dict[str, int], last: int, hand_offs: Any) -> None:
    request = make_request(**fields)
    hand_offs.begin(request)
    hand_offs.begin(request)
    assert request.max_tokens == last
    assert hand_offs._connector.calls == [("announce", "a")]


@pytest.mark.parametrize(
    ("planned", "fields", "last"),
    [
        (14, {}, 14),
        (14, {"num_output_placeholders": 2}, 14),
        (11, {"num_output_placeholders": 2}, 12),
        (3, {}, 11),
        (60, {}, 50),
    ],
    ids=["planned", "planned, two under way", "two under way already", "past it", "its own end"],
)
def test_it_ends_where_it_was_planned_to(planned: int, fields: dict[str, int], last: int, hand_offs: Any) -> None:
    request = make_request(**fields)
    assert hand_offs.request("a", request, planned).is_accepted
    assert request.max_tokens == last


def test_a_cancelled_hand_off_gives_the_request_its_length_back(hand_offs: Any) -> None:
    request = make_request()
    assert not hand_offs.cancel(request)
    assert hand_offs._connector.calls == []
    hand_offs.begin(request)
    assert hand_offs.cancel(request)
    assert request.max_tokens == 50
    assert hand_offs._connector.calls == [("announce", "a"), ("retract", "a")]
    assert not hand_offs.cancel(request)
    hand_offs.begin(request)
    assert request.max_tokens == 11


@pytest.mark.parametrize("status", ["FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"])
def test_the_first_part_of_a_prompt_ends_with_its_hand_off_whatever_else_is_asked(status: str, hand_offs: Any) -> None:
    request = make_request(num_output_tokens=0, num_tokens=100, max_tokens=1)
    hand_offs.begin_first_part(request)
    assert request.max_tokens == 1
    assert not hand_offs.cancel(request), "it has been preempted, and is computed again"
    hand_offs.begin(request)
    end(request, status)
    hand_offs.settle(request)
    is_whole = status == "FINISHED_LENGTH_CAPPED"
    assert hand_offs._connector.calls == [("announce", "a"), ("hand off" if is_whole else "retract", "a")]
    assert hand_offs.num_moved_out == is_whole
    hand_offs.begin(request)
    assert hand_offs.cancel(request), "nothing is left of it"


@pytest.mark.parametrize(
    ("fields", "status", "is_handed_off"),
    [
        ({}, "FINISHED_LENGTH_CAPPED", True),
        ({}, "FINISHED_STOPPED", False),
        ({}, "FINISHED_ABORTED", False),
        # Its own last token, or the longest that the model takes.
        ({"max_tokens": 11}, "FINISHED_LENGTH_CAPPED", False),
        ({"max_tokens": 12}, "FINISHED_LENGTH_CAPPED", True),
        ({"num_tokens": 999}, "FINISHED_LENGTH_CAPPED", False),
        ({"num_tokens": 998}, "FINISHED_LENGTH_CAPPED", True),
    ],
)
def test_a_request_that_ends_of_itself_is_not_handed_off(
    fields: dict[str, int], status: str, *, is_handed_off: bool, hand_offs: Any
) -> None:
    request = make_request(**fields)
    hand_offs.settle(request)
    hand_offs.begin(request)
    end(request, status)
    hand_offs.settle(request)
    assert hand_offs._connector.calls == [("announce", "a"), ("hand off" if is_handed_off else "retract", "a")]
    assert hand_offs.num_moved_out == int(is_handed_off)
    hand_offs.settle(request)
    assert len(hand_offs._connector.calls) == 2


def test_pinned_blocks_are_counted_until_they_are_free(hand_offs: Any) -> None:
    hand_offs.pin("a", 5)
    hand_offs.pin("b", 3)
    assert (hand_offs.num_pinned_blocks, hand_offs.is_pinned("a"), hand_offs.is_pinned("c")) == (8, True, False)
    hand_offs.unpin("a")
    hand_offs.unpin("a")
    hand_offs.unpin("never pinned")
    assert (hand_offs.num_pinned_blocks, hand_offs.is_pinned("a")) == (3, False)


def test_the_end_of_a_lease_is_taken_once(hand_offs: Any) -> None:
    assert hand_offs.drop_released({"b"}) == {"b"}
    hand_offs.release("a")
    assert hand_offs._connector.calls == [("release", "a")]
    assert hand_offs.drop_released(None) is None
    assert hand_offs.drop_released({"b", "a"}) == {"b"}
    assert hand_offs.drop_released({"a"}) == {"a"}
