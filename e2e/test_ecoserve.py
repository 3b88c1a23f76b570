"""EcoServe on real engines: load alone makes engines change between prefills and decodes. Tokens are stock vLLM's."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import aiohttp
import pytest
from strategy_cluster import WANTED_EVENTS, ask_all, ask_until_seen, read_counter, use_strategy

if TYPE_CHECKING:
    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

NUM_REQUESTS = 96
NUM_STREAMS = 12  # at a time


@pytest.fixture
def ecoserve(two_engines: Cluster) -> Cluster:
    """Two engines in one macro instance."""
    use_strategy(two_engines, "EcoServe")
    return two_engines


async def count_changes(cluster: Cluster, change: str) -> int:
    """Splits or merges of macro instances since the router's start."""
    return await read_counter(cluster, "sluice_strategy_events_total", f'event="macro_instance_{change}"')


async def count_switches(cluster: Cluster) -> int:
    """Phase switches of all engines since their start."""
    found = 0
    async with aiohttp.ClientSession() as session:
        for record in cluster.processes("engine").values():
            async with session.get(f"http://127.0.0.1:{record['ports']['metrics']}/metrics") as answer:
                (value,) = re.findall(r"^sluice_engine_phase_switches_total (.+)$", await answer.text(), re.MULTILINE)
                found += int(float(value))
    return found


async def test_load_alone_switches_phases_and_every_token_is_exact(
    ecoserve: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    switches = await ask_until_seen(ecoserve, known[:NUM_REQUESTS], NUM_STREAMS, lambda: count_switches(ecoserve))
    print(f"phase switches: {switches}")
    assert switches >= WANTED_EVENTS
    ecoserve.wait_idle()


async def test_macro_instances_merge_and_split_under_streams_as_engines_go_and_come(
    ecoserve: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    ecoserve.edit_plan(lambda spec: spec.update(parameters={"macroInstanceLeast": 1, "macroInstanceMost": 1}))
    for replicas, change in ((1, "merge"), (2, "split")):
        before = await count_changes(ecoserve, change)
        ecoserve.edit(lambda spec, replicas=replicas: spec.update(replicas=replicas))
        async with asyncio.timeout(240):
            while await count_changes(ecoserve, change) == before:
                await ask_all(ecoserve, known[:NUM_STREAMS], NUM_STREAMS)
    ecoserve.wait_idle()
