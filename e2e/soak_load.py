"""A steady load of clients that behave badly, while engines are killed and strategies are switched.

No token is lost, and no router grows.

    python e2e/soak_load.py --minutes 60

Each client sends one request after the other, and waits so long between two that engines are about 70 % busy. Of ten
requests seven are read to their end, two are read slowly and one is left in mid-stream. Every answer that is read to
its end is compared with stock vLLM's. The memory of routers is measured all the while.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx
import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "e2e")]

from cluster import Cluster, Result  # noqa: E402 - found by the path above
from soak_cluster import Soak, run_soak_cluster  # noqa: E402

if TYPE_CHECKING:
    import workload

PORTS = "29200-29399"
SERVICE_PORT = 29200
LEAVERS, SLOW_READERS = 0.1, 0.2
# A slow reader takes so many bytes at a time, and rests in between.
SLOW_BYTES = 2048
SLOW_PAUSE_S = 0.15
BUSY_SHARE = 0.7
SAMPLE_S = 2.0
# How much a router's memory may be above what it was after the first third.
MOST_GROWTH = 1.1


class LoadSoak(Soak):
    """Clients, kills and measurements; see ``Soak``.

    Attributes:
        memory: Of each router's process, in MiB.
    """

    def __init__(
        self, cluster: Cluster, known: list[tuple[workload.Request, workload.Answer]], rng: random.Random
    ) -> None:
        super().__init__(cluster, known, rng)
        self.memory: dict[int, list[float]] = {}

    async def run_clients(self, num_clients: int) -> None:
        """Sends requests until it is over."""
        routers = sorted(self.cluster.processes("router"))
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_clients):
                tasks.create_task(self._run_client(routers[number % len(routers)]))

    async def _run_client(self, router: str) -> None:
        while not self.is_over:
            request, answer = next(self.known)
            begun_s = time.monotonic()
            kind = self.rng.random()
            try:
                if kind < LEAVERS:
                    await self._leave(router, request)
                elif kind < LEAVERS + SLOW_READERS:
                    self._check(request, answer, await self._read_slowly(router, request), "slow")
                else:
                    async with self.cluster.client(router) as client:
                        self._check(request, answer, (await client.generate(request)).token_ids, "whole")
            except (AssertionError, httpx.HTTPError, grpc.aio.AioRpcError) as error:
                self.fail(f"{request.name}: {type(error).__name__}: {str(error)[:200]}")
            busy_s = time.monotonic() - begun_s
            await asyncio.sleep(busy_s * (1 - BUSY_SHARE) / BUSY_SHARE * 2 * self.rng.random())

    async def _leave(self, router: str, request: workload.Request) -> None:
        """Closes the connection at a drawn token."""
        result, last = Result(name=request.name), self.rng.randrange(1, 40)
        async with self.cluster.client(router) as client:
            task = asyncio.create_task(client.generate(request, result=result))
            while len(result.token_ids) < last and not task.done():  # noqa: ASYNC110  streams have no event for it
                await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.counts["left"] += 1

    async def _read_slowly(self, router: str, request: workload.Request) -> list[int]:
        """Streams over HTTP, some bytes at a time; returns the tokens."""
        body = {"model": "tiny", "prompt": request.prompt_token_ids, "stream": True, "return_token_ids": True}
        url = f"{self.cluster.url(router)}/v1/completions"
        events = b""
        async with (
            httpx.AsyncClient(trust_env=False, timeout=120) as client,
            client.stream("POST", url, json={**body, **request.sampling}) as answer,
        ):
            assert answer.status_code == 200, (await answer.aread())[:200]
            async for part in answer.aiter_bytes(SLOW_BYTES):
                events += part
                await asyncio.sleep(SLOW_PAUSE_S)
        lines = [line[6:] for line in events.decode().split("\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines[-1][:200]
        chunks = [json.loads(line) for line in lines[:-1]]
        assert all("error" not in chunk for chunk in chunks), lines[-2][:200]
        return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]

    def _check(self, request: workload.Request, answer: workload.Answer, token_ids: list[int], kind: str) -> None:
        if token_ids == answer.token_ids:
            self.counts[f"exact, {kind}"] += 1
        else:
            self.fail(f"{request.name}: {len(token_ids)} tokens, not those of stock vLLM")

    async def kill_engines(self, pause_s: float) -> None:
        """Kills one engine after the other, each once all serve again."""
        while not self.is_over:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * pause_s)
            engine = self.rng.choice(sorted(self.cluster.processes("engine")))
            before = self.cluster.pid(engine)
            self.cluster.kill(engine, signal.SIGKILL)
            self.counts["kills"] += 1
            await asyncio.to_thread(self.cluster.wait_replaced, engine, before)

    async def measure(self) -> None:
        """Samples the memory of routers."""
        while not self.is_over:
            for record in self.cluster.processes("router").values():
                rss = psutil.Process(record["pid"]).memory_info().rss
                self.memory.setdefault(record["pid"], []).append(rss / 2**20)
            await asyncio.sleep(SAMPLE_S)

    async def run(self, *, minutes: float, num_clients: int, pause_s: float, switch_s: float) -> None:
        """Runs all of it."""
        async with asyncio.TaskGroup() as tasks:
            faults = [
                tasks.create_task(self.kill_engines(pause_s)),
                tasks.create_task(self.switch_strategies(switch_s)),
            ]
            tasks.create_task(self.measure())
            tasks.create_task(self.run_clients(num_clients))
            await asyncio.sleep(minutes * 60)
            self.is_over = True
            for task in faults:
                task.cancel()

    def compare_memory(self) -> list[dict[str, float]]:
        """Of each router, the memory in the second and in the last third of the time, in MiB."""
        thirds = [(samples, len(samples) // 3) for samples in self.memory.values()]
        return [
            {
                "after a third": round(statistics.median(samples[third : 2 * third]), 1),
                "at the end": round(statistics.median(samples[-third:]), 1),
            }
            for samples, third in thirds
            if third
        ]


def main() -> None:
    """Runs the soak; ends with status 1 if a token was lost or a router has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--pause-s", type=float, default=60.0, help="mean pause between two kills")
    parser.add_argument("--switch-s", type=float, default=45.0, help="mean pause between two switches of the strategy")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with run_soak_cluster(
        ports=PORTS, service_port=SERVICE_PORT, num_routers=2, num_requests=200, tokens_per_hop=64
    ) as (cluster, known):
        soak = LoadSoak(cluster, known, random.Random(given.seed))
        asyncio.run(
            soak.run(minutes=given.minutes, num_clients=given.clients, pause_s=given.pause_s, switch_s=given.switch_s)
        )
    memory = soak.compare_memory()
    print(json.dumps({**soak.counts, "router MiB": memory}, indent=1))
    has_grown = any(router["at the end"] > MOST_GROWTH * router["after a third"] for router in memory)
    sys.exit(bool(soak.failures) or has_grown)


if __name__ == "__main__":
    main()
