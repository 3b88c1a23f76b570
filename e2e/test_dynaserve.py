"""DynaServe on real engines: load alone splits answers between engines. Tokens are stock vLLM's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from strategy_cluster import WANTED_EVENTS, ask_until_seen, run_strategy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

PORTS = "24600-25099"
HTTP_PORT = 25100
NUM_REQUESTS = 96
NUM_STREAMS = 12  # at a time


@pytest.fixture(scope="module")
def dynaserve(tmp_path_factory: pytest.TempPathFactory, example: dict[str, Any], models: Path) -> Iterator[Cluster]:
    """Two engines."""
    folder = tmp_path_factory.mktemp("dynaserve")
    with run_strategy(folder, example, "DynaServe", models=models, ports=PORTS, http_port=HTTP_PORT) as cluster:
        yield cluster


async def count_splits(cluster: Cluster) -> int:
    """Moves of the cause ``split`` that are done."""
    async with aiohttp.ClientSession() as session, session.get(f"{cluster.url('router-0')}/metrics") as answer:
        pattern = r'^sluice_moves_total\{cause="split",result="done"\} (.+)$'
        return sum(int(float(value)) for value in re.findall(pattern, await answer.text(), re.MULTILINE))


async def test_load_alone_splits_answers_and_every_token_is_exact(
    dynaserve: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    splits = await ask_until_seen(dynaserve, known[:NUM_REQUESTS], NUM_STREAMS, lambda: count_splits(dynaserve))
    print(f"splits: {splits}")
    assert splits >= WANTED_EVENTS
    dynaserve.wait_idle()
