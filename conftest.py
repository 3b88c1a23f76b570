"""What holds for the tests of every part."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import harness_faults
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure(config: pytest.Config) -> None:
    """Listens to what the product and its libraries log, from the first test to the last."""
    watcher = harness_faults.LogWatcher()
    logging.getLogger().addHandler(watcher)
    config.add_cleanup(lambda: logging.getLogger().removeHandler(watcher))


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
