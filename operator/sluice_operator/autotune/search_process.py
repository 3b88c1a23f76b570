"""Runs a search in a process of its own, which is killed when it takes too long or is not wanted any more."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable

from sluice_operator.autotune.search_messages import SearchRequest, SearchResult

RunSearch = Callable[[SearchRequest], Awaitable[SearchResult]]

# Of the whole operator: searches compute without a pause.
MAX_SEARCHES = 2
# A search may take so long, and so much more for each engine.
LIMIT_S = 60.0
LIMIT_PER_ENGINE_S = 5.0
MAX_LIMIT_S = 600.0
MAX_ERROR_CHARACTERS = 500
COMMAND = (sys.executable, "-m", "sluice_operator.autotune.search")


class SearchError(Exception):
    """A search found nothing; the message says why, and what to do."""


class SearchRunner:
    """Asks questions, a few at a time.

    Args:
        command: Reads a question from standard input and writes the answer to standard output.
    """

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._slots = asyncio.Semaphore(MAX_SEARCHES)

    async def run(self, request: SearchRequest) -> SearchResult:
        """Asks one question; whoever cancels this kills the search.

        Raises:
            SearchError: No answer came of it.
        """
        async with self._slots:
            return await self._run(request)

    async def _run(self, request: SearchRequest) -> SearchResult:
        pipe = asyncio.subprocess.PIPE
        try:
            # A terminal's Ctrl-C is for the launcher, which ends the search itself.
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise SearchError(f"the search did not start: {error}") from error
        limit_s = min(LIMIT_S + LIMIT_PER_ENGINE_S * request.constraints.replicas, MAX_LIMIT_S)
        try:
            async with asyncio.timeout(limit_s):
                output, errors = await process.communicate(request.to_json().encode())
        except TimeoutError:
            raise SearchError(
                f"the search took more than {limit_s:.0f} s and was ended; narrow autotune.bounds"
            ) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode != 0:
            last = (errors.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            raise SearchError(f"the search failed: {last[:MAX_ERROR_CHARACTERS]}")
        try:
            return SearchResult.from_json(output.decode())
        except ValueError as error:
            raise SearchError(f"the search's answer cannot be read: {error}") from error
