"""Prompts go to the engines that have their beginning cached, by what these report."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
from data_plane_harness import Harness, make_plan

from sluice.v1 import engine_pb2
from sluice_router.scheduling import prefixes
from sluice_router.text.prompt_hashes import PrefixScheme, PromptHashes

if TYPE_CHECKING:
    from sluice_router.scheduling.entities import LiveRequest

ROOT = b"root"
SCHEME = PrefixScheme(root=ROOT, block_size_tokens=16)
ROLES = {"a": "P", "b": "P", "c": "P"}


def hash_prompt(prompt_tokens: int, *, first: int = 1, salt: str = "") -> list[int]:
    return PromptHashes(array("I", range(first, first + prompt_tokens)), SCHEME, salt).extend(1000)


def make_harness(**roots: bytes) -> Harness:
    """Three engines; those not named begin their hashes with ``ROOT``."""
    harness = Harness()
    for name in ROLES:
        harness.attach(name, prefix_root=roots.get(name, ROOT))
    harness.router.apply_plan(make_plan(ROLES))
    harness.deliver()
    return harness


def report(harness: Harness, name: str, sequence: int, stored=(), removed=(), *, is_reset: bool | None = None) -> None:
    changes = engine_pb2.PrefixChanges(
        sequence=sequence,
        is_reset=sequence == 1 if is_reset is None else is_reset,
        stored=list(stored),
        removed=list(removed),
    )
    harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(prefixes=changes))


def place(harness: Harness, prompt_tokens: int = 200, **fields) -> str:
    request_id, _ = harness.admit(prompt_tokens, 1, **fields)
    return harness.engine_of(request_id)


def wait(harness: Harness) -> LiveRequest:
    """Admits a request, and returns it as it is before the next placement."""
    request_id, _ = harness.admit(200, 1)
    request = harness.state.requests.live[request_id]
    assert request.prompt_hashes == {}
    return request


@pytest.mark.parametrize("name", ROLES)
def test_a_prompt_goes_where_its_beginning_is(name):
    harness = make_harness()
    report(harness, name, 1, hash_prompt(200)[:7])
    request_id, _ = harness.admit(200, 1)
    assert harness.engine_of(request_id) == name
    (placement,) = [e for e in harness.router.explain(request_id)["events"] if e["event"] == "placement"]
    assert {c["engine_id"]: c["cached_tokens"] for c in placement["candidates"]} == {
        **dict.fromkeys(ROLES, 0),
        name: 112,
    }
    assert harness.state.engines.table[name].queued_prefill_tokens == 200 - 112
    harness.run()
    harness.assert_idle()


def test_blocks_that_left_the_cache_count_no_more():
    harness = make_harness()
    report(harness, "a", 1, hash_prompt(200)[:2])
    report(harness, "b", 1, hash_prompt(200))
    report(harness, "b", 2, removed=hash_prompt(200)[1:])
    assert place(harness) == "a"


@pytest.mark.parametrize(("salt", "engine"), [("one", "a"), ("two", "b"), ("", "c")])
def test_prompts_of_different_salts_share_nothing(salt, engine):
    harness = make_harness()
    for name, its_salt in (("a", "one"), ("b", "two"), ("c", "")):
        report(harness, name, 1, hash_prompt(200, salt=its_salt))
    request_id, _ = harness.admit(200, 1, cache_salt=salt)
    harness.deliver()
    assert harness.engine_of(request_id) == engine
    assert harness.cores[engine].submitted[-1].cache_salt == salt


def test_a_new_stream_begins_with_all_that_is_cached():
    harness = make_harness()
    report(harness, "a", 1, hash_prompt(200))
    harness.cut("a")
    assert not any("a" in index for index in harness.state.engines.prefixes.values())
    harness.reconnect("a")
    harness.deliver()
    report(harness, "a", 1, hash_prompt(200)[:5])
    report(harness, "b", 1, hash_prompt(200)[:6])
    assert place(harness) == "b"


@pytest.mark.parametrize(("sequence", "is_reset"), [(3, False), (2, True), (1, True)], ids=["gap", "reset", "again"])
def test_an_engine_whose_reports_have_a_gap_loses_its_stream(sequence, is_reset):
    harness = make_harness()
    report(harness, "a", 1, hash_prompt(200))
    report(harness, "a", sequence, is_reset=is_reset)
    assert harness.closed == [("a", "protocol")]
    assert place(harness) != "a"


def test_engines_that_hash_otherwise_are_asked_by_their_own_hashes():
    harness = make_harness(b=b"another")
    theirs = PromptHashes(array("I", range(1, 201)), PrefixScheme(root=b"another", block_size_tokens=16), "")
    report(harness, "a", 1, theirs.extend(100))
    assert prefixes.find_cached(harness.state.engines, wait(harness)) == {}
    report(harness, "b", 1, theirs.extend(100))
    assert prefixes.find_cached(harness.state.engines, wait(harness)) == {"b": 192}
    harness.kill("b")
    assert list(harness.state.engines.prefixes) == [SCHEME]


def test_engines_that_say_nothing_of_prefixes_are_placed_on_as_ever():
    harness = make_harness(a=b"", b=b"", c=b"")
    report(harness, "a", 7, hash_prompt(200))
    assert not harness.state.engines.prefixes
    assert place(harness) in ROLES
    assert harness.closed == []


def test_a_prompt_that_nobody_knows_is_hashed_once():
    harness = make_harness()
    report(harness, "a", 1, [1, 2, 3])
    harness.clock.advance(1.0)
    hashes = []
    original = PromptHashes.extend

    class Counting(PromptHashes):
        def extend(self, num_blocks: int) -> list[int]:
            hashes.append(num_blocks)
            return original(self, num_blocks)

    request_id, _ = harness.admit(4000, 1)
    request = harness.state.requests.live[request_id]
    assert request.prompt_hashes == {}
    counting = Counting(request.new.prompt_token_ids, SCHEME, "")
    request.prompt_hashes[SCHEME] = counting
    assert prefixes.find_cached(harness.state.engines, request) == {}
    assert hashes == [1]
    report(harness, "a", 2, original(counting, 1))
    assert prefixes.find_cached(harness.state.engines, request) == {"a": 16}
    assert hashes == [1, 1, 8]


@pytest.mark.parametrize(("prompt_tokens", "num_blocks"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_block_with_the_last_token_is_not_looked_up(prompt_tokens, num_blocks):
    assert len(hash_prompt(prompt_tokens)) == num_blocks


def test_hashes_made_in_parts_are_those_made_at_once():
    prompt = array("I", range(500))
    parts = PromptHashes(prompt, SCHEME, "salt")
    assert [len(parts.extend(number)) for number in (1, 3, 2, 100)] == [1, 3, 3, 31]
    assert parts.extend(0) == PromptHashes(prompt, SCHEME, "salt").extend(31)
