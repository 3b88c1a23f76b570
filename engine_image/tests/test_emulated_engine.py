"""Emulated engines through their streams: exact tokens, modelled times."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import pytest
from engine_process import EngineProcess, attach, emulation

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

PROMPT = list(range(100, 420))
STEP_S = 0.03
# 320 tokens of 1 MB each take 0.32 s at 1 GB/s.
CLOCK = {"base_s": STEP_S, "chunk_s": 0.05, "kv_bytes": 64 << 20, "kv_bytes_per_token": 10**6, "link_bytes_per_s": 1e9}


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    directory = tmp_path_factory.mktemp("emulated")
    engines = [EngineProcess(name, tiny_model, directory / name, *emulation(**CLOCK)) for name in ("left", "right")]
    try:
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.close()


async def hand_off(source, prompt) -> tuple[list[int], wire.KvHandle]:
    """Runs a few tokens and hands off; returns the tokens and where their KV lies."""
    slot = await source.submit(prompt, {"max_tokens": 40})
    await source.tokens(slot, 5)
    await source.send(hand_offs=[wire.HandOff(slot=slot, fence=1)])
    finished = await source.finished(slot)
    assert finished.reason == sampling_pb2.FINISH_REASON_HANDED_OFF
    return source.answers[slot].tokens, finished.kv


async def is_idle(router) -> None:
    await router.until(lambda: (load := router.newest("load")) and not (load.kv_blocks_used or load.kv_blocks_pinned))


async def test_iterations_take_their_modelled_time(engines):
    async with attach(engines[0]) as router:
        begun_s = time.monotonic()
        await router.run(PROMPT, {"max_tokens": 41})
        taken_s = time.monotonic() - begun_s
        prefill_s, *durations = [message.load.iteration.duration_s for message in router.messages if message.slots]
        assert prefill_s == pytest.approx(STEP_S + CLOCK["chunk_s"], rel=0.25)
        assert median(durations) == pytest.approx(STEP_S, rel=0.1)
        # No engine is faster than its clock; on a busy machine some iterations are slower.
        assert taken_s > 41 * STEP_S + CLOCK["chunk_s"] - 0.01


async def test_a_prompt_longer_than_the_chunk_takes_an_iteration_per_chunk(engines):
    async with attach(engines[0]) as router:
        await router.run(list(range(1000)), {"max_tokens": 1})
        chunks = [
            message.load.iteration.prefill_tokens
            for message in router.messages
            if message.load.iteration.prefill_tokens
        ]
        assert chunks[-1] == 1000 - 512


async def test_tokens_are_a_function_of_prompt_and_position(engines):
    async with attach(engines[0]) as left, attach(engines[1]) as right:
        whole = await left.run(PROMPT, {"max_tokens": 40})
        assert await right.run(PROMPT, {"max_tokens": 40}) == whole
        assert await right.run([*PROMPT[:-1], 7], {"max_tokens": 40}) != whole
        assert len(set(whole)) > 30


async def test_a_move_is_exact_and_takes_the_links_time(engines):
    prompt = [9, *PROMPT]  # not in the target's prefix cache: all of it moves
    async with attach(engines[0]) as source, attach(engines[1]) as target:
        whole = await source.run(prompt, {"max_tokens": 40})
        tokens, kv = await hand_off(source, prompt)
        begun_s = time.monotonic()
        slot = await target.submit(prompt, {"max_tokens": 40}, output_token_ids=tokens, kv=kv, fence=2)
        await target.tokens(slot, len(tokens) + 1)
        pause_s = time.monotonic() - begun_s
        await target.finished(slot)
        assert target.answers[slot].tokens == whole
        transfer_s = kv.num_tokens * CLOCK["kv_bytes_per_token"] / CLOCK["link_bytes_per_s"]
        assert pause_s > transfer_s + STEP_S - 0.005
        assert target.newest("load").pull_bytes_per_s == pytest.approx(1e9, rel=0.1)
        await is_idle(source)  # without a release: the reader has told the source
        await is_idle(target)


async def test_a_move_whose_blocks_were_copied_pauses_for_an_iteration_and_not_for_the_link(engines):
    prompt = [11, *PROMPT]
    async with attach(engines[0]) as source, attach(engines[1]) as target:
        whole = await source.run(prompt, {"max_tokens": 60})
        slot = await source.submit(prompt, {"max_tokens": 60})
        await source.tokens(slot, 2)
        assert (await target.grant(1, len(prompt) + 32)).is_granted
        await source.send(kv_offer_requests=[wire.KvOfferRequest(offer_id=1, slot=slot, fence=1)])
        (offer,) = await source.until(lambda: source.find("kv_offers"))
        assert offer.kv.num_tokens == len(PROMPT)
        await target.send(part_pulls=[wire.PartPull(grant_id=1, token_ids=prompt[: len(PROMPT)], kv=offer.kv)])
        (part,) = await target.until(lambda: target.find("parts_pulled"))
        assert (part.num_tokens, part.reason) == (len(PROMPT), "")
        # The copy took the link's time, and the request went on meanwhile.
        assert len(source.answers[slot].tokens) > 0.3 / STEP_S
        await source.send(released_offer_ids=[1], hand_offs=[wire.HandOff(slot=slot, fence=1)])
        kv = (await source.finished(slot)).kv
        tokens = list(source.answers[slot].tokens)
        begun_s = time.monotonic()
        follow = await target.submit(prompt, {"max_tokens": 60}, output_token_ids=tokens, kv=kv, grant_id=1, fence=2)
        await target.tokens(follow, len(tokens) + 1)
        assert time.monotonic() - begun_s < 0.3  # the link's time alone would be more
        await target.finished(follow)
        assert target.answers[follow].tokens == whole
        await is_idle(source)
        await is_idle(target)


async def test_a_prompt_is_cut_between_two_engines(engines):
    """The first one sends no token; the second one says when the KV has come, and has the tokens of the whole."""
    prompt, cut = [13, *PROMPT], 200
    async with attach(engines[0]) as source, attach(engines[1]) as target:
        assert source.hello.cuts_prompts
        whole = await source.run(prompt, {"max_tokens": 20}, cache_salt="alone")
        slot = await source.submit(prompt, {"max_tokens": 20}, split_prompt_tokens=cut)
        finished = await source.finished(slot)
        assert (finished.reason, finished.num_output_tokens) == (sampling_pb2.FINISH_REASON_HANDED_OFF, 0)
        assert finished.kv.num_tokens == cut
        assert not source.answers[slot].tokens
        assert (await target.grant(3, len(prompt) + 1)).is_granted
        begun_s = time.monotonic()
        follow = await target.submit(prompt, {"max_tokens": 20}, kv=finished.kv, grant_id=3, fence=2)
        (part,) = await target.until(lambda: target.find("parts_pulled"))
        assert (part.grant_id, part.num_tokens, part.reason) == (3, cut, "")
        assert time.monotonic() - begun_s > cut * CLOCK["kv_bytes_per_token"] / CLOCK["link_bytes_per_s"]
        await target.finished(follow)
        assert target.answers[follow].tokens == whole
        computed = [message.load.iteration.prefill_tokens for message in target.messages]
        assert sum(computed) == len(prompt) - cut
        await source.send(released_slots=[slot])
        await is_idle(source)
        await is_idle(target)


async def test_offers_and_parts_that_cannot_be_are_refused_by_name(engines):
    async with attach(engines[0]) as source, attach(engines[1]) as target:
        slot = await source.submit([12, *PROMPT], {"max_tokens": 40})
        await source.tokens(slot, 2)
        asked = [
            wire.KvOfferRequest(offer_id=1, slot=slot + 7, fence=1),
            wire.KvOfferRequest(offer_id=2, slot=slot, fence=9),
        ]
        await source.send(kv_offer_requests=asked)
        offers = await source.until(lambda: len(found := source.find("kv_offers")) == 2 and found)
        assert [(offer.offer_id, offer.reason) for offer in offers] == [(1, "unknown"), (2, "fence")]
        foreign = wire.KvHandle(fingerprint="another model", transfer_params_json="{}")
        await target.send(part_pulls=[wire.PartPull(grant_id=5, token_ids=[1], kv=foreign)])
        (part,) = await target.until(lambda: target.find("parts_pulled"))
        assert (part.grant_id, part.num_tokens, part.reason) == (5, 0, "handle")
        await source.send(aborts=[wire.Abort(slot=slot)])
        await is_idle(source)


async def test_a_pull_from_a_dead_engine_is_recomputed_exactly(engines):
    prompt = [8, *PROMPT]
    async with attach(engines[1]) as source:
        whole = await source.run(prompt, {"max_tokens": 40})
        tokens, kv = await hand_off(source, prompt)
    engines[1].close()
    async with attach(engines[0]) as target:
        before = target.newest("load")
        assert await target.run(prompt, {"max_tokens": 40}, output_token_ids=tokens, kv=kv, fence=2) == whole
        await is_idle(target)
        assert target.newest("load").num_recomputed_pulls == (before.num_recomputed_pulls if before else 0) + 1
