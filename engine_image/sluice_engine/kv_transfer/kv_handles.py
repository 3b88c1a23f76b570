"""KV handles: where the blocks of a handed-off request lie; written here, and checked before vLLM sees them.

A handle comes back from a router. A malformed one would make NIXL's worker raise, which ends the engine with all its
requests, or read shifted blocks without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_engine.core_messages import FIRST_TOKEN_KEY, NUM_TOKENS_KEY

if TYPE_CHECKING:
    from sluice.v1 import engine_pb2 as wire

_BlockId = Annotated[int, Meta(ge=1)]  # block 0 is vLLM's null block
_Positive = Annotated[int, Meta(ge=1)]
_Text = Annotated[str, Meta(min_length=1, max_length=512)]


class MalformedHandleError(ValueError):
    """A handle that must not be read; the request recomputes."""


class _Handle(msgspec.Struct, frozen=True, kw_only=True):
    num_tokens: _Positive = msgspec.field(name=NUM_TOKENS_KEY)
    first_token: Annotated[int, Meta(ge=0)] = msgspec.field(name=FIRST_TOKEN_KEY, default=0)
    remote_block_ids: list[list[_BlockId]]
    remote_engine_id: _Text
    remote_request_id: _Text
    remote_host: _Text
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    tp_size: _Positive
    dcp_size: _Positive = 1
    pp_size: _Positive = 1


@dataclass(slots=True, kw_only=True)
class KvSource:
    """Where the KV of this engine's requests lies; goes into every KV handle.

    Args:
        engine_id: This engine.
        epoch: Its epoch.
        fingerprint: Its fingerprint.
    """

    engine_id: str
    epoch: int
    fingerprint: str

    def fill(self, handle: wire.KvHandle, num_tokens: int, transfer_params: str) -> None:
        """Fills in a handle of KV that lies here."""
        handle.engine_id, handle.epoch, handle.fingerprint = self.engine_id, self.epoch, self.fingerprint
        handle.num_tokens, handle.transfer_params_json = num_tokens, transfer_params


def read_handle(text: str, *, num_tokens: int, block_size: int, engine_id: str, tp_size: int) -> dict[str, Any]:
    """Checks and trims a handle.

    Args:
        text: The handle, as JSON.
        num_tokens: Tokens of the request, prompt and output.
        block_size: Tokens per block, equal on both sides.
        engine_id: The reader's own NIXL id.
        tp_size: The reader's tensor-parallel size.

    Returns:
        ``kv_transfer_params`` for vLLM's pull connector.

    Raises:
        MalformedHandleError: It names what is wrong.
    """
    handle = _parse(text)
    _check_peer(handle, engine_id=engine_id, tp_size=tp_size)
    if handle.first_token:
        raise MalformedHandleError(f"KV handle: an offer that begins after {handle.first_token} tokens")
    blocks = _check_blocks(handle, block_size)
    # The last token's KV never exists before its own iteration, whatever the handle says.
    num_wanted = min(handle.num_tokens, num_tokens - 1)
    if num_wanted < 1:
        raise MalformedHandleError(f"KV handle: the request has {num_tokens} tokens, nothing to read")
    # NIXL's worker pairs both lists from their ends, so they must cover the same tokens.
    return _make_params(handle, num_wanted, blocks[: blocks_for_tokens(num_wanted, block_size)])


def read_offer(text: str, *, block_size: int, engine_id: str, tp_size: int) -> dict[str, Any]:
    """Checks the handle of an offer, which is of full blocks.

    Args:
        text: The handle, as JSON.
        block_size: Tokens per block, equal on both sides.
        engine_id: The reader's own NIXL id.
        tp_size: The reader's tensor-parallel size.

    Returns:
        ``kv_transfer_params`` for vLLM's pull connector, and ``FIRST_TOKEN_KEY``.

    Raises:
        MalformedHandleError: It names what is wrong.
    """
    handle = _parse(text)
    _check_peer(handle, engine_id=engine_id, tp_size=tp_size)
    if handle.num_tokens % block_size or handle.first_token % block_size or handle.num_tokens <= handle.first_token:
        raise MalformedHandleError(
            f"KV handle: an offer of tokens {handle.first_token} to {handle.num_tokens}, {block_size} to a block"
        )
    blocks = _check_blocks(handle, block_size)
    return _make_params(handle, handle.num_tokens, blocks) | {FIRST_TOKEN_KEY: handle.first_token}


def _make_params(handle: _Handle, num_tokens: int, blocks: list[int]) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        NUM_TOKENS_KEY: num_tokens,
        "remote_block_ids": [blocks],
        "remote_num_tokens": num_tokens,
        "remote_engine_id": handle.remote_engine_id,
        "remote_request_id": handle.remote_request_id,
        "remote_host": handle.remote_host,
        "remote_port": handle.remote_port,
        "tp_size": handle.tp_size,
    }


def _parse(text: str) -> _Handle:
    """Reads the JSON; types and bounds of each field by itself are checked here."""
    try:
        return msgspec.json.decode(text, type=_Handle)
    except msgspec.DecodeError as error:
        raise MalformedHandleError(f"KV handle: {error}") from error


def _check_peer(handle: _Handle, *, engine_id: str, tp_size: int) -> None:
    """Refuses a writer that is the reader itself, or that splits its KV in another way."""
    if handle.remote_engine_id == engine_id:
        raise MalformedHandleError(f"KV handle: engine {engine_id} would read from itself")
    if (handle.tp_size, handle.dcp_size, handle.pp_size) != (tp_size, 1, 1):
        raise MalformedHandleError(
            f"KV handle: tensor, context and pipeline parallel sizes are {handle.tp_size}, {handle.dcp_size}, "
            f"{handle.pp_size}; this engine has {tp_size}, 1, 1"
        )


def _check_blocks(handle: _Handle, block_size: int) -> list[int]:
    """Returns the blocks: one KV group of distinct ones, exactly as many as the tokens fill."""
    if len(handle.remote_block_ids) != 1:
        raise MalformedHandleError(f"KV handle: {len(handle.remote_block_ids)} KV groups, exactly 1 is supported")
    blocks = handle.remote_block_ids[0]
    num_tokens = handle.num_tokens - handle.first_token
    if len(blocks) != blocks_for_tokens(num_tokens, block_size) or len(set(blocks)) != len(blocks):
        raise MalformedHandleError(
            f"KV handle: {len(blocks)} blocks ({len(set(blocks))} distinct) for {num_tokens} tokens, "
            f"{block_size} to a block"
        )
    return blocks
