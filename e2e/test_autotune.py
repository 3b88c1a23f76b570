"""The tuner at work on ``sluice up``: an edited objective and a shifted workload change sliders, while streams run.

Engines emulate a GPU, so that what a search predicts is what they do: vLLM's own scheduler, the real router, the launcher,
and searches in processes of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from workload import Request, make_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Client, Cluster, Result

pytestmark = pytest.mark.engine

PORTS = "26500-26899"
# Prompt and output tokens, and requests per second.
CHATS, SUMMARIES = (40, 200, 4.0), (3000, 40, 2.0)
# Chats whose tokens may take their time are served as well by any chunks (within 2 % of goodput in the simulator); hasty ones
# lose 11 % to large chunks on the D-heavy engine. Summaries that may take their time lose 10 % and more to small ones.
LOOSE = {"ttftMilliseconds": 1000, "tpotMilliseconds": 200}
TIGHT = {"ttftMilliseconds": 2000, "tpotMilliseconds": 50}
LARGE_TOKENS, SMALL_TOKENS = 512, 256
# Searches share two cores with everything else; on a quiet machine each of these steps takes 10 to 30 s.
STEP_S = 90.0


def make_manifest(example: dict[str, Any]) -> dict[str, Any]:
    spec = example["spec"]
    return {
        **example,
        "metadata": {"name": "tuned"},
        "spec": {
            **spec,
            "replicas": 2,
            "prefillHeavy": 1,
            "chunkSizes": {"prefillHeavy": 2048, "decodeHeavy": LARGE_TOKENS},
            "slo": LOOSE,
            "engine": {**spec["engine"], "emulation": {"gpu": "a100-80g", "model": "qwen2.5-14b"}},
            "router": {"replicas": 1, "service": {"port": 26500}},
            "autotune": {
                "mode": "Apply",
                "cooldownSeconds": 1,
                "bounds": {"chunkSizes": {"decodeHeavy": {"min": 128, "max": LARGE_TOKENS}}},
            },
        },
    }


class Load:
    """Requests that keep coming, of a shape that may change; every one of them must be answered whole."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.shape = CHATS
        self.results: list[Result] = []

    async def run(self) -> None:
        rng = random.Random(1)
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                prompt, output, rate_rps = self.shape
                sampling: dict[str, Any] = {"max_tokens": output, "ignore_eos": True, "temperature": 0.0}
                request = Request(name=f"load-{number}", prompt_token_ids=make_prompt(prompt, rng), sampling=sampling)
                group.create_task(self._ask(request, output))
                await asyncio.sleep(rng.expovariate(rate_rps))

    async def _ask(self, request: Request, output: int) -> None:
        result = await self.client.generate(request)
        assert len(result.token_ids) == output, f"{request.name} broke"
        self.results.append(result)


def decode_heavy_chunk(status: dict[str, Any]) -> int:
    return next((e["chunk_size_tokens"] for e in status["engines"] if e["role"] == "D-heavy"), 0)


async def test_an_edited_objective_and_a_shifted_workload_change_sliders_and_break_no_stream(
    start_cluster: Callable[[dict[str, Any], str], Any], example: dict[str, Any]
) -> None:
    with start_cluster(make_manifest(example), PORTS) as cluster:
        before = await asyncio.to_thread(cluster.wait_ready)
        async with cluster.client() as client:
            load = Load(client)
            running = asyncio.create_task(load.run())
            try:
                await follow(cluster, load)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            after = await asyncio.to_thread(cluster.status)
        assert not [task for task in (running,) if task.done() and not task.cancelled()], "a stream broke"
    assert {e["pid"]: e["num_restarts"] for e in after["engines"]} == {e["pid"]: 0 for e in before["engines"]}
    assert len(load.results) > 100


async def follow(cluster: Cluster, load: Load) -> None:
    def wait(what: str, is_reached: Callable[[dict[str, Any]], bool]) -> Any:
        return asyncio.to_thread(cluster.wait, what, is_reached, STEP_S)

    def has_reason(reason: str) -> Callable[[dict[str, Any]], bool]:
        return lambda status: status["autotune"] is not None and status["autotune"]["reason"] == reason

    async def edit(slo: dict[str, int]) -> None:
        await asyncio.to_thread(cluster.edit, lambda spec: spec["slo"].update(slo))
        await wait("the edit causes a search", has_reason("Searching"))

    tuned = await wait("the sliders of the manifest are found to be good", has_reason("Tuned"))
    assert decode_heavy_chunk(tuned) == LARGE_TOKENS
    await edit(TIGHT)
    await wait("smaller chunks for a tight objective", lambda status: 0 < decode_heavy_chunk(status) <= SMALL_TOKENS)
    await edit(LOOSE)
    relaxed = await wait("what is in force is good enough for a loose objective", has_reason("Tuned"))
    small = decode_heavy_chunk(relaxed)
    assert small <= SMALL_TOKENS
    load.shape = SUMMARIES
    await wait("larger chunks for long prompts", lambda status: decode_heavy_chunk(status) > small)
