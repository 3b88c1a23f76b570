"""Fair sharing among owners: in proportion to weights, nobody starves, and urgency rules within an owner."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.scheduling.fair_share import FairShare
from sluice_core.scheduling.waiting_order import MAX_ASSIGNED_AT_ONCE, Urgency, compute_urgency


class Request(NamedTuple):
    number: int
    owner: str
    tokens: int
    arrival_s: float = 0.0
    priority: int = 0
    is_recovery: bool = False


def urgency_of(request: Request) -> Urgency:
    return compute_urgency(
        is_recovery=request.is_recovery,
        next_token_due_s=request.arrival_s,
        priority=request.priority,
        arrival_s=request.arrival_s,
    )


def select(share: FairShare, waiting: list[Request], weights: dict[str, int]) -> list[Request]:
    return share.select(
        waiting, lambda one: one.owner, urgency_of, lambda one: one.tokens, lambda owner: weights.get(owner, 1)
    )


def place_next(share: FairShare, waiting: list[Request], weights: dict[str, int]) -> Request:
    request = select(share, waiting, weights)[0]
    waiting.remove(request)
    share.place(request.owner, request.tokens, weights.get(request.owner, 1))
    return request


REQUESTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 8000), st.floats(0, 100), st.integers(-3, 3)),
    min_size=2,
    max_size=40,
)
SMALL = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2000)), min_size=1, max_size=8)
WEIGHTS = st.fixed_dictionaries({owner: st.integers(1, 10) for owner in "abc"})


@settings(deadline=None, max_examples=50)
@given(REQUESTS, WEIGHTS)
def test_owners_with_requests_to_spare_get_tokens_by_their_weights(rows, weights):
    """Goyal et al., theorem 1: the difference is at most one request of each."""
    waiting = [Request(number, *row) for number, row in enumerate(rows)]
    share, served = FairShare(), defaultdict(int)
    largest = {owner: max((one.tokens for one in waiting if one.owner == owner), default=0) for owner in "abc"}
    while all(any(one.owner == owner for one in waiting) for owner in "ab"):
        request = place_next(share, waiting, weights)
        served[request.owner] += request.tokens
        gap = abs(served["a"] / weights["a"] - served["b"] / weights["b"])
        assert gap <= largest["a"] / weights["a"] + largest["b"] / weights["b"] + 1e-6


@settings(deadline=None, max_examples=50)
@given(SMALL, WEIGHTS, st.integers(500, 8000))
def test_nobody_starves_beside_an_owner_that_never_stops(rows, weights, tokens):
    waiting = [Request(number, *row) for number, row in enumerate(rows)]
    share = FairShare()
    greedy = {**weights, "greedy": 10}
    due = sum(one.tokens / weights[one.owner] for one in waiting)
    num_greedy = 0
    while any(one.owner != "greedy" for one in waiting):
        waiting.append(Request(1000 + num_greedy, "greedy", tokens, priority=1000))
        if place_next(share, waiting, greedy).owner == "greedy":
            num_greedy += 1
        # What the others are due, of which the greedy one may have had its share, and one request more.
        assert num_greedy * tokens / 10 <= due + tokens / 10


@settings(deadline=None, max_examples=50)
@given(REQUESTS, WEIGHTS)
def test_within_an_owner_the_most_urgent_goes_first_and_nothing_is_lost(rows, weights):
    waiting = [Request(number, *row) for number, row in enumerate(rows)]
    selected = select(FairShare(), waiting, weights)
    assert sorted(selected) == sorted(waiting)
    for owner in "abc":
        mine = [urgency_of(one) for one in selected if one.owner == owner]
        assert mine == sorted(mine)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 400), st.integers(0, 400))
def test_recoveries_go_first_but_leave_half_of_a_pass(num_recoveries, num_new):
    waiting = [Request(number, "ab"[number % 2], 10, number, 0, number < num_recoveries) for number in range(800)]
    waiting = waiting[:num_recoveries] + waiting[num_recoveries : num_recoveries + num_new]
    selected = select(FairShare(), waiting, {})
    flags = [one.is_recovery for one in selected]
    assert flags == sorted(flags, reverse=True)
    assert len(selected) <= MAX_ASSIGNED_AT_ONCE
    assert sum(flags) == min(num_recoveries, MAX_ASSIGNED_AT_ONCE // 2)
    assert flags.count(False) == min(num_new, MAX_ASSIGNED_AT_ONCE - sum(flags))


def test_an_owner_that_was_idle_neither_saves_up_nor_pays():
    share = FairShare()
    for _ in range(100):
        share.place("a", 1000, 1)
        share.charge("a", 500, 1)
    waiting = [Request(number, "ab"[number % 2], 1000) for number in range(8)]
    owners = [place_next(share, waiting, {}).owner for _ in range(8)]
    assert owners.count("b") == 4
    assert "bbb" not in "".join(owners[:6])


def test_outputs_count_as_prompts_do():
    share = FairShare()
    waiting = [Request(number, "ab"[number % 2], 100) for number in range(20)]
    owners = []
    for _ in range(9):
        request = place_next(share, waiting, {})
        owners.append(request.owner)
        if request.owner == "a":
            share.charge("a", 200, 1)
    assert (owners.count("a"), owners.count("b")) in {(2, 7), (3, 6)}


def test_an_output_counts_less_the_more_weight_its_owner_has():
    share = FairShare()
    share.charge("a", 600, 3)
    share.charge("b", 300, 1)
    assert (share.start_of("a"), share.start_of("b")) == (200.0, 300.0)


def test_what_is_kept_of_owners_is_bounded():
    share = FairShare()
    for number in range(5000):
        share.place(f"owner-{number}", 10, 1)
    assert len(share._finishes) <= 1025


def test_who_is_forgiven_starts_no_earlier_than_by_what_it_has_had():
    share = FairShare()
    for number in range(1025):
        share.place(f"owner-{number}", 10 * (1 + number), 1)
    assert len(share._finishes) < 1024
    assert all(share.start_of(f"owner-{number}") >= 10 * (1 + number) for number in range(1025))


def test_owners_are_forgiven_when_there_are_too_many_the_half_that_owes_less():
    share = FairShare()
    for number in range(1024):
        share.place(f"owner-{number}", 1 + number, 1)
    assert (share.start_of("owner-0"), share.start_of("owner-9")) == (1.0, 10.0)
    share.place("one-more", 2000, 1)
    starts = [share.start_of(f"owner-{number}") for number in range(1024)]
    assert starts == [max(513.0, 1.0 + number) for number in range(1024)]


def test_recoveries_go_by_urgency_whatever_else_tells_them_apart():
    waiting = [Request(number, "a", 10, 9.0 - number, 0, is_recovery=True) for number in range(5)]
    assert [one.number for one in select(FairShare(), waiting, {})] == [4, 3, 2, 1, 0]


def test_one_pass_interleaves_owners_by_weight_and_length():
    """What the next pass would begin with follows from what this one places, so it has the same order."""
    waiting = [Request(number, owner, tokens) for owner, tokens in (("a", 100), ("b", 50)) for number in range(6)]
    owners = [one.owner for one in select(FairShare(), waiting, {})]
    served = {"a": 0, "b": 0}
    for owner in owners[:9]:
        served[owner] += 100 if owner == "a" else 50
    assert abs(served["a"] - served["b"]) <= 100
    weighted = [one.owner for one in select(FairShare(), waiting, {"a": 4, "b": 1})][:6]
    assert weighted.count("a") >= 4


def test_one_pass_and_passes_of_one_request_have_the_same_order():
    waiting = [Request(number, "abc"[number % 3], 100 + 37 * number % 500, number) for number in range(30)]
    weights = {"a": 1, "b": 3, "c": 2}
    whole = [one.number for one in select(FairShare(), waiting, weights)]
    share, left = FairShare(), list(waiting)
    assert [place_next(share, left, weights).number for _ in waiting] == whole
