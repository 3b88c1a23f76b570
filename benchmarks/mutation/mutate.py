"""Mutates Algorithm 1, Algorithm 2 and the batch policy line by line, and shows that tests notice every mutant.

    .venv/bin/python -m benchmarks.mutation.mutate [MODULE ...]        # batching, decode_order, decode_flow, placement

mutmut (pinned in pyproject.toml) works on a copy under build/mutation with the fast tests that cover these modules. A
mutant that no test notices is either listed in ``equivalent.toml``, with the reason why nothing can notice it, or a
fault: the exit status is 1. It is also 1 where one is listed that no longer exists. A second run tests the mutants that
were left, those that nothing noticed, and those of functions that changed; ``--anew`` tests all (half an hour on one
core).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mutmut.mutation.diff_apply import get_diff_for_mutant

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutation"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
PACKAGE = "sluice_core"
SCHEDULING = "scheduling"
MODULES = ("batching", "decode_order", "decode_flow", "placement")
TESTS = (
    "test_batching",
    "test_decode_flow",
    "test_placement",
    "test_engine_table",
    "test_strategies",
    "test_baselines",
)
# mutmut's exit codes of a mutant's tests: 0 and 5 (no test ran it) are survivors, None was not run.
SURVIVED = frozenset({0, 5, 33})
PYPROJECT = f"""
[tool.pytest.ini_options]
addopts = "--strict-markers"
timeout = 60

[tool.mutmut]
source_paths = ["{PACKAGE}"]
only_mutate = {json.dumps([f"{PACKAGE}/{SCHEDULING}/{module}.py" for module in MODULES])}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:asyncio"]
pytest_add_cli_args_test_selection = ["tests/"]
timeout_multiplier = 4.0
"""
# A failing example is enough: to shrink it would take most of the time. The examples are the same in every run.
CONFTEST = """
from hypothesis import Phase, settings

settings.register_profile(
    "mutation", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None, deadline=None
)
settings.load_profile("mutation")
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change that tests did not notice.

    Args:
        name: mutmut's name of it.
        function: ``module.function`` or ``module.Class.method``.
        before: The line.
        after: The line, changed.
    """

    name: str
    function: str
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is recognized by: numbers in names change with every edit."""
        return self.function, self.before, self.after


def make_folder() -> None:
    """Copies sources and tests; what mutmut found before stays."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in (PACKAGE, "tests"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    shutil.copytree(ROOT / "core" / PACKAGE, FOLDER / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (FOLDER / "tests").mkdir()
    for test in TESTS:
        shutil.copy2(ROOT / "core" / "tests" / f"{test}.py", FOLDER / "tests")
    (FOLDER / "tests" / "conftest.py").write_text(CONFTEST)
    (FOLDER / "pyproject.toml").write_text(PYPROJECT)


def forget_survivors(modules: list[str]) -> None:
    """Has mutmut test survivors again, except those listed as equivalent: there may be new tests."""
    equivalent = read_equivalent()
    for module in modules:
        meta = FOLDER / "mutants" / PACKAGE / SCHEDULING / f"{module}.py.meta"
        if meta.exists():
            content = json.loads(meta.read_text())
            codes = content["exit_code_by_key"]
            content["exit_code_by_key"] = {
                name: None if code in SURVIVED and describe(name).key not in equivalent else code
                for name, code in codes.items()
            }
            meta.write_text(json.dumps(content, indent=4))


def run_mutmut(module: str) -> None:
    """Tests a module's mutants, at low priority."""
    subprocess.run(
        [Path(sys.executable).with_name("mutmut"), "run", f"{PACKAGE}.{SCHEDULING}.{module}*", "--max-children", "1"],
        cwd=FOLDER,
        check=False,
        preexec_fn=lambda: os.nice(19),
    )


def read_results(modules: list[str]) -> dict[str, int | None]:
    """Reads the exit code of each mutant's tests."""
    results: dict[str, int | None] = {}
    for module in modules:
        meta = json.loads((FOLDER / "mutants" / PACKAGE / SCHEDULING / f"{module}.py.meta").read_text())
        results |= meta["exit_code_by_key"]
    return results


def describe(name: str) -> Mutant:
    """Asks mutmut what a mutant changes."""
    path = Path(PACKAGE) / SCHEDULING / f"{name.split('.')[2]}.py"
    with contextlib.chdir(FOLDER):
        lines = get_diff_for_mutant(name, path=path).splitlines()
    body = [line for line in lines if not line.startswith(("---", "+++", "#", "@@"))]
    before = [line[1:].strip() for line in body if line.startswith("-")]
    after = [line[1:].strip() for line in body if line.startswith("+")]
    function = name.removeprefix(f"{PACKAGE}.{SCHEDULING}.").rpartition("__mutmut_")[0]
    # mutmut's spelling: x_function, xǁClassǁmethod.
    module, _, rest = function.partition(".")
    parts = rest.removeprefix("x").removeprefix("_").split("ǁ") if "ǁ" not in rest else rest.split("ǁ")[1:]
    return Mutant(name, ".".join([module, *parts]), " ".join(before), " ".join(after))


def read_equivalent() -> dict[tuple[str, str, str], str]:
    """Reads the mutants that nothing can notice, with the reason."""
    listed = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {(each["function"], each["before"], each["after"]): each["reason"] for each in listed}


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; all without")
    parser.add_argument("--report", action="store_true", help="only say what the last run found")
    parser.add_argument("--anew", action="store_true", help="forget earlier runs")
    options = parser.parse_args()
    modules = options.modules or list(MODULES)
    if unknown := set(modules) - set(MODULES):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known are {', '.join(MODULES)}")
    if not options.report:
        if options.anew:
            shutil.rmtree(FOLDER, ignore_errors=True)
        make_folder()
        forget_survivors(modules)
        for module in modules:
            run_mutmut(module)
    results = read_results(modules)
    survivors = [describe(name) for name, code in results.items() if code in SURVIVED]
    equivalent = read_equivalent()
    faults = [mutant for mutant in survivors if mutant.key not in equivalent]
    found = {mutant.key for mutant in survivors} | {
        describe(name).key for name, code in results.items() if code is None
    }
    gone = [key for key in equivalent if key not in found and key[0].partition(".")[0] in modules]
    num_open = sum(code is None for code in results.values())
    print(
        f"{len(results)} mutants: {len(results) - len(survivors) - num_open} noticed, {len(survivors) - len(faults)} "
        f"equivalent (equivalent.toml), {len(faults)} unnoticed, {num_open} not run"
    )
    for mutant in faults:
        print(f"\n{mutant.name}\n  {mutant.function}\n  - {mutant.before}\n  + {mutant.after}")
    for function, before, after in gone:
        print(f"\nlisted as equivalent, and noticed or gone: {function}\n  - {before}\n  + {after}")
    return 1 if faults or gone or num_open else 0


if __name__ == "__main__":
    sys.exit(main())
