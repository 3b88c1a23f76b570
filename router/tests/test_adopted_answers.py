"""Answers that changed hands, in detail: what is known of them, when they end, and what becomes of what their former
owners have.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from data_plane_harness import CheckingResponseStream, Harness, make_request
from fake_engine import expected_output, make_plan
from test_adoption import ABORTED, ERROR, KEY, LENGTH, PD, STOP, adopt, begin, claim, die, make_found, with_logprobs
from test_kept_prefills import make_harness as make_disaggregated_harness

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_core.records import EngineId
from sluice_router.errors import DeadlineError, NoEngineError, ShuttingDownError, UnknownStreamError
from sluice_router.scheduling.entities import MigrationPhase

if TYPE_CHECKING:
    from sluice_router.scheduling.requests import FoundRequest

HANDED_OFF = sampling_pb2.FINISH_REASON_HANDED_OFF


def list_events(harness: Harness, request_id: str, kind: str) -> list[dict[str, object]]:
    """Lists what is told of a request, without times."""
    story = harness.router.explain(request_id)
    assert story is not None
    events = [event for event in story["events"] if event["event"] == kind]
    return [{name: value for name, value in event.items() if name not in {"at_s", "event"}} for event in events]


def adopt_with(harness: Harness, found: FoundRequest, **fields: object) -> CheckingResponseStream:
    """Adopts for a caller of whom more is known."""
    new = make_request(20, 8, now=harness.clock.now_s, resume_key=KEY, **fields)
    new = replace(new, request_id=found.submit.request_id, sampling=found.submit.sampling)
    stream = CheckingResponseStream(list(new.prompt_token_ids), list(found.output_token_ids))
    harness.router.adopt(found, new, stream, None)
    harness.response_streams[new.request_id] = stream
    return stream


@pytest.mark.parametrize("is_here", [True, False], ids=["it was here", "it was another router's"])
def test_the_deadline_of_the_caller_that_comes_back_counts(is_here):
    harness = begin(2) if is_here else Harness({})
    if is_here:
        [found] = claim(harness)
    else:
        harness.router.apply_plan(make_plan(PD))
        found = make_found(num_output=3, reason=ABORTED)
    stream = adopt_with(harness, found, deadline_s=harness.clock.now_s + 0.5)
    harness.clock.advance(0.4)
    harness.router.tick()
    assert not stream.is_over
    harness.clock.advance(0.2)
    harness.router.tick()
    assert isinstance(stream.error, DeadlineError)


def test_an_adopted_answer_can_be_taken_over_again():
    second = die(begin(3))
    results = claim(second)
    second.deliver()
    adopt(second, results[0])
    [found] = claim(second)
    assert found.live is second.state.requests.live[found.submit.request_id]
    third = die(second)
    results = claim(third)
    third.deliver()
    stream = adopt(third, results[0])
    third.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)


@pytest.mark.parametrize(
    ("reason", "fields", "num_output", "how"),
    [
        (ABORTED, {}, 3, "recomputed"),
        (ABORTED, {}, 8, "ended"),
        (LENGTH, {}, 8, "ended"),
        (STOP, {}, 5, "ended"),
        (ERROR, {"error": "no more"}, 3, "failed"),
        (ERROR, {}, 3, "failed"),
    ],
)
def test_each_way_to_go_on_is_counted_and_told(reason, fields, num_output, how):
    harness = Harness(PD)
    found = make_found(num_output=num_output, reason=reason, **fields)
    stream = adopt(harness, found)
    assert harness.state.metrics.counters["adopted"] == {(how,): 1}
    assert list_events(harness, found.submit.request_id, "adopted") == [{"engine": "", "output_tokens": num_output}]
    if how == "failed":
        assert stream.error.message == fields.get("error", "the engine gave no reason")
    harness.run()
    harness.assert_idle()


def test_where_an_adopted_answer_runs_is_told():
    second = die(begin(3))
    results = claim(second)
    second.deliver()
    [found] = results
    engine, num_output = found.engine.engine_id, len(found.output_token_ids)
    adopt(second, found)
    [told] = list_events(second, found.submit.request_id, "adopted")
    assert told == {"engine": engine, "output_tokens": num_output}
    second.run()
    assert second.response_streams[found.submit.request_id].finish.usage.cached_tokens == 0


@pytest.mark.parametrize("stop_token_id", [None, 7])
def test_the_stop_token_of_an_answer_that_ended_meanwhile_is_passed_on(stop_token_id):
    fields = {} if stop_token_id is None else {"stop_token_id": stop_token_id}
    stream = adopt(Harness(PD), make_found(num_output=5, reason=STOP, **fields))
    assert (stream.finish.reason, stream.finish.stop_token_id) == (STOP, stop_token_id)


def test_an_answer_of_full_length_that_its_engine_still_has_ends_here_and_there():
    harness = Harness(PD)
    found = replace(make_found(num_output=8, reason=None), engine=harness.engines["d0"])
    stream = adopt(harness, found)
    assert (stream.finish.reason, stream.finish.usage.output_tokens) == (LENGTH, 8)
    assert harness.state.metrics.counters["adopted"] == {("ended",): 1}
    harness.deliver()
    assert harness.cores["d0"].aborted_held == [found.submit.request_id]
    harness.assert_idle()


@pytest.mark.parametrize(("num_tokens_before", "has_token"), [(0, False), (1, True), (2, True)])
def test_where_an_answer_decodes_is_open_only_after_its_prefill(num_tokens_before, has_token):
    harness = Harness(PD)
    found = replace(
        make_found(num_output=3, reason=None), engine=harness.engines["p0"], num_tokens_before=num_tokens_before
    )
    adopt(harness, found)
    submission = harness.state.requests.live[found.submit.request_id].submission
    assert submission.has_token is has_token


def test_the_length_since_the_last_backflow_goes_on():
    """Three tokens came with the submit, of which two since the reset; of the six now, five have come since then."""
    harness = Harness(PD)
    found = replace(make_found(num_output=6, reason=ABORTED), num_tokens_before=3)
    found.submit.output_tokens_since_reset = 2
    adopt(harness, found)
    harness.deliver()
    [submitted] = [submit for core in harness.cores.values() for submit in core.submitted]
    assert submitted.output_tokens_since_reset == 5


@pytest.mark.parametrize("num_output", [0, 3])
def test_the_stall_of_an_adopted_answer_lasts_to_its_next_token(num_output):
    """Its client waits since the adoption; who has no token yet has no stall."""
    harness = Harness(PD)
    found = make_found(num_output=num_output, reason=ABORTED)
    if not num_output:
        found.submit.ClearField("since_first_token_s")
    adopt(harness, found)
    harness.run()
    stalls = [event["stall_s"] for event in list_events(harness, found.submit.request_id, "recovered")]
    assert stalls == ([pytest.approx(0.01)] if num_output else [])


@pytest.mark.parametrize(("minute", "reserved"), [(0, 5), (3, 3)], ids=["no limit", "less than is left"])
def test_an_owner_has_reserved_what_may_still_be_made(minute, reserved):
    harness = Harness(PD)
    limits = [{"owner": "*", "concurrent_requests": 1, "tokens_per_minute": minute, "weight": 1}]
    harness.router.apply_plan(make_plan(PD, generation=2, owner_limits=limits))
    found = make_found(num_output=3, reason=ABORTED)
    adopt_with(harness, found, owner="team")
    assert harness.state.requests.live[found.submit.request_id].reservation.tokens == reserved


# Logprobs asked for, tokens that came between claim and adoption, tokens made once more
BEHIND = [(True, 0, False), (True, 1, True), (False, 0, False), (False, 1, False)]


@pytest.mark.parametrize(("asks", "num_behind", "is_rewound"), BEHIND)
def test_only_tokens_whose_logprobs_are_lost_are_made_once_more(asks, num_behind, is_rewound):
    """Others are passed on at once, in one write."""
    harness = Harness({"d0": "D"})
    sampling = with_logprobs() if asks else sampling_pb2.SamplingParams(max_tokens=8, temperature=0.0)
    request_id, _ = harness.admit(resume_key=KEY, sampling=sampling)
    for _ in range(3):
        harness.step_all()
    [found] = claim(harness)
    for _ in range(num_behind):
        harness.step_all()
    stream = adopt(harness, found)
    assert harness.count("recoveries", "router_lost") == is_rewound
    assert [event["reason"] for event in list_events(harness, request_id, "lost")] == ["rewound"] * is_rewound
    assert len(stream.token_ids) == 3 + num_behind * (not is_rewound)
    assert stream.num_flushes == 1
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert len(stream.logprobs) == 5 * asks
    harness.assert_idle()


@pytest.mark.parametrize("is_asked", [False, True], ids=["kept", "kept, and room is asked for"])
def test_a_finished_prefill_whose_logprobs_are_lost_is_computed_again(is_asked):
    harness = make_disaggregated_harness(PD)
    harness.cores["d0"].refuse_grants = "kv"
    request_id, _ = harness.admit(resume_key=KEY, sampling=with_logprobs())
    [found] = claim(harness)
    assert len(found.output_token_ids) == 0
    for _ in range(3):
        harness.step_all()
    assert request_id in harness.state.requests.kept
    harness.cores["d0"].refuse_grants = ""
    if is_asked:
        while harness.state.requests.live[request_id].migration is None:
            harness.clock.advance(0.01)
            harness.router.tick()
    stream = adopt(harness, found)
    assert not harness.state.requests.kept
    assert harness.count("moves", "prefill_done", "rewound") == is_asked
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert len(stream.logprobs) == 8
    harness.assert_idle()


def test_a_move_of_an_answer_that_is_rewound_ends():
    harness = Harness({"d0": "D", "d1": "D"})
    request_id, _ = harness.admit(resume_key=KEY, sampling=with_logprobs())
    harness.step_all()
    [found] = claim(harness)
    harness.step_all()
    source = harness.engine_of(request_id)
    assert harness.router.move(request_id, EngineId("d1" if source == "d0" else "d0")) == ""
    stream = adopt(harness, found)
    assert harness.count("moves", "manual", "rewound") == 1
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    harness.assert_idle()


def adopt_running(num_tokens: int = 3) -> tuple[Harness, str, CheckingResponseStream]:
    """An answer that another router began runs here."""
    second = die(begin(num_tokens))
    results = claim(second)
    second.deliver()
    stream = adopt(second, results[0])
    second.step_all()
    return second, results[0].submit.request_id, stream


def test_a_hand_off_that_the_dead_router_had_asked_for_ends_the_wait_for_a_grant():
    harness, request_id, stream = adopt_running()
    request = harness.state.requests.live[request_id]
    source = str(request.submission.engine.engine_id)
    (target,) = PD.keys() - {source}
    assert harness.router.move(request_id, EngineId(target)) == ""
    harness.cores[source].running[request.submission.slot].is_handing_off = True
    harness.step(source)
    harness.deliver_up(source)
    assert harness.count("moves", "manual", "handed_off") == 1
    assert [event["reason"] for event in list_events(harness, request_id, "lost")] == ["router_lost"]
    assert harness.count("recoveries", "router_lost") == 1
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    harness.assert_idle()


def test_a_hand_off_of_ones_own_is_none_of_the_dead_routers():
    harness, request_id, stream = adopt_running()
    request = harness.state.requests.live[request_id]
    source = str(request.submission.engine.engine_id)
    (target,) = PD.keys() - {source}
    assert harness.router.move(request_id, EngineId(target)) == ""
    harness.deliver()
    assert request.migration.phase is MigrationPhase.HANDING_OFF
    harness.run()
    assert harness.count("moves", "manual", "done") == 1
    assert harness.count("recoveries", "router_lost") == 0
    assert stream.token_ids == expected_output(stream.prompt, 8)
    harness.assert_idle()


def test_a_leaving_router_looks_for_nothing():
    harness = Harness(PD)
    harness.router.stop_accepting()
    with pytest.raises(ShuttingDownError):
        claim(harness)
    assert not harness.state.requests.claims


def test_engines_have_as_long_to_answer_as_the_limit_says():
    harness = Harness(PD)
    for core in harness.cores.values():
        core.ignores_claims = True
    results = claim(harness)
    harness.clock.advance(0.75)
    harness.router.tick()
    assert results == []
    harness.clock.advance(0.25)
    harness.router.tick()
    assert isinstance(results[0], NoEngineError)


def answer_claim(harness: Harness, name: str, *, fence: int = 3, tokens: list[int] | None = None, **fields) -> None:
    """An engine answers."""
    submit = engine_pb2.Submit(request_id="req-1", fence=fence, output_token_ids=tokens or [5, 6], resume_key=KEY)
    answer = engine_pb2.ClaimAnswer(resume_key=KEY, submit=submit, **fields)
    harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(claim_answers=[answer]))


@pytest.mark.parametrize("order", [("p0", "d0"), ("d0", "p0")])
def test_of_one_fence_the_engine_that_runs_the_answer_has_it(order):
    harness = Harness(PD)
    results = claim(harness)
    for name in order:
        answer_claim(harness, name, **({"ended": engine_pb2.Finished(reason=HANDED_OFF)} if name == "p0" else {}))
    [found] = results
    assert (found.engine, found.ended) == (harness.engines["d0"], None)
    for core in harness.cores.values():
        core.ignores_claims = True
    harness.deliver()
    # What has ended need not be aborted.
    assert not harness.cores["p0"].aborted_held
    assert not harness.cores["d0"].aborted_held


# Tokens of the former part, tokens of the last one, where logprobs of the former one count
PARTS = [
    ([5, 6], [5, 6, 7], [0, 1]),
    ([5, 9], [5, 6, 7], [0]),
    ([9, 6], [5, 6, 7], [1]),
    ([5, 6, 7, 8], [5, 6], [0, 1]),
    ([5], [5, 6, 7], [0]),
]


@pytest.mark.parametrize(("former", "last", "expected"), PARTS)
def test_logprobs_of_a_former_part_count_for_the_tokens_that_are_in_the_answer(former, last, expected):
    harness = Harness(PD)
    results = claim(harness)
    # One more than it has tokens.
    logprobs = [engine_pb2.TokenLogprobs(logprob=-1.0) for _ in range(len(former) + 1)]
    answer_claim(harness, "p0", fence=1, tokens=former, logprobs=logprobs, ended=engine_pb2.Finished(reason=HANDED_OFF))
    answer_claim(harness, "d0", fence=2, tokens=last)
    [found] = results
    assert found.output_token_ids == array("I", last)
    assert sorted(found.logprobs) == expected


@pytest.mark.parametrize(
    ("what", "is_certain"), [("nothing", True), ("lost before", False), ("lost meanwhile", False), ("to come", False)]
)
def test_an_answer_is_unknown_only_if_every_engine_that_there_may_be_has_said_so(what, is_certain):
    harness = Harness(PD)
    addresses = frozenset(harness.state.engines.endpoints)
    if what == "to come":
        harness.router.set_addresses(addresses | {"127.0.0.1:99"})
    if what == "lost before":
        harness.kill("d0")
    results = claim(harness)
    if what == "lost meanwhile":
        lost = harness.engines["d0"].address
        harness.kill("d0")
        harness.router.set_addresses(addresses - {lost})
        assert lost not in harness.state.engines.endpoints
    harness.deliver()
    assert isinstance(results[0], UnknownStreamError if is_certain else NoEngineError)
