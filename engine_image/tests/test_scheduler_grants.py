"""Admission of moves: engines that are full, routers that ask for too much, and pulls that never come."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from engine_harness import BLOCK_SIZE, Part, make_prompt, run_alone, wait

from sluice_engine import core_messages

if TYPE_CHECKING:
    from engine_harness import Engine

pytestmark = pytest.mark.engine

NUM_BLOCKS = 39  # of the small engines
LONG = 600


def start_decodes(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[Part]:
    parts = [engine.submit(prompt, max_tokens=LONG, **sampling) for prompt in prompts]
    wait([engine], lambda: all(part.tokens for part in parts))
    return parts


def hand_off(engine: Engine, part: Part) -> Part:
    assert engine.command(core_messages.HandOffCommand(request_id=part.request_id)).is_accepted
    wait([engine], lambda: part.is_over)
    assert part.handed_off is not None
    return part


def test_grant_takes_blocks_and_gives_them_back_when_it_lapses(small_pair: tuple[Engine, Engine]) -> None:
    engine = small_pair[0]
    answer = engine.grant("one", 10 * BLOCK_SIZE, ttl_s=0.3)
    assert (answer.is_granted, answer.ttl_s) == (True, 0.3)
    assert engine.load().kv_blocks_granted == 10
    wait([engine], lambda: engine.load().kv_blocks_granted == 0, 5)
    assert engine.load().kv_blocks_used == 0


def test_released_grant_is_free_at_once(small_pair: tuple[Engine, Engine]) -> None:
    engine = small_pair[0]
    assert engine.grant("one", 10 * BLOCK_SIZE).is_granted
    engine.command(core_messages.ReleaseGrantCommand(key="one"))
    engine.command(core_messages.ReleaseGrantCommand(key="one"))
    assert engine.load().kv_blocks_granted == 0


def test_two_routers_cannot_be_promised_the_same_room(small_pair: tuple[Engine, Engine]) -> None:
    engine = small_pair[0]
    answers = [engine.grant(f"router-{index % 2}:{index}", 8 * BLOCK_SIZE, ttl_s=0.5) for index in range(8)]
    assert [answer.is_granted for answer in answers] == [True] * 4 + [False] * 4
    assert {answer.reason for answer in answers[4:]} == {"kv"}
    assert engine.load().kv_blocks_granted == 32


HALF = {"watermark_percent": "50"}


@pytest.mark.parametrize(
    ("plan", "cause", "reason"),
    [
        ({"is_draining": True}, "backflow", "draining"),
        ({"role": "P-heavy", "parameters": HALF}, "degrade", "watermark"),
        ({"role": "D-heavy", "parameters": HALF}, "degrade", ""),
        ({"role": "P-heavy", "parameters": HALF}, "drain", ""),
    ],
    ids=["draining", "watermark", "d-heavy", "drain"],
)
def test_grant_is_refused_with_a_reason(
    plan: dict[str, Any], cause: str, reason: str, small_pair: tuple[Engine, Engine]
) -> None:
    engine = small_pair[0]
    assert not engine.configure(128, strategy="taichi", **plan).error
    answer = engine.grant("one", 25 * BLOCK_SIZE, cause=cause, ttl_s=0.2)
    assert (answer.is_granted, answer.reason) == (not reason, reason)


def test_every_seat_of_the_batch_is_promised_once(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    answers = [engine.grant(str(index), 33, ttl_s=0.3) for index in range(33)]
    assert [answer.is_granted for answer in answers] == [True] * 32 + [False]
    assert answers[-1].reason == "seqs"


def test_granted_request_keeps_its_room_on_an_engine_that_fills_up(small_pair: tuple[Engine, Engine]) -> None:
    """Prompts that arrive after the grant would take all blocks; the granted request runs beside the one that fits."""
    source, target = small_pair
    prompt = make_prompt(5 * BLOCK_SIZE)
    expected = run_alone(source, prompt, max_tokens=40)
    (part,) = start_decodes(source, [prompt])
    assert target.grant("one", 12 * BLOCK_SIZE).is_granted
    others = [target.submit(make_prompt(12 * BLOCK_SIZE, salt=index), max_tokens=200) for index in range(4)]
    wait([target], lambda: bool(others[1].tokens))
    load = target.load()
    assert (load.kv_blocks_granted, load.queued_requests) == (12, 2)
    hand_off(source, part)
    moved = target.resume(part, part.tokens, prompt, grant_key="one", max_tokens=40)
    wait(small_pair, lambda: moved.is_over)
    assert not others[-1].is_over
    assert (part.tokens + moved.tokens)[:40] == expected.tokens
    assert target.load().num_recomputed_pulls == load.num_recomputed_pulls
    wait(small_pair, lambda: all(other.is_over for other in others))


def test_full_engines_that_hand_over_to_each_other_never_stop(small_pair: tuple[Engine, Engine]) -> None:
    """Without admission four such requests stopped for ever. Each that finds no room goes on where it is."""
    prompts = [make_prompt(8 * BLOCK_SIZE, salt=index) for index in range(4)]
    alone = [run_alone(small_pair[0], prompt, max_tokens=90).tokens for prompt in prompts]
    at = [0, 0, 1, 1]
    parts = [small_pair[at[index]].submit(prompt, max_tokens=90) for index, prompt in enumerate(prompts)]
    tokens: list[list[int]] = [[] for _ in prompts]
    outcomes = {"moved": 0, "blocked": 0}
    for step in range(24):
        index = step % 4
        wait(small_pair, lambda: parts[index].is_over or len(parts[index].tokens) >= 2)  # noqa: B023
        if parts[index].is_over:
            continue
        source, target = small_pair[at[index]], small_pair[1 - at[index]]
        # Twice what it needs: two routers that overbook.
        held = target.grant(f"greedy-{step}", 9 * BLOCK_SIZE, ttl_s=0.05)
        answer = target.grant(f"{step}", 12 * BLOCK_SIZE)
        if not answer.is_granted:
            assert (answer.reason, held.is_granted or True) == ("kv", True)
            outcomes["blocked"] += 1
            continue
        if not source.command(core_messages.HandOffCommand(request_id=parts[index].request_id)).is_accepted:
            target.command(core_messages.ReleaseGrantCommand(key=f"{step}"))
            continue
        part = parts[index]
        wait(small_pair, lambda: part.is_over)  # noqa: B023
        if part.handed_off is None:
            target.command(core_messages.ReleaseGrantCommand(key=f"{step}"))
            continue
        tokens[index] += part.tokens
        parts[index] = target.resume(part, tokens[index], prompts[index], grant_key=f"{step}", max_tokens=90)
        at[index] = 1 - at[index]
        outcomes["moved"] += 1
    wait(small_pair, lambda: all(part.is_over for part in parts))
    assert [before + part.tokens for before, part in zip(tokens, parts, strict=True)] == alone
    assert outcomes["moved"] > 0


def test_pull_without_room_is_given_up_after_two_seconds_and_recomputed(small_pair: tuple[Engine, Engine]) -> None:
    source, target = small_pair
    prompt = make_prompt(10 * BLOCK_SIZE)
    expected = run_alone(source, prompt, max_tokens=40)
    (part,) = start_decodes(source, [prompt])
    hand_off(source, part)
    held = target.grant("someone-else", 30 * BLOCK_SIZE, ttl_s=2.5)
    assert held.is_granted
    started_s = time.monotonic()
    moved = target.resume(part, part.tokens, prompt, max_tokens=40)
    wait(small_pair, lambda: moved.is_over)
    assert time.monotonic() - started_s > 2.0
    assert (part.tokens + moved.tokens)[:40] == expected.tokens
    assert target.load().num_recomputed_pulls == 1
    # The source heard that no one reads, long before its lease ends.
    wait(small_pair, lambda: source.load().kv_blocks_pinned == 0, 5)


def test_released_request_is_free_at_once_and_a_late_reader_recomputes_nothing_wrong(
    pair: tuple[Engine, Engine],
) -> None:
    source, _ = pair
    (part,) = start_decodes(source, [make_prompt(4 * BLOCK_SIZE)])
    hand_off(source, part)
    assert source.load().kv_blocks_pinned >= 4
    source.command(core_messages.ReleaseCommand(request_id=part.request_id))
    source.command(core_messages.ReleaseCommand(request_id=part.request_id))
    load = source.load()
    assert (load.kv_blocks_pinned, load.kv_blocks_used) == (0, 0)


BROKEN = {
    "no JSON": lambda handle: "{",
    "no blocks": lambda handle: json.dumps(handle | {"remote_block_ids": [[]]}),
    "one block too many": lambda handle: json.dumps(
        handle | {"remote_block_ids": [[*handle["remote_block_ids"][0], 1]]}
    ),
    "a block twice": lambda handle: json.dumps(
        handle | {"remote_block_ids": [[handle["remote_block_ids"][0][0]] * len(handle["remote_block_ids"][0])]}
    ),
    "a negative block": lambda handle: json.dumps(
        handle | {"remote_block_ids": [[-1, *handle["remote_block_ids"][0][1:]]]}
    ),
    "a block that is none": lambda handle: json.dumps(
        handle | {"remote_block_ids": [[10**9, *handle["remote_block_ids"][0][1:]]]}
    ),
    "two groups": lambda handle: json.dumps(handle | {"remote_block_ids": handle["remote_block_ids"] * 2}),
    "a word for a port": lambda handle: json.dumps(handle | {"remote_port": "http"}),
    "no port": lambda handle: json.dumps({name: value for name, value in handle.items() if name != "remote_port"}),
    "other parallelism": lambda handle: json.dumps(handle | {"tp_size": 2}),
    "a port where no one listens": lambda handle: json.dumps(
        handle | {"remote_port": 21999, "remote_engine_id": "nobody"}
    ),
    "an engine that is gone": lambda handle: json.dumps(handle | {"remote_engine_id": "nobody"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_handle_is_recomputed_and_kills_nothing(name: str, pair: tuple[Engine, Engine]) -> None:
    source, target = pair
    prompt = make_prompt(4 * BLOCK_SIZE + 5)
    expected = run_alone(source, prompt, max_tokens=40)
    before = target.load().num_recomputed_pulls
    (part,) = start_decodes(source, [prompt])
    hand_off(source, part)
    handle = json.loads(part.handed_off.transfer_params)
    part.handed_off = core_messages.HandedOffKv(
        num_tokens=part.handed_off.num_tokens, transfer_params=BROKEN[name](handle)
    )
    moved = target.resume(part, part.tokens, prompt, max_tokens=40)
    wait(pair, lambda: moved.is_over)
    assert (part.tokens + moved.tokens)[:40] == expected.tokens
    assert target.load().num_recomputed_pulls == before + 1
    source.command(core_messages.ReleaseCommand(request_id=part.request_id))


def test_handle_that_counts_more_tokens_than_the_request_has_is_trimmed(pair: tuple[Engine, Engine]) -> None:
    """The router may cut the request back; only what the request has is read, and the tokens stay exact."""
    source, target = pair
    prompt = make_prompt(4 * BLOCK_SIZE)
    expected = run_alone(source, prompt, max_tokens=120)
    (part,) = start_decodes(source, [prompt])
    wait([source], lambda: len(part.tokens) > BLOCK_SIZE + 3)
    hand_off(source, part)
    moved = target.resume(part, part.tokens[:2], prompt, max_tokens=40)
    wait(pair, lambda: moved.is_over)
    assert part.tokens[:2] + moved.tokens == expected.tokens[:40]
