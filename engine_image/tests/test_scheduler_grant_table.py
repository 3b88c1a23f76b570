"""Reservations never promise a block twice and never lose one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.kv_transfer.grant_table import GrantTable


class Pool:
    """Blocks by number."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        assert num_blocks <= len(self.free)
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def free_blocks(self, ordered_blocks: list[int]) -> None:
        self.free += ordered_blocks
        assert len(set(self.free)) == len(self.free)


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


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "claim", "lift", "close", "release", "release_open", "expire"]),
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_no_block_is_lost_or_promised_twice(actions: list[tuple[str, int, int]]) -> None:
    pool = Pool(12)
    table = GrantTable(pool)
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
        assert table.num_blocks + pool.get_num_free_blocks() == 12
    table.expire(10**6)
    for number in range(7):
        table.close(f"r{number}")
    assert pool.get_num_free_blocks() == 12
    assert table.num_open == 0
