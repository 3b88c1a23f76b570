"""The table of verdicts, and what the CRD says of a manifest when it is evaluated without an API server.

``verdicts.yaml`` holds the table. The end-to-end tests ask a real API server the same questions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cel
import jsonschema
import yaml
from crd_schema import read_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from crd_schema import Schema

TABLE = Path(__file__).with_name("verdicts.yaml")
LEAST: dict[str, Any] = {
    "apiVersion": "sluice.dev/v1alpha1",
    "kind": "ServingCluster",
    "metadata": {"name": "test"},
    "spec": {
        "slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50},
        "model": {"name": "m", "source": {"huggingFace": {}}},
    },
}
# An object that lacks a field, has too much of one, or one of another type is not asked for its rules.
BLOCKING = ("required", "type", "maxLength", "maxItems", "maxProperties", "x-kubernetes-int-or-string")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A manifest and what is wrong with it.

    Args:
        name: What the case is about.
        manifest: The manifest.
        refused: Fields that a refusal must name; empty: it is accepted.
    """

    name: str
    manifest: dict[str, Any]
    refused: frozenset[str]


def read_table() -> list[Case]:
    """Reads all cases."""
    return [
        Case(
            name=row["case"],
            manifest=make_manifest(row.get("set", {}), row.get("metadata", {}), row.get("nulls", ())),
            refused=frozenset(row.get("refused", ())),
        )
        for row in yaml.safe_load(TABLE.read_text())
    ]


def make_manifest(spec: dict[str, Any], metadata: dict[str, Any], nulls: tuple[str, ...] = ()) -> dict[str, Any]:
    """The least manifest with parts of its spec set, removed (null), or without a value (``nulls``)."""
    manifest = merge(LEAST, {"spec": spec, "metadata": metadata})
    manifest["spec"] |= dict.fromkeys(nulls)
    return manifest


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merges ``new`` into a copy of ``old``: parts field by field, everything else as a whole; null removes."""
    merged = copy.deepcopy(old)
    for name, value in new.items():
        if value is None:
            merged.pop(name, None)
        else:
            # As a JSON merge patch: a part that replaces something else begins empty.
            part = merged.get(name)
            merged[name] = merge(part if isinstance(part, dict) else {}, value) if isinstance(value, dict) else value
    return merged


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the CRD has against a manifest.

    Args:
        field: Dotted path of the field.
        cause: Keyword of the schema, or the text of a rule.
    """

    field: str
    cause: str


def validate(manifest: dict[str, Any]) -> list[Refusal]:
    """Finds what the CRD has against a manifest, as the API server does: fields, values, then rules."""
    schema = read_schema()
    stored = copy.deepcopy(manifest)
    _set_defaults(schema, stored)
    found = list(_unknown(schema, stored, ""))
    if found:
        return found
    found = [refusal for part in ("metadata", "spec") for refusal in _invalid(schema, stored, part)]
    if not {refusal.cause for refusal in found} & set(BLOCKING):
        found += _broken_rules(schema["properties"]["spec"], stored["spec"], "spec")
    return found


def _set_defaults(schema: Schema, value: Any) -> None:
    """Removes fields without a value, and sets the defaults of fields that are absent."""
    if isinstance(value, list):
        for item in value if "items" in schema else ():
            _set_defaults(schema["items"], item)
    if not isinstance(value, dict):
        return
    for name, inner in schema.get("properties", {}).items():
        if value.get(name, ...) is None:
            del value[name]
        if name not in value and "default" in inner:
            value[name] = copy.deepcopy(inner["default"])
        if name in value:
            _set_defaults(inner, value[name])


def _unknown(schema: Schema, value: Any, path: str) -> Iterator[Refusal]:
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _unknown(schema["items"], item, f"{path}[{index}]")
    elif isinstance(value, dict) and "properties" in schema and path != "metadata":
        for name, inner in value.items():
            here = f"{path}.{name}".lstrip(".")
            if name in schema["properties"]:
                yield from _unknown(schema["properties"][name], inner, here)
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield Refusal(here, "unknown field")


def _invalid(schema: Schema, stored: Any, part: str) -> Iterator[Refusal]:
    if part not in stored:
        yield Refusal(part, "required")
        return
    for error in _validator(part).iter_errors(stored[part]):
        field = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.absolute_path)
        missing = f".{error.message.split(chr(39))[1]}" if error.validator == "required" else ""
        yield Refusal(f"{part}{field}{missing}", str(error.validator))
    yield from _doubles(schema["properties"][part], stored[part], part)


@cache
def _validator(part: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_with_int_or_string(read_schema()["properties"][part]))


def _with_int_or_string(schema: Schema) -> Schema:
    """The schema as plain JSON schema; YAML's patterns end where the text ends, which Python writes as ``\\Z``."""
    plain = dict(schema)
    if plain.get("x-kubernetes-int-or-string"):
        plain["type"] = ["integer", "string"]
    if "pattern" in plain:
        plain["pattern"] = (
            plain["pattern"].removesuffix("$") + r"\Z" if plain["pattern"].endswith("$") else plain["pattern"]
        )
    for name in ("items", "additionalProperties"):
        if name in plain:
            plain[name] = _with_int_or_string(plain[name])
    plain["properties"] = {name: _with_int_or_string(inner) for name, inner in plain.get("properties", {}).items()}
    return plain


def _children(schema: Schema, value: Any, path: str) -> Iterator[tuple[Schema, Any, str]]:
    if isinstance(value, list) and "items" in schema:
        yield from ((schema["items"], item, f"{path}[{index}]") for index, item in enumerate(value))
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield inner, value[name], f"{path}.{name}"


def _doubles(schema: Schema, value: Any, path: str) -> Iterator[Refusal]:
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys and isinstance(value, list):
        names = [[item.get(key) for key in keys] for item in value if isinstance(item, dict)]
        yield from (Refusal(f"{path}[{i}]", "duplicate") for i, name in enumerate(names) if name in names[:i])
    for child in _children(schema, value, path):
        yield from _doubles(*child)


def _broken_rules(schema: Schema, value: Any, path: str) -> Iterator[Refusal]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if not evaluate(rule["rule"], value):
            yield Refusal(path + rule.get("fieldPath", ""), rule["rule"])
    for child in _children(schema, value, path):
        yield from _broken_rules(*child)


def evaluate(rule: str, value: Any) -> bool:
    """Evaluates a CEL rule on a value; an error is a refusal, as on the API server."""
    if isinstance(value, dict) and "namespace" in value:
        value = {**value, "__namespace__": value["namespace"]}  # a reserved word of CEL, escaped as the API server does
    context = cel.Context(variables={"self": value})
    context.add_function("split", lambda text, separator: text.split(separator))
    try:
        return bool(cel.evaluate(rule, context))
    except (RuntimeError, TypeError, ValueError):
        return False
