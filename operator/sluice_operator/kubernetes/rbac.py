"""The operator's RBAC rules: the chart's roles are made from them, and a test compares them with the requests made.

No secrets, exec or wildcards, and nodes only where the chart says so. The informer needs ``watch`` and ``list``, the
reconciler the rest.
"""

from __future__ import annotations

from sluice_operator.kubernetes.kinds import (
    CERTIFICATES,
    CLUSTERS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    EVENTS,
    LEASES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SERVICE_ACCOUNTS,
    SERVICE_MONITORS,
    SERVICES,
    Kind,
)

# Kinds whose events cause a reconcile. ServiceMonitors and Certificates are not watched: their CRDs may be missing.
WATCHED = (
    CLUSTERS,
    PODS,
    DEPLOYMENTS,
    SERVICES,
    CONFIG_MAPS,
    SERVICE_ACCOUNTS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
)
# Kubernetes checks server-side apply as "patch", and as "create" where there is nothing yet.
APPLIED = ("create", "get", "list", "patch")

RULES: dict[tuple[Kind, str], tuple[str, ...]] = {
    (CLUSTERS, ""): ("get", "list", "watch"),
    (CLUSTERS, "status"): ("patch",),
    (PODS, ""): ("list", "patch", "watch"),
    (DEPLOYMENTS, ""): (*APPLIED, "watch"),
    (SERVICES, ""): (*APPLIED, "watch"),
    (CONFIG_MAPS, ""): (*APPLIED, "watch"),
    (SERVICE_ACCOUNTS, ""): (*APPLIED, "watch"),
    (NETWORK_POLICIES, ""): (*APPLIED, "watch"),
    (DISRUPTION_BUDGETS, ""): (*APPLIED, "delete", "watch"),
    (SERVICE_MONITORS, ""): APPLIED,
    (CERTIFICATES, ""): (*APPLIED, "delete"),
    (EVENTS, ""): ("create",),
}
# Everywhere, where nodes are watched.
NODE_RULES: dict[tuple[Kind, str], tuple[str, ...]] = {(NODES, ""): ("list", "watch")}
# In the operator's own namespace only.
LEASE_RULES: dict[tuple[Kind, str], tuple[str, ...]] = {(LEASES, ""): ("create", "get", "patch")}
