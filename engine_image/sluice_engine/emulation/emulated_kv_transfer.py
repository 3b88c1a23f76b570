"""KV transfers of emulated engines: nothing is copied, everything else happens.

The source holds the blocks of a handed-off request until its reader has them or the lease ends. The reader first asks
the source, so that it notices a dead one; then the transfer takes its turn on the link and its modelled time.
"""

from __future__ import annotations

import heapq
import json
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.kv_copy_rules import count_tail_tokens
from sluice_engine.core_messages import NUM_TOKENS_KEY
from sluice_engine.emulation.emulated_gpu_profile import find_gpu, read_settings
from sluice_engine.kv_transfer.kv_handles import read_handle, read_offer
from sluice_engine.kv_transfer.kv_transfer_timeouts import KV_LEASE_S

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Seconds between two questions to a source, and until it counts as gone (UCX_TCP_USER_TIMEOUT of a real engine).
ASK_EVERY_S = 0.02
ASK_FOR_S = 4.0
MAX_DATAGRAM_BYTES = 2048

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRead:
    """A transfer to start.

    Args:
        request_id: The reader's request.
        source: Where the source listens.
        remote_request_id: The source's request.
        num_bytes: Bytes to move.
    """

    request_id: str
    source: Address
    remote_request_id: str
    num_bytes: int


@dataclass
class EmulatedMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half passes to the executor.

    Args:
        reads: Transfers to start.
        holds: Handed-off requests whose blocks wait from now on.
        notices: Sources to notify that nobody reads, and their requests.
    """

    reads: list[KvRead] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    notices: list[tuple[Address, str]] = field(default_factory=list)


@dataclass(slots=True)
class FinishedTransfers:
    """Transfers that ended since the last call.

    Args:
        received: Requests that need not wait any more.
        failed: Those of them whose source is gone.
        sent: Requests whose blocks are free: read, or their lease is over.
        num_bytes: Bytes that arrived, by transfer.
        durations_s: Seconds they took, by transfer.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    num_bytes: list[int] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)


class KvPort:
    """An engine's KV port: a thread answers readers at once, as a network card does not wait for an iteration either.

    Args:
        address: Where to listen.
    """

    def __init__(self, address: Address) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._read: set[str] = set()
        self._answered: set[str] = set()
        threading.Thread(target=self._serve, name="emulated-kv", daemon=True).start()

    def hold(self, request_id: str) -> None:
        """Answers readers of a request from now on."""
        with self._lock:
            self._held.add(request_id)

    def drop(self, request_id: str) -> None:
        """Does not any more."""
        with self._lock:
            self._held.discard(request_id)

    def take_read(self) -> set[str]:
        """Requests that readers were done with since the last call."""
        with self._lock:
            done, self._read = self._read, set()
        return done

    def has_answer(self, remote_request_id: str) -> bool:
        """Whether a source has said that it holds a request; True once."""
        with self._lock:
            is_answered = remote_request_id in self._answered
            self._answered.discard(remote_request_id)
        return is_answered

    def send(self, address: Address, verb: str, request_id: str) -> None:
        """Sends a datagram; one that cannot be sent is one that was lost."""
        try:
            self._socket.sendto(json.dumps([verb, request_id]).encode(), address)
        except OSError:
            return

    def _serve(self) -> None:
        while True:
            try:
                datagram, sender = self._socket.recvfrom(MAX_DATAGRAM_BYTES)
                verb, request_id = json.loads(datagram)
            except (OSError, ValueError):
                continue  # a stray datagram, or the report that an earlier one did not arrive
            with self._lock:
                is_held = request_id in self._held
                if verb == "done":
                    self._read.add(request_id)
                elif verb == "held":
                    self._answered.add(request_id)
            if verb == "read" and is_held:
                self.send(sender, "held", request_id)


class EmulatedTransfers:
    """The worker's half: transfers under way, on both sides.

    Args:
        port: The engine's KV port.
        bytes_per_s: Bandwidth of its link, shared in turn by what it reads.
        latency_s: Time that every transfer takes besides.
    """

    def __init__(self, port: KvPort, bytes_per_s: float, latency_s: float) -> None:
        self._port = port
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._link_free_s = 0.0
        # Reads that wait for their source: when they began, when to ask again.
        self._asking: dict[str, tuple[KvRead, float, float]] = {}
        self._moving: list[tuple[float, float, str, KvRead]] = []
        self._leases: dict[str, float] = {}

    def advance(self, metadata: EmulatedMetadata, now_s: float) -> FinishedTransfers:
        """Starts what the scheduler wants and returns what has ended."""
        for address, request_id in metadata.notices:
            self._port.send(address, "done", request_id)
        for request_id in metadata.holds:
            self._leases[request_id] = now_s + KV_LEASE_S
            self._port.hold(request_id)
        for read in metadata.reads:
            self._asking[read.request_id] = (read, now_s, now_s)
        finished = FinishedTransfers()
        self._ask(now_s, finished)
        self._move(now_s, finished)
        self._end_leases(now_s, finished)
        return finished

    def _ask(self, now_s: float, finished: FinishedTransfers) -> None:
        for request_id, (read, began_s, ask_s) in list(self._asking.items()):
            if self._port.has_answer(read.remote_request_id):
                del self._asking[request_id]
                # The answer came between two iterations. A link begins with it, and does not wait for the iteration.
                self._link_free_s = max(began_s, self._link_free_s) + read.num_bytes / self._bytes_per_s
                heapq.heappush(self._moving, (self._link_free_s + self._latency_s, began_s, request_id, read))
            elif now_s >= began_s + ASK_FOR_S:
                del self._asking[request_id]
                finished.received.add(request_id)
                finished.failed.add(request_id)
            elif now_s >= ask_s:
                self._asking[request_id] = (read, began_s, now_s + ASK_EVERY_S)
                self._port.send(read.source, "read", read.remote_request_id)

    def _move(self, now_s: float, finished: FinishedTransfers) -> None:
        while self._moving and self._moving[0][0] <= now_s:
            end_s, start_s, request_id, read = heapq.heappop(self._moving)
            finished.received.add(request_id)
            finished.num_bytes.append(read.num_bytes)
            finished.durations_s.append(end_s - start_s)
            self._port.send(read.source, "done", read.remote_request_id)

    def _end_leases(self, now_s: float, finished: FinishedTransfers) -> None:
        over = self._port.take_read()
        over.update(request_id for request_id, end_s in self._leases.items() if end_s <= now_s)
        for request_id in over & self._leases.keys():
            del self._leases[request_id]
            self._port.drop(request_id)
            finished.sent.add(request_id)


def count_page_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one KV block over all layers."""
    groups = kv_cache_config.kv_cache_groups
    return sum(int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names) for group in groups)


class EmulatedConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler's half; ``KvConnector`` for the scheduler, as the NIXL connector is."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._engine_id = transfer.engine_id
        self._block_size = vllm_config.cache_config.block_size
        self._address: Address = (
            transfer.get_from_extra_config("host", ""),
            transfer.get_from_extra_config("port", 0),
        )
        gpu = find_gpu(read_settings(vllm_config))
        self._bytes_per_token = gpu.kv_bytes_per_token or count_page_bytes(kv_cache_config) // self._block_size
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._metadata = EmulatedMetadata()

    # --- KvConnector -----------------------------------------------------------------------------------------------

    def start_pull(self, request: Request, transfer_params: str) -> None:
        """See ``KvConnector``."""
        request.kv_transfer_params = read_handle(
            transfer_params,
            num_tokens=request.num_tokens,
            block_size=self._block_size,
            engine_id=self._engine_id,
            tp_size=self._tp_size,
        )

    def cancel_pull(self, request: Request) -> None:
        """See ``KvConnector``."""
        params = request.kv_transfer_params
        params["do_remote_prefill"] = False
        self._notify(params)

    def announce_hand_off(self, request_id: str) -> None:
        """Nothing to do: a reader that comes early asks again."""

    def retract_hand_off(self, request_id: str) -> None:
        """See ``announce_hand_off``."""

    def hand_off(self, request: Request) -> None:
        """See ``KvConnector``."""
        request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}

    def release(self, request_id: str) -> None:
        """Forgets a request that the executor has not heard of; another one's lease just ends unread."""
        if request_id in self._metadata.holds:
            self._metadata.holds.remove(request_id)

    def offer(self, offer_id: str, block_ids: list[int]) -> dict[str, Any]:
        """See ``KvConnector``."""
        self._metadata.holds.append(offer_id)
        return self._locate(offer_id, block_ids)

    def read_offer(self, transfer_params: str) -> dict[str, Any]:
        """See ``KvConnector``."""
        return read_offer(
            transfer_params, block_size=self._block_size, engine_id=self._engine_id, tp_size=self._tp_size
        )

    def pull_part(self, read_id: str, params: dict[str, Any], block_ids: list[int]) -> None:
        """See ``KvConnector``."""
        if block_ids:
            self._read(read_id, params, len(block_ids) * self._block_size)
        else:
            self._notify(params)

    def _locate(self, remote_request_id: str, block_ids: list[int]) -> dict[str, Any]:
        return {
            "remote_block_ids": [block_ids],
            "remote_engine_id": self._engine_id,
            "remote_request_id": remote_request_id,
            "remote_host": self._address[0],
            "remote_port": self._address[1],
            "tp_size": self._tp_size,
        }

    # --- vLLM's connector, in the scheduler ------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens to pull beyond those in the prefix cache, and whether the pull runs beside iterations."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        count = params[NUM_TOKENS_KEY] - num_computed_tokens
        if count <= 0 or count_tail_tokens(count, num_computed_tokens, self._block_size):
            return 0, False
        return count, True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002
        """Starts the pull, or notifies the source that the prefix cache had it all."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        if num_external_tokens <= 0:
            self._notify(params)
            return
        self._read(request.request_id, params, num_external_tokens)

    def _read(self, read_id: str, params: dict[str, Any], num_tokens: int) -> None:
        self._metadata.reads.append(
            KvRead(
                request_id=read_id,
                source=(params["remote_host"], params["remote_port"]),
                remote_request_id=params["remote_request_id"],
                num_bytes=num_tokens * self._bytes_per_token,
            )
        )

    def _notify(self, params: dict[str, Any]) -> None:
        source = (params["remote_host"], params["remote_port"])
        self._metadata.notices.append((source, params["remote_request_id"]))

    def build_connector_meta(self, scheduler_output: Any) -> EmulatedMetadata:  # noqa: ARG002 - vLLM's signature
        """Hands over what has come together since the last iteration."""
        metadata, self._metadata = self._metadata, EmulatedMetadata()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decides whether blocks stay for a reader, and returns where they lie."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            self._notify(params)
        if not params or not params.get("do_remote_decode"):
            return False, None
        # An iteration in flight may have added blocks, and counts as computed; the last token has no KV.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._metadata.holds.append(request.request_id)
        kept = block_ids[0][: blocks_for_tokens(num_tokens, self._block_size)]
        return True, {NUM_TOKENS_KEY: num_tokens, **self._locate(request.request_id, kept)}

    # --- vLLM's connector, in the worker: the executor plays it ------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""
