"""Certificates and client configurations of a test cluster."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

import trustme

from testbed.settings import NODE_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.settings import Settings

# Clients of the API server: user and group, as their certificates name them.
CLIENTS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", None),
    "scheduler": ("system:kube-scheduler", None),
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
    "proxy": ("system:kube-proxy", None),
}


def make_certificates(settings: Settings) -> None:
    """Makes all certificates, the signing key of service account tokens, and a kubeconfig for each client."""
    settings.pki.mkdir(parents=True, mode=0o700)
    cluster, etcd, front = trustme.CA(), trustme.CA(), trustme.CA()
    for name, authority in (("ca", cluster), ("etcd-ca", etcd), ("front-ca", front)):
        authority.cert_pem.write_to_path(settings.pki / f"{name}.crt")
    _write_private(settings.pki / "ca.key", cluster.private_key_pem.bytes())
    # One key pair signs tokens and checks them: the API server derives the public key from the private one.
    _write_private(settings.pki / "tokens.key", trustme.CA().private_key_pem.bytes())
    service = ["kubernetes", "default", "svc", "cluster", "local"]
    names = ["localhost", "127.0.0.1", settings.address, settings.api_service]
    names += [".".join(service[:length]) for length in (1, 2, 3, 5)]
    _issue(settings, cluster, "apiserver", *dict.fromkeys(names), user="kube-apiserver")
    _issue(
        settings,
        cluster,
        "kubelet-serving",
        NODE_NAME,
        settings.address,
        user=f"system:node:{NODE_NAME}",
        group="system:nodes",
    )
    _issue(settings, cluster, "apiserver-kubelet", user="kube-apiserver", group="system:masters")
    _issue(settings, etcd, "etcd", "localhost", "127.0.0.1", user="etcd")
    _issue(settings, etcd, "etcd-client", user="kube-apiserver")
    _issue(settings, front, "front", user="front-proxy-client")
    for name, (user, group) in CLIENTS.items():
        _issue(settings, cluster, name, user=user, group=group)
        write_kubeconfig(settings, settings.kubeconfig(name), certificate=settings.pki / name)


def _issue(
    settings: Settings, authority: trustme.CA, file: str, *names: str, user: str, group: str | None = None
) -> None:
    # Go refuses a certificate with an empty list of names. Nobody connects to a client, so any name will do.
    leaf = authority.issue_cert(*(names or ("localhost",)), common_name=user, organization_name=group)
    leaf.cert_chain_pems[0].write_to_path(settings.pki / f"{file}.crt")
    _write_private(settings.pki / f"{file}.key", leaf.private_key_pem.bytes())


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def write_kubeconfig(settings: Settings, path: Path, *, certificate: Path | None = None, token: str = "") -> None:
    """Writes a self-contained kubeconfig for a client.

    Args:
        settings: The cluster.
        path: File to write, as JSON, which is valid YAML.
        certificate: Path of the client's certificate and key, without their suffixes; or
        token: the client's token.
    """
    user: dict[str, str] = {"token": token}
    if certificate is not None:
        user = {
            "client-certificate-data": _base64(certificate.with_suffix(".crt")),
            "client-key-data": _base64(certificate.with_suffix(".key")),
        }
    server = {"server": settings.api_url, "certificate-authority-data": _base64(settings.pki / "ca.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
        "current-context": "test",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
