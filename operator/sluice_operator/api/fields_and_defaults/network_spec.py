"""How engines and routers reach one another: RDMA, and TLS between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.field_types import (
    ManifestModel,
    ObjectName,
    PortRange,
    ResourceName,
    StrictBool,
    StringMap,
    Text,
)


class RdmaSpec(ManifestModel):
    """How engines reach the RDMA fabric."""

    fabric: Literal["InfiniBand", "RoCE", "EFA"]
    """Kind of fabric: InfiniBand, RoCE or EFA."""
    resource_name: ResourceName | None = None
    """Extended resource of the network device."""
    resource_claim_template_name: ObjectName | None = None
    """ResourceClaimTemplate of the network device, instead of resourceName."""
    resource_count: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Devices (or slots of a shared plugin) per engine."""
    networks: Annotated[tuple[Text, ...], Field(max_length=16)] = ()
    """Networks of Multus that engine pods join, as name or namespace/name."""
    net_devices: Annotated[tuple[Text, ...], Field(max_length=16)] = ()
    """Network devices that UCX may use (UCX_NET_DEVICES), such as mlx5_0:1; any when absent."""
    gid_index: Annotated[int, Field(strict=True, ge=0, le=255)] | None = None
    """Index of the GID (UCX_IB_GID_INDEX); for RoCE only."""
    transports: Annotated[tuple[Text, ...], Field(max_length=16)] = ()
    """Transports that UCX may use (UCX_TLS); any when absent. On GPUs they must contain cuda_copy or cuda_ipc."""
    memlock: Literal["Node", "IPCLock"] = "Node"
    """Who lifts the limit of locked memory. Node: the node does (LimitMEMLOCK=infinity). IPCLock: the capability
    IPC_LOCK, which helps containers that run as root only."""
    require_rdma: Annotated[StrictBool, Field(alias="requireRDMA")] = False
    """Refuse to serve over TCP when RDMA cannot be used."""
    pod_annotations: StringMap = Field(default_factory=dict)
    """Annotations of engine pods, for network plugins."""


class IssuerRef(ManifestModel):
    """An issuer of cert-manager."""

    name: ObjectName
    """Name of the issuer."""
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """An Issuer of the cluster's namespace, or a ClusterIssuer."""


class TlsSpec(ManifestModel):
    """Encryption, and where certificates come from."""

    mode: Literal["Disabled", "SecretRef", "CertManager"] = "Disabled"
    """Disabled, certificates of a Secret (SecretRef), or of cert-manager (CertManager)."""
    secret_name: ObjectName | None = None
    """Secret with tls.crt, tls.key and ca.crt; required by mode SecretRef, refused otherwise."""
    issuer_ref: Annotated[IssuerRef | None, FieldEffect.LIVE] = None
    """Issuer of the certificates; required by mode CertManager, refused otherwise."""


class NetworkSpec(ManifestModel):
    """How KV moves between engines."""

    mode: Literal["TCP", "RDMA"] = "TCP"
    """Transport of KV between engines. TCP works everywhere, RDMA needs devices and the field rdma."""
    kv_port: Annotated[int, Field(strict=True, ge=1024, le=65_535)] = 5600
    """Port of NIXL's side channel."""
    tcp_port_range: PortRange | None = None
    """Ports of UCX over TCP; any when absent."""
    rdma: RdmaSpec | None = None
    """Required by mode RDMA, refused otherwise."""
    tls: Annotated[TlsSpec, FieldEffect.RESTARTS_ALL] = TlsSpec()
    """Mutual TLS among routers, engines and operator. KV itself is not encrypted."""
