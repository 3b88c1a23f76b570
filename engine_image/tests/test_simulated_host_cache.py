# ruff: noqa: PLC0415  (vLLM takes nine seconds to import: only tests that need it pay them)
"""The simulator's host memory against vLLM's manager of it: the same requests store, load and end in both.

After every step both hold the same blocks in the same order of eviction, and answer the same to who asks for them. Not
compared are the connector's scheduler, which decides what is offered and when, and the copies themselves.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import engine_harness
import pytest

from sluice_core.sim.engine.host_cache import ASK_LATER, HostCache
from sluice_core.sim.engine.prefix_cache import POSITION_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    engine_harness.import_vllm()


def make_key(key: int) -> Any:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(key.to_bytes(8, "big"), 0)


class BothHosts:
    """Requests on vLLM's manager and on ours; each step asserts that they agree."""

    def __init__(self, num_blocks: int) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.manager = CPUOffloadingManager(num_blocks)  # least recently used, no threshold: the defaults
        self.cache = HostCache(num_blocks, 1, 1.0)
        self.contexts: dict[int, Any] = {}
        self.prompts: dict[int, list[int]] = {}
        self.stores: list[tuple[int, list[int]]] = []
        self.loads: list[tuple[int, list[int]]] = []
        self.num_refused = self.num_found = self.num_later = self.num_evicted = 0

    def begin(self, index: int, keys: list[int]) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        context = self.contexts[index] = ReqContext(req_id=str(index))
        for position, key in enumerate(keys):
            context.set_offload_key_position(make_key(key), position + 1)
        self.manager.on_new_request(context)
        self.prompts[index] = keys
        num_found = self.look_up(context, keys)
        assert self.cache.find(keys) == num_found
        self.num_later += num_found == ASK_LATER
        if num_found > 0:
            self.num_found += 1
            self.manager.prepare_load([make_key(key) for key in keys[:num_found]], context)
            self.cache.begin_load(index, keys[:num_found], num_found, 0.0)
            self.loads.append((index, keys[:num_found]))

    def look_up(self, context: Any, keys: Sequence[int]) -> int:
        """Looks keys up as the connector does; it also defers what it loads for another request."""
        from vllm.v1.kv_offload.base import LookupResult

        num_found, is_later = 0, False
        loading = {key for _, loaded in self.loads for key in loaded}
        for key in keys:
            result = self.manager.lookup(make_key(key), context)
            if result is LookupResult.MISS:
                break
            num_found += 1
            is_later = is_later or result is LookupResult.HIT_PENDING or key in loading
        return ASK_LATER if is_later else num_found

    def offer(self, index: int, num_blocks: int) -> None:
        first = self.cache.count_offered(index)
        keys = self.prompts[index][first : first + num_blocks]
        if not keys:
            return
        output = self.manager.prepare_store([make_key(key) for key in keys], self.contexts[index])
        num_refused, before = self.cache.num_refused, set(self.cache.list_keys())
        self.cache.offer(index, keys)
        assert (output is None) == (self.cache.num_refused > num_refused)
        self.num_refused += output is None
        if output is not None:
            after = set(self.cache.list_keys())
            assert {make_key(key) for key in before - after} == set(output.evicted_keys)
            assert {make_key(key) for key in after - before} == set(output.keys_to_store)
            self.num_evicted += len(output.evicted_keys)
            if output.keys_to_store:
                self.stores.append((index, [key for key in keys if key in after - before]))

    def complete_stores(self) -> None:
        for index, keys in self.stores:
            self.manager.complete_store([make_key(key) for key in keys], self.contexts[index])
        self.stores.clear()
        self.cache.end_iteration(0.0)
        self.cache.settle(math.inf)

    def complete_load(self) -> None:
        if self.loads:
            index, keys = self.loads.pop(0)
            self.manager.complete_load([make_key(key) for key in keys], self.contexts[index])
            self.cache.end_load(keys)

    def end(self, index: int) -> None:
        if all(loading != index for loading, _ in self.loads):
            del self.prompts[index]
            self.manager.on_request_finished(self.contexts[index])
            self.cache.end_request(index)

    def check(self) -> None:
        self.cache.check()
        ranks = self.manager._policy._ranks
        assert sorted(ranks, key=ranks.__getitem__) == [make_key(key) for key in self.cache.list_keys()]


def test_blocks_come_and_go_as_in_vllm() -> None:
    num_refused = num_found = num_later = num_evicted = 0
    for seed in range(150):
        rng = random.Random(seed)
        both = BothHosts(rng.choice((3, 8, 20)))
        for index in range(60):
            step = rng.random()
            if step < 0.3:
                name = rng.randint(1, 4)
                both.begin(index, [name << POSITION_BITS | position for position in range(rng.randint(1, 9))])
            elif step < 0.6 and both.prompts:
                both.offer(rng.choice(list(both.prompts)), rng.randint(1, 6))
            elif step < 0.75:
                both.complete_stores()
            elif step < 0.85:
                both.complete_load()
            elif both.prompts:
                both.end(rng.choice(list(both.prompts)))
            both.check()
        num_refused += both.num_refused
        num_found += both.num_found
        num_later += both.num_later
        num_evicted += both.num_evicted
    assert min(num_refused, num_found, num_later, num_evicted) > 50
