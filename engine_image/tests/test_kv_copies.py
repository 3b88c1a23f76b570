"""Copies of KV that come in parts, on vLLM's own pool: which blocks are read where, what is cached, what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from played_engines import import_vllm

from sluice_engine.core_messages import FIRST_TOKEN_KEY, NUM_TOKENS_KEY, OfferCommand, PulledPart, PullPartCommand
from sluice_engine.kv_transfer.grants import GrantTable
from sluice_engine.kv_transfer.kv_handles import MalformedHandleError
from sluice_engine.kv_transfer.kv_transfer_timeouts import KV_LEASE_S

BLOCK = 4
NOW_S = 100.0
LONGEST_S = KV_LEASE_S / 2
TOKENS = list(range(10, 50))


class Connector:
    """Reads handles as they are, and keeps what is to be read."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, list[int], list[int]]] = []

    def read_offer(self, transfer_params: str) -> dict[str, Any]:
        if not transfer_params:
            raise MalformedHandleError("nothing")
        return dict(json.loads(transfer_params))

    def pull_part(self, read_id: str, params: dict[str, Any], block_ids: list[int]) -> None:
        assert params["remote_engine_id"] == "source"
        (remote,) = params["remote_block_ids"]
        self.reads.append((read_id, remote, block_ids))


class Table:
    """An engine with 20 free blocks, of which a grant has so many."""

    def __init__(self, num_granted: int = 8) -> None:
        import_vllm()
        from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
        from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import init_none_hash  # noqa: PLC0415

        from sluice_engine.kv_transfer.part_pulls import PartPulls  # noqa: PLC0415

        init_none_hash(get_hash_fn_by_name("sha256"))
        self.pool = BlockPool(21, enable_caching=True, hash_block_size=BLOCK)
        self.grants = GrantTable(self.pool)
        self.connector = Connector()
        manager = SimpleNamespace(block_pool=self.pool)
        self.pulls = PartPulls(
            self.connector,  # type: ignore[arg-type]
            manager,
            self.grants,
            block_size_tokens=BLOCK,
            hash_algorithm="sha256",
        )
        if num_granted:
            assert self.grants.reserve("g", num_granted, expires_s=NOW_S + 5, ttl_s=2.0)

    def pull(self, tokens: list[int], *, end: int, first: int = 0, key: str = "g", salt: str = "") -> PulledPart | None:
        """Pulls blocks ``first`` to ``end``, which are 100 and more at their source."""
        params = {
            NUM_TOKENS_KEY: end * BLOCK,
            FIRST_TOKEN_KEY: first * BLOCK,
            "remote_engine_id": "source",
            "remote_block_ids": [list(range(100 + first, 100 + end))],
        }
        command = PullPartCommand(key=key, token_ids=tokens, transfer_params=json.dumps(params), cache_salt=salt)
        return self.pulls.pull(command, NOW_S)

    def end(self, *, failed: bool = False, after_s: float = 1.0) -> PulledPart:
        """Ends the last read."""
        name = self.connector.reads[-1][0]
        rest, (answer,) = self.pulls.take_ended({name, "a request"}, {name} if failed else set(), NOW_S + after_s)
        assert rest == {"a request"}
        return answer

    def count_cached(self, tokens: list[int], salt: str = "") -> int:
        """Counts the leading blocks of tokens that vLLM finds in its prefix cache."""
        from vllm.sampling_params import SamplingParams  # noqa: PLC0415
        from vllm.v1.request import Request  # noqa: PLC0415

        request = Request("r", tokens, SamplingParams(), None, cache_salt=salt or None, block_hasher=self.pulls._hasher)
        found = [self.pool.get_cached_block(each, [0]) for each in request.block_hashes]
        return next((index for index, blocks in enumerate(found) if not blocks), len(found))


def answer(num_blocks: int, reason: str = "", key: str = "g") -> PulledPart:
    return PulledPart(key=key, num_tokens=num_blocks * BLOCK, reason=reason)


def test_a_part_is_read_into_the_grants_blocks_and_cached_when_it_has_come_whole() -> None:
    table = Table()
    assert table.pull(TOKENS[:13], end=3) is None
    ((name, remote, local),) = table.connector.reads
    assert (name, remote, len(set(local))) == ("g#1@part", [100, 101, 102], 3)
    assert table.pulls.is_reading
    assert table.count_cached(TOKENS) == 0
    assert table.end() == answer(3)
    assert not table.pulls.is_reading
    assert table.count_cached(TOKENS) == 3
    found = [table.pool.blocks[block_id] for block_id in local]
    assert all(block.ref_cnt == 1 for block in found)
    assert table.grants.num_blocks == 8


def test_later_parts_go_on_where_the_copy_ends() -> None:
    table = Table()
    table.pull(TOKENS[:12], end=3)
    table.end()
    assert table.pull(TOKENS[12:21], first=3, end=5) is None
    assert table.connector.reads[-1][:2] == ("g#2@part", [103, 104])
    assert table.end() == answer(5)
    # One that begins earlier brings again what is here, which is not read again.
    assert table.pull(TOKENS[21:28], first=4, end=7) is None
    assert table.connector.reads[-1][:2] == ("g#3@part", [105, 106])
    assert table.end() == answer(7)
    assert table.count_cached(TOKENS[:28]) == 7
    assert table.count_cached([*TOKENS[:20], 9, *TOKENS[21:28]]) == 5


def test_blocks_in_the_prefix_cache_are_held_and_not_read() -> None:
    table = Table()
    table.pull(TOKENS[:8], end=2)
    table.end()
    assert table.grants.reserve("h", 8, expires_s=NOW_S + 5)
    assert table.pull(TOKENS[:16], end=4, key="h") is None
    assert table.connector.reads[-1][1] == [102, 103]
    assert table.end() == answer(4, key="h")
    # All of it is here: nothing is read, and the source hears so.
    assert table.grants.reserve("i", 4, expires_s=NOW_S + 5)
    assert table.pull(TOKENS[:16], end=4, key="i") == answer(4, key="i")
    assert table.connector.reads[-1] == ("i#3@part", [], [])
    assert not table.pulls.is_reading


def test_a_part_that_the_cache_has_only_further_on_is_read_from_its_start() -> None:
    table = Table()
    table.pull(TOKENS[:12], end=3)
    table.end()
    first = table.pool.blocks[table.connector.reads[0][2][0]]
    table.grants.release("g")
    table.pool.evict_blocks({first.block_id})
    assert table.grants.reserve("h", 8, expires_s=NOW_S + 5)
    assert table.pull(TOKENS[:12], end=3, key="h") is None
    assert table.connector.reads[-1][1] == [100, 101, 102]


def test_no_more_is_read_than_the_grant_has_blocks() -> None:
    table = Table(num_granted=2)
    assert table.pull(TOKENS[:16], end=4) is None
    assert table.connector.reads[-1][1] == [100, 101]
    assert table.end() == answer(2)


@pytest.mark.parametrize("salt", ["", "salt"])
def test_a_salt_keeps_the_copy_from_other_prompts(salt: str) -> None:
    table = Table()
    table.pull(TOKENS[:12], end=3, salt=salt)
    table.end()
    assert (table.count_cached(TOKENS), table.count_cached(TOKENS, "salt")) == ((0, 3) if salt else (3, 0))


REFUSED = ["no handle", "lapsed", "claimed", "busy", "more blocks than tokens", "gap"]


@pytest.mark.parametrize("why", REFUSED)
def test_a_part_that_cannot_be_pulled_is_refused_and_the_source_hears_so(why: str) -> None:
    table = Table()
    table.pull(TOKENS[:8], end=2)
    if why != "busy":
        table.end()
    num_reads = len(table.connector.reads)
    if why == "lapsed":
        table.grants.release("g")
    if why == "claimed":
        table.grants.claim("g", "r")
    if why == "no handle":
        got = table.pulls.pull(PullPartCommand(key="g", token_ids=TOKENS[8:12], transfer_params=""), NOW_S)
    else:
        first, end = {"gap": (3, 4), "more blocks than tokens": (2, 4)}.get(why, (2, 3))
        got = table.pull(TOKENS[8:16] if why == "gap" else TOKENS[8:15], first=first, end=end)
    has_copy = why not in ("no handle", "lapsed", "claimed", "busy")
    reason = {"no handle": "handle", "claimed": "lapsed", "more blocks than tokens": "handle"}.get(why, why)
    assert got == answer(2 if has_copy else 0, reason)
    told = table.connector.reads[num_reads:]
    assert told == ([] if why == "no handle" else [(f"g#{num_reads + 1}@part", [], [])])
    assert table.pulls.is_reading is (why == "busy")


@pytest.mark.parametrize(
    ("failed", "after_s", "is_whole"),
    [(False, LONGEST_S, True), (False, LONGEST_S + 0.1, False), (True, 1.0, False)],
    ids=["as long as it may", "too late", "failed"],
)
def test_a_read_that_failed_or_took_too_long_is_void(*, failed: bool, after_s: float, is_whole: bool) -> None:
    table = Table()
    table.pull(TOKENS[:12], end=3)
    assert table.end(failed=failed, after_s=after_s) == (answer(3) if is_whole else answer(0, "failed"))
    assert table.count_cached(TOKENS) == (3 if is_whole else 0)
    # It may be tried again, into the same blocks.
    assert table.pull([], end=3) == (answer(3) if is_whole else None)


def test_the_end_of_a_read_is_told_though_its_grant_has_ended() -> None:
    table = Table()
    table.pull(TOKENS[:12], end=3)
    table.grants.release("g")
    assert table.pool.get_num_free_blocks() == 17
    assert table.end() == answer(0, "lapsed")
    assert (table.pool.get_num_free_blocks(), table.count_cached(TOKENS)) == (20, 0)


def test_ends_of_several_reads_are_answered_in_the_order_of_their_names() -> None:
    table = Table(num_granted=0)
    for key in "ba":
        assert table.grants.reserve(key, 3, expires_s=NOW_S + 5)
        table.pull([ord(key), *TOKENS[:7]], end=2, key=key)
    names = {name for name, *_ in table.connector.reads}
    rest, answers = table.pulls.take_ended(names, {"b#1@part"}, NOW_S + 1)
    assert (rest, answers) == (set(), [answer(2, key="a"), answer(0, "failed", key="b")])


@pytest.mark.parametrize("finished", [None, set(), {"a request"}])
def test_what_else_has_ended_is_passed_on(finished: set[str] | None) -> None:
    assert Table().pulls.take_ended(finished, set(), NOW_S) == (finished, [])


# --- offers


def test_an_offer_has_only_blocks_that_no_iteration_under_way_fills() -> None:
    import_vllm()
    from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    from sluice_engine.kv_transfer.kv_offers import KvOffers  # noqa: PLC0415

    pool = BlockPool(21, enable_caching=True, hash_block_size=BLOCK)
    blocks = pool.get_new_blocks(3)
    offered: dict[str, list[int]] = {}

    def offer(offer_id: str, block_ids: list[int]) -> dict[str, Any]:
        offered[offer_id] = block_ids
        return {}

    connector = SimpleNamespace(offer=offer, release=offered.pop)
    manager = SimpleNamespace(block_pool=pool, get_blocks=lambda _: SimpleNamespace(blocks=(blocks,)))
    request = SimpleNamespace(
        request_id="r",
        status=RequestStatus.RUNNING,
        is_finished=lambda: False,
        num_computed_tokens=3 * BLOCK,
        num_in_flight_tokens=BLOCK + 1,
    )
    offers = KvOffers(connector, manager, BLOCK)  # type: ignore[arg-type]
    answer = offers.offer(OfferCommand(key="k", request_id="r", first_token=0), request, NOW_S)  # type: ignore[arg-type]
    assert (answer.num_tokens, answer.reason) == (BLOCK, "")
    assert list(offered.values()) == [[blocks[0].block_id]]
    assert [block.ref_cnt for block in blocks] == [2, 1, 1]
    offers.release("k")
    assert (offered, [block.ref_cnt for block in blocks]) == ({}, [1, 1, 1])
    request.num_in_flight_tokens = 3 * BLOCK
    assert offers.offer(OfferCommand(key="k", request_id="r", first_token=0), request, NOW_S).reason == "none"  # type: ignore[arg-type]
