"""Probes and metrics of every replica, leader or not.

Alive: the event loop is not blocked, and no cluster has been due or in work for minutes. Ready: a leader
watches, and others reach the API server.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.metrics import OperatorMetrics

TICK_S = 0.5
# A loop that lags so much is blocked; a key that waits so long has no worker, and one so long in work hangs.
MAX_LAG_S = 10.0
MAX_QUEUE_AGE_S = 600.0
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """The HTTP server of probes and metrics.

    Args:
        metrics: Shown on /metrics.
        refresh: Sets gauges before a scrape, and returns how long a cluster has been due or in work, in seconds.
        is_ready: Whether this replica is ready.
        now: Monotonic seconds.

    Attributes:
        port: Port listened on, once ``started`` is set.
        started: Set once the pages are served.
    """

    def __init__(
        self,
        metrics: OperatorMetrics,
        *,
        refresh: Callable[[], float],
        is_ready: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._refresh = refresh
        self._is_ready = is_ready
        self._now = now
        self._ticked_s = now()
        self._lag_s = 0.0
        self.port = 0
        self.started = asyncio.Event()

    async def run(self, host: str, port: int) -> None:
        """Serves until cancelled."""
        runner = web.ServerRunner(web.Server(self._show, access_log=None), handle_signals=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            self.port = int(runner.addresses[0][1])
            self.started.set()
            await self._tick()
        finally:
            await runner.cleanup()

    async def _tick(self) -> None:
        while True:
            self._ticked_s = self._now()
            await asyncio.sleep(TICK_S)
            self._lag_s = max(0.0, self._now() - self._ticked_s - TICK_S)
            self._metrics.loop_lag_s.set(self._lag_s)

    async def _show(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/livez":
            return self.show_liveness()
        if request.path == "/readyz":
            return web.Response(text="ok\n") if self._is_ready() else web.Response(status=503, text="not ready\n")
        if request.path == "/metrics":
            self._refresh()
            body = generate_latest(self._metrics.registry)
            return web.Response(body=body, headers={"Content-Type": METRICS_CONTENT_TYPE})
        return web.Response(status=404, text="/livez, /readyz and /metrics are here\n")

    def show_liveness(self) -> web.Response:
        """Answers /livez: 500 when Kubernetes should restart this process."""
        age_s = self._refresh()
        if self._lag_s > MAX_LAG_S:
            return web.Response(status=500, text=f"the event loop lags by {self._lag_s:.1f} s\n")
        if age_s > MAX_QUEUE_AGE_S:
            return web.Response(status=500, text=f"a cluster has been due or in work for {age_s:.0f} s\n")
        return web.Response(text="ok\n")
