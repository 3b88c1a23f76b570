"""Choices of an answer (``n``): each is a request of its own, with an id and a seed of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice.v1 import sampling_pb2
from sluice_core.records import RequestId
from sluice_router.scheduling.requests import NewRequest
from sluice_router.text.output import OutputSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request ready to be admitted.

    Args:
        request: For the data plane.
        output: How the response stream shall write it.
    """

    request: NewRequest
    output: OutputSettings


def list_choices(
    prompts: list[PreparedRequest], n: int, make_request_id: Callable[[], RequestId]
) -> list[PreparedRequest]:
    """Lists the choices of an answer: ``n`` for each prompt.

    Args:
        prompts: A request for each prompt.
        n: Choices per prompt.
        make_request_id: Makes the ids of all but the first choice.
    """
    if len(prompts) * n == 1:
        return prompts
    choices = [(prompt, sample) for prompt in prompts for sample in range(n)]
    return [
        replace(prompt, request=_derive_choice(prompt.request, index, sample, make_request_id))
        for index, (prompt, sample) in enumerate(choices)
    ]


def _derive_choice(
    request: NewRequest, index: int, sample: int, make_request_id: Callable[[], RequestId]
) -> NewRequest:
    if not index:
        return request
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if sampling.HasField("seed"):
        sampling.seed = derive_seed(sampling.seed, sample)
    shown_id = request.client_request_id or request.request_id
    return replace(
        request,
        request_id=make_request_id(),
        client_request_id=f"{shown_id}-{index}",
        sampling=sampling,
    )


def derive_seed(seed: int, sample: int) -> int:
    """Derives the seed of one of several samples: counted away from zero, as vLLM does above it, so never vLLM's -1.

    Args:
        seed: The request's, a 64-bit integer other than -1.
        sample: Number of the sample, from 0 on.
    """
    moved = seed + sample if seed >= 0 else seed - sample
    return (moved + 2**63) % 2**64 - 2**63
