import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.kv import KvBlocks, blocks_for_tokens
from sluice_core.records import EngineId, EngineLoad, FlowParameters, MoveCause, RequestId, Role
from sluice_core.scheduling import decode_flow
from sluice_core.scheduling.decode_flow import (
    MAX_PROPOSAL_BACKOFF_S,
    MAX_STANDING_PROPOSALS,
    PROPOSAL_BACKOFF_S,
    FlowPolicy,
    FlowRequest,
)
from sluice_core.scheduling.decode_order import DecodeSet
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable

P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY
BLOCK = 16
TAU = 0.05


def make_decodes(role=D, *, total=1000, used=0, pinned=0, max_num_seqs=1000):
    decodes = DecodeSet(block_size_tokens=BLOCK, max_num_seqs=max_num_seqs)
    decodes.role = role
    decodes.observe_kv(KvBlocks(total=total, used=used, pinned=pinned))
    return decodes


def join(decodes, name, *, now=0.0, output_tokens=1, length=None, tpot_s=0.0, tau=TAU, moved=False, prompt_tokens=160):
    """Join a decode whose TPOT so far is ``tpot_s``."""
    decodes.join(
        RequestId(name),
        now=now,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_since_reset=output_tokens if length is None else length,
        since_first_token_s=tpot_s * (output_tokens - 1),
        tpot_slo_s=tau,
        is_moved_in=moved,
    )


def make_policy(**changes):
    switches = {key: changes.pop(key) for key in ("moves_first_decodes", "degrades", "flows_back") if key in changes}
    parameters = {"watermark": 0.9, "min_tokens_between_moves": 16} | changes
    return FlowPolicy(FlowParameters(**parameters), random.Random(0), **switches)


def names(proposals):
    return [proposal.request_id for proposal in proposals]


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
    policy.parameters = FlowParameters(approaching_factor=0.8)
    assert names(policy.propose(0.0, decodes)) == ["r"]


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
    join(decodes, "r", moved=True)
    decodes.leave(RequestId("r"))
    decodes.refresh_ranking(0.0, min_tokens=0, alpha=0.96)
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
            policy.parameters = FlowParameters(approaching_factor=rng.choice([0.5, 0.96]))
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


# --- targets ---

SPEC = EngineConfig(block_size_tokens=BLOCK, kv_bytes_per_token=1000, max_num_seqs=10, max_batch_tokens=8192)


def make_table(*engines):
    """Make a table of (role, used blocks, other load fields); 100 blocks each."""
    table = EngineTable()
    for number, (role, used, fields) in enumerate(engines):
        engine_id = EngineId(f"e{number}")
        values = dict(fields)
        chunk = values.pop("chunk", 2048 if role is P else 256)
        is_draining = values.pop("is_draining", False)
        table.add(engine_id, SPEC, role=role, chunk_size_tokens=chunk)
        table.report(engine_id, EngineLoad(kv_blocks_total=100, kv_blocks_used=used, **values), 0.0)
        table.configure(engine_id, role=role, chunk_size_tokens=chunk, is_draining=is_draining)
    return table


def find_target(table, cause, *, source="e0", blocks=5, excluded=()):
    request = FlowRequest(
        request_id=RequestId("r"),
        cause=cause,
        source=EngineId(source),
        num_blocks=blocks,
        excluded=frozenset(map(EngineId, excluded)),
    )
    return make_policy().target(0.0, request, table)


DONE, DEGRADE, BACKFLOW, DRAIN, MANUAL = MoveCause


@pytest.mark.parametrize(
    ("cause", "engines", "expected"),
    [
        (DONE, [(P, 0, {}), (D, 50, {}), (D, 40, {})], "e2"),
        (DONE, [(P, 0, {}), (D, 50, {}), (D, 40, {"kv_blocks_granted": 20})], "e1"),
        (DONE, [(P, 0, {}), (D, 95, {})], "e1"),
        (DONE, [(P, 0, {}), (D, 96, {})], None),
        (DONE, [(P, 0, {}), (D, 90, {"kv_blocks_granted": 6})], None),
        (DONE, [(P, 0, {}), (D, 0, {"running_decodes": 10})], None),
        (DONE, [(P, 0, {}), (D, 0, {"running_decodes": 9})], "e1"),
        (DONE, [(P, 0, {}), (D, 0, {"is_draining": True}), (P, 0, {})], None),
        (DONE, [(P, 0, {}), (D, 0, {"is_draining": True}), (D, 50, {})], "e2"),
        (DONE, [(P, 0, {}), (P, 0, {})], None),
        (DONE, [(D, 0, {}), (D, 0, {}), (P, 0, {})], None),
        (DONE, [(P, 0, {"chunk": 512}), (D, 0, {"chunk": 512})], None),
        (DONE, [(P, 0, {}), (D, 0, {"chunk": 0})], "e1"),
        (BACKFLOW, [(P, 0, {}), (D, 95, {}), (P, 0, {})], "e1"),
        (DEGRADE, [(D, 90, {}), (P, 30, {}), (P, 20, {}), (D, 0, {})], "e2"),
        (DEGRADE, [(D, 90, {}), (P, 85, {})], "e1"),
        (DEGRADE, [(D, 90, {}), (P, 86, {})], None),
        (DEGRADE, [(D, 90, {}), (P, 0, {"running_decodes": 8})], "e1"),
        (DEGRADE, [(D, 90, {}), (P, 0, {"running_decodes": 9})], None),
        (DEGRADE, [(D, 90, {"chunk": 64}), (P, 0, {"chunk": 64})], None),
        (DRAIN, [(D, 0, {"is_draining": True}), (D, 50, {}), (P, 0, {})], "e1"),
        (DRAIN, [(D, 0, {"is_draining": True}), (D, 96, {}), (P, 0, {})], "e2"),
        (DRAIN, [(P, 0, {"is_draining": True}), (D, 0, {}), (P, 80, {})], "e2"),
        (DRAIN, [(D, 0, {"is_draining": True, "chunk": 64}), (D, 0, {"chunk": 64})], "e1"),
        (DRAIN, [(D, 0, {"is_draining": True}), (D, 99, {}), (P, 90, {})], None),
        (MANUAL, [(D, 0, {}), (D, 50, {}), (P, 0, {})], "e1"),
    ],
    ids=[
        "first decode: least used D-heavy",
        "first decode: grants included",
        "first decode: physical room, not the watermark",
        "first decode: no room",
        "first decode: granted blocks are no room",
        "first decode: no seat",
        "first decode: last seat",
        "first decode: nobody but a draining engine",
        "first decode: not to a draining engine",
        "first decode: no D-heavy engine",
        "first decode: stays on D-heavy",
        "first decode: equal chunk sizes",
        "first decode: disaggregated",
        "backflow: D-heavy at the watermark",
        "degrade: least used P-heavy",
        "degrade: up to the watermark",
        "degrade: not beyond it",
        "degrade: seats up to the watermark",
        "degrade: seats not beyond it",
        "degrade: equal chunk sizes",
        "drain: same role first",
        "drain: any with room",
        "drain: P-heavy to P-heavy",
        "drain: though chunk sizes are equal",
        "drain: P-heavy is bounded by the watermark",
        "manual: as drain",
    ],
)
def test_targets(cause, engines, expected):
    assert find_target(make_table(*engines), cause) == expected


def test_moves_of_one_tick_spread():
    table = make_table((P, 0, {}), (D, 0, {}), (D, 0, {}))
    first = find_target(table, DONE)
    table.record_grant_request(first, 1, 5)
    assert {first, find_target(table, DONE)} == {"e1", "e2"}


def test_excluded_engines_are_no_targets():
    table = make_table((P, 0, {}), (D, 0, {}), (D, 50, {}))
    assert find_target(table, DONE, excluded=["e1"]) == "e2"


def test_equally_used_targets_are_picked_at_random():
    table, policy = make_table((P, 0, {}), (D, 0, {}), (D, 0, {})), make_policy()
    request = FlowRequest(request_id=RequestId("r"), cause=DONE, source=EngineId("e0"), num_blocks=1)
    counts = Counter(policy.target(0.0, request, table) for _ in range(200))
    assert min(counts["e1"], counts["e2"]) > 60


@pytest.mark.parametrize(("cause", "expected"), [(DRAIN, {"e0", "e1"}), (DONE, {"e1"}), (DEGRADE, {"e0"})])
def test_a_source_that_is_gone_still_finds_a_target(cause, expected):
    assert find_target(make_table((P, 0, {}), (D, 0, {})), cause, source="gone") in expected
