"""Answers that another router began: found at the engines by their key, and gone on with at the next token."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from data_plane_harness import CheckingResponseStream, Harness, make_request
from fake_engine import RESUME_S, FakeCore, expected_output, make_plan

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_router.api.resumption.claimed_answers import prepare_found
from sluice_router.errors import NoEngineError, QueueFullError, ShuttingDownError, TakenOverError, UnknownStreamError
from sluice_router.scheduling.requests import FoundRequest, rewind
from sluice_router.scheduling.resumption import claims, detachment

PD = {"p0": "P", "d0": "D"}
KEY = b"the key"
STATE = b"what the API left"
STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH
ABORTED, ERROR = sampling_pb2.FINISH_REASON_ABORTED, sampling_pb2.FINISH_REASON_ERROR


def claim(harness: Harness, key: bytes = KEY):
    """Asks; returns the list into which the result comes."""
    results: list[object] = []
    harness.router.claim(key, results.append)
    return results


def adopt(harness: Harness, found: FoundRequest, stop_at: int | None = None) -> CheckingResponseStream:
    """Goes on as the API does: tokens of before first, then the rest of them as they come."""
    submit = found.submit
    new = make_request(1, now=harness.clock.now_s - submit.age_s - found.elapsed_s, resume_key=KEY, resume_state=STATE)
    new = replace(
        new,
        request_id=submit.request_id,
        prompt_token_ids=array("I", submit.prompt_token_ids),
        sampling=submit.sampling,
    )
    stream = CheckingResponseStream(list(submit.prompt_token_ids), list(found.output_token_ids))
    harness.router.adopt(found, new, stream, stop_at)
    harness.response_streams[new.request_id] = stream
    return stream


def join(second: Harness, core: FakeCore) -> None:
    """An engine whose router is gone comes to another one, which hears of what it holds by claims alone."""
    core.hold()
    second.cores[core.engine_id] = core
    kept, core.kept = core.kept, {}
    second._attach(core)
    core.kept = kept


def answer_claims(harness: Harness, answers: dict[str, FoundRequest], first: str) -> None:
    """Has engines answer the claim under way, one of them first."""
    for core in harness.cores.values():
        core.ignores_claims = True
    harness.deliver()
    for name in [first, *(answers.keys() - {first})]:
        found = answers[name]
        answer = engine_pb2.ClaimAnswer(resume_key=KEY, submit=found.submit, ended=found.ended)
        harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(claim_answers=[answer]))
    harness.deliver()


def die(first: Harness) -> Harness:
    """The router dies, its engines go on; returns another router that has them all."""
    second = Harness()
    for core in first.cores.values():
        join(second, core)
    second.router.apply_plan(make_plan(PD))
    second.deliver()
    return second


def begin(num_tokens: int) -> Harness:
    first = Harness(PD)
    first.admit(max_tokens=8, resume_key=KEY, resume_state=STATE)
    for _ in range(num_tokens + 1):
        if sum(len(stream.token_ids) for stream in first.response_streams.values()) >= num_tokens:
            break
        first.step_all()
    return first


@pytest.mark.parametrize("num_tokens", [2, 3, 6])
def test_a_running_request_goes_on_at_its_next_token(num_tokens):
    second = die(begin(num_tokens))
    results = claim(second)
    second.deliver()
    [found] = results
    assert isinstance(found, FoundRequest)
    assert (found.submit.resume_state, found.ended) == (STATE, None)
    assert len(found.output_token_ids) >= num_tokens
    stream = adopt(second, found)
    second.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert (stream.finish.reason, stream.finish.usage.output_tokens) == (LENGTH, 8)
    assert second.count("adopted", "running") == 1
    assert second.count("recoveries", "router_lost") == 0
    second.assert_idle()


def test_a_request_survives_a_router_that_dies_between_grant_and_hand_off():
    first = begin(1)
    assert any(request.is_handing_off for core in first.cores.values() for request in core.running.values())
    second = die(first)
    results = claim(second)
    second.deliver()
    stream = adopt(second, results[0])
    second.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert second.count("adopted", "recomputed") == 1
    second.assert_idle()


def test_a_request_that_ended_meanwhile_ends_for_its_client():
    first = begin(2)
    first.run()
    second = die(first)
    results = claim(second)
    second.deliver()
    [found] = results
    assert found.engine is None
    assert found.ended.reason == LENGTH
    stream = adopt(second, found)
    assert (stream.finish.reason, stream.finish.usage.output_tokens, len(stream.token_ids)) == (LENGTH, 8, 8)
    assert second.count("adopted", "ended") == 1
    second.assert_idle()


def make_found(*, num_output: int, reason: int | None, fence: int = 3, **ended) -> FoundRequest:
    request = make_request(20, 8)
    output = expected_output(request.prompt_token_ids, num_output)
    submit = engine_pb2.Submit(
        request_id=request.request_id,
        fence=fence,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=output,
        sampling=request.sampling,
        age_s=1.0,
        since_first_token_s=0.5,
        resume_key=KEY,
        resume_state=STATE,
    )
    end = None if reason is None else engine_pb2.Finished(reason=reason, num_output_tokens=num_output, **ended)
    return FoundRequest(
        submit=submit, output_token_ids=array("I", output), elapsed_s=1.0, num_tokens_before=0, ended=end
    )


@pytest.mark.parametrize(
    "reason",
    [
        ABORTED,
        sampling_pb2.FINISH_REASON_HANDED_OFF,
        sampling_pb2.FINISH_REASON_RETURNED,
        sampling_pb2.FINISH_REASON_CLAIMED,
    ],
    ids=["its client had left", "between hand-off and submit", "returned", "refused behind a claim"],
)
@pytest.mark.parametrize("num_output", [0, 3])
def test_what_no_engine_runs_is_recomputed(reason, num_output):
    harness = Harness(PD)
    stream = adopt(harness, make_found(num_output=num_output, reason=reason))
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert stream.finish.usage.num_recoveries == 1
    assert harness.count("adopted", "recomputed") == harness.count("recoveries", "router_lost") == 1
    [submitted, *_] = [submit for core in harness.cores.values() for submit in core.submitted]
    assert (submitted.fence, submitted.resume_key, submitted.resume_state) == (4, KEY, STATE)
    harness.assert_idle()


@pytest.mark.parametrize(("is_known", "ttft_s"), [(True, 0.5), (False, 1.125)])
def test_the_first_token_came_when_its_second_engine_says_or_as_evenly_as_the_others(is_known, ttft_s):
    """It arrived 2 s ago; its one engine has had it for 1 s, in which eight tokens came."""
    harness = Harness(PD)
    found = make_found(num_output=8, reason=LENGTH)
    if not is_known:
        found.submit.ClearField("since_first_token_s")
    stream = adopt(harness, found)
    assert stream.finish.reason == LENGTH
    assert stream.finish.usage.ttft_s == pytest.approx(ttft_s)
    assert stream.finish.usage.tpot_s == pytest.approx((2.0 - ttft_s) / 7)
    harness.assert_idle()


def test_an_error_of_the_engine_is_the_clients_too():
    harness = Harness(PD)
    stream = adopt(harness, make_found(num_output=3, reason=ERROR, error="no more"))
    assert (stream.error.code, stream.error.message) == ("engine_fault", "no more")
    harness.assert_idle()


def test_a_stop_string_that_was_complete_ends_the_answer():
    second = die(begin(4))
    results = claim(second)
    second.deliver()
    stream = adopt(second, results[0], stop_at=2)
    second.deliver()
    assert (stream.finish.reason, stream.finish.usage.output_tokens) == (STOP, 2)
    second.assert_idle()


def test_an_aborted_request_of_full_length_needs_no_engine():
    harness = Harness(PD)
    stream = adopt(harness, make_found(num_output=8, reason=ABORTED))
    assert stream.finish.reason == LENGTH
    harness.assert_idle()


@pytest.mark.parametrize("first", ["p0", "d0"])
def test_the_last_owner_goes_on_and_what_others_have_ends(first):
    harness = Harness(PD)
    results = claim(harness)
    fences = {"p0": 3, "d0": 4}
    answers = {name: make_found(num_output=3, reason=None, fence=fence) for name, fence in fences.items()}
    answer_claims(harness, answers, first)
    [found] = results
    assert (found.submit.fence, found.engine) == (4, harness.engines["d0"])
    assert len(harness.cores["p0"].aborted_held) == 1
    assert not harness.cores["d0"].aborted_held


@pytest.mark.parametrize("first", ["p0", "d0"])
def test_of_two_ends_with_one_fence_the_one_with_more_tokens_counts(first):
    """A submit under way was refused after a claim; who had claimed went on, and died too."""
    harness = Harness(PD)
    results = claim(harness)
    numbers = {"p0": 3, "d0": 6}
    answers = {name: make_found(num_output=number, reason=ABORTED) for name, number in numbers.items()}
    answer_claims(harness, answers, first)
    [found] = results
    assert len(found.output_token_ids) == 6


def test_nothing_found_is_certain_only_when_every_engine_has_answered():
    harness = Harness(PD)
    results = claim(harness)
    harness.deliver()
    assert isinstance(results[0], UnknownStreamError)
    harness.cores["d0"].ignores_claims = True
    late = claim(harness)
    harness.deliver()
    assert late == []
    harness.clock.advance(1.01)
    harness.router.tick()
    assert isinstance(late[0], NoEngineError)
    lost = claim(harness)
    harness.kill("d0")
    harness.deliver()
    assert isinstance(lost[0], NoEngineError)
    assert isinstance(claim(Harness())[0], NoEngineError)
    assert harness.state.requests.claims == {}


def test_an_engine_that_comes_while_others_are_asked_is_asked_too():
    """A router that has just started knew of the others only, and said for certain that nobody has the answer."""
    first = begin(3)
    [owner] = [core for core in first.cores.values() if core.running]
    second = Harness({"p1": "P"})
    results = claim(second)
    join(second, owner)
    second.deliver()
    [found] = results
    assert found.engine.engine_id == owner.engine_id
    assert found.is_certain


def test_a_late_answer_about_a_request_that_went_on_elsewhere_ends_what_the_engine_has():
    harness = Harness(PD)
    found = make_found(num_output=3, reason=ABORTED)
    stream = adopt(harness, found)
    answer = engine_pb2.ClaimAnswer(resume_key=KEY, submit=found.submit)
    harness.router.handle_message(harness.engines["p0"], engine_pb2.AttachResponse(claim_answers=[answer]))
    harness.run()
    assert harness.cores["p0"].aborted_held == [found.submit.request_id]
    assert stream.finish is not None


def test_an_engine_lost_between_claim_and_adoption_costs_a_recomputation():
    second = die(begin(3))
    results = claim(second)
    second.deliver()
    second.kill(str(results[0].engine.engine_id))
    stream = adopt(second, results[0])
    second.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert second.count("adopted", "recomputed") == 1


def test_a_client_whose_connection_broke_goes_on_at_the_same_router():
    harness = begin(3)
    [(request_id, old)] = harness.response_streams.items()
    [found] = claim(harness)
    assert found.live is harness.state.requests.live[request_id]
    harness.step_all()
    stream = adopt(harness, found)
    assert isinstance(old.error, TakenOverError)
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert harness.count("adopted", "here") == 1
    harness.assert_idle()


def test_a_request_that_ended_between_claim_and_adoption_is_asked_for_again():
    harness = begin(3)
    [found] = claim(harness)
    harness.run()
    with pytest.raises(NoEngineError):
        adopt(harness, found)


def test_a_request_that_another_router_claims_ends_here():
    harness = begin(3)
    [(request_id, old)] = harness.response_streams.items()
    engine = harness.engine_of(request_id)
    slot = harness.state.requests.live[request_id].submission.slot
    del harness.cores[engine].running[slot]
    finished = engine_pb2.Finished(slot=slot, reason=sampling_pb2.FINISH_REASON_CLAIMED)
    harness.router.handle_message(harness.engines[engine], engine_pb2.AttachResponse(finished=[finished]))
    harness.run()
    assert isinstance(old.error, TakenOverError)
    assert harness.state.statistics.num_failed == 0
    assert harness.count("recoveries", "aborted") == 0
    harness.assert_idle()


@pytest.mark.parametrize("is_asked", [False, True], ids=["nothing asked", "a grant asked"])
def test_a_hand_off_that_the_dead_router_had_asked_for_costs_a_recomputation(is_asked):
    second = die(begin(3))
    results = claim(second)
    second.deliver()
    stream = adopt(second, results[0])
    second.step_all()
    [request] = second.state.requests.live.values()
    source, slot = str(request.submission.engine.engine_id), request.submission.slot
    if is_asked and request.migration is None:
        target = next(name for name in PD if name != source)
        assert second.router.move(request.request_id, target) == ""
    if not is_asked and request.migration is not None:
        second.run(2)
    second.cores[source].running[slot].is_handing_off = True
    second.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert second.count("engine_losses", "protocol") == 0
    second.assert_idle()


def test_claims_are_bounded_and_a_second_one_of_a_key_answers_the_first(monkeypatch):
    monkeypatch.setattr(claims, "MAX_PENDING_CLAIMS", 1)
    harness = Harness(PD)
    first = claim(harness)
    with pytest.raises(QueueFullError):
        claim(harness, b"another")
    monkeypatch.setattr(claims, "MAX_PENDING_CLAIMS", 2)
    second = claim(harness)
    assert isinstance(first[0], NoEngineError)
    harness.deliver()
    assert isinstance(second[0], UnknownStreamError)


def test_a_leaving_router_adopts_nothing():
    harness = Harness(PD)
    harness.router.stop_accepting()
    with pytest.raises(ShuttingDownError):
        adopt(harness, make_found(num_output=3, reason=ABORTED))
    assert not harness.state.requests.live


def test_a_request_whose_client_left_goes_on_and_can_be_taken_over():
    harness = begin(3)
    [(request_id, old)] = harness.response_streams.items()
    harness.router.detach(request_id)
    harness.step_all()
    [found] = claim(harness)
    stream = adopt(harness, found)
    assert isinstance(old.error, TakenOverError)
    assert not harness.state.requests.detached
    harness.clock.now_s += 60
    harness.router.tick()
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)


def test_a_request_that_nobody_comes_back_to_ends_in_time():
    harness = begin(3)
    [(request_id, old)] = harness.response_streams.items()
    harness.router.detach(request_id)
    harness.clock.now_s += RESUME_S - 1
    harness.router.tick()
    assert request_id in harness.state.requests.live
    old.is_cancelled = True
    harness.clock.now_s += 1
    harness.router.tick()
    assert harness.count("rejected", "unclaimed") == 1
    harness.deliver()
    harness.assert_idle()
    harness.router.detach(request_id)
    assert not harness.state.requests.detached


def test_too_many_requests_without_clients_end_early(monkeypatch):
    monkeypatch.setattr(detachment, "MAX_DETACHED", 1)
    harness = Harness(PD)
    for number in range(2):
        harness.admit(max_tokens=8, resume_key=bytes([number]))
    for request_id in list(harness.response_streams):
        harness.router.detach(request_id)
    next(iter(harness.response_streams.values())).is_cancelled = True
    harness.router.tick()
    assert list(harness.state.requests.live) == list(harness.response_streams)[1:]


def with_logprobs() -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=1)


def test_logprobs_of_former_parts_are_gathered_by_their_tokens():
    harness = Harness(PD)
    results = claim(harness)
    tokens = [5, 6, 7, 8]
    parts = {"p0": (1, tokens[:2], 0, [-0.5, -0.6]), "d0": (2, tokens, 2, [-0.7, -0.8])}
    for name, (fence, output, num_before, logprobs) in parts.items():
        submit = engine_pb2.Submit(request_id="req-1", fence=fence, output_token_ids=output, resume_key=KEY)
        answer = engine_pb2.ClaimAnswer(resume_key=KEY, submit=submit, num_tokens_before=num_before)
        answer.logprobs.extend(engine_pb2.TokenLogprobs(logprob=value) for value in logprobs)
        if name == "p0":
            answer.ended.reason = sampling_pb2.FINISH_REASON_HANDED_OFF
        harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(claim_answers=[answer]))
    [found] = results
    assert {index: round(entry.logprob, 3) for index, entry in found.logprobs.items()} == {
        0: -0.5,
        1: -0.6,
        2: -0.7,
        3: -0.8,
    }


@pytest.mark.parametrize("is_running", [True, False])
def test_tokens_whose_logprobs_are_lost_are_made_once_more(is_running):
    second = die(begin(4))
    results = claim(second)
    second.deliver()
    found = results[0] if is_running else replace(results[0], engine=None)
    stream = adopt(second, rewind(found, 2))
    second.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert second.count("adopted", "recomputed") == 1
    if is_running:
        second.assert_idle()


def test_tokens_of_a_request_here_whose_logprobs_are_lost_are_made_once_more():
    harness = Harness(PD)
    harness.admit(resume_key=KEY, resume_state=STATE, sampling=with_logprobs())
    for _ in range(4):
        harness.step_all()
    [found] = claim(harness)
    assert len(found.output_token_ids) > 2
    stream = adopt(harness, rewind(found, 2))
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert stream.finish.usage.num_recoveries == 1
    harness.assert_idle()


def test_usage_counts_what_was_before():
    found = make_found(num_output=3, reason=LENGTH)
    found.submit.history.MergeFrom(engine_pb2.RequestHistory(num_hand_offs=2, num_recoveries=1, num_cached_tokens=16))
    found.submit.kv.num_tokens = 1
    stream = adopt(Harness(PD), found)
    usage = stream.finish.usage
    assert (usage.num_hand_offs, usage.num_recoveries, usage.cached_tokens) == (3, 1, 16)


def test_a_caller_that_comes_back_has_another_deadline():
    harness = Harness(PD)
    harness.admit(max_tokens=8, resume_key=KEY, resume_state=STATE, deadline_s=harness.clock.now_s + 5)
    harness.step_all()
    [found] = claim(harness)
    stream = adopt(harness, found)
    harness.clock.now_s += 6
    harness.router.tick()
    harness.run()
    assert stream.error is None
    assert stream.finish is not None


def test_an_owner_is_charged_for_what_is_made_here_alone():
    harness = Harness(PD)
    harness.router.apply_plan(
        make_plan(PD, generation=2, owner_limits=[{"owner": "*", "concurrent_requests": 1, "weight": 1}])
    )
    harness.deliver()
    found = make_found(num_output=3, reason=ABORTED)
    new = make_request(20, 8, resume_key=KEY, owner="team", now=harness.clock.now_s)
    new = replace(new, request_id=found.submit.request_id)
    stream = CheckingResponseStream(list(new.prompt_token_ids), list(found.output_token_ids))
    harness.router.adopt(found, new, stream, None)
    harness.response_streams[new.request_id] = stream
    assert harness.state.limiter.local["team"].running == 1
    harness.run()
    assert stream.finish is not None
    assert harness.count("key_tokens", "team", "output") == 5
    assert harness.count("key_tokens", "team", "prompt") == 0
    assert harness.state.limiter.local["team"].running == 0


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_a_part_of_the_engines_knows_may_not_be_all(is_lost):
    harness = Harness(PD)
    results = claim(harness)
    submit = engine_pb2.Submit(request_id="req-1", output_token_ids=[5], resume_key=KEY)
    answer = engine_pb2.ClaimAnswer(resume_key=KEY, submit=submit)
    answer.ended.reason = sampling_pb2.FINISH_REASON_HANDED_OFF
    harness.router.handle_message(harness.engines["p0"], engine_pb2.AttachResponse(claim_answers=[answer]))
    assert results == []
    if is_lost:
        harness.kill("d0")
    else:
        harness.deliver()
    assert results[0].is_certain is not is_lost
    with pytest.raises(NoEngineError if is_lost else UnknownStreamError):
        prepare_found(results[0], 2)


@pytest.mark.parametrize(("num_tokens", "num_left"), [(0, 0), (1, 1), (2, 4), (4, 4)])
def test_only_logprobs_that_the_client_has_not_got_must_be_known(num_tokens, num_left):
    """Those of before a hand-off are at no engine any more."""
    submit = engine_pb2.Submit(request_id="req-1", sampling=sampling_pb2.SamplingParams(num_logprobs=1))
    tokens = array("I", [5, 6, 7, 8])
    logprobs = {index: engine_pb2.TokenLogprobs() for index in (2, 3)}
    found = FoundRequest(submit=submit, output_token_ids=tokens, elapsed_s=1.0, num_tokens_before=2, logprobs=logprobs)
    prepared = prepare_found(found, num_tokens)
    assert prepared.output_token_ids == tokens[:num_left]
    assert (prepared.ended is None) == (num_left == 4)


@pytest.mark.parametrize("seed", range(40))
def test_a_request_survives_router_after_router_killed_at_any_point(seed):
    rng = random.Random(seed)
    router = Harness(PD)
    router.admit(max_tokens=12, resume_key=KEY, resume_state=STATE)
    router.step_all()
    [stream] = router.response_streams.values()
    for _ in range(rng.randrange(1, 6)):
        # Messages that are on a wire then are lost with it.
        for _ in range(rng.randrange(20)):
            rng.choice((router.step, router.deliver_down, router.deliver_up))(rng.choice(list(PD)))
        router = die(router)
        results = claim(router)
        router.deliver()
        stream = adopt(router, results[0])
        if stream.is_over:
            break
    router.run()
    assert stream.token_ids == expected_output(stream.prompt, 12)
    assert stream.finish.usage.output_tokens == 12
    router.assert_idle()
