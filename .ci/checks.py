"""Runs every check: style, types, import directions, protos, locks, tests. Standard library only.

    .venv/bin/python .ci/checks.py [PYTEST_ARGUMENT...]

A failed check does not hide the next one. At its limit a step is stopped, says where it stood, and has failed. The last
line counts what passed, failed and was skipped, each test by itself.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from limited_runs import Counts, end_steps_with_this_process, run_limited, run_pytest, run_side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
# These search in the simulator: they run on the wheel, in a fraction of the time.
SEARCHING_TESTS = tuple(
    f"operator/tests/test_{name}.py" for name in ("autotune_decision", "autotune_search", "capacity_search")
)
# These wait for limits of time, so they run beside the checks, which take both cores.
WAITING_TESTS = (".ci/tests",)
# Unit tests start no engine. They run on all cores, since each test has its own ports and folders.
ON_ALL_CORES = ("--numprocesses=auto", "--dist=worksteal")
# Those of the command line and the benchmarks wait for processes most of their time.
ON_MORE_THAN_ALL_CORES = (f"--numprocesses={(os.cpu_count() or 1) + 2}", "--dist=worksteal")
# These start engines by the file, on two cores; each worker has ports of its own.
ENGINE_TESTS = ("--numprocesses=2", "--dist=loadfile", "engine_image/tests")
# These start clusters, each on ports of its own.
# The first test of each half waits for stock vLLM's answers and for its cluster, minutes where both halves do so.
PATIENT = ("--timeout=900",)
SHARED_CLUSTER_TESTS = ("e2e", "--clusters=shared", "-m", "not searches", *PATIENT)
OWN_CLUSTER_TESTS = ("e2e", "--clusters=own", "-m", "not searches", *PATIENT)
DOCS_TESTS = ("docs/tests", *PATIENT)
SEARCHING_CLUSTER_TESTS = ("e2e", "-m", "searches", *PATIENT)
# Limits of steps, several times what they take on two quiet cores.
CHECK_LIMIT_S = 900.0
UNIT_TESTS_LIMIT_S = 1200.0
ENGINE_TESTS_LIMIT_S = 2400.0
DOCKERFILES = ("operator/Dockerfile", "router/Dockerfile", "engine_image/Dockerfile", "e2e/kube/bases/Dockerfile")
# Core and router are compiled in the wheel, as images install it. Tests of them and of what uses them run on it.
COMPILED = ROOT / "build" / "compiled"
# These replace parts of what is compiled, or look into it, which only Python's own objects allow.
PATCHING_TESTS = tuple(
    f"router/tests/test_{name}.py"
    for name in (
        *("api_keys", "cut_prompts", "engine_health", "held_requests", "kv_copies", "prefixes"),
        *("router_edges", "router_events"),
    )
)
# Some tests of these derive from what is compiled, and are skipped on the wheel.
DERIVING_TESTS = tuple(f"core/tests/test_{name}.py" for name in ("decode_counts", "ecoserve", "prefill_queue"))
# Each run begins with the import of all that it tests, and ends with its slowest test: so there are two.
WHEEL_TESTS = (
    *("benchmarks/tests", "cli/tests", "core/tests", "router/tests"),
    *(f"--ignore={path}" for path in PATCHING_TESTS),
    *SEARCHING_TESTS,
)
CHECKOUT_TESTS = (
    *("operator/tests", "protos/tests"),
    *(f"--ignore={path}" for path in SEARCHING_TESTS),
    *PATCHING_TESTS,
    *DERIVING_TESTS,
)
IS_COMPILED = """
import sys
import sluice_core.scheduling.engine_table as core
import sluice_router.scheduling.token_delivery as router
sys.exit(" ".join(module.__file__ for module in (core, router) if not module.__file__.endswith(".so")) or 0)
"""
SITE = ("python", "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "docs", "build/docs")
# Name, folder, command.
CHECKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # The longest first: for half of its time it has work for one core only.
    ("the wheel builds", ".", ("make", "build/compiled/stamp")),
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
            "benchmarks",
            "examples/tiny_model.py",
            "e2e/kube/testbed",
            "requirements",
            "crds",
            "docs/conf.py",
            "docs/cli_reference.py",
            # Each by itself: mypy says nothing of what it only finds by an import in a hidden folder.
            *sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".ci").glob("*.py")),
        ),
    ),
    ("import directions", ".", ("lint-imports",)),
    ("protos", "protos", ("buf", "lint")),
    ("Dockerfiles", ".", ("hadolint", *DOCKERFILES)),
    ("workflows", ".", ("zizmor", "--offline", "--no-progress", "--min-severity=medium", ".github/workflows")),
)
WHEEL_CHECK = ("the wheel's core and router are compiled", "build/compiled", ("python", "-c", IS_COMPILED))


def run_check(name: str, folder: str, command: tuple[str, ...]) -> bool:
    """Runs one check, and prints its verdict, with its output if it failed."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        status = run_limited(
            command,
            limit_s=CHECK_LIMIT_S,
            environment=dict(os.environ),
            cwd=ROOT / folder,
            stdout=output,
            stderr=output,
        )
        output.seek(0)
        text = output.read().decode(errors="replace") if status != 0 else ""
    verdict = "passed" if status == 0 else "FAILED"
    # One print call for all: checks run side by side, and their lines must not mix.
    print(f"{verdict}  {name} ({time.monotonic() - started:.1f} s)\n{text}", end="", flush=True)
    return status == 0


def run_checks() -> Counts:
    """Runs every check, on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        verdicts = list(threads.map(lambda check: run_check(*check), CHECKS))
    # Where the wheel did not build there is nothing to look at: this has failed too.
    verdicts.append(COMPILED.is_dir() and run_check(*WHEEL_CHECK))
    return Counts(passed=sum(verdicts), failed=len(verdicts) - sum(verdicts))


def run_tests(arguments: Sequence[str], *, limit_s: float, on_wheel: bool = False, name: str = "") -> Counts:
    """Runs tests, of the checkout or of the wheel; ``name`` as in ``run_pytest``."""
    environment = {"PYTHONPATH": str(COMPILED)} if on_wheel else None
    arguments = ["--durations=10", *arguments]
    return run_pytest(arguments, limit_s=limit_s, folder=ROOT, environment=environment, name=name)


def run_cluster_tests() -> Counts:
    """Runs tests on clusters and of the docs side by side, since clusters often wait."""

    def step(name: str, arguments: Sequence[str]) -> Callable[[], Counts]:
        return lambda: run_tests(arguments, limit_s=ENGINE_TESTS_LIMIT_S, on_wheel=True, name=name)

    return run_side_by_side(
        [
            step("tests on a shared cluster", SHARED_CLUSTER_TESTS),
            # Searches have a limit of time, so they come when the docs are done.
            step("tests with searches", SEARCHING_CLUSTER_TESTS),
        ],
        [step("tests with clusters of their own", OWN_CLUSTER_TESTS)],
        [step("tests of the docs", DOCS_TESTS)],
    )


def run_all() -> Counts:
    """Runs every check and every test.

    Unit tests and tests of engines take both cores by themselves: one after the other, they end no later.
    """
    unit_tests = [*ON_ALL_CORES, *CHECKOUT_TESTS]
    counts = run_side_by_side(
        [run_checks],
        [lambda: run_tests(WAITING_TESTS, limit_s=UNIT_TESTS_LIMIT_S, name="tests of CI")],
        # The wheel is built meanwhile.
        [lambda: run_tests(unit_tests, limit_s=UNIT_TESTS_LIMIT_S, name="unit tests that need no wheel")],
    )
    counts.add(run_tests([*ON_MORE_THAN_ALL_CORES, *WHEEL_TESTS], limit_s=UNIT_TESTS_LIMIT_S, on_wheel=True))
    counts.add(run_tests(ENGINE_TESTS, limit_s=ENGINE_TESTS_LIMIT_S))
    counts.add(run_cluster_tests())
    return counts


def main() -> None:
    """Runs every check and every test."""
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    end_steps_with_this_process()
    # A step that is stopped shall leave stacks, not core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.argv[1:]:
        counts = run_checks()
        counts.add(run_tests(sys.argv[1:], limit_s=ENGINE_TESTS_LIMIT_S))
    else:
        counts = run_all()
    counts.print_with_reasons()
    sys.exit(1 if counts.failed else 0)


if __name__ == "__main__":
    main()
