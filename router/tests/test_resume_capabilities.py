"""What lets a client go on with its answer."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest
from edge_fakes import FakePlane

from sluice.v1 import engine_pb2, resume_pb2, sampling_pb2
from sluice_core.records import RequestId
from sluice_router.api.choices import PreparedRequest
from sluice_router.api.http.answer_progress import AnswerProgress
from sluice_router.api.http.http_resumption import OngoingAnswer, asks_for_resumable
from sluice_router.api.http.response_streams import ResumableStream
from sluice_router.api.openai_requests import FieldError
from sluice_router.api.openai_responses import CompletionFormat
from sluice_router.api.resumption.answer_states import AnswerIdentity, make_resumable, read_state, restore_request
from sluice_router.api.resumption.claimed_answers import claim_answer, prepare_found
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.errors import NoEngineError, TakenOverError, UnknownStreamError
from sluice_router.scheduling.requests import ClaimTaker, FoundRequest, NewRequest
from sluice_router.security.resume_capabilities import derive_resume_key, is_capability, make_capability
from sluice_router.text.output import Output, OutputSettings


def test_capabilities_differ_and_have_their_form():
    made = {make_capability() for _ in range(100)}
    assert len(made) == 100
    assert all(is_capability(capability) for capability in made)


@pytest.mark.parametrize("text", ["", "new", "a" * 31, "a" * 33, "a" * 31 + "/", "a" * 32 + "\n"])
def test_other_texts_are_none(text):
    assert not is_capability(text)


def test_a_key_belongs_to_one_capability_owner_and_request_and_shows_none():
    capability = "a" * 32
    keys = {derive_resume_key(capability, owner, "one") for owner in ("", "team-a", "team-b")}
    keys.add(derive_resume_key("b" * 32, "team-a", "one"))
    keys.add(derive_resume_key(capability, "team-a", "two"))
    assert len(keys) == 5
    assert derive_resume_key(capability, "team-a", "one") in keys
    assert not any(capability.encode() in key or b"team" in key for key in keys)


@pytest.mark.parametrize("excess", [0, 1])
def test_what_engines_keep_of_an_answer_has_16_kib_at_most(excess):
    request = NewRequest(
        request_id=RequestId("r"),
        prompt_token_ids=array("I", [1]),
        sampling=sampling_pb2.SamplingParams(max_tokens=1),
        arrival_s=0.0,
    )

    def make(length: int) -> bytes:
        prepared = PreparedRequest(request=request, output=OutputSettings(stops=("x" * length,)))
        identity = AnswerIdentity(form=resume_pb2.ANSWER_FORM_GRPC)
        return make_resumable(prepared, identity, "mine")[0].request.resume_state

    length = 16_000 + 16_384 - len(make(16_000))
    if not excess:
        assert len(make(length)) == 16_384
        return
    with pytest.raises(FieldError, match="stop: a resumable answer's stop strings have less than 16384 bytes"):
        make(length + 1)


@pytest.mark.parametrize("num_logprobs", [None, 0, 3])
def test_a_request_is_restored_as_it_was_admitted(num_logprobs):
    sampling = sampling_pb2.SamplingParams(max_tokens=9, min_tokens=2, num_logprobs=num_logprobs, stop_token_ids=[7, 8])
    request = NewRequest(
        request_id=RequestId("r"),
        prompt_token_ids=array("I", [1, 2]),
        sampling=sampling,
        slo_class="batch",
        ttft_slo_s=2.0,
        tpot_slo_s=0.5,
        priority=-3,
        arrival_s=100.0,
        client_request_id="mine",
        owner="alice",
        cache_salt="salt",
    )
    output = OutputSettings(
        stops=("a", "b"),
        is_stop_included=True,
        hidden_token_ids=frozenset({7, 8}),
        skip_special_tokens=False,
        min_tokens=2,
        num_logprobs=num_logprobs,
        returns_token_ids=True,
    )
    identity = AnswerIdentity(
        form=resume_pb2.ANSWER_FORM_CHAT, answer_id="chatcmpl-1", created_s=5, model="tiny", includes_usage=True
    )
    begun, capability = make_resumable(PreparedRequest(request=request, output=output), identity, "shown")
    assert begun.request.resume_key == derive_resume_key(capability, "alice", "shown")
    submit = engine_pb2.Submit(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling=sampling,
        ttft_slo_s=2.0,
        tpot_slo_s=0.5,
        priority=-3,
        age_s=30.0,
        cache_salt="salt",
        resume_key=begun.request.resume_key,
        resume_state=begun.request.resume_state,
    )
    found = FoundRequest(submit=submit, output_token_ids=array("I"), elapsed_s=4.0, num_tokens_before=0)
    state = read_state(found, resume_pb2.ANSWER_FORM_CHAT)
    assert (state.answer_id, state.created_s, state.model, state.includes_usage) == ("chatcmpl-1", 5, "tiny", True)
    restored = restore_request(found, state, 134.0, 150.0)
    assert restored.output == output
    assert restored.request == replace(begun.request, deadline_s=150.0)


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, False), ("true", True), (" True ", True), ("FALSE", False), ("false", False)]
)
def test_a_client_asks_for_a_stream_that_it_can_go_on_with(value, wanted):
    assert asks_for_resumable({} if value is None else {"x-sluice-resumable": value}) is wanted


@pytest.mark.parametrize("value", ["", "1", "yes", "truer"])
def test_neither_true_nor_false_is_refused(value):
    with pytest.raises(FieldError, match="x-sluice-resumable: true or false, not"):
        asks_for_resumable({"x-sluice-resumable": value})


@pytest.mark.parametrize(("num_tokens", "known", "goes_on_at"), [(1, 3, 3), (1, 5, 5), (3, 3, 3), (0, 0, 0), (5, 0, 5)])
def test_tokens_whose_logprobs_are_lost_are_made_once_more(num_tokens, known, goes_on_at):
    submit = engine_pb2.Submit(sampling=sampling_pb2.SamplingParams(num_logprobs=1))
    logprobs = {index: engine_pb2.TokenLogprobs() for index in range(known)}
    found = FoundRequest(
        submit=submit, output_token_ids=array("I", range(5)), elapsed_s=0.0, num_tokens_before=0, logprobs=logprobs
    )
    prepared = prepare_found(found, num_tokens)
    assert list(prepared.output_token_ids) == list(range(goes_on_at))
    assert (prepared.ended is not None) is (goes_on_at < 5)


@pytest.mark.parametrize(
    ("is_certain", "error", "retry_after_s"), [(True, UnknownStreamError, None), (False, NoEngineError, 1.0)]
)
def test_a_client_that_has_more_than_anybody_knows_does_not_go_on(is_certain, error, retry_after_s):
    found = FoundRequest(
        submit=engine_pb2.Submit(),
        output_token_ids=array("I", range(5)),
        elapsed_s=0.0,
        num_tokens_before=0,
        is_certain=is_certain,
    )
    assert prepare_found(found, 5) is found
    with pytest.raises(error) as caught:
        prepare_found(found, 6)
    assert caught.value.retry_after_s == retry_after_s


class SlowPlane(FakePlane):
    """Answers claims when the test does."""

    def claim(self, key: bytes, taker: ClaimTaker) -> None:
        self.taker = taker


async def test_an_answer_that_is_found_for_nobody_any_more_does_no_harm():
    plane = SlowPlane()
    claiming = asyncio.create_task(claim_answer(plane, "a" * 32, "mine", "", "x-sluice-resume"))
    await asyncio.sleep(0)
    claiming.cancel()
    await asyncio.wait([claiming])
    plane.taker(UnknownStreamError("nobody has it"))
    assert claiming.cancelled()


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_client_that_goes_behind_the_end_lets_another_connection_go_on(text, *, is_over: bool):
    plane, progress, settings = FakePlane(), AnswerProgress(1, 1), OutputSettings()
    readers = SlowReaders(SlowReaderLimits())
    answer = CompletionFormat(
        answer_id="cmpl-1",
        index=0,
        created_s=1,
        model="tiny",
        settings=settings,
        text=text,
        includes_usage=False,
        prompt_token_ids=None,
    )
    stream = ResumableStream(
        Output(text, settings),
        answer,
        progress,
        0,
        slow_readers=readers,
        interval_tokens=1,
        cancel=list,
    )
    stream.on_paused(1.0)
    ongoing = OngoingAnswer(plane, RequestId("r"), stream, progress, can_come_back=True)
    if is_over:
        progress.note_end(0, TakenOverError("another connection"))
    assert (len(readers), stream.is_open) == (1, False)
    ongoing.leave()
    assert (plane.detached, plane.cancelled) == ([] if is_over else ["r"], [])
    # It goes on without this client, which is no slow reader any more.
    assert (len(readers), stream.is_open) == (0, not is_over)
