"""Runs every check: style, types, import directions, protos, locks, tests. Standard library only.

    .venv/bin/python .ci/checks.py [PYTEST_ARGUMENT...]

A failed check does not hide the next one. The last line counts what passed and what failed, each test by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PACKAGES = (
    "core/sluice_core",
    "protos/sluice",
    "router/sluice_router",
    "engine_image/sluice_engine",
    "operator/sluice_operator",
    "cli/sluice_cli",
)
# Unit tests start no engine. They run on all cores, since each test has its own ports and folders.
UNIT_TESTS = ("core/tests", "protos/tests", "operator/tests", "cli/tests", "router/tests", "benchmarks/tests")
ON_ALL_CORES = ("--numprocesses=auto", "--dist=worksteal")
# These tests start engines, which need a core each, so they run one at a time.
ENGINE_TESTS = ("engine_image/tests", "e2e", "docs/tests")
DOCKERFILES = ("operator/Dockerfile", "router/Dockerfile", "engine_image/Dockerfile", "e2e/kube/bases/Dockerfile")
# Tests of what the compiled core decides. They run on the wheel, as images install it.
COMPILED = ROOT / "build" / "compiled"
COMPILED_TESTS = (
    "core/tests",
    "router/tests/test_admission.py",
    "router/tests/test_migration.py",
    "router/tests/test_failover.py",
)
IS_COMPILED = """
import sys
import sluice_core.scheduling.engine_table as core
sys.exit(not core.__file__.endswith('.so') and core.__file__)
"""
SITE = ("python", "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "docs", "build/docs")
# Name, folder, command.
CHECKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("locks match pyproject.toml", ".", ("python", "requirements/lock.py", "check")),
    ("docs/reference/crd.md matches the CRD", ".", ("python", "crds/reference.py", "check")),
    ("docs/reference/cli.md matches the commands", ".", ("python", "docs/cli_reference.py", "check")),
    ("the docs site builds, with no dead link", ".", SITE),
    ("style", ".", ("ruff", "check", ".")),
    ("format", ".", ("ruff", "format", "--check", ".")),
    (
        "types",
        ".",
        (
            "mypy",
            *PACKAGES,
            "benchmarks/papers",
            "examples/tiny_model.py",
            "e2e/kube/testbed",
            "requirements",
            "crds",
            "docs/conf.py",
            "docs/cli_reference.py",
            ".ci/checks.py",
        ),
    ),
    ("import directions", ".", ("lint-imports",)),
    ("protos", "protos", ("buf", "lint")),
    ("Dockerfiles", ".", ("hadolint", *DOCKERFILES)),
    ("the wheel's core is compiled", "build/compiled", ("python", "-c", IS_COMPILED)),
)


def run_check(name: str, folder: str, command: tuple[str, ...]) -> bool:
    """Runs one check, and prints its verdict, with its output if it failed."""
    started = time.monotonic()
    program, *arguments = command
    done = subprocess.run(
        [BIN / program, *arguments], cwd=ROOT / folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    verdict = "passed" if done.returncode == 0 else "FAILED"
    output = done.stdout.decode(errors="replace") if done.returncode != 0 else ""
    # One print call for all: checks run side by side, and their lines must not mix.
    print(f"{verdict}  {name} ({time.monotonic() - started:.1f} s)\n{output}", end="", flush=True)
    return done.returncode == 0


def run_tests(arguments: Sequence[str], *, on_wheel: bool = False) -> tuple[int, int]:
    """Runs tests and shows their progress; returns how many passed and how many failed."""
    environment = {**os.environ, "PYTHONPATH": str(COMPILED)} if on_wheel else None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [BIN / "python", "-m", "pytest", "-q", "--durations=10", f"--junitxml={report}", *arguments],
            cwd=ROOT,
            env=environment,
            check=False,
        )
        suites = ET.parse(report).getroot().iter("testsuite") if report.is_file() else iter(())
        counts = [
            {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")} for suite in suites
        ]
    failed = sum(count["failures"] + count["errors"] for count in counts)
    passed = sum(count["tests"] - count["skipped"] for count in counts) - failed
    # A run that ends before it reports (an import error, a signal) has failed too.
    return passed, max(failed, int(done.returncode != 0))


def main() -> None:
    """Runs every check and every test."""
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        verdicts = list(threads.map(lambda check: run_check(*check), CHECKS))
    if sys.argv[1:]:
        counts = [run_tests(sys.argv[1:])]
    else:
        counts = [run_tests([*ON_ALL_CORES, folder]) for folder in UNIT_TESTS]
        counts.append(run_tests([*ON_ALL_CORES, *COMPILED_TESTS], on_wheel=True))
        # One process for each part: the engines' tests fork, which is unsafe in a process that has used gRPC.
        counts += [run_tests([folder]) for folder in ENGINE_TESTS]
    passed = sum(verdicts) + sum(passed for passed, _ in counts)
    failed = len(verdicts) - sum(verdicts) + sum(failed for _, failed in counts)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
