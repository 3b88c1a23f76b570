"""The program from its first line to its exit status; what it starts is replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice_engine import __main__ as program
from sluice_engine import errors

REQUIRED = "engine-id=e port=1 metrics-port=2 kv-host=h kv-port=3 model=m max-batch-tokens=16"
ARGUMENTS = [f"--{argument}" for argument in REQUIRED.split()]


# A process of its own: it kills all children that it has.
LEAVING = """
import multiprocessing, threading
from sluice_engine import child_processes
child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
child.start()
print(child.pid, flush=True)
child_processes.leave(4)
"""


class Left(BaseException):
    """The process has ended."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the program does, in order."""
    done: list[Any] = []

    class Stop:
        def install(self) -> None:
            done.append("signals")

    class Refused:
        def __init__(self, arguments: list[str]) -> None:
            assert arguments == ARGUMENTS

        def wait(self, stop: Any) -> None:
            done.append(("wait", type(stop)))

        def keep(self, error: Exception, model: str) -> None:
            done.append(("keep", str(error), model))

    def leave(status: int) -> None:
        done.append(("leave", status))
        raise Left

    def run(settings: Any, stop: Any, log: Any) -> int:
        folder = Path(program.os.environ["UCX_LOG_FILE"]).parent
        done.append(("run", settings.engine_id, type(stop), folder.is_dir(), log.read()))
        return 5

    monkeypatch.setattr(program, "StopSignal", Stop)
    monkeypatch.setattr(program, "RefusedStart", Refused)
    monkeypatch.setattr(program, "leave", leave)
    monkeypatch.setattr(program.os, "environ", {})
    monkeypatch.setattr(program.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(program, "check_vllm_version", lambda: done.append("version"))
    monkeypatch.setattr(program, "check_model", lambda model, arguments: done.append(("model", model, arguments)))
    monkeypatch.setattr(program, "check_devices", lambda settings: done.append(("devices", settings.require_rdma)))
    monkeypatch.setattr(program, "write_termination_log", lambda message: done.append(("log", message)))
    monkeypatch.setitem(sys.modules, "sluice_engine.lifecycle", SimpleNamespace(run=run))
    return done


def test_an_engine_is_checked_before_it_starts_and_leaves_with_its_status(steps) -> None:
    with pytest.raises(Left):
        program.main(ARGUMENTS)
    stop = program.StopSignal
    checks = ["signals", ("wait", stop), "version", ("model", "m", ()), ("devices", False)]
    assert steps == [*checks, ("run", "e", stop, True, ""), ("leave", 5)]
    assert program.os.environ["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert program.os.environ["UCX_LOG_LEVEL"] == "info"


@pytest.mark.parametrize(
    ("check", "error", "status"),
    [
        ("check_vllm_version", errors.UnsupportedVllmError, 3),
        ("check_model", errors.ModelRefusedError, 7),
        ("check_devices", errors.RdmaError, 6),
    ],
)
def test_why_an_engine_does_not_start_is_said_where_the_pods_status_shows_it(
    steps, monkeypatch, capsys, check, error, status
) -> None:
    def refuse(*_settings: object) -> None:
        raise error("it\n  cannot be")

    monkeypatch.setattr(program, check, refuse)
    with pytest.raises(Left):
        program.main(ARGUMENTS)
    assert steps[-3:] == [("log", "it cannot be"), ("keep", "it\n  cannot be", "m"), ("leave", status)]
    assert "run" not in {step[0] for step in steps}
    assert capsys.readouterr().err == "sluice_engine: it cannot be\n"


def test_no_child_outlives_the_program(tmp_path) -> None:
    # A child that outlived it would hold a pipe open.
    with (tmp_path / "child").open("w") as output:
        done = subprocess.run([sys.executable, "-c", LEAVING], stdout=output, check=False)
    child = Path("/proc") / (tmp_path / "child").read_text().strip()
    assert (done.returncode, child.exists()) == (4, False)
