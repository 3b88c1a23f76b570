"""What a grant is refused for, and how the granted blocks reach the request; without vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_grant_table import Pool

from sluice_core.kv_blocks import KvBlocks
from sluice_engine.core_messages import GrantAnswer, GrantCommand
from sluice_engine.kv_transfer.grants import EngineRoom, GrantAllocator, GrantTable, answer_grant, find_refusal

# 30 of 100 blocks are free; a grant of 20 beside prefills that need 10 just fits.
ROOM = EngineRoom(
    is_draining=False,
    share=1.0,
    has_seat=True,
    kv=KvBlocks(total=100, used=55, granted=15),
    num_prefill_blocks=10,
    is_recompute_waiting=False,
)
BELOW_WATERMARK = {"share": 0.8, "num_prefill_blocks": 0}


@pytest.mark.parametrize(
    ("changes", "num_blocks", "reason"),
    [
        ({}, 20, ""),
        ({}, 21, "kv"),
        ({"num_prefill_blocks": 11}, 20, "kv"),
        ({"is_recompute_waiting": True}, 1, "kv"),
        ({"is_draining": True}, 1, "draining"),
        ({"has_seat": False}, 1, "seqs"),
        # 55 used + 15 granted + 10 = 0.8 * 100.
        (BELOW_WATERMARK, 10, ""),
        (BELOW_WATERMARK, 11, "watermark"),
        (BELOW_WATERMARK | {"share": 0.7}, 1, "watermark"),
    ],
)
def test_a_grant_needs_room_beside_what_is_promised(changes: dict[str, Any], num_blocks: int, reason: str) -> None:
    assert find_refusal(num_blocks, replace(ROOM, **changes)) == reason


@pytest.mark.parametrize(
    ("num_blocks", "changes", "answer"),
    [
        (20, {}, GrantAnswer(key="one", is_granted=True, ttl_s=2.0)),
        (20, {"has_seat": False}, GrantAnswer(key="one", is_granted=False, reason="seqs", ttl_s=0.0)),
        # The pool has fewer free blocks than were counted.
        (27, {"num_prefill_blocks": 0}, GrantAnswer(key="one", is_granted=False, reason="kv", ttl_s=0.0)),
    ],
    ids=["granted", "refused", "pool too small"],
)
def test_an_answer_reserves_what_it_promises_until_it_lapses(
    num_blocks: int, changes: dict[str, Any], answer: GrantAnswer
) -> None:
    pool = Pool(25)
    table = GrantTable(pool)
    command = GrantCommand(key="one", num_tokens=320, cause="backflow", ttl_s=2.0)
    assert answer_grant(command, num_blocks, replace(ROOM, **changes), table, now_s=100.0) == answer
    assert table.num_blocks == (num_blocks if answer.is_granted else 0)
    table.expire(101.99)
    assert table.num_blocks == (num_blocks if answer.is_granted else 0)
    table.expire(102.0)
    assert (table.num_blocks, pool.get_num_free_blocks()) == (0, 25)


def test_only_open_grants_lapse_each_at_its_own_time() -> None:
    table = GrantTable(Pool(12))
    for number in range(4):
        assert table.reserve(f"k{number}", number + 1, expires_s=float(number))
    assert table.claim("k0", "r0")
    assert (table.num_blocks, table.num_open) == (10, 3)
    table.expire(2.0)
    assert (table.num_blocks, table.num_open) == (1 + 4, 1)
    table.release_open("k0")
    table.release_open("k9")
    table.close("nobody")
    assert table.is_claimed_by("r0")
    assert not table.is_claimed_by("r1")
    table.release_open("k3")
    assert (table.num_blocks, table.num_open) == (1, 0)


def test_a_reservation_takes_the_last_block_and_no_more() -> None:
    table = GrantTable(Pool(4))
    assert not table.reserve("a", 5, expires_s=1.0)
    assert table.reserve("a", 4, expires_s=1.0)
    assert not table.reserve("b", 1, expires_s=1.0)
    assert table.reserve("nothing", 0, expires_s=1.0)


class Manager:
    """vLLM's KV cache manager: it gives each request the blocks that it asks for, if they are free."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.options: list[dict[str, Any]] = []
        self.held: dict[str, list[int]] = {}

    def allocate_slots(self, request: Any, num_new_tokens: int, **options: Any) -> list[int] | None:
        self.options.append(options)
        if num_new_tokens > self.pool.get_num_free_blocks() - options.get("reserved_blocks", 0):
            return None
        blocks = self.pool.get_new_blocks(num_new_tokens)
        self.held.setdefault(request.request_id, []).extend(blocks)
        return blocks

    def count_blocks_of(self, request_id: str) -> int:
        return len(self.held.get(request_id, ()))


def make_allocator(num_free: int, granted: int) -> tuple[Manager, GrantTable]:
    """A grant of some blocks that ``arriving`` has claimed, and as many other blocks as are free."""
    pool = Pool(num_free + granted)
    manager, table = Manager(pool), GrantTable(pool)
    GrantAllocator(manager, table, manager.count_blocks_of)
    assert table.reserve("one", granted, expires_s=1.0)
    assert table.claim("one", "arriving")
    return manager, table


def ask(manager: Manager, name: str, num_blocks: int, **options: Any) -> list[int] | None:
    return manager.allocate_slots(SimpleNamespace(request_id=name), num_blocks, **options)


def test_a_granted_request_gets_its_blocks_and_nobody_else_does() -> None:
    manager, table = make_allocator(num_free=2, granted=5)
    assert ask(manager, "other", 3, reserved_blocks=0) is None
    assert table.num_blocks == 5
    # vLLM's own reserve for others would leave it none.
    assert ask(manager, "arriving", 5, reserved_blocks=4, has_scheduled_reqs=True) is not None
    assert manager.options[-1] == {"reserved_blocks": 0, "has_scheduled_reqs": False}
    assert (table.num_blocks, table.is_claimed_by("arriving")) == (0, False)
    assert ask(manager, "other", 2, reserved_blocks=1) is None
    assert manager.options[-1] == {"reserved_blocks": 1}


def test_a_pull_keeps_the_room_of_the_token_that_follows_it() -> None:
    manager, table = make_allocator(num_free=0, granted=5)
    assert ask(manager, "arriving", 4, delay_cache_blocks=True) is not None
    assert (table.num_blocks, table.is_claimed_by("arriving")) == (1, True)
    assert ask(manager, "other", 1) is None
    assert ask(manager, "arriving", 1) is not None
    assert (table.num_blocks, table.is_claimed_by("arriving")) == (0, False)


def test_a_granted_request_that_finds_too_little_keeps_its_reservation() -> None:
    manager, table = make_allocator(num_free=1, granted=5)
    assert ask(manager, "arriving", 7) is None
    assert (table.num_blocks, table.is_claimed_by("arriving")) == (5, True)
