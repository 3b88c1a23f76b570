"""The fork spawner with a fork server that is played: when it starts one, what it asks, and when it does without."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from sluice_cli.processes import fork_spawner
from sluice_cli.processes.child_processes import LaunchSpec
from sluice_cli.processes.fork_spawner import ForkSpawner

if TYPE_CHECKING:
    from pathlib import Path


class PlayedServer:
    """A fork server: it answers each line that it is sent with the next of its answers; None: it ends."""

    def __init__(self, *answers: bytes | None, has_pipes: bool = True) -> None:
        self.returncode: int | None = None
        self.answers, self.asked, self.made = list(answers), list[Any](), list[str]()
        self.stdin = self if has_pipes else None
        self.stdout = self

    def write(self, data: bytes) -> None:
        assert data.endswith(b"\n")
        self.asked.append(json.loads(data))

    async def readline(self) -> bytes:
        return self.answers.pop(0) or b""

    def kill(self) -> None:
        self.made.append("kill")
        self.returncode = -9

    async def wait(self) -> int:
        self.made.append("wait")
        return -9


class Play:
    """What a spawner does around its servers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path, *servers: PlayedServer) -> None:
        self.servers, self.started, self.lines = list(servers), list[Any](), list[str]()
        self.spawned: list[LaunchSpec] = []
        self.subreapers = 0

        async def execute(*command: str, **options: Any) -> PlayedServer:
            self.started.append((command, options))
            return self.servers.pop(0)

        async def spawn(launch: LaunchSpec) -> str:
            self.spawned.append(launch)
            return "a process of its own"

        def become() -> None:
            self.subreapers += 1

        monkeypatch.setattr(asyncio, "create_subprocess_exec", execute)
        monkeypatch.setattr(fork_spawner, "spawn", spawn)
        monkeypatch.setattr(fork_spawner, "_become_subreaper", become)
        monkeypatch.setattr(fork_spawner, "PidfdChild", PlayedChild)
        monkeypatch.setattr(psutil.Process, "children", lambda _process: self.children)
        self.children: list[Any] = []
        self.home = home
        self.spawner = ForkSpawner(("a.b", "c"), home / "server.log", self.lines.append)

    def launch(self, name: str, *arguments: str, **environment: str) -> LaunchSpec:
        command = ("python", "-m", "sluice_engine", *arguments)
        return LaunchSpec(command=command, environment=environment, log=self.home / "logs" / "deep" / f"{name}.log")


class PlayedChild:
    def __init__(self, pid: int) -> None:
        self.pid = pid


READY = b'{"is_ready": true}\n'


def answer(pid: int) -> bytes:
    return json.dumps({"pid": pid}).encode() + b"\n"


async def test_one_server_forks_all_engines_of_one_environment(monkeypatch, tmp_path) -> None:
    server = PlayedServer(b"a library says hello\n", READY, answer(7), b"and more\n", answer(8))
    play = Play(monkeypatch, tmp_path, server)
    children = [await play.spawner(play.launch(name, "--x", "1", A="a")) for name in ("engine-0", "engine-1")]
    assert [child.pid for child in children] == [7, 8]
    assert server.asked == [
        {
            "module": "sluice_engine",
            "arguments": ["--x", "1"],
            "name": f"engine-{number}",
            "log": str(tmp_path / "logs" / "deep" / f"engine-{number}.log"),
        }
        for number in range(2)
    ]
    assert (tmp_path / "logs" / "deep").is_dir()
    ((command, options),) = play.started
    assert command[:3] == (sys.executable, "-I", "-S")
    assert command[3].endswith("die_with_parent.py")
    assert command[4:] == (
        str(os.getpid()),
        sys.executable,
        "-m",
        "sluice_cli.processes.fork_server",
        str(os.getpid()),
        "a.b",
        "c",
    )
    environment = options.pop("env")
    assert environment["A"] == "a"
    assert options.pop("stderr").name == str(tmp_path / "server.log")
    assert options == {"stdin": PIPE, "stdout": PIPE, "start_new_session": True}
    assert (play.subreapers, play.lines, play.spawned) == (1, [], [])
    await play.spawner.close()
    assert server.made == ["kill", "wait"]
    await play.spawner.close()
    assert server.made == ["kill", "wait"]


async def test_a_server_that_has_ended_or_has_another_environment_is_replaced(monkeypatch, tmp_path) -> None:
    first, second, third = (PlayedServer(READY, answer(pid), answer(pid + 1)) for pid in (10, 20, 30))
    play = Play(monkeypatch, tmp_path, first, second, third)
    assert (await play.spawner(play.launch("a", A="a"))).pid == 10
    assert (await play.spawner(play.launch("b", A="b"))).pid == 20
    assert first.made == ["kill", "wait"]
    second.returncode = 1
    assert (await play.spawner(play.launch("c", A="b"))).pid == 30
    # It is awaited, and not killed again.
    assert second.made == ["wait"]
    assert (await play.spawner(play.launch("d", A="b"))).pid == 31
    assert len(play.started) == 3


async def test_a_command_of_another_form_is_a_process_of_its_own(monkeypatch, tmp_path) -> None:
    play = Play(monkeypatch, tmp_path)
    for command in (("python", "-c", "pass"), ("sleep", "-m", "x")):
        launch = LaunchSpec(command=command, log=tmp_path / "log")
        assert await play.spawner(launch) == "a process of its own"
    assert [launch.command[0] for launch in play.spawned] == ["python", "sleep"]
    assert not play.started


FAULTS = {
    "it ends at once": (PlayedServer(b"Traceback\n", None), "it has ended"),
    "it ends at a request": (PlayedServer(READY, None), "it has ended"),
    "it has no input": (PlayedServer(READY, has_pipes=False), "it has no input"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_without_a_server_engines_start_by_themselves_from_then_on(name, monkeypatch, tmp_path) -> None:
    server, reason = FAULTS[name]
    play = Play(monkeypatch, tmp_path, server)
    launches = [play.launch("engine-0"), play.launch("engine-1")]
    for launch in launches:
        assert await play.spawner(launch) == "a process of its own"
    assert play.spawned == launches
    assert play.lines == [f"engines start without the fork server: {reason}; see {tmp_path / 'server.log'}"]
    # It is not tried again, and nothing of it is left.
    assert len(play.started) == 1
    assert server.made == ["kill", "wait"]


async def test_a_server_without_output_is_no_server(monkeypatch, tmp_path) -> None:
    server = PlayedServer()
    server.stdout = None
    play = Play(monkeypatch, tmp_path, server)
    assert await play.spawner(play.launch("engine-0")) == "a process of its own"
    assert "it has no output" in play.lines[0]


async def test_a_server_that_says_nothing_is_not_waited_for_for_ever(monkeypatch, tmp_path) -> None:
    class Silent(PlayedServer):
        async def readline(self) -> bytes:
            await asyncio.Event().wait()
            return b""

    monkeypatch.setattr(fork_spawner, "READY_TIMEOUT_S", 0.01)
    play = Play(monkeypatch, tmp_path, Silent())
    assert await play.spawner(play.launch("engine-0")) == "a process of its own"
    assert len(play.lines) == 1


async def test_what_killed_engines_left_is_reaped_and_nothing_else(monkeypatch, tmp_path) -> None:
    play = Play(monkeypatch, tmp_path, PlayedServer(READY, answer(7), answer(8)))
    reaped: list[tuple[int, int]] = []
    sessions = {7: 7, 100: 7, 101: 7, 102: 55}

    class Child:
        def __init__(self, pid: int, status: str) -> None:
            self.pid, self._status = pid, status

        def status(self) -> str:
            return self._status

    monkeypatch.setattr(os, "getsid", sessions.__getitem__)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: reaped.append((pid, options)))
    await play.spawner(play.launch("engine-0"))
    zombie, running = psutil.STATUS_ZOMBIE, psutil.STATUS_RUNNING
    play.children = [Child(7, zombie), Child(100, zombie), Child(101, running), Child(102, zombie)]
    await play.spawner(play.launch("engine-1"))
    # The engine itself is awaited by its owner; another session is not ours; what runs goes on.
    assert reaped == [(100, os.WNOHANG)]


def test_the_kernel_makes_this_process_the_parent_of_orphans(monkeypatch) -> None:
    asked: list[tuple[int, ...]] = []

    class Library:
        answer = 0

        def prctl(self, *arguments: int) -> int:
            asked.append(arguments)
            return self.answer

    library = Library()
    monkeypatch.setattr(fork_spawner.ctypes, "CDLL", lambda _name, *, use_errno: library if use_errno else None)
    fork_spawner._become_subreaper()
    # prctl(2): PR_SET_CHILD_SUBREAPER is 36.
    assert asked == [(36, 1, 0, 0, 0)]
    library.answer = -1
    with pytest.raises(OSError, match="prctl"):
        fork_spawner._become_subreaper()
