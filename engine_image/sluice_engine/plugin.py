"""The entry point that vLLM calls in each of its processes (``vllm.general_plugins``).

It adds the utility that carries commands to ``EngineCore``, refuses models that have not full attention alone, and lets
the V1 model runner resume requests. Engines that do not use Sluice's scheduler are not affected.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from sluice_engine import core_messages, core_refusal, vllm_internals_check
from sluice_engine.kv_transfer import output_replay
from sluice_engine.scheduling import expected_arrivals

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Class paths for vLLM's settings.
SCHEDULER = "sluice_engine.scheduling.scheduler.SluiceScheduler"
ASYNC_SCHEDULER = "sluice_engine.scheduling.scheduler.SluiceAsyncScheduler"
CPU_EXECUTOR = "sluice_engine.startup.in_process_executor.InProcessExecutor"


def register() -> None:
    """Installs the plugin; calling it again changes nothing."""
    setattr(EngineCore, core_messages.UTILITY, _carry_out)
    EngineCoreProc._process_input_queue = _process_input_queue  # noqa: SLF001
    kv_cache_utils.get_kv_cache_groups = _group_kv_cache
    output_replay.install_in_runner()


_stock_process_input_queue = EngineCoreProc._process_input_queue  # noqa: SLF001


@functools.wraps(_stock_process_input_queue)
def _process_input_queue(engine_core: EngineCoreProc) -> None:
    """``EngineCoreProc._process_input_queue``, which waits a little for requests that are about to arrive."""
    _stock_process_input_queue(engine_core)
    expected_arrivals.hold(engine_core)


_stock_get_kv_cache_groups = kv_cache_utils.get_kv_cache_groups


@functools.wraps(_stock_get_kv_cache_groups)
def _group_kv_cache(vllm_config: VllmConfig, kv_cache_spec: dict[str, Any]) -> list[Any]:
    """``get_kv_cache_groups``, with the first look at them: connectors fail at others, and do not say why."""
    with core_refusal.reported():
        groups: list[Any] = _stock_get_kv_cache_groups(vllm_config, kv_cache_spec)
    if not core_refusal.is_prepared():
        return groups
    with core_refusal.reported():
        vllm_internals_check.check_kv_cache_groups(groups)
    return groups


def _carry_out(engine_core: EngineCore, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``EngineCore.sluice``: see ``core_messages``."""
    answers: list[dict[str, Any]] = engine_core.scheduler.carry_out(commands)
    return answers
