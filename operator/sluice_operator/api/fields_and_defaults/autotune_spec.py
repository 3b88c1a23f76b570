"""Autotune: whether it only recommends, and the bounds of its search."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice_operator.api.field_types import DISABLED_IS_OFF, CountOrPercentage, ManifestModel
from sluice_operator.api.fields_and_defaults.slider_spec import MAX_BATCH_TOKENS

AutotuneMode = Literal["Disabled", "Off", "Recommend", "Apply"]


class CountBounds(ManifestModel):
    """Least and most."""

    min: CountOrPercentage
    """Least value."""
    max: CountOrPercentage
    """Most value."""


class TokenBounds(ManifestModel):
    """Least and most, in tokens."""

    min: Annotated[int, Field(strict=True, ge=0, le=MAX_BATCH_TOKENS)]
    """Least value."""
    max: Annotated[int, Field(strict=True, ge=16, le=MAX_BATCH_TOKENS)]
    """Most value."""


class ReplicaBounds(ManifestModel):
    """Least and most engines."""

    min: Annotated[int, Field(strict=True, ge=1, le=1024)]
    """Least value."""
    max: Annotated[int, Field(strict=True, ge=1, le=1024)]
    """Most value."""


class ChunkSizeBounds(ManifestModel):
    """Bounds of the chunk sizes."""

    prefill_heavy: TokenBounds | None = None
    """Bounds of chunkSizes.prefillHeavy."""
    decode_heavy: TokenBounds | None = None
    """Bounds of chunkSizes.decodeHeavy."""


class AutotuneBounds(ManifestModel):
    """How far the tuner may go; Apply does not touch a slider without bounds."""

    prefill_heavy: CountBounds | None = None
    """Bounds of prefillHeavy."""
    chunk_sizes: ChunkSizeBounds = ChunkSizeBounds()
    """Bounds of the chunk sizes."""
    replicas: ReplicaBounds | None = None
    """Bounds of replicas, for `sluice plan --rate`; the tuner itself does not change replicas."""


class AutotuneSpec(ManifestModel):
    """The search for better sliders."""

    mode: Annotated[AutotuneMode, *DISABLED_IS_OFF] = "Off"
    """Disabled; Recommend writes what it finds to the status; Apply also applies it, within the bounds.
    Off is the older name of Disabled."""
    bounds: AutotuneBounds = AutotuneBounds()
    """Bounds of the search."""
    cooldown_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 300
    """Shortest time between two changes; each further change within 24 times as long doubles it."""
