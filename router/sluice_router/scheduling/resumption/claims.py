"""Asks the engines for a request that a client wants to go on with; whoever had it has it no more.

Every engine is asked at once, because one may run the request while another has a former part of it: the highest fence
is the last owner's. What does not answer in time counts as not having it.
"""

from __future__ import annotations

from array import array

from sluice.v1 import engine_pb2
from sluice_core.records import RequestId
from sluice_router.errors import MIN_RETRY_S, NoEngineError, QueueFullError, ShuttingDownError, UnknownStreamError
from sluice_router.limit_type import Limit
from sluice_router.scheduling import wire_conversion
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest, PendingClaim
from sluice_router.scheduling.requests import ClaimTaker, FoundRequest
from sluice_router.scheduling.state import RouterState

# A claim costs each engine a message, whether or not the key is known.
MAX_PENDING_CLAIMS = 1024
CLAIM_TIMEOUT_S = Limit(
    "claim_timeout_s", 1.0, "longest wait for what engines know of an answer that a client resumes", above=0
)


def claim(state: RouterState, key: bytes, taker: ClaimTaker, now: float) -> None:
    """Looks for a request, here and at all engines.

    Args:
        state: The router's state.
        key: The request's resume key.
        taker: Gets what was found, or why nothing was, once the event is over.
        now: The router's clock, in seconds.

    Raises:
        QueueFullError: Too many claims wait for answers.
        ShuttingDownError: This router accepts no more.
    """
    if not state.status.is_accepting:
        raise ShuttingDownError("this router is about to leave", retry_after_s=MIN_RETRY_S)
    results = state.outbox.actions.claim_results
    live = state.requests.by_resume_key.get(key)
    if live is not None:
        results.append((taker, _describe_live(live, now)))
        return
    if len(state.requests.claims) >= MAX_PENDING_CLAIMS:
        raise QueueFullError("too many answers are asked for at once", retry_after_s=MIN_RETRY_S)
    earlier = state.requests.claims.get(key)
    if earlier is not None:
        results.append((earlier.taker, NoEngineError("the answer was asked for again", retry_after_s=MIN_RETRY_S)))
    pending = PendingClaim(taker=taker, until_s=now + state.limits[CLAIM_TIMEOUT_S])
    state.requests.claims[key] = pending
    for engine in state.engines.connected.values():
        _ask(state, engine, key, pending)
    if not pending.awaited:
        _conclude(state, key, pending)


def ask_all(state: RouterState, engine: ConnectedEngine) -> None:
    """Asks an engine that has just come for all that is looked for: it counts among those that have answered."""
    for key, pending in state.requests.claims.items():
        _ask(state, engine, key, pending)


def _ask(state: RouterState, engine: ConnectedEngine, key: bytes, pending: PendingClaim) -> None:
    # Another model's answers are another tokenizer's, which this router has not.
    if not engine.serves_other_model(state.model_id):
        pending.awaited.add(engine.engine_id)
        state.outbox.message_to(engine).claims.add(resume_key=key)


def take_answer(state: RouterState, engine: ConnectedEngine, answer: engine_pb2.ClaimAnswer) -> None:
    """Takes an engine's answer; one that comes too late changes nothing, and the engine ends what it holds in time."""
    pending = state.requests.claims.get(answer.resume_key)
    if pending is None:
        if RequestId(answer.submit.request_id) in state.requests.live:
            _drop(state, engine, answer)
        return
    pending.awaited.discard(engine.engine_id)
    if answer.HasField("submit"):
        pending.answers.append((engine, answer))
    if not pending.awaited:
        _conclude(state, answer.resume_key, pending)


def forget_engine(state: RouterState, engine: ConnectedEngine) -> None:
    """An engine whose stream is over answers no more."""
    for key, pending in list(state.requests.claims.items()):
        pending.awaited.discard(engine.engine_id)
        pending.has_lost_engine = True
        if not pending.awaited:
            _conclude(state, key, pending)


def expire(state: RouterState, now: float) -> None:
    """Ends the wait for engines that do not answer."""
    for key, pending in list(state.requests.claims.items()):
        if now >= pending.until_s:
            _conclude(state, key, pending)


def _conclude(state: RouterState, key: bytes, pending: PendingClaim) -> None:
    """Chooses the answer of the last owner; what others run of the request ends."""
    del state.requests.claims[key]
    results = state.outbox.actions.claim_results
    if not pending.answers:
        results.append((pending.taker, _explain_absence(state, pending)))
        return
    pending.answers.sort(key=lambda item: _rank(item[1]))
    *others, (engine, answer) = pending.answers
    for other, old in others:
        _drop(state, other, old)
    found = FoundRequest(
        submit=answer.submit,
        output_token_ids=array("I", answer.submit.output_token_ids),
        elapsed_s=answer.elapsed_s,
        num_tokens_before=answer.num_tokens_before,
        engine=None if answer.HasField("ended") else engine,
        ended=answer.ended if answer.HasField("ended") else None,
        logprobs=_gather_logprobs(pending.answers),
        is_certain=_is_certain(state, pending),
    )
    results.append((pending.taker, found))


def _rank(answer: engine_pb2.ClaimAnswer) -> tuple[int, bool, int]:
    """Ranks what an engine knows of a request; the last owner's is highest.

    Parts may have the same fence: an engine that runs one is the owner. Of two that have ended, one was refused,
    because the request had been claimed. The other one went on from there, and has more tokens.
    """
    return answer.submit.fence, not answer.HasField("ended"), len(answer.submit.output_token_ids)


def _gather_logprobs(
    answers: list[tuple[ConnectedEngine, engine_pb2.ClaimAnswer]],
) -> dict[int, engine_pb2.TokenLogprobs]:
    """Gathers logprobs by the index of their token: each engine has those of its own part, the last owner's count."""
    tokens = answers[-1][1].submit.output_token_ids
    logprobs: dict[int, engine_pb2.TokenLogprobs] = {}
    for _, answer in answers:
        theirs = answer.submit.output_token_ids
        logprobs |= {
            index: entry
            for index, entry in enumerate(answer.logprobs, answer.num_tokens_before)
            if index < min(len(tokens), len(theirs)) and tokens[index] == theirs[index]
        }
    return logprobs


def _drop(state: RouterState, engine: ConnectedEngine, answer: engine_pb2.ClaimAnswer) -> None:
    if not answer.HasField("ended"):
        state.outbox.message_to(engine).aborts.add(held_request_id=answer.submit.request_id)


def _explain_absence(state: RouterState, pending: PendingClaim) -> NoEngineError | UnknownStreamError:
    if _is_certain(state, pending):
        return UnknownStreamError("no engine knows the answer: it is too long ago, or the capability is wrong")
    return NoEngineError("engines that may know the answer cannot be asked now", retry_after_s=MIN_RETRY_S)


def _is_certain(state: RouterState, pending: PendingClaim) -> bool:
    """Whether every engine that there is has answered."""
    endpoints = state.engines.endpoints.values()
    has_all = bool(state.engines.connected) and not pending.awaited and not pending.has_lost_engine
    return has_all and all(item.engine is not None and not item.engine.is_lost for item in endpoints)


def _describe_live(request: LiveRequest, now: float) -> FoundRequest:
    """Describes a request that this router has itself: the client's connection broke, and nobody has noticed yet."""
    message = engine_pb2.AttachRequest()
    wire_conversion.add_submit(message, request, slot=0, submit_number=0, now=now, kv=None, grant_id=0)
    return FoundRequest(
        submit=message.submits[0],
        output_token_ids=array("I", request.output_token_ids),
        elapsed_s=0.0,
        num_tokens_before=0,
        live=request,
    )
