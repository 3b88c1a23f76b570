import pytest

from sluice_core.kv_copy_rules import count_tail_tokens, is_copy_close


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
