"""The control plane: etcd, API server, controller manager and scheduler."""

from __future__ import annotations

import json
import signal
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.client import Client
    from testbed.processes import Processes
    from testbed.settings import Settings

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
# Requests per second of each controller and of the scheduler. The default of 20 suits clusters that grow slowly.
CLIENT_RATE = ("--kube-api-qps=500", "--kube-api-burst=1000")
# Audits the requests of service accounts, except those of Kubernetes itself.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


class ControlPlane:
    """The control plane; tests stop and start its programs.

    Args:
        settings: The cluster.
        processes: Starts and stops programs.
        client: The administrator.
    """

    def __init__(self, settings: Settings, processes: Processes, client: Client) -> None:
        self._settings = settings
        self._processes = processes
        self._client = client
        self._commands = {
            "etcd": render_etcd(settings),
            "kube-apiserver": render_api_server(settings),
            "kube-controller-manager": render_controller_manager(settings),
            "kube-scheduler": render_scheduler(settings),
        }

    def start(self) -> None:
        """Starts everything and waits until it is ready."""
        self._settings.audit_policy.write_text(json.dumps(AUDIT_POLICY))
        for name in PROGRAMS:
            self.start_program(name)
        self._processes.wait_for(
            "default service account",
            lambda: self._client.request("GET", "/api/v1/namespaces/default/serviceaccounts/default").is_ok,
        )

    def start_program(self, name: str) -> None:
        """Starts one program and waits until it is healthy; others may depend on it at once."""
        self._processes.start(name, self._commands[name])
        ports = self._settings.ports
        if name == "kube-apiserver":
            self._processes.wait_for("API server", self._client.is_ready, 120)
        elif name == "kube-controller-manager":
            self._processes.wait_for("controller manager", lambda: _is_healthy(ports.controller_manager))
        elif name == "kube-scheduler":
            self._processes.wait_for("scheduler", lambda: _is_healthy(ports.scheduler))

    def stop_program(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Stops one program, with SIGKILL by default."""
        self._processes.stop(name, number)


def render_etcd(settings: Settings) -> list[str]:
    """Renders the command of etcd. Its data is thrown away afterwards, so etcd does not sync it to disk."""
    client, peer = (f"127.0.0.1:{port}" for port in (settings.ports.etcd, settings.ports.etcd_peer))
    return [
        "etcd",
        "--name=test",
        f"--data-dir={settings.folder / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls=https://{client}",
        f"--advertise-client-urls=https://{client}",
        f"--listen-peer-urls=http://{peer}",
        f"--initial-advertise-peer-urls=http://{peer}",
        f"--initial-cluster=test=http://{peer}",
        "--client-cert-auth",
        f"--trusted-ca-file={settings.pki / 'etcd-ca.crt'}",
        f"--cert-file={settings.pki / 'etcd.crt'}",
        f"--key-file={settings.pki / 'etcd.key'}",
        "--log-level=warn",
    ]


def render_api_server(settings: Settings) -> list[str]:
    """Renders the command of the API server, with RBAC and the usual admission plugins."""
    pki = settings.pki
    return [
        "kube-apiserver",
        f"--etcd-servers=https://127.0.0.1:{settings.ports.etcd}",
        f"--etcd-cafile={pki / 'etcd-ca.crt'}",
        f"--etcd-certfile={pki / 'etcd-client.crt'}",
        f"--etcd-keyfile={pki / 'etcd-client.key'}",
        f"--bind-address={settings.address}",
        f"--advertise-address={settings.address}",
        f"--secure-port={settings.ports.api}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki / 'tokens.key'}",
        f"--service-account-signing-key-file={pki / 'tokens.key'}",
        f"--service-cluster-ip-range={settings.service_network}",
        "--enable-aggregator-routing=true",
        f"--requestheader-client-ca-file={pki / 'front-ca.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front.crt'}",
        f"--proxy-client-key-file={pki / 'front.key'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet.key'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP,Hostname",
        f"--audit-policy-file={settings.audit_policy}",
        f"--audit-log-path={settings.audit_log}",
    ]


def render_controller_manager(settings: Settings) -> list[str]:
    """Renders the command of the controller manager, with a service account for each controller as in real clusters."""
    config, pki = settings.kubeconfig("controller-manager"), settings.pki
    return [
        "kube-controller-manager",
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
        f"--secure-port={settings.ports.controller_manager}",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={pki / 'tokens.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        "--allocate-node-cidrs=false",
        f"--service-cluster-ip-range={settings.service_network}",
        "--leader-elect=false",
        # The defaults of 15 s and 5 minutes are ones of patience.
        "--horizontal-pod-autoscaler-sync-period=2s",
        "--horizontal-pod-autoscaler-downscale-stabilization=5s",
        *CLIENT_RATE,
    ]


def render_scheduler(settings: Settings) -> list[str]:
    """Renders the command of the scheduler."""
    config = settings.kubeconfig("scheduler")
    return [
        "kube-scheduler",
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
        f"--secure-port={settings.ports.scheduler}",
        "--leader-elect=false",
        *CLIENT_RATE,
    ]


def _is_healthy(port: int) -> bool:
    # These programs sign their certificates themselves, so the certificate cannot be verified.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/healthz", timeout=2, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
