"""The files of a cluster, and what other commands read from them and do with its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import trustme
from certificate_files import make_files, mount_secret
from click.testing import CliRunner

from sluice.v1 import control_pb2, plan_pb2
from sluice_cli.local_cluster import status_reader
from sluice_cli.local_cluster.cluster_directory import (
    AlreadyRunningError,
    ClusterDirectory,
    NoClusterError,
    ProcessRecord,
    choose_cluster,
    read_start_time,
)
from sluice_cli.local_cluster.cluster_status import make_cluster_status
from sluice_cli.local_cluster.detached_start import _is_ready
from sluice_cli.local_cluster.shutdown import kill_leftovers, stop_cluster
from sluice_cli.local_cluster.status_reader import read_cluster_status
from sluice_cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A launcher that drains for a long time at the first SIGTERM, and says by which signal it ended.
LAUNCHER = """
import pathlib, signal, sys, threading
count, ended = 0, threading.Event()
def take(*_):
    global count
    count += 1
    if count == int(sys.argv[2]):
        ended.set()
signal.signal(signal.SIGTERM, take)
print("runs", flush=True)
while not ended.wait(0.05):
    pass
pathlib.Path(sys.argv[1]).write_text(str(count))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python programs; whatever still runs at the end of the test is killed."""
    started = []

    def start_program(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True))
        return started[-1]

    yield start_program
    for process in started:
        process.kill()
        process.communicate()


def record(name: str, pid: int | None, kind: str = "engine", **fields: object) -> ProcessRecord:
    return ProcessRecord(name=name, kind=kind, pid=pid, started=read_start_time(pid), **fields)


def make_running(name: str, home: Path) -> ClusterDirectory:
    """A cluster whose launcher is this very process."""
    directory = ClusterDirectory(name, home)
    directory.path.mkdir(parents=True)
    directory.write_launcher("starting", manifest="m.yaml", model="tiny", error="none yet")
    return directory


def test_a_cluster_has_one_launcher_at_a_time(tmp_path: Path) -> None:
    first = make_running("a", tmp_path)
    first.lock()
    with pytest.raises(AlreadyRunningError, match=rf"cluster a already runs \(process {os.getpid()}\)"):
        ClusterDirectory("a", tmp_path).lock()
    ClusterDirectory("b", tmp_path).lock()
    # Launchers of every version lock the same file, which nobody else may open.
    assert oct((first.path / "lock").stat().st_mode)[-3:] == "600"


def test_facts_of_a_launcher_stay_until_the_next_one_starts(tmp_path: Path) -> None:
    directory = make_running("a", tmp_path)
    directory.write_launcher("ready", url="http://x")
    launcher = directory.read_launcher()
    assert launcher is not None
    assert {name: launcher[1][name] for name in ("phase", "manifest", "model", "url")} == {
        "phase": "ready",
        "manifest": "m.yaml",
        "model": "tiny",
        "url": "http://x",
    }
    directory.write_launcher("starting", manifest="other.yaml")
    launcher = directory.read_launcher()
    assert launcher is not None
    assert launcher[1].keys() == {"phase", "manifest", "pid", "started"}


def test_a_command_is_about_the_only_cluster_that_runs_or_the_one_that_is_named(tmp_path: Path) -> None:
    ClusterDirectory("stopped", tmp_path).path.mkdir(parents=True)
    with pytest.raises(NoClusterError, match=r"running in .*: none"):
        choose_cluster(None, tmp_path)
    make_running("a", tmp_path)
    assert choose_cluster(None, tmp_path).name == "a"
    make_running("b", tmp_path)
    with pytest.raises(NoClusterError, match=r"one cluster must run, or be named with --cluster; .*: a, b"):
        choose_cluster(None, tmp_path)
    assert choose_cluster("stopped", tmp_path).name == "stopped"
    with pytest.raises(NoClusterError, match="no cluster 'c'"):
        choose_cluster("c", tmp_path)


def test_records_of_another_version_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    directory = make_running("a", tmp_path)
    (directory.path / "processes.json").write_text('[{"name": "x", "kind": "engine", "pid": 1, "colour": "red"}]')
    assert directory.read_processes() == [ProcessRecord(name="x", kind="engine", pid=1)]
    (directory.path / "processes.json").unlink()
    assert directory.read_processes() == []


async def test_a_cluster_whose_launcher_has_ended_is_stopped_and_has_no_processes(tmp_path: Path) -> None:
    directory = make_running("a", tmp_path)
    directory.write_processes([record("engine-0", os.getpid(), num_starts=1)])
    directory.write_autotune({"reason": "Tuned", "message": "so it is"})
    directory.write_launcher("ready", rollout="rolled back")
    status = await read_cluster_status(directory)
    assert (status.phase, len(status.engines), status.model) == ("ready", 1, "tiny")
    assert status.rollout == "rolled back"
    assert status.autotune is not None
    facts = directory._read("launcher.json")
    directory._write("launcher.json", {**facts, "started": facts["started"] - 60})
    status = await read_cluster_status(directory)
    assert (status.phase, status.engines, status.autotune, status.manifest) == ("stopped", (), None, "m.yaml")
    assert status.rollout == ""


@pytest.mark.parametrize("peer", ["none", "ours", "unreadable"])
async def test_a_router_is_asked_as_its_control_port_is_secured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    asked: list[tuple[str, Any]] = []

    async def fetch(address: str, tls: Any = None) -> control_pb2.GetStatusResponse:
        asked.append((address, tls))
        return control_pb2.GetStatusResponse(router_id="r", is_ready=True)

    monkeypatch.setattr(status_reader, "fetch_status", fetch)
    folder = tmp_path / "peers"
    if peer == "ours":
        mount_secret(folder, make_files(trustme.CA(), "control"))
    directory = make_running("a", tmp_path)
    router = record("router-0", os.getpid(), num_starts=1)
    secured = {} if peer == "none" else {"peer_tls": str(folder), "peer_name": "control"}
    ports = {"http": 1, "grpc": 2, "control": 4321, "metrics": 4}
    directory.write_processes([replace(router, kind="router", ports=ports, **secured)])
    status = await read_cluster_status(directory)
    assert len(status.routers) == 1, "it is shown all the same"
    if peer == "unreadable":
        assert asked == []
        return
    ((address, tls),) = asked
    assert address == "127.0.0.1:4321"
    assert (tls is not None) == (peer == "ours")
    if tls is not None:
        assert (tls.server_name, tls.certificates.folder) == ("control", folder)


def test_a_cluster_in_the_background_serves_when_its_own_launcher_says_so(tmp_path: Path) -> None:
    directory = ClusterDirectory("a", tmp_path)
    assert not _is_ready(directory, os.getpid())
    make_running("a", tmp_path)
    assert not _is_ready(directory, os.getpid())
    directory.write_launcher("ready")
    assert _is_ready(directory, os.getpid())
    assert not _is_ready(directory, os.getppid())


STATES = {
    "waits for its first start": ((None, 0), None, "ready", ("starting", "", 0)),
    "runs and is not known": ((1, 1), None, "ready", ("starting", "", 0)),
    "waits for a restart": ((None, 2), "READY", "ready", ("restarting", "", 1)),
    "ends with the cluster": ((None, 1), None, "stopping", ("stopping", "", 0)),
    "connects": ((1, 1), "CONNECTING", "ready", ("starting", "D-heavy", 0)),
    "serves": ((1, 3), "READY", "ready", ("ready", "D-heavy", 2)),
    "drains": ((1, 1), "DRAINING", "ready", ("draining", "D-heavy", 0)),
    "is lost": ((1, 1), "LOST", "ready", ("lost", "D-heavy", 0)),
}


@pytest.mark.parametrize(("process", "state", "phase", "shown"), STATES.values(), ids=STATES)
def test_the_state_of_an_engine_is_that_of_its_process_and_of_its_link(
    process: tuple[int | None, int], state: str | None, phase: str, shown: tuple[str, str, int]
) -> None:
    pid, num_starts = process
    answer = control_pb2.GetStatusResponse(is_ready=True)
    if state:
        answer.engines.add(
            engine_id="e", role=plan_pb2.ROLE_DECODE_HEAVY, state=getattr(control_pb2, f"ENGINE_STATE_{state}")
        )
    status = make_cluster_status(
        name="c",
        phase=phase,
        manifest="m",
        model="tiny",
        processes=[
            ProcessRecord(name="e", kind="engine", pid=pid, num_starts=num_starts),
            ProcessRecord(name="r", kind="router", pid=1, num_starts=1, ports={"http": 1, "metrics": 2}),
        ],
        statuses={"r": answer},
    )
    (engine,) = status.engines
    assert (engine.state, engine.role, engine.num_restarts) == shown
    assert status.is_ready == (shown[0] == "ready")


def test_a_cluster_is_ready_when_every_engine_has_a_role_and_every_router_serves() -> None:
    def is_ready(*, has_role: bool = True, serves: bool = True, answers: bool = True) -> bool:
        role = plan_pb2.ROLE_PREFILL_HEAVY if has_role else plan_pb2.ROLE_UNSPECIFIED
        engine = control_pb2.EngineStatus(engine_id="e", role=role, state=control_pb2.ENGINE_STATE_READY)
        statuses = {
            "r0": control_pb2.GetStatusResponse(is_ready=True, engines=[engine]),
            "r1": control_pb2.GetStatusResponse(is_ready=serves) if answers else None,
        }
        processes = [
            ProcessRecord(name=name, kind="router", pid=1, ports={"http": 1, "metrics": 2}) for name in statuses
        ]
        engines = [ProcessRecord(name="e", kind="engine", pid=1)]
        return make_cluster_status(
            name="c", phase="", manifest="", model="", processes=[*processes, *engines], statuses=statuses
        ).is_ready

    assert is_ready()
    assert not is_ready(has_role=False)
    assert not is_ready(serves=False)
    assert not is_ready(answers=False)


@pytest.mark.parametrize("is_hurried", [False, True])
def test_down_waits_for_the_drain_or_sends_a_second_signal_and_kills_what_is_left(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], *, is_hurried: bool
) -> None:
    end = tmp_path / "end"
    launcher = start(LAUNCHER, str(end), "2" if is_hurried else "1")
    left = start("input()")
    assert launcher.stdout
    assert launcher.stdout.readline() == "runs\n"
    directory = make_running("a", tmp_path)
    facts = directory._read("launcher.json")
    directory._write("launcher.json", {**facts, "pid": launcher.pid, "started": read_start_time(launcher.pid)})
    directory.write_processes([record("engine-0", left.pid)])
    lines: list[str] = []
    stop_cluster(directory, is_hurried=is_hurried, report=lines.append)
    assert end.read_text() == ("2" if is_hurried else "1")
    assert not psutil.pid_exists(left.pid)
    assert left.wait() in (-signal.SIGKILL, 0)
    assert lines == ["stopping a", f"engine-0 still runs (process {left.pid}); it is killed", "a has stopped"]
    lines.clear()
    stop_cluster(directory, is_hurried=False, report=lines.append)
    assert lines == ["a does not run", "a has stopped"]


def test_down_stops_the_cluster_that_is_meant(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        launcher = start(LAUNCHER, str(tmp_path / name), "1")
        assert launcher.stdout
        assert launcher.stdout.readline() == "runs\n"
        directory = make_running(name, Path(".sluice"))
        facts = directory._read("launcher.json")
        directory._write("launcher.json", {**facts, "pid": launcher.pid, "started": read_start_time(launcher.pid)})
    ambiguous = CliRunner().invoke(cli, ["down"])
    assert (ambiguous.exit_code, "a, b, c" in ambiguous.output) == (1, True)
    assert CliRunner().invoke(cli, ["down", "--cluster", "b"]).exit_code == 0
    assert [(tmp_path / name).exists() for name in ("a", "b", "c")] == [False, True, False]
    assert CliRunner().invoke(cli, ["down", "--all"]).exit_code == 0
    assert all((tmp_path / name).exists() for name in ("a", "b", "c"))


def test_a_launcher_kills_what_an_earlier_one_left_behind(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    directory, left = make_running("a", tmp_path), start("input()")
    other = record("engine-1", os.getpid())
    directory.write_processes(
        [
            record("engine-0", left.pid),
            # Its number is another process's by now.
            ProcessRecord(name=other.name, kind=other.kind, pid=other.pid, started=(other.started or 0) - 60),
        ]
    )
    lines: list[str] = []
    kill_leftovers(directory, lines.append)
    assert not psutil.pid_exists(left.pid)
    assert lines == [f"engine-0 of an earlier launcher still runs (process {left.pid}); it is killed"]
    assert left.wait() in (-signal.SIGKILL, 0)
