"""Finds the answer that a client wants to go on with, and brings its output to where the client is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sluice_router.api.openai_requests import FieldError
from sluice_router.errors import MIN_RETRY_S, NoEngineError, RouterError, UnknownStreamError
from sluice_router.scheduling.requests import DataPlane, FoundRequest, rewind
from sluice_router.security.resume_capabilities import derive_resume_key, is_capability
from sluice_router.text.output import Output


async def claim_answer(plane: DataPlane, capability: str, shown_id: str, owner: str, field: str) -> FoundRequest:
    """Takes an answer over from whoever has it.

    Args:
        plane: The data plane.
        capability: The client's.
        shown_id: The request's id as its client knows it.
        owner: Of the API key with which the client asks.
        field: Where the capability stands.

    Raises:
        FieldError: The capability has not the form of one.
        RouterError: Nothing was found, or not now.
    """
    if not is_capability(capability):
        raise FieldError(field, f"{field}: the capability that the answer began with, 32 characters")
    future: asyncio.Future[FoundRequest | RouterError] = asyncio.get_running_loop().create_future()

    def take(result: FoundRequest | RouterError) -> None:
        if not future.done():  # the client may have gone
            future.set_result(result)

    plane.claim(derive_resume_key(capability, owner, shown_id), take)
    result = await future
    if isinstance(result, RouterError):
        raise result
    return result


def prepare_found(found: FoundRequest, num_tokens: int) -> FoundRequest:
    """Checks that an answer reaches to where its client is, and that what follows is whole.

    Args:
        found: What was found.
        num_tokens: Output tokens that the client has.

    Returns:
        The same; where logprobs are lost that the client has not got, up to there.

    Raises:
        UnknownStreamError: The client has more tokens than anybody knows.
        NoEngineError: It has more than the engines know that could be asked.
    """
    num_known = len(found.output_token_ids)
    if num_tokens > num_known and not found.is_certain:
        raise NoEngineError("engines that may know more of the answer cannot be asked now", retry_after_s=MIN_RETRY_S)
    if num_tokens > num_known:
        message = f"of the answer {num_known} tokens are known, and the client has {num_tokens}; send the request again"
        raise UnknownStreamError(message)
    if found.submit.sampling.HasField("num_logprobs"):
        for index in range(num_tokens, num_known):
            if index not in found.logprobs:
                return rewind(found, index)
    return found


def replay(output: Output, found: FoundRequest, num_tokens: int, skip: Callable[[], object]) -> int | None:
    """Brings an output to where an answer is.

    Args:
        output: Fresh.
        found: Its tokens.
        num_tokens: Those of them that the client has.
        skip: Called with these in the output.

    Returns:
        Output tokens up to the stop string that they complete; None: they complete none.

    Raises:
        UnknownStreamError: The output ended before the client's last token.
    """
    push = output.push
    stop_at = None
    for index, token_id in enumerate(found.output_token_ids):
        if index == num_tokens:
            skip()
        stop_at = push(token_id, found.logprobs.get(index))
        if stop_at is not None:
            break
    if output.num_tokens < num_tokens:
        raise UnknownStreamError(f"the answer ended after {output.num_tokens} tokens, and the client has {num_tokens}")
    if output.num_tokens == num_tokens:
        skip()
    return stop_at
