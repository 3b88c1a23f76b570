"""The gate of a roll: what is measured of new engines, for how long, and what sends the roll back."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice_operator.api.field_types import ErrorRate, ManifestModel, Percentage


class RolloutGateSpec(ManifestModel):
    """What routers must measure of each batch of new engines before the next one is replaced."""

    duration_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 120
    """How long a batch is measured at least, from when its engines serve."""
    min_attainment: Percentage = "90%"
    """Least share of requests that meet both objectives, such as 90%; set it below what is measured before the roll."""
    max_error_rate: ErrorRate = "5%"
    """Greatest share of requests that fail, such as 5%; above it, the roll goes back at once."""
    min_requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 20
    """Requests without which there is no verdict: of the new engines, or of all where none ends on the new ones."""
    timeout_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 1800
    """Longest wait for so many requests on the new engines. Then those of all count. Where these are too few, the roll
    goes on, and the status says that nothing was measured. Where no router reports, it goes back."""
