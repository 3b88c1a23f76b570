"""Engines: what a pod of theirs runs and has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice_operator.api.field_types import OPTIONAL_RESOURCE_NAME, Label, ManifestModel, Quantity, Text
from sluice_operator.api.fields_and_defaults.engine_timeouts_spec import EngineTimeouts
from sluice_operator.api.fields_and_defaults.pod_fields import PodFields, Resources
from sluice_operator.api.fields_and_defaults.slider_spec import MAX_BATCH_TOKENS


class Emulation(ManifestModel):
    """Replaces the forward pass by the clock of a latency model."""

    gpu: Label
    """GPU that is emulated, such as h100."""
    model: Text
    """Model whose iterations are emulated."""


class EngineSpec(EngineTimeouts, PodFields):
    """One engine: a vLLM instance in a pod or a local process."""

    image: Text | None = None
    """Container image; the engine image that the operator was installed with when absent."""
    tensor_parallel_size: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """GPUs that share one engine."""
    max_batch_tokens: Annotated[int, Field(strict=True, ge=16, le=MAX_BATCH_TOKENS)] = 8192
    """Largest chunk size that may be set without a restart, in tokens."""
    max_model_len: Annotated[int, Field(strict=True, ge=16, le=16_777_216)] | None = None
    """Longest prompt + output, in tokens; the model's own limit when absent."""
    extra_args: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """Further arguments of vLLM; those that Sluice sets itself are refused."""
    resources: Resources = Resources()
    """Resources of the engine container. Where they name no device, tensorParallelSize GPUs are added."""
    gpu_resource_name: Annotated[str, Field(pattern=OPTIONAL_RESOURCE_NAME, max_length=253)] | None = None
    """Extended resource of the GPUs that are added, such as amd.com/gpu; none are when empty, nor to emulated engines.
    The name that the operator was installed with when absent."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm."""
    emulation: Emulation | None = None
    """Emulates a GPU instead of computing, for tests without one; generated text is meaningless."""
