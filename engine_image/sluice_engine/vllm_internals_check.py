"""Refuses a vLLM or NIXL that differs from the one that the hooks are written against, and lists the differences.

vLLM's scheduler, connectors and model runner are not public. Every method that is overridden is listed here with its
parameters, every attribute that is used with its owner. An upgrade of vLLM begins with making this check pass.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from sluice_core.model_support import SUPPORTED
from sluice_engine.errors import ModelRefusedError, UnsupportedVllmError
from sluice_engine.kv_transfer import nixl_progress
from sluice_engine.supported_versions import SUPPORTED_NIXL, find_version, find_vllm_difference

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

# Overridden or called: owner -> method -> parameters, in order.
SIGNATURES: dict[type | ModuleType, dict[str, str]] = {
    Scheduler: {
        "schedule": "self, throttle_prefills",
        "update_from_output": "self, scheduler_output, model_runner_output",
        "add_request": "self, request",
        "finish_requests": "self, request_ids, finished_status",
        "has_finished_requests": "self",
        "_free_request": "self, request, delay_free_blocks",
        "_free_blocks": "self, request",
        "_preempt_request": "self, request, timestamp, drop_stale_output",
        "_handle_blocked_waiting_request": "self, request",
        "_update_waiting_for_remote_kv": "self, request",
        "_update_from_kv_xfer_finished": "self, kv_connector_output",
        "_reserve_prefill_lookahead": "self, request, num_computed_tokens, num_new_tokens",
        "_inflight_prefill_reserved_blocks": "self",
    },
    AsyncScheduler: {
        "_update_after_schedule": "self, scheduler_output",
        "_update_request_with_output": "self, request, new_token_ids, is_stale",
    },
    KVCacheManager: {
        "allocate_slots": (
            "self, request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens, "
            "num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, full_sequence_must_fit, "
            "reserved_blocks, has_scheduled_reqs, skip_zeroing_group_ids"
        ),
        "get_block_ids": "self, request_id",
        "get_computed_blocks": "self, request",
        "get_blocks": "self, request_id",
    },
    BlockPool: {
        "get_num_free_blocks": "self",
        "get_new_blocks": "self, num_blocks",
        "free_blocks": "self, ordered_blocks",
        "touch": "self, blocks",
        "get_cached_block": "self, block_hash, kv_cache_group_ids",
        "cache_full_blocks": (
            "self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask"
        ),
    },
    PriorityRequestQueue: {
        "add_request": "self, request",
        "remove_request": "self, request",
        "remove_requests": "self, requests",
        "peek_request": "self",
    },
    Request: {
        "append_output_token_ids": "self, token_ids",
        "is_finished": "self",
    },
    NixlBaseConnector: {"__init__": "self, vllm_config, role, kv_cache_config"},
    NixlPullConnector: {"start_load_kv": "self, forward_context, kwargs"},
    NixlBaseConnectorScheduler: {"on_new_request": "self, request"},
    NixlPullConnectorScheduler: {
        "__init__": "self, vllm_config, engine_id, kv_cache_config",
        "get_num_new_matched_tokens": "self, request, num_computed_tokens",
        "update_state_after_alloc": "self, request, blocks, num_external_tokens",
        "request_finished": "self, request, block_ids",
    },
    NixlBaseConnectorWorker: {"_handle_heartbeat": "self, payload"},
    EngineCoreOutput: {},
    EngineCore: {"preprocess_add_request": "self, request"},
    kv_cache_utils: {"get_kv_cache_groups": "vllm_config, kv_cache_spec"},
    EngineCoreProc: {"_process_input_queue": "self", "_handle_client_request": "self, request_type, request"},
}

# Attributes that instances have: owner -> the function whose source sets or uses them -> names.
INSTANCE_ATTRIBUTES: dict[tuple[type, str], tuple[str, ...]] = {
    (Scheduler, "__init__"): (
        "self.running",
        "self.waiting",
        "self.kv_holding_waiting",
        "self.requests",
        "self.connector",
        "self.kv_cache_manager",
        "self.block_size",
        "self.max_model_len",
        "self.max_num_active_reqs",
        "self.max_num_running_reqs",
        "self.max_num_scheduled_tokens",
        "self.failed_recving_kv_req_ids",
        "self.grammar_compile_error_reqs",
        "self.recompute_kv_load_failures",
    ),
    # The hook that hands out the prefill budget, and the order that preemption follows.
    (Scheduler, "schedule"): (
        "self._reserve_prefill_lookahead(",
        "self.kv_cache_manager.allocate_slots(",
        "key=lambda r: (r.priority, r.arrival_time)",
        "request.is_prefill_chunk",
    ),
    (KVCacheManager, "__init__"): ("self.block_pool",),
    (BlockPool, "__init__"): ("self.num_gpu_blocks", "self.null_block"),
    (EngineCore, "__init__"): ("self.batch_queue", "get_request_block_hasher("),
    (EngineCoreProc, "__init__"): ("self.input_queue",),
    # Events of the prefix cache go to the scheduler's publisher before the outputs of their iteration are made.
    (Scheduler, "update_from_output"): ("self.kv_event_publisher.publish(batch)",),
    (Request, "__init__"): (
        "self.priority",
        "self.arrival_time",
        "self.status",
        "self.max_tokens",
        "self.num_computed_tokens",
        "self.num_output_placeholders",
        "self.num_in_flight_tokens",
        "self.block_hashes",
        "self.num_prompt_tokens",
        "self.kv_transfer_params",
        "self.prefill_stats",
        "self.structured_output_request",
    ),
    (Request, "__lt__"): ("self.priority", "self.arrival_time"),
    (NixlBaseConnectorScheduler, "__init__"): (
        "self._reqs_need_recv",
        "self._reqs_need_send",
        "self._reqs_in_batch",
        "self._reqs_not_processed",
        "self.transfer_tp_size",
        "self.block_size",
    ),
    (NixlPullConnectorScheduler, "request_finished"): ("_kv_lease_duration", "remote_num_tokens"),
    # The V1 runner makes its state of a request by this name, and takes back draws by offset.
    (GPUModelRunner, "_update_states"): ("CachedRequestState(",),
    (GPUModelRunner, "_bookkeeping_sync"): ("gen.set_offset(gen.get_offset()",),
}

RECORD_FIELDS: dict[type, tuple[str, ...]] = {
    CachedRequestState: ("sampling_params", "output_token_ids", "generator"),
    EngineCoreOutput: ("request_id", "new_token_ids", "kv_transfer_params"),
    EngineCoreOutputs: ("outputs",),
}


def check_installed() -> None:
    """Checks what is installed.

    Raises:
        UnsupportedVllmError: It names every difference.
    """
    differences = [find_vllm_difference(), *_compare_signatures(), *_compare_attributes(), *_compare_nixl()]
    if differences := [difference for difference in differences if difference]:
        raise UnsupportedVllmError("this vLLM is not supported: " + "; ".join(differences))


def check_kv_cache_groups(groups: Sequence[Any]) -> None:
    """Checks how vLLM groups the KV cache of a model's layers.

    Args:
        groups: vLLM's; layers of a group share blocks.

    Raises:
        ModelRefusedError: There is not one group, or it is not of full attention.
    """
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ModelRefusedError(f"the model's KV cache has the groups [{kinds}]; {SUPPORTED}")


def check_scheduler(scheduler: Any) -> None:
    """Checks a constructed scheduler: settings and model.

    Args:
        scheduler: vLLM's scheduler of this engine.

    Raises:
        ModelRefusedError: The model's KV cache is not of full attention alone.
        UnsupportedVllmError: It names every difference.
    """
    check_kv_cache_groups(scheduler.kv_cache_config.kv_cache_groups)
    differences = []
    if scheduler.policy.value != "priority":
        differences.append(f"scheduling policy is {scheduler.policy.value!r}, must be 'priority'")
    if scheduler.connector is None:
        differences.append("no KV connector is configured")
    elif not scheduler.recompute_kv_load_failures:
        differences.append("kv_load_failure_policy must be 'recompute'")
    config = scheduler.vllm_config
    if config.device_config.device_type != "cpu" and not config.use_v2_model_runner:
        differences.append("on a GPU the V2 model runner is required: V1 cannot resume a seeded request")
    if config.speculative_config is not None:
        differences.append("speculative decoding is not supported")
    if differences:
        raise UnsupportedVllmError("this engine is not supported: " + "; ".join(differences))


def _compare_signatures() -> list[str]:
    return [
        f"{owner.__name__}.{name} takes ({found}), expected ({expected})"
        for owner, methods in SIGNATURES.items()
        for name, expected in methods.items()
        if (found := _read_parameters(owner, name)) != expected
    ]


def _read_parameters(owner: type | ModuleType, name: str) -> str:
    method = getattr(owner, name, None)
    return ", ".join(inspect.signature(method).parameters) if callable(method) else "missing"


def _compare_attributes() -> list[str]:
    missing = [
        f"{owner.__name__}.{function} has no {name!r} any more"
        for (owner, function), names in INSTANCE_ATTRIBUTES.items()
        for name in names
        if name not in inspect.getsource(getattr(owner, function))
    ]
    return missing + [
        f"{owner.__name__} has no field {name!r} any more"
        for owner, names in RECORD_FIELDS.items()
        for name in names
        if name not in _list_fields(owner)
    ]


def _list_fields(owner: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(owner):
        return tuple(field.name for field in dataclasses.fields(owner))
    return tuple(owner.__struct_fields__)


def _compare_nixl() -> list[str]:
    version = find_version("nixl")
    if version != SUPPORTED_NIXL:
        return [f"installed is nixl {version or 'not at all'}, supported is {SUPPORTED_NIXL}"]
    try:
        nixl_progress.load_bindings()
    except nixl_progress.UnsupportedNixlError as error:
        return [str(error)]
    return []
