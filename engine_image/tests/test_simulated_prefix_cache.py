# ruff: noqa: PLC0415  (vLLM takes nine seconds to import: only tests that need it pay them)
"""The simulator's prefix cache against vLLM's KV cache manager: the same requests begin, compute, decode, move and end in both.

After every step both have as many free blocks, and find as much of each prompt; so they evict the same blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import engine_harness
import pytest

from sluice_core.sim.engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from sluice_core.sim.block_table import BlockTable

pytestmark = pytest.mark.engine

BLOCK, HASH_BLOCK = 4, 12
MAX_TOKENS = 512


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    engine_harness.import_vllm()


def make_manager(num_blocks: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks + 1,  # one is vLLM's own
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config, max_model_len=MAX_TOKENS, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )


@dataclass
class Prompt:
    """A prompt in both languages.

    Args:
        tokens: As vLLM sees it.
        hashes: As traces have it.
    """

    tokens: list[int]
    hashes: tuple[int, ...]


class Both:
    """Requests on vLLM's manager and on ours; each step asserts that they agree."""

    def __init__(self, num_blocks: int, prompts: list[Prompt]) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.manager = make_manager(num_blocks)
        self.cache = PrefixCache(num_blocks, BLOCK, HASH_BLOCK)
        self.prompts = prompts
        self.num_made = 0

    def make_request(self, prompt: Prompt) -> Ours:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.num_made += 1
        request = Request(
            request_id=str(self.num_made),
            prompt_token_ids=list(prompt.tokens),
            sampling_params=SamplingParams(max_tokens=MAX_TOKENS),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        return Ours(self.num_made, prompt, request)

    def check(self) -> None:
        """Assert that both have the same free blocks, and cached ones by what a new request would find."""
        self.cache.check()
        assert self.cache.num_empty + self.cache.num_free_cached == self.manager.block_pool.get_num_free_blocks()
        for prompt in self.prompts:
            probe = self.make_request(prompt)
            found = self.cache.find_cached_blocks(
                probe.index, len(prompt.tokens), prompt.hashes, len(prompt.tokens) - 1
            )
            blocks, num_tokens, _ = self.manager.get_computed_blocks(probe.theirs)
            assert num_tokens == len(found) * BLOCK
            num_free_cached = sum(block.ref_cnt == 0 for block in blocks.blocks[0])
            assert num_free_cached == self.cache.count_free(found)

    def begin(self, request: Ours, num_tokens: int, *, is_pulled: bool = False) -> bool:
        """Schedule the first chunk, or begin a pull of all KV, if there are blocks; both find the same."""
        blocks, num_hit_tokens, _ = self.manager.get_computed_blocks(request.theirs)
        found = self.cache.find_cached_blocks(
            request.index, len(request.prompt.tokens), request.prompt.hashes, request.num_tokens - 1
        )
        assert num_hit_tokens == len(found) * BLOCK
        end = request.num_tokens - 1 if is_pulled else min(num_hit_tokens + num_tokens, request.num_tokens)
        need = -(-end // BLOCK) - len(found) + self.cache.count_free(found)
        if end == num_hit_tokens:
            return False  # nothing is to be moved
        fits = need <= self.cache.num_empty + self.cache.num_free_cached
        allocated = self.manager.allocate_slots(
            request.theirs,
            0 if is_pulled else end - num_hit_tokens,
            num_hit_tokens,
            blocks,
            num_external_computed_tokens=end - num_hit_tokens if is_pulled else 0,
            delay_cache_blocks=is_pulled,
        )
        assert (allocated is not None) == fits
        if not fits:
            return False
        request.table = self.cache.open_table(request.index, len(request.prompt.tokens), request.prompt.hashes, found)
        if is_pulled:
            self.cache.reserve(request.table, -(-end // BLOCK))
            self.check()
            self.manager.cache_blocks(request.theirs, end)
            self.cache.cache_filled_blocks(request.table, end)
        else:
            self.cache.extend(request.table, end)
        request.theirs.num_computed_tokens = end
        return True

    def go_on(self, request: Ours, num_tokens: int) -> bool:
        """Schedule the next chunk, or a decode: there, the token that was generated last."""
        assert request.table is not None
        theirs = request.theirs
        before = theirs.num_computed_tokens
        if before == request.num_tokens:
            theirs.append_output_token_ids(1000 + request.index)  # no prompt goes on like this
        end = min(before + num_tokens, request.num_tokens)
        need = -(-end // BLOCK) - -(-before // BLOCK)
        fits = need <= self.cache.num_empty + self.cache.num_free_cached
        assert (self.manager.allocate_slots(theirs, end - before) is not None) == fits
        if not fits:
            return False
        if end > request.num_prefilled:
            self.cache.take(need)
        else:
            self.cache.extend(request.table, end)
        theirs.num_computed_tokens = end
        return True

    def end(self, request: Ours) -> None:
        """Free what a request holds: it has ended, was preempted, or was handed off."""
        assert request.table is not None
        self.cache.cache_filled_blocks(request.table, request.theirs.num_computed_tokens)
        self.cache.release(request.table)
        self.manager.free(request.theirs)
        request.theirs.num_computed_tokens = 0
        request.num_prefilled = request.num_tokens
        request.table = None


@dataclass
class Ours:
    """A request: ours and vLLM's."""

    index: int
    prompt: Prompt
    theirs: Any
    table: BlockTable | None = None
    num_prefilled: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prefilled = self.num_tokens

    @property
    def num_tokens(self) -> int:
        return int(self.theirs.num_tokens)


def make_prompts(rng: random.Random) -> list[Prompt]:
    """Make prompts of which many begin alike, for as many tokens as whole hashes name: traces do not tell more."""
    names: dict[tuple[int, ...], int] = {}
    prompts: list[Prompt] = []
    for _ in range(8):
        tokens = list(rng.choice(prompts).tokens) if prompts else []
        tokens = tokens[: HASH_BLOCK * rng.randint(0, len(tokens) // HASH_BLOCK)]
        tokens += [rng.randrange(1000) for _ in range(rng.randint(1, 5 * HASH_BLOCK))]
        ends = [*range(HASH_BLOCK, len(tokens), HASH_BLOCK), len(tokens)]
        hashes = tuple(names.setdefault(tuple(tokens[:end]), len(names)) for end in ends)
        prompts.append(Prompt(tokens, hashes))
    return prompts


@pytest.mark.parametrize("seed", range(12))
def test_the_simulated_cache_does_what_vllms_does(seed: int) -> None:
    rng = random.Random(seed)
    both = Both(rng.choice((30, 60, 120)), make_prompts(rng))
    running: list[Ours] = []
    away: list[Ours] = []  # preempted or moved away: they may come back
    num_found = num_refused = 0
    for _ in range(300):
        step = rng.random()
        if step < 0.3 or not running:
            request = away.pop() if away and rng.random() < 0.5 else both.make_request(rng.choice(both.prompts))
            if both.begin(request, rng.randint(1, 40), is_pulled=rng.random() < 0.2):
                running.append(request)
                assert request.table is not None
                num_found += request.table.num_found
            else:
                num_refused += 1
        elif step < 0.85:
            if not both.go_on(running[rng.randrange(len(running))], rng.randint(1, 40)):
                num_refused += 1
        else:
            request = running.pop(rng.randrange(len(running)))
            both.end(request)
            if rng.random() < 0.5 and request.num_tokens < MAX_TOKENS // 2:
                away.append(request)
        both.check()
    for request in running:
        both.end(request)
    both.check()
    both.cache.check_idle()
    assert num_found > 50
    assert num_refused > 0


def test_blocks_are_found_as_soon_as_vllm_has_scheduled_what_fills_them() -> None:
    """Also in the very iteration that computes them."""
    prompt = Prompt(list(range(30)), (1, 2, 3))
    both = Both(40, [prompt])
    first, second = both.make_request(prompt), both.make_request(prompt)
    assert both.begin(first, 30)
    assert both.begin(second, 30)
    assert second.table is not None
    assert second.table.num_found == 7
