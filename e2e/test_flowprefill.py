"""FlowPrefill on real engines: urgent prompts preempt long ones that have started. Tokens are stock vLLM's."""

from __future__ import annotations

import random
import re
from itertools import islice
from typing import TYPE_CHECKING

import aiohttp
import pytest
import workload
from strategy_cluster import WANTED_EVENTS, ask_until_seen, use_strategy
from workload import Request

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster
    from workload import Answer

pytestmark = pytest.mark.engine

NUM_STREAMS = 24  # at a time
NUM_LONG, SHORT_PER_LONG = 12, 8
LONG_TOKENS = 2500  # of a prompt that takes five iterations of the prefill engine
SHORT_TOKENS = 512  # at most: one iteration
# Objectives that nobody misses, so that deadlines alone decide: those of long prompts are far behind all others.
URGENT_MS, PATIENT_MS = 60_000, 600_000


@pytest.fixture
def flowprefill(two_engines: Cluster) -> Cluster:
    """One prefill and one decode engine."""
    use_strategy(two_engines, "FlowPrefill")
    return two_engines


@pytest.fixture(scope="module")
def long(models: Path) -> list[tuple[Request, Answer]]:
    """Long prompts with the answers of stock vLLM."""
    requests = [
        Request(
            name=f"long-{number}",
            prompt_token_ids=workload.make_prompt(LONG_TOKENS, random.Random(number)),
            sampling={"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
        )
        for number in range(NUM_LONG)
    ]
    answers = workload.answers(models / "tiny", requests, models.parents[1] / "e2e")
    return list(zip(requests, answers, strict=True))


def find_ttft_ms(request: Request) -> int:
    return PATIENT_MS if len(request.prompt_token_ids) > SHORT_TOKENS else URGENT_MS


async def count_preempted(cluster: Cluster) -> int:
    """Started prefills that made way for a more urgent one, of all engines since their start."""
    found = 0
    async with aiohttp.ClientSession() as session:
        for record in cluster.processes("engine").values():
            async with session.get(f"http://127.0.0.1:{record['ports']['metrics']}/metrics") as answer:
                (value,) = re.findall(
                    r"^sluice_engine_suspended_prefills_total (.+)$", await answer.text(), re.MULTILINE
                )
                found += int(float(value))
    return found


async def test_load_alone_preempts_started_prefills_and_every_token_is_exact(
    flowprefill: Cluster, known: list[tuple[Request, Answer]], long: list[tuple[Request, Answer]]
) -> None:
    """While a long prompt is computed, short ones come: each is more urgent."""
    short = (pair for pair in known if len(pair[0].prompt_token_ids) <= SHORT_TOKENS)
    asked = [pair for each in long for pair in (each, *islice(short, SHORT_PER_LONG))]
    preempted = await ask_until_seen(
        flowprefill, asked, NUM_STREAMS, lambda: count_preempted(flowprefill), find_ttft_ms
    )
    print(f"started prefills preempted: {preempted}")
    assert preempted >= WANTED_EVENTS
    flowprefill.wait_idle()
