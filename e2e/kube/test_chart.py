"""The chart: what helm renders, and whether the real API server accepts it.

The first tests need helm only; those that use ``client`` need the cluster. Only the CRD is installed. Objects, pods
among them, are sent as server-side dry runs to a namespace under Pod Security ``restricted``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from chart_values import EVERYTHING, LEAST, NARROW, VALUES
from testbed.helm import CHART, RELEASE, SYSTEM
from testbed.settings import ROOT

from sluice_operator.api import names
from sluice_operator.api.labels import COMPONENT_LABEL, NAME_LABEL
from sluice_operator.api.ports import MAX_WORKERS
from sluice_operator.api.router_workers import control_port
from sluice_operator.kubernetes.rbac import LEASE_RULES, NODE_RULES, RULES
from sluice_operator.settings import OperatorSettings, parse_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.client import Client
    from testbed.helm import Helm

Object = dict[str, Any]

# Kinds of the Prometheus operator and of cert-manager, which the test cluster does not have.
FOREIGN = {"ServiceMonitor", "PrometheusRule", "Certificate"}


@pytest.fixture(params=VALUES)
def rendered(helm: Helm, request: pytest.FixtureRequest) -> list[Object]:
    """All objects rendered for one set of values."""
    return helm.template(VALUES[request.param])


def pick(objects: list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def one(objects: list[Object], kind: str) -> Object:
    (found,) = pick(objects, kind)
    return found


def find_pods(objects: list[Object]) -> Iterator[Object]:
    """Yields the metadata and spec of every rendered pod."""
    yield one(objects, "Deployment")["spec"]["template"]
    yield one(objects, "Pod")


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_lint_passes(helm: Helm, tmp_path: Path, values: Object) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    done = helm.run("lint", "--strict", str(CHART), "-f", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replicas=0", "/replicas"),
        ("replica=2", "'replica'"),
        ("logLevel=info", "/logLevel"),
        ("watchNamespaces=default", "/watchNamespaces"),
        ("watchNamespaces={kube*}", "/watchNamespaces/0"),
        ("crds.install=perhaps", "/crds/install"),
        ("image.tag=a b", "/image/tag"),
        ("serviceAccount.create=false", "/serviceAccount/name"),
        ("requestTimeoutSeconds=6", "/requestTimeoutSeconds"),
    ],
)
def test_an_invalid_value_is_refused_and_named(helm: Helm, setting: str, words: str) -> None:
    done = helm.run("template", RELEASE, str(CHART), "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(("version", "is_taken"), [("1.29.9", False), ("1.30.0", True), ("1.36.0-gke.1", True)])
def test_kubernetes_that_is_too_old_is_refused(helm: Helm, version: str, *, is_taken: bool) -> None:
    done = helm.run("template", RELEASE, str(CHART), "--kube-version", version)
    assert (done.returncode == 0) == is_taken, done.stderr
    assert is_taken or "1.30" in done.stderr


def read_settings(deployment: Object) -> OperatorSettings:
    """Reads the settings that the operator would start with."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "sluice_operator"]
    fields = {"metadata.namespace": deployment["metadata"]["namespace"], "metadata.name": "pod-1"}
    environment = {
        item["name"]: fields[item["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in item else item["value"]
        for item in container["env"]
    }
    return parse_settings(container["args"], environment)


def test_the_operator_reads_what_the_chart_writes(helm: Helm) -> None:
    settings = read_settings(one(helm.template(EVERYTHING | NARROW | {"watchAllNamespaces": False}), "Deployment"))
    assert settings == OperatorSettings(
        namespace=SYSTEM,
        identity="pod-1",
        watch_namespaces="team-a,team-b",
        watch_nodes=True,
        lease_name="sluice-operator",
        engine_image="registry.example/engine:1",
        router_image="registry.example/router:1",
        max_concurrent_upgrades=3,
        gpu_resource_name="amd.com/gpu",
        cluster_monitors=False,
        monitor_labels="example.org/team=a,release=prometheus",
        workers=32,
        resync_s=86400,
        request_timeout_s=2,
        log_level="DEBUG",
        runbook_url="https://example.org/runbook.md",
        allow_host_access=True,
        peer_tls="/etc/sluice/peer-tls",
    )
    defaults = read_settings(one(helm.template({}), "Deployment"))
    assert defaults == OperatorSettings(
        namespace=SYSTEM, identity="pod-1", watch_namespaces=SYSTEM, gpu_resource_name="nvidia.com/gpu"
    )
    everywhere = read_settings(one(helm.template({"watchAllNamespaces": True}), "Deployment"))
    assert everywhere == defaults.model_copy(update={"watch_namespaces": ""})


def flatten_code(rules: dict[Any, tuple[str, ...]]) -> set[tuple[str, str, str]]:
    return {
        (kind.group, f"{kind.plural}/{part}" if part else kind.plural, verb)
        for (kind, part), verbs in rules.items()
        for verb in verbs
    }


def flatten(role: Object) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def find_grants(objects: list[Object]) -> dict[tuple[str, str], set[tuple[str, str, str]]]:
    """Lists the operator's rights through the bindings, by namespace ("" for all) and role."""
    roles = {
        (item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]): item
        for item in objects
        if item["kind"] in ("Role", "ClusterRole")
    }
    account = one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    found = {}
    for binding in pick(objects, "RoleBinding") + pick(objects, "ClusterRoleBinding"):
        namespace, reference = binding["metadata"].get("namespace", ""), binding["roleRef"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": SYSTEM}]
        assert binding["kind"] == f"{reference['kind']}Binding"
        found[namespace, reference["name"]] = flatten(roles[reference["kind"], namespace, reference["name"]])
    return found


def test_the_cluster_role_has_the_rights_of_the_code(helm: Helm) -> None:
    assert find_grants(helm.template({"watchAllNamespaces": True})) == {
        (SYSTEM, "sluice-operator-lease"): flatten_code(LEASE_RULES),
        ("", "sluice-system:sluice-operator"): flatten_code(RULES),
    }


def test_nodes_are_read_in_all_namespaces_or_in_one_where_the_values_say_so(helm: Helm) -> None:
    grants = find_grants(helm.template({"watchNodes": True}))
    assert grants["", "sluice-system:sluice-operator:nodes"] == flatten_code(NODE_RULES)
    assert {namespace for namespace, _ in grants} == {"", SYSTEM}


@pytest.mark.parametrize(
    ("watched", "namespaces"), [([], [SYSTEM]), (["team-a", SYSTEM], ["team-a", SYSTEM])], ids=["default", "named"]
)
def test_rights_in_namespaces_are_roles_only(helm: Helm, watched: list[str], namespaces: list[str]) -> None:
    objects = helm.template({"watchNamespaces": watched, "rbac": {"aggregate": False}})
    assert not pick(objects, "ClusterRole") + pick(objects, "ClusterRoleBinding")
    assert find_grants(objects) == {
        (SYSTEM, "sluice-operator-lease"): flatten_code(LEASE_RULES),
        **{(name, "sluice-system:sluice-operator"): flatten_code(RULES) for name in namespaces},
    }


def test_aggregated_roles_are_for_people(helm: Helm) -> None:
    objects = helm.template(NARROW)
    found = {item["metadata"]["name"]: item for item in pick(objects, "ClusterRole")}
    view, edit = (found[f"sluice-system:sluice-operator:{name}"] for name in ("view", "edit"))
    assert len(found) == 2
    assert {verb for _, _, verb in flatten(view)} == {"get", "list", "watch"}
    assert "rbac.authorization.k8s.io/aggregate-to-view" in view["metadata"]["labels"]
    assert "rbac.authorization.k8s.io/aggregate-to-edit" in edit["metadata"]["labels"]
    # Only the operator writes the status.
    assert not any(resource.endswith("/status") for _, resource, _ in flatten(edit))


def test_the_chart_has_the_crd_of_the_crds_folder(helm: Helm) -> None:
    source = yaml.safe_load((ROOT / "crds" / "servingclusters.yaml").read_text())
    found = one(helm.template({}), "CustomResourceDefinition")
    assert found["spec"] == source["spec"]
    assert found["metadata"]["name"] == source["metadata"]["name"]
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize(
    ("install", "keep", "policy"),
    [(True, False, None), (True, True, "keep"), (False, True, None)],
    ids=["deleted", "kept", "not ours"],
)
def test_the_crd_is_kept_if_the_values_say_so(helm: Helm, *, install: bool, keep: bool, policy: str | None) -> None:
    found = pick(helm.template({"crds": {"install": install, "keep": keep}}), "CustomResourceDefinition")
    assert len(found) == install
    assert [item["metadata"].get("annotations", {}).get("helm.sh/resource-policy") for item in found] == (
        [policy] if install else []
    )


def test_selectors_find_the_operator_and_nothing_else(rendered: list[Object]) -> None:
    deployment, (operator, test) = one(rendered, "Deployment"), find_pods(rendered)
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        one(rendered, "Service")["spec"]["selector"],
        *(item["spec"]["podSelector"]["matchLabels"] for item in pick(rendered, "NetworkPolicy")),
        *(item["spec"]["selector"]["matchLabels"] for item in pick(rendered, "PodDisruptionBudget")),
    ]
    for selector in selectors:
        assert selector.items() <= operator["metadata"]["labels"].items()
        assert not selector.items() <= test["metadata"]["labels"].items()
    # The network policies of routers admit pods with this label.
    assert operator["metadata"]["labels"][NAME_LABEL] == names.MANAGER
    for policy in pick(rendered, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            for peer in rule.get("to", []):
                if "podSelector" in peer:
                    assert peer["podSelector"]["matchLabels"] == {COMPONENT_LABEL: names.ROUTER}
                    assert [port["port"] for port in rule["ports"]] == [*map(control_port, range(MAX_WORKERS))]
    for monitor in pick(rendered, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        assert wanted <= one(rendered, "Service")["metadata"]["labels"].items()
        assert {part["port"] for part in monitor["spec"]["endpoints"]} == {"metrics"}


def test_values_turn_objects_on_and_off(helm: Helm) -> None:
    def kinds(values: Object) -> set[str]:
        return {item["kind"] for item in helm.template(values)}

    optional = {"PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor", "PrometheusRule", "ConfigMap"}
    assert kinds({}) & optional == {"PodDisruptionBudget", "NetworkPolicy"}
    assert kinds(EVERYTHING) >= optional
    assert kinds(LEAST) == {"Deployment", "Service", "Pod"}
    # With one replica, a disruption budget would keep its node from being drained.
    assert "PodDisruptionBudget" not in kinds({"replicas": 1})
    # The chart has no objects that the operator writes or that users write, and no secrets.
    assert not kinds(EVERYTHING) & {"ServingCluster", "Lease", "Secret"}


def test_fields_of_pods_and_labels_of_monitors_are_as_the_values_say(helm: Helm) -> None:
    objects = helm.template(EVERYTHING)
    pod = one(objects, "Deployment")["spec"]["template"]
    assert EVERYTHING["podLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["annotations"] == EVERYTHING["podAnnotations"]
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod["spec"][name] == EVERYTHING[name]
    assert pod["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == f"registry.example/sluice-operator@sha256:{'0' * 64}"
    assert all(item in container["env"] for item in EVERYTHING["extraEnv"])
    assert one(objects, "ServiceAccount")["metadata"]["annotations"] == {"example.org/role": "a"}
    monitor = one(objects, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "monitors"
    assert [part["interval"] for part in monitor["spec"]["endpoints"]] == ["7s"]
    assert one(objects, "PrometheusRule")["metadata"]["labels"]["release"] == "rules"


@pytest.mark.parametrize("cidrs", [[], ["10.0.0.1/32", "fd00::/64"]])
def test_the_operator_reaches_names_routers_and_the_api_server_alone(helm: Helm, cidrs: list[str]) -> None:
    egress = {"enabled": True, "apiServerCIDRs": cidrs, "apiServerPorts": [8443]}
    policy = one(helm.template({"networkPolicy": {"egress": egress}}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    dns, routers, api_server = policy["egress"]
    assert dns == {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    assert "podSelector" in routers["to"][0]
    assert api_server.pop("ports") == [{"protocol": "TCP", "port": 8443}]
    assert api_server == ({"to": [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]} if cidrs else {})
    # Without it, everything goes out as before.
    assert one(helm.template({}), "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]


def test_the_operator_mounts_a_certificate_with_its_peer_name(helm: Helm) -> None:
    def mounted(objects: list[Object]) -> dict[str, str]:
        pod = one(objects, "Deployment")["spec"]["template"]["spec"]
        volumes = {item["name"]: item["secret"]["secretName"] for item in pod["volumes"] if "secret" in item}
        mounts = pod["containers"][0]["volumeMounts"]
        return {item["mountPath"]: volumes[item["name"]] for item in mounts if item["name"] in volumes}

    issued = helm.template({"tls": EVERYTHING["tls"]})
    certificate = one(issued, "Certificate")["spec"]
    assert certificate["dnsNames"] == [names.name_operator_peer(SYSTEM)]
    assert mounted(issued) == {"/etc/sluice/peer-tls": certificate["secretName"]}
    given = helm.template({"tls": {"mode": "SecretRef", "secretName": "mine"}})
    assert mounted(given) == {"/etc/sluice/peer-tls": "mine"}
    assert not pick(given, "Certificate")
    assert mounted(helm.template({})) == {}


def test_alerts_name_the_release(helm: Helm) -> None:
    text = json.dumps(one(helm.template(EVERYTHING, release="mine", namespace="ops"), "PrometheusRule")["spec"])
    assert 'namespace=\\"ops\\", service=\\"mine-operator-metrics\\"' in text
    assert "(sluice_attainment_ratio) * 100 < 95" in text
    assert "OPERATOR_" not in text
    assert "ATTAINMENT_" not in text
    assert "https://example.org/runbook.md#sluiceattainmentlow" in text
    assert "RUNBOOK" not in text
    assert "{{ $labels.slo_class }}" in text


def test_alerts_have_no_link_where_nobody_says_what_it_leads_to(helm: Helm) -> None:
    rules = one(helm.template({"prometheusRule": {"enabled": True}}), "PrometheusRule")["spec"]
    annotations = [rule["annotations"] for group in rules["groups"] for rule in group["rules"]]
    assert {frozenset(found) for found in annotations} == {frozenset({"summary", "description"})}


def test_the_dashboard_is_rendered_unchanged(helm: Helm) -> None:
    found = one(helm.template(EVERYTHING), "ConfigMap")
    assert json.loads(found["data"]["sluice.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())
    assert found["metadata"]["labels"]["grafana_dashboard"] == "2"


def test_object_names_fit_for_the_longest_release_name(helm: Helm) -> None:
    objects = helm.template(EVERYTHING, release="a" * 53)
    assert all(len(item["metadata"]["name"]) <= 63 for item in objects if item["kind"] in ("Service", "Deployment"))


def test_two_releases_share_no_object(helm: Helm) -> None:
    def identify(namespace: str) -> set[tuple[str, str, str]]:
        objects = helm.template({"crds": {"install": False}}, namespace=namespace)
        return {(item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in objects}

    assert not identify("one") & identify("two")


def test_notes_say_what_uninstall_leaves(helm: Helm) -> None:
    def read(*arguments: str) -> str:
        done = helm.run("install", RELEASE, str(CHART), "-n", SYSTEM, "--dry-run=client", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    assert "keeps the CRD of ServingCluster" in read()
    assert "EVERY ServingCluster" in read("--set", "crds.keep=false")
    assert "kubectl apply --server-side -f crds/servingclusters.yaml" in read("--set", "crds.install=false")
    assert f"the namespace {SYSTEM}." in read()
    assert "the namespaces a, b." in read("--set", "watchNamespaces={a,b}")
    assert "all namespaces." in read("--set", "watchAllNamespaces=true")


def test_the_test_pod_runs_valid_python(rendered: list[Object]) -> None:
    (container,) = one(rendered, "Pod")["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    compile(container["args"][0], "helm test", "exec")
    service = one(rendered, "Service")
    assert f'"http://{service["metadata"]["name"]}:9090"' in container["args"][0]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_api_server_accepts_every_object_under_restricted(
    helm: Helm, client: Client, crd: Path, namespace: str, values: Object
) -> None:
    if values is NARROW:
        values = {"watchNamespaces": [namespace, "default"]}
    objects = [item for item in helm.template(values, namespace=namespace) if item["kind"] not in FOREIGN]
    for item in objects:
        # A dry run of a Deployment only warns about `restricted`. So its template is sent as a pod, which is refused.
        dry_run(client, item)
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]
            # Admission needs the service account to exist, and a dry run creates none.
            pod["spec"]["serviceAccountName"] = "default"
            dry_run(
                client,
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    **pod,
                    "metadata": {**pod["metadata"], "name": "template", "namespace": namespace},
                },
            )


def dry_run(client: Client, item: Object) -> None:
    client.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
        stdin=json.dumps(item),
    )
