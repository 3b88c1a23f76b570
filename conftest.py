"""What holds for the tests of every part."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness_faults
import hypothesis
import pytest
from limited_runs import RUNNING_TESTS

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

TIMEOUT = pytest.StashKey[Any]()
# Skips that may happen, by file and reason. Any other one fails.
EXPECTED_SKIPS = {
    (".ci/tests/test_workflows.py", "there is no Go to build actionlint with"),
    ("core/tests/test_decode_counts.py", "a compiled class has no interpreted subclass"),
    ("core/tests/test_ecoserve.py", "a compiled class has no interpreted subclass"),
    ("core/tests/test_prefill_queue.py", "a compiled class has no interpreted subclass"),
    ("e2e/kube/test_model_sources.py", "the node's containerd mounts no images"),
    ("engine_image/tests/test_rdma_preflight.py", "this machine has RDMA devices"),
}

# How long a machine takes for an example depends on what else it does, which is no property.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Listens to what the product and its libraries log, from the first test to the last."""
    watcher = harness_faults.LogWatcher()
    logging.getLogger().addHandler(watcher)
    config.add_cleanup(lambda: logging.getLogger().removeHandler(watcher))
    if RUNNING_TESTS in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunningTests(Path(os.environ[RUNNING_TESTS])))


@pytest.fixture(autouse=True)
def _no_harness_fault() -> Iterator[None]:
    """Fails a test in which a harness noticed a fault, whatever the product made of it."""
    yield
    harness_faults.check()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run whose last fixtures left a fault."""
    if faults := harness_faults.take():
        print("after the last test:", *faults, sep="\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


class RunningTests:
    """Keeps the tests that have begun and not ended in a file, which CI prints at a step's limit.

    Args:
        file: The file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, None] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Adds a test."""
        self._tests[nodeid] = None
        self._file.write_text("\n".join(self._tests))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Takes a test away."""
        self._tests.pop(nodeid, None)
        self._file.write_text("\n".join(self._tests))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Keeps a test's time-out for its teardown."""
    item.stash[TIMEOUT] = settings


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Sets the time-out anew: pytest-timeout takes it back once a test has failed, and a teardown can hang too."""
    if TIMEOUT in item.stash and not item.config.getoption("usepdb"):
        item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[TIMEOUT])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes a failure of an unexpected skip."""
    report = yield
    return refuse_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Makes an error of a file that is skipped unexpectedly."""
    report = yield
    return refuse_skip(report)


def refuse_skip(report: Any) -> Any:
    """Turns the report of a skip that the table does not have into that of a failure."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if (report.nodeid.split("::")[0], reason) not in EXPECTED_SKIPS:
            report.outcome = "failed"
            report.longrepr = f"unexpected skip: {reason}; conftest.py has the expected ones"
    return report
