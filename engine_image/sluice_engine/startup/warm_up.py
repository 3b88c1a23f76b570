"""Makes sure that the EngineCore has our plugin, and runs the first iterations, before the engine serves.

The first iteration of a kind takes up to 1.5 s on a CPU (lazy imports, kernels prepared at first use): too long for a
client's TTFT, and misleading for the routers' latency models.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine.core_messages import UTILITY, RequestExtras
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
            StartError: They do not, or vLLM has not loaded the plugin.
        """
        await self._check_plugin()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                waiting = {await self._submit(number, sampling) for number, sampling in enumerate(SAMPLING)}
                while waiting:
                    outputs = await self._client.get_output_async()
                    waiting -= {output.request_id for output in outputs.outputs if output.finish_reason is not None}
        except TimeoutError as error:
            raise StartError(f"the first requests did not end within {TIMEOUT_S:.0f} s") from error

    async def _check_plugin(self) -> None:
        """Carries out no command: without the plugin the engine would look ready and obey nothing."""
        try:
            await self._client.call_utility_async(UTILITY, [])
        except Exception as error:  # vLLM's client raises a plain one
            plugins = os.environ.get("VLLM_PLUGINS", "not set")
            raise StartError(
                "vLLM's EngineCore has not loaded the plugin sluice of the entry points vllm.general_plugins: is "
                f"sluice-serve installed where the engine runs, and does VLLM_PLUGINS ({plugins}) leave "
                f"it out? vLLM says: {error}"
            ) from error

    async def _submit(self, number: int, sampling: sampling_pb2.SamplingParams) -> str:
        core_id = f"warm-up-{number}"
        submit = wire.Submit(prompt_token_ids=[number + 1] * NUM_PROMPT_TOKENS, sampling=sampling)
        await self._client.add_request_async(self._builder.build(core_id, submit, RequestExtras()))
        return core_id
