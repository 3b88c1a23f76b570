"""Children: they die with their parent, whatever kills it, and take what they started along."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from worker_ports import NAMED_PORTS

from sluice_cli.local_cluster.cluster_directory import ProcessRecord, read_start_time
from sluice_cli.processes import die_with_parent
from sluice_cli.processes.child_processes import LaunchSpec, full_environment, spawn
from sluice_cli.processes.fork_spawner import ForkSpawner
from sluice_cli.processes.ports import PortAllocator, PortError

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT, PORTS = NAMED_PORTS[30], NAMED_PORTS[31:41]


async def test_a_child_runs_in_a_session_of_its_own_with_its_environment_and_log(tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['A'], os.getsid(0) == os.getpid()); sys.exit(7)"
    launch = LaunchSpec(command=("python", "-c", script), environment={"A": "x"}, log=tmp_path / "logs" / "child.log")
    child = await spawn(launch)
    assert await child.wait() == 7
    assert launch.log.read_text() == "x True\n"


async def test_a_child_finds_our_python_first_and_then_what_we_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/here:/there")
    launch = LaunchSpec(command=(sys.executable, "-c", "import os; print(os.environ['PATH'])"), log=tmp_path / "log")
    assert await (await spawn(launch)).wait() == 0
    assert launch.log.read_text() == f"{os.path.dirname(sys.executable)}:/here:/there\n"  # noqa: PTH120


def test_a_childs_environment_is_ours_and_the_launchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python prints is in the log at once, unless the launch says otherwise; nothing hides our Python."""
    own = os.path.dirname(sys.executable)  # noqa: PTH120
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("CHANGED", "1")
    launch = LaunchSpec(command=("x",), environment={"CHANGED": "2", "PATH": "/elsewhere"}, log=Path("log"))
    path = f"{own}:{os.defpath}"
    assert full_environment(launch) == {"KEPT": "1", "CHANGED": "2", "PYTHONUNBUFFERED": "1", "PATH": path}
    quiet = LaunchSpec(command=("x",), environment={"PYTHONUNBUFFERED": ""}, log=Path("log"))
    assert full_environment(quiet)["PYTHONUNBUFFERED"] == ""


async def test_kill_group_takes_along_what_the_child_started(tmp_path: Path) -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    child = await spawn(LaunchSpec(command=("python", "-c", script), log=tmp_path / "log"))
    grandchild = psutil.Process(int(wait_for_line(tmp_path / "log")))
    child.kill_group()
    assert await child.wait() == -signal.SIGKILL
    assert not psutil.wait_procs([grandchild], timeout=10)[1]


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from sluice_cli.processes.child_processes import LaunchSpec, spawn
async def main():
    child = await spawn(LaunchSpec(command=("sleep", "60"), log=pathlib.Path({str(tmp_path / "log")!r})))
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert not psutil.wait_procs([child], timeout=10)[1]


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    command = [sys.executable, die_with_parent.__file__, "1", "echo", "begun"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")


def wait_for_line(path: Path) -> str:
    for _ in range(10_000_000):
        if path.is_file() and path.read_text().endswith("\n"):
            return path.read_text()
    raise AssertionError(path)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that says what it sees; importable by the fork server."""
    (tmp_path / "forked_program.py").write_text(
        "import os, sys\n"
        "if __name__ == '__main__':\n"
        "    is_leader = os.getsid(0) == os.getpid()\n"
        # One write: two processes share the log, and print writes each of its words by itself where nothing buffers.
        '    line = f\'{sys.argv[1:]} {os.environ["A"]} {is_leader} {"preloaded" in sys.modules}\\n\'\n'
        "    os.write(1, line.encode())\n"
        "    sys.exit(5)\n"
    )
    (tmp_path / "preloaded.py").write_text("")
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


async def test_a_fork_runs_as_a_process_of_its_own_would(program: Path) -> None:
    lines: list[str] = []
    spawner = ForkSpawner(("preloaded",), program / "server.log", lines.append)
    log = program / "fork.log"
    launch = LaunchSpec(command=("python", "-m", "forked_program", "--x", "1"), environment={"A": "a"}, log=log)
    children = [await spawner(launch) for _ in range(2)]
    assert [await child.wait() for child in children] == [5, 5]
    assert log.read_text() == "['--x', '1'] a True True\n" * 2
    assert len({os.getpid(), *(child.pid for child in children)}) == 3
    await spawner.close()
    assert not lines


@pytest.mark.parametrize("module", ["threaded", "no_such_module"])
async def test_without_a_fork_server_programs_start_by_themselves(program: Path, module: str) -> None:
    lines: list[str] = []
    spawner = ForkSpawner((module,), program / "server.log", lines.append)
    launch = LaunchSpec(command=("python", "-m", "forked_program"), environment={"A": "a"}, log=program / "log")
    assert await (await spawner(launch)).wait() == 5
    assert launch.log.read_text() == "[] a True False\n"
    assert lines == [f"engines start without the fork server: it has ended; see {program / 'server.log'}"]


async def test_another_environment_gets_another_fork_server(program: Path) -> None:
    spawner = ForkSpawner(("preloaded",), program / "server.log", lambda line: None)
    for value in ("a", "b"):
        launch = LaunchSpec(command=("python", "-m", "forked_program"), environment={"A": value}, log=program / value)
        await (await spawner(launch)).wait()
        assert launch.log.read_text() == f"[] {value} True True\n"
    await spawner.close()


def test_two_launchers_never_choose_one_port(tmp_path: Path) -> None:
    first, second = PortAllocator(PORTS, directory=tmp_path), PortAllocator(PORTS, directory=tmp_path)
    chosen = [book.choose() for book in (first, second) for _ in range(5)]
    assert sorted(chosen) == list(PORTS)
    with pytest.raises(PortError, match=f"no port from {PORTS[0]} to {PORTS[-1]} is free"):
        first.choose()
    second.release(chosen[-1])
    assert first.choose() == chosen[-1]


def test_a_taken_port_is_named_with_its_owner_and_a_way_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", PORT)):
        book = PortAllocator(PORTS, directory=tmp_path)
        with pytest.raises(
            PortError, match=rf"port {PORT} \(the manifest\) is in use .*process {os.getpid()}.*; do this"
        ):
            book.take(PORT, "the manifest", "do this")


def test_a_record_finds_its_process_and_no_later_one_of_the_same_pid() -> None:
    started = read_start_time(os.getpid())
    assert started
    assert ProcessRecord(name="x", kind="engine", pid=os.getpid(), started=started).find()
    assert not ProcessRecord(name="x", kind="engine", pid=os.getpid(), started=started - 60).find()
    assert not ProcessRecord(name="x", kind="engine", pid=None).find()


def test_a_process_that_has_ended_and_waits_for_its_parent_is_not_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        assert child.stdin
        record = ProcessRecord(name="x", kind="engine", pid=child.pid, started=read_start_time(child.pid))
        assert record.find()
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not record.find()
