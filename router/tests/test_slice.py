"""The whole data plane over real gRPC: discovery, link, plan, placement, tokens, ends."""

from __future__ import annotations

import asyncio
import time

from data_plane_harness import CheckingSink, make_request
from fake_engine import FakeCore, FakeEngine, expected_output, make_plan, make_rng, serving

from sluice_router.engine_link import EngineLinks
from sluice_router.router import Router
from sluice_router.settings import Limits
from sluice_router.state import RouterState


async def test_request_streams_from_engine_to_sink():
    engine = FakeEngine(FakeCore("engine-0"))
    async with serving(engine), asyncio.TaskGroup() as tasks:
        state = RouterState(router_id="r", limits=Limits(), rng=make_rng())
        router = Router(state, time.monotonic)
        links = EngineLinks(router, hello_timeout_s=5, rng=make_rng())
        router.connect(links)
        router.apply_plan(make_plan({"engine-0": "D"}))
        links.set_addresses(frozenset({engine.address}), lambda address: tasks.create_task(links.keep(address)))
        async with asyncio.timeout(5):
            while not router.is_ready:
                await asyncio.sleep(0.01)
            request = make_request(20, 30, now=router.now())
            sink = CheckingSink(list(request.prompt_token_ids))
            router.admit(request, sink)
            while not sink.is_over:
                await asyncio.sleep(0.01)
        assert sink.token_ids == expected_output(sink.prompt, 30)
        links.stop()
