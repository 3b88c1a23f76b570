"""What tests of real engines rely on."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING

import core_processes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import pytest

LIMIT = 1


def report(connection: Connection) -> None:
    threads_of_parent = [path.name for path in Path(f"/proc/{os.getppid()}/task").iterdir()]
    connection.send((len(threads_of_parent), os.environ["SLUICE_TEST_PORT"], LIMIT))


def test_a_core_is_forked_from_a_process_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_TEST_PORT", "4711")
    ours, theirs = multiprocessing.Pipe()
    context = core_processes.CoreContext({f"{__name__}.LIMIT": 2})
    process = context.Process(target=report, name="EngineCore", kwargs={"connection": theirs})
    process.start()
    assert ours.poll(60)
    assert ours.recv() == (1, "4711", 2)
    process.join()
