"""The tree as a newcomer meets it: a name stands for one thing, and what is cited is in the repository."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "core/sluice_core",
    "protos/sluice",
    "router/sluice_router",
    "engine_image/sluice_engine",
    "operator/sluice_operator",
    "cli/sluice_cli",
)
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]
TESTS = [
    path for folder in ("*/tests", ".ci/tests", "e2e") for place in ROOT.glob(folder) for path in place.rglob("*.py")
]
# What fails a test without an assertion in it: of pytest, and checks of the product that raise.
REFUSALS = ("raises", "fail", "warns", "check_transport", "check_installed")
# A document's name with an optional folder, as comments and docstrings cite it.
DOCUMENT = re.compile(r"(?<![\w/.*-])((?:[\w.-]+/)*[\w-]+\.md)\b")

# A source file's name with an optional folder, as documents cite it.
SOURCE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|toml|proto|c|h))`")


def test_a_public_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_documents_that_code_cites_are_in_the_repository() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {cited}"
        for path in MODULES
        for cited in DOCUMENT.findall(path.read_text())
        if not any(place.joinpath(cited).is_file() for place in (ROOT, path.parent))
    ]
    assert missing == []


def test_sources_that_documents_name_are_in_the_repository() -> None:
    made = {"build", ".venv", ".sluice", ".git"}
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in made]
    found = [path for folder in folders for path in folder.rglob("*.*")]
    sources = [f"/{path.relative_to(ROOT)}" for path in (*ROOT.glob("*.*"), *found)]
    missing = [
        f"{document.relative_to(ROOT)}: {cited}"
        for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md"))
        for cited in SOURCE.findall(document.read_text())
        if "NAME" not in cited and not any(path.endswith(f"/{cited}") for path in sources)
    ]
    assert missing == []


def test_folders_stay_small_enough_to_read() -> None:
    counts = {
        str(folder.relative_to(ROOT)): sum(path.suffix == ".py" for path in folder.iterdir())
        for folder in {path.parent for path in MODULES}
    }
    assert {folder: count for folder, count in counts.items() if count > 18} == {}


def test_functions_and_modules_stay_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): count for path in MODULES if (count := len(path.read_text().splitlines())) > 500
    }
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > 50:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = count
    assert long == {}


def test_every_test_can_fail() -> None:
    """A test asserts something, itself or by what it calls; helpers are known by their bare names."""
    functions = [
        node
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    calls = {id(function): find_calls(function) for function in functions}
    asserting = set(REFUSALS)
    while more := {
        function.name
        for function in functions
        if function.name not in asserting and (asserts(function) or calls[id(function)] & asserting)
    }:
        asserting |= more
    idle = [function.name for function in functions if function.name.startswith("test_")]
    assert [name for name in idle if name not in asserting] == []


def asserts(function: ast.AST) -> bool:
    """Whether a function has an assertion of its own that something can make fail."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
    return any(not isinstance(node.test, ast.Constant) for node in found)


def find_calls(function: ast.AST) -> set[str]:
    """Lists the bare names of what a function calls, and of the functions that it hands on."""
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
