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
    from sluice_cli.local_cluster.cluster_status import ClusterStatus

REFRESH_S = 0.5


class ClusterDisplay:
    """What ``sluice up`` prints."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def report(self, line: str) -> None:
        """Prints a line with the time."""
        now = dt.datetime.now(tz=dt.UTC).astimezone()
        self._console.print(Text(f"{now:%H:%M:%S} {line}"))

    async def show(self, cluster: LocalCluster) -> None:
        """Shows a cluster until cancelled."""
        if self._console.is_terminal:
            await self._show_table(cluster)
        else:
            await self._show_lines(cluster)

    async def _show_table(self, cluster: LocalCluster) -> None:
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            while True:
                view = cluster.status()
                parts = [make_cluster_table(view)]
                hint = Text(
                    f"try: {make_curl_line(view)}" if view.is_ready else f"{view.phase}; Ctrl-C stops", style="dim"
                )
                live.update(Group(*parts, hint), refresh=True)
                await asyncio.sleep(REFRESH_S)

    async def _show_lines(self, cluster: LocalCluster) -> None:
        """Prints a line for each engine whose state changes, and the table when all serve."""
        seen: dict[str, str] = {}
        was_ready, num_ready = False, 0
        while True:
            view = cluster.status()
            for engine in view.engines:
                setting = f", {engine.role}, chunk size {engine.chunk_size_tokens} tokens" if engine.role else ""
                line = f"{engine.engine_id}: {engine.state}{setting}"
                has_role = bool(engine.role) or engine.state != "ready"  # its role counts from its acknowledgement
                if has_role and seen.get(engine.engine_id) != line:
                    seen[engine.engine_id] = line
                    self.report(line)
            if view.is_ready and not was_ready:
                num_ready += 1
                if num_ready == 1:
                    self._print_ready(view)
                else:
                    self.report("all engines serve again")
            was_ready = view.is_ready
            await cluster.wait_for_change()

    def _print_ready(self, view: ClusterStatus) -> None:
        self._console.print(make_cluster_table(view))
        self.report(f"{view.name} serves {view.model} on {view.url}")
        self._console.print(Text(f"try: {make_curl_line(view)}"), soft_wrap=True)
