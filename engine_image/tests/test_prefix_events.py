# ruff: noqa: PLC0415  (vLLM takes nine seconds to import: only tests that need it pay them)
"""What the recorder makes of the events of vLLM's own block pool."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import engine_harness
import pytest

if TYPE_CHECKING:
    from sluice_engine import core_messages

pytestmark = pytest.mark.engine

BLOCK = 16


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    engine_harness.import_vllm()


class Cache:
    """vLLM's own block manager, whose events a recorder takes as the scheduler hands them over."""

    def __init__(self, num_blocks: int) -> None:
        from vllm.distributed.kv_events import KVEventBatch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        from sluice_engine.scheduling.prefix_recorder import PrefixRecorder

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
        self.recorder = PrefixRecorder()
        self.make_batch = KVEventBatch
        self.known: set[int] = set()

    def run(self, tokens: list[int]) -> Any:
        """Lets a request compute all its blocks in new ones, whatever is cached; returns what it holds."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request("r", tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        blocks = self.pool.get_new_blocks(len(tokens) // BLOCK)
        self.pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK, 0)
        return request, blocks

    def report(self) -> core_messages.PrefixChanges | None:
        self.recorder.publish(self.make_batch(ts=0.0, events=self.pool.take_events()))
        changes = self.recorder.take()
        if changes is not None:
            assert not set(changes.stored) & self.known
            assert set(changes.removed) <= self.known
            self.known = (self.known | set(changes.stored)) - set(changes.removed)
        return changes

    def is_cached(self, request: Any, position: int) -> bool:
        return self.pool.get_cached_block(request.block_hashes[position], [0]) is not None


def shorten(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


@pytest.mark.parametrize("seed", range(3))
def test_reports_add_up_to_what_vllm_finds(seed):
    rng, cache = random.Random(seed), Cache(num_blocks=24)
    requests, held = [], []
    for _ in range(60):
        while held and (len(held) > 2 or rng.random() < 0.5):
            cache.pool.free_blocks(reversed(held.pop(0)))
        tokens = [rng.randrange(3)] * (BLOCK * rng.randrange(1, 4)) + [rng.randrange(3)] * BLOCK
        request, blocks = cache.run(tokens)
        requests.append(request)
        held.append(blocks)
        if rng.random() < 0.6:
            cache.report()
    cache.report()
    for request in requests:
        for position, block_hash in enumerate(request.block_hashes):
            assert (shorten(block_hash) in cache.known) == cache.is_cached(request, position)
    assert cache.report() is None


def test_a_content_that_is_cached_twice_leaves_with_its_last_copy():
    cache = Cache(num_blocks=9)
    (request, first), (_, second) = cache.run([7] * 32), cache.run([7] * 32)
    assert len(cache.report().stored) == 2
    for blocks, expected in ((first, 2), (second, 0)):
        cache.pool.free_blocks(blocks)
        others = cache.pool.get_new_blocks(cache.pool.get_num_free_blocks())
        changes = cache.report()
        assert len(changes.removed if changes else ()) == 2 - expected
        assert len(cache.known) == expected
        del others
    assert not cache.is_cached(request, 0)


@pytest.mark.parametrize("num_copies", [1, 2])
def test_a_cache_that_is_cleared_has_nothing(num_copies):
    cache = Cache(num_blocks=9)
    copies = [cache.run([7] * 64)[1] for _ in range(num_copies)]
    cache.report()
    for blocks in copies:
        cache.pool.free_blocks(blocks)
    assert cache.pool.reset_prefix_cache()
    assert len(cache.report().removed) == 4
    assert cache.known == set()


@pytest.mark.parametrize("salt", ["", "tenant-1"], ids=["no salt", "salt"])
def test_routers_hash_prompts_as_vllm_does(salt):
    from array import array

    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    from sluice_router.text.prompt_hashes import PrefixScheme, PromptHashes

    cache, rng = Cache(num_blocks=9), random.Random(1)
    tokens = [rng.choice((0, 1, 255, 256, 65535, 65536, 151_643, 2**31)) for _ in range(5 * BLOCK + 1)]
    request = Request(
        "r", tokens, SamplingParams(max_tokens=1), None, block_hasher=cache.hasher, cache_salt=salt or None
    )
    root = sha256(kv_cache_utils.resolve_none_hash_seed(sha256))
    hashes = PromptHashes(array("I", tokens), PrefixScheme(root=root, block_size_tokens=BLOCK), salt)
    assert hashes.extend(2) == [shorten(block_hash) for block_hash in request.block_hashes[:2]]
    assert hashes.extend(9) == [shorten(block_hash) for block_hash in request.block_hashes]
    assert len(request.block_hashes) == hashes.num_blocks == 5
