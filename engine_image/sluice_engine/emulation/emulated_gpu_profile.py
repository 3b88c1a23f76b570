"""What an emulated GPU is: the core's profile of a model on a GPU, explicit coefficients, or a mix of both.

The profile contains the host's time, so that an emulated engine's own CPU time is not added to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sluice_core.latency import IterationProfile
from sluice_core.latency.interface import UnknownModelError
from sluice_core.latency.known_gpus import parse_gpus
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_engine.errors import SettingsError
from sluice_engine.settings import EmulationSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Key of vLLM's additional_config.
CONFIG_KEY = "sluice_emulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedGpu:
    """What replaces a GPU.

    Args:
        profile: How long an iteration takes.
        kv_tokens: KV capacity, in tokens; 0: as much as the settings say.
        kv_bytes_per_token: Bytes of KV per token; 0: the served model's own.
    """

    profile: IterationProfile
    kv_tokens: int = 0
    kv_bytes_per_token: int = 0


def read_settings(vllm_config: VllmConfig) -> EmulationSettings:
    """What an emulated engine's configuration carries for the EngineCore process."""
    return EmulationSettings.model_validate(vllm_config.additional_config[CONFIG_KEY])


def find_gpu(settings: EmulationSettings) -> EmulatedGpu:
    """What the settings emulate.

    Raises:
        SettingsError: Names the known models and GPUs.
    """
    found = EmulatedGpu(profile=IterationProfile(linear_s=(0.0, 0.0)))
    if settings.gpu is not None:
        found = load_gpu(settings.gpu, settings.model or "")
    return replace(
        found,
        profile=_override(found.profile, settings),
        kv_bytes_per_token=settings.kv_bytes_per_token or found.kv_bytes_per_token,
    )


def load_gpu(gpu: str, model: str) -> EmulatedGpu:
    """The core's profile.

    Args:
        gpu: Name of a GPU; with ``x2``, two of them share an engine.
        model: Name of a model, or the path of its config.json.

    Raises:
        SettingsError: Names the known models and GPUs.
    """
    try:
        found = load_model_on_gpu(model, *parse_gpus(gpu))
    except UnknownModelError as error:
        raise SettingsError(f"--emulation: {error}") from error
    return EmulatedGpu(
        profile=found.profile, kv_tokens=found.kv_capacity_tokens, kv_bytes_per_token=found.kv_bytes_per_token
    )


def _override(base: IterationProfile, settings: EmulationSettings) -> IterationProfile:
    changes: dict[str, Any] = {}
    token_s = 0.0
    if settings.base_s is not None or settings.token_s is not None:
        # The table has a row for eight tokens; a cost per token goes to prefill and decode tokens instead.
        changes["linear_s"], changes["slope_s"] = (0.0, settings.base_s or 0.0), 0.0
        token_s = settings.token_s or 0.0
    changes["prefill_token_s"] = base.prefill_token_s + token_s
    decode_s = base.decode_request_s if settings.decode_s is None else settings.decode_s - base.host_sequence_s
    changes["decode_request_s"] = decode_s + token_s
    # An explicit cost has the host's part in it.
    if settings.chunk_s is not None:
        changes["prefill_base_s"] = settings.chunk_s - base.host_sequence_s
    if settings.attention_s is not None:
        changes["prefill_work_s"] = settings.attention_s
    if settings.context_s is not None:
        changes["decode_context_s"] = settings.context_s
    if token_s or settings.decode_s is not None or settings.context_s is not None:
        changes["large_batch"] = None  # explicit costs hold for every batch
    return replace(base, **changes)
