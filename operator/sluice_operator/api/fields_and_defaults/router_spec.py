"""Routers: their number, Service, TLS, and what browsers may do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.field_types import HostName, ManifestModel, Port, StringMap, Text
from sluice_operator.api.fields_and_defaults.auth_spec import AuthSpec
from sluice_operator.api.fields_and_defaults.network_spec import TlsSpec
from sluice_operator.api.fields_and_defaults.pod_fields import PodFields, Resources
from sluice_operator.api.ports import MAX_WORKERS


class RouterTlsSpec(TlsSpec):
    """Encryption of the API, and where certificates come from."""

    dns_names: Annotated[tuple[HostName, ...], FieldEffect.LIVE, Field(max_length=16)] = ()
    """Names of the certificate that cert-manager issues; those of the Service when absent. Needs mode CertManager."""


class ServiceSpec(ManifestModel):
    """The Service in front of the routers."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """ClusterIP is reached within the cluster, NodePort by the nodes, LoadBalancer from outside."""
    port: Port = 8000
    """Port of the OpenAI API; also the local port of `sluice up`."""
    annotations: StringMap = Field(default_factory=dict)
    """Annotations of the Service."""


class CorsSpec(ManifestModel):
    """Web pages that may call the API from a browser."""

    allowed_origins: Annotated[
        tuple[Annotated[str, Field(pattern=r"^([*]|https?://[^/, ]+)$", max_length=253)], ...], Field(max_length=32)
    ] = ()
    """Their origins, such as https://chat.example.com; * for all. None may when absent."""


class RouterSpec(PodFields):
    """The routers."""

    replicas: Annotated[int, FieldEffect.LIVE, Field(strict=True, ge=1, le=64)] = 2
    """Number of routers. In force without a restart."""
    workers: Annotated[int, Field(strict=True, ge=1, le=MAX_WORKERS)] = 1
    """Router processes per pod. A process uses one core at most; those of a pod share its ports and its load."""
    image: Text | None = None
    """Container image; the router image that the operator was installed with when absent."""
    resources: Resources = Resources()
    """Resources of each worker's container; requests 200m of cpu where requests and limits name no cpu."""
    drain_timeout_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] = 300
    """Longest time that answers under way may take to end when a router stops."""
    service: ServiceSpec = ServiceSpec()
    """The Service in front of them."""
    auth: AuthSpec = AuthSpec()
    """Who may use the API."""
    cors: CorsSpec = CorsSpec()
    """Web pages that may call the API from a browser."""
    tls: RouterTlsSpec = RouterTlsSpec()
    """Encryption of the API. A Secret for it needs no ca.crt."""

    @property
    def num_routers(self) -> int:
        """Router processes in all: they share limits and load."""
        return self.replicas * self.workers

    @property
    def shares_ports(self) -> bool:
        """Whether several processes listen on the ports of the client APIs."""
        return self.workers > 1
