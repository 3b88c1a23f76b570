"""API keys and certificates of a ServingCluster: Secrets, mounts, and the Certificates that cert-manager issues.

The kubelet mounts Secrets; no program reads one through the API server. Peers check a certificate's authority and its
name: engines and routers use the name of their headless Service, the operator its own name and namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.labels import label_child
from sluice_operator.kubernetes.kinds import CERTIFICATES
from sluice_operator.kubernetes.objects import name_of
from sluice_operator.resources.commands import Security
from sluice_operator.resources.pods.pod_status import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.api.spec.network_spec import TlsSpec
    from sluice_operator.kubernetes.objects import Object

KEYS, FRONT, PEERS = "api-keys", "front-tls", "peer-tls"
DIRECTORY = "/etc/sluice"


def find_secrets(cluster: ServingCluster, component: str) -> dict[str, str]:
    """Finds the Secrets that a component's programs need.

    Args:
        cluster: The manifest.
        component: Engines or routers.

    Returns:
        Name of each Secret by what it is for (``KEYS``, ``FRONT``, ``PEERS``).
    """
    name, router, network = cluster.metadata.name, cluster.spec.router, cluster.spec.network
    secrets: dict[str, str] = {}
    if component == names.ROUTER:
        if router.auth.api_key is not None:
            secrets[KEYS] = router.auth.api_key.secret_name
        if router.tls.mode != "Disabled":
            secrets[FRONT] = _name_secret(router.tls, names.name_certificate(name, names.FRONT))
    if network.tls.mode != "Disabled":
        secrets[PEERS] = _name_secret(network.tls, names.name_certificate(name, component))
    return secrets


def _name_secret(tls: TlsSpec, made: str) -> str:
    return tls.secret_name if tls.secret_name is not None else made


def describe_security(
    cluster: ServingCluster, component: str, locate: Callable[[str, str], str], control_name: str
) -> Security:
    """Describes where a component's programs find keys and certificates, and which peers they trust.

    Args:
        cluster: The manifest, with its namespace.
        component: Engines or routers.
        locate: Folder of a Secret, by what it is for and its name.
        control_name: Name in the certificate of the control plane.
    """
    folders = {use: locate(use, secret) for use, secret in find_secrets(cluster, component).items()}
    has_peers = PEERS in folders
    return Security(
        api_keys=folders.get(KEYS),
        front_tls=folders.get(FRONT),
        peer_tls=folders.get(PEERS),
        engine_name=names.name_engine_peer(cluster.metadata) if has_peers else None,
        router_name=names.name_router_peer(cluster.metadata) if has_peers else None,
        control_name=control_name if has_peers else None,
    )


def locate_in_pod(use: str, _secret: str) -> str:
    """Folder in which pods have a Secret."""
    return f"{DIRECTORY}/{use}"


def mount_secrets(cluster: ServingCluster, component: str) -> tuple[list[Object], list[Object]]:
    """Mounts a component's Secrets; without ``subPath``, so that the kubelet keeps them up to date.

    Returns:
        Volumes of the pod, and mounts of its main container.
    """
    secrets = find_secrets(cluster, component)
    volumes = [{"name": use, "secret": {"secretName": secret}} for use, secret in secrets.items()]
    mounts = [{"name": use, "mountPath": f"{DIRECTORY}/{use}", "readOnly": True} for use in secrets]
    return volumes, mounts


def uses_cert_manager(cluster: ServingCluster) -> list[str]:
    """Lists the fields that use cert-manager."""
    modes = {"spec.network.tls": cluster.spec.network.tls.mode, "spec.router.tls": cluster.spec.router.tls.mode}
    return [field for field, mode in modes.items() if mode == "CertManager"]


def render_certificates(cluster: ServingCluster) -> list[Object]:
    """Renders the Certificates that cert-manager issues: one for clients, one each for engines and routers."""
    name, network, router = cluster.metadata.name, cluster.spec.network.tls, cluster.spec.router.tls
    peers = {
        names.ENGINE: names.name_engine_peer(cluster.metadata),
        names.ROUTER: names.name_router_peer(cluster.metadata),
    }
    rendered = []
    if network.mode == "CertManager":
        rendered += [
            _render_certificate(name, component, network, [peer], ["server auth", "client auth"])
            for component, peer in peers.items()
        ]
    if router.mode == "CertManager":
        # Public issuers refuse cluster-internal names, so users may give their own.
        hosts = list(router.dns_names) or names.list_router_hosts(cluster.metadata)
        rendered.append(_render_certificate(name, names.FRONT, router, hosts, ["server auth"]))
    return rendered


def find_certificate_failures(live: Sequence[Object]) -> list[Failure]:
    """Finds Certificates that cert-manager could not issue and is not issuing at the moment."""
    failures = []
    for child in live:
        if child["kind"] != CERTIFICATES.name:
            continue
        found = (child.get("status") or {}).get("conditions") or []
        conditions = {condition["type"]: condition for condition in found}
        ready, issuing = conditions.get("Ready"), conditions.get("Issuing", {})
        if ready is None or ready["status"] == "True" or issuing.get("status") == "True":
            continue
        said = issuing.get("message") or ready.get("message") or "no reason given"
        message = (
            f"Certificate {name_of(child)} is not issued: {said}; read `kubectl describe certificate {name_of(child)}`"
        )
        failures.append(Failure(reason=Reason.MOUNT_FAILED, message=message))
    return failures


def _render_certificate(
    cluster: str, purpose: str, tls: TlsSpec, hosts: Sequence[str], usages: Sequence[str]
) -> Object:
    assert tls.issuer_ref is not None, "mode CertManager has an issuer (api/cross_field_rules.py)"
    component = names.ROUTER if purpose == names.FRONT else purpose
    name = names.name_certificate(cluster, purpose)
    return {
        "apiVersion": CERTIFICATES.api_version,
        "kind": CERTIFICATES.name,
        "metadata": {"name": name, "labels": label_child(cluster, component)},
        "spec": {
            "secretName": name,
            "dnsNames": list(hosts),
            "usages": ["digital signature", *usages],
            "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
            "issuerRef": {"group": CERTIFICATES.group, "kind": tls.issuer_ref.kind, "name": tls.issuer_ref.name},
        },
    }
