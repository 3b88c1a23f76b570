"""How engines move KV: NIXL's backend, and the devices and transports of UCX."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.network_spec import NetworkSpec

# NIXL's backends by fabric, where it is not UCX.
KV_BACKENDS = {"EFA": "LIBFABRIC"}


def render_transport_environment(network: NetworkSpec) -> dict[str, str]:
    """Renders the variables by which UCX is told what to use."""
    environment = {"UCX_TCP_PORT_RANGE": network.tcp_port_range} if network.tcp_port_range else {}
    if network.rdma:
        if network.rdma.net_devices:
            environment["UCX_NET_DEVICES"] = ",".join(network.rdma.net_devices)
        if network.rdma.transports:
            environment["UCX_TLS"] = ",".join(network.rdma.transports)
        if network.rdma.gid_index is not None:
            environment["UCX_IB_GID_INDEX"] = str(network.rdma.gid_index)
    return environment
