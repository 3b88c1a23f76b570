"""Copies of KV that arrive in parts, ahead of their request, in blocks that a grant has reserved.

A part enters the prefix cache when it has come whole, and the grant holds its blocks. The request's submit finds them
there, and computes or pulls only what is left. Nothing else depends on a copy: one that is given up leaves free blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from sluice_engine.core_messages import FIRST_TOKEN_KEY, NUM_TOKENS_KEY, PulledPart
from sluice_engine.kv_transfer.kv_handles import MalformedHandleError
from sluice_engine.kv_transfer.kv_transfer_timeouts import LONGEST_READ_S

if TYPE_CHECKING:
    from sluice_engine.core_messages import PullPartCommand
    from sluice_engine.kv_transfer.grants import GrantedRoom, GrantTable
    from sluice_engine.kv_transfer.interface import KvConnector

logger = logging.getLogger(__name__)

# Ends the name of a read among the requests that the connector's worker knows.
READ_MARK = "@part"


@dataclass(slots=True)
class KvCopy:
    """What a grant's blocks hold; mutable, owned by ``PartPulls``.

    Args:
        request: A request of the same tokens, for the hashes of its blocks; never scheduled.
        num_blocks: Leading blocks of it that are here.
    """

    request: Request
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    """A read under way.

    Args:
        key: Key of the grant.
        blocks: Blocks that it fills.
        began_s: Monotonic time.
    """

    key: str
    blocks: list[Any]
    began_s: float


class PartPulls:
    """The copies of one engine.

    Args:
        connector: The scheduler's connector.
        manager: vLLM's KV cache manager.
        grants: Holds the blocks.
        block_size_tokens: Tokens per block.
        hash_algorithm: Of vLLM's prefix cache.
    """

    def __init__(
        self, connector: KvConnector, manager: Any, grants: GrantTable, *, block_size_tokens: int, hash_algorithm: str
    ) -> None:
        self._connector = connector
        self._pool = manager.block_pool
        self._grants = grants
        self._block_size_tokens = block_size_tokens
        self._hasher = get_request_block_hasher(block_size_tokens, get_hash_fn_by_name(hash_algorithm))
        self._reads: dict[str, _Read] = {}
        self._num_reads = 0

    @property
    def is_reading(self) -> bool:
        """True while a part is on its way, so that iterations have to ask for its end."""
        return bool(self._reads)

    def pull(self, command: PullPartCommand, now_s: float) -> PulledPart | None:
        """Starts to pull a part.

        Args:
            command: Names the grant and the part.
            now_s: Monotonic time.

        Returns:
            The answer where no read is needed or possible; None: a read has begun.
        """
        try:
            params = self._connector.read_offer(command.transfer_params)
        except MalformedHandleError as error:
            logger.warning("grant %s: %s", command.key, error)
            return PulledPart(key=command.key, num_tokens=0, reason="handle")
        grant = self._grants.get_open(command.key)
        if grant is None or grant.num_reading:
            return self._refuse(command.key, None, params, "lapsed" if grant is None else "busy")
        copy = self._extend_copy(grant, command)
        end = params[NUM_TOKENS_KEY] // self._block_size_tokens
        if len(copy.request.block_hashes) < end:
            return self._refuse(command.key, copy, params, "handle")
        self._hold_cached(grant, copy, end)
        first = params[FIRST_TOKEN_KEY] // self._block_size_tokens
        if copy.num_blocks < first:
            return self._refuse(command.key, copy, params, "gap")
        remote = params["remote_block_ids"][0][copy.num_blocks - first :]
        if not self._begin_read(command.key, grant, params, remote, now_s):
            return self._answer(command.key, copy, "")
        return None

    def _refuse(self, key: str, copy: KvCopy | None, params: dict[str, Any], reason: str) -> PulledPart:
        """Lets the source end the offer."""
        self._connector.pull_part(self._name_read(key), params | {"remote_block_ids": [[]]}, [])
        return self._answer(key, copy, reason)

    def _extend_copy(self, grant: GrantedRoom, command: PullPartCommand) -> KvCopy:
        copy: KvCopy | None = grant.copy
        if copy is not None:
            copy.request.append_output_token_ids(command.token_ids)
            return copy
        request = Request(
            request_id=command.key,
            prompt_token_ids=command.token_ids,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=command.cache_salt or None,
            block_hasher=self._hasher,
        )
        grant.copy = copy = KvCopy(request)
        return copy

    def _hold_cached(self, grant: GrantedRoom, copy: KvCopy, end: int) -> None:
        """Holds the next blocks that are in the prefix cache anyway."""
        found = []
        for block_hash in copy.request.block_hashes[copy.num_blocks : end]:
            blocks = self._pool.get_cached_block(block_hash, [0])
            if not blocks:
                break
            found.append(blocks[0])
        copy.num_blocks += self._grants.hold(grant, found)

    def _begin_read(
        self, key: str, grant: GrantedRoom, params: dict[str, Any], remote: list[int], now_s: float
    ) -> bool:
        """Reads into the grant's empty blocks; returns False when there is nothing to read."""
        blocks = self._grants.begin_read(grant, len(remote))
        read_id = self._name_read(key)
        # NIXL's worker pairs both lists from their ends, so they must cover the same tokens.
        params = params | {"remote_block_ids": [remote[: len(blocks)]]}
        self._connector.pull_part(read_id, params, [block.block_id for block in blocks])
        if blocks:
            self._reads[read_id] = _Read(key, blocks, now_s)
        return bool(blocks)

    def _name_read(self, key: str) -> str:
        self._num_reads += 1
        return f"{key}#{self._num_reads}{READ_MARK}"

    def _answer(self, key: str, copy: KvCopy | None, reason: str) -> PulledPart:
        num_blocks = 0 if copy is None else copy.num_blocks
        return PulledPart(key=key, num_tokens=num_blocks * self._block_size_tokens, reason=reason)

    def take_ended(
        self, finished: set[str] | None, failed: set[str], now_s: float
    ) -> tuple[set[str] | None, list[PulledPart]]:
        """Ends the reads among what the worker reports as received.

        Args:
            finished: Names of received requests and reads.
            failed: Those of them that failed.
            now_s: Monotonic time.

        Returns:
            The other names, and the answers.
        """
        ended = sorted(name for name in finished or () if name.endswith(READ_MARK))
        answers = [self._end_read(self._reads.pop(name), now_s, has_failed=name in failed) for name in ended]
        return finished - set(ended) if finished and ended else finished, answers

    def _end_read(self, read: _Read, now_s: float, *, has_failed: bool) -> PulledPart:
        is_whole = not has_failed and now_s - read.began_s <= LONGEST_READ_S
        grant = self._grants.end_read(read.key, read.blocks, is_whole=is_whole, now_s=now_s)
        if grant is None:
            # The source waits for the end of the read, whatever has become of the grant.
            return PulledPart(key=read.key, num_tokens=0, reason="lapsed")
        copy = grant.copy
        if is_whole:
            begin, copy.num_blocks = copy.num_blocks, copy.num_blocks + len(read.blocks)
            # Only the new blocks are looked at.
            blocks = [self._pool.null_block] * begin + read.blocks
            self._pool.cache_full_blocks(copy.request, blocks, begin, copy.num_blocks, self._block_size_tokens, 0)
        return self._answer(read.key, copy, "" if is_whole else "failed")
