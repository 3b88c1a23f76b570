"""The identity of an engine: its epoch and its fingerprint.

KV moves only between engines of equal fingerprints. So a fingerprint holds whatever changes the bytes of the KV:
weights, their type, block size and layout, the split over GPUs, vLLM itself. It also holds the grammars' backend, in
whose grammar a moved request goes on. The parts are readable; the model's part is a hash.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from sluice.v1 import engine_pb2 as wire
from sluice_core.strategies.interface import Need
from sluice_engine.core_messages import CAPABILITIES
from sluice_engine.emulation.emulated_gpu_profile import find_gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from sluice_engine.settings import EngineSettings

# Samples of a weight file: enough to distinguish two trainings of one architecture, and quick for any size.
SAMPLE_BYTES = 65536
NUM_SAMPLES = 16
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".gguf"})


def make_epoch() -> int:
    """A number that no other start of an engine has: milliseconds since 1970, then 20 random bits."""
    return (time.time_ns() // 1_000_000) << 20 | secrets.randbits(20)


def make_hello(settings: EngineSettings, config: VllmConfig, epoch: int) -> wire.EngineHello:
    """First message to each router.

    Args:
        settings: The engine's.
        config: vLLM's, as the EngineCore has settled it.
        epoch: The engine's.
    """
    return wire.EngineHello(
        engine_id=settings.engine_id,
        epoch=epoch,
        fingerprint=make_fingerprint(settings, config),
        model=name_model(settings, config),
        max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_model_len_tokens=config.model_config.max_model_len,
        block_size_tokens=config.cache_config.block_size,
        kv_bytes_per_token=count_kv_bytes_per_token(settings, config),
        version=f"vllm {vllm.__version__}",
        prefix_root=make_prefix_root(config),
        # Parts arrive in the prefix cache.
        pulls_parts=config.cache_config.enable_prefix_caching,
        model_id=settings.model_id,
        cuts_prompts=Need.PARTS in CAPABILITIES and config.cache_config.enable_prefix_caching,
    )


def make_prefix_root(config: VllmConfig) -> bytes:
    """What vLLM's hashes of prefixes begin with, in this process and in the EngineCore alike."""
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    root: bytes = hash_function(resolve_none_hash_seed(hash_function))
    return root


def make_fingerprint(settings: EngineSettings, config: VllmConfig) -> str:
    """Model, revision, dtype, block size, layout, grammars and vLLM version, readable, with a hash of the model."""
    model = config.model_config
    layout = "emulated" if settings.emulation is not None else find_layout(config)
    parts = (
        name_model(settings, config),
        str(model.dtype).removeprefix("torch."),
        f"kv-{config.cache_config.cache_dtype}",
        f"block{config.cache_config.block_size}",
        layout,
        f"tp{config.parallel_config.tensor_parallel_size}",
        f"grammar-{config.structured_outputs_config.backend}",
        f"vllm-{vllm.__version__}",
    )
    return "/".join(parts)


def name_model(settings: EngineSettings, config: VllmConfig) -> str:
    """Model and revision, however they are served: a stream never changes them."""
    return f"{config.model_config.architecture}/{hash_model(settings.model, settings.revision)}"


def find_layout(config: VllmConfig) -> str:
    """Order of the KV cache's axes that the connector requires."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # noqa: PLC0415 - loads NIXL
        NixlPullConnector,
    )

    return str(NixlPullConnector.get_required_kvcache_layout(config) or "default").lower()


def hash_model(model: str, revision: str | None) -> str:
    """Identifies a model by its files, wherever they lie.

    Args:
        model: Directory, or name on the hub.
        revision: Revision on the hub.
    """
    digest = hashlib.sha256()
    directory = Path(model)
    if not directory.is_dir():
        digest.update(f"{model}@{revision or 'main'}".encode())
        return digest.hexdigest()[:16]
    digest.update((directory / "config.json").read_bytes())
    for path in sorted(directory.iterdir()):
        if path.suffix in WEIGHT_SUFFIXES:
            sample_file(path, digest)
    return digest.hexdigest()[:16]


def sample_file(path: Path, digest: hashlib._Hash) -> None:
    """Hashes a file's name, size and evenly spaced samples of it."""
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}".encode())
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


def count_kv_bytes_per_token(settings: EngineSettings, config: VllmConfig) -> int:
    """Bytes of KV cache per token, over all layers and GPUs; what an emulated link charges for it."""
    if settings.emulation is not None and (emulated := find_gpu(settings.emulation).kv_bytes_per_token):
        return emulated
    model = config.model_config
    cache_dtype = config.cache_config.cache_dtype
    element_bytes = 1 if cache_dtype.startswith("fp8") else get_dtype_size(model.dtype)
    heads = 1 if model.use_mla else 2 * model.get_total_num_kv_heads()  # keys and values, or one latent for both
    return int(model.get_total_num_hidden_layers() * heads * model.get_head_size() * element_bytes)
