"""The Certificates that cert-manager issues for a ServingCluster, and why it could not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.api.labels import label_child
from sluice_operator.kubernetes.kinds import CERTIFICATES
from sluice_operator.kubernetes.objects import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_operator.api.fields_and_defaults.network_spec import TlsSpec
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


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
