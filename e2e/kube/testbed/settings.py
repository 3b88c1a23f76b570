"""Folders, ports and networks of a test cluster on this machine."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
FIRST_PORT = 16400
NODE_NAME = "real"
NODE_FOLDERS = Path("/var/lib/sluice-kube")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of one cluster, consecutive from the first."""

    api: int
    etcd: int
    etcd_peer: int
    controller_manager: int
    scheduler: int
    kwok: int
    kubelet: int
    kubelet_health: int
    proxy_health: int
    proxy_metrics: int
    dns: int

    @classmethod
    def starting_at(cls, first: int) -> Ports:
        """Assigns consecutive ports in the order of the fields."""
        return cls(**{name: first + index for index, name in enumerate(cls.__slots__)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One test cluster.

    Args:
        folder: Certificates, data of the control plane, pid files and logs. Only the logs outlive the cluster.
        address: Address of this machine that pods can reach too.
        ports: Where the programs listen.
        num_fake_nodes: Nodes that kwok plays.
        has_real_node: Whether this machine is a node, which needs root.
        pod_network: Addresses of all pods.
        node_pod_network: Addresses of the real node's pods.
        service_network: Addresses of Services.
        api_service: Address of the Service ``kubernetes``, the first of the service network.
        dns_service: Address of the Service ``kube-dns``.
    """

    folder: Path
    address: str
    ports: Ports
    num_fake_nodes: int = 2
    has_real_node: bool = True
    pod_network: str = "10.200.0.0/16"
    node_pod_network: str = "10.200.1.0/24"
    service_network: str = "10.96.0.0/16"
    api_service: str = "10.96.0.1"
    dns_service: str = "10.96.0.10"

    @property
    def pki(self) -> Path:
        """Folder of the certificates."""
        return self.folder / "pki"

    @property
    def pids(self) -> Path:
        """Folder with a pid file for each running program."""
        return self.folder / "pids"

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.folder / "logs"

    @property
    def audit_policy(self) -> Path:
        """The audit policy of the API server."""
        return self.folder / "audit.json"

    @property
    def audit_log(self) -> Path:
        """The audit log: one JSON object per line."""
        return self.logs / "audit.log"

    @property
    def node(self) -> Path:
        """Folder of containerd and kubelet, one for each checkout.

        It lies outside the checkout: kubelet's sockets are 35 characters below it, and a socket's path has 107 at most.
        """
        return NODE_FOLDERS / hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]

    @property
    def api_url(self) -> str:
        """URL of the API server."""
        return f"https://{self.address}:{self.ports.api}"

    def kubeconfig(self, user: str = "admin") -> Path:
        """Path of a client's kubeconfig."""
        return self.folder / f"{user}.conf"


def find_cache(name: str) -> Path:
    """Returns a folder that all checkouts share and keep between runs. Deleting it costs only time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / name


def find_address() -> str:
    """Finds the address at which pods and other machines reach this machine; loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # a documentation address (RFC 5737); connecting UDP sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def make_settings(
    *, folder: Path | None = None, first_port: int | None = None, num_fake_nodes: int = 2, has_real_node: bool = True
) -> Settings:
    """Makes the settings of a cluster of this checkout.

    Args:
        folder: Its folder; SLUICE_KUBE_FOLDER or ``.sluice/kube`` of the checkout by default.
        first_port: First of its ports; SLUICE_KUBE_PORT or 16400 by default.
        num_fake_nodes: Nodes that kwok plays.
        has_real_node: Whether this machine is a node.
    """
    port = first_port or int(os.environ.get("SLUICE_KUBE_PORT", FIRST_PORT))
    return Settings(
        folder=folder or Path(os.environ.get("SLUICE_KUBE_FOLDER", ROOT / ".sluice" / "kube")),
        address=find_address(),
        ports=Ports.starting_at(port),
        num_fake_nodes=num_fake_nodes,
        has_real_node=has_real_node,
    )
