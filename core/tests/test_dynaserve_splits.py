"""Strategy DynaServe: output lengths, predicted work, the pair, and where requests are cut (Algorithm 1)."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import (
    EngineId,
    Hold,
    IterationShape,
    Leg,
    MoveCause,
    Place,
    PrefillRequest,
    Reject,
    RequestId,
    Role,
    Slo,
)
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.scheduling.splitting.execution_predictor import ExecutionPredictor
from sluice_core.scheduling.splitting.predicted_output_lengths import (
    UNKNOWN_TOKENS,
    KnownLengths,
    NoisyLengths,
    RunningQuantile,
    predict_output_tokens,
)
from sluice_core.scheduling.splitting.split_placement import LEAST_PART_TOKENS, SplitPlacement
from sluice_core.scheduling.splitting.split_search import TOLERANCE_S, ServerClock, search_split
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

A100 = load_model_on_gpu("qwen2.5-14b", "a100-80g", 1).profile
DYNASERVE = get_strategy("dynaserve")
NOW = 10.0
NO_SLO = Slo(ttft_s=math.inf, tpot_s=math.inf)
CONFIG = EngineConfig(block_size_tokens=16, kv_bytes_per_token=196_608, max_num_seqs=8, max_batch_tokens=2048)


# --- Algorithm 1: where a request is cut ---------------------------------------------------------------------------


def make_clock(
    *, prefill_s=0.0, decode_s=0.0, per_prefill_s=1e-4, per_work_s=0.0, per_decode_s=2e-4, per_context_s=0.0
):
    return ServerClock(
        prefill_s=prefill_s,
        decode_s=decode_s,
        per_prefill_s=per_prefill_s,
        per_work_s=per_work_s,
        per_decode_s=per_decode_s,
        per_context_s=per_context_s,
    )


def search(prompt, output, first, second, *, steps=6, cuts_prompts=True):
    return search_split(prompt, output, first, second, num_steps=steps, cuts_prompts=cuts_prompts)


@pytest.mark.parametrize("busy", [None, 0, 1])
def test_an_idle_pair_begins_with_prefill_on_one_engine_and_decode_on_the_other(busy):
    """Lines 1 and 2; as soon as one has work, both are balanced."""
    clocks = [make_clock(prefill_s=0.5 if busy == index else 0.0) for index in range(2)]
    split = search(1000, 1000, *clocks)
    assert (split.token == 1000) is (busy is None)


@pytest.mark.parametrize(
    ("first_s", "second_s", "token"),
    [
        (0.1, 0.1, 1250),  # 1000 prompt tokens take 0.1 s, 1000 output tokens 0.2 s: 0.15 s each
        (0.1, 0.2, 1500),
        (0.2, 0.1, 1000),
        (0.25, 0.1, 750),
        (0.3, 0.1, 500),
        (9.0, 0.1, 0),
        (0.1, 9.0, 2000),
    ],
)
def test_the_cut_balances_what_both_engines_have(first_s, second_s, token):
    split = search(1000, 1000, make_clock(decode_s=first_s), make_clock(prefill_s=second_s), steps=16)
    assert split.token == pytest.approx(token, abs=12)
    if 0 < token < 2000:
        assert abs(split.first_s - split.second_s) < 2.5 * TOLERANCE_S


@pytest.mark.parametrize(
    ("steps", "token"),
    # The prompt's end is 0.5. Nothing but the number of steps ends it; both are done together at 1597.
    [(1, 1500), (2, 1750), (3, 1625), (4, 1562), (5, 1593), (6, 1609)],
)
def test_the_search_halves_what_is_left_as_often_as_it_may(steps, token):
    first, second = make_clock(prefill_s=0.1, per_decode_s=2e-3), make_clock(prefill_s=0.59, per_decode_s=2e-3)
    assert search(1000, 1000, first, second, steps=steps).token == token


def test_the_search_stops_when_both_are_done_at_the_same_time():
    first, second = make_clock(prefill_s=0.1), make_clock(prefill_s=0.1, per_decode_s=1e-4)
    assert search(1000, 1000, first, second) == (1000, pytest.approx(0.2), pytest.approx(0.2))


def test_prompts_stay_whole_where_engines_cannot_cut_them():
    split = search(1000, 1000, make_clock(prefill_s=9.0), make_clock(prefill_s=0.1), cuts_prompts=False)
    assert split.token == 1000


@given(
    prompt=st.integers(1, 5000),
    output=st.integers(1, 5000),
    first_s=st.floats(0.001, 3.0),
    second_s=st.floats(0.001, 3.0),
    work=st.sampled_from([0.0, 5e-9]),
    context=st.sampled_from([0.0, 1e-7]),
)
def test_a_whole_search_is_as_good_as_trying_every_token(prompt, output, first_s, second_s, work, context):
    first = make_clock(prefill_s=first_s, per_work_s=work, per_context_s=context)
    second = make_clock(decode_s=second_s, per_work_s=work, per_context_s=context)
    found = search(prompt, output, first, second, steps=16)

    def count_s(clock, start, end):  # token by token
        total_s = clock.prefill_s + clock.decode_s
        for token in range(start, end):
            if token < prompt:
                total_s += clock.per_prefill_s + clock.per_work_s * (token + 0.5)
            else:
                total_s += clock.per_decode_s + clock.per_context_s * (token + 0.5)
        return total_s

    assert found.first_s == pytest.approx(count_s(first, 0, found.token))
    assert found.second_s == pytest.approx(count_s(second, found.token, prompt + output))
    best_s = min(
        max(first.predict_s(prompt, 0, token), second.predict_s(prompt, token, prompt + output))
        for token in range(prompt + output + 1)
    )
    assert found.done_s <= best_s + 2 * TOLERANCE_S + 2e-3


# --- output lengths ------------------------------------------------------------------------------------------------


def make_request(name="r", *, prompt=1000, limit=0, slo=NO_SLO, **changes):
    return PrefillRequest(
        request_id=RequestId(name), arrival_s=NOW, prompt_tokens=prompt, slo=slo, max_output_tokens=limit, **changes
    )


def test_a_running_quantile_forgets_and_never_exceeds_what_was_asked_for():
    lengths = RunningQuantile(0.5, window=4)
    assert lengths.predict(make_request()) == UNKNOWN_TOKENS
    assert lengths.predict(make_request(limit=77)) == 77
    for tokens, median in ((100, 100), (10, 100), (30, 30), (50, 50), (20, 30), (20, 30), (20, 20)):
        lengths.observe(tokens)
        assert lengths.predict(make_request()) == median
    assert predict_output_tokens(lengths, make_request(), 5) == 25
    assert predict_output_tokens(lengths, make_request(limit=22), 5) == 22
    assert predict_output_tokens(lengths, make_request(limit=7), 0) == 7


def test_noise_is_about_what_is_right():
    known = KnownLengths({RequestId("r"): 500})
    noisy = NoisyLengths(known, 50.0, random.Random(1))
    drawn = [noisy.predict(make_request()) for _ in range(400)]
    assert known.predict(make_request()) == 500
    assert 490 < sum(drawn) / 400 < 510
    assert 350 < min(drawn) < 420
    assert NoisyLengths(KnownLengths({RequestId("r"): 1}), 50.0, random.Random(1)).predict(make_request()) >= 1


# --- the predictor -------------------------------------------------------------------------------------------------


def make_table(*loads, roles=None, cutting=()):
    table = EngineTable(lambda _: A100)
    for number, load in enumerate(loads):
        config = CONFIG._replace(cuts_prompts=number in cutting)
        engine_id = EngineId(f"e{number}")
        table.add(engine_id, config, role=(roles or [Role.PREFILL_HEAVY] * 9)[number], chunk_size_tokens=2048)
        table.report(engine_id, load, NOW)
    return table


def make_load(**changes):
    return EngineLoad(**{"kv_blocks_total": 1000} | changes)


def read(predictor, table, now, name="e0"):
    return predictor.read_clock(now, table[EngineId(name)])


def test_an_idle_engine_has_nothing_to_do_and_marginal_costs():
    clock = read(ExecutionPredictor(20), make_table(make_load()), NOW)
    assert clock.committed_s == 0.0
    alone_s = A100.estimate_shape_s(IterationShape(num_decodes=1, decode_context_tokens=1000))
    assert 0.0 < clock.per_decode_s + 1000 * clock.per_context_s < alone_s / 20


def test_reported_prompts_are_prefill_work_and_unknown_decodes_have_the_margin_left():
    load = make_load(queued_prefill_tokens=2000, queued_requests=1, queued_attention_work=2e6)
    clock = read(ExecutionPredictor(20), make_table(load), NOW)
    assert clock.prefill_s == pytest.approx(2000 * clock.per_prefill_s + 2e6 * clock.per_work_s)
    clock = read(ExecutionPredictor(20), make_table(make_load(running_decodes=3, decode_context_tokens=3000)), NOW)
    assert clock.decode_s == pytest.approx(3 * 20 * (clock.per_decode_s + 1000 * clock.per_context_s))


def test_virtual_batches_advance_as_a_plain_one_does():
    """Parts begin when they are due and there is a seat, and gain a token per pass; a plain list says the same."""
    rng = random.Random(5)
    load = make_load(running_decodes=8, decode_context_tokens=8000)
    table, predictor, plain, now = make_table(load), ExecutionPredictor(0), [], NOW
    state = table[EngineId("e0")]
    pass_s = A100.estimate_shape_s(IterationShape(num_decodes=8, decode_context_tokens=8000))
    passes = 0.0
    for number in range(300):
        step_s = rng.expovariate(1.0)
        now, passes = now + step_s, passes + step_s / pass_s
        clock = read(predictor, table, now)
        for part in plain:
            part["is_done"] = part["is_done"] or (part["end"] is not None and part["end"] <= passes)
        plain = [part for part in plain if not part["is_done"]]
        for part in sorted(plain, key=lambda one: one["starts_at_s"]):
            num_active = sum(one["end"] is not None for one in plain)
            if part["end"] is None and part["starts_at_s"] <= now and num_active < 8:
                part["end"] = passes + part["tokens"]
        active = [part for part in plain if part["end"] is not None]
        waiting = sum(part["tokens"] for part in plain if part["end"] is None)
        left = sum(part["end"] - passes for part in active)
        left += (8 - len(active)) * (left / len(active) if active else 0.0)  # the engine reports 8
        token_s = clock.per_decode_s + 1000 * clock.per_context_s
        assert clock.decode_s == pytest.approx((left + waiting) * token_s, rel=1e-6, abs=1e-9)
        if rng.random() < 0.3 and plain:
            gone = rng.choice(plain)
            predictor.forget(RequestId(gone["name"]))
            plain.remove(gone)
        tokens, starts_at_s = rng.randint(1, 200), now + rng.choice((0.0, 0.5, 4.0))
        predictor.commit(RequestId(str(number)), state, starts_at_s=starts_at_s, prefill_s=0.0, decode_tokens=tokens)
        part = {"name": str(number), "starts_at_s": starts_at_s, "tokens": tokens, "end": None, "is_done": False}
        plain.append(part)


def test_fewer_decodes_than_were_expected_have_less_left():
    table, predictor = make_table(make_load(running_decodes=4, decode_context_tokens=4000)), ExecutionPredictor(20)
    for number in range(4):
        predictor.commit(
            RequestId(str(number)), table[EngineId("e0")], starts_at_s=NOW, prefill_s=0.0, decode_tokens=100
        )
    whole = read(predictor, table, NOW)
    table.report(EngineId("e0"), make_load(running_decodes=2, decode_context_tokens=2000), NOW)
    half = read(predictor, table, NOW)
    per_token_s = [clock.per_decode_s + 1000 * clock.per_context_s for clock in (whole, half)]
    assert [whole.decode_s, half.decode_s] == [pytest.approx(400 * per_token_s[0]), pytest.approx(200 * per_token_s[1])]


def test_a_further_decode_costs_what_it_does_beside_all_that_will_be_there():
    """Iterations do not get slower by the same for each decode."""
    table = EngineTable(lambda _: A100)
    table.add(EngineId("e0"), EngineConfig(16, 196_608, 512, 2048), role=Role.PREFILL_HEAVY, chunk_size_tokens=2048)
    table.report(EngineId("e0"), make_load(running_decodes=100), NOW)
    predictor, state = ExecutionPredictor(20), table[EngineId("e0")]
    for number in range(60):
        predictor.commit(RequestId(str(number)), state, starts_at_s=NOW + 9.0, prefill_s=0.0, decode_tokens=10)
    least_s, more_s = (A100.estimate_shape_s(IterationShape(num_decodes=number)) for number in (160, 168))
    assert read(predictor, table, NOW).per_decode_s == pytest.approx((more_s - least_s) / 8)


# --- the pair ------------------------------------------------------------------------------------------------------


def make_placement(**changes):
    placement = SplitPlacement(StrategyParameters(**changes), random.Random(1))
    placement.lengths = KnownLengths({RequestId("r"): 1000})
    return placement


def place(table, placement=None, now=NOW, **changes):
    (decision,) = (placement or make_placement()).assign(now, [make_request(**changes)], table)
    return decision


def make_busy(tokens, **changes):
    work = tokens * tokens / 2
    return make_load(queued_prefill_tokens=tokens, queued_requests=1, queued_attention_work=work, **changes)


def test_a_request_is_split_over_the_least_busy_engine_of_each_side():
    table = make_table(make_busy(4000), make_busy(3000), make_busy(2000), make_busy(2500))
    decision = place(table)
    assert isinstance(decision, Place)
    assert (decision.engine_id, decision.reason) == ("e2", "split")
    first, second = decision.route
    assert (first.engine_id, second.engine_id) == ("e2", "e3")
    # 20 more than predicted, less the last token, which never has KV.
    assert 1000 <= first.end_token < second.end_token == 2019


def test_the_answer_is_never_longer_than_was_asked_for():
    decision = place(make_table(make_load(), make_load()), limit=300)
    assert decision.route == (Leg(EngineId("e0"), 1000), Leg(EngineId("e1"), 1299))


def test_the_pair_is_turned_where_that_is_sooner():
    """No cut of the answer makes up for a prompt behind a long queue."""
    table = make_table(make_busy(9000), make_load())
    assert place(table).engine_id == "e1"
    bound = SplitPlacement(StrategyParameters(), random.Random(1), is_bound_to_sides=True)
    bound.lengths = KnownLengths({RequestId("r"): 1000})
    assert place(make_table(make_busy(9000), make_load()), bound).engine_id == "e0"


@pytest.mark.parametrize(("token", "engine"), [(1100, "e1"), (1900, "e0")])
def test_a_fixed_cut_gives_the_longer_part_to_the_engine_with_less_to_do(token, engine):
    fixed = SplitPlacement(StrategyParameters(), random.Random(1), fixed_token=token)
    fixed.lengths = KnownLengths({RequestId("r"): 1000})
    decision = place(make_table(make_load(), make_busy(3000)), fixed)
    assert (decision.route[0].engine_id, decision.route[0].end_token) == (engine, token)


def test_a_part_that_is_too_short_is_left_to_the_other_engine():
    table = make_table(make_load(), make_busy(100))
    decision = place(table, limit=LEAST_PART_TOKENS)
    assert (decision.engine_id, decision.reason, decision.route) == ("e0", "whole", ())


@pytest.mark.parametrize(
    ("loads", "engine"),
    [
        ([make_load()], "e0"),
        ([make_load(), make_load(kv_blocks_used=999)], "e0"),
        ([make_load(kv_blocks_used=999), make_load()], "e1"),
    ],
)
def test_one_engine_with_room_has_the_whole_request(loads, engine):
    decision = place(make_table(*loads))
    assert (decision.engine_id, decision.route) == (engine, ())


def test_without_room_or_engines_a_request_waits():
    full = make_table(make_load(kv_blocks_used=999), make_load(kv_blocks_used=999))
    assert place(full) == Hold(request_id=RequestId("r"), reason="kv")
    assert place(make_table()) == Hold(request_id=RequestId("r"), reason="no_engine")


@pytest.mark.parametrize("tokens", [0, 4000])
def test_a_recovery_is_not_split(tokens):
    decision = place(make_table(make_load(), make_busy(tokens)), is_recovery=True)
    assert (decision.engine_id, decision.reason, decision.route) == ("e0", "recovery", ())


@pytest.mark.parametrize("fixed_token", [1, 40])
@pytest.mark.parametrize(("token_s", "engine"), [(0.05, "e0"), (0.1, "e1")])
def test_a_fixed_cut_has_the_prompt_where_it_is_computed_sooner(fixed_token, token_s, engine):
    """A prompt of one token, on an idle engine or on one that has 70 ms of work; decodes cost nothing."""
    profiles = [IterationProfile(linear_s=(0.0, 0.01), prefill_token_s=each_s) for each_s in (token_s, 1e-4)]
    table = EngineTable(lambda engine_id: profiles[int(engine_id[1:])])
    for number, load in enumerate((make_load(), make_busy(700))):
        table.add(EngineId(f"e{number}"), CONFIG, role=Role.PREFILL_HEAVY, chunk_size_tokens=2048)
        table.report(EngineId(f"e{number}"), load, NOW)
    placement = SplitPlacement(StrategyParameters(), random.Random(1), fixed_token=fixed_token)
    decision = place(table, placement, prompt=1, limit=100)
    assert decision.engine_id == engine
    assert [leg.end_token for leg in decision.route] == [fixed_token, 100]


@pytest.mark.parametrize(("rejection", "kind"), [(EarlyRejection.OFF, Place), (EarlyRejection.REJECT, Reject)])
def test_a_request_that_would_be_late_is_refused_where_that_is_wanted(rejection, kind):
    table = make_table(make_busy(50_000, kv_blocks_total=10_000), make_busy(50_000, kv_blocks_total=10_000))
    for number in range(2):
        table[EngineId(f"e{number}")].view.is_proven = True  # a profile has seen no iteration
    slo = Slo(ttft_s=0.01, tpot_s=math.inf)
    assert isinstance(place(table, make_placement(early_rejection=rejection), slo=slo), kind)


def test_what_is_committed_moves_the_next_cut():
    """The first of two equal requests has the pair to itself, the second one not."""
    table, placement = make_table(make_load(), make_load()), make_placement()
    placement.lengths = KnownLengths({RequestId(name): 1000 for name in "abc"})
    (first,) = placement.assign(NOW, [make_request("a")], table)
    (second,) = placement.assign(NOW, [make_request("b")], table)
    assert first.route[0].end_token == 1000
    assert (second.route[0].engine_id, second.route[0].end_token) != (first.route[0].engine_id, 1000)
    # What has ended no longer counts, and is learned from.
    for name, place_ in (("a", first), ("b", second)):
        table.cancel_placement(place_.engine_id, RequestId(name), NOW)
        placement.note_finished(RequestId(name), 0)
    (third,) = placement.assign(NOW, [make_request("c")], table)
    assert third.route[0] == first.route[0]


def test_a_request_that_is_placed_again_is_no_longer_committed_where_it_was():
    table, placement = make_table(make_load(), make_load()), make_placement()
    routes = []
    for _ in range(2):
        placed = place(table, placement)
        routes.append(placed.route)
        table.cancel_placement(placed.engine_id, placed.request_id, NOW)
    assert routes[0] == routes[1]


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({}, "e1"),
        ({"planned_target": None}, None),
        ({"planned_target": EngineId("gone")}, None),
        ({"planned_target": EngineId("e0")}, None),
        ({"excluded": frozenset({EngineId("e1")})}, None),
        ({"num_blocks": 501}, None),
        ({"cause": MoveCause.MANUAL, "num_blocks": 400}, "e1"),
    ],
)
def test_the_second_part_runs_where_it_was_planned_to(changes, target):
    router = DYNASERVE.make_router(StrategyParameters(), random.Random(1))
    table = make_table(make_load(), make_load(kv_blocks_used=500), make_load(kv_blocks_used=900))
    values = {
        "cause": MoveCause.SPLIT,
        "source": EngineId("e0"),
        "num_blocks": 500,
        "planned_target": EngineId("e1"),
    }
    assert router.target(NOW, FlowRequest(**values | changes), table) == target


def test_another_strategy_carries_no_plan_out():
    router = get_strategy("taichi").make_router(StrategyParameters(), random.Random(1))
    request = FlowRequest(
        cause=MoveCause.SPLIT,
        source=EngineId("e0"),
        num_blocks=1,
        planned_target=EngineId("e1"),
    )
    table = make_table(make_load(), make_load(), roles=[Role.PREFILL_HEAVY, Role.DECODE_HEAVY])
    table.configure(EngineId("e1"), role=Role.DECODE_HEAVY, chunk_size_tokens=64)
    assert router.target(NOW, request, table) is None


# --- which prompts are cut -----------------------------------------------------------------------------------------


def place_cut(*, cuts_prompts, cutting, **changes):
    """Place a prompt that both engines would share; returns where it is cut, 0: behind its end."""
    busy = make_load(queued_prefill_tokens=300, queued_requests=1, queued_attention_work=45_000.0)
    table = make_table(busy, make_load(), cutting=cutting)
    placement = SplitPlacement(StrategyParameters(), random.Random(1), cuts_prompts=cuts_prompts)
    request = make_request(prompt=3000, limit=20, **changes)
    (place,) = placement.assign(NOW, [request], table)
    return place.route[0].end_token if place.route and place.route[0].end_token < 3000 else 0


@pytest.mark.parametrize("cutting", [(), (0,), (1,), (0, 1)])
def test_prompts_are_cut_where_both_engines_can_do_their_part(cutting):
    token = place_cut(cuts_prompts=None, cutting=cutting)
    assert 1000 < token < 2000 if len(cutting) == 2 else token == 0
    assert place_cut(cuts_prompts=False, cutting=cutting) == 0
    assert 1000 < place_cut(cuts_prompts=True, cutting=cutting) < 2000


@pytest.mark.parametrize("cuts_prompts", [None, True])
def test_a_prompt_that_was_refused_room_is_not_cut_again(cuts_prompts):
    assert place_cut(cuts_prompts=cuts_prompts, cutting=(0, 1), is_whole=True) == 0
    assert place_cut(cuts_prompts=cuts_prompts, cutting=(0, 1), is_recovery=True) == 0
