"""This machine as a node whose pods are real: containerd, kubelet, kube-proxy and cluster DNS."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.errors import TestbedError
from testbed.fake_nodes import is_ready
from testbed.images import Image, make_pause_image, write_image
from testbed.settings import NODE_NAME

if TYPE_CHECKING:
    from testbed.client import Client
    from testbed.processes import Processes
    from testbed.settings import Settings

BRIDGE = "sluice0"
MASQUERADE_TABLE = "sluice-masquerade"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
NAMESPACES = Path("/var/run/netns")
RUNTIME_FOLDER = "/run/sluice-kube-{port}"
FOREIGN = "foreign-namespaces"
PROGRAMS = ("containerd", "kubelet", "kube-proxy", "coredns")


class Node:
    """The real node. Tests stop and start its programs, and load images.

    Args:
        settings: The cluster.
        processes: Starts and stops programs.
        client: The administrator.
        path: Folder of the binaries.
    """

    def __init__(self, settings: Settings, processes: Processes, client: Client, path: Path) -> None:
        self._settings = settings
        self._processes = processes
        self._client = client
        self._path = path
        self._commands = {
            "containerd": ["containerd", "--config", str(settings.node / "containerd.toml")],
            "kubelet": render_kubelet(settings),
            "kube-proxy": render_kube_proxy(settings),
            "coredns": ["coredns", "-conf", str(settings.node / "Corefile")],
        }

    def start(self) -> None:
        """Starts everything and waits until the node is Ready."""
        (self._settings.node / "cni").mkdir(parents=True)
        (self._settings.node / FOREIGN).write_text("\n".join(list_pod_namespaces()))
        write_configurations(self._settings)
        prepare_network(self._settings)
        self.start_program("containerd")
        self._processes.wait_for("containerd", lambda: self._ctr("version").returncode == 0)
        self.load_image(make_pause_image(self._path))
        for name in PROGRAMS[1:]:
            self.start_program(name)
        self._client.apply(*make_dns_service(self._settings))
        self.wait_ready()

    def start_program(self, name: str) -> None:
        """Starts one program."""
        self._processes.start(name, self._commands[name])

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        """Waits until the node is Ready."""
        self._processes.wait_for(f"node {NODE_NAME}", lambda: is_ready(self._client, NODE_NAME), timeout_s)

    def load_image(self, image: Image) -> None:
        """Makes an image and loads it into containerd.

        Raises:
            TestbedError: containerd refused it.
        """
        archive = self._settings.node / "image.tar"
        write_image(image, archive)
        self.load_archive(archive)
        archive.unlink()

    def load_archive(self, archive: Path) -> None:
        """Loads an image from an archive into containerd, under the name that the archive has for it.

        Raises:
            TestbedError: containerd refused it.
        """
        done = self._ctr("-n", "k8s.io", "images", "import", str(archive))
        if done.returncode != 0:
            raise TestbedError(f"image {archive}: {done.stderr.strip()}")

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_ctr(self._settings, *arguments)


def list_pod_namespaces() -> set[str]:
    """Lists the network namespaces of all pods on this machine, of other clusters too."""
    return {path.name for path in NAMESPACES.glob("cni-*")} if NAMESPACES.is_dir() else set()


def read_foreign_namespaces(settings: Settings) -> set[str]:
    """Reads which of them existed before the node was started."""
    path = settings.node / FOREIGN
    return set(path.read_text().split()) if path.is_file() else list_pod_namespaces()


def run_ctr(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs containerd's client with a short timeout: it would wait ten seconds for a dead socket."""
    command = ["ctr", "--connect-timeout", "2s", "-a", str(settings.node / "containerd.sock"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write_configurations(settings: Settings) -> None:
    """Writes the configurations of containerd, the pod network, kubelet and DNS."""
    node = settings.node
    (node / "containerd.toml").write_text(
        CONTAINERD.format(node=node, state=RUNTIME_FOLDER.format(port=settings.ports.api))
    )
    (node / "cni" / "10-pods.conflist").write_text(json.dumps(make_pod_network(settings), indent=1))
    (node / "kubelet.json").write_text(json.dumps(make_kubelet_configuration(settings), indent=1))
    (node / "Corefile").write_text(
        COREFILE.format(port=settings.ports.dns, address=settings.address, kubeconfig=settings.kubeconfig())
    )


# Without CAP_SYS_RESOURCE runc cannot lower a process' oom_score_adj, hence restrict_oom_score_adj.
CONTAINERD = """\
version = 2
root = "{node}/containerd"
state = "{state}"
[grpc]
  address = "{node}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/local/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{node}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""
COREFILE = """\
.:{port} {{
	bind {address}
	errors
	kubernetes cluster.local in-addr.arpa {{
		kubeconfig {kubeconfig}
		pods insecure
		ttl 1
	}}
	forward . /etc/resolv.conf
	cache 1
}}
"""


def make_pod_network(settings: Settings) -> dict[str, Any]:
    """Describes the bridge of this node's pods. With hairpin mode, a pod reaches itself through its Service."""
    addresses = {
        "type": "host-local",
        "dataDir": str(settings.node / "ipam"),
        "ranges": [[{"subnet": settings.node_pod_network}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": addresses}
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def make_kubelet_configuration(settings: Settings) -> dict[str, Any]:
    """Makes the kubelet's configuration. It never collects images, because they cannot be pulled again."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "port": settings.ports.kubelet,
        "healthzPort": settings.ports.kubelet_health,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "containerRuntimeEndpoint": f"unix://{settings.node / 'containerd.sock'}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(settings.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(settings.pki / "kubelet-serving.crt"),
        "tlsPrivateKeyFile": str(settings.pki / "kubelet-serving.key"),
        "clusterDomain": "cluster.local",
        "clusterDNS": [settings.dns_service],
        "resolvConf": "/etc/resolv.conf",
        "podLogsDir": str(settings.node / "pods"),
        "makeIPTablesUtilChains": False,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "enforceNodeAllocatable": ["pods"],
    }


def render_kubelet(settings: Settings) -> list[str]:
    """Command of kubelet."""
    return [
        "kubelet",
        f"--config={settings.node / 'kubelet.json'}",
        f"--kubeconfig={settings.kubeconfig('kubelet')}",
        f"--root-dir={settings.node / 'kubelet'}",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={settings.address}",
        "--node-labels=type=real",
    ]


def render_kube_proxy(settings: Settings) -> list[str]:
    """Command of kube-proxy."""
    return [
        "kube-proxy",
        f"--kubeconfig={settings.kubeconfig('proxy')}",
        "--proxy-mode=nftables",
        f"--hostname-override={NODE_NAME}",
        f"--cluster-cidr={settings.pod_network}",
        "--conntrack-max-per-core=0",
        f"--healthz-bind-address=127.0.0.1:{settings.ports.proxy_health}",
        f"--metrics-bind-address=127.0.0.1:{settings.ports.proxy_metrics}",
    ]


def prepare_network(settings: Settings) -> None:
    """Masquerades packets that pods send out of the machine.

    Raises:
        TestbedError: The kernel refused the rules.
    """
    rules = f"""
table ip {MASQUERADE_TABLE} {{
	chain postrouting {{
		type nat hook postrouting priority srcnat;
		ip saddr {settings.node_pod_network} ip daddr != {settings.pod_network} oifname != "{BRIDGE}" masquerade
	}}
}}
"""
    (settings.node / FORWARDING.name).write_text(FORWARDING.read_text())  # ``cleanup.py`` restores this value
    FORWARDING.write_text("1\n")
    done = subprocess.run(["nft", "-f", "-"], input=rules, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"nft: {done.stderr.strip()}")


def make_dns_service(settings: Settings) -> list[dict[str, Any]]:
    """Describes cluster DNS: it runs beside the control plane, behind a Service without a selector."""
    name, namespace = "kube-dns", "kube-system"
    ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "clusterIP": settings.dns_service,
            "ports": [
                {"name": port, "port": 53, "targetPort": settings.ports.dns, "protocol": protocol}
                for port, protocol in ports
            ],
        },
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": [{"name": port, "port": settings.ports.dns, "protocol": protocol} for port, protocol in ports],
        "endpoints": [{"addresses": [settings.address], "conditions": {"ready": True}}],
    }
    return [service, endpoints]
