"""How engines are replaced: how many at once, and the gate after each batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice_operator.api.field_types import CountOrPercentage, ErrorRate, ManifestModel, Percentage, StrictBool


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


class RolloutSpec(ManifestModel):
    """How engines are replaced when a field that restarts them changes. `sluice up` replaces one at a time."""

    max_unavailable: CountOrPercentage = 1
    """Engines that may be away at once, as a count or a share of replicas, rounded down; at least 1 where shares leave
    no engine to replace."""
    max_surge: CountOrPercentage = 0
    """Engines beyond replicas that may run meanwhile, as a count or a share of replicas, rounded up. They need spare
    GPUs. With 0, a cluster of one engine does not serve while it is replaced."""
    paused: StrictBool = False
    """Stops between two engines: no further one is replaced until it is false again."""
    gate: RolloutGateSpec | None = None
    """Stops the roll, and goes back to the engines that served before, where the new ones are worse. Nothing is
    measured when absent."""
