"""The three steps of ``sluice demo``, on real engines; every figure is measured while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.text import Text

from sluice_cli.demo.measurements import DemoTotals, make_placement_table, make_summary_table
from sluice_cli.demo.openai_client import CompletionStream, stream_completion
from sluice_cli.errors import CommandError
from sluice_cli.local_cluster.decision_log_client import fetch_decision_log
from sluice_cli.local_cluster.status_reader import read_cluster_status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
    from sluice_cli.local_cluster.cluster_status import ClusterStatus, EngineStatusRow

# Words of the prompts: the first request is short, the last needs several chunks on any engine.
PROMPT_WORDS = (4, 10, 20, 40, 80, 160, 240, 320)
SHORT_ANSWER_TOKENS = 48
# So long that a quick machine still decodes when the state has been read.
LONG_ANSWER_TOKENS = 1200
NUM_STREAMS_OVER_EDIT = 4
NUM_STREAMS_OVER_KILL = 6
NEW_CHUNK_TOKENS = 256
STEP_TIMEOUT_S = 30.0
RESTART_TIMEOUT_S = 120.0


class DemoError(CommandError):
    """A step of the demo did not happen."""


class DemoScenario:
    """The steps, each of which shows what it measured.

    Args:
        directory: The running cluster.
        manifest: Its manifest, which the demo edits.
        model: Name that clients use for the model.
        console: Where it shows.
    """

    def __init__(self, directory: ClusterDirectory, manifest: Path, model: str, console: Console) -> None:
        self._directory = directory
        self._manifest = manifest
        self._model = model
        self._console = console
        self._totals = DemoTotals()

    async def run(self) -> None:
        """Runs all steps, then shows a summary.

        Raises:
            DemoError: Something did not happen in time.
        """
        timeout = aiohttp.ClientTimeout(total=RESTART_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await self._show_placement(session)
            await self._edit_slider(session)
            await self._kill_engine(session)
        self._print_title("Summary")
        self._console.print(make_summary_table(self._totals, await read_cluster_status(self._directory)))

    async def _show_placement(self, session: aiohttp.ClientSession) -> None:
        self._print_title("1. Eight prompts at once: where each prefill ran, and how its decode moved")
        status = await read_cluster_status(self._directory)
        self._console.print("the answer to the shortest prompt, as it streams: ", end="", style="dim")
        bodies = [self._make_body(words, SHORT_ANSWER_TOKENS) for words in PROMPT_WORDS]
        streams = await asyncio.gather(
            *(
                stream_completion(session, status.url, body, self._echo if body is bodies[0] else None)
                for body in bodies
            )
        )
        self._console.print()
        logs = [await self._record(status, stream) for stream in streams]
        self._console.print(make_placement_table(zip(streams, logs, strict=True), status))
        hint = f"every decision about the last one: sluice explain {streams[-1].request_id}"
        self._console.print(Text(hint, style="dim"))

    async def _edit_slider(self, session: aiohttp.ClientSession) -> None:
        self._print_title(
            f"2. An edit of the manifest sets the D-heavy chunk size to {NEW_CHUNK_TOKENS} tokens"
            f" while {NUM_STREAMS_OVER_EDIT} streams run"
        )
        before = await read_cluster_status(self._directory)
        bodies = [self._make_body(30 + index, LONG_ANSWER_TOKENS) for index in range(NUM_STREAMS_OVER_EDIT)]
        tasks = [asyncio.create_task(stream_completion(session, before.url, body)) for body in bodies]
        await self._wait_until(
            lambda status: _count_running_decodes(status) > 0, "no stream runs on any engine", STEP_TIMEOUT_S
        )
        old = next(engine.chunk_size_tokens for engine in before.engines if engine.role == "D-heavy")
        text = self._manifest.read_text()
        started_s = time.monotonic()
        self._manifest.write_text(text.replace(f"decodeHeavy: {old}", f"decodeHeavy: {NEW_CHUNK_TOKENS}"))
        after = await self._wait_until(_has_new_chunk_size, "the new chunk size is not in force", STEP_TIMEOUT_S)
        self._totals.slider_s = time.monotonic() - started_s
        streams = await asyncio.gather(*tasks)
        for stream in streams:
            await self._record(after, stream)
        has_restarts = [engine.pid for engine in before.engines] != [engine.pid for engine in after.engines]
        self._console.print(
            f"D-heavy engines: {old} -> {NEW_CHUNK_TOKENS} tokens, in force after {self._totals.slider_s:.2f} s; "
            f"engines restarted: {'some' if has_restarts else 'none'}; "
            f"broken streams: {sum(not stream.is_complete for stream in streams)} of {len(streams)}"
        )

    async def _kill_engine(self, session: aiohttp.ClientSession) -> None:
        self._print_title(f"3. SIGKILL to the busiest engine while {NUM_STREAMS_OVER_KILL} greedy streams run")
        status = await read_cluster_status(self._directory)
        bodies = [self._make_body(40 + index, LONG_ANSWER_TOKENS) for index in range(NUM_STREAMS_OVER_KILL)]
        # Greedy answers repeat: the same requests without a kill say what the killed ones should have said.
        expected = await asyncio.gather(*(stream_completion(session, status.url, body) for body in bodies))
        tasks = [asyncio.create_task(stream_completion(session, status.url, body)) for body in bodies]
        victim = await self._kill_busiest_engine()
        streams = await asyncio.gather(*tasks)
        num_exact = sum(a.text == b.text for a, b in zip(expected, streams, strict=True))
        self._totals.num_exact, self._totals.num_repeated = num_exact, len(streams)
        for stream in [*expected, *streams]:
            log = await self._record(status, stream)
            self._totals.num_recovered += any(event["event"] == "lost" for event in log["events"])
        gap_ms = 1000 * max(stream.longest_gap_s for stream in streams)
        self._console.print(
            f"streams with the same text as without the kill: {num_exact} of {len(streams)} "
            f"({self._totals.num_recovered} went on elsewhere; longest pause {gap_ms:.0f} ms)"
        )
        await self._wait_until(lambda now: now.is_ready, f"{victim.engine_id} did not come back", RESTART_TIMEOUT_S)
        self._console.print(f"{victim.engine_id} is back")

    async def _kill_busiest_engine(self) -> EngineStatusRow:
        busy = await self._wait_until(lambda now: _count_running_decodes(now) > 0, "no decodes run", STEP_TIMEOUT_S)
        victim = max(busy.engines, key=lambda engine: engine.running_decodes or 0)
        if victim.pid is None:
            raise DemoError(f"{victim.engine_id} has no process")
        os.kill(victim.pid, signal.SIGKILL)
        self._console.print(f"killed {victim.engine_id} ({victim.role}) with {victim.running_decodes} running decodes")
        return victim

    def _make_body(self, num_words: int, max_tokens: int) -> dict[str, Any]:
        words = " ".join(f"word{(7 * num_words + index) % 97}" for index in range(num_words))
        message = {"role": "user", "content": f"Continue: {words}"}
        return {
            "model": self._model,
            "messages": [message],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def _echo(self, piece: str) -> None:
        self._console.print(Text(piece.replace("\n", " "), style="cyan"), end="", soft_wrap=True)

    def _print_title(self, text: str) -> None:
        self._console.print()
        self._console.print(Text(text, style="bold"))

    async def _record(self, status: ClusterStatus, stream: CompletionStream) -> dict[str, Any]:
        """Counts a stream; returns its decision log."""
        log = await fetch_decision_log(status.routers, stream.request_id)
        self._totals.add(stream, log)
        return log

    async def _wait_until(
        self, is_reached: Callable[[ClusterStatus], bool], failure: str, timeout_s: float
    ) -> ClusterStatus:
        deadline_s = time.monotonic() + timeout_s
        while True:
            status = await read_cluster_status(self._directory)
            if is_reached(status):
                return status
            if time.monotonic() > deadline_s:
                raise DemoError(f"{failure} after {timeout_s:g} s; see {self._directory.path / 'logs'}")
            await asyncio.sleep(0.05)


def _count_running_decodes(status: ClusterStatus) -> int:
    return sum(engine.running_decodes or 0 for engine in status.engines)


def _has_new_chunk_size(status: ClusterStatus) -> bool:
    decode_heavy = [engine for engine in status.engines if engine.role == "D-heavy"]
    return all(engine.chunk_size_tokens == NEW_CHUNK_TOKENS for engine in decode_heavy)
