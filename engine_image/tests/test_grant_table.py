"""Reservations never promise a block twice and never lose one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.kv_transfer.grants import GrantTable


class Block:
    """A block of the pool; compared by identity."""

    ref_cnt = 0


class Pool:
    """Blocks that are free, and those that somebody holds."""

    def __init__(self, num_blocks: int) -> None:
        self.free = [Block() for _ in range(num_blocks)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        assert num_blocks <= len(self.free)
        taken = self.free[:num_blocks]
        self.touch(taken)
        return taken

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: list[Block]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free.append(block)


def test_claimed_grant_does_not_lapse_and_an_open_one_does() -> None:
    pool = Pool(10)
    table = GrantTable(pool)
    assert table.reserve("a", 4, expires_s=1.0)
    assert table.reserve("b", 4, expires_s=1.0)
    assert table.claim("a", "r1")
    table.expire(2.0)
    assert (table.num_blocks, table.num_open, pool.get_num_free_blocks()) == (4, 0, 6)


def test_grant_is_claimed_once_and_not_after_it_lapsed() -> None:
    table = GrantTable(Pool(10))
    assert table.reserve("a", 4, expires_s=1.0)
    assert not table.reserve("a", 1, expires_s=1.0)
    assert table.claim("a", "r1")
    assert not table.claim("a", "r2")
    table.release_open("a")
    assert table.is_claimed_by("r1")
    table.close("r1")
    assert not table.claim("a", "r3")
    assert table.num_blocks == 0


@pytest.mark.parametrize(("held", "kept"), [(0, 5), (4, 1), (5, 0), (7, 0)])
def test_blocks_that_the_request_did_not_take_stay_reserved(held: int, kept: int) -> None:
    pool = Pool(10)
    table = GrantTable(pool)
    assert table.reserve("a", 5, expires_s=1.0)
    assert table.claim("a", "r1")
    table.lift("r1")
    assert pool.get_num_free_blocks() == 10
    taken = pool.get_new_blocks(held)
    table.lower("r1", len(taken))
    assert table.num_blocks == kept
    assert pool.get_num_free_blocks() == 10 - held - kept


def test_a_part_goes_into_the_grants_blocks_and_lets_it_live_on() -> None:
    pool = Pool(10)
    table = GrantTable(pool)
    assert table.reserve("a", 4, expires_s=1.0, ttl_s=2.0)
    grant = table.get_open("a")
    assert grant is not None
    blocks = table.begin_read(grant, 3)
    assert len(blocks) == 3
    table.expire(50.0)  # a read keeps it
    assert table.num_blocks == 4
    assert table.end_read("a", blocks, is_whole=True, now_s=60.0) is grant
    assert (grant.held, len(grant.blocks), grant.expires_s) == (blocks, 1, 62.0)
    assert table.claim("a", "r1")
    assert table.get_open("a") is None
    table.lift("r1")
    assert pool.get_num_free_blocks() == 10
    # What was read is evicted last, its beginning last of all.
    assert pool.free[-3:] == blocks[::-1]


def test_blocks_that_a_read_fills_stay_out_of_the_pool_whatever_becomes_of_the_grant() -> None:
    pool = Pool(10)
    table = GrantTable(pool)
    assert table.reserve("a", 4, expires_s=1.0)
    grant = table.get_open("a")
    assert grant is not None
    blocks = table.begin_read(grant, 9)
    assert len(blocks) == 4
    table.release("a")
    assert (table.num_blocks, pool.get_num_free_blocks()) == (4, 6)
    assert table.end_read("a", blocks, is_whole=True, now_s=0.0) is None
    assert (table.num_blocks, pool.get_num_free_blocks()) == (0, 10)


def test_a_failed_read_leaves_empty_blocks_and_a_claimed_grant_none() -> None:
    pool = Pool(10)
    table = GrantTable(pool)
    assert table.reserve("a", 4, expires_s=1.0)
    grant = table.get_open("a")
    assert grant is not None
    assert table.end_read("a", table.begin_read(grant, 2), is_whole=False, now_s=0.0) is grant
    assert (len(grant.blocks), grant.held) == (4, [])
    blocks = table.begin_read(grant, 2)
    assert table.claim("a", "r1")
    assert table.end_read("a", blocks, is_whole=True, now_s=0.0) is None
    table.close("r1")
    assert pool.get_num_free_blocks() == 10


def test_cached_blocks_take_the_place_of_empty_ones_and_shared_ones_count_once() -> None:
    pool = Pool(10)
    table = GrantTable(pool)
    shared = pool.get_new_blocks(1)
    cached = pool.free[-1]
    assert table.reserve("a", 3, expires_s=1.0)
    grant = table.get_open("a")
    assert grant is not None
    assert table.hold(grant, [*shared, cached]) == 2
    # One block of three is somebody's anyway.
    assert (table.num_blocks, pool.get_num_free_blocks()) == (2, 7)
    assert table.hold(grant, pool.free[:4]) == 1
    table.release("a")
    assert (table.num_blocks, pool.get_num_free_blocks()) == (0, 9)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "claim", "lift", "close", "release", "release_open", "expire", "read", "end"]),
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    max_size=40,
)


def read(table: GrantTable, reads: list[tuple[str, list[Block]]], action: str, key: str, number: int) -> None:
    """Begins or ends a read."""
    if action == "read" and (grant := table.get_open(key)) is not None:
        reads.append((key, table.begin_read(grant, number)))
    elif action == "end" and reads:
        key, blocks = reads.pop(number % len(reads))
        table.end_read(key, blocks, is_whole=number % 2 == 0, now_s=10)


def end_all(table: GrantTable, reads: list[tuple[str, list[Block]]]) -> None:
    for key, blocks in reads:
        table.end_read(key, blocks, is_whole=True, now_s=50)
    table.expire(10**6)
    for number in range(7):
        table.close(f"r{number}")


@given(ACTIONS)
def test_no_block_is_lost_or_promised_twice(actions: list[tuple[str, int, int]]) -> None:
    pool = Pool(12)
    table = GrantTable(pool)
    reads: list[tuple[str, list[Block]]] = []
    for step, (action, who, number) in enumerate(actions):
        key, request_id = f"k{who}", f"r{number}"
        if action == "reserve":
            assert table.reserve(key, number, expires_s=step + 3) in (True, False)
        elif action == "claim" and not table.is_claimed_by(request_id):
            table.claim(key, request_id)
        elif action == "lift" and table.is_claimed_by(request_id):
            table.lift(request_id)
            table.lower(request_id, 0)
        elif action == "close":
            table.close(request_id)
        elif action == "release":
            table.release(key)
        elif action == "release_open":
            table.release_open(key)
        elif action == "expire":
            table.expire(step)
        else:
            read(table, reads, action, key, number)
        assert table.num_blocks + pool.get_num_free_blocks() == 12
    end_all(table, reads)
    assert pool.get_num_free_blocks() == 12
    assert table.num_open == 0
