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
# A document's name with an optional folder, as comments and docstrings cite it.
DOCUMENT = re.compile(r"(?<![\w/.*-])((?:[\w.-]+/)*[\w-]+\.md)\b")


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


def test_folders_stay_small_enough_to_read() -> None:
    counts = {
        str(folder.relative_to(ROOT)): sum(path.suffix == ".py" for path in folder.iterdir())
        for folder in {path.parent for path in MODULES}
    }
    assert {folder: count for folder, count in counts.items() if count > 18} == {}
