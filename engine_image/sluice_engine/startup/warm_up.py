"""Runs the first iterations before anybody waits for them.

The first iteration of a kind costs up to 1.5 s on a CPU (lazy imports, kernels that are prepared at first use). It would
be a client's TTFT, and an absurd measurement for the routers' latency models.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine.core_messages import RequestExtras
from sluice_engine.errors import StartError

if TYPE_CHECKING:
    from sluice_engine.core_client import CoreClient, RequestBuilder

TIMEOUT_S = 120.0
# Two prompts that share no block, greedy and sampled: prefill, decode, penalties, logprobs.
NUM_PROMPT_TOKENS = 16
SAMPLING = (
    sampling_pb2.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, num_logprobs=1),
    sampling_pb2.SamplingParams(
        max_tokens=3, temperature=1.0, top_p=0.9, top_k=20, seed=1, presence_penalty=0.1, ignore_eos=True
    ),
)


class WarmUp:
    """Runs a few small requests.

    Args:
        client: The EngineCore; nobody else reads its outputs meanwhile.
        builder: Makes its requests.
    """

    def __init__(self, client: CoreClient, builder: RequestBuilder) -> None:
        self._client = client
        self._builder = builder

    async def run(self) -> None:
        """Runs until all requests have ended.

        Raises:
            StartError: They do not.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                waiting = {await self._submit(number, sampling) for number, sampling in enumerate(SAMPLING)}
                while waiting:
                    outputs = await self._client.get_output_async()
                    waiting -= {output.request_id for output in outputs.outputs if output.finish_reason is not None}
        except TimeoutError as error:
            raise StartError(f"the first requests did not end within {TIMEOUT_S:.0f} s") from error

    async def _submit(self, number: int, sampling: sampling_pb2.SamplingParams) -> str:
        core_id = f"warm-up-{number}"
        submit = wire.Submit(prompt_token_ids=[number + 1] * NUM_PROMPT_TOKENS, sampling=sampling)
        await self._client.add_request_async(self._builder.build(core_id, submit, RequestExtras()))
        return core_id
