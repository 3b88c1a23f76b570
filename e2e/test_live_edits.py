"""Edits of the manifest take effect in about a second, without a restart and without a broken stream."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import time
from collections import Counter
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import workload
from cluster import Result
from test_exactness import check
from workload import Request

from sluice.v1 import control_pb2
from sluice_core.records import IterationShape
from sluice_core.strategies import STRATEGIES
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.autotune.engine_facts import MeasuredEngineFacts, find_engine_facts
from sluice_operator.autotune.search_constraints import make_constraints
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.search_process import COMMAND, SearchRunner
from sluice_operator.autotune.workload import read_workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from cluster import Client, Cluster
    from workload import Answer

    from sluice_core.strategies import Strategy

pytestmark = pytest.mark.engine

Edit = dict[str, Any]

# A generous limit for shared machines; the test prints the measured time.
IN_FORCE_S = 15.0
SWITCH_S = 60.0
SHORT_TOKENS = 16
# Until both routers have measured all four engines: light load leaves some of them without work.
MEASURED_S = 120.0
# A search has less time in the product. Here it shares the cores with all else that runs.
SEARCHED_S = 300.0
ANOTHER_PORT = 26900
# Of the example manifest.
MAX_BATCH_TOKENS = 2048
ONE_DECODE = IterationShape(num_decodes=1, decode_context_tokens=100)
TUNED = {
    "mode": "Apply",
    "bounds": {
        "prefillHeavy": {"min": 1, "max": 3},
        "chunkSizes": {"prefillHeavy": {"min": 128, "max": 1024}, "decodeHeavy": {"min": 0, "max": 128}},
    },
}


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
    "parameters": ({"parameters": {"watermarkPercent": 50, "earlyRejection": "Random"}}, lambda _: True),
}


@contextlib.asynccontextmanager
async def keep_streaming(client: Client, known: list[tuple[Request, Answer]]) -> AsyncIterator[None]:
    """Asks every request again and again while the block runs, and checks each answer.

    However long an edit takes, streams are in flight when it takes effect. The block begins once each has a token.
    """
    is_over = False
    first = [Result(name=request.name) for request, _ in known]

    async def ask(request: Request, answer: Answer, result: Result) -> None:
        check(await client.generate(request, result=result), answer)
        while not is_over:
            check(await client.generate(request), answer)

    async with asyncio.TaskGroup() as tasks:
        for (request, answer), result in zip(known, first, strict=True):
            tasks.create_task(ask(request, answer, result))
        while not all(result.token_ids for result in first):  # noqa: ASYNC110  streams have no event for it
            await asyncio.sleep(0.01)
        yield
        is_over = True


async def find_late_placement(cluster: Cluster, client: Client, number: int) -> str:
    """Asks for a prompt that no engine can serve in time; returns how the router chose an engine for it.

    It depends on a parameter, and no status has parameters.
    """
    late = Request(
        name=f"late-{number}",
        prompt_token_ids=workload.make_prompt(1500, random.Random(number)),
        sampling={"temperature": 0.0, "max_tokens": 1},
    )
    await client.generate(late, ttft_slo_ms=1)
    async with aiohttp.ClientSession() as session, session.get(f"{cluster.url()}/debug/requests/{late.name}") as log:
        story = await log.json()
    (placement,) = [event for event in story["events"] if event["event"] == "placement"]
    return str(placement["decision"]["reason"])


@pytest.mark.parametrize("name", EDITS)
async def test_a_live_edit_breaks_no_stream(cluster: Cluster, known: list[tuple[Request, Answer]], name: str) -> None:
    edit, is_in_force = EDITS[name]
    before = cluster.status()
    first = list(EDITS).index(name) * 8
    asked = known[first : first + 8]
    loop = asyncio.get_running_loop()

    async with cluster.client() as client:
        if "parameters" in edit:
            assert await find_late_placement(cluster, client, 1) == "least_late"
        async with keep_streaming(client, asked):
            start_s = time.monotonic()
            after = await loop.run_in_executor(
                None, cluster.edit_plan, lambda spec: merge(spec, edit), is_in_force, IN_FORCE_S
            )
            print(f"{name}: in force after {time.monotonic() - start_s:.2f} s, status calls included")
        # Requests under the new settings are exact too, and have the objectives that are in force.
        for request, answer in asked[:4]:
            check(await client.generate(request), answer)
        if "parameters" in edit:
            assert await find_late_placement(cluster, client, 2) == "random"
    async with aiohttp.ClientSession() as session, session.get(f"{cluster.url()}/debug/requests/{request.name}") as log:
        admitted = next(event for event in (await log.json())["events"] if event["event"] == "admitted")
    slo = cluster.manifest["spec"]["slo"]
    assert admitted["ttft_slo_s"] == slo["ttftMilliseconds"] / 1000
    assert admitted["tpot_slo_s"] == slo["tpotMilliseconds"] / 1000
    assert {e["pid"] for e in after["engines"]} == {e["pid"] for e in before["engines"]}


def walk_all_switches(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Orders strategies so that each is followed by each other one exactly once; begins and ends with the first.

    Source: Hierholzer's way to an Eulerian circuit.
    """
    unused = {before: [after for after in strategies if after is not before] for before in strategies}
    walk, path = [], [strategies[0]]
    while path:
        if ahead := unused[path[-1]]:
            path.append(ahead.pop())
        else:
            walk.append(path.pop())
    walk.reverse()
    assert Counter(pairwise(walk)) == Counter(permutations(strategies, 2))
    return walk


async def test_no_switch_of_strategy_breaks_a_stream(cluster: Cluster, known: list[tuple[Request, Answer]]) -> None:
    """Walks from strategy to strategy over every ordered pair, under streams that never pause."""
    in_force = cluster.manifest["spec"]["strategy"]
    walk = walk_all_switches(sorted(STRATEGIES.values(), key=lambda strategy: strategy.title != in_force))
    pids = {engine["pid"] for engine in cluster.status()["engines"]}
    # Short answers, of three kinds: for most of a switch they are waited for.
    begun = [workload.shorten(*pair, SHORT_TOKENS) for pair in known[15:90:30]]
    async with cluster.client() as client, keep_streaming(client, known[:4]):
        for before, after in pairwise(walk):
            print(f"from {before.title} to {after.title}")  # a failure shows the last one
            async with asyncio.timeout(SWITCH_S):
                status = await switch(cluster, after)
                # These begin under the new strategy; those that run have begun under the old one.
                answers = await asyncio.gather(*(client.generate(request) for request, _ in begun))
            for result, (_, answer) in zip(answers, begun, strict=True):
                check(result, answer)
            assert {engine["pid"] for engine in status["engines"]} == pids


async def switch(cluster: Cluster, strategy: Strategy) -> dict[str, Any]:
    """Edits the strategy, and waits until every engine has taken the plan; returns the status."""
    loop = asyncio.get_running_loop()
    sizes = cluster.manifest["spec"]["chunkSizes"]
    prefill, decode = strategy.sliders.resolve(sizes["prefillHeavy"], sizes["decodeHeavy"], MAX_BATCH_TOKENS)

    def is_taken(status: dict[str, Any]) -> bool:
        has_faults = any(engine["last_fault"] for engine in status["engines"])
        return chunk_sizes(status) == sorted([prefill, prefill, decode, decode]) and not has_faults

    return await loop.run_in_executor(
        None, cluster.edit_plan, lambda spec: spec.update(strategy=strategy.title), is_taken, IN_FORCE_S
    )


async def read_errors(cluster: Cluster, router: str) -> list[float]:
    """Returns the error of a router's latency model at each engine that it knows; it is 0 where none was measured."""
    async with aiohttp.ClientSession() as session, session.get(f"{cluster.url(router)}/metrics") as answer:
        metrics = await answer.text()
    errors = re.findall(r'^sluice_latency_model_error_ratio\{engine=".+"\} (.+)$', metrics, re.MULTILINE)
    return [float(error) for error in errors]


async def test_routers_learn_the_latency_model_that_a_search_uses(
    cluster: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    statuses = []
    for router in ("router-0", "router-1"):
        async with cluster.client(router) as client:
            async with asyncio.timeout(MEASURED_S):
                # The routers have to measure each engine's speed. How well they know it depends on the machine's load.
                while len(errors := await read_errors(cluster, router)) < 4 or 0.0 in errors:
                    await asyncio.gather(*(client.generate(request) for request, _ in known))
            assert max(errors) < math.inf
            statuses.append(await client.control.GetStatus(control_pb2.GetStatusRequest(), timeout=10))
        print(f"{router}: errors of the latency model {errors}")
    spec = check_manifest({**cluster.manifest, "spec": {**cluster.manifest["spec"], "autotune": TUNED}}).spec
    engine, missing = find_engine_facts(spec, statuses)
    workload = read_workload(statuses)
    assert isinstance(engine, MeasuredEngineFacts), missing
    assert workload is not None
    sliders = resolve_sliders(spec)
    constraints = make_constraints(spec)
    request = SearchRequest(
        constraints=constraints, spec_sliders=sliders, in_force=sliders, workload=workload, engine=engine
    )
    found = await SearchRunner().call(COMMAND, request.to_json(), SEARCHED_S, SearchResult.from_json)
    print(f"{engine}; {found}")
    # An iteration of the tiny model takes milliseconds, or more on a busy machine.
    assert 1e-4 < engine.profile.estimate_shape_s(ONE_DECODE) < 1.0
    assert found.goodput_rps >= found.in_force_goodput_rps > 0.0
    assert 0.0 <= found.attainment <= 1.0
    assert 1 <= found.sliders.num_prefill_heavy <= 3
    assert 128 <= found.sliders.prefill_heavy_tokens <= 1024
    assert found.sliders.decode_heavy_tokens <= 128


async def test_routers_get_another_port_and_workers_once_their_streams_have_ended(
    cluster: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    old_port, engines = cluster.manifest["spec"]["router"]["service"]["port"], cluster.processes("engine")
    loop = asyncio.get_running_loop()
    asked = known[160:176]
    for port, workers in ((ANOTHER_PORT, 2), (old_port, 1)):

        def is_moved(status: dict[str, Any]) -> bool:
            ports = {router["name"]: router["url"].rpartition(":")[2] for router in status["routers"]}
            names = [f"router-{replica}" for replica in range(2)]
            names += [f"{name}-1" for name in names] if workers == 2 else []  # noqa: B023
            of_first = {ports.get(name) for name in names if name.startswith("router-0")}
            return bool(status["is_ready"]) and ports.keys() == set(names) and of_first == {str(port)}  # noqa: B023

        results = [Result(name=request.name) for request, _ in asked]
        async with cluster.client() as client:
            streams = [
                asyncio.create_task(client.generate(request, result=result))
                for (request, _), result in zip(asked, results, strict=True)
            ]
            while not all(result.token_ids for result in results):  # noqa: ASYNC110  streams have no event for it
                await asyncio.sleep(0.01)
            cluster.edit(lambda spec: merge(spec, {"router": {"workers": workers, "service": {"port": port}}}))  # noqa: B023
            await asyncio.wait_for(asyncio.gather(*streams), 120)
        await loop.run_in_executor(None, cluster.wait, f"{workers} workers serve on port {port}", is_moved)
        for result, (_, answer) in zip(results, asked, strict=True):
            check(result, answer)
        async with cluster.client() as client:
            check(await client.generate(asked[0][0]), asked[0][1])
        # New connections: the kernel chooses the worker of each.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            for _ in range(16):
                async with session.get(f"{cluster.url()}/readyz") as answer:
                    assert answer.status == 200
    assert {name: record["pid"] for name, record in cluster.processes("engine").items()} == {
        name: record["pid"] for name, record in engines.items()
    }


def test_an_invalid_edit_is_refused_and_named(cluster: Cluster) -> None:
    valid = cluster.manifest
    generation = cluster.status()["routers"][0]["generation"]
    cluster.edit(lambda spec: spec["chunkSizes"].update(prefillHeavy=1))
    deadline = time.monotonic() + IN_FORCE_S
    while "chunkSizes.prefillHeavy" not in cluster.tail() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "chunkSizes.prefillHeavy" in cluster.tail()
    status = cluster.status()
    assert status["routers"][0]["generation"] == generation
    assert chunk_sizes(status) == [64, 64, 512, 512]
    # The plan never changed, so taking the edit back makes no new one that the fixture could wait for.
    cluster.write(valid)
