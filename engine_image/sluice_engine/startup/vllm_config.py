"""vLLM's configuration of an engine: its arguments, and what it reads from the environment.

On the CPU, and for an emulated GPU, the EngineCore is a fork of this process with the model inside it: it starts in 3 s
instead of 16, with half the memory. On a GPU vLLM's defaults stay (spawn, its executors, CUDA graphs). Variables of the
environment for threads, logging and the network keep their values.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from vllm.config import KVTransferConfig, StructuredOutputsConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sluice_core.model_support import SUPPORTED
from sluice_engine import plugin
from sluice_engine.emulation import emulated_gpu_profile
from sluice_engine.errors import ModelRefusedError, SettingsError, StartError
from sluice_engine.kv_transfer.transfer_config import make_transfer_config
from sluice_engine.startup import model_classes

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from sluice_engine.settings import EngineSettings

# CPU defaults. vLLM's own block of 128 tokens hides errors at block boundaries; 32 is the smallest that it recommends.
CPU_BLOCK_SIZE = 32
CPU_KV_CACHE_BYTES = 64 << 20
EMULATED_BLOCK_SIZE = 16
# By itself vLLM lets the first constrained request of an engine choose, and engines come to differ. The router compiles
# constraints with the same library.
GRAMMAR_BACKEND = "guidance"
# vLLM's default, and the only one that routers know: its prefixes are the same in all processes.
PREFIX_HASH = "sha256"
# Seconds after which a peer that vanished without a reset counts as gone; a pull of it hangs for minutes otherwise.
PEER_TIMEOUT = "4s"
# What vLLM knows of a model by its class, where config.json does not say it: attribute -> what it means.
UNSUPPORTED_MODELS = {
    "is_attention_free": "has no attention",
    "is_hybrid": "has layers without attention",
    "is_encoder_decoder": "has an encoder",
    "attention_chunk_size": "has attention that is local to chunks",
}
# vLLM lists every architecture that it knows; a pod's termination message has 4096 bytes.
MAX_REFUSAL_CHARACTERS = 500


def set_environment(settings: EngineSettings) -> None:
    """Sets what vLLM, NIXL and UCX read from the environment; before vLLM's configuration is made."""
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.kv_host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(settings.kv_port)
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(settings.start_timeout_s))
    # Routers know blocks by the lower 64 bits of their hashes.
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("UCX_TCP_USER_TIMEOUT", PEER_TIMEOUT)
    if Path(settings.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if is_forked(settings):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # vLLM binds every engine of a machine to the same core by itself: then each starves while another computes.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # It would override kv_cache_memory_bytes.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if settings.kv_host in {"127.0.0.1", "::1", "localhost"}:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def is_forked(settings: EngineSettings) -> bool:
    """The EngineCore is forked and computes in its own process."""
    return settings.emulation is not None or current_platform.is_cpu()


def make_vllm_config(settings: EngineSettings, epoch: int) -> VllmConfig:
    """Makes vLLM's configuration.

    Args:
        settings: The engine's.
        epoch: Its epoch; a restarted engine is another one to NIXL.

    Raises:
        ModelRefusedError: vLLM refuses it, or the model needs what engines do not support.
        SettingsError: An argument of vLLM's is wrong.
        StartError: The model cannot be read.
    """
    set_environment(settings)
    if is_forked(settings):
        model_classes.register_classes(settings.model)
    try:
        arguments = merge_arguments(settings.vllm_args, vllm_arguments(settings, epoch))
        config = arguments.create_engine_config()
    except (ValueError, StrictDataclassError) as error:
        refused = f"vLLM refuses the configuration: {describe_refusal(error)}"
        # A name is looked up on the Hub, which may answer another time.
        is_here = Path(settings.model, "config.json").is_file()
        raise ModelRefusedError(refused) if is_here else StartError(refused) from error
    except OSError as error:
        raise StartError(f"vLLM cannot read the model: {error}") from error
    check_model_config(config.model_config)
    if is_forked(settings):
        # The CPU platform sets "spawn" while the configuration is made.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return config


def describe_refusal(error: Exception) -> str:
    """Says in one line why vLLM refuses a configuration; pydantic says it in several, with a link."""
    said = "; ".join(item["msg"] for item in error.errors()) if isinstance(error, ValidationError) else str(error)
    return textwrap.shorten(said.replace("Value error, ", ""), MAX_REFUSAL_CHARACTERS, placeholder=" ...")


def check_model_config(config: ModelConfig) -> None:
    """Refuses a model by what vLLM knows of it, before its weights are loaded.

    Raises:
        ModelRefusedError: Says what the model has.
    """
    found = [meaning for name, meaning in UNSUPPORTED_MODELS.items() if getattr(config, name)]
    if config.runner_type != "generate":
        found.append("generates no tokens")
    if found:
        raise ModelRefusedError(f"the model ({', '.join(config.architectures)}) {' and '.join(found)}; {SUPPORTED}")


class VllmArgumentParser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, without the pages of usage."""
        raise SettingsError(f"arguments after --: {message}")


def merge_arguments(user: tuple[str, ...], own: dict[str, Any]) -> AsyncEngineArgs:
    """Merges vLLM's arguments: the user's, over them our own, its defaults for the others."""
    if not user:
        return AsyncEngineArgs(**own)
    parser = AsyncEngineArgs.add_cli_args(VllmArgumentParser(prog="python -m sluice_engine ... --"))
    namespace = parser.parse_args(list(user))
    vars(namespace).update(own)
    return AsyncEngineArgs.from_cli_args(namespace)


def vllm_arguments(settings: EngineSettings, epoch: int) -> dict[str, Any]:
    """The arguments that this program sets."""
    arguments: dict[str, Any] = {
        "model": settings.model,
        "revision": settings.revision,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_batch_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        # Routers compute the same hashes, and hear from the scheduler which ones are cached.
        "prefix_caching_hash_algo": PREFIX_HASH,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        "scheduling_policy": "priority",
        "structured_outputs_config": StructuredOutputsConfig(backend=GRAMMAR_BACKEND),
        "scheduler_cls": plugin.ASYNC_SCHEDULER,
        "kv_transfer_config": KVTransferConfig(
            **make_transfer_config(
                engine_id=f"{settings.engine_id}-{epoch:x}",
                device="cpu" if current_platform.is_cpu() else "cuda",
                progress_delay_us=settings.kv_poll_us,
                backend=settings.kv_backend,
            )
        ),
    }
    if settings.dtype is not None:
        arguments["dtype"] = settings.dtype
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if settings.emulation is not None:
        return emulated_arguments(settings, arguments)
    if current_platform.is_cpu():
        return cpu_arguments(arguments)
    return arguments


def cpu_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an engine that computes on the CPU."""
    defaults = {"dtype": "float32", "block_size": CPU_BLOCK_SIZE, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    return {
        **defaults,
        **arguments,
        "enforce_eager": True,
        "scheduler_cls": plugin.SCHEDULER,
        "distributed_executor_backend": plugin.CPU_EXECUTOR,
    }


def emulated_arguments(settings: EngineSettings, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an emulated GPU: scheduled as one, with nothing to load."""
    assert settings.emulation is not None
    emulated_gpu_profile.find_gpu(settings.emulation)
    transfer = arguments["kv_transfer_config"]
    transfer.kv_connector = "EmulatedConnector"
    transfer.kv_connector_module_path = "sluice_engine.emulation.emulated_kv_transfer"
    transfer.kv_connector_extra_config = {"host": settings.kv_host, "port": settings.kv_port}
    return {
        "block_size": EMULATED_BLOCK_SIZE,
        **arguments,
        "enforce_eager": True,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "async_scheduling": True,
        "distributed_executor_backend": "sluice_engine.emulation.emulated_executor.EmulatedExecutor",
        "additional_config": {emulated_gpu_profile.CONFIG_KEY: settings.emulation.model_dump()},
    }
