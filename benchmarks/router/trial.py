"""One trial: a stub, a router, a load, and the kernel's figures about them while the load's window was open.

The router has core 1 for itself; stub, generator and runner share core 0. A trial is void when it measures the machine
rather than the router: core 0 was nearly full, the stub fell behind, or other processes used the cores.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import c_programs
from load_generator import LoadResult, TrafficWorkload
from machine_usage import MachineUsage, Snapshot, find_tree, read_pss_bytes
from stamps import make_stamps
from started_programs import ProgramStartError, run_program
from stub_vocabulary import find_pieces, write_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from contestants import Backend, Contestant, Site

LOAD_CORE = 0
ROUTER_CORE = 1
MAX_LOAD_CORE_BUSY = 0.8
MAX_FOREIGN_CORES = 0.1
# A stub is late if the p99 of its gaps between tokens is above this number of steps.
MAX_LATE = 1.25
STUB_TIMEOUT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Results of a trial.

    Args:
        contestant: Name of the router.
        load: The generator's results.
        usage: Use of the machine in the window.
        idle_pss_bytes: Memory of the router before the load.
        pss_bytes: Memory of the router at the end of the window.
        void_reasons: Why the trial is void; empty if it is not.
    """

    contestant: str
    load: LoadResult
    usage: MachineUsage
    idle_pss_bytes: int
    pss_bytes: int
    void_reasons: tuple[str, ...]

    @property
    def cpu_us_per_token(self) -> float:
        """CPU time of the router per token that clients read, in microseconds.

        It divides rates, because the kernel's figures are read some milliseconds after the window opens and closes.
        """
        return self.usage.router_cores * 1e6 / self.tokens_per_s if self.load.tokens else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Tokens that clients read per second."""
        return self.load.tokens / self.load.seconds

    @property
    def requests_per_s(self) -> float:
        """Complete and correct answers per second."""
        return self.load.requests_finished / self.load.seconds

    @property
    def cpu_us_per_request(self) -> float:
        """CPU time of the router per answer, its tokens included, in microseconds."""
        return self.usage.router_cores * 1e6 / self.requests_per_s if self.load.requests_finished else float("nan")

    def as_json(self) -> dict[str, Any]:
        """Returns the values for the result file."""
        return {
            "contestant": self.contestant,
            "void_reasons": list(self.void_reasons),
            "cpu_us_per_token": self.cpu_us_per_token,
            "tokens_per_s": self.tokens_per_s,
            "router_cores": self.usage.router_cores,
            "router_cpu_s": self.usage.router_cpu_s,
            "core_busy": self.usage.core_busy,
            "foreign_cores": self.usage.foreign,
            "steal_cores": self.usage.steal,
            "idle_pss_bytes": self.idle_pss_bytes,
            "pss_bytes": self.pss_bytes,
            "load": dict(self.load.raw),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A router with engines and without clients.

    Args:
        usage: Use of the machine in the window.
        pss_bytes: Memory of the router.
    """

    usage: MachineUsage
    pss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files that stub and generator share.

    Args:
        pieces: The vocabulary.
        stamps: The table of stamps.
    """

    pieces: Path
    stamps: Path

    def arguments(self) -> list[str]:
        """Arguments of stubs and generators."""
        return ["--pieces", str(self.pieces), "--stamps", str(self.stamps)]


@contextmanager
def make_files(model: Path, max_tokens: int) -> Iterator[Files]:
    """Makes the shared files in memory, and removes them at the end.

    Args:
        model: Folder of the model with the vocabulary.
        max_tokens: Longest answer of the run.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=SHARED_MEMORY) as folder:
        files = Files(pieces=Path(folder) / "pieces", stamps=Path(folder) / "stamps")
        write_pieces(files.pieces, find_pieces(model))
        make_stamps(files.stamps, num_tokens=max_tokens)
        yield files


def run_trial(contestant: Contestant, workload: TrafficWorkload, site: Site, files: Files) -> Measurement:
    """Runs one trial.

    Args:
        contestant: The router.
        workload: The load and the engines.
        site: Ports, folder, cores.
        files: Shared files.

    Raises:
        ProgramStartError: The stub or the router does not start, or the load fails.
    """
    with _run_stub(contestant.backend, workload, site, files), contestant.run(site) as router:
        pid = router.pid if router is not None else None
        idle_pss = read_pss_bytes(find_tree(pid)) if pid is not None else 0
        command = _load_command(contestant, workload, site, files)
        with run_program(command, core=LOAD_CORE, log=site.folder / "load.log") as load:
            timeout_s = workload.warmup_s + workload.seconds + 30
            load.wait_until(lambda: load.has_printed("begin"), timeout_s=timeout_s)
            before = Snapshot.take(pid)
            load.wait_until(lambda: load.has_printed("end"), timeout_s=timeout_s)
            after = Snapshot.take(pid)
            pss = read_pss_bytes(find_tree(pid)) if pid is not None else 0
            load.wait_until(lambda: load.tail(1).startswith("{"), timeout_s=timeout_s)
            result = LoadResult.parse(load.tail(1))
        if router is not None and not router.is_alive():
            raise ProgramStartError(f"{contestant.name} died under the load:\n{router.tail()}")
    usage = MachineUsage.between(before, after)
    return Measurement(
        contestant=contestant.name,
        load=result,
        usage=usage,
        idle_pss_bytes=idle_pss,
        pss_bytes=pss,
        void_reasons=tuple(_find_void_reasons(workload, result, usage)),
    )


def run_idle(contestant: Contestant, workload: TrafficWorkload, site: Site, files: Files) -> Idle:
    """Measures a router without requests, over the workload's window.

    Raises:
        ProgramStartError: The stub or the router does not start.
    """
    with _run_stub(contestant.backend, workload, site, files), contestant.run(site) as router:
        if router is None:
            raise ProgramStartError(f"{contestant.name} has no process to measure")
        time.sleep(1.0)
        before = Snapshot.take(router.pid)
        time.sleep(workload.seconds)
        after = Snapshot.take(router.pid)
        return Idle(usage=MachineUsage.between(before, after), pss_bytes=read_pss_bytes(find_tree(router.pid)))


def summarize(found: Measurement) -> str:
    """Summarizes a trial in one line."""
    latency = found.load.token_latency
    parts = [
        f"{found.tokens_per_s:,.0f} tokens/s, router {found.usage.router_cores:.2f} core",
        f"added p50 {latency.p50_ms:.2f} p99 {latency.p99_ms:.2f} ms",
        f"core {LOAD_CORE} {found.usage.core_busy[LOAD_CORE]:.0%} busy, foreign {found.usage.foreign:.2f}",
    ]
    if found.load.num_errors:
        parts.append(f"{found.load.num_errors} errors ({found.load.first_error})")
    if found.void_reasons:
        parts.append("VOID: " + ", ".join(found.void_reasons))
    return "; ".join(parts)


@contextmanager
def _run_stub(backend: Backend, workload: TrafficWorkload, site: Site, files: Files) -> Iterator[None]:
    programs: dict[Backend, list[str | Path]] = {
        "http": [c_programs.build("http_stub")],
        "attach": [sys.executable, c_programs.SOURCES / "engine_stub.py", *workload.fault_arguments()],
    }
    command = [*programs[backend], "--port-base", str(site.engine_port), *workload.stub_arguments(), *files.arguments()]
    with run_program(command, core=LOAD_CORE, log=site.folder / f"{backend}-stub.log") as stub:
        stub.wait_until(lambda: stub.has_printed("ready"), timeout_s=STUB_TIMEOUT_S)
        yield
        if not stub.is_alive():
            raise ProgramStartError(f"the stub died:\n{stub.tail()}")


def _load_command(contestant: Contestant, workload: TrafficWorkload, site: Site, files: Files) -> list[str | Path]:
    if contestant.is_router:
        ports = ["--port", str(site.port)]
    elif contestant.backend == "http":
        ports = ["--port", str(site.engine_port), "--ports", str(site.num_engines)]
    else:
        return [
            *(sys.executable, c_programs.SOURCES / "attach_load.py", "--port-base", str(site.engine_port)),
            *("--engines", str(site.num_engines), "--concurrency", str(workload.concurrency)),
            *("--tokens", str(workload.num_tokens), "--prompt-tokens", str(workload.prompt_tokens)),
            *("--warmup-s", str(workload.warmup_s), "--seconds", str(workload.seconds), *files.arguments()),
        ]
    arguments = (*workload.load_arguments(), *contestant.load_arguments)
    return [c_programs.build("load"), *ports, *arguments, *files.arguments()]


def _find_void_reasons(workload: TrafficWorkload, result: LoadResult, usage: MachineUsage) -> Iterator[str]:
    if usage.core_busy[LOAD_CORE] > MAX_LOAD_CORE_BUSY:
        yield f"core {LOAD_CORE} {usage.core_busy[LOAD_CORE]:.0%} busy"
    if usage.foreign > MAX_FOREIGN_CORES:
        yield f"other processes used {usage.foreign:.2f} cores"
    if usage.steal > MAX_FOREIGN_CORES:
        yield f"the hypervisor took {usage.steal:.2f} cores"
    if result.sent_gap.p99_ms > MAX_LATE * workload.step_us / 1000 and not workload.faults:
        yield f"the stub was late: p99 of its steps {result.sent_gap.p99_ms:.1f} ms"
