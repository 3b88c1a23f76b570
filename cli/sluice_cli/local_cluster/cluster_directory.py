"""The files of a local cluster, under ``.sluice/clusters/<name>/``, by which other commands find it.

launcher.json    the launcher: pid, start time, phase, manifest
processes.json   its processes: pids, start times, ports, logs
engines.json     addresses of the engines, read again by routers when it changes
plan.json        the plan in force, read by routers at a cold start
autotune.json    what the tuner decided and recommends; absent while it is off
cluster.json     uid and generation, kept over restarts so that generations only grow
logs/            one file per process
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sluice_cli.errors import CommandError

SLUICE_HOME = Path(".sluice")
# Clocks that /proc and time.time() read differ by up to a tick.
START_TIME_TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process of the cluster.

    Args:
        name: ``engine-0``, ``router-0``, ``launcher``.
        kind: ``engine``, ``router`` or ``launcher``.
        pid: Process id; None while it waits for a restart.
        started: Its start time, in seconds since the epoch; tells it from a later process of the same pid.
        num_starts: How often it was started.
        ports: Ports by purpose.
        log: Its output.
        refusal: Why it cannot start; empty: it can, as far as is known.
        front_tls: Folder of the certificate that clients see; empty: nothing is encrypted.
        needs_key: Requests must carry a key.
        peer_tls: Folder of the certificate of its control port; empty: nothing is encrypted.
        peer_name: Name that this certificate is for.
    """

    name: str
    kind: str
    pid: int | None
    started: float | None = None
    num_starts: int = 0
    ports: dict[str, int] = field(default_factory=dict)
    log: str = ""
    refusal: str = ""
    front_tls: str = ""
    needs_key: bool = False
    peer_tls: str = ""
    peer_name: str = ""

    def find(self) -> psutil.Process | None:
        """The running process of this record, unless it has ended."""
        if self.pid is None or self.started is None:
            return None
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started) < START_TIME_TOLERANCE_S
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def read_start_time(pid: int | None) -> float | None:
    """Start time of a process in seconds since the epoch; None when it has ended."""
    try:
        return psutil.Process(pid).create_time() if pid else None
    except psutil.NoSuchProcess:
        return None


class AlreadyRunningError(CommandError):
    """The cluster already has a launcher."""


class NoClusterError(CommandError):
    """No running cluster, or several, where one is needed."""


class ClusterDirectory:
    """The files of one cluster.

    Args:
        name: The cluster's name.
        home: Sluice's directory.
    """

    def __init__(self, name: str, home: Path = SLUICE_HOME) -> None:
        self.name = name
        self.path = home.absolute() / "clusters" / name
        self.engines_file = self.path / "engines.json"
        self.plan_file = self.path / "plan.json"
        self._lock: int | None = None

    def lock(self) -> None:
        """Makes this process the cluster's launcher, until it ends.

        Raises:
            AlreadyRunningError: Another one is.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            launcher = self.read_launcher()
            owner = f" (process {launcher[0].pid})" if launcher else ""
            raise AlreadyRunningError(
                f"cluster {self.name} already runs{owner}; `sluice status` shows it, `sluice down` stops it"
            ) from error

    def log_path(self, name: str) -> Path:
        """Log file of a process."""
        return self.path / "logs" / f"{name}.log"

    def next_generation(self) -> tuple[str, int]:
        """Counts the generation up, and returns the cluster's uid with it."""
        stored = self._read("cluster.json") or {"uid": str(uuid.uuid4()), "generation": 0}
        stored["generation"] += 1
        self._write("cluster.json", stored)
        return stored["uid"], stored["generation"]

    def write_engines(self, addresses: list[str]) -> None:
        """Tells routers where the engines are."""
        self._write("engines.json", addresses)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Stores the plan for cold starts."""
        self._write("plan.json", plan)

    def write_autotune(self, tuning: dict[str, Any] | None) -> None:
        """Stores what the tuner decided; None: it is off."""
        if tuning is None:
            (self.path / "autotune.json").unlink(missing_ok=True)
        else:
            self._write("autotune.json", tuning)

    def read_autotune(self) -> dict[str, Any] | None:
        """Reads what the tuner decided last; None: it is off."""
        tuning: dict[str, Any] | None = self._read("autotune.json")
        return tuning

    def write_processes(self, processes: list[ProcessRecord]) -> None:
        """Stores the processes."""
        self._write("processes.json", [asdict(process) for process in processes])

    def read_processes(self) -> list[ProcessRecord]:
        """The processes last stored."""
        known = ProcessRecord.__dataclass_fields__.keys()  # another version of this program may have written them
        records = self._read("processes.json") or []
        return [ProcessRecord(**{name: record[name] for name in known & record.keys()}) for record in records]

    def write_launcher(self, phase: str, **facts: Any) -> None:
        """Stores this process as the launcher.

        Args:
            phase: ``starting``, ``ready``, ``stopping`` or ``failed``.
            facts: Further facts: ``manifest``, ``url``, ``error``.
        """
        facts = (self._read("launcher.json") or {} if phase != "starting" else {}) | facts
        facts |= {"pid": os.getpid(), "started": read_start_time(os.getpid()), "phase": phase}
        self._write("launcher.json", facts)

    def read_launcher(self) -> tuple[ProcessRecord, dict[str, Any]] | None:
        """The launcher last stored, running or not, and its facts."""
        facts = self._read("launcher.json")
        if not facts:
            return None
        return ProcessRecord(name="launcher", kind="launcher", pid=facts["pid"], started=facts["started"]), facts

    def is_running(self) -> bool:
        """True while its launcher runs."""
        launcher = self.read_launcher()
        return launcher is not None and launcher[0].find() is not None

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: Any) -> None:
        # Whole or not at all: others read these files while we write them.
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(self.path / name)


def find_clusters(home: Path = SLUICE_HOME) -> list[ClusterDirectory]:
    """The clusters that have ever run here, by name."""
    return [ClusterDirectory(path.name, home) for path in sorted((home.absolute() / "clusters").glob("*/"))]


def choose_cluster(name: str | None, home: Path = SLUICE_HOME) -> ClusterDirectory:
    """Finds the cluster that a command is about.

    Args:
        name: Its name; None: the only one that runs.
        home: Sluice's directory.

    Raises:
        NoClusterError: There is none of this name; or, without a name, not exactly one runs.
    """
    clusters = find_clusters(home)
    if name:
        chosen = [cluster for cluster in clusters if cluster.name == name]
        if not chosen:
            raise NoClusterError(f"no cluster {name!r} in {home.absolute()}")
        return chosen[0]
    running = [cluster for cluster in clusters if cluster.is_running()]
    if len(running) != 1:
        names = ", ".join(cluster.name for cluster in running) or "none"
        raise NoClusterError(f"one cluster must run, or be named with --cluster; running in {home.absolute()}: {names}")
    return running[0]
