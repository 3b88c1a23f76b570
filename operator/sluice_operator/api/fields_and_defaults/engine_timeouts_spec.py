"""How long an engine may take to start and to drain, and how long it keeps streams that clients can resume."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice_operator.api.field_types import ManifestModel


class EngineTimeouts(ManifestModel):
    """Times of an engine's life."""

    startup_timeout_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 1800
    """Longest time from the start of an engine until it serves."""
    drain_timeout_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] = 300
    """Longest time an engine may take to hand its work over before it stops. Where routers stop too, as in a cluster
    that is deleted, it waits for their streams.
    """
    resume_timeout_seconds: Annotated[int, Field(strict=True, ge=0, le=3600)] = 30
    """How long a stream that its client can resume goes on after its connection or its router was lost."""
