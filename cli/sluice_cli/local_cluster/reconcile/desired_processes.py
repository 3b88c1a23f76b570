"""Reads from a manifest what shall run: pure functions of its spec."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from sluice_cli.local_cluster.reconcile.reconcile_steps import DesiredProcesses
from sluice_cli.local_cluster.reconcile.router_names import list_router_names
from sluice_core.records import EngineId
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.resources import command_lines

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingClusterSpec

# Engines differ in where they listen; a placeholder keeps that out of the hash of their common command.
_NO_SITE = command_lines.EngineSite(
    engine_id=EngineId(""), host="", port=0, metrics_port=0, kv_host="", kv_port=0, model_directory=""
)


def make_desired_processes(
    spec: ServingClusterSpec,
    effective_spec: ServingClusterSpec,
    *,
    http_port: int,
    router_security: command_lines.Security,
) -> DesiredProcesses:
    """Makes the desired state of a manifest.

    Args:
        spec: The manifest's.
        effective_spec: The same with the sliders in force, which the tuner may have changed.
        http_port: Port of the first router.
        router_security: Where routers find keys and certificates.
    """
    engine = (command_lines.render_engine_command(spec, _NO_SITE), command_lines.render_engine_environment(spec))
    return DesiredProcesses(
        # Processes that encrypt cannot talk to processes that do not, so TLS is part of it.
        compatibility_key=spec.model.model_dump_json() + spec.network.tls.model_dump_json(),
        engine_hash=_digest(*engine),
        router_hash=_digest(
            http_port,
            spec.router.shares_ports,
            asdict(router_security),
            spec.router.drain_timeout_seconds,
            command_lines.render_values(spec.router),
        ),
        num_engines=spec.replicas,
        routers=list_router_names(spec.router),
        num_prefill_heavy=resolve_sliders(effective_spec).num_prefill_heavy,
        is_paused=spec.rollout.paused,
    )


def _digest(*content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
