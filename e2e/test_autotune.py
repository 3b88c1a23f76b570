"""The tuner in ``sluice up``: an edited objective and a shifted workload change sliders while streams run.

Engines emulate a GPU, so that they run as fast as a search predicts. All else is real: vLLM's scheduler, the router,
the launcher, and searches in their own processes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from steady_load import Load, Shape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cluster import Cluster

pytestmark = [pytest.mark.engine, pytest.mark.searches]

PORTS = "26711-26899"
HTTP_PORT = 26710
CHATS = Shape(prompt_tokens=40, output_tokens=200, rate_rps=4.0)
SUMMARIES = Shape(prompt_tokens=3000, output_tokens=40, rate_rps=2.0)
# Goodput in the simulator. With loose objectives, chats do as well with any chunk size (within 2 %). With tight ones
# they lose 11 % with large chunks on the D-heavy engine. Summaries with loose objectives lose 10 % or more with small
# ones.
LOOSE = {"ttftMilliseconds": 1000, "tpotMilliseconds": 200}
TIGHT = {"ttftMilliseconds": 2000, "tpotMilliseconds": 50}
LARGE_TOKENS, SMALL_TOKENS = 512, 256
# A search shares two cores with everything else. On a quiet machine, each step takes 10 to 30 s.
STEP_S = 240.0


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
            "router": {"replicas": 1, "service": {"port": HTTP_PORT}},
            "autotune": {
                "mode": "Apply",
                "cooldownSeconds": 1,
                "bounds": {"chunkSizes": {"decodeHeavy": {"min": 128, "max": LARGE_TOKENS}}},
            },
        },
    }


def decode_heavy_chunk(status: dict[str, Any]) -> int:
    return next((e["chunk_size_tokens"] for e in status["engines"] if e["role"] == "D-heavy"), 0)


async def test_an_edited_objective_and_a_shifted_workload_change_sliders_and_break_no_stream(
    start_cluster: Callable[[dict[str, Any], str], Any], example: dict[str, Any], models: Path
) -> None:
    with start_cluster(make_manifest(example), PORTS) as cluster:
        before = await asyncio.to_thread(cluster.wait_ready)
        async with cluster.client() as client:
            async with Load([client], CHATS, models / "tiny").run() as load:
                await follow(cluster, load)
            after = await asyncio.to_thread(cluster.status)
    assert {e["pid"]: e["num_restarts"] for e in after["engines"]} == {e["pid"]: 0 for e in before["engines"]}
    print(f"streams: {dict(load.fared)}")
    assert load.fared["exact"] > 100


async def follow(cluster: Cluster, load: Load) -> None:
    def wait(what: str, is_reached: Callable[[dict[str, Any]], bool]) -> Any:
        return asyncio.to_thread(cluster.wait, what, is_reached, STEP_S)

    def has_reason(reason: str) -> Callable[[dict[str, Any]], bool]:
        return lambda status: status["autotune"] is not None and status["autotune"]["reason"] == reason

    async def edit(slo: dict[str, int]) -> None:
        await asyncio.to_thread(cluster.edit, lambda spec: spec["slo"].update(slo))
        await wait("the edit causes a search", has_reason("Searching"))

    tuned = await wait("the manifest's sliders are good enough", has_reason("Tuned"))
    assert decode_heavy_chunk(tuned) == LARGE_TOKENS
    await edit(TIGHT)
    await wait("smaller chunks for a tight objective", lambda status: 0 < decode_heavy_chunk(status) <= SMALL_TOKENS)
    await edit(LOOSE)
    relaxed = await wait("the present sliders are good enough for a loose objective", has_reason("Tuned"))
    small = decode_heavy_chunk(relaxed)
    assert small <= SMALL_TOKENS
    load.shape = SUMMARIES
    await wait("larger chunks for long prompts", lambda status: decode_heavy_chunk(status) > small)
