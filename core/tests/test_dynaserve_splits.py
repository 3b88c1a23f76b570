"""Strategy DynaServe: output lengths, predicted work, the pair, and where requests are cut (Algorithm 1)."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, IterationShape, PrefillRequest, RequestId, Role, Slo
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
from sluice_core.scheduling.splitting.split_search import TOLERANCE_S, ServerClock, search_split
from sluice_core.strategies import get_strategy

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


def test_the_largest_quantile_is_the_longest_output():
    lengths = RunningQuantile(1.0, window=4)
    for tokens in (30, 90, 50):
        lengths.observe(tokens)
    assert lengths.predict(make_request()) == 90


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


def make_busy(tokens, **changes):
    work = tokens * tokens / 2
    return make_load(queued_prefill_tokens=tokens, queued_requests=1, queued_attention_work=work, **changes)


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


def commit(predictor, table, *parts, prefill_s=0.0):
    """Commit parts, each as when it starts and its tokens."""
    for starts_at_s, tokens in parts:
        predictor.commit(
            RequestId(f"{starts_at_s}-{tokens}"),
            table[EngineId("e0")],
            starts_at_s=starts_at_s,
            prefill_s=prefill_s,
            decode_tokens=tokens,
        )


def test_parts_wait_for_a_seat_in_the_order_in_which_they_came():
    """The engine reports twice as many as are known: the others have as much left as these on the average."""
    table = make_table(make_load(running_decodes=16, decode_context_tokens=16_000))
    predictor = ExecutionPredictor(0)
    commit(predictor, table, *((NOW, 10 + number) for number in range(8)), (NOW, 100))
    clock = read(predictor, table, NOW)
    known = sum(range(10, 18))
    assert clock.decode_s == pytest.approx((2 * known + 100) * (clock.per_decode_s + 1000 * clock.per_context_s))


def test_parts_with_the_same_end_do_not_disturb_each_other():
    table, predictor = make_table(make_load(running_decodes=3, decode_context_tokens=3000)), ExecutionPredictor(0)
    for name in "abc":
        predictor.commit(RequestId(name), table[EngineId("e0")], starts_at_s=NOW, prefill_s=0.0, decode_tokens=50)
        clock = read(predictor, table, NOW)
    assert clock.decode_s == pytest.approx(150 * (clock.per_decode_s + 1000 * clock.per_context_s))


def test_what_is_committed_before_the_first_reading_counts_as_it_is():
    """Nothing runs yet, so that nothing is known of contexts."""
    table, predictor = make_table(make_load()), ExecutionPredictor(20)
    commit(predictor, table, (NOW + 1.0, 300), prefill_s=0.5)
    clock = read(predictor, table, NOW)
    assert clock.prefill_s == 0.5
    assert clock.decode_s == pytest.approx(300 * clock.per_decode_s, rel=1e-9)


def test_a_pass_takes_as_long_as_the_iteration_with_what_is_queued():
    table = make_table(make_busy(1000, running_decodes=5, decode_context_tokens=5000))
    shape = IterationShape(
        prefill_tokens=1000, attention_work=500_000.0, num_chunks=1, num_decodes=5, decode_context_tokens=5000
    )
    assert read(ExecutionPredictor(20), table, NOW).pass_s == pytest.approx(A100.estimate_shape_s(shape), rel=1e-9)


def test_a_prompt_of_iterations_of_one_token_costs_what_these_add():
    line = IterationProfile(linear_s=(0.01,), slope_s=1e-4)
    table = EngineTable(lambda _: line)
    table.add(EngineId("e0"), CONFIG, role=Role.PREFILL_HEAVY, chunk_size_tokens=1)
    table.report(EngineId("e0"), make_load(), NOW)
    expected_s = line.compute_prefill_coefficients(0, 0, 1).per_token_s
    assert read(ExecutionPredictor(20), table, NOW).per_prefill_s == expected_s


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
