"""What engines have cached of a prompt, by their reports.

Hashes are made only as far as some engine has them, so that a prompt that nobody knows costs one.
"""

from __future__ import annotations

from sluice.v1 import engine_pb2
from sluice_core.records import EngineId
from sluice_core.scheduling.prefix_index import PrefixIndex
from sluice_router.errors import EngineProtocolError
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest
from sluice_router.scheduling.state import EnginePool
from sluice_router.text.prompt_hashes import PromptHashes

# Blocks hashed at first, and by how many times more each time that all so far are known.
FIRST_BLOCKS, GROWTH = 1, 8


def take_changes(pool: EnginePool, engine: ConnectedEngine, changes: engine_pb2.PrefixChanges) -> None:
    """Takes in what changed in an engine's prefix cache.

    Raises:
        EngineProtocolError: A message is missing: what is known of the cache is not what is in it.
    """
    scheme = engine.prefix_scheme
    if scheme is None:
        return
    if changes.sequence != engine.prefix_sequence + 1 or changes.is_reset != (changes.sequence == 1):
        raise EngineProtocolError(f"prefixes {changes.sequence} came where {engine.prefix_sequence + 1} was due")
    engine.prefix_sequence = changes.sequence
    index = pool.prefixes.setdefault(scheme, PrefixIndex())
    if changes.is_reset:
        index.forget(engine.engine_id)
    index.update(engine.engine_id, changes.stored, changes.removed)


def forget(pool: EnginePool, engine: ConnectedEngine) -> None:
    """Forgets what a lost engine has cached; its next stream begins with all of it."""
    index = pool.prefixes.get(engine.prefix_scheme) if engine.prefix_scheme is not None else None
    if index is not None:
        index.forget(engine.engine_id)
        if not index:
            del pool.prefixes[engine.prefix_scheme]  # type: ignore[arg-type]  # it has an index


def find_cached(pool: EnginePool, request: LiveRequest) -> dict[EngineId, int]:
    """Finds the tokens of a request's prompt that engines have cached.

    Returns:
        Tokens by engine; engines without any are left out.
    """
    cached: dict[EngineId, int] = {}
    for scheme, index in pool.prefixes.items():
        hashes = request.prompt_hashes.get(scheme)
        if hashes is None:
            hashes = PromptHashes(request.new.prompt_token_ids, scheme, request.new.cache_salt)
            request.prompt_hashes[scheme] = hashes
        cached.update(_match(index, hashes, scheme.block_size_tokens))
    return cached


def _match(index: PrefixIndex, hashes: PromptHashes, block_size_tokens: int) -> dict[EngineId, int]:
    num_blocks = FIRST_BLOCKS
    known = hashes.extend(num_blocks)
    while len(known) < hashes.num_blocks and index.holds(known[-1]):
        num_blocks *= GROWTH
        known = hashes.extend(num_blocks)
    return index.match(known, block_size_tokens)
