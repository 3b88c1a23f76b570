"""DynaServe on real engines: load alone splits prompts and answers between engines. Tokens are stock vLLM's."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest
from strategy_cluster import MOST_ROUNDS, WANTED_EVENTS, ask_all, ask_until_seen, read_counter, use_strategy

if TYPE_CHECKING:
    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

NUM_REQUESTS = 96
NUM_STREAMS = 24  # at a time
SHORT_TOKENS = 65
LONG_TOKENS = 255


@pytest.fixture
def dynaserve(two_engines: Cluster) -> Cluster:
    use_strategy(two_engines, "DynaServe")
    return two_engines


async def count_cut_prompts(cluster: Cluster) -> int:
    """Prompts of which one engine has computed the first part, and another one the rest."""
    return await read_counter(cluster, "sluice_cut_prompts_total", 'result="moved"')


async def count_cut_answers(cluster: Cluster) -> int:
    """Answers that two engines have decoded, each its part."""
    moves = await read_counter(cluster, "sluice_moves_total", 'cause="split",result="done"')
    return moves - await count_cut_prompts(cluster)


async def test_load_alone_splits_answers_and_every_token_is_exact(
    dynaserve: Cluster, known_long: list[tuple[Request, Answer]]
) -> None:
    """Most of the work of these requests is their answer."""
    asked = [pair for pair in known_long if len(pair[0].prompt_token_ids) <= SHORT_TOKENS][:NUM_REQUESTS]
    splits = await ask_until_seen(dynaserve, asked, NUM_STREAMS, lambda: count_cut_answers(dynaserve))
    print(f"answers split: {splits}")
    assert splits >= WANTED_EVENTS
    dynaserve.wait_idle()


async def test_load_alone_splits_prompts_and_every_token_is_exact(
    dynaserve: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    """Their answers are short, and their prompts are of all lengths: like requests would load both engines alike."""
    splits = await ask_until_seen(dynaserve, known[:NUM_REQUESTS], NUM_STREAMS, lambda: count_cut_prompts(dynaserve))
    print(f"prompts split: {splits}")
    assert splits >= WANTED_EVENTS
    dynaserve.wait_idle()


async def test_clients_do_not_notice_that_an_engine_dies_while_prompts_are_cut(
    dynaserve: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    """Each engine computes first parts and goes on with those of the other one, so either may die."""
    engine = "engine-1"
    long = [pair for pair in known if len(pair[0].prompt_token_ids) >= LONG_TOKENS][: NUM_REQUESTS // 2]
    before, num_cut = dynaserve.pid(engine), await count_cut_prompts(dynaserve)
    for _ in range(MOST_ROUNDS):
        answers = asyncio.create_task(ask_all(dynaserve, long, NUM_STREAMS))
        while not (is_cut := await count_cut_prompts(dynaserve) > num_cut) and not answers.done():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if is_cut:
            break
        await answers
    assert is_cut, "no prompt was cut"
    dynaserve.kill(engine, signal.SIGKILL)
    await answers
    dynaserve.wait_replaced(engine, before)
    dynaserve.wait_idle()
