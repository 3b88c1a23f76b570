"""Objectives: the default ones, and those of named classes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_operator.api.field_types import Label, ManifestModel, Percentage, percent


class SloClassSpec(ManifestModel):
    """A named pair of objectives that requests may ask for."""

    name: Label
    """Name that requests give in the header x-sluice-slo-class."""
    ttft_milliseconds: Annotated[int, Field(strict=True, ge=1, le=600_000)]
    """Objective for the time to first token, in milliseconds."""
    tpot_milliseconds: Annotated[int, Field(strict=True, ge=1, le=60_000)]
    """Objective for the time per output token, in milliseconds."""
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] = 0
    """Requests of a higher priority go first: a level is worth 10 s of earlier arrival, so that nobody waits for
    ever."""


class SloSpec(ManifestModel):
    """Latency objectives."""

    ttft_milliseconds: Annotated[int, Field(strict=True, ge=1, le=600_000)]
    """Objective for the time to first token, in milliseconds."""
    tpot_milliseconds: Annotated[int, Field(strict=True, ge=1, le=60_000)]
    """Objective for the time per output token, in milliseconds."""
    attainment: Percentage = f"{DEFAULT_ATTAINMENT:.0%}"
    """Share of requests that should meet both objectives, such as 90%."""
    classes: Annotated[tuple[SloClassSpec, ...], Field(max_length=16)] = ()
    """Named objectives besides the default ones."""

    @property
    def attainment_share(self) -> float:
        """``attainment`` as a number."""
        return percent(self.attainment) / 100
