"""The chart's rules, alerts and dashboard queries, checked by Prometheus' own promtool."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from testbed.helm import CHART
from testbed.prometheus import run_promtool
from testbed.settings import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.helm import Helm

TESTS = ROOT / "e2e" / "kube" / "alerts_test.yaml"
VALUES = {"prometheusRule": {"enabled": True, "runbookUrl": "https://example.org/runbook"}}
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
# Values that Grafana would fill in for its variables.
VARIABLES = {"$namespace": "team", "${cluster}": "qwen", "$__rate_interval": "2m"}


@pytest.fixture(scope="module")
def rules(helm: Helm) -> dict[str, Any]:
    """The rules, as the Prometheus operator would pass them on."""
    objects = helm.template(VALUES, namespace="ops")
    (found,) = [item for item in objects if item["kind"] == "PrometheusRule"]
    spec: dict[str, Any] = found["spec"]
    return spec


def check(folder: Path, groups: Any) -> str:
    """Checks rules; every warning is an error."""
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(groups))
    done = run_promtool("check", "rules", "--lint=all", "--lint-fatal", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_queries() -> list[str]:
    """Lists every query of the dashboard, those that fill its variables too."""
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    for variable in DASHBOARD["templating"]["list"]:
        queries += re.findall(r"^label_values\((.*), \w+\)$", variable["query"])
    return queries


def test_prometheus_accepts_the_rules(rules: dict[str, Any], tmp_path: Path) -> None:
    num_rules = sum(len(group["rules"]) for group in rules["groups"])
    assert f"SUCCESS: {num_rules} rules found" in check(tmp_path, rules)


def test_alerts_fire_when_they_should_and_only_then(rules: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    file = tmp_path / "tests.yaml"
    file.write_text(TESTS.read_text())
    done = run_promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_each_alert_has_a_firing_and_a_silent_case(rules: dict[str, Any]) -> None:
    seen = {
        (alert["alertname"], bool(alert["exp_alerts"]))
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for alert in test["alert_rule_test"]
    }
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert seen == {(alert, does_fire) for alert in alerts for does_fire in (True, False)}


def test_a_wrong_rule_is_refused(rules: dict[str, Any], tmp_path: Path) -> None:
    """promtool notices a query that does not parse, and an alert whose threshold has changed."""
    broken = json.loads(json.dumps(rules).replace("min by (", "min by ", 1))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(broken))
    assert run_promtool("check", "rules", str(tmp_path / "rules.yaml")).returncode != 0
    (tmp_path / "alerts.yaml").write_text(json.dumps(rules).replace("* 100 < 90", "* 100 < 50"))
    (tmp_path / "tests.yaml").write_text(TESTS.read_text())
    assert run_promtool("test", "rules", str(tmp_path / "tests.yaml")).returncode != 0


def test_prometheus_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = list_queries()
    assert len(queries) > 30
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    assert not [query for query in queries if "$" in query]
    # Each query becomes a rule, because promtool checks only rules.
    records = [{"record": f"dashboard:query_{number}", "expr": query} for number, query in enumerate(queries)]
    assert f"{len(records)} rules found" in check(tmp_path, {"groups": [{"name": "dashboard", "rules": records}]})
