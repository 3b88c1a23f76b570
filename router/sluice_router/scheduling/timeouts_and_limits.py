"""Timeouts and limits of the data plane: how long routers wait for engines, how often requests go on elsewhere.

They are one table, because each is an option of the command line (``settings.py``).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from sluice_core.scheduling.waiting_order import ROUTER_WAIT_LIMIT_S


class SchedulingLimits(BaseModel):
    """Bounds of the data plane. Seconds on the router's clock."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    silence_limit_s: float = Field(default=2.0, gt=0, description="longest silence of an engine's stream")
    iteration_age_floor_s: float = Field(default=2.0, gt=0, description="least time without progress that means a hang")
    iteration_age_factor: float = Field(default=5.0, ge=1, description="longest predicted iterations that mean a hang")
    resume_grace_s: float = Field(
        default=0.3,
        ge=0,
        description="longest wait of a request for the engine whose stream broke, before it goes elsewhere",
    )
    claim_timeout_s: float = Field(
        default=1.0, gt=0, description="longest wait for what engines know of an answer that a client resumes"
    )
    hello_timeout_s: float = Field(default=10.0, gt=0, description="longest wait for an engine's first message")
    wait_limit_s: float = Field(default=ROUTER_WAIT_LIMIT_S, gt=0, description="longest wait for an engine")
    max_waiting: int = Field(
        default=4096, ge=1, description="most requests that wait for an engine, in all routers of the plan together"
    )
    max_recoveries: int = Field(default=3, ge=0, description="most times a request goes on elsewhere after a failure")
    max_deaths: int = Field(default=2, ge=1, description="engines that fail under a request until it is given up")
    max_moves_per_engine: int = Field(
        default=16, ge=1, description="most moves in flight from or to an engine, by all routers of the plan together"
    )
    grant_timeout_s: float = Field(default=2.0, gt=0, description="longest wait for an answer to a grant request")
    copy_timeout_s: float = Field(
        default=5.0, gt=0, description="longest time that KV is copied while its request goes on where it is"
    )
    pull_timeout_s: float = Field(default=10.0, gt=0, description="longest wait for a moved request's next token")
    drain_retry_s: float = Field(
        default=0.25, gt=0, description="pause before a draining engine's decode is proposed again"
    )
    ring_size: int = Field(default=32_768, ge=0, description="events about requests kept for explanations")
    num_samples: int = Field(default=4096, ge=0, description="requests sampled for the planner")
