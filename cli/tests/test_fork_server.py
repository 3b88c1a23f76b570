"""The fork server step by step, in this process: what a fork does is played, and so is how the program ends."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sluice_cli.processes import die_with_parent, fork_server

LAUNCHER = 4321
REQUEST = {"module": "forked_program", "arguments": ["--x", "1"], "name": "engine-3", "log": "engine-3.log"}


class Exited(BaseException):
    """Stands for the end of the process."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process would have done to itself, in order."""
    made: list[Any] = []

    def end(status: int) -> None:
        made.append(("_exit", status))
        raise Exited(status)

    monkeypatch.setattr(os, "_exit", end)
    for module, name in ((os, "setsid"), (fork_server, "_redirect")):
        monkeypatch.setattr(module, name, lambda *arguments, name=name: made.append((name, *arguments)))
    monkeypatch.setattr(fork_server, "_await_adoption", lambda pid: made.append(("_await_adoption", pid)))
    monkeypatch.setattr(fork_server, "die_with_parent", lambda pid: made.append(("die_with_parent", pid)))
    monkeypatch.setattr(signal, "signal", lambda number, handler: made.append(("signal", number, handler)))
    return made


def play_forks(monkeypatch: pytest.MonkeyPatch, calls: list[Any], *answers: int, said: str = "") -> None:
    pending = list(answers)
    for name in ("close", "write", "waitpid"):
        monkeypatch.setattr(os, name, lambda *arguments, name=name: calls.append((name, *arguments)))
    monkeypatch.setattr(os, "fork", lambda: pending.pop(0))
    monkeypatch.setattr(os, "pipe", lambda: (10, 11))
    monkeypatch.setattr(os, "fdopen", lambda descriptor: io.StringIO(said if descriptor == 10 else ""))
    monkeypatch.setattr(fork_server, "_become", lambda request, pid: os._exit(100 + (request, pid).count(LAUNCHER)))


def test_the_parent_learns_the_second_forks_id_and_reaps_the_first(monkeypatch, calls) -> None:
    play_forks(monkeypatch, calls, 77, said="88")
    assert fork_server.fork_program(REQUEST, LAUNCHER) == 88
    assert calls == [("close", 11), ("waitpid", 77, 0)]


def test_the_first_fork_tells_the_seconds_id_and_ends(monkeypatch, calls) -> None:
    play_forks(monkeypatch, calls, 0, 88)
    with pytest.raises(Exited):
        fork_server.fork_program(REQUEST, LAUNCHER)
    assert calls == [("write", 11, b"88"), ("_exit", 0)]


def test_the_second_fork_becomes_the_program_without_the_pipe(monkeypatch, calls) -> None:
    play_forks(monkeypatch, calls, 0, 0)
    with pytest.raises(Exited) as caught:
        fork_server.fork_program(REQUEST, LAUNCHER)
    assert caught.value.status == 101
    assert calls[:2] == [("close", 10), ("close", 11)]


PROGRAMS = {
    "ends": ("print(sys.argv[1:], __name__)", 0, "['--x', '1'] __main__\n", ""),
    "exits with a number": ("sys.exit(5)", 5, "", ""),
    "exits with nothing": ("sys.exit()", 0, "", ""),
    "exits with a word": ("sys.exit('no such model')", 1, "", "no such model\n"),
    "exits with an object": ("sys.exit([1])", 1, "", ""),
    "fails": ("print('so far'); 1 / 0", 1, "so far\n", "ZeroDivisionError: division by zero\n"),
    "is interrupted": ("raise KeyboardInterrupt", 1, "", "KeyboardInterrupt\n"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fork_becomes_the_program_and_ends_as_it_does(name, monkeypatch, calls, tmp_path: Path) -> None:
    body, status, output, errors = PROGRAMS[name]
    (tmp_path / "forked_program.py").write_text(f"import sys\n{body}\n")
    comm = tmp_path / "comm"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fork_server, "Path", lambda path: comm if path == "/proc/self/comm" else tmp_path)
    monkeypatch.setattr(sys, "argv", ["server"])
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    # pytest has a hook of its own.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(Exited) as caught:
        fork_server._become(REQUEST, LAUNCHER)
    assert caught.value.status == status
    assert calls == [
        ("setsid",),
        ("_redirect", "engine-3.log"),
        ("_await_adoption", LAUNCHER),
        ("die_with_parent", LAUNCHER),
        ("signal", signal.SIGINT, signal.SIG_DFL),
        ("signal", signal.SIGTERM, signal.SIG_DFL),
        ("_exit", status),
    ]
    assert comm.read_text() == "engine-3"
    assert out.getvalue() == output
    assert err.getvalue().endswith(errors)
    assert bool(err.getvalue()) == bool(errors)


def test_the_programs_output_is_written_out_before_its_end(monkeypatch, calls, tmp_path: Path) -> None:
    monkeypatch.setattr(fork_server, "Path", lambda path: tmp_path / "comm")
    monkeypatch.setattr(sys, "argv", ["server"])
    for name in ("stdout", "stderr"):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "flush", lambda name=name: calls.append(("flush", name)), raising=False)
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(Exited):
        fork_server._become({**REQUEST, "module": "keyword"}, LAUNCHER)
    assert calls[-3:] == [("flush", "stdout"), ("flush", "stderr"), ("_exit", 0)]


def test_output_goes_to_the_end_of_the_log_and_there_is_no_input(tmp_path: Path) -> None:
    log = tmp_path / "log"
    saved = [os.dup(descriptor) for descriptor in range(3)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    mask = os.umask(0)
    try:
        for _ in range(2):
            fork_server._redirect(str(log))
            os.write(1, b"out ")
            os.write(2, b"err ")
            read = os.read(0, 1)
    finally:
        os.umask(mask)
        for descriptor, copy in enumerate(saved):
            os.dup2(copy, descriptor)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for copy in saved:
        os.close(copy)
    assert (read, log.read_text()) == (b"", "out err out err ")
    assert stat.S_IMODE(log.stat().st_mode) == 0o644


def test_a_fork_waits_until_the_launcher_is_its_parent(monkeypatch) -> None:
    parents, now_s = [1, 1, LAUNCHER, 1], [0.0]
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", now_s.append)
    fork_server._await_adoption(LAUNCHER)
    assert parents == [1]
    assert now_s[1:] == [0.001, 0.001]


def test_a_fork_waits_five_seconds_for_the_launcher_and_no_longer(monkeypatch) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        assert seconds == 0.001
        now_s += 0.5

    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", sleep)
    fork_server._await_adoption(LAUNCHER)
    assert now_s == 105.0


def serve(monkeypatch: pytest.MonkeyPatch, *modules: str, num_threads: int = 1) -> list[Any]:
    """Runs the command line against two requests; returns the answers, and what was forked."""
    forked: list[Any] = []

    def fork(request: dict[str, Any], launcher_pid: int) -> int:
        forked.append((request, launcher_pid))
        return 700 + len(forked)

    class Tasks:
        def __init__(self, path: str) -> None:
            assert path == "/proc/self/task"

        def iterdir(self) -> Any:
            return iter(range(num_threads))

    out = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["fork_server", str(LAUNCHER), *modules])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{json.dumps(REQUEST)}\n{json.dumps({'module': 'b'})}\n"))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(fork_server, "fork_program", fork)
    monkeypatch.setattr(fork_server, "Path", Tasks)
    collected: list[str] = []
    monkeypatch.setattr(fork_server.gc, "collect", lambda: collected.append("collect"))
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: collected.append("freeze"))
    fork_server.main()
    assert collected == ["collect", "freeze"]
    assert out.getvalue().endswith("\n")
    return [*map(json.loads, out.getvalue().splitlines()), *forked]


def test_the_server_imports_says_that_it_is_ready_and_forks_what_it_is_asked_for(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    sys.modules.pop("colorsys", None)
    assert serve(monkeypatch, "colorsys") == [
        {"is_ready": True},
        {"pid": 701},
        {"pid": 702},
        (REQUEST, LAUNCHER),
        ({"module": "b"}, LAUNCHER),
    ]
    assert "colorsys" in sys.modules
    # Defaults, which the user's own settings win over.
    assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_LOGGING_LEVEL"]) == ("1", "DEBUG")


def test_the_server_logs_little_unless_it_is_told_to(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    serve(monkeypatch)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_LOGGING_LEVEL"]) == ("3", "WARNING")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")


def test_a_server_with_threads_does_not_fork(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    with pytest.raises(SystemExit, match=r"^the imports started 2 threads, which a fork would lose$"):
        serve(monkeypatch, num_threads=3)


class PlayedLibrary:
    def __init__(self, answer: int) -> None:
        self.answer, self.asked = answer, []

    def prctl(self, *arguments: int) -> int:
        self.asked.append(arguments)
        return self.answer


def play_library(monkeypatch: pytest.MonkeyPatch, answer: int) -> PlayedLibrary:
    library = PlayedLibrary(answer)

    def load(name: None, *, use_errno: bool) -> PlayedLibrary:
        assert name is None
        assert use_errno
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EPERM)
    return library


def test_the_kernel_is_asked_to_kill_a_child_with_its_parent(monkeypatch, calls) -> None:
    library = play_library(monkeypatch, 0)
    die_with_parent.die_with_parent(os.getppid())
    # prctl(2): PR_SET_PDEATHSIG is 1.
    assert library.asked == [(1, signal.SIGKILL, 0, 0, 0)]
    assert calls == []


def test_a_child_whose_parent_has_ended_ends_too(monkeypatch, calls) -> None:
    play_library(monkeypatch, 0)
    with pytest.raises(Exited):
        die_with_parent.die_with_parent(os.getppid() + 1)
    assert calls == [("_exit", 1)]


def test_a_kernel_that_refuses_is_an_error(monkeypatch, calls) -> None:
    play_library(monkeypatch, -1)
    with pytest.raises(PermissionError, match="prctl"):
        die_with_parent.die_with_parent(os.getppid())
    assert calls == []


def test_the_small_program_becomes_the_real_one(monkeypatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["die_with_parent.py", "4321", "python", "-m", "sluice_engine"])
    monkeypatch.setattr(die_with_parent, "die_with_parent", made.append)
    monkeypatch.setattr(os, "execvp", lambda *arguments: made.append(arguments))
    die_with_parent.main()
    assert made == [4321, ("python", ["python", "-m", "sluice_engine"])]
