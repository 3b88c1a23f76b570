"""Engines fail, requests go on: from prompt and emitted tokens, with the same sampling state, or with a plain word."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from failover_harness import TWO, tick_with
from fake_engine import expected_output, make_plan

from sluice.v1 import control_pb2, engine_pb2, sampling_pb2
from sluice_router.errors import EngineFaultError, NoEngineError
from sluice_router.settings import make_limits

THREE = {"d0": "D", "d1": "D", "d2": "D"}


def test_request_goes_on_elsewhere_from_prompt_and_emitted_tokens():
    harness = Harness(TWO)
    sampling = sampling_pb2.SamplingParams(max_tokens=20, temperature=0.9)
    request_id, response_stream = harness.admit(sampling=sampling)
    first = harness.engine_of(request_id)
    for _ in range(5):
        harness.step_all()
    before = harness.cores[first].submitted[0]
    harness.kill(first)
    second = harness.engine_of(request_id)
    harness.run()
    after = harness.cores[second].submitted[0]
    assert response_stream.token_ids == expected_output(response_stream.prompt, 20)
    assert list(after.output_token_ids) == expected_output(response_stream.prompt, 5)
    assert after.sampling == before.sampling
    assert after.sampling.HasField("seed")
    assert after.fence > before.fence
    assert after.is_recovery
    assert not after.HasField("kv")
    assert (after.age_s, after.since_first_token_s) == (pytest.approx(0.05), pytest.approx(0.04))
    placements = [event for event in harness.router.explain(request_id)["events"] if event["event"] == "placement"]
    assert [(event["prompt_tokens"], event["is_recovery"]) for event in placements] == [(20, False), (25, True)]
    assert sum(harness.state.metrics.recovery_stall_s["engine"].counts) == 1
    harness.assert_idle()


def test_request_without_tokens_is_plainly_retried():
    harness = Harness(TWO)
    request_id, response_stream = harness.admit()
    harness.deliver()
    first = harness.engine_of(request_id)
    harness.kill(first)
    harness.run()
    (name,) = harness.cores
    assert not harness.cores[name].submitted[0].is_recovery
    assert response_stream.finish is not None
    harness.assert_idle()


def test_restarted_engine_is_not_taken_for_its_predecessor():
    harness = Harness(TWO)
    request_id, response_stream = harness.admit(20, 30)
    name = harness.engine_of(request_id)
    for _ in range(3):
        harness.step_all()
    harness.attach(name, epoch=2)
    assert harness.closed == [(name, "epoch")]
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    assert harness.count("recoveries", "epoch") == 1
    harness.assert_idle()


def test_engine_whose_stream_is_replaced_goes_on_with_its_requests():
    """It has connected anew before the end of its last stream was noticed."""
    harness = Harness({"d0": "D"})
    _, response_stream = harness.admit(20, 30)
    for _ in range(3):
        harness.step_all()
    harness.replace_stream("d0")
    assert harness.closed == [("d0", "stream")]
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    assert harness.count("resumed") == 1
    assert len(harness.cores["d0"].submitted) == 1
    harness.assert_idle()


def test_stall_lasts_from_the_first_loss_to_the_next_token():
    harness = Harness({"d0": "D"})
    harness.admit(20, 30)
    harness.step_all()
    for epoch in (2, 3):
        harness.kill("d0")
        harness.clock.advance(3)
        harness.attach("d0", epoch=epoch)
        harness.deliver()
        harness.clock.advance(0.01)
        harness.router.tick()
        assert not harness.state.requests.waiting
    harness.run()
    stalls = harness.state.metrics.recovery_stall_s["engine"]
    assert (sum(stalls.counts), stalls.total) == (1, pytest.approx(6.03))


def test_requests_kept_from_an_earlier_stream_that_are_unknown_are_aborted():
    harness = Harness(TWO)
    held = [engine_pb2.HeldRequest(request_id="req-old", fence=1, num_output_tokens=3)]
    core = harness.attach("d2", held=held)
    harness.deliver()
    assert core.aborted_held == ["req-old"]


@pytest.mark.parametrize("steps_meanwhile", [0, 1, 5, 40], ids=["none", "one", "some", "to its end"])
def test_request_goes_on_where_it_was_when_only_the_stream_broke(steps_meanwhile):
    """What was on the way and what came meanwhile is sent again, from the token that the router names."""
    harness = Harness(TWO, limits=make_limits(resume_grace_s=10))
    request_id, response_stream = harness.admit(20, 30)
    name = harness.engine_of(request_id)
    for _ in range(4):
        harness.step_all()
    harness.step(name)
    harness.cut(name)
    for _ in range(steps_meanwhile):
        harness.step_all()
        assert harness.state.requests.live[request_id].submission is None
    harness.reconnect(name)
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    assert response_stream.finish is not None
    assert response_stream.finish.usage.num_recoveries == 0
    (core,) = [core for core in harness.cores.values() if core.submitted]
    assert core.engine_id == name
    assert len(core.submitted) == 1
    assert [resume.next_output_index for resume in core.resumed] == [4]
    assert harness.count("resumed") == 1
    stalls = harness.state.metrics.recovery_stall_s
    assert {reason: (sum(stall.counts), stall.total) for reason, stall in stalls.items()} == {
        "link": (1, pytest.approx(0.01 * steps_meanwhile))
    }
    harness.assert_idle()


@pytest.mark.parametrize(
    ("fence", "num_output_tokens", "epoch", "is_resumed"),
    [(1, 3, 1, True), (0, 3, 1, False), (2, 3, 1, False), (1, 2, 1, False), (1, 3, 2, False)],
    ids=["what it had", "of an earlier owner", "of a later owner", "fewer tokens than came", "of another start"],
)
def test_only_the_very_submission_that_was_cut_off_is_resumed(fence, num_output_tokens, epoch, is_resumed):
    harness = Harness({"d0": "D"}, limits=make_limits(resume_grace_s=10))
    request_id, response_stream = harness.admit(20, 8)
    for _ in range(3):
        harness.step_all()
    harness.cut("d0")
    held = engine_pb2.HeldRequest(request_id=request_id, fence=fence, num_output_tokens=num_output_tokens)
    core = harness.attach("d0", epoch=epoch, held=[held])
    (first,) = [message for message in harness.down["d0"] if message.resumes or message.aborts]
    assert [resume.request_id for resume in first.resumes] == [request_id] * is_resumed
    assert [abort.held_request_id for abort in first.aborts] == [request_id] * (not is_resumed)
    assert harness.count("recoveries", "stream") == (not is_resumed)
    core.held.clear()
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 8)
    harness.assert_idle()


def test_logprobs_come_along_when_a_request_is_resumed():
    harness = Harness({"d0": "D"})
    sampling = sampling_pb2.SamplingParams(max_tokens=10, num_logprobs=1)
    _, response_stream = harness.admit(sampling=sampling)
    harness.step_all()
    harness.cut("d0")
    harness.step_all()
    harness.reconnect("d0")
    harness.run()
    assert [entry.logprob for entry in response_stream.logprobs] == [-float(index) for index in range(10)]


def test_request_that_never_reached_the_engine_is_placed_at_once_when_its_stream_comes_back():
    harness = Harness({"d0": "D"})
    _, response_stream = harness.admit()
    harness.cut("d0")
    harness.reconnect("d0")
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 8)
    assert harness.count("resumed") == 0
    assert harness.count("recoveries", "stream") == 1


def test_request_waits_for_its_engine_only_so_long():
    harness = Harness(TWO, limits=make_limits(resume_grace_s=0.3))
    request_id, response_stream = harness.admit(20, 60)
    name = harness.engine_of(request_id)
    other = next(item for item in TWO if item != name)
    harness.step_all()
    harness.cut(name)
    harness.clock.advance(0.29)
    harness.router.tick()
    assert request_id in harness.state.requests.waiting
    harness.clock.advance(0.02)
    harness.router.tick()
    assert harness.engine_of(request_id) == other
    harness.reconnect(name)
    harness.run()
    assert harness.cores[name].aborted_held == [request_id]
    assert response_stream.token_ids == expected_output(response_stream.prompt, 60)
    assert harness.count("recoveries", "stream") == 1
    harness.assert_idle()


def test_engine_that_cannot_be_reached_is_not_waited_for():
    harness = Harness(TWO)
    request_id, _ = harness.admit(20, 60)
    name = harness.engine_of(request_id)
    harness.step_all()
    address = harness.engines[name].address
    harness.cut(name)
    assert request_id in harness.state.requests.waiting
    harness.router.note_fault(address, "unavailable: refused")
    assert harness.engine_of(request_id) != name


def test_router_that_was_cut_off_from_all_engines_takes_up_what_they_kept():
    """Silence has cost the time that a broken stream would be given; but nobody else has taken the request."""
    harness = Harness({"d0": "D"}, limits=make_limits(silence_limit_s=2, iteration_age_floor_s=50))
    request_id, response_stream = harness.admit(20, 30)
    for _ in range(3):
        harness.step_all()
    for _ in range(21):
        tick_with(harness)
    assert harness.closed == [("d0", "silence")]
    harness.cores["d0"].hold()
    harness.cores["d0"].step()
    harness.clock.advance(5)
    harness.router.tick()
    assert request_id in harness.state.requests.waiting
    harness.reconnect("d0")
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    assert len(harness.cores["d0"].submitted) == 1
    harness.assert_idle()


@pytest.mark.parametrize("phase", ["asked", "handing off", "pulling"])
def test_request_in_the_midst_of_a_move_is_resumed_only_if_its_kv_is_untouched(phase):
    harness = Harness(TWO)
    request_id, response_stream = harness.admit(20, 30)
    source = harness.engine_of(request_id)
    target = next(name for name in TWO if name != source)
    harness.step_all()
    assert harness.router.move(request_id, target) == ""
    if phase != "asked":
        harness.deliver()
    victim = source
    if phase == "pulling":
        harness.step(source)
        harness.deliver_up(source)
        harness.deliver_down(target)
        victim = target
    harness.cut(victim)
    harness.reconnect(victim)
    harness.run()
    assert harness.count("resumed") == (phase == "asked")
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    harness.assert_idle()


def test_client_that_leaves_while_its_engine_is_away_is_aborted_there():
    harness = Harness({"d0": "D"})
    request_id, response_stream = harness.admit(20, 30)
    harness.step_all()
    harness.cut("d0")
    response_stream.is_cancelled = True
    harness.router.cancel(request_id)
    harness.reconnect("d0")
    harness.deliver()
    assert harness.cores["d0"].aborted_held == [request_id]
    harness.assert_idle()


def test_request_that_ran_on_two_dead_engines_is_given_up():
    harness = Harness(THREE)
    request_id, response_stream = harness.admit(20, 50)
    for _ in range(2):
        for _ in range(3):
            harness.step_all()
        harness.kill(harness.engine_of(request_id))
    assert isinstance(response_stream.error, EngineFaultError)
    assert "limit is 2" in response_stream.error.message
    assert response_stream.error.code == "engine_fault"
    (survivor,) = harness.engines
    assert survivor
    harness.assert_idle()


def test_engine_that_a_request_died_on_is_avoided_while_there_are_others():
    """Even when it has restarted and is the less busy one: the request may be what killed it."""
    harness = Harness(TWO)
    request_id, response_stream = harness.admit(20, 30)
    died_on = harness.engine_of(request_id)
    (other,) = TWO.keys() - {died_on}
    load = harness.cores[other].load()
    load.queued_prefill_tokens = 2_000
    harness.router.handle_message(harness.engines[other], engine_pb2.AttachResponse(load=load))
    harness.deliver()
    harness.attach(died_on, epoch=2)
    harness.deliver()
    fresh, _ = harness.admit(20, 2)
    harness.clock.advance(0.01)
    harness.router.tick()
    assert (harness.engine_of(request_id), harness.engine_of(fresh)) == (other, died_on)
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    harness.assert_idle()


def test_engine_that_a_request_died_on_is_used_if_the_others_only_drain():
    harness = Harness(TWO)
    request_id, response_stream = harness.admit(20, 30)
    died_on = harness.engine_of(request_id)
    (other,) = TWO.keys() - {died_on}
    harness.router.apply_plan(make_plan({died_on: "D", other: "D-drain"}, generation=2))
    harness.deliver()
    harness.attach(died_on, epoch=2)
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    assert not harness.cores[other].submitted
    harness.assert_idle()


def test_request_that_an_engine_gives_up_goes_on_elsewhere():
    harness = Harness(TWO)
    request_id, response_stream = harness.admit(20, 30)
    harness.step_all()
    name = harness.engine_of(request_id)
    core = harness.cores[name]
    ((slot, request),) = core.running.items()
    del core.running[slot]
    message = engine_pb2.AttachResponse(load=core.load())
    message.finished.add(slot=slot, reason=sampling_pb2.FINISH_REASON_ABORTED, num_output_tokens=request.num_output)
    harness.router.handle_message(harness.engines[name], message)
    assert harness.count("recoveries", "aborted") == 1
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    harness.assert_idle()


def test_attempts_are_limited():
    harness = Harness(TWO, limits=make_limits(max_deaths=9, max_recoveries=3))
    request_id, response_stream = harness.admit(20, 50)
    for epoch in range(2, 5):
        harness.step_all()
        name = harness.engine_of(request_id)
        harness.kill(name)
        harness.attach(name, epoch=epoch)
    assert response_stream.error is None
    harness.deliver()
    harness.step_all()
    harness.kill(harness.engine_of(request_id))
    assert isinstance(response_stream.error, EngineFaultError)
    harness.assert_idle()


def test_queued_requests_do_not_count_the_death_of_an_engine_that_never_had_them():
    harness = Harness(THREE)
    request_id, response_stream = harness.admit(20, 5)
    for _ in range(2):  # the submit never reaches the engine
        harness.kill(harness.engine_of(request_id))
    harness.run()
    assert response_stream.finish is not None
    harness.assert_idle()


def test_after_the_last_engine_a_stream_waits_longer_than_a_new_request_and_then_fails():
    """The wait begins with the engine's death, however long the request has run by then."""
    harness = Harness({"d0": "D"}, limits=make_limits(wait_limit_s=5, stream_wait_limit_s=60))
    _, response_stream = harness.admit(20, 50)
    for _ in range(3):
        harness.clock.advance(10)
        harness.step("d0")
        harness.deliver()
    harness.kill("d0")
    _, new = harness.admit(20, 50)
    harness.clock.advance(5)
    harness.router.tick()
    assert "within 5 s (no_engine)" in str(new.error)
    harness.clock.advance(54.9)
    harness.router.tick()
    assert response_stream.error is None
    harness.clock.advance(0.2)
    harness.router.tick()
    assert isinstance(response_stream.error, NoEngineError)
    assert response_stream.error.retry_after_s == pytest.approx(60.1)
    assert "within 60 s (no_engine)" in str(response_stream.error)
    assert harness.count("requests", "", "rejected") == 2
    harness.assert_idle()


@pytest.mark.parametrize("away_s", [0, 590])
def test_only_engine_serves_again_after_its_restart(away_s: int):
    """A large model takes minutes to load."""
    harness = Harness({"d0": "D"})
    _, response_stream = harness.admit(20, 20)
    for _ in range(3):
        harness.step_all()
    harness.kill("d0")
    harness.clock.advance(away_s)
    harness.router.tick()
    harness.attach("d0", epoch=2)
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 20)
    harness.assert_idle()


def test_last_token_without_its_end_is_not_computed_again():
    harness = Harness(TWO)
    request_id, response_stream = harness.admit(20, 3)
    name = harness.engine_of(request_id)
    harness.deliver()
    message = harness.cores[name].step()
    message.MergeFrom(harness.cores[name].step())
    message.MergeFrom(harness.cores[name].step())
    del message.finished[:]
    harness.router.handle_message(harness.engines[name], message)
    harness.kill(name)
    assert response_stream.finish is not None
    assert response_stream.finish.reason == sampling_pb2.FINISH_REASON_LENGTH
    harness.assert_idle()


def test_lost_engine_is_reported():
    harness = Harness(TWO)
    version = harness.state.status.version
    harness.kill("d0")
    status = harness.router.describe()
    assert status.version > version
    states = {engine.engine_id: engine.state for engine in status.engines}
    assert states == {"d0": control_pb2.ENGINE_STATE_LOST, "d1": control_pb2.ENGINE_STATE_READY}
