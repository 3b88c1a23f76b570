"""The operator's rights: its service account and the roles that the chart renders lack no right and have no unused one.

Each right is removed in turn. The operator names the missing right, and recovers when it is back. The API server's
audit log shows which rights the process uses, the informer's among them.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from kubectl_cluster import wait_for
from light_cluster import MERGE, LightCluster
from operator_process import Operator
from release import RESTRICTED
from stand_in_router import StandInRouters, run_stand_in_routers
from test_chart import one, pick
from testbed.fake_nodes import is_ready, make_node
from testbed.helm import Helm
from testbed.kubernetes_choice import build_chosen

from sluice_operator.kubernetes.kinds import CERTIFICATES, SERVICE_MONITORS
from sluice_operator.kubernetes.rbac import LEASE_RULES, RULES, WATCHED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from testbed.client import Client
    from testbed.cluster import Testbed

Object = dict[str, Any]
# API group, resource (with its subresource), verb.
Right = tuple[str, str, str]

pytestmark = pytest.mark.usefixtures("crd", "foreign_kinds", "rights_node")

SYSTEM = "rights-system"
TEAM = "rights-team"
PORT = 17500
VALUES = {"watchNamespaces": [TEAM], "replicas": 1, "crds": {"install": False}, "rbac": {"aggregate": False}}
ROLE = f"{SYSTEM}:sluice-operator"
LEASE_ROLE = "sluice-operator-lease"
FOREIGN = (SERVICE_MONITORS, CERTIFICATES)
TLS = {"mode": "CertManager", "issuerRef": {"name": "ca"}}
COUNTER = itertools.count(1)


def flatten(rules: dict[Any, tuple[str, ...]]) -> list[Right]:
    return [
        (kind.group, f"{kind.plural}/{part}" if part else kind.plural, verb)
        for (kind, part), verbs in rules.items()
        for verb in verbs
    ]


@pytest.fixture(scope="module")
def foreign_kinds(client: Client) -> Iterator[None]:
    """CRDs of ServiceMonitors and Certificates, without their controllers."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    names = [f"crd/{kind.plural}.{kind.group}" for kind in FOREIGN]
    for kind in FOREIGN:
        version = {"name": kind.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        spec = {"group": kind.group, "scope": "Namespaced", "versions": [version]}
        spec["names"] = {"kind": kind.name, "plural": kind.plural, "singular": kind.name.lower()}
        client.apply({**definition, "metadata": {"name": f"{kind.plural}.{kind.group}"}, "spec": spec})
    client.wait_established(*(name.removeprefix("crd/") for name in names))
    yield
    client.kubectl("delete", *names)


@pytest.fixture(scope="module")
def rights_node(client: Client) -> Iterator[None]:
    """A kwok node without a taint, which any pod may run on."""
    node = make_node("rights")
    del node["spec"]["taints"]
    client.apply(node)
    wait_for(lambda: is_ready(client, "rights"), "the open node")
    yield
    client.kubectl("delete", "node", "rights")


@dataclass(frozen=True, slots=True)
class Access:
    """The rights that the chart gives the operator.

    Args:
        client: The administrator.
        kubeconfig: Kubeconfig with a token of the operator's service account.
        user: Name of that account as a user.
    """

    client: Client
    kubeconfig: Path
    user: str

    def write(self, role: str, namespace: str, rights: list[Right]) -> None:
        """Gives a role exactly these rights, and waits until they are in force."""
        rules = [
            {"apiGroups": [group], "resources": [resource], "verbs": [verb]} for group, resource, verb in sorted(rights)
        ]
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/{role}"
        old = self.read(role, namespace)
        assert self.client.request("PATCH", path, {"rules": rules}, MERGE).is_ok
        for right in set(old) ^ set(rights):
            wait_for(lambda right=right: self.may(namespace, right) == (right in rights), f"the review of {right}")

    def read(self, role: str, namespace: str) -> list[Right]:
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/{role}"
        rules = self.client.request("GET", path).content["rules"]
        return [
            (group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        ]

    def may(self, namespace: str, right: Right) -> bool:
        group, resource, verb = right
        name, _, part = resource.partition("/")
        attributes = {"namespace": namespace, "group": group, "resource": name, "subresource": part, "verb": verb}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        content = {**review, "spec": {"user": self.user, "resourceAttributes": attributes}}
        answer = self.client.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", content)
        return bool(answer.content["status"]["allowed"])


@pytest.fixture(scope="module")
def access(client: Client, testbed: Testbed, crd: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """The service account and roles as the chart renders them, and nothing else of the chart."""
    for name in (SYSTEM, TEAM):
        client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})
    rendered = Helm(build_chosen() / "helm", tmp_path_factory.mktemp("helm")).template(VALUES, namespace=SYSTEM)
    assert set(find_grants_in(rendered)) == {(SYSTEM, LEASE_ROLE), (TEAM, ROLE)}
    client.apply(*(item for kind in ("ServiceAccount", "Role", "RoleBinding") for item in pick(rendered, kind)))
    account = one(rendered, "ServiceAccount")["metadata"]["name"]
    content = yaml.safe_load(client.kubeconfig.read_text())
    token = client.kubectl("create", "token", "-n", SYSTEM, account, "--duration=2h").strip()
    for user in content["users"]:
        user["user"] = {"token": token}
    path = testbed.settings.folder / "rights.kubeconfig"
    path.write_text(yaml.safe_dump(content))
    yield Access(client, path, f"system:serviceaccount:{SYSTEM}:{account}")
    client.kubectl("delete", "namespace", SYSTEM, TEAM, "--wait=false")


def find_grants_in(rendered: list[Object]) -> dict[tuple[str, str], list[Object]]:
    """Finds roles by namespace and name; a ClusterRole would have an empty namespace."""
    roles = [item for item in rendered if item["kind"] in ("Role", "ClusterRole")]
    return {(item["metadata"].get("namespace", ""), item["metadata"]["name"]): item["rules"] for item in roles}


@pytest.fixture(scope="module")
def routers(client: Client) -> Iterator[StandInRouters]:
    with run_stand_in_routers(client) as running:
        yield running


@pytest.fixture(scope="module")
def operator(access: Access, testbed: Testbed, routers: StandInRouters) -> Iterator[Operator]:
    log = testbed.settings.logs / "operator-rights.log"
    started = start(access, PORT, log)
    wait_for(lambda: started.leads, "a leader")
    yield started
    started.end(signal.SIGKILL)


def start(access: Access, port: int, log: Path, lease: str = "sluice-operator") -> Operator:
    options = {"namespace": SYSTEM, "identity": f"rights-{port}", "watch_namespaces": TEAM, "lease_name": lease}
    return Operator(access.kubeconfig, port, log, **options)


@pytest.fixture(scope="module")
def cluster(client: Client, operator: Operator) -> Iterator[LightCluster]:
    made = LightCluster(client, TEAM)
    made.edit(router={"tls": TLS})
    made.wait("Progressing", "Settled")
    yield made
    made.kubectl("delete", "slc", "tiny", "--ignore-not-found")


# Events that make the operator use a right, by resource and verb. For other rights, any reconcile does.


def locate(plural: str) -> str:
    """Returns the path of the cluster's child of a kind."""
    return f"{KINDS[plural].root}/namespaces/{TEAM}/{plural}/{CHILDREN[plural][0]}"


def delete(plural: str) -> Callable[[LightCluster], None]:
    def act(cluster: LightCluster) -> None:
        assert cluster.client.request("DELETE", locate(plural)).status in (200, 202)

    return act


def edit_child(plural: str) -> Callable[[LightCluster], None]:
    def act(cluster: LightCluster) -> None:
        assert cluster.client.request("PATCH", locate(plural), CHILDREN[plural][1], MERGE).is_ok

    return act


def flip(cluster: LightCluster) -> None:
    cluster.edit(prefillHeavy=3 - cluster.roles.count("p-heavy"))


def shrink_routers(cluster: LightCluster) -> None:
    cluster.edit(router={"replicas": 1})


def drop_tls(cluster: LightCluster) -> None:
    cluster.edit(router={"tls": None})


def break_the_spec(cluster: LightCluster) -> None:
    cluster.edit(engine={"podTemplate": {"spec": {"hostNetwork": True}}})


def lose_the_lease(cluster: LightCluster) -> None:
    cluster.client.kubectl("delete", "lease", "-n", SYSTEM, "sluice-operator")


KINDS = {kind.plural: kind for kind, _ in RULES}
# One child of each kind: its name, and an edit that the operator has to revert.
CHILDREN = {
    "deployments": ("tiny-router", {"spec": {"replicas": 3}}),
    "services": ("tiny-engines", {"spec": {"publishNotReadyAddresses": False}}),
    "configmaps": ("tiny-plan", {"data": {"plan.json": "{}"}}),
    "serviceaccounts": ("tiny-engine", {"automountServiceAccountToken": True}),
    "networkpolicies": ("tiny-engine", {"spec": {"policyTypes": ["Egress", "Ingress"]}}),
    "poddisruptionbudgets": ("tiny-engine", {"spec": {"maxUnavailable": 2}}),
    "servicemonitors": ("tiny-engine", {"spec": {"endpoints": []}}),
    "certificates": ("tiny-front-tls", {"spec": {"dnsNames": ["elsewhere.example.com"]}}),
}
OCCASIONS: dict[tuple[str, str], Callable[[LightCluster], None]] = {
    ("servingclusters/status", "patch"): flip,
    ("pods", "patch"): flip,
    ("events", "create"): break_the_spec,
    ("poddisruptionbudgets", "delete"): shrink_routers,
    ("certificates", "delete"): drop_tls,
    ("leases", "create"): lose_the_lease,
    **{(plural, verb): delete(plural) for plural in CHILDREN for verb in ("create", "get")},
    **{(plural, "patch"): edit_child(plural) for plural in CHILDREN},
}
# Without these, the operator cannot write a condition, or they do not concern the cluster.
LOG_ONLY = {"servingclusters", "servingclusters/status", "events", "leases"}
# A watch goes on after its right is removed, so other processes test these.
INFORMER = {"watch"}
REMOVABLE = [
    pytest.param(role, namespace, right, id=f"{right[1]}-{right[2]}")
    for role, namespace, rules in ((ROLE, TEAM, RULES), (LEASE_ROLE, SYSTEM, LEASE_RULES))
    for right in flatten(rules)
    if right[2] not in INFORMER and right != ("sluice.dev", "servingclusters", "list")
]


def poke(cluster: LightCluster) -> None:
    """Makes the operator reconcile at once."""
    labels = {"metadata": {"labels": {"touched": str(next(COUNTER))}}}
    assert cluster.client.request("PATCH", cluster.path, labels, MERGE).is_ok


@pytest.mark.parametrize(("role", "namespace", "right"), REMOVABLE)
def test_a_missing_right_is_named_and_its_return_noticed(
    role: str, namespace: str, right: Right, access: Access, operator: Operator, cluster: LightCluster
) -> None:
    _, resource, verb = right
    words = f'cannot {verb} resource "{resource}"'
    all_rights = access.read(role, namespace)
    start_of_log = len(read_plainly(operator.log))
    access.write(role, namespace, [other for other in all_rights if other != right])
    try:
        OCCASIONS.get((resource, verb), poke)(cluster)
        poke(cluster)
        wait_for(lambda: words in read_plainly(operator.log)[start_of_log:], f"{words!r} in the log")
        if resource not in LOG_ONLY:
            condition = wait_for(lambda: is_forbidden(cluster), "the condition")
            assert words in condition["message"]
    finally:
        access.write(role, namespace, all_rights)
    cluster.edit(prefillHeavy="50%", router={"replicas": 2, "tls": TLS}, engine={"podTemplate": None})
    poke(cluster)
    cluster.wait("Degraded", "AsExpected")
    cluster.wait("Progressing", "Settled")
    assert operator.leads


def read_plainly(log: Path) -> str:
    """Reads a log without the backslashes that JSON puts before quotes."""
    return log.read_text().replace("\\", "")


def is_forbidden(cluster: LightCluster) -> Object:
    condition = cluster.condition("Degraded")
    return condition if condition.get("reason") == "Forbidden" else {}


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_missing_right_of_the_informer_is_named(verb: str, access: Access, testbed: Testbed) -> None:
    all_rights = access.read(ROLE, TEAM)
    log = testbed.settings.logs / f"operator-no-{verb}.log"
    access.write(ROLE, TEAM, [right for right in all_rights if right[2] != verb])
    started = start(access, PORT + 1 + (verb == "watch"), log, lease=f"no-{verb}")
    try:
        for kind in WATCHED:
            words = f'cannot {verb} resource "{kind.plural}"'
            wait_for(lambda words=words: words in read_plainly(log), words)
    finally:
        access.write(ROLE, TEAM, all_rights)
        started.end(signal.SIGKILL)
        access.client.kubectl("delete", "lease", "-n", SYSTEM, f"no-{verb}", "--ignore-not-found")


def read_audit(testbed: Testbed, user: str) -> list[Object]:
    lines = testbed.settings.audit_log.read_text().splitlines()
    # The last line may be incomplete.
    found = [json.loads(line) for line in lines if user in line and line.endswith("}")]
    return [item for item in found if item["user"]["username"] == user and "objectRef" in item]


def test_every_right_is_used_and_no_request_is_forbidden(
    access: Access, cluster: LightCluster, operator: Operator, testbed: Testbed, client: Client
) -> None:
    begin = len(read_audit(testbed, access.user))
    # A new process uses the rights of starting up too; the present leader makes room for it.
    operator.end(signal.SIGTERM)
    log = testbed.settings.logs / "operator-life.log"
    last = start(access, PORT + 3, log)
    wait_for(lambda: last.leads, "a leader")
    flip(cluster)
    cluster.wait("Progressing", "Settled")
    for plural in CHILDREN:
        edit_child(plural)(cluster)
    poke(cluster)
    cluster.wait("Progressing", "Settled")
    shrink_routers(cluster)
    cluster.wait("Progressing", "Settled")
    for plural in CHILDREN:
        delete(plural)(cluster)
    poke(cluster)
    wait_for(lambda: all(client.request("GET", locate(plural)).is_ok for plural in CHILDREN), "the recreated children")
    drop_tls(cluster)
    cluster.wait("Progressing", "Settled")
    lose_the_lease(cluster)
    break_the_spec(cluster)
    cluster.wait("SpecValid", "PodTemplateRefused")
    cluster.edit(engine={"podTemplate": None})
    cluster.wait("Progressing", "Settled")
    wait_for(lambda: last.leads, "the recreated lease")
    assert last.end(signal.SIGTERM) == 0
    time.sleep(0.5)
    used: set[Right] = set()
    for item in read_audit(testbed, access.user)[begin:]:
        reference, code = item["objectRef"], item.get("responseStatus", {}).get("code", 0)
        assert code not in (401, 403), item
        resource = "/".join(filter(None, (reference["resource"], reference.get("subresource"))))
        used.add((reference.get("apiGroup", ""), resource, item["verb"]))
        if item["verb"] == "patch" and code == 201:
            # Server-side apply of an object that does not exist needs the right to create it.
            used.add((reference.get("apiGroup", ""), resource, "create"))
    granted = {*access.read(ROLE, TEAM), *access.read(LEASE_ROLE, SYSTEM)}
    assert used == granted


def test_the_operator_never_reads_a_secret(access: Access, testbed: Testbed, cluster: LightCluster) -> None:
    assert cluster
    asked = {item["objectRef"]["resource"] for item in read_audit(testbed, access.user)}
    assert asked == {kind.plural for kind, _ in (*RULES, *LEASE_RULES)}


def test_the_chart_s_roles_are_those_of_this_test(access: Access) -> None:
    assert sorted(access.read(ROLE, TEAM)) == sorted(flatten(RULES))
    assert sorted(access.read(LEASE_ROLE, SYSTEM)) == sorted(flatten(LEASE_RULES))
