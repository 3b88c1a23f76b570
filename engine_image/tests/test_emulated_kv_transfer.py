"""KV that emulated engines hand over: who holds it, who has read it, and how much there is."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from quiet_imports import import_quietly


@pytest.fixture(scope="module")
def emulation() -> Any:
    return import_quietly("sluice_engine.emulation.emulated_kv_transfer")


def wait(condition: Any) -> Any:
    deadline_s = time.monotonic() + 10.0
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return found


def test_a_read_is_told_once_and_only_what_is_held_is_answered(emulation) -> None:
    source, reader = (emulation.KvPort(("127.0.0.1", 0)) for _ in range(2))
    address = source._socket.getsockname()
    source.hold("a")
    source.hold("b")
    source.drop("b")
    for request_id in ("b", "a"):
        reader.send(address, "read", request_id)
    wait(lambda: reader.has_answer("a"))
    assert not reader.has_answer("a")
    assert not reader.has_answer("b")
    reader.send(address, "done", "a")
    assert wait(source.take_read) == {"a"}
    assert source.take_read() == set()


@pytest.mark.parametrize(("num_computed", "num_tokens"), [(31, 31), (32, 32), (33, 32)])
def test_a_handle_names_no_more_tokens_than_have_kv(emulation, num_computed, num_tokens) -> None:
    """An iteration in flight counts as computed, and the last token has no KV."""
    connector = SimpleNamespace(
        _block_size=16,
        _metadata=emulation.EmulatedMetadata(),
        _notify=None,
        _locate=lambda request_id, blocks: {"request": request_id, "blocks": blocks},
    )
    request = SimpleNamespace(
        request_id="a", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=num_computed, num_tokens=33
    )
    hand_off = emulation.EmulatedConnector.request_finished_all_groups
    is_kept, handle = hand_off(connector, request, ([5, 6, 7],))
    assert is_kept
    assert handle.pop(emulation.NUM_TOKENS_KEY) == num_tokens
    assert handle == {"request": "a", "blocks": [5, 6]}
    assert connector._metadata.holds == ["a"]
