"""What one engine message brings: tokens once and in order, one flush, faults that stay where they are."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from fake_engine import expected_output, expected_token

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_core.records import EngineId
from sluice_router.errors import EngineFaultError, InvalidRequestError

ONE = {"d0": "D"}
TWO = {"d0": "D", "d1": "D"}


def token_message(slot: int, prompt: list[int], *indexes: int) -> engine_pb2.AttachResponse:
    return engine_pb2.AttachResponse(
        slots=[slot] * len(indexes),
        token_ids=[expected_token(prompt, index) for index in indexes],
        output_indexes=indexes,
    )


def say(harness: Harness, name: str, message: engine_pb2.AttachResponse) -> None:
    harness.router.handle_message(harness.engines[name], message)


def test_each_dirty_stream_is_flushed_once_per_message():
    harness = Harness(ONE)
    response_streams = [harness.admit(20, 9, first=number)[1] for number in (1, 2, 3)]
    harness.deliver()
    for slot, response_stream in enumerate(response_streams):
        response_stream.slot = slot  # type: ignore[attr-defined]
    message = engine_pb2.AttachResponse()
    for index in range(3):
        for slot, response_stream in enumerate(response_streams[:2]):
            message.MergeFrom(token_message(slot, response_stream.prompt, index))
    say(harness, "d0", message)
    assert [response_stream.num_flushes for response_stream in response_streams] == [1, 1, 0]
    assert [len(response_stream.token_ids) for response_stream in response_streams] == [3, 3, 0]


def test_first_flushed_stream_changes_from_message_to_message():
    harness = Harness(ONE)
    order: list[int] = []
    for number in range(3):
        _, response_stream = harness.admit(20, 50, first=number + 1)
        response_stream.flush = lambda now, number=number: order.append(number)  # type: ignore[method-assign]
    for _ in range(4):
        harness.step_all()
    firsts = order[::3]
    assert len(set(firsts)) == 3
    assert sorted(order[:3]) == [0, 1, 2]


def test_known_tokens_are_dropped():
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 9)
    harness.deliver()
    say(harness, "d0", token_message(0, response_stream.prompt, 0, 1, 2))
    say(harness, "d0", token_message(0, response_stream.prompt, 1, 2, 3))
    say(harness, "d0", token_message(0, response_stream.prompt, 0))
    assert response_stream.token_ids == expected_output(response_stream.prompt, 4)
    assert harness.count("stale_tokens") == 3


@pytest.mark.parametrize(
    "message",
    [
        engine_pb2.AttachResponse(slots=[0], token_ids=[1], output_indexes=[5]),
        engine_pb2.AttachResponse(slots=[77], token_ids=[1], output_indexes=[0]),
        engine_pb2.AttachResponse(slots=[0, 0], token_ids=[1], output_indexes=[0]),
        engine_pb2.AttachResponse(finished=[engine_pb2.Finished(slot=9, reason=sampling_pb2.FINISH_REASON_STOP)]),
        engine_pb2.AttachResponse(
            finished=[engine_pb2.Finished(slot=0, reason=sampling_pb2.FINISH_REASON_STOP, num_output_tokens=3)]
        ),
        engine_pb2.AttachResponse(finished=[engine_pb2.Finished(slot=0, reason=sampling_pb2.FINISH_REASON_HANDED_OFF)]),
    ],
    ids=["gap", "unknown slot", "uneven columns", "unknown end", "tokens missing at the end", "uninvited hand-off"],
)
def test_broken_protocol_loses_the_engine_and_no_token(message):
    harness = Harness(TWO)
    request_id, response_stream = harness.admit(20, 9)
    name = harness.engine_of(request_id)
    harness.deliver()
    say(harness, name, message)
    assert harness.closed == [(name, "protocol")]
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 9)
    assert response_stream.finish is not None
    assert response_stream.finish.usage.num_recoveries == 1
    harness.assert_idle()


def test_failing_response_stream_costs_its_own_request_alone():
    harness = Harness(ONE)
    _, good = harness.admit(20, 9, first=1)
    _, bad = harness.admit(20, 9, first=2)
    bad.raises = RuntimeError("transport closed")
    harness.run()
    assert good.finish is not None
    assert good.token_ids == expected_output(good.prompt, 9)
    assert harness.count("sink_faults") == 1
    assert not harness.closed
    harness.assert_idle()


def test_an_end_that_cannot_be_written_is_counted_and_costs_nobody(monkeypatch):
    harness = Harness(ONE)
    _, good = harness.admit(20, 9, first=1)
    _, bad = harness.admit(20, 9, first=2)

    def refuse(_: object) -> None:
        bad.has_raised = True
        raise RuntimeError("transport closed")

    monkeypatch.setattr(bad, "on_finished", refuse)
    harness.run()
    assert good.finish is not None
    assert harness.count("sink_faults") == 1
    assert not harness.closed
    harness.assert_idle()


def test_failing_flush_costs_its_own_request_alone():
    harness = Harness(ONE)
    _, good = harness.admit(20, 9, first=1)
    _, bad = harness.admit(20, 9, first=2)
    bad.raises_on_flush = RuntimeError("transport closed")
    harness.run()
    assert good.finish is not None
    assert len(bad.token_ids) == 1
    assert harness.count("rejected", "sink_fault") == 1
    harness.assert_idle()


@pytest.mark.parametrize("end", ["finished", "stop string", "fault"])
def test_response_stream_that_ends_within_a_message_is_not_flushed(end):
    """The end carries what the message brought; and a response stream that failed is not called again."""
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 50)
    harness.deliver()
    message = token_message(0, response_stream.prompt, 0, 1)
    if end == "finished":
        message.finished.add(slot=0, reason=sampling_pb2.FINISH_REASON_STOP, num_output_tokens=2)
    elif end == "stop string":
        response_stream.stop_at = 2
    else:
        take = response_stream.on_token

        def fail_at_second(token_id, logprobs):
            if response_stream.token_ids:
                raise RuntimeError("transport closed")
            return take(token_id, logprobs)

        response_stream.on_token = fail_at_second  # type: ignore[method-assign]
    say(harness, "d0", message)
    assert response_stream.num_flushes == 0
    assert response_stream.is_over is (end != "fault")
    assert not harness.state.requests.live


def test_cancel_from_within_a_response_stream_is_served_after_the_event():
    harness = Harness(ONE)
    request_id, response_stream = harness.admit(20, 50)

    def flush(now: float) -> None:
        response_stream.is_cancelled = True
        harness.router.cancel(request_id, "slow_reader")

    response_stream.flush = flush  # type: ignore[method-assign]
    harness.run()
    assert len(response_stream.token_ids) == 1
    assert harness.count("rejected", "slow_reader") == 1
    harness.assert_idle()


def test_stop_string_aborts_at_the_engine_and_cuts_the_usage():
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 50)
    response_stream.stop_at = 3
    harness.run()
    assert response_stream.finish is not None
    assert response_stream.finish.reason == sampling_pb2.FINISH_REASON_STOP
    assert response_stream.finish.usage.output_tokens == 3
    assert any(message.aborts for message in harness.cores["d0"].commands)
    harness.assert_idle()


def test_output_tokens_of_the_metrics_are_those_up_to_the_stop():
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 50)
    for _ in range(4):
        harness.step_all()
    response_stream.stop_at = len(response_stream.token_ids)
    harness.run()
    assert len(response_stream.token_ids) == response_stream.stop_at + 1
    assert (harness.count("tokens", "prompt"), harness.count("tokens", "output")) == (20, response_stream.stop_at)
    shown = f'sluice_tokens_total{{kind="output"}} {response_stream.stop_at}.0\n'
    assert shown in harness.router.format_metrics().decode()
    harness.assert_idle()


def test_stop_string_in_the_last_token_ends_once():
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 3)
    response_stream.stop_at = 3
    harness.run()
    assert response_stream.finish is not None
    assert response_stream.finish.reason == sampling_pb2.FINISH_REASON_STOP
    harness.assert_idle()


def test_slot_is_not_reused_in_the_message_that_ends_it():
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 50)
    response_stream.stop_at = 1
    harness.deliver()
    harness.step("d0")
    # The stop string's abort, and a new request, leave with one message.
    harness.clock.advance(0.01)
    harness.deliver_up("d0")
    _, other = harness.admit(20, 2, first=9)
    harness.run()
    assert other.token_ids == expected_output(other.prompt, 2)
    harness.assert_idle()


def test_stop_token_is_reported():
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 9)
    harness.deliver()
    message = token_message(0, response_stream.prompt, 0)
    message.finished.add(
        slot=0, reason=sampling_pb2.FINISH_REASON_STOP, stop_token_id=0, num_output_tokens=1, num_cached_tokens=16
    )
    say(harness, "d0", message)
    assert response_stream.finish is not None
    assert response_stream.finish.stop_token_id == 0
    assert response_stream.finish.usage.cached_tokens == 16
    assert response_stream.finish.usage.tpot_s is None


def test_logprobs_come_with_their_tokens():
    harness = Harness(ONE)
    _, plain = harness.admit(20, 3, first=1)
    sampling = sampling_pb2.SamplingParams(max_tokens=3, temperature=0, num_logprobs=0)
    _, wanting = harness.admit(first=2, sampling=sampling)
    harness.run()
    assert [entry.logprob for entry in wanting.logprobs] == [0, -1, -2]
    assert plain.logprobs == []


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (sampling_pb2.FINISH_REASON_ERROR, EngineFaultError),
        (sampling_pb2.FINISH_REASON_REFUSED, InvalidRequestError),
    ],
    ids=["the engine's fault", "the request's fault"],
)
def test_error_of_an_engine_reaches_the_client(reason, error):
    harness = Harness(ONE)
    _, response_stream = harness.admit(20, 9)
    assert harness.state.engines.table[EngineId("d0")].queued_prefill_tokens == 20
    message = engine_pb2.AttachResponse()
    message.finished.add(slot=0, reason=reason, error="grammar: bad")
    say(harness, "d0", message)
    assert isinstance(response_stream.error, error)
    assert "grammar: bad" in response_stream.error.message
    # Nor does its prompt count as work of that engine any longer.
    assert harness.state.engines.table[EngineId("d0")].queued_prefill_tokens == 0


def test_returned_prompt_is_placed_elsewhere():
    harness = Harness(TWO)
    request_id, response_stream = harness.admit(20, 5)
    first = harness.engine_of(request_id)
    harness.deliver()
    harness.up[first].append(harness.cores[first].return_unstarted())
    harness.clock.advance(0.01)
    harness.deliver()
    assert harness.engine_of(request_id) != first
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 5)
    harness.assert_idle()


def test_itl_and_ttft_are_observed_per_token():
    harness = Harness(ONE)
    request_id, _ = harness.admit(20, 5)
    harness.run()
    metrics = harness.state.metrics
    (first,) = [event for event in harness.router.explain(request_id)["events"] if event["event"] == "first_token"]
    assert sum(metrics.ttft_s[""].counts) == 1
    assert sum(metrics.itl_s[""].counts) == 4
    assert metrics.itl_s[""].total == pytest.approx(0.04)
    assert sum(metrics.ttft_prediction_error_s[""].counts) == 1
    assert metrics.ttft_prediction_error_s[""].total == pytest.approx(first["predicted_ttft_s"] - 0.01)
