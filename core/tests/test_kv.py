import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_core.kv import KvBlocks, blocks_for_tokens, count_tail_tokens, is_copy_close


@given(num_tokens=st.integers(0, 10**6), block_size=st.integers(1, 256))
def test_blocks_hold_the_tokens_and_no_block_is_spare(num_tokens, block_size):
    blocks = blocks_for_tokens(num_tokens, block_size)
    assert blocks * block_size >= num_tokens
    assert (blocks - 1) * block_size < num_tokens or blocks == 0


@pytest.mark.parametrize(("tokens", "size"), [(-1, 16), (1, 0)], ids=["negative", "no block"])
def test_impossible_counts_are_refused(tokens, size):
    with pytest.raises(ValueError):
        blocks_for_tokens(tokens, size)


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


@pytest.mark.parametrize(
    ("missing", "present", "block", "computed"),
    [
        # With something before it: up to two blocks, or 64 tokens.
        (1, 16, 16, 1),
        (64, 16, 16, 64),
        (65, 16, 16, 0),
        (64, 32, 32, 64),
        (128, 64, 64, 128),
        (129, 64, 64, 0),
        # With nothing before it: less than a block.
        (15, 0, 16, 15),
        (16, 0, 16, 0),
        (0, 16, 16, 0),
    ],
)
def test_a_short_tail_is_computed_where_the_request_arrives(missing, present, block, computed):
    assert count_tail_tokens(missing, present, block) == computed


@pytest.mark.parametrize(
    ("tokens", "copied", "parts", "is_close"),
    [
        # The source makes four more until it hands off.
        (1060, 1000, 1, True),
        (1061, 1000, 1, False),
        (1061, 1000, 3, False),
        (1061, 1000, 4, True),
        (12, 0, 1, False),
        (11, 0, 1, True),
    ],
)
def test_a_copy_goes_on_until_a_tail_is_left_or_it_is_of_no_use(tokens, copied, parts, is_close):
    assert is_copy_close(tokens, copied, parts, 16) is is_close
