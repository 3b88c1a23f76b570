"""Kills routers at random under streams that resume, and compares every answer with stock vLLM's.

    python e2e/soak_routers.py --kills 900

Half of the clients use HTTP (``examples/resumable_client.py``), half gRPC. Meanwhile requests are moved between
engines at random, and every second kill follows such a move at once: between grant and hand-off. Strategies are
switched too. ``sluice up`` starts killed routers again, later and later; at least one is always left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "e2e")]

import resuming_streams  # noqa: E402 - found by the path above
from examples.resumable_client import StreamError  # noqa: E402
from soak_cluster import Soak, run_soak_cluster  # noqa: E402

from sluice.v1 import control_pb2, control_pb2_grpc  # noqa: E402

if TYPE_CHECKING:
    import workload
    from cluster import Cluster

PORTS = "29500-29799"
SERVICE_PORT = 29500
# Of routers before one is killed: the clients of all of them have somewhere to go.
MIN_SERVING = 2


class RouterSoak(Soak):
    """Streams, moves and kills of several routers; see ``Soak``."""

    def __init__(
        self, cluster: Cluster, known: list[tuple[workload.Request, workload.Answer]], rng: random.Random
    ) -> None:
        super().__init__(cluster, known, rng)
        self._streams: dict[str, resuming_streams.ResumingStream] = {}

    def _ports(self, port: str) -> list[str]:
        return [f"127.0.0.1:{record['ports'][port]}" for record in self.cluster.processes("router").values()]

    async def run_clients(self, num_streams: int) -> None:
        """Streams one request after the other on each of several clients, until it is over."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(num_streams):
                tasks.create_task(self._run_client(client, is_http=bool(number % 2)))

    async def _run_client(self, client: httpx.AsyncClient, *, is_http: bool) -> None:
        while not self.is_over:
            request, answer = next(self.known)
            stream = resuming_streams.ResumingStream(request)
            self._streams[request.name] = stream
            step = self.rng.choice((1, -1))
            try:
                if is_http:
                    urls = [f"http://{address}" for address in self._ports("http")]
                    await stream.run_http(client, urls[::step])
                else:
                    await stream.run_grpc(lambda step=step: self._ports("grpc")[::step])
                stream.check(answer)
                self.counts["exact"] += 1
            except (AssertionError, StreamError, grpc.aio.AioRpcError) as error:
                got = f"{len(stream.token_ids)} of {len(answer.token_ids)} tokens, resumed {stream.num_resumed} times"
                self.fail(f"{request.name}: {got}: {type(error).__name__}: {str(error)[:300]}")
            self.counts["resumed streams"] += stream.num_resumed > 0
            self.counts["resumptions"] += stream.num_resumed
            self._streams.pop(request.name, None)

    async def move_one(self, router: str) -> None:
        """Asks a router to move one of its requests, whichever they are."""
        names = [name for name, stream in self._streams.items() if len(stream.token_ids) > 1]
        if not names:
            return
        engine = self.rng.choice(sorted(self.cluster.processes("engine")))
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with grpc.aio.insecure_channel(self.cluster.address(router, "control")) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                for name in self.rng.sample(names, len(names)):
                    asked = control_pb2.MoveRequest(request_id=name, engine_id=engine)
                    if (await stub.Move(asked, timeout=1)).is_started:
                        self.counts["moves begun"] += 1
                        return

    async def kill(self, num_kills: int, pause_s: float) -> None:
        """Kills routers that serve, one after the other, with random pauses; one is always left."""
        async with httpx.AsyncClient(trust_env=False, timeout=1) as client:
            while self.counts["kills"] < num_kills:
                await asyncio.sleep(self.rng.uniform(0.0, 2 * pause_s))
                serving = await self._list_serving(client)
                if len(serving) < MIN_SERVING:
                    continue
                name = self.rng.choice(sorted(serving))
                if self.counts["kills"] % 2:
                    await self.move_one(name)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(serving[name], signal.SIGKILL)
                    self.counts["kills"] += 1
                if self.counts["kills"] % 10 == 0:
                    print(f"{time.strftime('%H:%M:%S')} {dict(self.counts)}", flush=True)

    async def _list_serving(self, client: httpx.AsyncClient) -> dict[str, int]:
        """Process ids of the routers that serve."""
        serving = {}
        for name, record in self.cluster.processes("router").items():
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.get(f"http://127.0.0.1:{record['ports']['http']}/readyz")
                if answer.status_code == 200:
                    serving[name] = int(record["pid"])
        return serving

    async def run(self, *, num_kills: int, num_streams: int, pause_s: float, switch_s: float) -> None:
        """Runs all of it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.run_clients(num_streams))
            switches = tasks.create_task(self.switch_strategies(switch_s))
            await self.kill(num_kills, pause_s)
            self.is_over = True
            switches.cancel()


def main() -> None:
    """Runs the soak; ends with status 1 if an answer was wrong or lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=900)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--routers", type=int, default=6, help="sluice up waits up to 30 s to start one again")
    parser.add_argument("--pause-s", type=float, default=2.0, help="mean pause between two kills")
    parser.add_argument("--switch-s", type=float, default=20.0, help="mean pause between two switches of the strategy")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with run_soak_cluster(
        ports=PORTS, service_port=SERVICE_PORT, num_routers=given.routers, num_requests=220, tokens_per_hop=96
    ) as (cluster, known):
        soak = RouterSoak(cluster, known, random.Random(given.seed))
        started_s = time.monotonic()
        asyncio.run(
            soak.run(num_kills=given.kills, num_streams=given.streams, pause_s=given.pause_s, switch_s=given.switch_s)
        )
    print(json.dumps({**soak.counts, "seconds": round(time.monotonic() - started_s)}, indent=1))
    sys.exit(bool(soak.failures))


if __name__ == "__main__":
    main()
