"""The CRD and the Python model say the same, field by field, rule by rule, in both directions."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from crd_schema import CRD, read_crd, read_schema, schema_of_the_model, without_rules
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from verdicts import Case, make_manifest, merge, read_table, validate

from sluice_core.strategies import DEFAULT_STRATEGY, PARAMETERS, STRATEGIES
from sluice_core.strategy_parameters import StrategyParameters, format_parameters
from sluice_operator.api import cross_field_rules, pod_template_rules
from sluice_operator.api.condition_types import REASONS, ConditionType
from sluice_operator.api.manifest import ManifestError, check_manifest
from sluice_operator.api.ports import GRPC_PORT
from sluice_operator.api.router_workers import ROUTER_CONTAINERS
from sluice_operator.api.serving_cluster import ServingCluster
from sluice_operator.api.sliders import AUTO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from crd_schema import Schema

TABLE = read_table()


def test_strategies_and_their_parameters_are_those_of_the_cores_rows():
    spec = read_schema()["properties"]["spec"]["properties"]
    assert spec["strategy"]["enum"] == [*(strategy.title for strategy in STRATEGIES.values()), AUTO]
    assert spec["strategy"]["default"] == DEFAULT_STRATEGY.title
    rows = {to_camel(row.name): row for strategy in STRATEGIES.values() for row in strategy.parameters}
    assert set(spec["parameters"]["properties"]) == set(rows)
    defaults = format_parameters(PARAMETERS, StrategyParameters())
    for name, row in rows.items():
        field = spec["parameters"]["properties"][name]
        # YAML reads a bare Off as false, so manifests say Disabled.
        assert str(field["default"]) == {"Off": "Disabled"}.get(defaults[row.name], defaults[row.name]), name
        if row.choices:
            assert field["enum"] == [*(["Disabled"] if "Off" in row.choices else []), *row.choices]
        else:
            assert (field["minimum"], field["maximum"]) == (row.low, row.high), name


def walk(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Every node of a schema with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from walk(schema[name], f"{path}[]")


NODES = dict(walk(read_schema(), ""))
# Beside a node, what is said of nodes below it.
INNER = ("properties", "items", "additionalProperties")
RULES = [(path, rule) for path, node in NODES.items() for rule in node.get("x-kubernetes-validations", ())]


@pytest.fixture(scope="module")
def broken_rules() -> set[tuple[str, str]]:
    """Field and text of each rule of the CRD that a case breaks."""
    refusals = [refusal for case in TABLE for refusal in validate(case.manifest)]
    return {(re.sub(r"\[\d+\]", "[]", refusal.field), refusal.cause) for refusal in refusals}


def own(node: Schema) -> Schema:
    """What a node says of itself."""
    return {name: value for name, value in node.items() if name not in INNER}


def refused_by_the_model(manifest: dict[str, Any]) -> frozenset[str]:
    try:
        check_manifest(manifest)
    except ManifestError as error:
        return frozenset(problem.field for problem in error.problems)
    return frozenset()


def test_every_field_has_the_same_type_default_bounds_and_description_in_both() -> None:
    in_crd = dict(walk(without_rules(read_schema()["properties"]["spec"]), "spec"))
    in_model = dict(walk(schema_of_the_model()["properties"]["spec"], "spec"))
    assert sorted(in_crd) == sorted(in_model)
    for path, node in in_crd.items():
        assert own(node) == own(in_model[path]), path


def test_the_name_has_the_same_form_in_both() -> None:
    name = schema_of_the_model()["properties"]["metadata"]["properties"]["name"]
    del name["description"]
    assert read_schema()["properties"]["metadata"]["properties"] == {"name": name}


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_the_model_gives_the_verdict_of_the_table(case: Case) -> None:
    assert refused_by_the_model(case.manifest) == case.refused


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_the_crd_gives_the_verdict_of_the_table(case: Case) -> None:
    assert {refusal.field for refusal in validate(case.manifest)} == case.refused


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(TABLE), min_size=2, max_size=4))
def test_both_give_one_verdict_on_cases_put_together(cases: list[Case]) -> None:
    manifest = functools.reduce(merge, [case.manifest for case in cases])
    by_model, by_crd = refused_by_the_model(manifest), {refusal.field for refusal in validate(manifest)}
    assert bool(by_model) == bool(by_crd)
    # With several things wrong, each may stop at another point, but not before it has named one of them.
    assert bool(by_model & by_crd) == bool(by_model)


@pytest.mark.parametrize("argument", cross_field_rules.OWNED_ARGUMENTS)
@pytest.mark.parametrize("form", ["--{}", "-{}=1", "--no-{}", "--{}.x=1"])
def test_arguments_that_sluice_sets_are_refused_by_both(argument: str, form: str) -> None:
    for name in {argument, argument.replace("-", "_")}:
        manifest = make_manifest({"engine": {"extraArgs": [form.format(name)]}}, {})
        assert refused_by_the_model(manifest) == {"spec.engine.extraArgs[0]"}
        assert {refusal.field for refusal in validate(manifest)} == {"spec.engine.extraArgs[0]"}


@pytest.mark.parametrize("name", sorted(pod_template_rules.OWNED_ENVIRONMENT))
def test_variables_that_sluice_sets_are_refused_by_both(name: str) -> None:
    manifest = make_manifest({"engine": {"env": [{"name": name, "value": "1"}]}}, {})
    assert refused_by_the_model(manifest) == {"spec.engine.env[0].name"}
    assert {refusal.field for refusal in validate(manifest)} == {"spec.engine.env[0].name"}


def test_the_crd_names_no_argument_or_variable_that_the_model_lets_through() -> None:
    (argument_rule,) = (rule["rule"] for path, rule in RULES if path.endswith("extraArgs[]"))
    words = re.search(r"\(no\[-_\]\)\?\((.*?)\)\(", argument_rule)
    assert words
    assert {word.replace("[-_]", "-") for word in words[1].split("|")} == set(cross_field_rules.OWNED_ARGUMENTS)
    for component in ("engine", "router"):
        (rule,) = (
            rule["rule"] for path, rule in RULES if path.endswith(f".{component}") and "startsWith" in rule["rule"]
        )
        assert set(re.findall(r"'([A-Z_]+)'", rule)) - {"SLUICE_"} == pod_template_rules.OWNED_ENVIRONMENT
        fields = re.findall(r"has\(each\.(\w+)\)", rule)
        assert [*pod_template_rules.OWNED_CONTAINER_FIELDS, "env"] == fields
    (name_rule,) = {rule["rule"] for path, rule in RULES if path.endswith("env[]") and "startsWith" in rule["rule"]}
    assert set(re.findall(r"'([A-Z_]+)'", name_rule)) - {"SLUICE_"} == pod_template_rules.OWNED_ENVIRONMENT


def test_the_crd_names_the_fields_and_labels_of_pods_that_the_model_refuses() -> None:
    rules = defaultdict(list)
    for path, rule in RULES:
        if path.startswith(prefix := ".spec.engine.podTemplate."):
            rules[path.removeprefix(prefix)].append(rule)
    of_pods = {rule["fieldPath"] for rule in rules["spec"]}
    assert of_pods == {f".{name}" for name in pod_template_rules.OWNED_POD_FIELDS}
    *named, labels = rules["metadata"]
    assert {rule["fieldPath"] for rule in named} == {f".{name}" for name in pod_template_rules.OWNED_METADATA}
    assert set(re.findall(r"'([^']+)'", labels["rule"])) == set(pod_template_rules.OWNED_LABELS)
    (worker_rule,) = (rule["rule"] for path, rule in RULES if path.endswith(".router") and "matches" in rule["rule"])
    pattern = re.search(r"matches\('(.+)'\)", worker_rule)
    assert pattern
    names = [f"router-{number}" for number in range(20)] + ["router", "a-router-1"]
    assert {name for name in names if re.search(pattern[1], name)} == ROUTER_CONTAINERS - {"router"}


def test_the_crd_names_the_ports_of_the_pods() -> None:
    ports = {
        port for path, rule in RULES if path.endswith("network.kvPort") for port in re.findall(r"[0-9]+", rule["rule"])
    }
    assert {int(port) for port in ports} == set(cross_field_rules.ENGINE_PORTS)
    (range_rule,) = (rule for path, rule in RULES if path.endswith("network") and "tcpPortRange" in rule["rule"])
    listed = re.search(r"\[self\.kvPort, ([0-9, ]+)\]", range_rule["rule"])
    assert listed
    assert {int(port) for port in listed[1].split(", ")} == set(cross_field_rules.ENGINE_PORTS)
    assert {int(port) for port in re.findall(r"[0-9]+", range_rule["message"])} == set(cross_field_rules.ENGINE_PORTS)
    (service_rule,) = (rule["rule"] for path, rule in RULES if path.endswith("service.port"))
    assert service_rule == f"self != {GRPC_PORT}"


@pytest.mark.parametrize(("path", "rule"), RULES, ids=[f"{path}: {rule['message']}" for path, rule in RULES])
def test_each_rule_of_the_crd_is_broken_by_a_case(
    path: str, rule: dict[str, str], broken_rules: set[tuple[str, str]]
) -> None:
    assert (path.lstrip(".") + rule.get("fieldPath", ""), rule["rule"]) in broken_rules


def test_each_rule_of_the_model_is_broken_by_a_case() -> None:
    broken = set()
    for case in TABLE:
        try:
            ServingCluster.model_validate(case.manifest)
        except ValidationError as error:
            broken |= {details["type"] for details in error.errors()}
    assert {rule.__name__.lstrip("_") for rule in cross_field_rules.RULES} <= broken


@pytest.mark.parametrize(("path", "rule"), RULES, ids=[f"{path}: {rule['message']}" for path, rule in RULES])
def test_each_message_says_what_to_do(path: str, rule: dict[str, str]) -> None:
    assert re.search(r"; |must |needs ", rule["message"]), path


def test_strings_lists_and_maps_are_capped() -> None:
    def is_capped(node: Schema) -> bool:
        if node.get("type") == "array":
            return "maxItems" in node
        if node.get("type") == "string" or node.get("x-kubernetes-int-or-string"):
            return "maxLength" in node or "enum" in node or node.get("format") == "date-time"
        return "maxProperties" in node if "additionalProperties" in node else True

    assert [path for path, node in NODES.items() if not is_capped(node) and path not in (".apiVersion", ".kind")] == []


def test_every_field_of_the_crd_is_described() -> None:
    bare = [path for path, node in NODES.items() if not node.get("description") and not path.endswith("[]")]
    assert bare == [".metadata", ".metadata.name"]


@pytest.mark.parametrize("path", [path for path, node in NODES.items() if "description" in node])
def test_descriptions_are_sentences(path: str) -> None:
    """As `kubectl explain` shows them, one below the other."""
    assert re.fullmatch(r"[A-Z].*[.]", NODES[path]["description"])


@pytest.mark.parametrize("path", [path for path, node in NODES.items() if "enum" in node and path.startswith(".spec")])
def test_each_choice_of_a_field_is_named_where_the_field_is_described(path: str) -> None:
    words = re.findall(r"\w+", NODES[path]["description"])
    assert set(NODES[path]["enum"]) <= set(words)


def test_the_crd_is_small() -> None:
    """``kubectl apply`` keeps it in an annotation, which holds 262,144 bytes: half of them at most."""
    assert len(yaml.safe_dump(read_crd())) < 131_072
    assert CRD.stat().st_size < 131_072


def test_no_number_is_a_float() -> None:
    assert [path for path, node in NODES.items() if node.get("type") == "number"] == []


def test_the_kind_is_the_models() -> None:
    names = read_crd()["spec"]["names"]
    (version,) = read_crd()["spec"]["versions"]
    model = ServingCluster.model_json_schema(by_alias=True)["properties"]
    assert (names["kind"], names["shortNames"], names["categories"]) == (model["kind"]["const"], ["slc"], ["sluice"])
    assert model["apiVersion"]["const"] == f"{read_crd()['spec']['group']}/{version['name']}"


def test_columns_and_subresources_read_fields_that_exist() -> None:
    (version,) = read_crd()["spec"]["versions"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"]["scale"].values()
    fields = {re.sub(r"\[\?.*?\]", "[]", path) for path in paths} - {".metadata.creationTimestamp"}
    assert fields <= set(NODES)
    wide = [column["name"] for column in version["additionalPrinterColumns"] if column.get("priority")]
    usual = [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")]
    assert usual == ["Ready", "Engines", "P", "D", "TTFT", "TPOT", "Attainment", "Age"]
    assert wide == ["S_P", "S_D", "Strategy", "Model", "Reason"]


def test_the_crd_tells_users_every_condition_and_reason() -> None:
    fields = NODES[".status.conditions[]"]["properties"]
    documented = dict(re.findall(r"(\w+): ([\w, ]+)\.", fields["reason"]["description"]))
    assert {name: tuple(reasons.split(", ")) for name, reasons in documented.items()} == {
        str(condition): tuple(map(str, reasons)) for condition, reasons in REASONS.items()
    }
    words = set(re.findall(r"\w+", fields["type"]["description"]))
    assert {str(condition) for condition in ConditionType} <= words


def test_a_part_takes_the_place_of_a_list():
    assert merge({"chunkSizes": [1]}, {"chunkSizes": {"prefillHeavy": 16}}) == {"chunkSizes": {"prefillHeavy": 16}}
