"""The chart's files, without helm: values and their schema, rights, definition, dashboard, alerts.

What helm renders from them is tested on a real API server, in ``e2e/kube/test_chart.py``.
"""

from __future__ import annotations

import copy
import json
import random
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

from sluice_engine.server.prometheus_metrics import EngineCollector
from sluice_operator.api.condition_types import REASONS, ConditionType, Reason
from sluice_operator.api.ports import MAX_WORKERS
from sluice_operator.api.router_workers import control_port
from sluice_operator.autotune import search_process
from sluice_operator.kubernetes.quantities import read_quantity
from sluice_operator.kubernetes.rbac import LEASE_RULES, NODE_RULES, RULES
from sluice_operator.metrics import CONDITION_LABELS, OperatorMetrics
from sluice_operator.settings import OperatorSettings
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.scheduling.state import RouterState
from sluice_router.scheduling.status.gauges import RouterCollector
from sluice_router.settings import make_limits

if TYPE_CHECKING:
    from prometheus_client.core import Metric

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "sluice"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
# Labels that a scrape adds, and the one of histograms' buckets.
SCRAPED = {"namespace", "service", "pod", "le"}

EXPRESSIONS = [
    *(
        pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ),
    *(pytest.param(rule["expr"], id=rule["alert"]) for group in ALERTS["groups"] for rule in group["rules"]),
]


class IdleServer:
    """An engine's server that has done nothing: load and counters are zero, whatever they are called."""

    finished: dict[int, int] = {}  # noqa: RUF012 - never changed

    @property
    def load(self) -> IdleServer:
        return self

    @property
    def counters(self) -> IdleServer:
        return self

    def __getattr__(self, name: str) -> int:
        return 0


def name_samples(family: Metric) -> list[str]:
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
    return [family.name + suffix for suffix in suffixes.get(family.type, [""])]


def find_metrics() -> dict[str, set[str]]:
    """Labels by name of every sample that router, engine and operator export, from their own collectors."""
    state = RouterState(router_id="r", limits=make_limits(), rng=random.Random(1))
    families = [
        *RouterCollector(state, lambda: 0.0).collect(),
        *EdgeMetrics(SlowReaders(SlowReaderLimits())).collect(),
        *EngineCollector(IdleServer()).collect(),
    ]
    found = {name: set(getattr(family, "_labelnames", ())) for family in families for name in name_samples(family)}
    for metric in list_metrics(OperatorMetrics()):
        for family in metric.collect():
            found |= {name: set(metric._labelnames) for name in name_samples(family)}
    return found


def list_metrics(metrics: OperatorMetrics) -> list[Any]:
    return [
        getattr(metrics, name) for name in OperatorMetrics.__slots__ if name != "registry" and not name.startswith("_")
    ]


METRICS = find_metrics()


def set_value(path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(VALUES)
    *parents, last = path.split(".")
    part = values
    for name in parents:
        part = part[name]
    part[last] = value
    return values


def test_values_are_what_their_schema_says() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA, jsonschema.Draft7Validator)


def test_every_value_has_a_schema_and_a_default() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        properties = schema.get("properties")
        if properties is None:
            return
        assert set(values) == set(properties) - {"global"}, path
        for name, value in values.items():
            if isinstance(value, dict):
                compare(value, properties[name], f"{path}.{name}")

    compare(VALUES, SCHEMA, "values")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replicas", 0),
        ("replicas", "two"),
        ("replica", 2),
        ("registry", "ghcr.io/team/"),
        ("clusterMonitors.labels", {"release": "a,b"}),
        ("clusterMonitors.labels", {"a b": "c"}),
        ("image.repository", "sluice-operator:1"),
        ("image.repository", "sluice-operator@sha256:" + "0" * 64),
        ("image.tag", "a b"),
        ("image.digest", "sha256:1"),
        ("image.pullPolicy", "Sometimes"),
        ("image.pullSecrets", ["Not A Name"]),
        ("engineImage", "a b"),
        ("gpuResourceName", "a gpu"),
        ("watchNamespaces", "default"),
        ("watchNamespaces", ["a", "a"]),
        ("watchNamespaces", ["kube*"]),
        ("allowHostAccess", "yes"),
        ("tls.mode", "Enabled"),
        ("tls", {"mode": "SecretRef"}),
        ("tls", {"mode": "SecretRef", "secretName": ""}),
        ("tls", {"mode": "CertManager", "issuerRef": {"kind": "Issuer", "name": ""}}),
        ("tls", {"mode": "CertManager", "issuerRef": {"kind": "Issuer"}}),
        ("tls", {"mode": "CertManager"}),
        ("tls.issuerRef.kind", "AWSPCAIssuer"),
        ("workers", 257),
        ("resyncSeconds", 0),
        ("maxConcurrentUpgrades", -1),
        ("requestTimeoutSeconds", 6),
        ("logLevel", "info"),
        ("crds.install", "no"),
        ("crds.remove", True),
        ("rbac.create", None),
        ("serviceAccount", {"create": False, "name": ""}),
        ("serviceAccount", {"create": False}),
        ("serviceAccount.annotations", {"a": 1}),
        ("resources.limits", {"memory": "much"}),
        ("resources.request", {}),
        ("resources.limits", {"memory": "-1Gi"}),
        ("tolerations", {}),
        ("tolerations", [{"operator": "Exist"}]),
        ("tolerations", [{"effect": "NoSchedul"}]),
        ("affinity", {"nodeAfinity": {}}),
        ("priorityClassName", "High Priority"),
        ("podAnnotations", ["a"]),
        ("podLabels", {"app.kubernetes.io/name": "mine"}),
        ("extraEnv", [{"name": "SLUICE_OPERATOR_NAMESPACE", "value": "kube-system"}]),
        ("extraEnv", {"HTTPS_PROXY": "http://proxy"}),
        ("watchAllNamespaces", "yes"),
        ("watchNodes", "yes"),
        ("networkPolicy.egress.apiServerPorts", []),
        ("networkPolicy.egress.apiServerCIDRs", ["10.0.0.1"]),
        ("nodeSelector", {"gpu": True}),
        ("networkPolicy", {}),
        ("podDisruptionBudget.minAvailable", 1),
        ("serviceMonitor.intervalSeconds", "30s"),
        ("prometheusRule.attainmentPercent", 0.9),
        ("prometheusRule.runbookUrl", "docs/guides/runbook.md"),
        ("prometheusRule.runbookUrl", "https://example.org/runbook#top"),
        ("dashboard.enabled", 1),
    ],
)
def test_nonsense_is_refused(path: str, value: Any) -> None:
    assert not jsonschema.Draft7Validator(SCHEMA).is_valid(set_value(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("watchNamespaces", ["default", "team-a"]),
        ("gpuResourceName", ""),
        ("podLabels", {"team": "serving"}),
        ("extraEnv", [{"name": "HTTPS_PROXY", "value": "http://proxy"}]),
        ("networkPolicy.egress.apiServerCIDRs", ["10.0.0.1/32", "fd00::/64"]),
        ("image.digest", "sha256:" + "0" * 64),
        ("registry", "registry.example:5000/team"),
        ("clusterMonitors", {"enabled": False, "labels": {"example.org/release": "prometheus"}}),
        ("prometheusRule.runbookUrl", "https://example.org/runbook"),
        ("image.repository", "registry.example:5000/team/sluice-operator"),
        ("engineImage", "registry.example/sluice-engine@sha256:" + "0" * 64),
        ("serviceAccount", {"create": False, "name": "mine", "annotations": {}}),
        ("resources.limits", {"cpu": 2, "memory": "1.5Gi"}),
        ("tolerations", [{"operator": "Exists"}]),
        ("tls", {"mode": "SecretRef", "secretName": "mine"}),
        ("tls", {"mode": "CertManager", "issuerRef": {"kind": "ClusterIssuer", "name": "ca"}}),
        ("global", {"anything": 1}),
    ],
)
def test_sense_is_accepted(path: str, value: Any) -> None:
    jsonschema.validate(set_value(path, value), SCHEMA, jsonschema.Draft7Validator)


def test_bounds_are_those_of_the_operator() -> None:
    def bounds(name: str) -> set[Any]:
        return {
            getattr(part, side)
            for part in OperatorSettings.model_fields[name].metadata
            for side in ("ge", "le")
            if hasattr(part, side)
        }

    workers, timeout = SCHEMA["properties"]["workers"], SCHEMA["properties"]["requestTimeoutSeconds"]
    assert bounds("workers") == {workers["minimum"], workers["maximum"]}
    upgrades = SCHEMA["properties"]["maxConcurrentUpgrades"]
    assert bounds("max_concurrent_upgrades") == {upgrades["minimum"], upgrades["maximum"]}
    assert bounds("request_timeout_s") == {timeout["maximum"]}
    defaults = OperatorSettings()
    assert defaults.max_concurrent_upgrades == VALUES["maxConcurrentUpgrades"]
    assert (defaults.workers, defaults.resync_s) == (VALUES["workers"], VALUES["resyncSeconds"])
    assert (defaults.request_timeout_s, defaults.log_level) == (VALUES["requestTimeoutSeconds"], VALUES["logLevel"])


def test_the_operator_may_reach_the_control_port_of_each_worker_that_a_router_can_have() -> None:
    text = (CHART / "templates" / "operator_network_policy.yaml").read_text()
    ((first, end),) = re.findall(r"range untilStep (\d+) (\d+) 1 ", text)
    assert [*range(int(first), int(end))] == [control_port(worker) for worker in range(MAX_WORKERS)]


def test_the_operator_and_its_searches_fit_into_the_memory_limit_of_the_chart(tmp_path: Path) -> None:
    limit_bytes = int(read_quantity(VALUES["resources"]["limits"]["memory"]))
    file = tmp_path / "memory.max"
    file.write_text(str(limit_bytes))
    searches_bytes = search_process.MAX_SEARCHES * search_process.find_memory_limit(file)
    assert search_process.OPERATOR_MEMORY_BYTES + searches_bytes <= limit_bytes
    # A search that has less than nine tenths of what it may take would fail here and work elsewhere.
    assert search_process.find_memory_limit(file) >= 0.9 * search_process.MAX_MEMORY_BYTES
    measured = re.findall(r"\| [\d.]+, (\d+) MiB \|", (ROOT / "docs" / "measurements" / "operator.md").read_text())
    assert max(map(int, measured)) << 20 < search_process.OPERATOR_MEMORY_BYTES


def test_versions_and_default_images_are_the_product_s() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert OperatorSettings().engine_image == f"sluice-engine:{version}"
    assert OperatorSettings().router_image == f"sluice-router:{version}"


def test_the_definition_is_the_one_of_crds() -> None:
    assert (CHART / "files" / "servingclusters.yaml").resolve() == (ROOT / "crds" / "servingclusters.yaml").resolve()


def flatten_code(rules: dict[Any, tuple[str, ...]]) -> set[tuple[str, str, str]]:
    return {
        (kind.group, f"{kind.plural}/{part}" if part else kind.plural, verb)
        for (kind, part), verbs in rules.items()
        for verb in verbs
    }


def flatten_file(rules: list[dict[str, list[str]]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_rights_are_those_of_the_code_and_no_others() -> None:
    access = yaml.safe_load((CHART / "files" / "rbac_rules.yaml").read_text())
    assert set(access) == {"clusters", "lease", "nodes"}
    assert flatten_file(access["clusters"]) == flatten_code(RULES)
    assert flatten_file(access["lease"]) == flatten_code(LEASE_RULES)
    assert flatten_file(access["nodes"]) == flatten_code(NODE_RULES)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_use_metrics_and_labels_that_exist(expression: str) -> None:
    names = set(re.findall(r"\bsluice_\w+|\bvllm:\w+", expression))
    assert names
    assert names <= set(METRICS)
    labels = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', expression))
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        labels |= {label.strip() for label in group.split(",")}
    assert labels <= SCRAPED | set().union(*(METRICS[name] for name in names))
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def test_counters_and_histograms_are_read_as_rates() -> None:
    for parameter in EXPRESSIONS:
        (expression,) = parameter.values
        for name in re.findall(r"\bsluice_\w+(?:_total|_bucket)\b", str(expression)):
            # A gauge of the engine, whatever its name.
            if name != "sluice_engine_kv_blocks_total":
                assert re.search(rf"(?:rate|increase)\({name}\{{?", str(expression)), expression


def find_losses(given: Any, kept: Any, path: str = "") -> list[str]:
    """What is in one value and not, or otherwise, in the other."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            loss
            for name, value in given.items()
            for loss in (find_losses(value, kept[name], f"{path}.{name}") if name in kept else [f"{path}.{name}"])
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            loss
            for at, pair in enumerate(zip(given, kept, strict=True))
            for loss in find_losses(*pair, f"{path}[{at}]")
        ]
    return [] if given == kept else [path]


def read_as_grafana(dashboard: Any) -> Any:
    """A dashboard, through Grafana's own model of dashboards, panels and queries, and back."""
    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(GrafanaDashboard.from_json(dashboard)))


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    assert find_losses(DASHBOARD, read_as_grafana(DASHBOARD)) == []


def test_a_field_that_grafana_does_not_know_is_seen() -> None:
    wrong = copy.deepcopy(DASHBOARD)
    wrong["titel"] = "Sluice"
    wrong["panels"][1]["gridPos"]["width"] = 12
    wrong["panels"][1]["targets"][0]["expression"] = "up"
    expected = [".panels[1].gridPos.width", ".panels[1].targets[0].expression", ".titel"]
    assert sorted(find_losses(wrong, read_as_grafana(wrong))) == expected


def test_panels_are_complete_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["type"] == "row" or (panel["description"] and panel["fieldConfig"]["defaults"]["unit"])


def test_variables_of_the_dashboard_are_defined() -> None:
    text = json.dumps(DASHBOARD["panels"])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == {variable["name"] for variable in DASHBOARD["templating"]["list"]}


@pytest.mark.parametrize("condition", ConditionType)
def test_each_condition_has_an_alert_on_its_metric(condition: ConditionType) -> None:
    """By the metric's own labels, with a status and reasons that the condition can have."""
    expressions = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    own = [expression for expression in expressions if f'condition="{condition}"' in expression]
    assert own
    alerted = set()
    for expression in own:
        selector = dict(re.findall(r'(\w+)="([^"]*)"', expression))
        assert expression.count("sluice_operator_cluster_condition{") == 1
        assert set(selector) - SCRAPED <= set(CONDITION_LABELS)
        bad = "True" if condition is ConditionType.DEGRADED else "False"
        assert selector["status"] == bad
        alerted |= {selector["reason"]} if "reason" in selector else set(REASONS[condition])
    assert alerted <= set(REASONS[condition])
    # Whichever search it is: without its answers a cluster stays as it is.
    assert Reason.SEARCH_FAILED not in REASONS[condition] or Reason.SEARCH_FAILED in alerted


def test_alerts_say_how_bad_it_is_and_what_it_means() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["description"].endswith(".")
        # Headings of docs/guides/runbook.md, which docs/tests holds to the alerts.
        assert rule["annotations"]["runbook_url"] == f"RUNBOOK#{rule['alert'].lower()}"
