"""A real API server and the Python model give the same verdict on every manifest, and name the same fields."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from testbed.settings import ROOT
from verdicts import Case, make_manifest, read_table

from sluice_operator.api import cross_field_rules, pod_template_rules
from sluice_operator.api.manifest import ManifestError, check_manifest

if TYPE_CHECKING:
    from testbed.client import Client

pytestmark = pytest.mark.usefixtures("crd")

CREATE = "/apis/sluice.dev/v1alpha1/namespaces/default/servingclusters?dryRun=All&fieldValidation=Strict"
TABLE = read_table()


def refused_by_the_server(client: Client, manifest: dict[str, Any]) -> set[str]:
    """Lists the fields that the API server's refusal names; empty if it accepts."""
    answer = client.request("POST", CREATE, manifest)
    if answer.is_ok:
        return set()
    assert answer.status in (400, 422), answer
    causes = answer.content.get("details", {}).get("causes", [])
    unknown = re.findall(r'unknown field "([^"]+)"', answer.content["message"])
    # The API server skips the rules of an object that has a field of a wrong type, and reports that under no field. The
    # path of the scale subresource begins with a dot.
    return {cause["field"].lstrip(".") for cause in causes if cause["field"] != "<nil>"} | set(unknown)


def refused_by_the_model(manifest: dict[str, Any]) -> set[str]:
    try:
        check_manifest(manifest)
    except ManifestError as error:
        return {problem.field for problem in error.problems}
    return set()


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_the_server_gives_the_verdict_of_the_model(client: Client, case: Case) -> None:
    assert refused_by_the_server(client, case.manifest) == refused_by_the_model(case.manifest) == case.refused


@pytest.mark.parametrize("argument", cross_field_rules.OWNED_ARGUMENTS)
def test_the_server_refuses_arguments_that_sluice_sets(client: Client, argument: str) -> None:
    arguments = [form.format(argument.replace("-", "_")) for form in ("--{}", "-{}=1", "--no-{}", "--{}.x=1")]
    found = refused_by_the_server(client, make_manifest({"engine": {"extraArgs": ["--seed=1", *arguments]}}, {}))
    assert found == {f"spec.engine.extraArgs[{index}]" for index in (1, 2, 3, 4)}


@pytest.mark.parametrize("name", sorted(pod_template_rules.OWNED_ENVIRONMENT))
def test_the_server_refuses_variables_that_sluice_sets(client: Client, name: str) -> None:
    found = refused_by_the_server(client, make_manifest({"engine": {"env": [{"name": name, "value": "1"}]}}, {}))
    assert found == {"spec.engine.env[0].name"}


def test_the_server_prints_every_message_of_the_rules(client: Client, crd: Any) -> None:
    schema = yaml.safe_load(crd.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    wanted = {message for node in walk(schema) for message in messages(node)}
    said = " ".join(client.request("POST", CREATE, case.manifest).content.get("message", "") for case in TABLE)
    assert {message for message in wanted if message not in said.replace('\\"', '"')} == set()


def walk(schema: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [
        *schema.get("properties", {}).values(),
        *(schema[name] for name in ("items", "additionalProperties") if name in schema),
    ]
    return [schema, *(node for part in inner for node in walk(part))]


def messages(node: dict[str, Any]) -> list[str]:
    return [rule["message"] for rule in node.get("x-kubernetes-validations", ())]


@pytest.mark.parametrize("case", [case for case in TABLE if not case.refused], ids=lambda case: case.name)
def test_what_the_server_stores_means_the_same_to_the_model(client: Client, case: Case) -> None:
    stored = client.request("POST", CREATE, case.manifest).content
    # Server and model have the same defaults: the operator sees the same spec, whichever of them filled it in.
    assert check_manifest(stored).spec == check_manifest(case.manifest).spec


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_can_be_applied(client: Client, path: Any) -> None:
    client.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", str(path))
