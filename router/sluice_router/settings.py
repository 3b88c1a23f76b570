"""The router's settings: the command line, with an environment fallback for each (``SLUICE_ROUTER_<NAME>``)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field, create_model, field_validator

from sluice_core.latency import IterationProfile
from sluice_core.latency.known_gpus import parse_gpus
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_router.engines.engine_connections import HELLO_TIMEOUT_S
from sluice_router.limit_type import Limit, Limits
from sluice_router.observability.decision_log import RING_SIZE
from sluice_router.scheduling.admission import MAX_WAITING
from sluice_router.scheduling.engines.engine_health import ITERATION_AGE_FACTOR, ITERATION_AGE_FLOOR_S, SILENCE_LIMIT_S
from sluice_router.scheduling.failover import MAX_DEATHS, MAX_RECOVERIES, RESUME_GRACE_S
from sluice_router.scheduling.moves.drain import DRAIN_RETRY_S
from sluice_router.scheduling.moves.kv_copies import COPY_TIMEOUT_S
from sluice_router.scheduling.moves.migration import GRANT_TIMEOUT_S, PULL_TIMEOUT_S
from sluice_router.scheduling.moves.move_targets import MAX_MOVES_PER_ENGINE
from sluice_router.scheduling.planner_samples import NUM_SAMPLES
from sluice_router.scheduling.resumption.claims import CLAIM_TIMEOUT_S
from sluice_router.scheduling.wait_limits import STREAM_WAIT_LIMIT_S, WAIT_LIMIT_S
from sluice_router.security.jwt_tokens import JwtSettings
from sluice_router.security.tls import SecuritySettings

# Limits that are options. Their numbers stand with the rules.
LIMITS: tuple[Limit[Any], ...] = (
    SILENCE_LIMIT_S,
    ITERATION_AGE_FLOOR_S,
    ITERATION_AGE_FACTOR,
    RESUME_GRACE_S,
    CLAIM_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    WAIT_LIMIT_S,
    STREAM_WAIT_LIMIT_S,
    MAX_WAITING,
    MAX_RECOVERIES,
    MAX_DEATHS,
    MAX_MOVES_PER_ENGINE,
    GRANT_TIMEOUT_S,
    COPY_TIMEOUT_S,
    PULL_TIMEOUT_S,
    DRAIN_RETRY_S,
    RING_SIZE,
    NUM_SAMPLES,
)
_LIMIT_FIELDS: dict[str, Any] = {
    limit.name: (
        type(limit.default),
        Field(default=limit.default, gt=limit.above, ge=limit.at_least, description=limit.description),
    )
    for limit in LIMITS
}
_LimitValues = create_model("_LimitValues", __config__=ConfigDict(extra="forbid"), **_LIMIT_FIELDS)


class RouterSettings(SecuritySettings):
    """Everything a router is started with."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    host: str = Field(default="127.0.0.1", description="address to listen on")
    http_port: int = Field(default=8000, ge=0, le=65535, description="port of the OpenAI-compatible API")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="port of the client API over gRPC; 0: a free one")
    control_port: int = Field(default=0, ge=0, le=65535, description="port of the control API; 0: a free one")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="port of /metrics and the probes; 0: a free one")
    share_ports: bool = Field(
        default=False, description="whether other routers of this user listen on the client APIs' ports too (workers)"
    )
    model: str = Field(description="folder of the model: tokenizer, chat template, generation defaults")
    model_id: str = Field(
        default="", description="the control plane's id of the model; engines of another one are not used"
    )
    engines: str = Field(description="file:PATH (a JSON list of host:port) or dns:NAME:PORT")
    plan: str = Field(default="", description="file with a plan as JSON, for a cold start")
    router_id: str = Field(default="", description="unique per router process; made up when empty")
    latency_profile: str = Field(
        default="",
        description="MODEL@GPU, such as qwen2.5-14b@a100-80g: how fast engines are until they have measured it",
    )
    grace_s: float = Field(default=30.0, ge=0, description="longest time that streams may take to finish at shutdown")
    limits: Limits = Limits()

    @field_validator("latency_profile")
    @classmethod
    def _check_latency_profile(cls, value: str) -> str:
        if value:
            load_profile(value)
        return value


def load_profile(text: str) -> IterationProfile:
    """Loads the profile that MODEL@GPU names.

    Raises:
        ValueError: There is none; lists the known names.
    """
    model, _, gpus = text.partition("@")
    return load_model_on_gpu(model, *parse_gpus(gpus)).profile


def make_limits(**values: object) -> Limits:
    """Makes limits of those that differ from their defaults.

    Raises:
        pydantic.ValidationError: A name is unknown, or a value is out of bounds.
    """
    checked = _LimitValues(**values).model_dump()
    return Limits({limit: checked[limit.name] for limit in LIMITS})


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> RouterSettings:
    """Reads the command line.

    Args:
        arguments: Without the program's name.
        environment: Fallback for what the command line leaves out; the process's own when None.

    Returns:
        Checked settings.

    Raises:
        SystemExit: The command line is wrong, or asks for help.
        pydantic.ValidationError: A value is out of bounds; names the field, the value and the limit.
    """
    environment = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(prog="sluice_router", description="Routes requests to vLLM engines under SLOs.")
    fields = {**RouterSettings.model_fields, **_LimitValues.model_fields, **JwtSettings.model_fields}
    del fields["limits"], fields["jwt"]
    for name, field in fields.items():
        fallback = environment.get(f"SLUICE_ROUTER_{name.upper()}")
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=fallback if fallback is not None else argparse.SUPPRESS,
            required=field.is_required() and fallback is None,
            help=(field.description or "").replace("%", "%%"),
        )
    values = vars(parser.parse_args(arguments))
    limits = {limit.name: values.pop(limit.name) for limit in LIMITS if limit.name in values}
    jwt = {name: values.pop(name) for name in JwtSettings.model_fields if name in values}
    return RouterSettings(**values, limits=make_limits(**limits), jwt=JwtSettings(**jwt))
