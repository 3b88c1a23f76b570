"""Rolls of the engines of ``sluice up``, under streams: one that completes, and one that the gate sends back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from cluster import run_cluster
from steady_load import Load, Shape
from test_exactness import check

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cluster import Client, Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

NUM_STREAMS = 4
PORTS = "23000-23499"
HTTP_PORT = 23500
ROLL_S = 240.0
GATED_PORTS = "23501-23699"
GATED_HTTP_PORT = 23700
# A token takes about 10 ms on the one, and 37 ms on the other.
FAST, SLOW = {"gpu": "a100-80g", "model": "llama-3-8b"}, {"gpu": "a100-80g", "model": "qwen2.5-32b"}
SHORT = Shape(prompt_tokens=100, output_tokens=40, rate_rps=5.0)
# On a busy machine a request takes seconds: some must end on the new engine within this time, or it counts as idle.
GATE = {"durationSeconds": 12, "minAttainment": "60%", "minRequests": 4, "timeoutSeconds": 60}


async def stream_until(
    client: Client, known: list[tuple[Request, Answer]], is_over: Callable[[], bool]
) -> Counter[str]:
    """Keep streams running until a condition holds, and check each answer; returns the number of streams by outcome."""
    fared: Counter[str] = Counter()

    async def lane(number: int) -> None:
        for index in itertools.count(number, NUM_STREAMS):
            if is_over():
                break
            request, answer = known[index % len(known)]
            result = await client.generate(request)
            check(result, answer)
            fared["streams"] += 1
            fared["moved"] += result.num_hand_offs > 0

    await asyncio.gather(*(lane(number) for number in range(NUM_STREAMS)))
    return fared


async def roll(
    cluster: Cluster, known: list[tuple[Request, Answer]], change: Callable[[dict[str, Any]], None]
) -> Counter[str]:
    """Edit a field that restarts the engines, under load, and wait until all run with it."""
    before = list_pids(cluster.status())
    loop = asyncio.get_running_loop()

    def is_rolled(status: dict[str, Any]) -> bool:
        pids = list_pids(status)
        return bool(status["is_ready"]) and all(pids.get(name) not in {pid, None} for name, pid in before.items())

    async with cluster.client() as client:
        cluster.edit(change)
        rolled = loop.run_in_executor(None, cluster.wait, "every engine has rolled", is_rolled, ROLL_S)
        fared = await stream_until(client, known, rolled.done)
        await rolled
    return fared


async def test_a_roll_to_another_block_size_and_larger_chunks_breaks_no_stream(
    tmp_path: Path, example: dict[str, Any], models: Path, known: list[tuple[Request, Answer]]
) -> None:
    """KV blocks of 32 and of 64 tokens are incompatible, so the last old engine's requests are computed anew.

    Old engines cannot run the new chunk size. The plan that has it, and that drains them, must take effect all the
    same.
    """
    manifest = json.loads(json.dumps(example))
    manifest["metadata"]["name"] = "roll"
    spec = manifest["spec"]
    spec.update(replicas=2, prefillHeavy=1)
    spec["router"].update(replicas=1, service={"port": HTTP_PORT})
    with run_cluster(tmp_path / "roll", manifest, models=models, ports=PORTS) as cluster:
        cluster.wait_ready()
        total = cluster.wait_idle()["engines"][0]["kv_blocks_total"]

        def change(spec: dict[str, Any]) -> None:
            spec["engine"].update(extraArgs=["--block-size=64"], maxBatchTokens=4096)
            spec["chunkSizes"].update(prefillHeavy=4096)

        fared = await roll(cluster, known, change)
        print(f"under the roll: {dict(fared)}")
        assert fared["streams"] >= NUM_STREAMS
        status = cluster.wait_idle()
        assert all(engine["kv_blocks_total"] < total for engine in status["engines"])
        assert {engine["state"] for engine in status["engines"]} == {"ready"}
        sizes = {engine["role"]: engine["chunk_size_tokens"] for engine in status["engines"]}
        assert sizes == {"P-heavy": 4096, "D-heavy": spec["chunkSizes"]["decodeHeavy"]}
        # Every plan was applied, also by engines that cannot run all of it.
        assert "refused plan" not in cluster.log.read_text()


async def test_a_gated_roll_to_slower_engines_goes_back_by_itself_and_breaks_no_stream(
    tmp_path: Path, example: dict[str, Any], models: Path
) -> None:
    manifest = json.loads(json.dumps(example))
    manifest["metadata"]["name"] = "gated"
    spec = manifest["spec"]
    # Requests stay where they are placed: otherwise the faster engine would take them over.
    spec.update(replicas=2, strategy="Aggregated", slo={"ttftMilliseconds": 4000, "tpotMilliseconds": 25})
    spec.update(rollout={"gate": GATE})
    spec["engine"]["emulation"] = FAST
    spec["router"].update(replicas=1, service={"port": GATED_HTTP_PORT})
    with run_cluster(tmp_path / "gated", manifest, models=models, ports=GATED_PORTS) as cluster:
        before = list_pids(await asyncio.to_thread(cluster.wait_ready))
        measured: dict[str, int | None] = {}

        def is_measured(status: dict[str, Any]) -> bool:
            measured.update(list_pids(status))
            return bool(status["is_ready"] and status["rollout"] and measured != before)

        def is_back(status: dict[str, Any]) -> bool:
            is_another = list_pids(status)["engine-0"] != measured["engine-0"]
            return bool(status["is_ready"] and is_another and status["rollout"].startswith("rolled back: "))

        async with cluster.client() as client, Load([client], SHORT, models / "tiny").run() as load:
            cluster.edit(lambda spec: spec["engine"].update(emulation=SLOW))
            await asyncio.to_thread(cluster.wait, "a slower engine is measured", is_measured, ROLL_S)
            status = await asyncio.to_thread(cluster.wait, "the engine from before is back", is_back, ROLL_S)
        print(status["rollout"], dict(load.fared))
        assert "rollout.gate.minAttainment 60%" in status["rollout"]
        assert list_pids(status)["engine-1"] == measured["engine-1"] == before["engine-1"]
        assert load.fared["exact"] > 0


def list_pids(status: dict[str, Any]) -> dict[str, int | None]:
    return {engine["engine_id"]: engine["pid"] for engine in status["engines"]}
