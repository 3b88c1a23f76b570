"""Steps of CI end: at their limit, and when a test hangs or is skipped where it should not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from limited_runs import Counts, read_report, run_limited, run_side_by_side

ROOT = Path(__file__).parents[2]
OPTIONS = ["-p", "conftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", str(ROOT / "pyproject.toml")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos/tests'}:{ROOT / '.ci'}"}
SLEEP = "import threading\ndef stand_here(): threading.Event().wait()\nstand_here()"
NUM_CHILDREN = 8
# The children hold the output open, as what a test leaves behind does.
LEAVE_CHILDREN = f"""
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-S", "-c", {SLEEP!r}]) for _ in range({NUM_CHILDREN})]
print(*[child.pid for child in children], flush=True)
for child in children:
    child.wait()
"""
RUN_PYTEST = f"""
from pathlib import Path
import limited_runs
counts = limited_runs.run_pytest({OPTIONS!r} + ["--rootdir=.", "."], limit_s=LIMIT_S, folder=Path(), name="NAME")
counts.print_with_reasons()
"""
HANG = """
import threading
import pytest

def hang():
    threading.Event().wait()

@pytest.fixture
def resource():
    yield
    hang()

def test_before():
    pass

def test_failing_and_hanging_in_teardown(resource):
    assert False

def test_after():
    pass
"""
# Two steps run at once, and a third comes after the first of them, which is ended first. Each writes its line in one
# piece, so that the two do not mingle.
THREE_STEPS = f"""
import os, sys
import limited_runs

def run(*command):
    limited_runs.run_limited(command, limit_s=600, environment=dict(os.environ))
    return limited_runs.Counts()

limited_runs.end_steps_with_this_process()
sleep = (sys.executable, "-S", "-c", "import os; os.write(1, b'runs\\\\n')\\n" + {SLEEP!r})
limited_runs.run_side_by_side([lambda: run(*sleep), lambda: run("touch", "third")], [lambda: run(*sleep)])
"""
SKIP = """
import pytest

@pytest.mark.skip(reason="no reason")
def test_skipped():
    pass

def test_run():
    pass
"""
SKIP_FILE = 'import pytest\npytest.importorskip("no_such_module")'


def test_a_step_that_sleeps_ends_at_its_limit_with_its_children_and_their_stacks(tmp_path: Path, capfd) -> None:
    with (tmp_path / "output").open("wb") as output:
        status = run_limited(
            [sys.executable, "-S", "-c", LEAVE_CHILDREN], limit_s=20, environment=dict(os.environ), stdout=output
        )
    assert status == -signal.SIGABRT
    printed = capfd.readouterr()
    assert "STOPPED at its limit of 20 s" in printed.out
    # Each prints its stack whole: two at once would mingle their lines.
    assert len(re.findall(r'^  File "<string>", line 2 in stand_here$', printed.err, re.MULTILINE)) == NUM_CHILDREN
    for child in (tmp_path / "output").read_text().split():
        while Path(f"/proc/{child}").exists() and ") Z " not in Path(f"/proc/{child}/stat").read_text():
            time.sleep(0.01)


def test_a_step_within_its_limit_keeps_its_exit_status() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(7)"]
    assert run_limited(command, limit_s=600, environment=dict(os.environ)) == 7


def test_no_step_begins_once_sigterm_ends_those_that_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", THREE_STEPS]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = [process.stdout.readline() for _ in range(2)]
        process.terminate()
    assert printed == ["runs\n", "runs\n"]
    assert process.returncode == 1
    assert not (tmp_path / "third").exists()


def run(folder: Path, tests: str, limit_s: float, name: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests)
    program = RUN_PYTEST.replace("LIMIT_S", str(limit_s)).replace("NAME", name)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def test_a_run_that_hangs_names_its_test_and_counts_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, HANG.replace("    assert False", "    hang()"), 30)
    assert "tests that had begun and not ended:\ntest_it.py::test_failing_and_hanging_in_teardown" in done.stdout
    assert done.stdout.endswith("0 passed, 1 failed, 0 skipped\n")
    assert "in hang" in done.stderr


def test_a_failing_test_that_hangs_in_its_teardown_times_out(tmp_path: Path) -> None:
    done = run(tmp_path, HANG.replace("def test_failing", "@pytest.mark.timeout(2)\ndef test_failing"), 600)
    assert "Timeout (>2.0s)" in done.stdout
    assert "failed  test_it.test_failing_and_hanging_in_teardown: assert False (test_it.py:" in done.stdout
    # The failure of the test, and the error of its teardown.
    assert done.stdout.endswith("2 passed, 2 failed, 0 skipped\n")


@pytest.mark.parametrize(
    ("tests", "reason", "counts"),
    [
        (SKIP, "no reason", "1 passed, 1 failed, 0 skipped"),
        (SKIP_FILE, "could not import 'no_such_module'", "0 passed, 1 failed, 0 skipped"),
    ],
    ids=["test", "file"],
)
def test_an_unexpected_skip_fails(tmp_path: Path, tests: str, reason: str, counts: str) -> None:
    done = run(tmp_path, tests, 600)
    assert f"unexpected skip: {reason}" in done.stdout
    assert done.stdout.endswith(f"{counts}\n")


def test_an_expected_skip_is_counted_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "engine_image/tests"
    folder.mkdir(parents=True)
    skip = SKIP.replace("no reason", "this machine has RDMA devices")
    (folder / "test_rdma_preflight.py").write_text(skip)
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, "--rootdir=.", ".", f"--junitxml={report}"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    assert [skip.rpartition(": ")[2] for skip in read_report(report).skips] == ["this machine has RDMA devices"]


def test_lanes_run_at_once_their_steps_one_after_the_other_and_all_count() -> None:
    at_once = threading.Barrier(3, timeout=10)
    running: list[str] = []

    def run_step(lane: str, counts: Counts) -> Counts:
        assert lane not in running
        running.append(lane)
        at_once.wait()
        running.remove(lane)
        at_once.wait()
        return counts

    lanes = {
        "a": [Counts(passed=2, failed=1), Counts(passed=1)],
        "b": [Counts(passed=3, skips=["why"]), Counts()],
        "c": [Counts(), Counts(failures=["a"])],
    }
    total = run_side_by_side(
        *([lambda lane=lane, step=step: run_step(lane, step) for step in steps] for lane, steps in lanes.items())
    )
    assert total == Counts(passed=6, failed=1, skips=["why"], failures=["a"])


def test_a_step_among_others_prints_all_at_its_end_under_its_name(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_passing():\n    pass", 600, name="the step")
    assert re.search(
        r"^\..*\n1 passed in .*\nended   the step \(\d+ s\)\n1 passed, 0 failed, 0 skipped\n$", done.stdout
    )
    failed = run(tmp_path, "def test_failing():\n    assert False", 600, name="the step")
    assert "1 failed in" in failed.stdout.partition("ended   the step")[0]
