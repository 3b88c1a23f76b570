"""The routers under test behind one interface: the stub that each needs, its version, how it starts.

Sluice gets emulated engines over the engine stream, and a plan. The peers get the same engines as HTTP servers.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Literal, Protocol

import c_programs
import grpc
import peers
from started_programs import ProgramStartError, StartedProgram, answers, run_program

from sluice.v1 import control_pb2, control_pb2_grpc, plan_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

START_TIMEOUT_S = 60.0
SERVED_MODEL = "tiny"
CLUSTER_UID = "benchmark"
STRATEGIES = ("aggregated", "taichi")
# Arguments that turn off Sluice's text work (raw pieces), once the router has a setting for benchmarks.
RAW_PIECES_ARGUMENTS: tuple[str, ...] = ()

Backend = Literal["http", "attach"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Ports, folders and core of a trial.

    Args:
        port: First port of the router.
        engine_port: Port of the first engine.
        num_engines: Number of engines.
        chunk_tokens: Chunk size of the engines.
        model: Folder of the model.
        folder: Folder for logs and configuration.
        core: Core that the router is pinned to, or several as taskset writes them.
    """

    port: int
    engine_port: int
    num_engines: int
    chunk_tokens: int
    model: Path
    folder: Path
    core: int | str

    def engine_addresses(self) -> list[str]:
        """host:port of each engine."""
        return [f"127.0.0.1:{self.engine_port + index}" for index in range(self.num_engines)]


class Contestant(Protocol):
    """A router under test."""

    @property
    def name(self) -> str:
        """For tables."""

    @property
    def backend(self) -> Backend:
        """The stub that it needs."""

    @property
    def is_router(self) -> bool:
        """False for the stub and the load alone."""

    @property
    def load_arguments(self) -> tuple[str, ...]:
        """Arguments of the load generator that the router needs of its clients."""

    def version(self) -> str:
        """Its version."""

    def run(self, site: Site) -> AbstractContextManager[StartedProgram | None]:
        """Runs the router; the context begins when it is ready.

        Raises:
            ProgramStartError: The router does not start.
        """


@dataclass(frozen=True, slots=True)
class NoRouter:
    """The stub and the load alone: their own CPU time, and the latency that they add."""

    backend: Backend
    is_router: bool = False
    load_arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For tables."""
        return "no router, HTTP" if self.backend == "http" else "no router, gRPC"

    def version(self) -> str:
        """There is none."""
        return ""

    @contextmanager
    def run(self, site: Site) -> Iterator[StartedProgram | None]:
        """Runs nothing."""
        del site
        yield None


@dataclass(frozen=True, slots=True)
class Nginx:
    """One worker of nginx: round robin, no buffering, keep-alive connections, no log."""

    program: Path
    name: str = "nginx"
    backend: Backend = "http"
    is_router: bool = True
    load_arguments: tuple[str, ...] = ()

    def version(self) -> str:
        """Its version."""
        return peers.read_nginx_version(self.program)

    @contextmanager
    def run(self, site: Site) -> Iterator[StartedProgram | None]:
        """Runs it."""
        folder = site.folder / "nginx"
        folder.mkdir(parents=True, exist_ok=True)
        configuration = folder / "nginx.conf"
        configuration.write_text(_nginx_configuration(site, folder))
        command: list[str | Path] = [self.program, "-p", folder, "-c", configuration, "-e", folder / "error.log"]
        with run_program(command, core=site.core, log=folder / "nginx.log") as program:
            program.wait_until(lambda: answers(site.port, "/health"), timeout_s=START_TIMEOUT_S)
            yield program


def _nginx_configuration(site: Site, folder: Path) -> str:
    servers = "\n".join(f"        server {address};" for address in site.engine_addresses())
    temporary = "\n".join(
        f"    {kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 16384; }}
http {{
{temporary}
    access_log off;
    tcp_nodelay on;
    keepalive_timeout 75s;
    keepalive_requests 1000000;
    client_body_buffer_size 128k;
    upstream engines {{
{servers}
        keepalive 8192;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{site.port} backlog=4096;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 300s;
        }}
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class RustRouter:
    """vllm-router, or SGLang's router, which it was made from; round robin.

    Args:
        name: Its distribution.
        command: Program and arguments that start it alone.
    """

    name: str
    command: tuple[str | Path, ...]
    backend: Backend = "http"
    is_router: bool = True
    load_arguments: tuple[str, ...] = ()

    def version(self) -> str:
        """Reads the version that ``peers.py`` installed."""
        return peers.VERSIONS[self.name]

    @contextmanager
    def run(self, site: Site) -> Iterator[StartedProgram | None]:
        """Runs it."""
        command: list[str | Path] = [
            *(*self.command, "--host", "127.0.0.1", "--port", str(site.port)),
            *("--worker-urls", *(f"http://{address}" for address in site.engine_addresses())),
            *("--policy", "round_robin", "--log-level", "error"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.port + 1)),
            *("--max-concurrent-requests", "20000", "--worker-startup-check-interval", "1"),
        ]
        with run_program(command, core=site.core, log=site.folder / f"{self.name}.log") as program:
            program.wait_until(lambda: answers(site.port, "/v1/models"), timeout_s=START_TIMEOUT_S)
            yield program


@dataclass(frozen=True, slots=True)
class Sluice:
    """Sluice's router.

    Args:
        workers: Processes that share its ports.
        strategy: One of ``STRATEGIES``.
        is_text_off: Pass raw pieces, once the router has a setting for it.
        checkout: Root of the checkout that it runs from, or the folder of an installed wheel.
        split: File for the CPU of its stages (``traced_router.py``); None: it runs as it is.
        tracing: Variables that turn OpenTelemetry traces on.
        guards: Arguments that turn TLS or API keys on.
        load_arguments: Arguments of the load generator that go with them.
    """

    workers: int = 1
    strategy: str = "aggregated"
    is_text_off: bool = False
    checkout: Path = c_programs.REPOSITORY
    split: Path | None = None
    tracing: Mapping[str, str] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    load_arguments: tuple[str, ...] = ()
    backend: Backend = "attach"
    is_router: bool = True

    @property
    def name(self) -> str:
        """For tables."""
        if self.workers > 1:
            return f"sluice, {self.workers} workers"
        return "sluice, text off" if self.is_text_off else "sluice"

    def version(self) -> str:
        """Reads the commit, and whether the tree differs from it."""
        command = ["git", "-C", str(self.checkout), "describe", "--always", "--dirty"]
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
        version = answer.stdout.strip() or metadata.version("sluice-serve")
        return f"{version}, traced" if self.tracing else version

    @contextmanager
    def run(self, site: Site) -> Iterator[StartedProgram | None]:
        """Runs the router and sends it a plan."""
        engines = site.folder / "engines.json"
        site.folder.mkdir(parents=True, exist_ok=True)
        engines.write_text(json.dumps(site.engine_addresses()))
        # A shell is the parent of all, so that they are measured and stopped as one program.
        commands = " & ".join(shlex.join(self._render_command(worker, site, engines)) for worker in range(self.workers))
        with run_program(
            ["sh", "-c", f"{commands} & wait"],
            core=site.core,
            log=site.folder / "sluice.log",
            environment=self._environment(),
        ) as started:
            plan = make_plan(site, self.strategy)
            plan.num_routers = self.workers
            for worker in range(self.workers):
                with grpc.insecure_channel(f"127.0.0.1:{_control_port(site, worker)}") as channel:
                    control = control_pb2_grpc.ControlStub(channel)
                    started.wait_until(partial(_apply, control, plan), timeout_s=START_TIMEOUT_S)
                    started.wait_until(partial(_is_ready, control, site.num_engines), timeout_s=START_TIMEOUT_S)
            yield started

    def _render_command(self, worker: int, site: Site, engines: Path) -> list[str]:
        entry = ["-m", "sluice_router"]
        if self.split is not None:
            entry = [str(c_programs.SOURCES / "traced_router.py"), "--split", str(self.split)]
        control_port = _control_port(site, worker)
        return [
            *(sys.executable, *entry, "--host", "127.0.0.1", "--http-port", str(site.port)),
            *("--grpc-port", str(site.port + 1), "--control-port", str(control_port)),
            *("--metrics-port", str(control_port + 1)),
            *(("--share-ports", "true") if self.workers > 1 else ()),
            *("--model", str(site.model), "--engines", f"file:{engines}"),
            *(*(RAW_PIECES_ARGUMENTS if self.is_text_off else ()), *self.guards),
        ]

    def _environment(self) -> dict[str, str]:
        """Names the checkout's parts; first what the caller names, such as the compiled core, for our own."""
        if (self.checkout / "sluice_router").is_dir():
            return {"PYTHONPATH": str(self.checkout), **self.tracing}
        parts = [str(self.checkout / part) for part in ("core", "protos", "router")]
        own = [os.environ.get("PYTHONPATH", "")] if self.checkout == c_programs.REPOSITORY else []
        return {"PYTHONPATH": os.pathsep.join([*filter(None, own), *parts]), **self.tracing}


def _control_port(site: Site, worker: int) -> int:
    return site.port + 2 + 2 * worker


def make_plan(site: Site, strategy: str) -> plan_pb2.Plan:
    """Makes the plan of the emulated engines.

    Args:
        site: Ports and number of the engines.
        strategy: ``aggregated``: all engines are alike, and decode in place. ``taichi``: a quarter is P-heavy. The
            others have a quarter of its chunk size. Every answer whose prefill ran on a P-heavy engine moves once.
    """
    num_prefill_heavy = site.num_engines // 4 if strategy == "taichi" else 0
    # With equal chunk sizes, roles would have no effect.
    decode_heavy_tokens = site.chunk_tokens // 4 if num_prefill_heavy else site.chunk_tokens
    return plan_pb2.Plan(
        cluster_uid=CLUSTER_UID,
        generation=1,
        strategy=strategy,
        slo_classes=[plan_pb2.SloClass(ttft_milliseconds=2000, tpot_milliseconds=200)],
        attainment_percent=90,
        engines=[
            plan_pb2.EnginePlan(
                engine_id=f"stub-{index}",
                role=plan_pb2.ROLE_PREFILL_HEAVY if index < num_prefill_heavy else plan_pb2.ROLE_DECODE_HEAVY,
                chunk_size_tokens=site.chunk_tokens if index < num_prefill_heavy else decode_heavy_tokens,
            )
            for index in range(site.num_engines)
        ],
        unnamed_chunk_size_tokens=decode_heavy_tokens,
        served_model_name=SERVED_MODEL,
        num_routers=1,
    )


def _apply(control: control_pb2_grpc.ControlStub, plan: plan_pb2.Plan) -> bool:
    try:
        answer = control.ApplyPlan(control_pb2.ApplyPlanRequest(plan=plan), timeout=2)
    except grpc.RpcError as error:
        if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            return False
        raise
    if not answer.is_applied:
        raise ProgramStartError(f"the router refuses the plan: {answer.error}")
    return True


def _is_ready(control: control_pb2_grpc.ControlStub, num_engines: int) -> bool:
    status = control.GetStatus(control_pb2.GetStatusRequest(), timeout=2)
    num_ready = sum(engine.state == control_pb2.ENGINE_STATE_READY for engine in status.engines)
    return status.is_ready and num_ready == num_engines and status.acknowledged_generation == 1
