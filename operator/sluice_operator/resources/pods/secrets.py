"""Secrets of engines and routers: API keys and certificates, where pods mount them, and which peers they trust.

The kubelet mounts Secrets; no program reads one through the API server. Peers check a certificate's authority and its
name: engines and routers use the name of their headless Service, the operator its own name and namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.resources.command_lines import Security

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.api.fields_and_defaults.network_spec import TlsSpec
    from sluice_operator.api.serving_cluster import ServingCluster
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
