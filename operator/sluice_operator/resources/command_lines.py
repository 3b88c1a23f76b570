"""The command lines of engines and routers: pods run them in containers, ``sluice up`` as local processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.resources.kv_transport import KV_BACKENDS, render_transport_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sluice_core.records import EngineId
    from sluice_operator.api.fields_and_defaults.auth_spec import JwtAuth
    from sluice_operator.api.fields_and_defaults.pod_fields import PodFields
    from sluice_operator.api.serving_cluster import ServingClusterSpec

# Arguments of vLLM that the engine program takes itself, by its own names.
ENGINE_OPTIONS = {
    "--block-size": "--block-size",
    "--dtype": "--dtype",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--max-num-seqs": "--max-num-seqs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSite:
    """Where one engine runs.

    Args:
        engine_id: Pod uid, or the launcher's name.
        host: Address its servers listen on.
        port: Port of its gRPC server.
        metrics_port: Port of its metrics.
        kv_host: Address other engines reach its side channel at.
        kv_port: Port of its NIXL side channel.
        model_directory: The model's files.
    """

    engine_id: EngineId
    host: str
    port: int
    metrics_port: int
    kv_host: str
    kv_port: int
    model_directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSite:
    """Where one router runs.

    Args:
        host: Address its servers listen on.
        http_port: Port of the OpenAI API.
        grpc_port: Port of the gRPC API.
        control_port: Port for the control plane.
        metrics_port: Port of its metrics.
        model_directory: The model's files (tokenizer and configuration only).
        engines: Where engines are found, ``file:PATH`` or ``dns:NAME:PORT``.
        plan_file: Plan for a cold start, if any.
        shares_ports: Whether other routers listen on the ports of the OpenAI and gRPC APIs too.
    """

    host: str
    http_port: int
    grpc_port: int
    control_port: int
    metrics_port: int
    model_directory: str
    engines: str
    plan_file: str | None = None
    shares_ports: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Where a program's keys and certificates lie, and whom it trusts; None throughout: nothing is secured.

    Args:
        api_keys: Folder of the keys that clients must show.
        front_tls: Folder of the certificate that clients see.
        peer_tls: Folder of the certificate for engines, routers and control plane.
        engine_name: Name in the certificate of engines.
        router_name: Name in the certificate of routers.
        control_name: Name in the certificate of the control plane.
    """

    api_keys: str | None = None
    front_tls: str | None = None
    peer_tls: str | None = None
    engine_name: str | None = None
    router_name: str | None = None
    control_name: str | None = None


OPEN = Security()


def render_engine_command(spec: ServingClusterSpec, site: EngineSite, security: Security = OPEN) -> list[str]:
    """Renders the command of an engine container."""
    engine, rdma = spec.engine, spec.network.rdma
    options: dict[str, str | int | None] = {
        "--engine-id": site.engine_id,
        "--host": site.host,
        "--port": site.port,
        "--metrics-port": site.metrics_port,
        "--kv-host": site.kv_host,
        "--kv-port": site.kv_port,
        "--model": site.model_directory,
        "--revision": spec.model.revision,
        "--max-batch-tokens": engine.max_batch_tokens,
        "--max-model-len": engine.max_model_len,
        "--tensor-parallel-size": engine.tensor_parallel_size,
        "--drain-timeout-s": engine.drain_timeout_seconds,
        "--start-timeout-s": engine.startup_timeout_seconds,
        "--resume-timeout-s": engine.resume_timeout_seconds,
        "--peer-tls": security.peer_tls,
        "--router-name": security.router_name,
        "--kv-backend": KV_BACKENDS.get(rdma.fabric) if rdma else None,
        "--require-rdma": "true" if rdma and rdma.require_rdma else None,
        "--emulation": json.dumps(engine.emulation.model_dump(), sort_keys=True) if engine.emulation else None,
    }
    promoted, others = _split_extra_args(engine.extra_args)
    command = ["python", "-m", "sluice_engine", *_flatten(options), *promoted]
    return [*command, "--", *others] if others else command


def _split_extra_args(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Parts vLLM arguments that are options of the engine program from those it passes on."""
    promoted: list[str] = []
    others: list[str] = []
    remaining = list(arguments)
    while remaining:
        name, has_value, value = remaining.pop(0).partition("=")
        option = ENGINE_OPTIONS.get(name.replace("_", "-"))
        if option is None:
            others.append(f"{name}={value}" if has_value else name)
        else:
            promoted += [option, value if has_value else remaining.pop(0) if remaining else ""]
    return promoted, others


def render_engine_environment(spec: ServingClusterSpec) -> dict[str, str]:
    """Renders the environment of an engine container: the transport's, then the user's own."""
    return render_transport_environment(spec.network) | render_values(spec.engine)


def render_values(fields: PodFields) -> dict[str, str]:
    """Renders the user's environment variables that have a value of their own."""
    return {variable.name: variable.value for variable in fields.env if variable.value is not None}


def render_router_command(spec: ServingClusterSpec, site: RouterSite, security: Security = OPEN) -> list[str]:
    """Renders the command of a router container.

    Routers start from the latency profile that emulated engines run by; of others they learn it.
    """
    emulation = spec.engine.emulation
    options: dict[str, str | int | None] = {
        "--host": site.host,
        "--http-port": site.http_port,
        "--grpc-port": site.grpc_port,
        "--control-port": site.control_port,
        "--metrics-port": site.metrics_port,
        "--share-ports": "true" if site.shares_ports else None,
        "--model": site.model_directory,
        "--engines": site.engines,
        "--plan": site.plan_file,
        "--grace-s": spec.router.drain_timeout_seconds,
        "--latency-profile": f"{emulation.model}@{emulation.gpu}" if emulation else None,
        "--allowed-origins": ",".join(spec.router.cors.allowed_origins) or None,
        "--api-keys": security.api_keys,
        **_describe_tokens(spec.router.auth.jwt),
        "--front-tls": security.front_tls,
        "--peer-tls": security.peer_tls,
        "--engine-name": security.engine_name,
        "--control-name": security.control_name,
    }
    return ["python", "-m", "sluice_router", *_flatten(options)]


def _describe_tokens(jwt: JwtAuth | None) -> dict[str, str | int | None]:
    if jwt is None:
        return {}
    return {
        "--jwt-keys": jwt.key_set_url,
        "--jwt-issuer": jwt.issuer,
        "--jwt-audience": jwt.audience,
        "--jwt-owner-claim": jwt.owner_claim,
        "--jwt-leeway-s": jwt.leeway_seconds,
    }


def _flatten(options: Mapping[str, str | int | None]) -> list[str]:
    return [part for name, value in options.items() if value is not None for part in (name, str(value))]
