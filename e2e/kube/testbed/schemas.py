"""Schemas of Kubernetes versions. Manifests are checked against them without a cluster of that version.

The schemas come from the Go modules of Kubernetes, of the Prometheus operator (monitors, rules) and of cert-manager
(certificates). The checksums below are those that go.sum would have. The files in use are kept in
``~/.cache/sluice/schemas``, for all checkouts.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from testbed.go_modules import fetch_module
from testbed.kubernetes_build import find_go
from testbed.settings import find_cache

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of a Go module.

    Args:
        module: The module, with its version.
        checksum: Checksum of the module, in the form of go.sum.
        path: Path of the file in the module.
    """

    module: str
    checksum: str
    path: str

    @property
    def cached(self) -> Path:
        """Path of the cached file."""
        cache = find_cache("schemas")
        return cache / f"{self.module.replace('/', '_')}_{Path(self.path).name}"


def _kubernetes(version: str, checksum: str) -> Source:
    return Source(module=f"k8s.io/kubernetes@{version}", checksum=checksum, path="api/openapi-spec/swagger.json")


# The three newest minor versions, and the oldest that the chart takes.
KUBERNETES = {
    "1.37": _kubernetes("v1.37.0", "h1:TDSD+Izz9inqs7SmtJCAu7L5/DuYW9hAZ3GBdF6Ddkw="),
    "1.36": _kubernetes("v1.36.3", "h1:qDQdoMiluAE2Eab6Fa52YV+WjiGz9mZFFoagEA6cI+o="),
    "1.35": _kubernetes("v1.35.4", "h1:o/8dBC/pHVpYoGV4OAIytAlNPZbdYVTXJHoYvXC4qzM="),
    "1.30": _kubernetes("v1.30.14", "h1:MrlKXh9uhLIJpyxOeXhcndzRVSvwiV9iJ8NgH8nqPsg="),
}
OPERATOR = (
    "github.com/prometheus-operator/prometheus-operator@v0.85.0",
    "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
)
CERT_MANAGER = Source(
    module="github.com/cert-manager/cert-manager@v1.21.2",
    checksum="h1:UWgoYM+KLNtRlqmoWOKjKBOBUPVHeepQ6/ac3ERJW68=",
    path="deploy/crds/cert-manager.io_certificates.yaml",
)
FOREIGN = (
    *(
        Source(
            module=OPERATOR[0],
            checksum=OPERATOR[1],
            path=f"example/prometheus-operator-crd/monitoring.coreos.com_{plural}.yaml",
        )
        for plural in ("servicemonitors", "prometheusrules")
    ),
    CERT_MANAGER,
)
# Kubernetes' formats for values that may be a number or a string.
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
GROUP_VERSION_KIND = "x-kubernetes-group-version-kind"


class Schemas:
    """Schemas of one version of Kubernetes, made strict: unknown fields are refused.

    Args:
        minor: The version, such as ``1.36``.
    """

    def __init__(self, minor: str) -> None:
        definitions = json.loads(_read(KUBERNETES[minor]))["definitions"]
        self._definitions = {name: _make_strict(node) for name, node in definitions.items()}
        self._definitions[QUANTITY] = {"type": ["string", "number"]}
        self._names = {
            _identify(kind["group"], kind["version"], kind["kind"]): name
            for name, node in definitions.items()
            for kind in node.get(GROUP_VERSION_KIND, ())
        }
        for source in FOREIGN:
            self._add_definition(yaml.safe_load(_read(source))["spec"])

    def find_faults(self, item: Object) -> list[str]:
        """Checks an object; returns a line for each fault that the version would refuse."""
        group, _, version = item["apiVersion"].rpartition("/")
        name = self._names.get(_identify(group, version, item["kind"]))
        if name is None:
            return [f"{item['apiVersion']} {item['kind']} is not served"]
        schema = {"$ref": f"#/definitions/{name}", "definitions": self._definitions}
        errors = jsonschema.Draft4Validator(schema).iter_errors(item)
        return [f"{item['kind']} {item['metadata']['name']}, {error.json_path}: {error.message}" for error in errors]

    def _add_definition(self, spec: Object) -> None:
        """Adds a kind from its CustomResourceDefinition."""
        for version in spec["versions"]:
            name = f"{spec['group']}.{version['name']}.{spec['names']['kind']}"
            schema = version["schema"]["openAPIV3Schema"]
            # The schema of a custom resource leaves out metadata, which all objects share.
            metadata = {"$ref": "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
            whole = {**schema, "properties": {**schema["properties"], "metadata": metadata}}
            self._definitions[name] = _make_strict(whole)
            self._names[_identify(spec["group"], version["name"], spec["names"]["kind"])] = name


@functools.cache
def load_schemas(minor: str) -> Schemas:
    """Loads the schemas of a version, and fetches them if need be.

    Raises:
        TestbedError: A module cannot be fetched, or its checksum is not the pinned one.
    """
    return Schemas(minor)


def _identify(group: str, version: str, kind: str) -> tuple[str, str, str]:
    return group, version, kind


def _make_strict(node: Any) -> Any:
    """Turns an OpenAPI schema into a JSON schema that refuses unknown fields."""
    if isinstance(node, list):
        return [_make_strict(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    # A property may be named like a keyword of JSON Schema.
    strict = {
        name: {key: _make_strict(inner) for key, inner in value.items()}
        if name == "properties"
        else _make_strict(value)
        for name, value in node.items()
    }
    if node.get("format") == "int-or-string" or node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    is_open = "additionalProperties" in node or node.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in node and not is_open:
        strict["additionalProperties"] = False
    return strict


def _read(source: Source) -> str:
    if not source.cached.is_file():
        _fetch(source)
    return source.cached.read_text()


def _fetch(source: Source) -> None:
    """Fetches a module for one of its files. The module cache is deleted afterwards, because modules are large."""
    source.cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sluice-schemas-") as folder:
        variables = {"GOMODCACHE": folder, "GOFLAGS": "-modcacherw"}
        module = fetch_module(find_go(), source.module, source.checksum, **variables)
        whole = source.cached.with_suffix(".part")
        shutil.copyfile(module / source.path, whole)
        whole.rename(source.cached)
