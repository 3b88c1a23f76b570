"""vLLM's NIXL pull connector with exact token counts, bounded leases and hand-off of a running decode."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.kv_copy_rules import count_tail_tokens
from sluice_engine.core_messages import NUM_TOKENS_KEY
from sluice_engine.kv_transfer import nixl_progress, transport_in_use
from sluice_engine.kv_transfer.kv_handles import read_handle, read_offer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


# Begins a heartbeat, which the source's worker ignores. A notice that reads had ended could come before that worker had
# heard of an offer, and would be dropped; the router ends offers instead.
_NO_NOTICE = "HB:"


@contextlib.contextmanager
def keep_affinity() -> Iterator[None]:
    """Undoes what the block does to the cores that this process may use, for threads that it starts too.

    On a CPU the stock worker binds the calling thread, which here computes the model, to the last core of the machine:
    all engines of a machine then share that one, and starve one another.
    """
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


class SluiceConnectorScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """The scheduler's half."""

    def on_new_request(self, request: Request) -> None:
        """Sends no heartbeats: they would extend leases for as long as a request waits at the reader."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens to pull beyond those in the prefix cache, and whether the pull runs beside iterations."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        # At an iteration boundary a request of n tokens has the KV of n - 1. vLLM's own connector asks for n, which can
        # be a block more than the source has.
        count = params[NUM_TOKENS_KEY] - num_computed_tokens
        if count <= 0 or count_tail_tokens(count, num_computed_tokens, self.block_size):
            return 0, False
        return count, True

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Decides whether blocks stay for a reader, and returns where they lie."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return super().request_finished(request, block_ids)  # type: ignore[no-any-return]
        # An iteration in flight may have added blocks, and counts as computed; the last token has no KV.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        keep = blocks_for_tokens(num_tokens, self.block_size)
        is_delayed, handle = super().request_finished(request, tuple(group[:keep] for group in block_ids))
        if handle is not None:
            handle[NUM_TOKENS_KEY] = num_tokens
        return is_delayed, handle

    def announce_hand_off(self, request_id: str) -> None:
        """See ``KvConnector``."""
        # One iteration early: with asynchronous scheduling the reader's completion notice can arrive before the worker
        # has heard of the request, and would be dropped.
        self._reqs_not_processed.discard(request_id)
        self._reqs_in_batch.add(request_id)

    def retract_hand_off(self, request_id: str) -> None:
        """See ``KvConnector``."""
        self._reqs_in_batch.discard(request_id)
        self._reqs_not_processed.add(request_id)

    def release(self, request_id: str) -> None:
        """Keeps the worker from counting a lease that it has not heard of yet."""
        if self._reqs_need_send.pop(request_id, None) is not None:
            self.retract_hand_off(request_id)

    def offer(self, offer_id: str, block_ids: list[int]) -> dict[str, Any]:
        """See ``KvConnector``: the worker does not hear of it, and the reader's notice goes for a heartbeat."""
        return {
            "remote_block_ids": [block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"{_NO_NOTICE}{offer_id}",
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "tp_size": self.transfer_tp_size,
        }

    def pull_part(self, read_id: str, params: dict[str, Any], block_ids: list[int]) -> None:
        """See ``KvConnector``: to the worker it is a request that waits for its KV."""
        if block_ids:
            part = SimpleNamespace(request_id=read_id, kv_transfer_params=params)
            self._reqs_need_recv[read_id] = (part, [block_ids], (0,), True)

    def cancel_pull(self, request: Request) -> None:
        """Sends the source a completion notice for a request that reads nothing."""
        request.kv_transfer_params["do_remote_prefill"] = False
        self._reqs_need_recv[request.request_id] = (request, [], (), False)


class SluiceConnectorWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """The worker's half."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with keep_affinity():
            super().__init__(*args, **kwargs)
        transport_in_use.keep_flushed()

    def _handle_heartbeat(self, payload: str) -> None:
        """Leases are not extended."""


class SluiceConnector(NixlPullConnector):  # type: ignore[misc]
    """What ``kv_connector_module_path`` names."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # The stock class would make a second NIXL agent: only its base is initialized.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = SluiceConnectorScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            delay_us = self.kv_transfer_config.get_from_extra_config(
                nixl_progress.DELAY_KEY, nixl_progress.DEFAULT_DELAY_US
            )
            nixl_progress.set_progress_delay(int(delay_us))
            self.connector_worker = SluiceConnectorWorker(vllm_config, self.engine_id, kv_cache_config)

    def start_pull(self, request: Request, transfer_params: str) -> None:
        """See ``KvConnector``."""
        request.kv_transfer_params = read_handle(
            transfer_params,
            num_tokens=request.num_tokens,
            block_size=self._block_size,
            engine_id=self.engine_id,
            tp_size=self.connector_scheduler.transfer_tp_size,
        )

    def cancel_pull(self, request: Request) -> None:
        """See ``KvConnector``."""
        self.connector_scheduler.cancel_pull(request)

    def announce_hand_off(self, request_id: str) -> None:
        """See ``KvConnector``."""
        self.connector_scheduler.announce_hand_off(request_id)

    def retract_hand_off(self, request_id: str) -> None:
        """See ``KvConnector``."""
        self.connector_scheduler.retract_hand_off(request_id)

    def hand_off(self, request: Request) -> None:
        """See ``KvConnector``."""
        request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}

    def release(self, request_id: str) -> None:
        """See ``KvConnector``."""
        self.connector_scheduler.release(request_id)

    def offer(self, offer_id: str, block_ids: list[int]) -> dict[str, Any]:
        """See ``KvConnector``."""
        params: dict[str, Any] = self.connector_scheduler.offer(offer_id, block_ids)
        return params

    def read_offer(self, transfer_params: str) -> dict[str, Any]:
        """See ``KvConnector``."""
        return read_offer(
            transfer_params,
            block_size=self._block_size,
            engine_id=self.engine_id,
            tp_size=self.connector_scheduler.transfer_tp_size,
        )

    def pull_part(self, read_id: str, params: dict[str, Any], block_ids: list[int]) -> None:
        """See ``KvConnector``."""
        self.connector_scheduler.pull_part(read_id, params, block_ids)
