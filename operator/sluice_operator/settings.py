"""The operator's settings: the command line, with an environment fallback for each (``SLUICE_OPERATOR_<NAME>``)."""

from __future__ import annotations

import argparse
import os
import socket
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "SLUICE_OPERATOR_"


class OperatorSettings(BaseModel):
    """Everything the operator is started with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: str = Field(default="default", description="namespace of the operator itself, and of its Lease")
    identity: str = Field(
        default_factory=socket.gethostname, description="name of this replica, unique among them; the pod's"
    )
    watch_namespaces: str = Field(default="", description="namespaces to work in, by comma; all when empty")
    watch_nodes: bool = Field(
        default=False, description="reads nodes, so that engines leave those that are drained before their pods end"
    )
    lease_name: str = Field(default="sluice-operator", description="Lease by which replicas elect a leader")
    engine_image: str = Field(default="sluice-engine:0.1.0", description="engine image of clusters that name none")
    router_image: str = Field(default="sluice-router:0.1.0", description="router image of clusters that name none")
    max_concurrent_upgrades: int = Field(
        default=1, ge=0, le=10_000, description="clusters that take new default images at once; 0: annotated ones only"
    )
    gpu_resource_name: str = Field(
        default="",
        pattern=r"^(([a-z0-9.-]+/)?[A-Za-z0-9._-]+)?$",
        description="extended resource of GPUs, for engines that name no device; empty: nodes have none",
    )
    cluster_monitors: bool = Field(
        default=True, description="makes ServiceMonitors of engines and routers, where Kubernetes knows them"
    )
    monitor_labels: str = Field(
        default="",
        pattern=r"^([^=,\s]+=[^=,\s]*(,[^=,\s]+=[^=,\s]*)*)?$",
        description="labels of these ServiceMonitors, as NAME=VALUE by comma",
    )
    runbook_url: str = Field(
        default="", description="address of the runbook, to which messages of conditions link; empty: they name it"
    )
    host: str = Field(default="0.0.0.0", description="address of probes and metrics")
    port: int = Field(default=9090, ge=0, le=65535, description="port of /livez, /readyz and /metrics; 0: a free one")
    workers: int = Field(default=8, ge=1, le=256, description="clusters that are reconciled at once")
    resync_s: float = Field(default=420.0, gt=0, description="longest time between two reconciles of a cluster")
    request_timeout_s: float = Field(default=5.0, gt=0, le=5.0, description="longest wait for the API server")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", description="least level of logs")
    peer_tls: str = Field(
        default="",
        description="folder with tls.crt, tls.key and ca.crt for the control ports of routers with spec.network.tls",
    )
    allow_host_access: bool = Field(
        default=False, description="allows podTemplates to reach the host: paths, networks, privileges"
    )

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces to work in; empty for all."""
        return tuple(filter(None, (name.strip() for name in self.watch_namespaces.split(","))))

    @property
    def labels_of_monitors(self) -> dict[str, str]:
        """Further labels of ServiceMonitors."""
        pairs = (pair.partition("=") for pair in self.monitor_labels.split(",") if pair)
        return {name: value for name, _, value in pairs}


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> OperatorSettings:
    """Reads the command line.

    Args:
        arguments: Without the program's name.
        environment: Fallback for what the command line leaves out; the process's own when None.

    Raises:
        SystemExit: The command line is wrong, or asks for help.
        pydantic.ValidationError: A value is out of bounds; names the field, the value and the limit.
    """
    environment = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(prog="sluice_operator", description="Reconciles ServingClusters.")
    for name, field in OperatorSettings.model_fields.items():
        fallback = environment.get(f"{PREFIX}{name.upper()}")
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=fallback if fallback is not None else argparse.SUPPRESS,
            help=(field.description or "").replace("%", "%%"),
        )
    return OperatorSettings.model_validate(vars(parser.parse_args(arguments)))
