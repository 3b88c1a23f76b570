"""Sluice, the default strategy, on real engines: exact under a tight objective, and when an engine dies."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from strategy_cluster import ask_all, use_strategy
from test_faults import NUM_STREAMS, stream_through

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

# Less than an iteration takes beside prompts: iterations are as small as the strategy makes them.
TPOT_MS = 10


@pytest.fixture
def sluice(two_engines: Cluster) -> Iterator[Cluster]:
    """Two engines with little KV, and an objective that is tight for them."""
    use_strategy(two_engines, "Sluice")
    before = two_engines.manifest["spec"]["slo"]
    two_engines.edit_plan(lambda spec: spec.update(slo={**before, "tpotMilliseconds": TPOT_MS}))
    yield two_engines
    two_engines.edit_plan(lambda spec: spec.update(slo=before))


async def test_every_token_is_exact_under_a_tight_objective(
    sluice: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    await ask_all(sluice, known[:96], num_streams=12)
    sluice.wait_idle()


async def test_clients_do_not_notice_a_killed_engine(sluice: Cluster, known: list[tuple[Request, Answer]]) -> None:
    before = sluice.pid("engine-1")
    await stream_through(sluice, known[:NUM_STREAMS], lambda: sluice.kill("engine-1", signal.SIGKILL))
    sluice.wait_replaced("engine-1", before)
    sluice.wait_idle()
