"""The pages: links lead somewhere, and the runbook explains every condition, reason and alert."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice_operator.api.condition_types import REASONS, ConditionType, Reason
from sluice_operator.api.fields_and_defaults.model_spec import HuggingFaceSource, ModelSource
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.runbook_links import link_runbook, refer_to_runbook
from sluice_operator.resources.deployments.engine_deployment import render_engines
from sluice_router.api.error_statuses import ERROR_STATUSES
from sluice_router.errors import OwnerLimitError

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
RUNBOOK = (ROOT / "docs" / "guides" / "runbook.md").read_text()
# What its error's code says instead of the class's own.
OWNER_LIMITS = {"requests_per_minute", "tokens_per_minute", "concurrent_requests"}
ALERTS = yaml.safe_load((ROOT / "helm" / "sluice" / "files" / "alerts.yaml").read_text())


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$|^    .*?$", "", text, flags=re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", without_blocks(text))


def list_anchors(page: Path) -> set[str]:
    """Lists the anchors of a page's headings: lower case, spaces as hyphens, no other signs."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def read_sections(text: str, level: str) -> dict[str, str]:
    """Reads the text below each heading of a level, up to the next heading of that or a higher level."""
    parts = re.split(rf"^(#{{1,{len(level)}}}) (.+)$", text, flags=re.MULTILINE)[1:]
    return {
        title: body for mark, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True) if mark == level
    }


def read_rows(text: str) -> dict[str, tuple[str, ...]]:
    """Reads the rows of a table by their first cell, which is code."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    assert len({name for name, *_ in rows}) == len(rows)
    return {name.strip("`"): tuple(rest) for name, *rest in rows}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = without_code(page.read_text())
    for target in (*re.findall(r"\]\(([^)]+)\)", text), *re.findall(r'src="([^"]+)"', text)):
        if "://" in target:
            continue  # tests make no network requests
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in list_anchors(file), target


@pytest.mark.parametrize("condition", REASONS)
def test_the_runbook_explains_every_reason_of_a_condition(condition: ConditionType) -> None:
    rows = read_rows(read_sections(RUNBOOK, "##")[condition])
    assert set(rows) == set(REASONS[condition])
    for meaning, action in rows.values():
        assert meaning.endswith(".")
        assert action.endswith(".")


def test_the_runbook_explains_every_alert_and_no_other() -> None:
    alerts = {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]}
    sections = read_sections(RUNBOOK.partition("## Alerts")[2], "###")
    assert set(sections) == alerts
    assert all(text.strip() for text in sections.values())
    # The rules' links lead to these headings.
    assert {alert.lower() for alert in alerts} <= list_anchors(ROOT / "docs" / "guides" / "runbook.md")


def test_the_runbook_has_a_section_for_each_reason_that_messages_refer_to() -> None:
    sources = [path.read_text() for path in (ROOT / "operator" / "sluice_operator").rglob("*.py")]
    reasons = {Reason[name] for text in sources for name in re.findall(r"refer_to_runbook\(Reason\.(\w+)\)", text)}
    sections = read_sections(RUNBOOK, "###")
    assert reasons
    assert all(sections[reason].strip() for reason in reasons)
    # The links lead to these headings.
    anchors = list_anchors(ROOT / "docs" / "guides" / "runbook.md")
    assert {link_runbook(refer_to_runbook(reason), "URL") for reason in reasons} <= {
        f"see URL#{anchor}" for anchor in anchors
    }


def test_the_runbook_explains_every_429_and_names_metrics_that_there_are() -> None:
    section = read_sections(RUNBOOK, "##")["Clients get 429"]
    codes = {
        code
        for line in section.splitlines()
        if line.startswith("| `")
        for code in re.findall("`(.+?)`", line.split("|")[1])
    }
    refusals = {error.default_code for error, status in ERROR_STATUSES.items() if status.http_status == 429}
    assert codes == refusals - {OwnerLimitError.default_code} | OWNER_LIMITS
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert all(f"| `{name}`" in metrics for name in re.findall(r"`(sluice_\w+)`", section))


MANIFESTS = [
    pytest.param(yaml.safe_load(block), id=f"{page.name} {number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^ *```yaml\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL))
    if "kind: ServingCluster" in block
]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_manifests_that_are_shown_are_accepted_and_rendered(manifest: dict[str, Any]) -> None:
    cluster = check_manifest(manifest)
    pod = render_engines(cluster, cluster.spec.replicas, "engine:1")["spec"]["template"]["spec"]
    names = [container["name"] for container in pod["initContainers"]]
    assert ("rdma-preflight" in names) == (cluster.spec.network.mode == "RDMA")


def test_manifests_are_shown() -> None:
    assert len(MANIFESTS) >= 2


# What guides show of a spec, beside what every manifest needs.
PARTS_OF_SPECS = [
    pytest.param(yaml.safe_load(block)["spec"], id=f"{page.name} {number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```yaml\n(spec:\n.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    )
]
LEAST = {
    "replicas": 4,
    "slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50},
    "model": {"name": "m", "source": {"huggingFace": {}}},
}


@pytest.mark.parametrize("part", PARTS_OF_SPECS)
def test_parts_of_a_spec_that_are_shown_are_accepted(part: dict[str, Any]) -> None:
    manifest = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", "metadata": {"name": "shown"}}
    assert check_manifest({**manifest, "spec": LEAST | part}).spec.replicas >= 1


def test_the_guide_to_models_shows_every_source() -> None:
    shown = [part.values[0]["model"]["source"] for part in PARTS_OF_SPECS if str(part.id).startswith("models.md")]
    assert {name for source in shown for name in source} == {
        str(field.alias) for field in ModelSource.model_fields.values()
    }
    assert {name for source in shown for name in source.get("huggingFace", ())} == {
        str(field.alias) for field in HuggingFaceSource.model_fields.values()
    }


CHANGES = re.findall(
    r"^\| (.+?) \| `([^`]+)` \| (.+) \|$",
    (ROOT / "CONTRIBUTING.md").read_text().partition("## To change X, open Y")[2].partition("\n## ")[0],
    re.MULTILINE,
)


@pytest.mark.parametrize(("change", "opened", "other"), CHANGES, ids=[change for change, *_ in CHANGES])
def test_what_contributing_says_to_open_exists(change: str, opened: str, other: str) -> None:
    paths = [opened, *(name for name in re.findall(r"`([^`]+)`", other) if "/" in name or name.endswith(".toml"))]
    assert [path for path in paths if not (ROOT / path).exists()] == [], change


def test_contributing_names_25_changes() -> None:
    assert len(CHANGES) >= 25


def read_sentences(text: str) -> list[str]:
    """Reads the sentences of prose, list items and table cells; code counts as one word."""
    text = re.sub(r"<!--.*?-->|^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?m)^(?:    .*|#.*|[|: -]+)$", "", text)
    text = re.sub(r"(?m)^(?: *(?:[-*>]|\d+\.) |\|)|(?<!\\)\||^$", "\n\n", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    return [
        sentence
        for paragraph in re.split(r"\n\s*\n", text)
        for sentence in re.split(r"(?<=[.!?])[*_)\"]*\s+", " ".join(paragraph.split()))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_have_30_words_at_most(page: Path) -> None:
    long = [sentence for sentence in read_sentences(page.read_text()) if len(re.findall(r"[\w'%-]+", sentence)) > 30]
    assert long == []


def test_pages_name_nothing_outside_the_repository() -> None:
    """A relative path that climbs leads to something of the repository; commands may climb from where they run."""
    outside = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in re.findall(r"(?<![\w.])\.\./[\w./-]*", without_blocks(page.read_text()))
        if not leads_into_the_repository(page.parent / path)
    ]
    assert outside == []


def leads_into_the_repository(path: Path) -> bool:
    return path.resolve().is_relative_to(ROOT) and path.exists()


PARTS = (
    "benchmarks",
    "cli",
    "core",
    "crds",
    "docs",
    "e2e",
    "engine_image",
    "examples",
    "helm",
    "operator",
    "protos",
    "router",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    names = re.findall(r"`([\w./-]+)`", page.read_text())
    paths = [ROOT / name for name in names if name.partition("/")[0] in PARTS and "/" in name]
    # A constant is named with its module.
    modules = [re.sub(r"\.[A-Z_]+$", "", name) for name in names if re.fullmatch(r"sluice_\w+(\.\w+)+", name)]
    files = [next(ROOT.glob(f"*/{name.replace('.', '/')}*"), None) for name in modules]
    assert [path for path in paths if not path.exists()] == []
    assert [name for name, file in zip(modules, files, strict=True) if file is None] == []
