import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice_core.kv_blocks import KvBlocks, blocks_for_tokens


@given(num_tokens=st.integers(0, 10**6), block_size=st.integers(1, 256))
def test_blocks_hold_the_tokens_and_no_block_is_spare(num_tokens, block_size):
    blocks = blocks_for_tokens(num_tokens, block_size)
    assert blocks * block_size >= num_tokens
    assert (blocks - 1) * block_size < num_tokens or blocks == 0


@pytest.mark.parametrize(("tokens", "size"), [(-1, 16), (1, 0)], ids=["negative", "no block"])
def test_impossible_counts_are_refused(tokens, size):
    with pytest.raises(ValueError):
        blocks_for_tokens(tokens, size)


@example(total=9, used=2, granted=-1, pinned=1)
@example(total=9, used=0, granted=0, pinned=0)
@example(total=9, used=0, granted=1, pinned=0)
@example(total=9, used=1, granted=0, pinned=0)
@example(total=9, used=9, granted=2, pinned=9)
@example(total=9, used=10, granted=0, pinned=0)
@example(total=9, used=1, granted=0, pinned=2)
@given(total=st.integers(-5, 50), used=st.integers(-5, 50), granted=st.integers(-5, 50), pinned=st.integers(-5, 50))
def test_a_division_of_blocks_adds_up_or_is_refused(total, used, granted, pinned):
    is_possible = 0 <= pinned <= used <= total and granted >= 0
    if not is_possible:
        with pytest.raises(ValueError):
            KvBlocks(total=total, used=used, granted=granted, pinned=pinned)
        return
    blocks = KvBlocks(total=total, used=used, granted=granted, pinned=pinned)
    assert blocks.free + blocks.used == blocks.total
    assert 0 <= blocks.available <= blocks.free
    assert blocks.is_idle == (used == 0 and granted == 0)
