"""The process of a search: its limits, both sides of it, and how it is killed when it is late or cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sluice_core.sim.sim_setup import GC_THRESHOLD
from sluice_core.strategies import STRATEGIES
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult

if TYPE_CHECKING:
    from sluice_operator.autotune.search_constraints import SearchConstraints

RunSearch = Callable[[SearchRequest], Awaitable[SearchResult]]
_Result = TypeVar("_Result")

# At a time, for the whole operator: each search keeps one core busy.
MAX_SEARCHES = 2
# Time limit of a search, and the addition per engine.
LIMIT_S = 60.0
LIMIT_PER_ENGINE_S = 5.0
MAX_LIMIT_S = 600.0
MAX_ERROR_CHARACTERS = 500
COMMAND = (sys.executable, "-m", "sluice_operator.autotune.search")
# Of the processor, beside engines and routers that share it.
NICENESS = 10
MAX_CPU_S = 600
# Of the memory, where the container's own limit leaves as much beside the operator (find_memory_limit).
MAX_MEMORY_BYTES = 384 << 20
# With less a search fails in odd places: its imports alone take a third of this.
MIN_MEMORY_BYTES = 64 << 20
# What the operator itself may take: 259 MiB with 500 clusters (docs/measurements/operator.md), and room to grow.
OPERATOR_MEMORY_BYTES = 304 << 20
# The container's limit, by cgroup v2; no such file outside of containers.
MEMORY_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")


class SearchError(Exception):
    """A search found nothing; the message says why, and what to do."""


class SearchRunner:
    """Runs searches, a few at a time.

    Args:
        command: Reads a request for sliders from standard input and writes the result to standard output.
    """

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._slots = asyncio.Semaphore(MAX_SEARCHES)

    async def run(self, request: SearchRequest) -> SearchResult:
        """Runs one search for sliders; cancelling this kills it.

        Raises:
            SearchError: There is no result.
        """
        limit_s = compute_limit_s(request.constraints)
        return await self.call(self._command, request.to_json(), limit_s, SearchResult.from_json)

    async def call(
        self, command: tuple[str, ...], text: str, limit_s: float, parse: Callable[[str], _Result]
    ) -> _Result:
        """Has a program answer a request; cancelling this kills it.

        Args:
            command: Reads the request from standard input and writes the result to standard output.
            text: The request.
            limit_s: Longest time.
            parse: Reads the result.

        Raises:
            SearchError: There is no result.
        """
        async with self._slots:
            output = await _run_program(command, text, limit_s)
        try:
            return parse(output)
        except ValueError as error:
            raise SearchError(f"the search's result cannot be read: {error}") from error


def compute_limit_s(constraints: SearchConstraints) -> float:
    """Computes the time limit of a search: one that chooses the strategy has that of a search for each of them."""
    num_searches = len(STRATEGIES) if constraints.chooses_strategy else 1
    return min(num_searches * (LIMIT_S + LIMIT_PER_ENGINE_S * constraints.replicas), MAX_LIMIT_S)


async def _run_program(command: tuple[str, ...], text: str, limit_s: float) -> str:
    pipe = asyncio.subprocess.PIPE
    try:
        # In a session of its own, a Ctrl-C reaches the launcher only, which ends the search itself.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise SearchError(f"the search did not start: {error}") from error
    try:
        async with asyncio.timeout(limit_s):
            output, errors = await process.communicate(text.encode())
    except TimeoutError:
        raise SearchError(f"the search took more than {limit_s:.0f} s and was ended; narrow autotune.bounds") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        last = (errors.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise SearchError(f"the search failed: {last[:MAX_ERROR_CHARACTERS]}")
    return output.decode()


def find_memory_limit(file: Path = MEMORY_LIMIT_FILE) -> int:
    """Finds how much memory one search may take, so that all of them and the operator fit into the container.

    Args:
        file: Says the container's limit, in bytes or as ``max``; it need not exist.

    Returns:
        The limit in bytes; below zero where the operator alone may fill the container.
    """
    try:
        container_bytes = int(file.read_text())
    except (OSError, ValueError):
        return MAX_MEMORY_BYTES
    return min(MAX_MEMORY_BYTES, (container_bytes - OPERATOR_MEMORY_BYTES) // MAX_SEARCHES)


def serve_request(answer: Callable[[str], str]) -> None:
    """Answers one request on standard input, at low priority and within limits; the program's only work.

    Args:
        answer: From the request's text to the result's.

    Raises:
        SystemExit: Says what the request asks for that there is not, or that there is too little memory.
    """
    os.nice(NICENESS)
    memory_bytes = find_memory_limit()
    if memory_bytes < MIN_MEMORY_BYTES:
        needed = (OPERATOR_MEMORY_BYTES + MAX_SEARCHES * MIN_MEMORY_BYTES) >> 20
        raise SystemExit(f"the operator's memory limit leaves no room for it; raise it to {needed} MiB or more")
    # The parent ends a late search; this limit holds when the parent was killed.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    # Without it, the kernel would end every process of the container.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    gc.set_threshold(GC_THRESHOLD)
    try:
        result = answer(sys.stdin.read())
    except ValueError as error:
        raise SystemExit(str(error)) from error
    except MemoryError as error:
        advice = "narrow autotune.bounds"
        if memory_bytes < MAX_MEMORY_BYTES:
            advice += ", or raise the operator's memory limit"
        raise SystemExit(f"it needs more than {memory_bytes >> 20} MiB; {advice}") from error
    print(result)
