"""Shows a running cluster: a table that refreshes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.text import Text

from sluice_cli.output.cluster_table import make_cluster_table, make_curl_line

if TYPE_CHECKING:
    from rich.console import Console

    from sluice_cli.local_cluster.cluster import LocalCluster
    from sluice_cli.local_cluster.cluster_status import ClusterStatus, EngineStatusRow

REFRESH_S = 0.5


class ClusterDisplay:
    """What ``sluice up`` prints."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def report(self, line: str) -> None:
        """Prints a line with the time."""
        now = dt.datetime.now(tz=dt.UTC).astimezone()
        # One line, however long: what a terminal wraps by itself, a file is searched for.
        self._console.print(Text(f"{now:%H:%M:%S} {line}"), soft_wrap=True)

    async def show(self, cluster: LocalCluster) -> None:
        """Shows a cluster until cancelled."""
        if self._console.is_terminal:
            await self._show_table(cluster)
        else:
            await self._show_lines(cluster)

    async def _show_table(self, cluster: LocalCluster) -> None:
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            while True:
                status = cluster.status()
                line = f"try: {make_curl_line(status)}" if status.is_ready else f"{status.phase}; Ctrl-C stops"
                live.update(Group(make_cluster_table(status), Text(line, style="dim")), refresh=True)
                await asyncio.sleep(REFRESH_S)

    async def _show_lines(self, cluster: LocalCluster) -> None:
        """Prints a line for each engine whose state changes, and the table when all serve for the first time."""
        printed: dict[str, str] = {}
        was_ready, has_been_ready = False, False
        while True:
            status = cluster.status()
            for engine in status.engines:
                line = _describe_engine(engine)
                if line and printed.get(engine.engine_id) != line:
                    printed[engine.engine_id] = line
                    self.report(line)
            if status.is_ready and not was_ready:
                if has_been_ready:
                    self.report("all engines serve again")
                else:
                    self._print_ready(status)
                has_been_ready = True
            was_ready = status.is_ready
            await cluster.wait_for_change()

    def _print_ready(self, status: ClusterStatus) -> None:
        self._console.print(make_cluster_table(status))
        self.report(f"{status.name} serves {status.model} on {status.url}")
        self._console.print(Text(f"try: {make_curl_line(status)}"), soft_wrap=True)


def _describe_engine(engine: EngineStatusRow) -> str:
    """Says what an engine does; empty while it is ready without a role, which counts once it has acknowledged it."""
    if engine.state == "ready" and not engine.role:
        return ""
    setting = f", {engine.role}, chunk size {engine.chunk_size_tokens} tokens" if engine.role else ""
    return f"{engine.engine_id}: {engine.state}{setting}"
