"""Starts engines by forking them off a process that has imported vLLM; a ``Spawner`` like any other.

The fork server only saves time: if anything is wrong with it, the engine is started as a process of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import TYPE_CHECKING, Any

import psutil

from sluice_cli.processes import die_with_parent
from sluice_cli.processes.child_processes import ChildProcess, LaunchSpec, PidfdChild, full_environment, spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Imports and nothing else; a loaded machine may take minutes.
READY_TIMEOUT_S = 300.0
FORK_TIMEOUT_S = 30.0
# What an engine imports; the worker and the model are imported in its EngineCore.
ENGINE_MODULES = (
    "sluice_engine.lifecycle",
    "sluice_engine.scheduling.scheduler",
    "sluice_engine.kv_transfer.nixl_connector",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)


class ForkServerError(Exception):
    """The fork server cannot be used; the message says why."""


class ForkSpawner:
    """Starts programs as forks.

    Args:
        modules: What the fork server imports.
        log: Where the fork server writes.
        report: Takes a line for people.
    """

    def __init__(self, modules: tuple[str, ...], log: Path, report: Callable[[str], None]) -> None:
        self._modules = modules
        self._log = log
        self._report = report
        self._server: Process | None = None
        self._environment: Mapping[str, str] = {}
        self._lock = asyncio.Lock()
        self._pids: set[int] = set()
        self._is_usable = True

    async def __call__(self, launch: LaunchSpec) -> ChildProcess:
        """Starts a program as a fork, or as a process of its own where that fails."""
        python, option, module, *arguments = launch.command
        if not self._is_usable or (python, option) != ("python", "-m"):
            return await spawn(launch)
        request = {"module": module, "arguments": arguments, "name": launch.log.stem, "log": str(launch.log)}
        async with self._lock:
            try:
                return await self._fork(request, launch)
            except (ForkServerError, OSError, TimeoutError) as error:
                self._is_usable = False
                await self._end_server()
                self._report(f"engines start without the fork server: {error}; see {self._log}")
        return await spawn(launch)

    async def close(self) -> None:
        """Ends the fork server."""
        await self._end_server()

    async def _fork(self, request: dict[str, Any], launch: LaunchSpec) -> ChildProcess:
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        server = await self._get_server(launch)
        if server.stdin is None:
            raise ForkServerError("it has no input")
        server.stdin.write(json.dumps(request).encode() + b"\n")
        answer = await self._read(server, FORK_TIMEOUT_S)
        self._reap_orphans()
        child = PidfdChild(answer["pid"])
        self._pids.add(child.pid)
        return child

    async def _get_server(self, launch: LaunchSpec) -> Process:
        """The fork server; a new one where it has ended, or was started with another environment."""
        if self._server and self._server.returncode is None and self._environment == launch.environment:
            return self._server
        await self._end_server()
        _become_subreaper()
        with self._log.open("ab") as output:
            self._server = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())),
                *(sys.executable, "-m", "sluice_cli.processes.fork_server", str(os.getpid()), *self._modules),
                env=full_environment(launch),
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._environment = launch.environment
        await self._read(self._server, READY_TIMEOUT_S)
        return self._server

    async def _read(self, server: Process, timeout_s: float) -> dict[str, Any]:
        if server.stdout is None:
            raise ForkServerError("it has no output")
        # Libraries print to the standard output while they are imported; answers are JSON objects.
        async with asyncio.timeout(timeout_s):
            while line := await server.stdout.readline():
                if line.startswith(b"{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        raise ForkServerError("it has ended")

    async def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        if server.returncode is None:
            server.kill()
        await server.wait()

    def _reap_orphans(self) -> None:
        """Reaps what killed engines left: a subreaper is the parent of all orphans below it."""
        for process in psutil.Process().children():
            is_engine = process.pid in self._pids
            if not is_engine and process.status() == psutil.STATUS_ZOMBIE and os.getsid(process.pid) in self._pids:
                os.waitpid(process.pid, os.WNOHANG)


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
