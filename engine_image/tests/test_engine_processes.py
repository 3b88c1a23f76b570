"""Real engines, started as users start them, through their streams."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from engine_process import EngineProcess, attach

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import plan_pb2, sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engine

PROMPT = list(range(40, 140))
SAMPLED = {"temperature": 0.8, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": 0.2, "top_p": 0.9}


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two engines, started side by side; the last tests end them."""
    directory = tmp_path_factory.mktemp("engines")
    engines = [EngineProcess(name, tiny_model, directory / name) for name in ("left", "right")]
    try:
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture
def left(engines: list[EngineProcess]) -> EngineProcess:
    return engines[0]


@pytest.fixture
def right(engines: list[EngineProcess]) -> EngineProcess:
    return engines[1]


async def is_idle(router) -> None:
    """Every KV block is free, and none is granted or pinned."""
    await router.until(
        lambda: (
            (load := router.newest("load"))
            and not (load.kv_blocks_used or load.kv_blocks_granted or load.kv_blocks_pinned or load.running_decodes)
        )
    )


async def test_tokens_stream_one_message_per_iteration(left):
    async with attach(left) as router:
        tokens = await router.run(PROMPT, {"max_tokens": 20})
        carrying = [message for message in router.messages if message.slots]
        assert (len(tokens), len(carrying)) == (20, 20)
        assert [message.load.iteration.number for message in carrying] == sorted(
            message.load.iteration.number for message in carrying
        )
        assert all(message.load.iteration.duration_s > 0 for message in carrying)
        await is_idle(router)


async def test_two_routers_share_an_engine_and_see_only_their_own_tokens(left):
    async with attach(left, "router-1") as first, attach(left, "router-2") as second:
        alone = await first.run(PROMPT)
        both = await asyncio.gather(first.run(PROMPT), second.run(PROMPT))
        assert both == [alone, alone]
        await is_idle(first)
        assert left.metrics()["sluice_engine_routers"] == 2


async def test_parameters_mean_what_they_say(left):
    async with attach(left) as router:
        greedy = await router.run(PROMPT)
        sampled = await router.run(PROMPT, SAMPLED)
        assert sampled == await router.run(PROMPT, SAMPLED)
        assert sampled != greedy
        banned = await router.run(PROMPT, {"logit_bias": {greedy[0]: -100.0}})
        assert banned[0] != greedy[0]
        slot = await router.submit(PROMPT, {"stop_token_ids": [greedy[3]], "num_logprobs": 2})
        finished = await router.finished(slot)
        assert finished.reason == sampling_pb2.FINISH_REASON_STOP
        assert finished.stop_token_id == greedy[3]
        assert len(router.answers[slot].logprobs) == len(router.answers[slot].tokens) == greedy.index(greedy[3]) + 1
        constraint = sampling_pb2.StructuredOutput(regex="[0-9]{4}")
        slot = await router.submit(PROMPT, {"structured_output": constraint, "ignore_eos": False})
        assert (await router.finished(slot)).reason == sampling_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ([], {}, "prompt_token_ids"),
        ([1] * 4096, {}, "4096"),
        ([999_999], {}, "999999"),
        (PROMPT, {"temperature": -1.0}, "temperature"),
        (PROMPT, {"max_tokens": 0}, "max_tokens"),
        (PROMPT, {"logit_bias": {999_999: 1.0}}, "logit_bias"),
        (PROMPT, {"structured_output": sampling_pb2.StructuredOutput(json_schema="{")}, "sampling"),
    ],
    ids=["empty", "too long", "not a token", "negative temperature", "no tokens", "bias of no token", "broken schema"],
)
async def test_a_bad_submit_ends_its_slot_and_nothing_else(left, prompt, sampling, named):
    async with attach(left) as router:
        finished = await router.finished(await router.submit(prompt, sampling))
        assert finished.reason == sampling_pb2.FINISH_REASON_REFUSED
        assert named in finished.error
        assert len(await router.run(PROMPT, {"max_tokens": 2})) == 2


async def test_an_abort_is_answered_and_frees_its_blocks(left):
    async with attach(left) as router:
        slot = await router.submit(PROMPT, {"max_tokens": 3000})
        await router.tokens(slot, 3)
        await router.send(aborts=[wire.Abort(slot=slot)])
        assert (await router.finished(slot)).reason == sampling_pb2.FINISH_REASON_ABORTED
        await is_idle(router)


async def test_a_chunk_size_is_in_force_at_the_next_iteration(left):
    async with attach(left) as router:
        generation = time.time_ns()
        for chunk in (64, 512):
            generation += 1
            part = wire.Configure(
                cluster_uid="c",
                generation=generation,
                role=plan_pb2.ROLE_DECODE_HEAVY,
                chunk_size_tokens=chunk,
                strategy="taichi",
            )
            await router.send(configure=part)
            await router.until(lambda: (found := router.newest("configured")) and found.generation == generation)  # noqa: B023
            assert router.newest("configured").chunk_size_tokens == chunk
            router.messages.clear()
            await router.run([chunk, *range(300, 500)], {"max_tokens": 2})
            prefills = [message.load.iteration.prefill_tokens for message in router.messages]
            assert max(prefills) == min(chunk, 201)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [95, 96, 97], ids=lambda length: f"{length} tokens")
async def test_a_running_decode_moves_to_another_engine_exactly(left, right, sampling, length):
    sampling = {"max_tokens": 160, "num_logprobs": 1, **sampling}  # long enough for a grant on a busy machine
    prompt = list(range(600, 600 + length - 5))
    async with attach(left) as source, attach(right) as target:
        whole = await source.submit(prompt, sampling)
        await source.finished(whole)
        slot = await source.submit(prompt, {**sampling}, fence=1)
        await source.tokens(slot, 5)
        assert (await target.grant(1, len(prompt) + 160)).is_granted
        await source.send(hand_offs=[wire.HandOff(slot=slot, fence=1)])
        finished = await source.finished(slot)
        assert finished.reason == sampling_pb2.FINISH_REASON_HANDED_OFF
        part = source.answers[slot]
        assert finished.kv.num_tokens == len(prompt) + len(part.tokens) - 1
        moved = await target.submit(prompt, sampling, output_token_ids=part.tokens, kv=finished.kv, grant_id=1, fence=2)
        await target.finished(moved)
        await source.send(released_slots=[slot])
        assert target.answers[moved].tokens == source.answers[whole].tokens
        assert part.logprobs + target.answers[moved].logprobs == source.answers[whole].logprobs
        await is_idle(source)
        await is_idle(target)
        assert target.newest("load").num_moved_in > 0
        # What UCX has chosen between the two.
        await target.until(lambda: target.newest("load").transport == "tcp")


async def test_kv_of_another_model_is_left_alone(left, right):
    async with attach(left) as source, attach(right) as target:
        slot = await source.submit(PROMPT, {"max_tokens": 20})
        await source.tokens(slot, 5)
        await source.send(hand_offs=[wire.HandOff(slot=slot, fence=1)])
        kv = (await source.finished(slot)).kv
        kv.fingerprint = "another/model"
        tokens = await target.run(PROMPT, {"max_tokens": 20}, output_token_ids=source.answers[slot].tokens, kv=kv)
        assert tokens == await source.run(PROMPT, {"max_tokens": 20})
        await source.send(released_slots=[slot])
        await is_idle(source)


async def test_a_stream_that_breaks_loses_and_doubles_no_token(left):
    """Seeded sampling with logprobs, cut three times: the same as in one piece."""
    sampling = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "num_logprobs": 2}
    async with attach(left) as router:
        slot = await router.submit(PROMPT, sampling)
        await router.finished(slot)
        whole = router.answers[slot]
    async with attach(left) as router:
        slot = await router.submit(PROMPT, sampling, request_id="cut", fence=9)
        await router.tokens(slot, 1)
        answer = router.answers[slot]
    # What was on the way is lost with each stream.
    for num_tokens in (20, 45, 60):
        async with attach(left) as router:
            slot = await router.resume(answer, request_id="cut", fence=9)
            await router.tokens(slot, num_tokens)
            if num_tokens == 60:
                finished = await router.finished(slot)
                await is_idle(router)
    assert finished.reason == sampling_pb2.FINISH_REASON_LENGTH
    assert (answer.tokens, answer.logprobs) == (whole.tokens, whole.logprobs)


async def test_requests_of_a_lost_stream_are_held_for_the_next_one(left):
    async with attach(left) as router:
        await router.submit(PROMPT, {"max_tokens": 3000}, request_id="held", fence=4)
        await router.tokens(0, 2)
    async with attach(left) as router:
        [held] = router.hello.held
        assert (held.request_id, held.fence) == ("held", 4)
        assert held.num_output_tokens >= 2
        await router.send(aborts=[wire.Abort(held_request_id="held")])
        await is_idle(router)


def test_one_thread_polls_for_all_process_groups_of_gloo(left):
    names = [path.read_text().strip() for path in Path(f"/proc/{left.core().pid}/task").glob("*/comm")]
    assert names.count("gloo_tcp_loop") == 1


def test_probes_answer(left):
    assert {path: left.get(path) for path in ("/livez", "/readyz", "/metrics", "/other")} == {
        "/livez": 200,
        "/readyz": 200,
        "/metrics": 200,
        "/other": 404,
    }


# --- the tests below end engines, in this order ----------------------------------------------------------------------


async def test_a_dead_engine_core_takes_the_engine_along_at_once(right):
    async with attach(right) as router:
        await router.submit(PROMPT, {"max_tokens": 3000})
        await router.tokens(0, 2)
        right.core().kill()
        await router.until(lambda: router.has_ended)
        assert "EngineDeadError" in router.messages[-1].fault
    assert await asyncio.to_thread(right.wait_end) == 5


async def test_a_restarted_engine_has_another_epoch_and_a_killed_one_leaves_nothing(engines, tiny_model, tmp_path):
    with_epoch = []
    engine = EngineProcess("right", tiny_model, tmp_path / "again")
    engines.append(engine)
    await asyncio.to_thread(engine.wait_ready)
    for target in (engines[0], engine):
        async with attach(target) as router:
            with_epoch.append(router.hello.epoch)
            assert len(await router.run(PROMPT)) == 16
    assert len(set(with_epoch)) == 2
    core = engine.core()
    engine.close()
    await asyncio.to_thread(psutil.wait_procs, [core], 5)
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE


async def test_sigterm_drains(left):
    async with attach(left) as router:
        slot = await router.submit(PROMPT, {"max_tokens": 600})
        await router.tokens(slot, 2)
        core = left.core()
        left.process.terminate()
        await router.until(lambda: router.newest("load").is_draining)
        assert await asyncio.to_thread(left.get, "/readyz") == 503
        new = await router.submit(list(range(900, 1000)))
        assert (await router.finished(new)).reason == sampling_pb2.FINISH_REASON_RETURNED
        assert router.find("proposals")[0].cause == wire.MOVE_CAUSE_DRAIN
        await router.finished(slot)
        assert len(router.answers[slot].tokens) == 600
        await router.until(lambda: router.has_ended)
    assert await asyncio.to_thread(left.wait_end) == 0
    assert not core.is_running()
