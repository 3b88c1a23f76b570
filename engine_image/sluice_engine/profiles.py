"""How long an emulated GPU takes for an iteration.

Time of an iteration of n tokens (design: simulation.md section 1):

    linear(n) + sum over chunks (p0 + p1 * c + p2 * c * (context + c / 2)) + [decodes] (d0 + d1 * decodes + d2 * contexts)

``linear`` is a table, because no closed form fits it: flat while memory-bound, affine above. It contains the host's 3 ms,
so that an emulated engine's own CPU time is not added to it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_engine.errors import SettingsError
from sluice_engine.settings import EmulationSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from sluice_core.records import IterationShape

# Key of vLLM's additional_config.
CONFIG_KEY = "sluice_emulation"
# Host's work per sequence or chunk, in seconds (simulation.md section 1: assumed for vLLM v1).
HOST_SEQUENCE_S = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Coefficients of one model on one kind of GPU.

    Args:
        linear_s: Pairs of tokens and seconds, ascending; a straight line between them and beyond the last two.
        chunk_s: Per prefill chunk (p0, and the host's part).
        prefill_token_s: Per prefill token, beyond ``linear_s`` (p1).
        attention_s: Per token pair of prefill attention (p2).
        decoding_s: Per iteration with decodes (d0).
        decode_s: Per decode (d1, and the host's part).
        context_s: Per token of decode context (d2).
        kv_tokens: KV capacity, in tokens; 0: as much as the settings say.
        kv_bytes_per_token: Bytes of KV per token; 0: the served model's own.
    """

    linear_s: tuple[tuple[int, float], ...]
    chunk_s: float = 0.0
    prefill_token_s: float = 0.0
    attention_s: float = 0.0
    decoding_s: float = 0.0
    decode_s: float = 0.0
    context_s: float = 0.0
    kv_tokens: int = 0
    kv_bytes_per_token: int = 0

    def estimate_iteration_s(self, shape: IterationShape) -> float:
        """Time of an iteration, in seconds; 0 when it computes nothing."""
        tokens = shape.prefill_tokens + shape.num_decodes
        if not tokens:
            return 0.0
        return (
            self._interpolate(tokens)
            + self.chunk_s * shape.num_chunks
            + self.prefill_token_s * shape.prefill_tokens
            + self.attention_s * shape.attention_work
            + (self.decoding_s if shape.num_decodes else 0.0)
            + self.decode_s * shape.num_decodes
            + self.context_s * shape.decode_context_tokens
        )

    def _interpolate(self, tokens: int) -> float:
        table = self.linear_s
        index = bisect_right(table, (tokens, float("inf")))
        if index == 0 or len(table) == 1:
            return table[0][1]
        (low, low_s), (high, high_s) = table[index - 1 : index + 1] if index < len(table) else table[-2:]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)


_TOKENS = (8, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def _profile(
    linear_ms: tuple[float, ...], attention: tuple[float, ...], kv_tokens: int, kv_bytes_per_token: int
) -> Profile:
    """A row of each of simulation.md's tables: p0, p1 in us, p2 in ns, d0, d1 in us, d2 in ns."""
    p0_us, p1_us, p2_ns, d0_us, d1_us, d2_ns = attention
    return Profile(
        linear_s=tuple((tokens, ms / 1e3) for tokens, ms in zip(_TOKENS, linear_ms, strict=True)),
        chunk_s=p0_us / 1e6 + HOST_SEQUENCE_S,
        prefill_token_s=p1_us / 1e6,
        attention_s=p2_ns / 1e9,
        decoding_s=d0_us / 1e6,
        decode_s=d1_us / 1e6 + HOST_SEQUENCE_S,
        context_s=d2_ns / 1e9,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
    )


# By GPU and model, both in lower case. Source: simulation.md section 1 (profiles of aiconfigurator).
PROFILES = {
    ("a100", "qwen2.5-14b"): _profile(
        (22.7, 24.5, 28.0, 39.5, 66.9, 115.0, 211.0, 419.0, 812.0),
        (358.0, 2.18, 5.16, 902.0, 1.86, 132.0),
        kv_tokens=227_000,
        kv_bytes_per_token=196_608,
    ),
    ("h100", "qwen2.5-14b"): _profile(
        (14.3, 15.5, 16.0, 17.3, 23.8, 41.8, 79.0, 162.0, 326.0),
        (550.0, 0.89, 1.43, 525.0, 4.17, 69.0),
        kv_tokens=227_000,
        kv_bytes_per_token=196_608,
    ),
    ("a100", "llama-3-8b"): _profile(
        (13.8, 14.3, 16.2, 22.0, 35.6, 63.4, 118.0, 231.0, 463.0),
        (248.0, 1.40, 2.73, 611.0, 1.33, 84.9),
        kv_tokens=444_000,
        kv_bytes_per_token=131_072,
    ),
    ("a100x2", "qwen2.5-32b"): _profile(
        (27.1, 29.8, 33.6, 51.4, 86.5, 155.0, 285.0, 560.0, 1084.0),
        (503.0, 2.04, 3.55, 1259.0, 1.22, 88.1),
        kv_tokens=317_000,
        kv_bytes_per_token=262_144,
    ),
    ("a100x4", "llama-2-70b"): _profile(
        (31.1, 35.1, 41.4, 69.9, 115.0, 197.0, 368.0, 706.0, 1389.0),
        (681.0, 2.12, 3.46, 1624.0, 0.08, 59.8),
        kv_tokens=486_000,
        kv_bytes_per_token=327_680,
    ),
}


def read_settings(vllm_config: VllmConfig) -> EmulationSettings:
    """What an emulated engine's configuration carries for the EngineCore process."""
    return EmulationSettings.model_validate(vllm_config.additional_config[CONFIG_KEY])


def find_profile(settings: EmulationSettings) -> Profile:
    """The profile of the settings' GPU and model, with their explicit coefficients over it.

    Raises:
        SettingsError: Names the known profiles.
    """
    if settings.gpu is None:
        base = Profile(linear_s=((0, 0.0),))
    else:
        key = (settings.gpu.lower(), (settings.model or "").lower())
        if key not in PROFILES:
            known = ", ".join(f"{model} on {gpu}" for gpu, model in PROFILES)
            raise SettingsError(f"--emulation: {settings.model} on {settings.gpu} has no profile; known are {known}")
        base = PROFILES[key]
    return _override(base, settings)


def _override(base: Profile, settings: EmulationSettings) -> Profile:
    linear_s = base.linear_s
    if settings.base_s is not None or settings.token_s is not None:
        start_s = settings.base_s or 0.0
        linear_s = ((0, start_s), (1, start_s + (settings.token_s or 0.0)))

    def pick(explicit: float | None, profiled: float) -> float:
        return profiled if explicit is None else explicit

    return Profile(
        linear_s=linear_s,
        chunk_s=pick(settings.chunk_s, base.chunk_s),
        prefill_token_s=base.prefill_token_s,
        attention_s=pick(settings.attention_s, base.attention_s),
        decoding_s=base.decoding_s,
        decode_s=pick(settings.decode_s, base.decode_s),
        context_s=pick(settings.context_s, base.context_s),
        kv_tokens=base.kv_tokens,
        kv_bytes_per_token=settings.kv_bytes_per_token or base.kv_bytes_per_token,
    )
