"""One engine from start to end: EngineCore, servers, drain.

An engine is ready while its EngineCore runs and nobody has stopped it. After SIGTERM it tells its routers, waits until
requests and their KV have left or the drain's time is over, and ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from typing import TYPE_CHECKING

import uvloop

from sluice.certificate_rotation import keep_fresh
from sluice_engine import vllm_internals_check
from sluice_engine.kv_transfer import transport_in_use
from sluice_engine.server.engine_server import EngineServer
from sluice_engine.server.grpc_server import read_certificates, start_grpc
from sluice_engine.server.probes import start_http
from sluice_engine.server.request_builder import VllmRequestBuilder
from sluice_engine.startup import identity, launch
from sluice_engine.startup.vllm_config import make_vllm_config
from sluice_engine.startup.warm_up import WarmUp

if TYPE_CHECKING:
    from sluice.certificate_rotation import CertificateFolder
    from sluice_engine.kv_transfer.transport_in_use import TransportLog
    from sluice_engine.settings import EngineSettings
    from sluice_engine.stop_signal import StopSignal

logger = logging.getLogger(__name__)

# An iteration makes hundreds of short-lived objects and no cycles: a collection is a pause that frees nothing.
GC_THRESHOLDS = (50_000, 20, 20)
DRAIN_POLL_S = 0.05
TRANSPORT_POLL_S = 1.0
EXIT_ENGINE_DEAD = 5


def run(settings: EngineSettings, stop: StopSignal, log: TransportLog) -> int:
    """Starts the engine and serves until the end.

    Args:
        settings: The engine's.
        stop: The signal to end.
        log: UCX's log.

    Returns:
        Exit status.

    Raises:
        UnsupportedVllmError: vLLM is not the one that the hooks are written against.
        StartError: It cannot start.
        RdmaError: It must use RDMA and cannot.
    """
    vllm_internals_check.check_installed()
    launch.check_ports(settings)
    # Before the model is loaded: that takes minutes.
    certificates = read_certificates(settings)
    epoch = identity.make_epoch()
    config = make_vllm_config(settings, epoch)
    client = launch.start_core(config)
    in_use = transport_in_use.find_transport(settings, log)
    transport_in_use.check_transport(settings, in_use)
    builder = VllmRequestBuilder(config, launch.load_tokenizer(config))
    hello = identity.make_hello(settings, config, epoch)
    server = EngineServer(
        hello,
        client,
        builder,
        clock=time.monotonic,
        lease_s=settings.lease_s,
        resume_timeout_s=settings.resume_timeout_s,
        transport=in_use,
    )
    # What exists now lives as long as the process: later collections need not visit it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    warm_up = WarmUp(client, builder)
    status: int = uvloop.run(start_and_serve(settings, server, warm_up, stop, log, certificates=certificates))
    return status


async def start_and_serve(
    settings: EngineSettings,
    server: EngineServer,
    warm_up: WarmUp,
    stop: StopSignal,
    log: TransportLog,
    *,
    certificates: CertificateFolder | None = None,
) -> int:
    """Warms up, then serves; returns the exit status."""
    await warm_up.run()
    watcher = asyncio.create_task(watch_transport(settings, server, log), name="transport")
    try:
        return await serve(settings, server, stop, certificates)
    finally:
        watcher.cancel()


async def watch_transport(settings: EngineSettings, server: EngineServer, log: TransportLog) -> None:
    """Keeps the transport that is reported the one in use: it is chosen anew with each engine that is met."""
    while True:
        in_use = transport_in_use.find_transport(settings, log)
        if in_use != server.transport:
            logger.info("KV goes over %s", in_use)
            server.transport = in_use
        await asyncio.sleep(TRANSPORT_POLL_S)


async def serve(
    settings: EngineSettings, server: EngineServer, stop: StopSignal, certificates: CertificateFolder | None = None
) -> int:
    """Serves until the engine is drained or dead; returns the exit status."""
    stopped = stop.bind(asyncio.get_running_loop())
    pump = asyncio.create_task(server.pump(), name="pump")
    keeper = asyncio.create_task(server.keep_time(), name="clock")
    listener, state = await start_grpc(settings, server, certificates)
    refreshes = [certificates.refresh] if certificates else []
    follower = asyncio.create_task(keep_fresh(refreshes), name="certificates")
    start_http(settings.host, settings.metrics_port, server, lambda: not stopped.is_set() and not pump.done())
    logger.info("engine %s serves on %s:%d", settings.engine_id, settings.host, settings.port)
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({pump, keeper, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await state.enter_graceful_shutdown()
    if stopping.done():
        logger.info("engine %s drains", settings.engine_id)
        await wait_for_drain(server, {pump, keeper}, settings.drain_timeout_s)
    fault = describe_fault(pump, keeper)
    follower.cancel()
    await server.close(fault)
    await listener.stop(grace=0.2)
    if fault:
        logger.error("engine %s ends: %s", settings.engine_id, fault)
        return EXIT_ENGINE_DEAD
    logger.info("engine %s leaves with %d requests", settings.engine_id, server.num_requests)
    return 0


async def wait_for_drain(server: EngineServer, vital: set[asyncio.Task[None]], timeout_s: float) -> None:
    """Waits until the engine is empty, its time is over, or one of its vital tasks ends.

    Where routers end too, nobody is left who could take a stream over. Then their time counts: a router ends what is
    late itself, and one that hangs is killed.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await server.drain()
            # Blocks come back unannounced.
            while not server.is_drained and not any(task.done() for task in vital):  # noqa: ASYNC110
                await asyncio.sleep(DRAIN_POLL_S)
    except TimeoutError:
        while server.is_awaited and not any(task.done() for task in vital):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
        if server.num_requests:
            logger.warning("drain timeout of %s s: %d requests are cut off", timeout_s, server.num_requests)


def describe_fault(*vital: asyncio.Task[None]) -> str:
    """Why a vital task ended; empty while all run."""
    for task in vital:
        if task.done() and not task.cancelled() and (error := task.exception()):
            return f"{task.get_name()}: {type(error).__name__}: {error}"
    return ""
