"""Composition of a router: what listens, what runs, and in which order it stops.

Shutdown: not ready, nothing new, let answers under way end within the grace time, fail the rest, close.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import signal
import time
import uuid
from collections.abc import Awaitable
from pathlib import Path

import grpc
from aiohttp import web
from google.protobuf import json_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sluice.v1 import control_pb2_grpc, plan_pb2
from sluice_core.latency import OnlineLatencyModel
from sluice_router.api import control_service
from sluice_router.api.grpc.grpc_api import GrpcApi, join_address
from sluice_router.api.http.http_api import HttpApi
from sluice_router.api.http.http_errors import refuse
from sluice_router.api.http.info_endpoints import METRICS_PATH, InfoEndpoints
from sluice_router.engines import discovery
from sluice_router.engines.engine_connections import HELLO_TIMEOUT_S, EngineConnections
from sluice_router.errors import MIN_RETRY_S, PlanRefusedError, RouterError, ShuttingDownError
from sluice_router.observability.request_traces import make_request_traces
from sluice_router.scheduling.router import Router
from sluice_router.scheduling.state import RouterState
from sluice_router.security.access_control import PROBE_PATHS
from sluice_router.security.tls import RouterSecurity
from sluice_router.settings import RouterSettings, load_profile
from sluice_router.text.tokenizer import ModelText

logger = logging.getLogger(__name__)

TICK_S = 0.05
# Everything waits while a collection walks the containers made since the last one, at 0.5 to 1.5 us each: a thousand
# cost a pause of a millisecond, 50 000 cost 25 to 75 ms. The older generations hold what is under way and the decision
# log. Requests leave no cycles behind, so that the older generations are walked after a million containers only.
GC_THRESHOLDS = (1_000, 1_000, 10)
CLOSE_GRACE_S = 1.0
# Of the port for metrics, where clients need keys.
OPEN_PATHS = PROBE_PATHS | {METRICS_PATH}


def make_router(settings: RouterSettings) -> Router:
    """Makes the data plane.

    Args:
        settings: Of the process.

    Raises:
        TracingError: The environment asks for traces in a way that the router cannot send them.
    """
    profile = load_profile(settings.latency_profile) if settings.latency_profile else None
    router_id = settings.router_id or f"router-{uuid.uuid4().hex[:12]}"
    state = RouterState(
        router_id=router_id,
        model_id=settings.model_id,
        limits=settings.limits,
        rng=random.Random(),  # noqa: S311 - ids, seeds and ties, nothing secret
        started_unix_s=int(time.time()),
        make_latency_model=lambda _: OnlineLatencyModel(profile),
        traces=make_request_traces(os.environ, router_id, time.monotonic),
    )
    return Router(state, time.monotonic)


class ListenError(Exception):
    """The router cannot listen on a port; names the option, the port and the host."""


class RouterServer:
    """A router process.

    Args:
        settings: Its settings.

    Attributes:
        router: The data plane.
        ports: Ports listened on, by name, once started.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.router = make_router(settings)
        self._security = security = RouterSecurity(settings)
        self.router.registry.register(security)
        peers = security.peers
        self._connections = EngineConnections(
            self.router,
            hello_timeout_s=settings.limits[HELLO_TIMEOUT_S],
            rng=random.Random(),  # noqa: S311 - jitter
            tls=(lambda: peers.engine_tls) if peers else None,
        )
        self.router.connect(self._connections)
        self._text = ModelText.load(Path(settings.model))
        self._http = HttpApi(self.router, self._text, access=security.client_access)
        self._grpc = GrpcApi(
            self.router,
            self._text,
            self._http.metrics,
            access=security.client_access,
            shares_port=settings.share_ports,
        )
        # gRPC shares ports by default: another router on this one would then take part of the calls, unnoticed.
        self._control = grpc.aio.server(
            interceptors=peers.interceptors if peers else (), options=[("grpc.so_reuseport", 0)]
        )
        self._health = health.aio.HealthServicer()
        self._info_endpoints = InfoEndpoints(self.router, self._text)
        self._info_runner: web.ServerRunner | None = None
        self._stop = asyncio.Event()
        self.ports: dict[str, int] = {}

    async def run(self) -> None:
        """Serves until ``stop`` is called, then shuts down in order.

        Raises:
            ListenError: It cannot listen on one of its ports.
        """
        try:
            await self._start()
            async with asyncio.TaskGroup() as tasks:
                runners = [
                    tasks.create_task(self._tick(), name="tick"),
                    tasks.create_task(self._report_health(), name="health"),
                    tasks.create_task(self._discover(tasks), name="discovery"),
                    tasks.create_task(self._keep_security(), name="keys and certificates"),
                ]
                await self._stop.wait()
                await self._drain()
                self._connections.stop()
                for runner in runners:
                    runner.cancel()
        finally:
            await self._close()

    def stop(self) -> None:
        """Begins the shutdown."""
        self._stop.set()

    # --- start ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        settings = self._settings
        self._load_plan()
        await self._listen("control", self._start_control())
        await self._listen("metrics", self._start_info())
        await self._listen("grpc", self._grpc.start(settings.host, settings.grpc_port))
        await self._listen(
            "http", self._http.start(settings.host, settings.http_port, shares_port=settings.share_ports)
        )
        gc.collect()
        # What lives since the start need not be walked at all.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        logger.info("router %s listens on %s, ports %s", self.router.state.router_id, settings.host, self.ports)

    async def _listen(self, name: str, starting: Awaitable[int]) -> None:
        try:
            self.ports[name] = await starting
        except (OSError, RuntimeError) as error:  # gRPC raises the latter
            host, port = self._settings.host, getattr(self._settings, f"{name}_port")
            message = f"--{name}-port {port}: the router cannot listen on it at {host}; is it in use? ({error})"
            raise ListenError(message) from error

    def _load_plan(self) -> None:
        """Takes the mounted plan for a cold start; one that is missing or wrong is no reason not to start."""
        if not self._settings.plan:
            return
        path = Path(self._settings.plan)
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            self.router.apply_plan(json_format.ParseDict(fields, plan_pb2.Plan(), ignore_unknown_fields=True))
        except (OSError, ValueError, json_format.ParseError, PlanRefusedError) as error:
            logger.warning("plan %s is not applied: %s", path, error)

    async def _start_control(self) -> int:
        control_pb2_grpc.add_ControlServicer_to_server(control_service.ControlService(self.router), self._control)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._control)
        names = (control_service.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._control)
        address, peers = join_address(self._settings.host, self._settings.control_port), self._security.peers
        if peers is None:
            port = self._control.add_insecure_port(address)
        else:
            port = self._control.add_secure_port(address, peers.make_server_credentials())
        await self._control.start()
        return port

    async def _start_info(self) -> int:
        """Serves probes, metrics and explanations of this very process on a port of their own."""
        runner = web.ServerRunner(web.Server(self._show_info, access_log=None), handle_signals=False)
        await runner.setup()
        await web.TCPSite(runner, self._settings.host, self._settings.metrics_port).start()
        self._info_runner = runner
        return int(runner.addresses[0][1])

    async def _show_info(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = self._info_endpoints.find(request.path)
        if handler is None or request.method not in {"GET", "HEAD"}:
            return web.Response(status=404)
        keys = self._security.client_access.keys
        try:
            # Whoever may scrape may not therefore see what clients need a key for.
            if keys is not None and request.path not in OPEN_PATHS:
                keys.find_owner(request.headers.get("Authorization"))
            return handler()
        except RouterError as error:
            return refuse(error)

    # --- running -------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        lag_s, clock = self.router.state.metrics.loop_lag_s, asyncio.get_running_loop().time
        while True:
            self.router.tick()
            due_s = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            lag_s.observe(max(0.0, clock() - due_s))

    async def _report_health(self) -> None:
        """The control service serves from the start; the router as a whole only when it is ready."""
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(control_service.SERVICE, serving)
        while True:
            await self._health.set("", serving if self.router.is_ready else not_serving)
            await asyncio.sleep(TICK_S)

    async def _keep_security(self) -> None:
        """Uses the newest API keys and certificates."""
        await self._security.keep(
            set_fault=self.router.set_edge_fault,
            keep_owners=self.router.set_owners,
            renew_client_certificate=self._http.renew_certificate,
        )

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        def start(address: str) -> asyncio.Task[None]:
            return tasks.create_task(self._connections.keep(address), name=f"engine at {address}")

        def set_addresses(addresses: frozenset[str]) -> None:
            self._connections.set_addresses(addresses, start)

        await discovery.watch(discovery.parse_discovery(self._settings.engines), set_addresses)

    # --- shutdown ------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Takes nothing new, and lets answers under way end."""
        self.router.stop_accepting()
        await self._http.announce_close()
        self._grpc.announce_close(self._settings.grace_s + CLOSE_GRACE_S)
        deadline_s = self.router.now() + self._settings.grace_s
        while self.router.state.requests.live and self.router.now() < deadline_s:  # noqa: ASYNC110 - once, at the end
            await asyncio.sleep(TICK_S)
        self.router.fail_all(lambda: ShuttingDownError("this router is about to leave", retry_after_s=MIN_RETRY_S))

    async def _close(self) -> None:
        await self._http.close(CLOSE_GRACE_S)
        await self._grpc.close(CLOSE_GRACE_S)
        if self._info_runner is not None:
            await self._info_runner.cleanup()
        await self._control.stop(CLOSE_GRACE_S)
        if self.router.state.traces is not None:
            await asyncio.to_thread(self.router.state.traces.shut_down, CLOSE_GRACE_S)
        self._text.close()


async def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGTERM or SIGINT."""
    server = RouterServer(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run()
