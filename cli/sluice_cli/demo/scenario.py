"""``sluice demo``: what Sluice does, in a minute, shown on real engines. Every figure is measured while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.table import Table
from rich.text import Text

from sluice_cli.commands.explain import fetch_decision_log
from sluice_cli.demo.openai_client import CompletionStream, stream_completion
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
LONG_ANSWER_TOKENS = 400
NUM_LONG_STREAMS = 6
NEW_CHUNK_TOKENS = 256
STEP_TIMEOUT_S = 30.0
RESTART_TIMEOUT_S = 120.0


class DemoError(Exception):
    """Something did not happen; the message says what."""


@dataclass(slots=True)
class Totals:
    """What the acts found, for the summary."""

    streams: list[CompletionStream] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)
    num_recovered: int = 0
    num_exact: int = 0
    slider_s: float = 0.0
    num_slo_met: int = 0
    num_finished: int = 0


class Demo:
    """The acts.

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
        self._totals = Totals()

    async def run(self) -> None:
        """Plays all acts.

        Raises:
            DemoError: An act did not go as it should.
        """
        timeout = aiohttp.ClientTimeout(total=RESTART_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await self._show_placement(session)
            await self._change_slider(session)
            await self._kill_engine(session)
        self._print_summary(await read_cluster_status(self._directory))

    # Act 1.

    async def _show_placement(self, session: aiohttp.ClientSession) -> None:
        self._title("1. Eight prompts at once: where each prefill ran, and how its decode moved")
        view = await read_cluster_status(self._directory)
        self._console.print("the shortest, as it streams: ", end="", style="dim")
        bodies = [self._body(words, SHORT_ANSWER_TOKENS) for words in PROMPT_WORDS]
        streams = await asyncio.gather(
            *(stream_completion(session, view.url, body, self._echo if body is bodies[0] else None) for body in bodies)
        )
        self._console.print()
        table = Table()
        for name in ("prompt tokens", "prefill on", "because", "TTFT ms", "moves of its decode", "SLO"):
            table.add_column(name, justify="right" if name in ("prompt tokens", "TTFT ms") else "left")
        for stream in streams:
            story = await self._story(view, stream)
            self._count(stream, story)
            table.add_row(*_describe_request(stream, story, view))
        self._console.print(table)
        self._console.print(Text(f"the whole story of one: sluice explain {streams[-1].request_id}", style="dim"))

    # Act 2.

    async def _change_slider(self, session: aiohttp.ClientSession) -> None:
        self._title(
            f"2. Slider S_D to {NEW_CHUNK_TOKENS} tokens by an edit of the manifest, under four running streams"
        )
        before = await read_cluster_status(self._directory)
        streams = [
            asyncio.create_task(stream_completion(session, before.url, self._body(30 + index, LONG_ANSWER_TOKENS)))
            for index in range(4)
        ]
        await self._wait(lambda view: _running(view) > 0, "no stream runs on any engine", STEP_TIMEOUT_S)
        old = next(engine.chunk_size_tokens for engine in before.engines if engine.role == "D-heavy")
        text = self._manifest.read_text()
        started_s = time.monotonic()
        self._manifest.write_text(text.replace(f"decodeHeavy: {old}", f"decodeHeavy: {NEW_CHUNK_TOKENS}"))
        after = await self._wait(_has_new_chunk, "the new chunk size is not in force", STEP_TIMEOUT_S)
        self._totals.slider_s = time.monotonic() - started_s
        ended = await asyncio.gather(*streams)
        for stream in ended:
            self._count(stream, await self._story(after, stream))
        is_same = [engine.pid for engine in before.engines] == [engine.pid for engine in after.engines]
        self._console.print(
            f"D-heavy engines: {old} -> {NEW_CHUNK_TOKENS} tokens, in force on all after {self._totals.slider_s:.2f} s; "
            f"engines restarted: {'none' if is_same else 'some'}; "
            f"streams broken: {sum(not stream.is_whole for stream in ended)} of {len(ended)}"
        )

    # Act 3.

    async def _kill_engine(self, session: aiohttp.ClientSession) -> None:
        self._title(f"3. SIGKILL to the busiest engine under {NUM_LONG_STREAMS} greedy streams")
        view = await read_cluster_status(self._directory)
        bodies = [self._body(40 + index, LONG_ANSWER_TOKENS) for index in range(NUM_LONG_STREAMS)]
        expected = await asyncio.gather(*(stream_completion(session, view.url, body) for body in bodies))
        tasks = [asyncio.create_task(stream_completion(session, view.url, body)) for body in bodies]
        busy = await self._wait(lambda now: _running(now) >= NUM_LONG_STREAMS // 2, "no decodes run", STEP_TIMEOUT_S)
        victim = max(busy.engines, key=lambda engine: engine.running_decodes or 0)
        if victim.pid is None:
            raise DemoError(f"{victim.engine_id} has no process")
        os.kill(victim.pid, signal.SIGKILL)
        self._console.print(f"killed {victim.engine_id} ({victim.role}) with {victim.running_decodes} running decodes")
        streams = await asyncio.gather(*tasks)
        self._totals.num_exact = sum(a.text == b.text for a, b in zip(expected, streams, strict=True))
        for stream in [*expected, *streams]:
            story = await self._story(view, stream)
            self._count(stream, story)
            self._totals.num_recovered += any(event["event"] == "lost" for event in story["events"])
        gap_ms = 1000 * max(stream.longest_gap_s for stream in streams)
        self._console.print(
            f"streams that ended as if nothing had happened: {self._totals.num_exact} of {len(streams)} "
            f"({self._totals.num_recovered} went on elsewhere; longest pause {gap_ms:.0f} ms)"
        )
        await self._wait(lambda now: now.is_ready, f"{victim.engine_id} did not come back", RESTART_TIMEOUT_S)
        self._console.print(f"{victim.engine_id} is back")

    # What the acts share.

    def _body(self, num_words: int, max_tokens: int) -> dict[str, Any]:
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

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.print(Text(text, style="bold"))

    async def _story(self, view: ClusterStatus, stream: CompletionStream) -> dict[str, Any]:
        return await fetch_decision_log(view.routers, stream.request_id)

    def _count(self, stream: CompletionStream, story: dict[str, Any]) -> None:
        self._totals.streams.append(stream)
        for event in story["events"]:
            if event["event"] == "moved":
                self._totals.moves[event["cause"]] += 1
            elif event["event"] == "finished":
                self._totals.num_finished += 1
                self._totals.num_slo_met += bool(event["is_slo_met"])

    async def _wait(self, is_reached: Callable[[ClusterStatus], bool], failure: str, timeout_s: float) -> ClusterStatus:
        deadline_s = time.monotonic() + timeout_s
        while True:
            view = await read_cluster_status(self._directory)
            if is_reached(view):
                return view
            if time.monotonic() > deadline_s:
                raise DemoError(f"{failure} after {timeout_s:g} s; see {self._directory.path / 'logs'}")
            await asyncio.sleep(0.05)

    def _print_summary(self, view: ClusterStatus) -> None:
        totals = self._totals
        self._title("Summary")
        table = Table(show_header=False)
        table.add_row("streams, whole", f"{sum(s.is_whole for s in totals.streams)} of {len(totals.streams)}")
        table.add_row("output tokens", str(sum(stream.output_tokens for stream in totals.streams)))
        for cause, count in totals.moves.most_common():
            table.add_row(f"decodes moved: {cause}", str(count))
        table.add_row("decodes recovered from a killed engine", str(totals.num_recovered))
        table.add_row("greedy streams repeated exactly over the kill", f"{totals.num_exact} of {NUM_LONG_STREAMS}")
        table.add_row("slider in force after the edit", f"{totals.slider_s:.2f} s")
        table.add_row("requests that met their SLOs", f"{totals.num_slo_met} of {totals.num_finished}")
        free = sum(engine.kv_blocks_free or 0 for engine in view.engines)
        table.add_row("KV blocks free now", f"{free} of {sum(engine.kv_blocks_total or 0 for engine in view.engines)}")
        self._console.print(table)


def _running(view: ClusterStatus) -> int:
    return sum(engine.running_decodes or 0 for engine in view.engines)


def _has_new_chunk(view: ClusterStatus) -> bool:
    decode_heavy: list[EngineStatusRow] = [engine for engine in view.engines if engine.role == "D-heavy"]
    return all(engine.chunk_size_tokens == NEW_CHUNK_TOKENS for engine in decode_heavy)


def _describe_request(stream: CompletionStream, story: dict[str, Any], view: ClusterStatus) -> list[str]:
    roles = {engine.engine_id: engine.role for engine in view.engines}
    events = story["events"]
    placed = next(event for event in events if event["event"] == "placement" and event["decision"]["kind"] == "Place")
    finished: dict[str, Any] = next((event for event in events if event["event"] == "finished"), {})
    engine = placed["decision"]["engine_id"]
    moves = [
        f"{event['source']} -> {event['target']} ({event['cause']})" for event in events if event["event"] == "moved"
    ]
    return [
        str(placed["prompt_tokens"]),
        f"{engine} ({roles.get(engine, '')})",
        placed["decision"]["reason"],
        f"{1000 * stream.ttft_s:.0f}",
        ", ".join(moves) or "none: decoded in place",
        "met" if finished.get("is_slo_met") else "missed",
    ]
