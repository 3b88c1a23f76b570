"""What engines keep for the router that goes on with an answer, and the answer's settings read back from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from sluice.v1 import resume_pb2
from sluice_core.records import RequestId
from sluice_router.api.choices import PreparedRequest
from sluice_router.api.openai_requests import FieldError
from sluice_router.errors import UnknownStreamError
from sluice_router.scheduling.requests import FoundRequest, NewRequest
from sluice_router.security.resume_capabilities import derive_resume_key, make_capability
from sluice_router.text.output import OutputSettings

# Engines keep no more of an answer.
MAX_STATE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerIdentity:
    """What all events of an answer have; gRPC's have the form alone.

    Args:
        form: Whose form it has.
        answer_id: Its id.
        created_s: When it began, Unix time.
        model: Served name.
        includes_usage: Whether a stream ends with usage.
    """

    form: resume_pb2.AnswerForm.ValueType
    answer_id: str = ""
    created_s: int = 0
    model: str = ""
    includes_usage: bool = False


def make_resumable(prepared: PreparedRequest, identity: AnswerIdentity, shown_id: str) -> tuple[PreparedRequest, str]:
    """Lets a client go on with an answer.

    Args:
        prepared: The request.
        identity: What the answer's events have.
        shown_id: The request's id as its client knows it.

    Returns:
        The request, and the capability for the client.

    Raises:
        FieldError: Its stop strings are too long to be kept.
    """
    request, output = prepared.request, prepared.output
    capability = make_capability()
    state = resume_pb2.ResumeState(
        form=identity.form,
        answer_id=identity.answer_id,
        created_s=identity.created_s,
        model=identity.model,
        includes_usage=identity.includes_usage,
        client_request_id=request.client_request_id,
        owner=request.owner,
        slo_class=request.slo_class,
        stops=output.stops,
        is_stop_included=output.is_stop_included,
        skip_special_tokens=output.skip_special_tokens,
        returns_token_ids=output.returns_token_ids,
    ).SerializeToString()
    if len(state) > MAX_STATE_BYTES:
        limit = f"a resumable answer's stop strings have less than {MAX_STATE_BYTES} bytes in all"
        raise FieldError("stop", f"stop: {limit}")
    key = derive_resume_key(capability, request.owner, shown_id)
    return replace(prepared, request=replace(request, resume_key=key, resume_state=state)), capability


def read_state(found: FoundRequest, form: resume_pb2.AnswerForm.ValueType) -> resume_pb2.ResumeState:
    """Reads what the first router left.

    Raises:
        UnknownStreamError: Another release of the router left it, in a form that this one does not know.
        FieldError: The answer has another endpoint's form.
    """
    try:
        state = resume_pb2.ResumeState.FromString(found.submit.resume_state)
    except DecodeError as error:
        raise UnknownStreamError("another release of the router began the answer; send the request again") from error
    if state.form != form:
        names = {value: name.removeprefix("ANSWER_FORM_").lower() for name, value in resume_pb2.AnswerForm.items()}
        began = names.get(state.form, "unknown")
        raise FieldError("", f"the answer began as {began}, and goes on in that form alone, not as {names[form]}")
    return state


def restore_request(
    found: FoundRequest, state: resume_pb2.ResumeState, now: float, deadline_s: float | None = None
) -> PreparedRequest:
    """Makes the request once more as its first router had admitted it.

    Args:
        found: What was found.
        state: What the first router left.
        now: In seconds, on the data plane's clock.
        deadline_s: When the caller gives up, on the same clock; None: never.
    """
    submit, sampling = found.submit, found.submit.sampling
    request = NewRequest(
        request_id=RequestId(submit.request_id),
        prompt_token_ids=array("I", submit.prompt_token_ids),
        sampling=sampling,
        slo_class=state.slo_class,
        ttft_slo_s=submit.ttft_slo_s,
        tpot_slo_s=submit.tpot_slo_s,
        priority=submit.priority,
        arrival_s=now - submit.age_s - found.elapsed_s,
        deadline_s=deadline_s,
        client_request_id=state.client_request_id,
        owner=state.owner,
        cache_salt=submit.cache_salt,
        resume_key=submit.resume_key,
        resume_state=submit.resume_state,
    )
    output = OutputSettings(
        stops=tuple(state.stops),
        is_stop_included=state.is_stop_included,
        hidden_token_ids=frozenset(sampling.stop_token_ids),
        skip_special_tokens=state.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        returns_token_ids=state.returns_token_ids,
    )
    return PreparedRequest(request=request, output=output)
