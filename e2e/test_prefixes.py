"""A conversation's next turn goes where its last one is cached, on real engines."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import workload

if TYPE_CHECKING:
    from cluster import Cluster

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32  # of an engine that computes on the CPU


async def complete(session: aiohttp.ClientSession, prompt: list[int], **fields: Any) -> tuple[dict[str, Any], str]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    async with session.post("/v1/completions", json={**body, "return_token_ids": True, **fields}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers["x-request-id"]


async def find_chosen(session: aiohttp.ClientSession, request_id: str) -> tuple[int, list[int]]:
    """Returns the cached tokens that the router knew of on the engine it chose, and on all."""
    async with session.get(f"/debug/requests/{request_id}") as answer:
        story = await answer.json()
    placement = next(event for event in story["events"] if event["event"] == "placement")
    cached = {each["engine_id"]: each["cached_tokens"] for each in placement["candidates"]}
    return cached[placement["decision"]["engine_id"]], sorted(cached.values())


async def test_the_second_turn_of_a_conversation_lands_where_its_first_is(cluster: Cluster) -> None:
    prompt = workload.make_prompt(700, random.Random(77))
    async with aiohttp.ClientSession(cluster.url()) as session:
        first, request_id = await complete(session, prompt)
        assert set((await find_chosen(session, request_id))[1]) == {0}
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        turn = [*prompt, *first["choices"][0]["token_ids"], *workload.make_prompt(50, random.Random(78))]
        alone, request_id = await complete(session, turn, cache_salt="nobody else's")
        assert set((await find_chosen(session, request_id))[1]) == {0}
        assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        second, request_id = await complete(session, turn)
        chosen, _ = await find_chosen(session, request_id)
    # Its prefill and its decode may have run on two engines; the turn may land on either.
    assert chosen >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= chosen
    # What was found there is what would have been computed.
    assert second["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
