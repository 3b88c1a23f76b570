"""Admission and placement, on a clock in hand."""

from __future__ import annotations

import re

import pytest
from data_plane_harness import CheckingResponseStream, Harness, make_request
from fake_engine import PARAMETERS, expected_output, make_plan

from sluice.v1 import engine_pb2, plan_pb2, sampling_pb2
from sluice_core.latency import OnlineLatencyModel
from sluice_core.records import IterationShape
from sluice_core.scheduling.waiting_order import MAX_ASSIGNED_AT_ONCE
from sluice_router.errors import (
    DeadlineError,
    InvalidRequestError,
    NoEngineError,
    QueueFullError,
    RouterError,
    ShuttingDownError,
    SloInfeasibleError,
)
from sluice_router.settings import load_profile, make_limits

ONE = {"d0": "D"}


def test_request_runs_to_its_end_and_leaves_nothing():
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 8)
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 8)
    assert response_stream.finish is not None
    assert response_stream.finish.reason == sampling_pb2.FINISH_REASON_LENGTH
    assert response_stream.finish.usage.prompt_tokens == 20
    assert response_stream.finish.usage.output_tokens == 8
    assert response_stream.finish.usage.ttft_s == pytest.approx(0.01)
    assert response_stream.finish.usage.tpot_s == pytest.approx(0.01)
    assert response_stream.finish.usage.is_slo_met
    assert harness.state.metrics.counters["tokens"] == {("prompt",): 20, ("output",): 8}
    assert harness.state.metrics.counters["requests"] == {("", "length"): 1}
    harness.assert_idle()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"slo_class": "gold"}, InvalidRequestError, ["slo_class", "gold"]),
        ({"prompt_tokens": 4000, "max_tokens": 97}, InvalidRequestError, ["4000", "97", "4096"]),
        ({"prompt_tokens": 0}, InvalidRequestError, ["prompt"]),
        ({"max_tokens": 0}, InvalidRequestError, ["max_tokens", "0"]),
    ],
    ids=["unknown class", "too long", "empty prompt", "no output"],
)
def test_bad_request_is_refused_by_name_value_and_limit(fields, error, words):
    harness = Harness(ONE)
    with pytest.raises(error) as caught:
        harness.admit(**fields)
    for word in words:
        assert word in str(caught.value)
    harness.assert_idle()


def test_prompt_and_output_may_fill_the_model_exactly():
    harness = Harness(ONE)
    _, response_stream = harness.admit(4094, 2)
    harness.run()
    assert response_stream.finish is not None
    assert response_stream.finish.usage.output_tokens == 2
    harness.assert_idle()


def test_request_without_a_plan_gets_retry_after():
    harness = Harness(ONE, plan=False)
    with pytest.raises(NoEngineError) as caught:
        harness.admit()
    assert caught.value.retry_after_s == 1.0


def test_request_at_shutdown_gets_retry_after():
    harness = Harness(ONE)
    harness.router.stop_accepting()
    assert not harness.router.is_ready
    with pytest.raises(ShuttingDownError) as caught:
        harness.admit()
    assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize("excess", [0, 1])
def test_prompt_and_output_may_be_as_long_as_the_model_and_no_longer(excess):
    harness = Harness(ONE)
    if not excess:
        harness.admit(4000, 96)
        return
    with pytest.raises(InvalidRequestError, match="the prompt has 4000 tokens and max_tokens is 97") as caught:
        harness.admit(4000, 97)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


def test_request_that_waited_too_long_is_told_why():
    harness = Harness(ONE, limits=make_limits(wait_limit_s=5))
    load = harness.cores["d0"].load()
    load.kv_blocks_used = load.kv_blocks_total
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
    request_id, response_stream = harness.admit()
    reason = harness.state.requests.live[request_id].wait_reason
    assert reason not in ("", "no_engine")
    harness.clock.advance(5.1)
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
    harness.router.tick()
    assert f"within 5 s ({reason})" in response_stream.error.message


@pytest.mark.parametrize("num_routers", [1, 2, 4])
def test_queue_is_bounded_by_this_routers_part_of_the_limit(num_routers):
    harness = Harness({}, limits=make_limits(max_waiting=2 * num_routers))
    harness.router.apply_plan(make_plan(ONE, num_routers=num_routers))
    harness.admit()
    harness.clock.advance(7)
    harness.admit()
    with pytest.raises(QueueFullError, match="limit is 2") as caught:
        harness.admit(owner="alice")
    # As long as the head of the queue has waited.
    assert caught.value.retry_after_s == 7
    assert harness.count("requests", "", "rejected") == harness.count("key_requests", "alice", "rejected") == 1
    assert harness.count("rejected", "rate_limited") == 1
    (counters,) = harness.router.describe().classes
    assert (counters.num_finished, counters.num_met_both) == (1, 0)


def test_objectives_are_the_class_unless_the_request_says_otherwise():
    harness = Harness(ONE)
    gold = plan_pb2.SloClass(name="gold", ttft_milliseconds=100, tpot_milliseconds=20, priority=7)
    default = plan_pb2.SloClass(ttft_milliseconds=5000, tpot_milliseconds=500)
    harness.router.apply_plan(make_plan(ONE, generation=2, slo_classes=[default, gold]))
    one, _ = harness.admit(slo_class="gold", tpot_slo_s=0.5)
    two, _ = harness.admit(priority=-1)
    three, _ = harness.admit(slo_class="gold", ttft_slo_s=2, priority=0)
    harness.run()
    submits = {submit.request_id: submit for submit in harness.cores["d0"].submitted}
    seen = {name: (item.ttft_slo_s, item.tpot_slo_s, item.priority) for name, item in submits.items()}
    assert seen == {one: (0.1, 0.5, 7), two: (5.0, 0.5, -1), three: (2.0, 0.02, 0)}


@pytest.mark.parametrize(
    ("sampling", "has_seed"),
    [
        (sampling_pb2.SamplingParams(max_tokens=3, temperature=0.7), True),
        (sampling_pb2.SamplingParams(max_tokens=3), True),
        (sampling_pb2.SamplingParams(max_tokens=3, temperature=0.0), False),
    ],
    ids=["random", "model's default", "greedy"],
)
def test_random_sampling_without_a_seed_gets_one(sampling, has_seed):
    harness = Harness(ONE)
    harness.admit(sampling=sampling)
    harness.run()
    assert harness.cores["d0"].submitted[0].sampling.HasField("seed") is has_seed


def test_seed_of_the_client_is_kept():
    harness = Harness(ONE)
    harness.admit(sampling=sampling_pb2.SamplingParams(max_tokens=3, temperature=1.0, seed=42))
    harness.run()
    assert harness.cores["d0"].submitted[0].sampling.seed == 42


def test_request_waits_for_an_engine_and_goes_on_when_one_comes():
    harness = Harness({})
    harness.router.apply_plan(make_plan(ONE))
    _, response_stream = harness.admit()
    harness.clock.advance(3)
    harness.router.tick()
    assert not response_stream.is_over
    harness.attach("d0")
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 8)
    harness.assert_idle()


def test_wait_for_an_engine_ends_with_no_engine_and_an_estimate():
    harness = Harness({}, limits=make_limits(wait_limit_s=5))
    harness.router.apply_plan(make_plan(ONE))
    _, response_stream = harness.admit()
    harness.clock.advance(4.9)
    harness.router.tick()
    assert response_stream.error is None
    harness.clock.advance(0.2)
    harness.router.tick()
    assert isinstance(response_stream.error, NoEngineError)
    assert response_stream.error.retry_after_s == pytest.approx(5.1)
    assert "(no_engine)" in response_stream.error.message
    check_bad_end(harness, "rejected", "no_engine")


def check_bad_end(harness: Harness, result: str, reason: str) -> None:
    """The one request there was ended so, met nothing, and left nothing."""
    assert harness.state.metrics.counters["requests"] == {("", result): 1}
    assert harness.state.metrics.counters["rejected"] == {(reason,): 1}
    counters = [(item.num_finished, item.num_met_both) for item in harness.router.describe().classes]
    assert counters == ([] if result == "cancelled" else [(1, 0)])
    harness.assert_idle()


def test_deadline_ends_a_running_request_and_aborts_it():
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 100, deadline_s=harness.clock.now_s + 0.05)
    for _ in range(8):
        harness.step_all()
    assert isinstance(response_stream.error, DeadlineError)
    assert 0 < len(response_stream.token_ids) < 8
    check_bad_end(harness, "failed", "deadline_exceeded")


def test_infeasible_request_is_rejected_with_an_estimate_when_the_plan_says_so():
    harness = Harness(ONE)
    core = harness.cores["d0"]
    parameters = {**PARAMETERS, "early_rejection": "Reject"}
    harness.router.apply_plan(make_plan(ONE, generation=2, strategy_parameters=parameters))
    # An engine with few measured iterations never justifies a rejection.
    for _ in range(120):
        _, response_stream = harness.admit(200, 1)
        harness.run()
        assert response_stream.finish is not None
    errors: list[RouterError] = []
    for _ in range(400):
        _, response_stream = harness.admit(200, 1, ttft_slo_s=0.05)
        if response_stream.error is not None:
            errors.append(response_stream.error)
    assert errors
    assert all(isinstance(error, SloInfeasibleError) for error in errors)
    assert all(re.search(r"; the nearest would be \d+\.\d s late$", str(error)) for error in errors)
    assert errors[0].retry_after_s is not None
    assert core.is_idle
    harness.run(1000)
    harness.assert_idle()


def test_engine_of_another_routers_share_is_taken_when_ones_own_is_busier():
    harness = Harness({"d0": "D", "d1": "D"})
    load = harness.cores["d0"].load()
    load.is_of_others = True
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
    engines = [harness.engine_of(harness.admit(200, 4, first=number)[0]) for number in range(3)]
    assert engines == ["d1", "d1", "d0"]


def predict_ttft_s(age_s: float, under_way: engine_pb2.Iteration | None = None) -> float:
    """TTFT that placement expects on an engine whose iteration under way began so long ago; its last one was short."""
    profile = load_profile("qwen2.5-32b@a100-80g")
    harness = Harness(ONE, make_latency_model=lambda _: OnlineLatencyModel(profile))
    load = harness.cores["d0"].load()
    load.running_decodes, load.decode_context_tokens, load.iteration_age_s = 1, 100, age_s
    load.iteration.CopyFrom(engine_pb2.Iteration(number=1, num_decodes=1, decode_context_tokens=100))
    if under_way is not None:
        load.under_way.CopyFrom(under_way)
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
    story = harness.router.explain(harness.admit(20, 4)[0])
    assert story is not None
    return story["events"][1]["decision"]["predicted_ttft_s"]


def test_expected_ttft_counts_the_rest_of_the_iteration_under_way():
    assert predict_ttft_s(0) - predict_ttft_s(0.01) == pytest.approx(0.01)
    # It is over any moment now.
    assert predict_ttft_s(10) == predict_ttft_s(20)


def test_expected_ttft_counts_a_prefill_under_way_whatever_the_last_iteration_was():
    """Its tokens are queued no more: an engine that has begun a long prompt after short iterations is not free."""
    prefill = engine_pb2.Iteration(prefill_tokens=2000, num_chunks=1, attention_work=2e6)
    profile = load_profile("qwen2.5-32b@a100-80g")
    prefill_s = OnlineLatencyModel(profile).estimate_shape_s(
        IterationShape(prefill_tokens=2000, num_chunks=1, attention_work=2e6)
    )
    idle_s = predict_ttft_s(10)
    assert predict_ttft_s(0.1, prefill) - idle_s == pytest.approx(prefill_s - 0.1)
    assert predict_ttft_s(0, engine_pb2.Iteration()) == idle_s  # nothing is under way


def test_prefills_go_where_the_fewest_tokens_are_queued():
    harness = Harness({"d0": "D", "d1": "D", "d2": "D"})
    engines = [harness.engine_of(harness.admit(100, 4, first=number)[0]) for number in range(1, 10)]
    assert {engines.count(name) for name in ("d0", "d1", "d2")} == {3}
    harness.run()
    harness.assert_idle()


def test_client_gone_while_queued_and_while_running_is_aborted_at_once():
    harness = Harness(ONE)
    first, first_sink = harness.admit(20, 100)
    harness.step_all()
    second, second_sink = harness.admit(20, 100)
    for request_id, response_stream in ((first, first_sink), (second, second_sink)):
        response_stream.is_cancelled = True
        harness.router.cancel(request_id)
    harness.deliver()
    harness.assert_idle()
    harness.router.cancel(first)


def test_recoveries_are_placed_first_the_most_indebted_ahead():
    harness = Harness({"d0": "D", "d1": "D"}, limits=make_limits(max_deaths=5, max_recoveries=9))
    for number in range(6):
        harness.admit(20, 50, first=number + 1, tpot_slo_s=0.5 - number / 100)
    for _ in range(3):
        harness.step_all()
    harness.kill("d0")
    harness.kill("d1")
    new, _ = harness.admit(20, 5)
    core = harness.attach("d0", epoch=2)
    harness.deliver()
    harness.clock.advance(0.01)
    harness.router.tick()
    harness.deliver()
    order = [submit.request_id for submit in core.submitted]
    slos = [harness.state.requests.live[name].slo.tpot_s for name in order if name != new]
    assert slos == sorted(slos)
    assert order[-1] == new
    harness.run()
    harness.assert_idle()


def test_arrival_counts_from_the_first_byte():
    harness = Harness(ONE)
    request = make_request(20, 2, now=harness.clock.now_s - 1.5)
    response_stream = CheckingResponseStream(list(request.prompt_token_ids))
    harness.router.admit(request, response_stream)
    harness.run()
    assert response_stream.finish is not None
    assert response_stream.finish.usage.ttft_s == pytest.approx(1.51)
    # It did not wait for an engine.
    assert harness.state.metrics.queue_s[""].total == 0


def test_urgent_requests_of_a_queue_too_long_for_one_pass_are_placed_first():
    harness = Harness({})
    harness.router.apply_plan(make_plan(ONE))
    for _ in range(MAX_ASSIGNED_AT_ONCE + 10):
        harness.admit(4, 1)
    urgent = [harness.admit(4, 1, priority=number)[0] for number in (1, 2)]
    core = harness.attach("d0", max_num_seqs=1000, kv_blocks_total=10_000)
    harness.deliver()
    harness.clock.advance(0.01)
    harness.router.tick()
    harness.deliver()
    assert [submit.request_id for submit in core.submitted[:2]] == urgent[::-1]
    assert len(core.submitted) == MAX_ASSIGNED_AT_ONCE
    harness.run()
    harness.assert_idle()


def test_request_that_has_left_does_not_make_its_engine_look_busy():
    harness = Harness({"d0": "D", "d1": "D"})
    request_id, response_stream = harness.admit(2000, 4)
    response_stream.is_cancelled = True
    harness.router.cancel(request_id)
    engines = {harness.engine_of(harness.admit(100, 4)[0]) for _ in range(2)}
    assert engines == {"d0", "d1"}


@pytest.mark.parametrize("other_tokens", [4096, 1000])
def test_request_must_fit_the_engine_with_the_shortest_length(other_tokens):
    """Any engine may have to take it over."""
    harness = Harness(ONE)
    harness.attach("d1", max_model_len_tokens=other_tokens)
    harness.deliver()
    assert harness.router.model.max_model_len_tokens == other_tokens
    with pytest.raises(InvalidRequestError, match=f"more than the model's {other_tokens}"):
        harness.admit(other_tokens, 1)
