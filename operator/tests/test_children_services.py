"""Services, network policies and monitors, and names that Kubernetes takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from children_harness import SETTINGS, check, render
from fake_kubernetes import make_cluster

from sluice_operator.api.labels import CLUSTER_LABEL, COMPONENT_LABEL, select_component
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.names import ENGINE, ROUTER
from sluice_operator.resources.children import RenderInputs, render_children
from sluice_operator.settings import OperatorSettings

SECURITY = Path(__file__).parents[2] / "docs" / "guides" / "security.md"


def test_engines_let_in_their_routers_and_one_another_only() -> None:
    policy = render(network={"mode": "TCP", "tcpPortRange": "7000-7099"})["NetworkPolicy", "tiny-engine"]["spec"]
    routers, engines, metrics = policy["ingress"]
    assert policy["policyTypes"] == ["Ingress"]
    assert routers["from"][0]["podSelector"]["matchLabels"][COMPONENT_LABEL] == "router"
    assert [item["port"] for item in routers["ports"]] == [8010]
    assert engines["from"][0]["podSelector"]["matchLabels"][COMPONENT_LABEL] == "engine"
    assert [(item["port"], item.get("endPort")) for item in engines["ports"]] == [(5600, None), (7000, 7099)]
    assert [item["port"] for item in metrics["ports"]] == [9090]
    for rule in (routers, engines):
        assert all("namespaceSelector" not in source for source in rule["from"])


def test_control_ports_are_open_to_the_operator_only() -> None:
    policy = render()["NetworkPolicy", "tiny-router"]["spec"]
    rule = next(item for item in policy["ingress"] if item["ports"][0]["port"] == 8002)
    assert rule["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "sluice-system"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "sluice-operator"}},
        }
    ]


def test_the_egress_policy_of_the_security_guide_selects_all_pods_of_a_cluster_and_nothing_else() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", SECURITY.read_text(), re.MULTILINE | re.DOTALL)
    spec = yaml.safe_load(block)["spec"]
    selector = spec["podSelector"]["matchLabels"]
    assert [rule["to"] for rule in spec["egress"] if "to" in rule] == [[{"podSelector": {"matchLabels": selector}}]]
    assert selector == {CLUSTER_LABEL: "qwen"}
    for component in (ENGINE, ROUTER):
        assert selector.items() <= select_component("qwen", component).items()


def test_monitors_find_a_port_that_services_have() -> None:
    children = render(has_monitors=True)
    for component in ("engine", "router"):
        monitor = children["ServiceMonitor", f"tiny-{component}"]["spec"]
        wanted = monitor["selector"]["matchLabels"].items()
        ports = [
            port["name"]
            for (kind, _), child in children.items()
            if kind == "Service" and wanted <= child["metadata"]["labels"].items()
            for port in child["spec"]["ports"]
        ]
        assert ports.count(monitor["endpoints"][0]["port"]) == 1


def test_monitors_carry_the_labels_of_the_installation_or_are_not_made() -> None:
    inputs = RenderInputs(engine_replicas=1, has_monitors=True, live={})

    def render_monitors(**settings: Any) -> list[Any]:
        children = render_children(check(), inputs, OperatorSettings(identity="a", **settings))
        return [child["metadata"]["labels"] for child in children if child["kind"] == "ServiceMonitor"]

    labels = render_monitors(monitor_labels="release=prometheus,a.b/c=,sluice.dev/cluster=other")
    for found in labels:
        assert found.items() >= {"release": "prometheus", "a.b/c": "", "sluice.dev/cluster": "tiny"}.items()
    assert len(labels) == 2
    assert render_monitors(cluster_monitors=False) == []


@pytest.mark.parametrize("name", ["a" * 45, "tiny"])
def test_every_name_is_one_that_kubernetes_takes(name) -> None:
    content = make_cluster(name)
    content["metadata"]["uid"] = "u"
    inputs = RenderInputs(engine_replicas=1, has_monitors=True, live={})
    for child in render_children(check_manifest(content), inputs, SETTINGS):
        assert len(child["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())
