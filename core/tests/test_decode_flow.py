"""Which decodes move (TaiChi, Algorithm 1): degradation, backflow, first decodes, and what stands in their way."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from decode_flow_harness import BLOCK, TAU, D, P, join, make_decodes, make_policy, names
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.kv_blocks import KvBlocks, blocks_for_tokens
from sluice_core.records import MoveCause, RequestId
from sluice_core.scheduling.decode_flow import (
    MAX_PROPOSAL_BACKOFF_S,
    MAX_STANDING_PROPOSALS,
    PROPOSAL_BACKOFF_S,
    propose_all,
)
from sluice_core.strategy_parameters import StrategyParameters

# --- Algorithm 1, the paper's pseudocode on plain lists ---


class Naive:
    """A decode as the paper sees it."""

    def __init__(self, name, number, prompt_tokens, output_tokens, length, first_token_s, tau):
        self.name, self.number, self.prompt_tokens = name, number, prompt_tokens
        self.output_tokens, self.length = output_tokens, length
        self.first_token_s, self.tau = first_token_s, tau

    def tpot(self, now):
        return (now - self.first_token_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def blocks(self):
        return blocks_for_tokens(self.prompt_tokens + self.output_tokens - 1, BLOCK)


def algorithm_1(decodes, role, used, total, max_num_seqs, watermark, alpha, now):
    """Lines 1 to 13; requests at stake are not degraded, and max_num_seqs has the watermark too."""
    if role is P:
        return {r.name for r in decodes if r.tpot(now) > r.tau * alpha}
    degrading, rest = [], sorted(decodes, key=lambda r: (-r.length, r.number))
    released = 0
    while used - released > watermark * total or len(decodes) - len(degrading) > watermark * max_num_seqs:
        rest = [r for r in rest if r.tpot(now) <= r.tau * alpha]
        if not rest:
            break
        longest = rest.pop(0)
        degrading.append(longest.name)
        released += longest.blocks
    return degrading


joins = st.tuples(
    st.integers(1, 400),  # output tokens
    st.integers(0, 400),  # of these since the reset, at most
    st.sampled_from([0.01, 0.04, 0.047, 0.049, 0.06]),  # TPOT so far
    st.sampled_from([0.05, 0.1]),
    st.integers(1, 2000),  # prompt
)


@settings(max_examples=300, deadline=None)
@given(
    history=st.lists(st.one_of(joins, st.sampled_from(["iterate", "iterate", "leave", "skip"])), max_size=60),
    role=st.sampled_from([P, D]),
    used_share=st.floats(0, 1),
    max_num_seqs=st.integers(1, 60),
    watermark=st.sampled_from([0.5, 0.9, 1.0]),
    alpha=st.sampled_from([0.8, 0.96]),
    seed=st.integers(0, 100),
)
def test_proposals_are_algorithm_1s(history, role, used_share, max_num_seqs, watermark, alpha, seed):
    rng, now, plain = random.Random(seed), 100.0, []
    decodes = make_decodes(role, total=5000, used=int(used_share * 5000), max_num_seqs=max_num_seqs)
    for number, event in enumerate(history):
        if isinstance(event, tuple):
            output, length, tpot, tau, prompt = event
            length = min(length, output)
            name = f"r{number}"
            join(
                decodes, name, now=now, output_tokens=output, length=length, tpot_s=tpot, tau=tau, prompt_tokens=prompt
            )
            plain.append(Naive(name, number, prompt, output, length, now - tpot * (output - 1), tau))
        elif event == "leave" and plain:
            decodes.leave(RequestId(plain.pop(rng.randrange(len(plain))).name))
        elif event in {"iterate", "skip"}:
            now += rng.choice([0.01, 0.045, 0.1])
            skipped = [r for r in plain if event == "skip" and rng.random() < 0.3]
            decodes.advance(RequestId(r.name) for r in skipped)
            for r in plain:
                r.output_tokens += r not in skipped
                r.length += r not in skipped
    now += 1e-4  # off the boundary, where rounding decides
    policy = make_policy(watermark=watermark, approaching_factor=alpha, moves_first_decodes=False)
    expected = algorithm_1(plain, role, int(used_share * 5000), 5000, max_num_seqs, watermark, alpha, now)
    proposals = policy.propose(now, decodes)
    if role is P:
        assert len(proposals) == min(len(expected), MAX_STANDING_PROPOSALS)
        assert set(names(proposals)) <= expected
        assert {p.cause for p in proposals} <= {MoveCause.BACKFLOW}
        shares = {r.name: r.tpot(now) / r.tau for r in plain}
        assert [shares[n] for n in names(proposals)] == pytest.approx(
            sorted((shares[n] for n in expected), reverse=True)[:MAX_STANDING_PROPOSALS]
        )
    else:
        assert names(proposals) == expected[:MAX_STANDING_PROPOSALS]
        assert {p.cause for p in proposals} <= {MoveCause.DEGRADE}
    by_name = {r.name: r for r in plain}
    for proposal in proposals:
        assert proposal.output_tokens == by_name[proposal.request_id].output_tokens
        assert proposal.num_blocks == by_name[proposal.request_id].blocks
    assert policy.propose(now, decodes) == [] or len(expected) > MAX_STANDING_PROPOSALS


# --- standing proposals, back-off, ping-pong ---


def degrading(num=4, **kv):
    """Make a D-heavy engine above its watermark with decodes r0 (longest) to r<num-1>, 20 blocks each."""
    decodes = make_decodes(D, **({"total": 100, "used": 95} | kv))
    for number in range(num):
        join(decodes, f"r{number}", output_tokens=161 - number, prompt_tokens=160)
    return decodes


def test_a_proposal_stands_and_counts_as_released():
    decodes, policy = degrading(), make_policy()
    assert names(policy.propose(0.0, decodes)) == ["r0"]
    decodes.advance()
    assert policy.propose(0.03, decodes) == []


def test_an_unanswered_proposal_is_made_again_after_a_growing_back_off():
    decodes, policy = degrading(1), make_policy()
    times, now = [], 0.0
    while now < 8:
        times += [now] * len(policy.propose(now, decodes))
        decodes.advance()
        now = round(now + 0.05, 2)
    gaps = [round(b - a, 2) for a, b in pairwise(times)]
    assert gaps == [
        PROPOSAL_BACKOFF_S,
        0.5,
        1.0,
        MAX_PROPOSAL_BACKOFF_S,
        MAX_PROPOSAL_BACKOFF_S,
        MAX_PROPOSAL_BACKOFF_S,
    ]


def test_a_proposal_refused_for_hours_is_still_made():
    decodes, policy = make_decodes(D, total=100, used=95), make_policy()
    join(decodes, "r", output_tokens=100, tau=1e6)
    assert sum(len(policy.propose(attempt * 3.0, decodes)) for attempt in range(2000)) == 2000


def test_a_proposal_that_is_no_longer_needed_is_not_repeated():
    decodes, policy = degrading(), make_policy()
    policy.propose(0.0, decodes)
    decodes.observe_kv(KvBlocks(total=100, used=50))
    assert policy.propose(1.0, decodes) == []
    assert decodes.num_proposed == decodes.proposed_blocks == 0


def test_blocks_handed_off_and_not_yet_read_are_not_released_twice():
    decodes, policy = degrading(), make_policy()
    policy.propose(0.0, decodes)
    decodes.leave(RequestId("r0"))
    decodes.observe_kv(KvBlocks(total=100, used=95, pinned=20))
    assert policy.propose(0.03, decodes) == []
    decodes.observe_kv(KvBlocks(total=100, used=95))  # without the pin the next one would go
    assert names(policy.propose(0.06, decodes)) == ["r1"]


def test_standing_proposals_are_bounded():
    decodes, policy = degrading(40, total=1000, used=1000), make_policy(watermark=0.1)
    assert len(policy.propose(0.0, decodes)) == MAX_STANDING_PROPOSALS
    assert policy.propose(0.03, decodes) == []


def test_the_last_standing_proposal_is_made():
    decodes, policy = degrading(40, total=1000, used=400), make_policy(watermark=0.1)
    assert len(policy.propose(0.0, decodes)) == MAX_STANDING_PROPOSALS - 1  # 300 blocks of 20 each
    decodes.observe_kv(KvBlocks(total=1000, used=1000))
    assert names(policy.propose(0.03, decodes)) == ["r15"]


def test_backflow_and_first_decodes_share_the_bound():
    decodes, policy = make_decodes(P), make_policy()
    for number in range(MAX_STANDING_PROPOSALS):
        join(decodes, f"home {number}", output_tokens=2)
        join(decodes, f"slow {number}", output_tokens=100, tpot_s=2 * TAU if number < 10 else 0.0, moved=True)
    causes = Counter(proposal.cause for proposal in policy.propose(0.0, decodes))
    assert causes == {MoveCause.BACKFLOW: 10, MoveCause.PREFILL_DONE: MAX_STANDING_PROPOSALS - 10}


def test_usage_at_the_watermark_is_not_above_it():
    assert make_policy().propose(0.0, degrading(used=90)) == []
    assert names(make_policy().propose(0.0, degrading(used=91))) == ["r0"]


@pytest.mark.parametrize(
    ("role", "switches"),
    [(D, {"degrades": False}), (P, {"flows_back": False, "moves_first_decodes": False})],
    ids=["degradation", "backflow"],
)
def test_what_a_strategy_switches_off_is_not_proposed(role, switches):
    decodes = make_decodes(role, total=100, used=99)
    join(decodes, "r", output_tokens=100, tpot_s=2 * TAU if role is P else 0.0)
    assert make_policy(**switches).propose(0.0, decodes) == []
    assert names(make_policy().propose(0.0, decodes)) == ["r"]


def test_a_request_at_stake_is_left_alone_for_a_while():
    """It is looked at again after the back-off, though its TPOT has sunk meanwhile."""
    decodes, policy = make_decodes(D, total=100, used=95), make_policy()
    join(decodes, "r", output_tokens=101, tpot_s=0.97 * TAU)
    assert policy.propose(0.0, decodes) == []
    for _ in range(50):
        decodes.advance()
    assert policy.propose(PROPOSAL_BACKOFF_S - 0.01, decodes) == []
    assert names(policy.propose(PROPOSAL_BACKOFF_S, decodes)) == ["r"]


def test_the_seats_of_an_engine_have_the_watermark_too():
    decodes, policy = degrading(10, used=0, max_num_seqs=10), make_policy()
    assert names(policy.propose(0.0, decodes)) == ["r0"]


def test_of_equally_long_outputs_the_first_to_join_goes():
    decodes = make_decodes(D, total=100, used=95)
    for name in ("b", "a"):
        join(decodes, name, output_tokens=50)
    assert names(make_policy().propose(0.0, decodes)) == ["b"]


def test_backflow_resets_the_length_that_degradation_sorts_by():
    decodes = make_decodes(D, total=100, used=95)
    join(decodes, "returned", output_tokens=500, length=0)
    join(decodes, "other", output_tokens=50)
    assert names(make_policy().propose(0.0, decodes)) == ["other"]


def test_a_request_that_would_flow_back_at_once_is_not_degraded():
    decodes, policy = make_decodes(D, total=100, used=95), make_policy()
    join(decodes, "at stake", output_tokens=500, tpot_s=0.97 * TAU)
    join(decodes, "at ease", output_tokens=50, tpot_s=0.5 * TAU)
    assert names(policy.propose(0.0, decodes)) == ["at ease"]


def test_a_moved_request_is_degraded_only_after_some_tokens():
    decodes, policy = make_decodes(D, total=100, used=95), make_policy(min_tokens_between_moves=16)
    join(decodes, "moved", output_tokens=500, moved=True)
    for iteration in range(40):
        proposals = policy.propose(iteration * 0.01, decodes)
        if proposals:
            break
        decodes.advance()
    assert iteration == 16


@pytest.mark.parametrize(
    ("tpot", "num_iterations"),
    [(0.98 * TAU, 16), (1.02 * TAU, 0)],
    ids=["near the SLO: after some tokens", "beyond the SLO: at once"],
)
def test_a_moved_request_flows_back_early_only_when_its_slo_is_at_stake(tpot, num_iterations):
    decodes, policy = make_decodes(P), make_policy()
    join(decodes, "moved", output_tokens=1001, tpot_s=tpot, moved=True)
    for iteration in range(40):
        proposals = policy.propose(iteration * tpot, decodes)
        if proposals:
            break
        decodes.advance()
    assert (iteration, proposals[0].cause) == (num_iterations, MoveCause.BACKFLOW)


def test_a_request_between_two_engines_does_not_bounce():
    """Two engines that both want to be rid of it: at most one move per ``min_tokens_between_moves`` tokens."""
    policy = make_policy()
    engines = [make_decodes(D, total=10, used=10), make_decodes(P)]
    home, now, output, moves = 0, 0.0, 100, 0
    join(engines[0], "r", output_tokens=output, tpot_s=0.95 * TAU)
    for _ in range(640):
        proposals = policy.propose(now, engines[home])
        if proposals:
            moves += 1
            engines[home].leave(RequestId("r"))
            home = 1 - home
            join(engines[home], "r", now=now, output_tokens=output, tpot_s=now_tpot(now, output), moved=True)
        engines[home].advance()
        now, output = now + (0.8 if home == 0 else 1.2) * TAU, output + 1
    assert 2 <= moves <= 640 / 16


def now_tpot(now, output):
    return (99 * 0.95 * TAU + now) / (output - 1)


@pytest.mark.parametrize(
    ("role", "switches", "moved", "expected"),
    [
        (P, {}, False, [MoveCause.PREFILL_DONE]),
        (P, {}, True, []),
        (D, {}, False, []),
        (P, {"moves_first_decodes": False}, False, []),
    ],
    ids=["prefilled on P-heavy", "degraded to P-heavy", "in place on D-heavy", "switched off"],
)
def test_first_decodes_leave_p_heavy_engines(role, switches, moved, expected):
    decodes = make_decodes(role)
    join(decodes, "r", moved=moved)
    assert [p.cause for p in make_policy(**switches).propose(0.0, decodes)] == expected


def test_backflow_goes_before_first_decodes_and_is_never_due_at_the_first_token():
    decodes, policy = make_decodes(P), make_policy()
    join(decodes, "first token long ago", output_tokens=1)
    join(decodes, "slow", now=0.0, output_tokens=100, tpot_s=2 * TAU)
    assert [(p.request_id, p.cause) for p in policy.propose(50.0, decodes)] == [
        ("slow", MoveCause.BACKFLOW),
        ("first token long ago", MoveCause.PREFILL_DONE),
    ]


@pytest.mark.parametrize("role", [P, D])
def test_a_draining_engine_proposes_everything(role):
    decodes, policy = make_decodes(role), make_policy(moves_first_decodes=False, degrades=False, flows_back=False)
    decodes.is_draining = True
    for number in range(20):
        join(decodes, f"r{number}", moved=number % 2 == 0)
    proposed = set()
    for iteration in range(20):
        for proposal in policy.propose(iteration * 0.03, decodes):
            assert proposal.cause is MoveCause.DRAIN
            proposed.add(proposal.request_id)
            decodes.leave(proposal.request_id)
    assert len(proposed) == 20


def test_a_draining_engine_whose_proposals_all_stand_makes_no_more():
    """As policies without Algorithm 1 call it, which do not look at the bound before."""
    decodes = make_decodes(D)
    decodes.refresh_ranking(0.0, min_tokens=0, alpha=0.96)
    for number in range(MAX_STANDING_PROPOSALS + 4):
        join(decodes, f"r{number}")
    assert len(propose_all(0.0, decodes)) == MAX_STANDING_PROPOSALS
    assert propose_all(0.03, decodes) == []


@pytest.mark.parametrize("role", [P, D])
def test_without_roles_only_a_draining_engine_proposes(role):
    policy = make_policy(min_tokens_between_moves=0)
    policy.has_roles = False
    decodes = make_decodes(role, used=1000)
    join(decodes, "slow", tpot_s=2 * TAU, output_tokens=100)
    assert policy.propose(10.0, decodes) == []
    decodes.is_draining = True
    assert [proposal.cause for proposal in policy.propose(10.0, decodes)] == [MoveCause.DRAIN]


def test_a_live_alpha_is_in_force_at_the_next_iteration():
    decodes, policy = make_decodes(P), make_policy(approaching_factor=0.96, moves_first_decodes=False)
    join(decodes, "r", output_tokens=100, tpot_s=0.9 * TAU)
    assert policy.propose(0.0, decodes) == []
    policy.parameters = StrategyParameters(approaching_factor=0.8)
    assert names(policy.propose(0.0, decodes)) == ["r"]


@pytest.mark.parametrize(
    ("cause", "tokens_since_move", "is_too_soon"),
    [
        (MoveCause.DEGRADE, 15, True),
        (MoveCause.DEGRADE, 16, False),
        (MoveCause.DEGRADE, None, False),
        (MoveCause.BACKFLOW, 0, False),
        (MoveCause.DRAIN, 0, False),
    ],
)
def test_only_a_degradation_waits_for_tokens_since_the_last_move(cause, tokens_since_move, is_too_soon):
    policy = make_policy(min_tokens_between_moves=16)
    assert policy.is_too_soon(cause, tokens_since_move) is is_too_soon
