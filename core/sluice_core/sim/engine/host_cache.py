"""KV blocks in the host memory of a simulated engine, as vLLM's OffloadingConnector keeps them there.

``--kv-offloading-size``, with ``kv_offloading_backend`` ``native`` and its defaults: least recently used, one block of
the engine per chunk, prompts only. Modelled, with the source in vLLM 0.32 (``offloading/`` is
``distributed/kv_transfer/kv_connector/v1/offloading/``):

- Each chunk of a prefill offers the prompt's blocks that it fills, and at first those that the engine found in its own
  cache too; what the request loaded is not offered. Generated tokens are not (``offloading/scheduler.py``:
  ``_build_store_jobs``, ``update_state_after_alloc``; ``kv_offload/base.py``: ``offload_prompt_only``).
- What is offered and not there takes room at once. Where too little is idle, nothing of the offer is stored, and the
  request's next chunk offers it again (``kv_offload/cpu/manager.py``: ``prepare_store``).
- The least recently used goes first. Storing a block is a use. When a request ends, all blocks that it stored, loaded
  or offered in vain are used once more, its last one first. What a transfer reads or writes stays
  (``kv_offload/cpu/policies/lru.py``; ``manager.py``: ``on_request_finished``).
- A copy to the host begins when the iteration has ended that computes the blocks, one behind the other. Until it is
  done its blocks are found, but whoever finds them has to ask again later (``offloading/worker.py``:
  ``prepare_store_kv``; ``kv_offload/cpu/gpu_worker.py``: ``transfer_async``; ``scheduler.py``:
  ``_maximal_prefix_lookup``).
- Each direction of the link is its own. ``host_prefills`` has the rules of loads.

Left out: ARC, ``store_threshold``, chunks of several blocks, other groups than full attention, generated tokens
(``offload_prompt_only=false``), that vLLM offers again at every token and at the end what found no room, that an
iteration waits for stores whose blocks are taken anew or whose request was preempted, what copies cost the iterations
beside them, and the CPU's own work. A pull from another engine looks into GPU memory only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from sluice_core.sim.engine.prefix_cache import POSITION_BITS, ReportedCache

ASK_LATER: Final = -1  # ``HostCache.find``: a copy of a block that was found is under way
_STORING: Final = -1  # references of a block that is on its way to the host
_POSITION_MASK: Final = (1 << POSITION_BITS) - 1


class _Access:
    """What a request has done to the host's memory; mutable, changed by ``HostCache`` only."""

    __slots__ = ("keys", "num_offered")

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.num_offered = 0


class HostCache(ReportedCache):
    """The host memory of one engine; mutable, changed by the engine and its ``HostPrefills``.

    Args:
        num_blocks: Blocks that it has room for.
        block_bytes: Bytes of each.
        bytes_per_s: Of the link between host and GPU, in each direction.

    Attributes:
        num_hit_tokens: Tokens of new prompts that were loaded from here.
        num_loads: Requests that are being loaded.
        num_stored_blocks: Blocks whose copy to here has begun.
        num_loaded_blocks: Blocks whose copy to the GPU has begun.
        num_refused: Offers that found too little room.
    """

    __slots__ = (
        "_accesses",
        "_block_s",
        "_loading",
        "_loads_end_s",
        "_num_blocks",
        "_num_idle",
        "_references",
        "_stores",
        "_stores_end_s",
        "_unsent",
        "num_hit_tokens",
        "num_loaded_blocks",
        "num_loads",
        "num_refused",
        "num_stored_blocks",
    )

    def __init__(self, num_blocks: int, block_bytes: int, bytes_per_s: float) -> None:
        super().__init__()
        self.num_hit_tokens = 0
        self.num_loads = 0
        self.num_stored_blocks = 0
        self.num_loaded_blocks = 0
        self.num_refused = 0
        self._num_blocks = num_blocks
        self._block_s = block_bytes / bytes_per_s
        self._references: OrderedDict[int, int] = OrderedDict()  # by key, the longest unused first
        self._num_idle = 0  # blocks that no transfer reads or writes
        self._accesses: dict[int, _Access] = {}
        self._unsent: list[int] = []  # of the iteration under way
        self._stores: deque[tuple[float, list[int]]] = deque()
        self._stores_end_s = 0.0
        self._loading: set[int] = set()
        self._loads_end_s = 0.0

    def holds(self, key: int) -> bool:
        """Say whether a block is there and may be read."""
        return self._references.get(key, _STORING) != _STORING

    def find(self, keys: list[int]) -> int:
        """Count the leading blocks that are there.

        Args:
            keys: Of a prompt's blocks, from the first one that the engine has not.

        Returns:
            How many; ``ASK_LATER`` where one of them is on its way to here, or to the GPU for another request.
        """
        num_found, references = 0, self._references
        is_on_its_way = False
        for key in keys:
            count = references.get(key)
            if count is None:
                break
            if count == _STORING or key in self._loading:
                is_on_its_way = True
            num_found += 1
        return ASK_LATER if is_on_its_way else num_found

    def begin_load(self, index: int, keys: list[int], num_blocks: int, now: float) -> float:
        """Copy blocks to the GPU.

        Args:
            index: Number of the request.
            keys: They; all are there.
            num_blocks: Blocks of the prompt up to the last of them: these are not offered any more.
            now: Seconds of the simulated clock.

        Returns:
            When the copy ends.
        """
        references, access = self._references, self._access(index)
        for key in keys:
            if references[key] == 0:
                self._num_idle -= 1
            references[key] += 1
        self._loading.update(keys)
        access.keys.update(keys)
        access.num_offered = num_blocks
        self.num_loads += 1
        self.num_loaded_blocks += len(keys)
        self._loads_end_s = max(now, self._loads_end_s) + len(keys) * self._block_s
        return self._loads_end_s

    def end_load(self, keys: list[int]) -> None:
        """Let go of blocks that have been copied to the GPU."""
        references = self._references
        for key in keys:
            references[key] -= 1
            if references[key] == 0:
                self._num_idle += 1
        self._loading.difference_update(keys)
        self.num_loads -= 1

    def count_offered(self, index: int) -> int:
        """Count the leading blocks of a request that need not be offered any more."""
        access = self._accesses.get(index)
        return 0 if access is None else access.num_offered

    def offer(self, index: int, keys: list[int]) -> None:
        """Store blocks of a prompt when the iteration under way has ended, those that are not there.

        Args:
            index: Number of the request.
            keys: Of its next blocks, from ``count_offered`` on.
        """
        references, access = self._references, self._access(index)
        missing = [key for key in keys if key not in references]
        access.keys.update(key for key in keys if references.get(key, 0) != _STORING)
        if missing:
            if not self._make_room(len(missing), keys):
                self.num_refused += 1
                return
            for key in missing:
                references[key] = _STORING
            self._unsent += missing
            self.num_stored_blocks += len(missing)
        access.num_offered += len(keys)

    def end_iteration(self, now: float) -> None:
        """Begin the copies to here of what the iteration has computed that ends now."""
        self.settle(now)
        if self._unsent:
            self._stores_end_s = max(now, self._stores_end_s) + len(self._unsent) * self._block_s
            self._stores.append((self._stores_end_s, self._unsent))
            self._unsent = []

    def settle(self, now: float) -> None:
        """Take note of the copies to here that have ended by now."""
        stores = self._stores
        while stores and stores[0][0] <= now:
            keys = stores.popleft()[1]
            for key in keys:
                self._references[key] = 0
                if self.changes is not None and key >= 0:
                    self.changes.store(key)
            self._num_idle += len(keys)

    def find_next_store_end_s(self, otherwise: float) -> float:
        """Return when the next copy to here ends."""
        return self._stores[0][0] if self._stores else otherwise

    def end_request(self, index: int) -> None:
        """Count what a request has stored, loaded or offered in vain as used: it has ended here."""
        access = self._accesses.pop(index, None)
        if access is not None:
            references = self._references
            for key in sorted(access.keys, key=_get_position, reverse=True):
                if key in references:
                    references.move_to_end(key)

    def list_keys(self) -> list[int]:
        """List what is here or on its way to here, the longest unused first."""
        return list(self._references)

    def check(self) -> None:
        """Assert that there are no more blocks than there is room for, and that counts agree with one another."""
        counts = self._references.values()
        assert len(self._references) <= self._num_blocks
        assert sum(count == 0 for count in counts) == self._num_idle
        storing = self._unsent + [key for _, keys in self._stores for key in keys]
        assert len(storing) == len(set(storing)) == sum(count == _STORING for count in counts)
        assert all(self._references[key] == _STORING for key in storing)
        assert self._loading == {key for key, count in self._references.items() if count > 0}

    def check_idle(self) -> None:
        """Assert that nobody refers to anything, and what ``check`` does."""
        self.check()
        assert not self._unsent
        assert not self._loading
        assert self.num_loads == 0
        assert not self._accesses

    def _access(self, index: int) -> _Access:
        access = self._accesses.get(index)
        if access is None:
            access = self._accesses[index] = _Access()
        return access

    def _make_room(self, num_blocks: int, kept: list[int]) -> bool:
        """Evict what is needed for blocks to come; False, and nothing is evicted, where too little is idle.

        Args:
            num_blocks: How many.
            kept: Blocks that stay.
        """
        references = self._references
        num_evicted = num_blocks - (self._num_blocks - len(references))
        if num_evicted <= 0:
            return True
        if num_evicted > self._num_idle:
            return False
        victims: list[int] = []
        protected = set(kept)
        for key, count in references.items():
            if count == 0 and key not in protected:
                victims.append(key)
                if len(victims) == num_evicted:
                    break
        if len(victims) < num_evicted:
            return False
        for key in victims:
            del references[key]
            if self.changes is not None and key >= 0:
                self.changes.remove(key)
        self._num_idle -= num_evicted
        return True


def _get_position(key: int) -> int:
    """Return the place of a block in its prompt; see ``PrefixCache``."""
    return (key if key >= 0 else ~key) & _POSITION_MASK
