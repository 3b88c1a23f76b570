"""KV handles are checked before vLLM sees them, and trimmed to what the request has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice_engine.kv_transfer.kv_handles import MalformedHandleError, read_handle


def make_handle(**changes: Any) -> str:
    handle = {
        "sluice_num_tokens": 64,
        "remote_block_ids": [[5, 9]],
        "remote_engine_id": "a-1",
        "remote_request_id": "r1",
        "remote_host": "127.0.0.1",
        "remote_port": 21000,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "transfer_mode": "pull",
    }
    return json.dumps(handle | changes)


def read(text: str, num_tokens: int = 65) -> dict[str, Any]:
    return read_handle(text, num_tokens=num_tokens, block_size=32, engine_id="b-1", tp_size=1)


@pytest.mark.parametrize(
    ("num_tokens", "wanted", "blocks"),
    [(65, 64, [5, 9]), (64, 63, [5, 9]), (34, 33, [5, 9]), (33, 32, [5]), (2, 1, [5]), (500, 64, [5, 9])],
)
def test_reads_the_tokens_that_exist_but_never_the_last(num_tokens: int, wanted: int, blocks: list[int]) -> None:
    params = read(make_handle(), num_tokens)
    assert (params["sluice_num_tokens"], params["remote_block_ids"]) == (wanted, [blocks])
    assert params["do_remote_prefill"] is True


def test_vllm_gets_where_the_tokens_lie_and_nothing_else() -> None:
    assert read(make_handle(), 34) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "sluice_num_tokens": 33,
        "remote_block_ids": [[5, 9]],
        "remote_num_tokens": 33,
        "remote_engine_id": "a-1",
        "remote_request_id": "r1",
        "remote_host": "127.0.0.1",
        "remote_port": 21000,
        "tp_size": 1,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sluice_num_tokens": 0}, ">= 1"),
        ({"sluice_num_tokens": 65}, "2 blocks (2 distinct) for 65 tokens"),
        ({"remote_block_ids": [[5, 5]]}, "2 blocks (1 distinct)"),
        ({"remote_block_ids": [[0, 9]]}, ">= 1"),
        ({"remote_block_ids": [["5", 9]]}, "Expected `int`"),
        ({"remote_block_ids": []}, "0 KV groups"),
        ({"remote_engine_id": "b-1"}, "read from itself"),
        ({"remote_engine_id": ""}, "length >= 1"),
        ({"remote_port": 70000}, "<= 65535"),
        ({"tp_size": 2}, "parallel sizes are 2, 1, 1"),
        ({"pp_size": 2}, "parallel sizes are 1, 1, 2"),
    ],
)
def test_malformed_handle_is_refused_with_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedHandleError) as error:
        read(make_handle(**changes))
    assert message in str(error.value)


def test_request_without_a_token_to_read_is_refused() -> None:
    with pytest.raises(MalformedHandleError, match="nothing to read"):
        read(make_handle(), num_tokens=1)
