"""Writes docs/reference/crd.md, the reference of ServingClusters, from the CRD, and checks that it is up to date.

    python crds/reference.py write
    python crds/reference.py check

The effect of an edit on a running cluster comes from the Python model
(``sluice_operator.api.field_effects.FieldEffect``). All else comes from the CRD.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.serving_cluster import ServingClusterSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CRD = ROOT / "crds" / "servingclusters.yaml"
PAGE = ROOT / "docs" / "reference" / "crd.md"
Schema = dict[str, Any]

HEAD = """\
# ServingCluster

<!-- Written by crds/reference.py from crds/servingclusters.yaml; run `make reference` after an edit of that. -->

`{group}/{version}`, kind `{kind}`, short for `kubectl`: `{short}`. {description}

`kubectl explain {short}.spec` shows the same. [`examples/tiny-cpu.yaml`](../../examples/tiny-cpu.yaml) is a manifest
that works. The [runbook](../guides/runbook.md) explains the conditions of the status.

\\* marks a required field. A change of a field is *live* or *restarts* pods:

- *live*: it is in force in about a second, and no pod is replaced.
- *restarts*: pods are replaced while streams go on, engines as [`rollout`](../guides/rollouts.md) allows.

A rule that spans fields is listed below the table of its part, in the words of its refusal.

## Columns of `kubectl get`

{columns}

`kubectl get -o wide` shows those marked *wide*. `kubectl scale` and autoscalers act on `{replicas}`.
"""


def write_reference() -> str:
    """Writes the text of the page."""
    crd = yaml.safe_load(CRD.read_text())
    names, (version,) = crd["spec"]["names"], crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    head = HEAD.format(
        group=crd["spec"]["group"],
        version=version["name"],
        kind=names["kind"],
        short=names["shortNames"][0],
        description=_flow(schema["description"]),
        columns=_write_columns(version["additionalPrinterColumns"]),
        replicas=version["subresources"]["scale"]["specReplicasPath"].removeprefix("."),
    )
    effects = dict(_find_effects(ServingClusterSpec, "spec", FieldEffect.LIVE))
    sections = [
        _write_section(path, node, effects)
        for part in ("spec", "status")
        for path, node in _find_parts(schema["properties"][part], part)
    ]
    return "\n".join(map(_wrap, "\n".join([head, *sections]).split("\n")))


def _wrap(line: str) -> str:
    """Breaks a long line of prose, or of a list; a row of a table stays on its line."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _find_parts(node: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Finds every object that has fields, elements of lists too, in the order of the CRD."""
    if "properties" in node:
        yield path, node
        for name, inner in node["properties"].items():
            yield from _find_parts(inner, f"{path}.{name}")
    elif "items" in node:
        yield from _find_parts(node["items"], f"{path}[]")


def _find_effects(model: type[BaseModel], path: str, inherited: FieldEffect) -> Iterator[tuple[str, FieldEffect]]:
    for name, field in model.model_fields.items():
        effect = next((mark for mark in field.metadata if isinstance(mark, FieldEffect)), inherited)
        inner = f"{path}.{field.alias or name}"
        yield inner, effect
        for part in _find_models(field.annotation):
            yield from _find_effects(part, inner, effect)
            yield from _find_effects(part, f"{inner}[]", effect)


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Finds the models in an annotation: of the field itself, of an optional value, of a list's elements."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _find_models(argument)


def _write_columns(columns: list[Schema]) -> str:
    lines = [
        f"| {column['name']}{' (*wide*)' if column.get('priority') else ''} "
        f"| {_cell(column.get('description', 'Time since it was made.'))} |"
        for column in columns
    ]
    return "\n".join(["| column | what it shows |", "|---|---|", *lines])


def _write_section(path: str, node: Schema, effects: dict[str, FieldEffect]) -> str:
    lines = [f"## {path}", "", _flow(node["description"]), ""]
    is_spec = path.startswith("spec")
    titles = ["field", "type", "default", "limits", *(["change"] if is_spec else []), "what it is"]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    required = node.get("required", ())
    for name, inner in node["properties"].items():
        field = f"{path}.{name}"
        mark = "\\*" if name in required else ""
        # Fields that the model keeps as they are written have the effect of the part that they are in.
        effect = next((effects[part] for part in _list_parts(field) if part in effects), "")
        change = [f"*{effect}*"] if is_spec else []
        cells = [f"`{name}`{mark}", _describe_type(inner, field), _describe_default(inner), _describe_limits(inner)]
        lines.append(f"| {' | '.join([*cells, *change, _cell(inner['description'])])} |")
    rules = list(_write_rules(node, path))
    return "\n".join([*lines, "", *(["Refused, in these words:", "", *rules, ""] if rules else [])])


def _list_parts(path: str) -> Iterator[str]:
    """Lists a path and the parts that it is in, the innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _write_rules(node: Schema, path: str) -> Iterator[str]:
    """Lists the rules of a part, and of its fields that have no part of their own."""
    for rule in node.get("x-kubernetes-validations", ()):
        yield f"- `{path}{rule.get('fieldPath', '')}` {_flow(rule['message'])}."
    for name, inner in node["properties"].items():
        field = f"{path}.{name}"
        if "properties" not in inner:
            yield from (f"- `{field}` {_flow(rule['message'])}." for rule in inner.get("x-kubernetes-validations", ()))
        items = inner.get("items", {})
        if "properties" not in items:
            yield from (
                f"- each of `{field}` {_flow(rule['message'])}." for rule in items.get("x-kubernetes-validations", ())
            )


def _describe_type(node: Schema, path: str) -> str:
    if "properties" in node:
        return f"[object](#{_anchor(path)})"
    if "items" in node:
        items = node["items"]
        return f"list of [objects](#{_anchor(path + '[]')})" if "properties" in items else f"list of {items['type']}s"
    if "additionalProperties" in node:
        return f"map to {_describe_type(node['additionalProperties'], path)}"
    if node.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return "any object"
    return str(node["format"]) if node.get("format") == "date-time" else str(node["type"])


def _anchor(path: str) -> str:
    """Makes the anchor of a heading: lower case, with letters, digits and hyphens only."""
    return "".join(letter for letter in path.lower() if letter.isalnum() or letter == "-")


def _describe_default(node: Schema) -> str:
    default = node.get("default")
    if default in (None, {}):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _describe_limits(node: Schema) -> str:
    """Describes the bounds of a value, of its length, and of the elements of a list or map."""
    parts = []
    if "enum" in node:
        parts.append(", ".join(f"`{choice}`" for choice in node["enum"]))
    if "minimum" in node and "maximum" in node:
        parts.append(f"{node['minimum']} to {node['maximum']}")
    elif "minimum" in node:
        parts.append(f"at least {node['minimum']}")
    if "pattern" in node:
        parts.append(f"`{_cell(node['pattern'])}`")
    for key, words in (("maxLength", "characters"), ("maxItems", "elements"), ("maxProperties", "entries")):
        if key in node:
            parts.append(f"at most {node[key]} {words}")
    inner = node.get("additionalProperties") or node.get("items") or {}
    if inner and "properties" not in inner and (limits := _describe_limits(inner)):
        parts.append(f"each: {limits}")
    return "; ".join(parts)


def _flow(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """Escapes text for a cell of a table."""
    return _flow(text).replace("|", "\\|")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Writes or checks docs/reference/crd.md.")
    parser.add_argument("what", choices=["check", "write"])
    what = parser.parse_args().what
    text = write_reference()
    if what == "write":
        PAGE.write_text(text)
        print(f"wrote {PAGE.relative_to(ROOT)}")
    elif not PAGE.is_file() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} differs from the CRD; run `make reference`")
    else:
        print(f"{PAGE.relative_to(ROOT)} matches the CRD")


if __name__ == "__main__":
    main()
