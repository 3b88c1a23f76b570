"""What is counted of the decodes of an engine, and that an iteration costs only the moved ones."""

import random

import pytest
from decode_flow_harness import BLOCK, TAU, D, P, join, make_decodes, make_policy, names
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.kv_blocks import KvBlocks
from sluice_core.records import RequestId
from sluice_core.scheduling import decode_flow
from sluice_core.scheduling.decode_flow import (
    MAX_STANDING_PROPOSALS,
    PROPOSAL_BACKOFF_S,
)
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.strategy_parameters import StrategyParameters


def test_output_lengths_are_counted_and_corrected():
    decodes = make_decodes()
    join(decodes, "a", output_tokens=5, length=2)
    join(decodes, "b", output_tokens=5)
    decodes.advance([RequestId("b")])
    decodes.set_output_tokens(RequestId("a"), 9)
    assert (decodes.output_tokens(RequestId("a")), decodes.output_tokens_since_reset(RequestId("a"))) == (9, 6)
    assert decodes.output_tokens(RequestId("b")) == 5


def test_impossible_members_are_refused():
    decodes = make_decodes()
    join(decodes, "a")
    with pytest.raises(ValueError, match="'a'"):
        join(decodes, "a")
    with pytest.raises(ValueError, match="0 output tokens"):
        join(decodes, "b", output_tokens=0)
    decodes.leave(RequestId("unknown"))
    assert len(decodes) == 1
    assert RequestId("a") in decodes


def test_tpot_so_far_is_a_share_of_its_slo_from_the_second_token_on():
    decodes = make_decodes()
    join(decodes, "r", output_tokens=1)
    (decode,) = decodes.list_without_proposal(1)
    assert decodes.compute_tpot_share(decode, 5.0) == 0.0
    assert not decodes.has_tpot_above(decode, 5.0, 0.96)
    decodes.advance()
    assert decodes.compute_tpot_share(decode, 0.4 * TAU) == pytest.approx(0.4)
    decodes.advance()
    assert decodes.compute_tpot_share(decode, 0.4 * TAU) == pytest.approx(0.2)


def test_recently_moved_decodes_are_those_not_yet_ranked_since_their_move():
    decodes = make_decodes()
    for name in ("left", "proposed", "corrected", "fresh"):
        join(decodes, name, moved=True)
    join(decodes, "at home")
    by_name = {decode.request_id: decode for decode in decodes.list_without_proposal(9)}
    decodes.leave(RequestId("left"))
    decodes.propose(by_name["proposed"], 1.0)
    decodes.set_output_tokens(RequestId("corrected"), 7)
    assert [decode.request_id for decode in decodes.list_recently_moved()] == ["corrected", "fresh"]
    decodes.refresh_ranking(
        1.0, min_tokens=16, alpha=0.96
    )  # the proposal has had its time: it may be proposed by its place again
    assert [decode.request_id for decode in decodes.list_recently_moved()] == ["corrected", "fresh"]


def test_an_engine_without_decodes_is_d_heavy_and_empty_until_configured():
    decodes = DecodeSet(block_size_tokens=BLOCK, max_num_seqs=9)
    assert (decodes.role, decodes.is_draining, len(decodes)) == (D, False, 0)
    assert (decodes.kv_blocks_total, decodes.kv_blocks_held, decodes.num_proposed, decodes.proposed_blocks) == (0,) * 4


def test_a_tpot_at_the_limit_is_not_above_it():
    """Numbers without rounding: 5 tokens in a second, half of an objective of half a second."""
    decodes = make_decodes()
    join(decodes, "r", output_tokens=5, tpot_s=0.25, tau=0.5)
    (decode,) = decodes.list_without_proposal(1)
    assert not decodes.has_tpot_above(decode, 0.0, 0.5)
    assert decodes.has_tpot_above(decode, 2**-20, 0.5)


def test_a_moved_decode_is_never_at_home():
    decodes, policy = make_decodes(P), make_policy()
    join(decodes, "moved", moved=True)
    for iteration in range(20):
        assert policy.propose(iteration * TAU / 2, decodes) == []
        decodes.advance()
    assert decodes.list_prefilled_here(9) == []


def test_a_decode_that_left_while_it_was_fresh_does_not_come_back():
    decodes = make_decodes()
    for name in ("first", "behind"):
        join(decodes, name, moved=True)
    decodes.leave(RequestId("behind"))
    decodes.refresh_ranking(0.0, min_tokens=0, alpha=0.96)
    decodes.leave(RequestId("first"))
    assert decodes.get_longest() is None


def test_a_decode_proposed_while_it_was_fresh_keeps_its_standing_proposal():
    """Beyond its SLO it is proposed at once; when it is no longer fresh the proposal still stands."""
    decodes, policy = make_decodes(P), make_policy(min_tokens_between_moves=2)
    join(decodes, "r", output_tokens=1001, tpot_s=2 * TAU, moved=True)
    assert names(policy.propose(0.0, decodes)) == ["r"]
    for _ in range(3):
        decodes.advance()
    assert policy.propose(PROPOSAL_BACKOFF_S / 2, decodes) == []
    assert names(policy.propose(PROPOSAL_BACKOFF_S, decodes)) == ["r"]


def test_a_decode_that_is_proposed_twice_counts_as_released_once():
    decodes = make_decodes(used=950)
    join(decodes, "a")
    (decode,) = decodes.list_without_proposal(9)
    for until_s in (1.0, 2.0):
        decodes.propose(decode, until_s)
    assert (decodes.num_proposed, decodes.proposed_blocks) == (1, 10)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4])
def test_slow_decodes_are_listed_up_to_the_limit(limit):
    decodes = make_decodes(P)
    for number in range(3):
        join(decodes, f"r{number}", output_tokens=100, tpot_s=(2 + number) * TAU)
    assert [decode.request_id for decode in decodes.list_near_tpot_slo(0.0, limit)] == ["r2", "r1", "r0"][:limit]


def test_a_hair_above_the_limit_is_above_it():
    """Less than what the static order is off by rounding."""
    decodes = make_decodes(P)
    decodes.refresh_ranking(0.0, min_tokens=16, alpha=0.96)
    join(decodes, "r", output_tokens=101, tpot_s=0.96 * TAU)
    assert decodes.list_near_tpot_slo(-5e-7, 9) == []
    assert [decode.request_id for decode in decodes.list_near_tpot_slo(5e-7, 9)] == ["r"]


@settings(max_examples=100)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["join", "leave", "run", "role", "alpha"]), st.integers(0, 999)), max_size=80
    )
)
def test_counts_add_up_after_any_history(events):
    decodes, members = make_decodes(D, total=300, used=290, max_num_seqs=12), []
    policy = make_policy()
    for now, (event, seed) in enumerate(events):
        rng = random.Random(seed)
        if event == "join":
            members.append(f"r{now}")
            join(
                decodes, members[-1], now=now, output_tokens=rng.randrange(1, 99), tpot_s=0.06, moved=rng.random() < 0.5
            )
        elif event == "leave" and members:
            decodes.leave(RequestId(members.pop(rng.randrange(len(members)))))
        elif event == "role":
            decodes.role = rng.choice([P, D])
            decodes.is_draining = rng.random() < 0.2
        elif event == "alpha":
            policy.parameters = StrategyParameters(approaching_factor=rng.choice([0.5, 0.96]))
        decodes.advance(RequestId(name) for name in members if rng.random() < 0.2)
        assert set(names(policy.propose(float(now), decodes))) <= set(members)
        assert len(decodes) == len(members)
        assert 0 <= decodes.num_proposed <= min(len(members), MAX_STANDING_PROPOSALS)
    for name in members:
        decodes.leave(RequestId(name))
    assert (len(decodes), decodes.num_proposed, decodes.proposed_blocks) == (0, 0, 0)


IS_COMPILED = not decode_flow.__file__.endswith(".py")


class CountingSet(DecodeSet):
    """Counts the decodes that a policy looks at."""

    num_looked_at = 0

    def has_tpot_above(self, decode, now, share):
        self.num_looked_at += 1
        return super().has_tpot_above(decode, now, share)


@pytest.mark.skipif(IS_COMPILED, reason="a compiled class has no interpreted subclass")
@pytest.mark.parametrize("num_decodes", [16, 1024])
@pytest.mark.parametrize("role", [P, D])
def test_an_iteration_costs_only_the_moved_decodes(role, num_decodes):
    decodes = CountingSet(block_size_tokens=BLOCK, max_num_seqs=4096)
    decodes.role = role
    decodes.observe_kv(KvBlocks(total=100_000, used=89_000))
    policy = make_policy(moves_first_decodes=False)
    for number in range(num_decodes):
        join(decodes, f"r{number}", output_tokens=100 + number, tpot_s=0.5 * TAU)
    for iteration in range(50):
        decodes.advance()
        assert policy.propose(iteration * 0.5 * TAU, decodes) == []
    assert decodes.num_looked_at == 0
    decodes.observe_kv(KvBlocks(total=100_000, used=90_050))
    policy.propose(50 * 0.5 * TAU if role is D else 1e6, decodes)
    assert decodes.num_looked_at <= 2 * MAX_STANDING_PROPOSALS


@pytest.mark.skipif(IS_COMPILED, reason="a compiled class has no interpreted subclass")
def test_a_decode_just_below_the_limit_is_not_checked():
    decodes = CountingSet(block_size_tokens=BLOCK, max_num_seqs=4096)
    decodes.refresh_ranking(0.0, min_tokens=16, alpha=0.96)
    join(decodes, "r", output_tokens=101, tpot_s=0.96 * TAU)
    for late_s, num_looked_at in ((-0.5 * TAU, 0), (0.5 * TAU, 1)):
        decodes.num_looked_at = 0
        decodes.list_near_tpot_slo(late_s, 9)
        assert decodes.num_looked_at == num_looked_at
