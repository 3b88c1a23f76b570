"""Ports of end-to-end tests: clusters of several modules live side by side, so no two share a port."""

import ast
import itertools
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = (*(ROOT / "e2e").glob("*.py"), ROOT / "docs" / "tests" / "test_shown_commands.py")


def find_ports(module: Path) -> set[int]:
    """Finds the ports that a module's constants name."""
    ports: set[int] = set()
    for node in ast.parse(module.read_text()).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            continue
        name, value = node.targets[0], node.value.value
        if isinstance(name, ast.Name) and name.id.endswith("PORT"):
            ports.add(int(value))
        elif isinstance(name, ast.Name) and name.id.endswith("PORTS"):
            low, high = map(int, value.split("-"))
            ports |= set(range(low, high + 1))
    return ports


def test_modules_with_clusters_have_ports_of_their_own() -> None:
    found = {module.name: find_ports(module) for module in MODULES}
    found = {name: ports for name, ports in found.items() if ports}
    assert len(found) >= 8
    shared = {
        (one, other): sorted(found[one] & found[other])[:3]
        for one, other in itertools.combinations(found, 2)
        if found[one] & found[other]
    }
    assert shared == {}
