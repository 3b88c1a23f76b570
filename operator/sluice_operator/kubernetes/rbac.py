"""What the operator may do, in one place: the chart's roles are made from it, and a test compares it with what is done.

No secrets, no nodes, no exec, no wildcards. ``watch`` and ``list`` come from the informer, the rest from the reconciler.
"""

from __future__ import annotations

from sluice_operator.kubernetes.interface import (
    CERTIFICATES,
    CLUSTERS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    EVENTS,
    LEASES,
    NETWORK_POLICIES,
    PODS,
    SERVICE_ACCOUNTS,
    SERVICE_MONITORS,
    SERVICES,
    Kind,
)

# Kinds whose events wake the reconciler. Monitors and Certificates are not among them: they may not exist.
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
# In the operator's own namespace only.
LEASE_RULES: dict[tuple[Kind, str], tuple[str, ...]] = {(LEASES, ""): ("create", "get", "patch")}
