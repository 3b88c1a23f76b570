"""What lets a client go on with its answer."""

from __future__ import annotations

from array import array

import pytest

from sluice.v1 import resume_pb2, sampling_pb2
from sluice_core.records import RequestId
from sluice_router.api.choices import PreparedRequest
from sluice_router.api.openai_requests import FieldError
from sluice_router.api.resumption.answer_states import AnswerIdentity, make_resumable
from sluice_router.scheduling.requests import NewRequest
from sluice_router.security.resume_capabilities import derive_resume_key, is_capability, make_capability
from sluice_router.text.output import OutputSettings


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
