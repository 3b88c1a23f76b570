"""Writes the software bill of materials of an image: CycloneDX 1.6, from the lock that the image installs.

The image's base is not in it; BuildKit attests that one when the image is built.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Name of Sluice's own package, as pyproject.toml has it.
PACKAGE = "sluice-serve"
REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)[^\n\\]*(?P<hashes>(?:\\\n[^\n\\]*)*)", re.MULTILINE
)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def write_sbom(path: Path, name: str, version: str, lock: str) -> None:
    """Writes an SBOM.

    Args:
        path: File to write.
        name: Name of the image.
        version: Version of the image, and of Sluice's own package in it.
        lock: Text of its lock file.
    """
    components = [describe_package(PACKAGE, version, ()), *read_components(lock)]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        # The same for the same content, so that a release can be repeated.
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"{name}:{version}:{lock}").urn,
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": "image", "name": name, "version": version}},
        "components": components,
        "dependencies": [{"ref": "image", "dependsOn": [component["bom-ref"] for component in components]}],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def read_components(lock: str) -> Iterator[dict[str, Any]]:
    """Reads the packages of a lock file, each with the hashes of the files that may be installed."""
    for found in REQUIREMENT.finditer(lock):
        yield describe_package(found["name"], found["version"], HASH.findall(found["hashes"]))


def describe_package(name: str, version: str, hashes: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """Describes a Python package as a component; a package URL names it.

    A file that is installed has one of the hashes. CycloneDX keeps the hashes of files with their distributions.
    """
    url = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version.replace('+', '%2B')}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": url,
        "name": name,
        "version": version,
        "purl": url,
    }
    if hashes:
        component["externalReferences"] = [
            {
                "type": "distribution",
                "url": f"https://pypi.org/project/{name}/{version}/",
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in hashes],
            }
        ]
    return component
