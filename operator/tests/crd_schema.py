"""The manifest's schema twice, for comparison: as the CRD states it, and as pydantic's models do."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sluice_operator.api.serving_cluster import ServingCluster

CRD = Path(__file__).parents[2] / "crds" / "servingclusters.yaml"
Schema = dict[str, Any]
# Said in the CRD alone: cross-field rules and how lists merge. The table of verdicts holds the model to them.
CRD_ONLY = ("x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys")


@cache
def read_crd() -> Schema:
    """The CustomResourceDefinition."""
    crd: Schema = yaml.safe_load(CRD.read_text())
    return crd


def read_schema() -> Schema:
    """The schema of its only version."""
    (version,) = read_crd()["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    return schema


def without_rules(schema: Schema) -> Schema:
    """A schema of the CRD without what only a CRD says."""
    kept = {name: value for name, value in schema.items() if name not in CRD_ONLY}
    if kept.get("x-kubernetes-preserve-unknown-fields"):
        kept.pop("properties", None)  # the model keeps the object as it is written; fields are declared for rules
    if "properties" in kept:
        kept["properties"] = {name: without_rules(inner) for name, inner in kept["properties"].items()}
    for name in ("items", "additionalProperties"):
        if name in kept:
            kept[name] = without_rules(kept[name])
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    return kept


def schema_of_the_model() -> Schema:
    """The schema of pydantic's model in the words of a CRD."""
    schema = ServingCluster.model_json_schema(by_alias=True)
    return _translate(schema, schema["$defs"])


def _translate(node: Schema, definitions: dict[str, Schema]) -> Schema:
    node = _resolve(node, definitions)
    found = {name: value for name, value in node.items() if name not in ("title", "anyOf", "$defs", "const")}
    if "const" in node:
        found["enum"] = [node["const"]]
    if "description" in found:
        found["description"] = " ".join(found["description"].split())
    if "required" in found:
        found["required"] = sorted(found["required"])
    if "properties" in found:
        found.pop("additionalProperties", None)  # a structural schema knows its fields by itself
        found["properties"] = {name: _translate(inner, definitions) for name, inner in found["properties"].items()}
    elif found.get("additionalProperties") is True:
        del found["additionalProperties"]
        found["x-kubernetes-preserve-unknown-fields"] = True
    elif "additionalProperties" in found:
        found["additionalProperties"] = _translate(found["additionalProperties"], definitions)
    if "items" in found:
        found["items"] = _translate(found["items"], definitions)
    return _with_crd_default(found)


def _resolve(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Puts a reference's target, and what an optional field holds when present, in the place of the node."""
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        return {**target, **{name: value for name, value in node.items() if name != "$ref"}}
    if "anyOf" in node:
        (inner,) = [choice for choice in node["anyOf"] if choice != {"type": "null"}]
        return {**_resolve(inner, definitions), **node}
    return node


def _with_crd_default(found: Schema) -> Schema:
    """Absent, none and empty are one in a CRD; a part is made by default where something in it has a default."""
    default = found.pop("default", None)
    if "properties" in found and default is not None:
        default = {} if any("default" in inner for inner in found["properties"].values()) else None
    elif default in ([], {}):
        default = None
    return found if default is None else {**found, "default": default}
