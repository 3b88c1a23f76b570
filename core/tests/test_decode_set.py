"""What strategies ask of an engine's decodes: their slack, what they have saved, and who is new or due."""

import gc
import math
import random
from dataclasses import dataclass

import pytest
from decode_flow_harness import D, join, make_decodes
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.records import RequestId
from sluice_core.scheduling.decode_flow import PROPOSAL_BACKOFF_S, propose_all
from sluice_core.scheduling.decode_set import LOST_BACK_OFF_S, SPLIT_LEAD_TOKENS, SPLIT_RETRY_TOKENS, Decode, DecodeSet

ALPHA = 0.75


@dataclass
class Plain:
    """A decode, counted plainly."""

    name: str
    output_tokens: int
    length: int
    first_token_s: float
    tau: float
    is_new: bool = True  # since the last iteration


def list_names(decodes):
    return [decode.request_id for decode in decodes]


def find_least_slack_s(members, now, num_gaps):
    """A TPOT may be as long as alpha allows."""
    slacks_s = []
    for each in members:
        if each.tau == math.inf:
            continue
        num_tokens = each.output_tokens + num_gaps
        slacks_s.append(ALPHA * each.tau * (num_tokens - 1) - (now - each.first_token_s))
    return min(slacks_s, default=math.inf)


def compute_mean_saved_s(members, now):
    """EcoServe's saved TPOT, of those that have an objective and have been in an iteration."""
    saved_s = [
        each.output_tokens * each.tau - (now - each.first_token_s)
        for each in members
        if not each.is_new and each.tau < math.inf
    ]
    return sum(saved_s) / len(saved_s) if saved_s else math.inf


def run_history(events):
    """Run events on a set and on plain counts; returns both, and the time."""
    decodes, members, now = make_decodes(D), [], 100.0
    decodes.refresh_ranking(now, min_tokens=0, alpha=ALPHA)
    for number, (event, seed) in enumerate(events):
        rng = random.Random(seed)
        if event == "join":
            output, tpot_s = rng.randrange(1, 9), rng.choice([0.01, 0.05, 0.2])
            one = Plain(f"r{number}", output, rng.randrange(output + 1), 0.0, rng.choice([0.05, 0.1, math.inf]))
            one.first_token_s = now - tpot_s * (output - 1)
            members.append(one)
            join(decodes, one.name, now=now, output_tokens=output, length=one.length, tpot_s=tpot_s, tau=one.tau)
        elif event == "leave" and members:
            decodes.leave(RequestId(members.pop(rng.randrange(len(members))).name))
        elif event == "correct" and members:
            one, output = rng.choice(members), rng.randrange(1, 20)
            decodes.set_output_tokens(RequestId(one.name), output)
            one.length += output - one.output_tokens
            one.output_tokens = output
        elif event == "advance":
            now += rng.choice([0.01, 0.06])
            skipped = [each for each in members if rng.random() < 0.2]
            decodes.advance([RequestId(each.name) for each in skipped])
            for each in members:
                each.output_tokens += each not in skipped
                each.length += each not in skipped
                each.is_new = False
    return decodes, members, now


@settings(max_examples=100)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["join", "join", "leave", "correct", "advance", "advance"]), st.integers(0, 999)),
        max_size=50,
    ),
    num_gaps=st.integers(1, 3),
)
def test_what_is_said_of_decodes_is_what_a_plain_count_says(events, num_gaps):
    decodes, members, now = run_history(events)
    for each in members:
        assert decodes.output_tokens(RequestId(each.name)) == each.output_tokens
        assert decodes.output_tokens_since_reset(RequestId(each.name)) == each.length
    longest = decodes.get_longest()
    assert (longest and decodes.output_tokens_since_reset(longest.request_id)) == max(
        (each.length for each in members), default=None
    )
    slack_s = decodes.find_least_slack_s(now, num_gaps)
    expected_s = find_least_slack_s(members, now, num_gaps)
    assert slack_s == pytest.approx(expected_s) or min(slack_s, expected_s) > 1e6
    assert decodes.compute_mean_saved_tpot_s(now) == pytest.approx(compute_mean_saved_s(members, now), abs=1e-6)
    slow = {
        each.name
        for each in members
        if each.output_tokens > 1 and now - each.first_token_s > ALPHA * each.tau * (each.output_tokens - 1)
    }
    assert set(list_names(decodes.list_near_tpot_slo(now - 1e-9, 99))) <= slow
    assert set(list_names(decodes.list_near_tpot_slo(now + 1e-9, 99))) >= slow
    for each in members:
        decodes.leave(RequestId(each.name))
    assert decodes.get_longest() is None
    assert decodes.find_least_slack_s(now) == math.inf


def test_what_a_decode_has_saved_follows_its_output_length():
    decodes, name = make_decodes(), RequestId("r")
    join(decodes, name, now=10.0, output_tokens=3, tpot_s=1.0, tau=0.5)
    decodes.advance()
    assert decodes.compute_mean_saved_tpot_s(10.0) == pytest.approx(4 * 0.5 - 2.0)
    decodes.advance([name])
    assert decodes.compute_mean_saved_tpot_s(10.0) == pytest.approx(4 * 0.5 - 2.0)
    decodes.set_output_tokens(name, 9)
    assert decodes.compute_mean_saved_tpot_s(10.0) == pytest.approx(9 * 0.5 - 2.0)
    decodes.leave(name)
    assert decodes.compute_mean_saved_tpot_s(10.0) == math.inf


def test_decodes_without_an_objective_do_not_stand_in_each_others_way():
    """Their place is a number: infinity times 0 is none, and a search for it would find others."""
    decodes = make_decodes()
    decodes.advance()
    for output_tokens, name in enumerate("abc", start=1):
        join(decodes, name, output_tokens=output_tokens, tau=math.inf)
    for name in "bac":
        decodes.leave(RequestId(name))
    assert decodes.get_longest() is None
    assert decodes.least_tpot_slo_s == math.inf


def test_decodes_that_moved_in_are_forgotten_when_they_leave():
    """Also where no policy asks for a ranking."""

    def count_decodes():
        return sum(type(each) is Decode for each in gc.get_objects())

    decodes, num_before = make_decodes(), count_decodes()
    for number in range(99):
        join(decodes, f"r{number}", moved=True)
        decodes.advance()
        if number:
            decodes.leave(RequestId(f"r{number - 1}"))
    assert count_decodes() - num_before == 1
    assert list_names(decodes.list_recently_moved()) == ["r98"]


# --- nobody waits for a decode that has lost its objective ---


def make_behind(*behind_s: float) -> DecodeSet:
    """Make decodes ``a``, ``b``, ... that are behind their objective by so much at time 0, exactly."""
    decodes = make_decodes()
    for name, each_s in zip("abcdef", behind_s, strict=False):
        join(decodes, name, now=-0.5 - each_s, tau=0.5)
    return decodes


def test_who_is_behind_by_more_than_the_limit_has_lost_and_who_is_at_it_has_not():
    decodes = make_behind(0.5, 2.0, 1.0, 4.0)
    assert decodes.find_least_slack_s(0.0, lost_s=1.0) == -1.0
    decodes.refresh_ranking(LOST_BACK_OFF_S / 2, min_tokens=0, alpha=1.0)
    assert decodes.find_least_slack_s(0.0) == -1.0
    decodes.refresh_ranking(LOST_BACK_OFF_S, min_tokens=0, alpha=1.0)
    assert decodes.find_least_slack_s(0.0) == -4.0
    assert make_behind(2.0).find_least_slack_s(0.0, lost_s=1.0) == math.inf


# --- decodes that were prefilled here ---


def test_new_decodes_are_taken_once_newest_first_up_to_the_limit():
    decodes = make_decodes()
    for name in "abc":
        join(decodes, name)
    join(decodes, "moved", moved=True)
    assert decodes.take_new_here(0) == []
    assert list_names(decodes.take_new_here(2)) == ["c", "b"]
    assert decodes.take_new_here(2) == []
    join(decodes, "d")
    assert list_names(decodes.take_new_here(2)) == ["d"]


def test_a_new_decode_that_is_taken_has_been_proposed_once():
    """What is proposed for the second time waits twice as long as what is proposed for the first."""
    decodes = make_decodes()
    join(decodes, "taken")
    decodes.take_new_here(1)
    join(decodes, "new")
    assert len(propose_all(0.0, decodes)) == 2
    for now, num_proposed in ((PROPOSAL_BACKOFF_S, 1), (1.99 * PROPOSAL_BACKOFF_S, 1), (2 * PROPOSAL_BACKOFF_S, 0)):
        decodes.refresh_ranking(now, min_tokens=0, alpha=1.0)
        assert decodes.num_proposed == num_proposed


# --- parts that end as planned ---


def test_a_planned_end_is_due_some_tokens_ahead_and_again_ever_more_rarely():
    decodes = make_decodes()
    join(decodes, "whole")
    join(decodes, "left", split_tokens=20)
    join(decodes, "split", split_tokens=20)
    seen = []
    for _ in range(2000):
        decodes.advance()
        if decodes.output_tokens(RequestId("split")) == 3:
            decodes.leave(RequestId("left"))
        for decode in decodes.take_due_splits():
            assert decode.request_id == "split"
            seen.append(decodes.output_tokens(decode.request_id))
    first = 20 - SPLIT_LEAD_TOKENS
    retries = [1, 3, 7, 15, 31, 63, 95]  # the pause doubles five times
    assert seen == [first, *(first + SPLIT_RETRY_TOKENS * retry for retry in retries)]


def test_a_planned_end_waits_for_the_tokens_that_its_decode_missed():
    decodes = make_decodes()
    join(decodes, "split", split_tokens=10)
    due_after = []
    for iteration in range(1, 10):
        decodes.advance([RequestId("split")] if iteration <= 3 else [])
        if decodes.take_due_splits():
            due_after.append(iteration)
    assert due_after == [3 + 10 - SPLIT_LEAD_TOKENS - 1]


def test_all_planned_ends_of_an_iteration_are_listed():
    decodes = make_decodes()
    for name in "abc":
        join(decodes, name, split_tokens=1 + SPLIT_LEAD_TOKENS)
    decodes.leave(RequestId("a"))
    assert list_names(decodes.take_due_splits()) == ["b", "c"]
    assert decodes.take_due_splits() == []
