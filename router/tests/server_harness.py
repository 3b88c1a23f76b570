"""Whole routers in this process, for tests of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

import aiohttp
from data_plane_harness import until
from edge_fakes import write_model
from fake_engine import FakeCore, FakeEngine, make_plan, serving
from google.protobuf import json_format

from sluice_router.server import RouterServer
from sluice_router.settings import RouterSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PD = {"p0": "P", "d0": "D"}


def make_settings(folder: Path, **changes: object) -> RouterSettings:
    """Settings of a router whose model, plan (two engines, ``PD``) and list of engines lie in a folder."""
    write_model(folder)
    (folder / "plan.json").write_text(json_format.MessageToJson(make_plan(PD)))
    fields: dict[str, object] = {
        "http_port": 0,
        "model": str(folder),
        "engines": f"file:{folder / 'engines.json'}",
        "plan": str(folder / "plan.json"),
        "grace_s": 20,
    }
    return RouterSettings(**{**fields, **changes})


def write_engine_addresses(folder: Path, *engines: FakeEngine) -> None:
    """Lets routers find engines."""
    (folder / "engines.json").write_text(json.dumps([engine.address for engine in engines]))


@contextlib.asynccontextmanager
async def running(settings: RouterSettings) -> AsyncIterator[RouterServer]:
    server = RouterServer(settings)
    task = asyncio.create_task(server.run())
    await until(lambda: "http" in server.ports or task.done())
    try:
        yield server
    finally:
        server.stop()
        async with asyncio.timeout(30):
            await task


@contextlib.asynccontextmanager
async def serving_ready(folder: Path, *, step_s: float = 0.005, **changes: object) -> AsyncIterator[RouterServer]:
    """A router that is ready, with the engines of its plan."""
    engines = [FakeEngine(FakeCore(name), step_s=step_s) for name in PD]
    async with serving(*engines), running(make_settings(folder, **changes)) as server:
        write_engine_addresses(folder, *engines)
        await until_ready(server)
        yield server


async def get(server: RouterServer, path: str, port: str = "metrics") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{server.ports[port]}{path}") as answer,
    ):
        return answer.status, await answer.text()


async def until_ready(server: RouterServer) -> None:
    await until(lambda: server.router.is_ready)
    assert (await get(server, "/readyz"))[0] == 200
