"""The fields of ``spec.autoscaling``: how many engines there may be, and who decides."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice_operator.api.field_types import MAX_ENGINES, ManifestModel

AutoscalingMode = Literal["Disabled", "Recommend", "Apply"]
StabilizationSeconds = Annotated[int, Field(strict=True, ge=0, le=3600)]


class ScaleUpSpec(ManifestModel):
    """When engines come."""

    stabilization_window_seconds: StabilizationSeconds = 0
    """Engines are added when so many were wanted throughout this time; at once with 0."""


class ScaleDownSpec(ManifestModel):
    """When engines leave."""

    stabilization_window_seconds: StabilizationSeconds | None = None
    """Engines leave when no more were wanted within this time. An idle cluster keeps its last ones for as long. When
    absent: as long as engines take to start, from 90 to 300 s; 300 s for the last ones."""


class AutoscalingSpec(ManifestModel):
    """How many engines what arrives needs."""

    mode: AutoscalingMode = "Disabled"
    """Disabled; Recommend writes the number to the status; Apply also runs so many engines. With Apply, replicas is
    what the cluster begins with, and an edit of it counts until the next decision."""
    min_replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_ENGINES)] = 1
    """Fewest engines. With 0 the last one leaves when nothing has arrived or run for the scale-down window. Routers
    stay, hold what arrives, and an engine starts."""
    max_replicas: Annotated[int, Field(strict=True, ge=1, le=MAX_ENGINES)] | None = None
    """Most engines. Required by the modes Recommend and Apply."""
    hold_timeout_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] | None = None
    """Longest time that a request is held while there is no engine, with minReplicas 0; engine.startupTimeoutSeconds
    when absent. Streams get comments meanwhile."""
    scale_up: ScaleUpSpec = ScaleUpSpec()
    """When engines come."""
    scale_down: ScaleDownSpec = ScaleDownSpec()
    """When engines leave."""
