"""Edits of the manifest are in force in about a second, with no restart and no broken stream."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Result
from test_exactness import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

Edit = dict[str, Any]

# Generous against a shared machine; the figure itself is printed.
IN_FORCE_S = 15.0
ANOTHER_PORT = 26900


def merge(spec: dict[str, Any], edit: Edit) -> None:
    for key, value in edit.items():
        if isinstance(value, dict):
            merge(spec.setdefault(key, {}), value)
        else:
            spec[key] = value


def chunk_sizes(status: dict[str, Any]) -> list[int]:
    return sorted(engine["chunk_size_tokens"] for engine in status["engines"])


EDITS: dict[str, tuple[Edit, Callable[[dict[str, Any]], bool]]] = {
    "ratio": ({"prefillHeavy": 3}, lambda s: [e["role"] for e in s["engines"]].count("P-heavy") == 3),
    "prefill-heavy-chunk": ({"chunkSizes": {"prefillHeavy": 96}}, lambda s: chunk_sizes(s) == [64, 64, 96, 96]),
    "decode-heavy-chunk": ({"chunkSizes": {"decodeHeavy": 200}}, lambda s: chunk_sizes(s) == [200, 200, 512, 512]),
    "no-prompts-on-d-heavy": ({"chunkSizes": {"decodeHeavy": 0}}, lambda s: chunk_sizes(s) == [0, 0, 512, 512]),
    "aggregated": ({"strategy": "Aggregated"}, lambda s: chunk_sizes(s) == [512] * 4),
    "disaggregated": ({"strategy": "Disaggregated"}, lambda s: chunk_sizes(s) == [0, 0, 2048, 2048]),
    "slo": ({"slo": {"ttftMilliseconds": 900, "tpotMilliseconds": 50}}, lambda _: True),
    "parameters": ({"parameters": {"watermarkPercent": 50, "approachingFactorPercent": 50}}, lambda _: True),
}


@pytest.mark.parametrize("name", EDITS)
async def test_a_live_edit_breaks_no_stream(cluster: Cluster, known: list[tuple[Request, Answer]], name: str) -> None:
    edit, is_in_force = EDITS[name]
    before = cluster.status()
    generation = max(router["generation"] for router in before["routers"])
    first = list(EDITS).index(name) * 16
    asked = known[first : first + 16]
    loop = asyncio.get_running_loop()

    def is_reached(status: dict[str, Any]) -> bool:
        return is_in_force(status) and all(r["acknowledged_generation"] > generation for r in status["routers"])

    async with cluster.client() as client:
        tasks = [asyncio.create_task(client.generate(request)) for request, _ in asked]
        await asyncio.sleep(0.3)
        start_s = time.monotonic()
        await loop.run_in_executor(None, lambda: cluster.edit(lambda spec: merge(spec, edit)))
        after = await loop.run_in_executor(None, lambda: cluster.wait(f"{name} is in force", is_reached, IN_FORCE_S))
        print(f"{name}: in force after {time.monotonic() - start_s:.2f} s, status calls included")
        results = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        # What is asked for under the new settings is exact too.
        later = [await client.generate(request) for request, _ in asked[:4]]
    for result, (_, answer) in zip(results + later, asked + asked[:4], strict=True):
        check(result, answer)
    assert {e["pid"] for e in after["engines"]} == {e["pid"] for e in before["engines"]}


async def test_the_router_moves_to_another_port_once_its_streams_have_ended(
    cluster: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    old_port, engines = cluster.manifest["spec"]["router"]["service"]["port"], cluster.processes("engine")
    loop = asyncio.get_running_loop()
    asked = known[160:176]
    for port in (ANOTHER_PORT, old_port):

        def is_moved(status: dict[str, Any]) -> bool:
            ports = {router["name"]: router["url"].rpartition(":")[2] for router in status["routers"]}
            return bool(status["is_ready"]) and ports.get("router-0") == str(port) and len(ports) == 2  # noqa: B023

        results = [Result(name=request.name) for request, _ in asked]
        async with cluster.client() as client:
            streams = [
                asyncio.create_task(client.generate(request, result=result))
                for (request, _), result in zip(asked, results, strict=True)
            ]
            while not all(result.token_ids for result in results):  # noqa: ASYNC110  streams have no event for it
                await asyncio.sleep(0.01)
            cluster.edit(lambda spec: spec["router"]["service"].update(port=port))  # noqa: B023
            await asyncio.wait_for(asyncio.gather(*streams), 120)
        await loop.run_in_executor(None, cluster.wait, f"router-0 serves on port {port}", is_moved)
        for result, (_, answer) in zip(results, asked, strict=True):
            check(result, answer)
        async with cluster.client() as client:
            check(await client.generate(asked[0][0]), asked[0][1])
    assert {name: record["pid"] for name, record in cluster.processes("engine").items()} == {
        name: record["pid"] for name, record in engines.items()
    }


def test_an_invalid_edit_is_refused_and_named(cluster: Cluster) -> None:
    generation = cluster.status()["routers"][0]["generation"]
    cluster.edit(lambda spec: spec["chunkSizes"].update(prefillHeavy=1))
    deadline = time.monotonic() + IN_FORCE_S
    while "chunkSizes.prefillHeavy" not in cluster.tail() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "chunkSizes.prefillHeavy" in cluster.tail()
    status = cluster.status()
    assert status["routers"][0]["generation"] == generation
    assert chunk_sizes(status) == [64, 64, 512, 512]
