"""What ``sluice up`` prints of a cluster where its output is no terminal: news, each once."""

from __future__ import annotations

import asyncio
import io
import re
from dataclasses import replace

from rich.console import Console

from sluice_cli.local_cluster.cluster_status import ClusterStatus, EngineStatusRow, RouterStatusRow
from sluice_cli.output.cluster_display import ClusterDisplay

ENGINE = EngineStatusRow(engine_id="engine-0", state="ready", role="P-heavy", chunk_size_tokens=512)
SERVING = ClusterStatus(
    name="c",
    phase="ready",
    manifest="m",
    model="tiny",
    routers=(RouterStatusRow(name="router-0", url="http://h:8000", metrics_url="http://h:8003", is_ready=True),),
    engines=(ENGINE,),
    classes=(),
)
STARTING = replace(SERVING, engines=(EngineStatusRow(engine_id="engine-0"),))
UNNAMED = replace(SERVING, engines=(replace(ENGINE, role="", chunk_size_tokens=None),))
LOST = replace(SERVING, engines=(replace(ENGINE, state="lost"),))


class PlayedCluster:
    """Is in one state after the other, and then in the last one for ever."""

    def __init__(self, *states: ClusterStatus) -> None:
        self.states = list(states)
        self.has_ended = asyncio.Event()

    def status(self) -> ClusterStatus:
        return self.states[0]

    async def wait_for_change(self) -> None:
        if len(self.states) == 1:
            self.has_ended.set()
            await asyncio.Event().wait()
        del self.states[0]


async def show(*states: ClusterStatus) -> str:
    console, cluster = Console(file=io.StringIO(), width=200), PlayedCluster(*states)
    task = asyncio.create_task(ClusterDisplay(console).show(cluster))  # type: ignore[arg-type]
    await cluster.has_ended.wait()
    task.cancel()
    return console.file.getvalue()  # type: ignore[attr-defined]


async def test_each_change_is_one_line_and_the_first_time_that_all_serve_is_shown_with_a_line_to_try() -> None:
    shown = await show(STARTING, STARTING, UNNAMED, SERVING, SERVING, LOST, LOST, SERVING, SERVING)
    assert re.findall(r"(?m)^[0-9:]{8} (.*?) *$", shown) == [
        "engine-0: starting",
        "engine-0: ready, P-heavy, chunk size 512 tokens",
        "c serves tiny on http://h:8000",
        "engine-0: lost, P-heavy, chunk size 512 tokens",
        "engine-0: ready, P-heavy, chunk size 512 tokens",
        "all engines serve again",
    ]
    assert shown.count("try: curl") == shown.count("c: ready") == 1


def test_what_is_reported_is_one_line_however_long() -> None:
    console = Console(file=io.StringIO(), width=80)
    ClusterDisplay(console).report("engine-0 refuses to start: " + "a long reason, " * 20)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("\n") == 1
    assert shown.count("a long reason") == 20
