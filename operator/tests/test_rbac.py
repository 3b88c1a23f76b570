"""The rights of the operator: all that it needs, and nothing that it does not use."""

from __future__ import annotations

from cluster_harness import World
from fake_kubernetes import FakeKubernetes

from sluice_operator.controller.leader_election import LeaderElector
from sluice_operator.kubernetes.kinds import CLUSTERS, KINDS, SERVICES
from sluice_operator.kubernetes.rbac import LEASE_RULES, NODE_RULES, RULES, WATCHED

# RBAC verbs of each verb of the port. Discovery is open to everybody who is authenticated.
VERBS = {
    "get": ("get",),
    "list": ("list",),
    "apply": ("create", "patch"),
    "create": ("create",),
    "patch": ("patch",),
    "patch_status": ("patch",),
    "delete": ("delete",),
    "discover": (),
}


def collect(kubernetes: FakeKubernetes) -> set[tuple[str, str, str]]:
    return {
        (plural, "status" if verb == "patch_status" else "", right)
        for verb, plural in kubernetes.calls
        for right in VERBS[verb]
    }


def flatten(rules: object) -> set[tuple[str, str, str]]:
    return {(kind.plural, part, verb) for (kind, part), verbs in rules.items() for verb in verbs}  # type: ignore[attr-defined]


async def test_the_rights_are_those_that_are_used_and_no_others() -> None:
    world = World()
    world.kubernetes.has_monitors = world.kubernetes.has_cert_manager = True
    await world.settle()
    issued = {"mode": "CertManager", "issuerRef": {"name": "ca"}}
    edits = (
        {"router": {"tls": issued}},
        {"router": {"tls": {**issued, "dnsNames": ["a.b"]}}},
        {"router": {"tls": None}},
    )
    for edit in (
        *edits,
        {"prefillHeavy": 1},
        {"replicas": 2},
        {"replicas": 1},
        {"engine": {"image": "x:1"}},
        {"replicas": 3},
    ):
        world.edit(**edit)
        await world.settle()
    world.kubernetes.remove(SERVICES, "default", "tiny-router")
    await world.settle()
    # The informer lists and watches.
    informer = {(kind.plural, "", verb) for kind in WATCHED for verb in ("list", "watch")}
    assert collect(world.kubernetes) | informer == flatten(RULES)


async def test_the_rights_to_the_lease_are_those_that_are_used() -> None:
    kubernetes = FakeKubernetes()
    elector = LeaderElector(
        kubernetes, namespace="default", name="l", identity="a", now=lambda: 0.0, now_text=lambda: "t"
    )
    for _ in range(2):
        await elector.try_acquire_or_renew()
    await elector.release()
    assert collect(kubernetes) == flatten(LEASE_RULES)


def test_nothing_dangerous_is_among_them() -> None:
    assert flatten(NODE_RULES) == {("nodes", "", "list"), ("nodes", "", "watch")}
    rights = flatten(RULES) | flatten(LEASE_RULES)
    plurals = {plural for plural, _, _ in rights}
    assert plurals <= {kind.plural for kind in KINDS.values()}
    assert not plurals & {"secrets", "nodes", "roles", "rolebindings", "clusterroles", "namespaces"}
    assert not any("*" in part for right in rights for part in right)
    # The spec is the user's.
    assert not any(
        plural == CLUSTERS.plural and not part and verb in ("patch", "update", "create", "delete")
        for plural, part, verb in rights
    )
