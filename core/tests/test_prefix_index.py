"""Which engines hold the beginning of a prompt."""

import random

import pytest

from sluice_core.records import EngineId
from sluice_core.scheduling.prefix_index import PrefixIndex

A, B = EngineId("a"), EngineId("b")


def make_chain(trunk, num_blocks):
    """Name the blocks of a prompt; all share ten blocks, then each goes its own way."""
    return [position if position < 10 else 1000 * (trunk + 1) + position for position in range(num_blocks)]


@pytest.mark.parametrize("seed", range(100))
def test_leading_blocks_are_those_that_a_look_at_each_would_find(seed):
    rng = random.Random(seed)
    index = PrefixIndex()
    expected = {}
    hashes = make_chain(rng.randrange(4), rng.randrange(46))
    for number in range(rng.randrange(6)):
        held = {block for _ in range(rng.randrange(7)) for block in make_chain(rng.randrange(3), rng.randrange(41))}
        index.update(EngineId(f"e{number}"), held, ())
        depth = next((position for position, block in enumerate(hashes) if block not in held), len(hashes))
        if depth:
            expected[f"e{number}"] = depth
    assert index.match(hashes, 1) == expected


def test_blocks_come_and_go_with_their_engine():
    index = PrefixIndex()
    index.update(A, [1, 2, 3], [])
    index.update(B, [1], [])
    assert index.match([1, 2, 3, 4], 1) == {A: 3, B: 1}
    index.update(A, [], [3, 9])
    assert (index.match([1, 2, 3], 1), index.count_blocks(A)) == ({A: 2, B: 1}, 2)
    assert [block for block in range(5) if index.holds(block)] == [1, 2]
    assert len(index) == 2
    index.forget(A)
    index.forget(A)
    assert index.match([1, 2, 3], 1) == {B: 1}
    assert (A in index, B in index, index.count_blocks(A)) == (False, True, 0)
    assert [block for block in range(5) if index.holds(block)] == [1]


def test_blocks_are_counted_in_tokens():
    index = PrefixIndex()
    index.update(A, [1, 2, 3], [])
    index.update(B, [1, 2], [])
    assert index.match([1, 2, 3], 16) == {A: 48, B: 32}


def test_a_prompt_without_full_blocks_is_nowhere():
    index = PrefixIndex()
    index.update(A, [1], [])
    assert index.match([], 1) == {}


def test_what_is_stored_and_removed_in_one_report_is_gone():
    index = PrefixIndex()
    index.update(A, [1, 2], [2])
    assert index.match([1, 2], 1) == {A: 1}
