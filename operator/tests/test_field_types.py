"""Checked scalars of the manifest at both ends of their bounds, and values as the API server reads them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from sluice_operator.api.cross_field_rules import find_violations
from sluice_operator.api.field_types import (
    CountOrPercentage,
    ErrorRate,
    ManifestModel,
    Percentage,
    PortRange,
    Quantity,
    RelativePath,
    percent,
    port_range,
)
from sluice_operator.api.fields_and_defaults.cluster_spec import SpecFields
from sluice_operator.api.fields_and_defaults.pod_fields import EnvVar
from sluice_operator.api.manifest import ManifestError, check_manifest, parse_manifest
from sluice_operator.api.spec_changes import FieldChange, FieldEffect

ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "count": TypeAdapter(CountOrPercentage),
    "percentage": TypeAdapter(Percentage),
    "error rate": TypeAdapter(ErrorRate),
    "quantity": TypeAdapter(Quantity),
    "ports": TypeAdapter(PortRange),
    "path": TypeAdapter(RelativePath),
}
REFUSED = object()


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        ("count", 0, 0),
        ("count", 1024, 1024),
        ("count", "7", 7),
        ("count", "1024", 1024),
        ("count", "0%", "0%"),
        ("count", "99%", "99%"),
        ("count", "100%", "100%"),
        *(
            ("count", value, REFUSED)
            for value in (-1, 1025, "1025", "-1", "07", "101%", "07%", "x", "", 1.5, True, None)
        ),
        ("percentage", "1%", "1%"),
        ("percentage", "100%", "100%"),
        *(("percentage", value, REFUSED) for value in ("0%", "101%", "5", 5)),
        ("error rate", "0%", "0%"),
        ("error rate", "100%", "100%"),
        *(("error rate", value, REFUSED) for value in ("101%", "00%", 0)),
        ("quantity", 0, 0),
        ("quantity", 7, 7),
        *(("quantity", value, value) for value in ("0", "500m", "1.5", "16Gi", "2k", "1e3", "9n", "9u")),
        *(("quantity", value, REFUSED) for value in (-1, "-1", ".5", "1.", "16gi", "1e", "1Gib", "", False, 1.5, None)),
        ("ports", "1024-1024", "1024-1024"),
        ("ports", "1024-65535", "1024-65535"),
        *(("ports", text, REFUSED) for text in ("1023-1024", "1024-65536", "7001-7000", "7000", "7000-", "07000-7001")),
        ("path", "a/b", "a/b"),
        ("path", ".", "."),
        ("path", "a..b/..c", "a..b/..c"),
        *(("path", text, REFUSED) for text in ("/a", "..", "../a", "a/..", "a/../b", "")),
    ],
)
def test_a_scalar_is_taken_up_to_its_bounds(kind: str, value: object, read: object) -> None:
    if read is REFUSED:
        with pytest.raises(ValidationError):
            ADAPTERS[kind].validate_python(value)
    else:
        found = ADAPTERS[kind].validate_python(value)
        assert (found, type(found)) == (read, type(read))


def test_percentages_and_port_ranges_are_numbers() -> None:
    assert [percent(text) for text in ("0%", "7%", "100%")] == [0, 7, 100]
    assert list(port_range("7000-7002")) == [7000, 7001, 7002]


class Part(ManifestModel):
    """A part."""

    some_count: int = 3
    """How many."""
    text: str | None = None
    """A text."""


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        ({}, {}),
        ({"someCount": 5}, {"some_count": 5}),
        ({"someCount": 2.0}, {"some_count": 2}),
        ({"someCount": None}, {}),
        ({"text": None}, {}),
        ({"text": ""}, {"text": ""}),
    ],
)
def test_a_field_without_a_value_is_absent_and_a_whole_number_is_one(
    data: dict[str, Any], fields: dict[str, Any]
) -> None:
    part = Part.model_validate(data)
    assert part == Part(**{"someCount" if name == "some_count" else name: value for name, value in fields.items()})
    assert type(part.some_count) is int
    assert part.model_fields_set == set(fields)


@pytest.mark.parametrize("data", [{"someCount": 2.5}, {"other": None}, {"other": 1}, [], "x"])
def test_what_is_no_such_part_is_refused(data: Any) -> None:
    with pytest.raises(ValidationError):
        Part.model_validate(data)


MANIFEST = """
kind: ServingCluster
apiVersion: sluice.dev/v1alpha1
metadata: {name: c}
spec:
  replicas: 2
  slo: {ttftMilliseconds: 500, tpotMilliseconds: 50}
  model: {name: m, source: {image: {reference: i}}}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 objects of kind ServingCluster, must hold one (kinds found: none)"),
        (
            "kind: Pod\n---\n- 1\n---\n",
            "holds 0 objects of kind ServingCluster, must hold one (kinds found: Pod, list)",
        ),
        ("kind: Pod\n---\nx: 1", "holds 0 objects of kind ServingCluster, must hold one (kinds found: Pod, None)"),
        (
            f"{MANIFEST}---{MANIFEST}",
            "holds 2 objects of kind ServingCluster, must hold one (kinds found: ServingCluster, ServingCluster)",
        ),
    ],
)
def test_a_file_holds_one_cluster_beside_whatever_else(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text)
    assert str(caught.value) == message
    assert parse_manifest(f"kind: Pod\n---\n- 1\n---{MANIFEST}---\n").metadata.name == "c"


def make_spec(**spec: Any) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(MANIFEST)
    content["spec"] |= spec
    return content


@pytest.mark.parametrize(
    ("value", "shown"),
    [("x" * 58, repr("x" * 58)), ("x" * 59, "'" + "x" * 56 + "..."), (5, "5"), (True, "True")],
)
def test_a_refusal_shows_the_value_as_far_as_it_is_short(value: object, shown: str) -> None:
    with pytest.raises(ManifestError) as caught:
        check_manifest(make_spec(strategy=value))
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"{shown} is not one of ")
    assert str(problem) == f"spec.strategy: {problem.message}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "none"), ("x" * 60, "x" * 60), ("x" * 61, "x" * 57 + "..."), (EnvVar(name="A"), "{'name': 'A'}")],
)
def test_a_change_shows_both_values_as_far_as_they_are_short(value: object, shown: str) -> None:
    change = FieldChange(field="spec.x", old=value, new=1, effect=FieldEffect.LIVE)
    assert str(change) == f"spec.x {shown} -> 1"


@pytest.mark.parametrize(
    ("spec", "broken"),
    [
        ({"chunkSizes": {"prefillHeavy": 2048, "decodeHeavy": 16}, "engine": {"maxBatchTokens": 2048}}, []),
        ({"chunkSizes": {"decodeHeavy": 0}}, []),
        ({"chunkSizes": {"decodeHeavy": 15}}, ["chunks_fit_the_batch"]),
        ({"chunkSizes": {"decodeHeavy": 2049}, "engine": {"maxBatchTokens": 2048}}, ["chunks_fit_the_batch"]),
        ({"prefillHeavy": 2}, []),
        ({"prefillHeavy": 3}, ["count_fits_the_replicas"]),
        ({"engine": {"extraArgs": ["--no-enable-chunked-prefill"]}}, ["arguments_are_free"]),
        ({"engine": {"extraArgs": ["--kv_transfer_config.a=b"]}}, ["arguments_are_free"]),
        ({"engine": {"extraArgs": ["--seed", "model"]}}, []),
        ({"network": {"tcpPortRange": "7000-7009", "kvPort": 7009}}, ["ports_differ"]),
        ({"network": {"tcpPortRange": "7000-7009", "kvPort": 7010}}, []),
        ({"router": {"service": {"port": 9000}}}, []),
        ({"rollout": {"maxUnavailable": 0, "maxSurge": "0%"}}, ["a_roll_goes_on"]),
        ({"rollout": {"maxUnavailable": "0%", "maxSurge": 1}}, []),
        ({"rollout": {"gate": {"durationSeconds": 9, "timeoutSeconds": 9}}}, []),
        ({"rollout": {"gate": {"durationSeconds": 9, "timeoutSeconds": 8}}}, ["a_roll_goes_on"]),
        ({"autotune": {"bounds": {"replicas": {"min": 2, "max": 2}}}}, []),
        ({"autotune": {"bounds": {"replicas": {"min": 3, "max": 2}}}}, ["bounds_are_ordered"]),
        ({"autotune": {"bounds": {"prefillHeavy": {"min": "50%", "max": "50%"}}}}, []),
        ({"autotune": {"bounds": {"prefillHeavy": {"min": "51%", "max": "50%"}}}}, ["bounds_are_ordered"]),
        ({"autotune": {"bounds": {"prefillHeavy": {"min": 1, "max": "50%"}}}}, ["bounds_are_ordered"]),
        ({"autoscaling": {"mode": "Apply", "minReplicas": 3, "maxReplicas": 3}}, []),
        ({"autoscaling": {"mode": "Apply", "minReplicas": 4, "maxReplicas": 3}}, ["scaling_has_bounds"]),
        ({"autoscaling": {"mode": "Apply"}}, ["scaling_has_bounds"]),
        ({"autoscaling": {"mode": "Apply", "maxReplicas": 3}, "prefillHeavy": 1}, ["scaling_keeps_roles"]),
        (
            {"autoscaling": {"mode": "Apply", "maxReplicas": 1}, "strategy": "Disaggregated"},
            ["scaling_keeps_roles"] * 2,
        ),
        ({"replicas": 1, "strategy": "Disaggregated"}, ["decode_only_needs_two"]),
    ],
)
def test_a_rule_holds_up_to_its_edge(spec: dict[str, Any], broken: list[str]) -> None:
    found = find_violations(SpecFields.model_validate(make_spec(**spec)["spec"]))
    assert [name for name, _ in found] == broken
