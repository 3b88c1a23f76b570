"""An engine from its first iterations to its end: readiness, drain, faults; the EngineCore is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from engine_server_harness import LENGTH, Engine, find_port, output, submit
from fake_core import FINGERPRINT, Builder, Clock, Core
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from quiet_imports import import_quietly

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import engine_pb2_grpc
from sluice_engine.errors import RdmaError
from sluice_engine.server.engine_server import EngineServer
from sluice_engine.server.grpc_server import GRPC_OPTIONS, start_grpc
from sluice_engine.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def lifecycle() -> Any:
    return import_quietly("sluice_engine.lifecycle")


@pytest.fixture
def settings() -> EngineSettings:
    return EngineSettings(
        engine_id="e",
        host="127.0.0.1",
        port=find_port(),
        metrics_port=find_port(),
        kv_host="127.0.0.1",
        kv_port=1,
        model="m",
        max_batch_tokens=16,
        lease_s=3.0,
        resume_timeout_s=7.0,
    )


@pytest.fixture
def engine() -> Engine:
    core, clock = Core(), Clock()
    hello = wire.EngineHello(engine_id="e", epoch=7, fingerprint=FINGERPRINT, max_batch_tokens=16)
    return Engine(EngineServer(hello, core, Builder(), clock=clock, transport="tcp"), core, clock)


@pytest.fixture(autouse=True)
def probes(lifecycle, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the server of the probes was started with; it does not start."""
    started: list[Any] = []
    monkeypatch.setattr(lifecycle, "start_http", lambda *arguments: started.append(arguments))
    return started


class Stop:
    """A stop signal that the test sends."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def bind(self, _loop: object) -> asyncio.Event:
        return self.event


class Log:
    """UCX's log, as far as it is read."""

    def __init__(self, *transports: str) -> None:
        self.transports = list(transports)

    def read(self) -> str:
        return self.transports.pop(0) if len(self.transports) > 1 else self.transports[0]


@contextlib.asynccontextmanager
async def serving(lifecycle: Any, settings: EngineSettings, engine: Engine) -> AsyncIterator[SimpleNamespace]:
    """An engine that serves, and a router's channel to it."""
    stop = Stop()
    task = asyncio.create_task(lifecycle.serve(settings, engine.server, stop))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{settings.port}") as channel:
        call = engine_pb2_grpc.EngineStub(channel).Attach(wait_for_ready=True)
        await call.write(wire.AttachRequest(hello=wire.RouterHello(router_id="r")))
        assert (await call.read()).hello.engine_id == "e"
        yield SimpleNamespace(stop=stop, task=task, call=call, channel=channel)
        call.cancel()
    for other in asyncio.all_tasks() - {asyncio.current_task()}:
        if other.get_name() in {"pump", "clock"}:
            other.cancel()


async def get_health(channel: grpc.aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return int(answer.status)


async def run_request(engine: Engine, served: SimpleNamespace) -> str:
    """Has a request run on the engine; returns its id there."""
    await served.call.write(wire.AttachRequest(submits=[submit(0, "a")]))
    async with asyncio.timeout(10):
        while not engine.core.requests:  # noqa: ASYNC110 - gRPC brings it
            await asyncio.sleep(0.001)
    return engine.core_id("a")


async def test_a_stopped_engine_is_ready_no_more_and_leaves_when_its_last_request_has_ended(
    lifecycle, settings, engine, probes
):
    async with serving(lifecycle, settings, engine) as served:
        host, port, server, is_ready = probes[0]
        assert (host, port, server) == (settings.host, settings.metrics_port, engine.server)
        assert is_ready()
        assert await get_health(served.channel) == SERVING
        core_id = await run_request(engine, served)

        served.stop.event.set()

        while not (await served.call.read()).load.is_draining:
            pass
        assert not is_ready()
        assert await get_health(served.channel) == NOT_SERVING
        assert not served.task.done()
        await engine.core.outputs.put(SimpleNamespace(outputs=[output(core_id, [5], finish_reason=LENGTH)]))
        assert await served.task == 0
        assert "certificates" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_drain_that_takes_too_long_cuts_its_requests_off(lifecycle, settings, engine, caplog):
    settings = settings.model_copy(update={"drain_timeout_s": 0.01})
    async with serving(lifecycle, settings, engine) as served:
        await run_request(engine, served)
        with caplog.at_level(logging.INFO, lifecycle.logger.name):
            served.stop.event.set()
            async with asyncio.timeout(10):
                assert await served.task == 0
    assert "drain timeout of 0.01 s: 1 requests are cut off" in caplog.messages
    assert "engine e leaves with 1 requests" in caplog.messages


async def test_an_engine_stays_beyond_its_drain_for_the_streams_of_a_router_that_leaves_too(
    lifecycle, settings, engine, caplog
):
    settings = settings.model_copy(update={"drain_timeout_s": 0.01})
    async with serving(lifecycle, settings, engine) as served:
        core_id = await run_request(engine, served)
        await served.call.write(wire.AttachRequest(is_leaving=True))
        while not engine.server.is_awaited:  # noqa: ASYNC110 - gRPC brings it
            await asyncio.sleep(0.001)
        served.stop.event.set()
        while not (await served.call.read()).load.is_draining:
            pass
        await asyncio.wait([served.task], timeout=0.3)
        assert not served.task.done()
        await engine.core.outputs.put(SimpleNamespace(outputs=[output(core_id, [5], finish_reason=LENGTH)]))
        async with asyncio.timeout(10):
            assert await served.task == 0
    assert not any("are cut off" in message for message in caplog.messages)


async def test_an_engine_waits_for_no_router_that_is_gone(lifecycle, settings, engine, caplog):
    settings = settings.model_copy(update={"drain_timeout_s": 0.01})
    async with serving(lifecycle, settings, engine) as served:
        await run_request(engine, served)
        await served.call.write(wire.AttachRequest(is_leaving=True))
        while not engine.server.is_awaited:  # noqa: ASYNC110 - gRPC brings it
            await asyncio.sleep(0.001)
        served.stop.event.set()
        await asyncio.wait([served.task], timeout=0.1)
        assert not served.task.done()
        served.call.cancel()
        async with asyncio.timeout(10):
            assert await served.task == 0


@pytest.mark.parametrize("is_draining", [False, True], ids=["serving", "draining"])
@pytest.mark.parametrize(("name", "method"), [("pump", "pump"), ("clock", "keep_time")])
async def test_an_engine_whose_core_or_clock_fails_tells_its_routers_and_ends(
    lifecycle, settings, engine, probes, monkeypatch, caplog, name, method, is_draining
):
    dies = asyncio.Event()

    async def fail() -> None:
        await dies.wait()
        raise RuntimeError("it is dead")

    monkeypatch.setattr(engine.server, method, fail)
    settings = settings.model_copy(update={"drain_timeout_s": 3.0})
    async with serving(lifecycle, settings, engine) as served:
        if is_draining:
            await run_request(engine, served)
            served.stop.event.set()
            while not (await served.call.read()).load.is_draining:
                pass
        dies.set()
        fault = f"{name}: RuntimeError: it is dead"
        async with asyncio.timeout(10):
            while not (message := await served.call.read()).fault:
                assert message is not grpc.aio.EOF
            assert message.fault == fault
            assert await served.task == 5
        assert probes[0][3]() is (name == "clock" and not is_draining)
    assert f"engine e ends: {fault}" in caplog.messages
    assert not any("are cut off" in message for message in caplog.messages)


async def test_an_engine_warms_up_first_and_reports_the_transport_that_is_in_use(
    lifecycle, settings, engine, monkeypatch
):
    done: list[str] = []
    log = Log("tcp", "rc_mlx5")

    class WarmUp:
        async def run(self) -> None:
            done.append("warm-up")

    async def serve(*arguments: Any) -> int:
        done.append("serve")
        assert arguments == (settings, engine.server, "stop", "certificates")
        async with asyncio.timeout(10):
            while engine.server.transport == "tcp":  # noqa: ASYNC110 - the watcher changes it
                await asyncio.sleep(0.001)
        return 3

    monkeypatch.setattr(lifecycle, "serve", serve)
    monkeypatch.setattr(lifecycle, "TRANSPORT_POLL_S", 0.0)
    status = await lifecycle.start_and_serve(
        settings, engine.server, WarmUp(), "stop", log, certificates="certificates"
    )
    assert (status, done, engine.server.transport) == (3, ["warm-up", "serve"], "rc_mlx5")
    await asyncio.sleep(0)
    assert "transport" not in {task.get_name() for task in asyncio.all_tasks()}


@pytest.fixture
def started(lifecycle, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``run`` has started, in order, all of it replaced."""
    calls: list[Any] = []

    def replace(owner: Any, name: str, answer: Any) -> None:
        def record(*arguments: Any, **options: Any) -> Any:
            calls.append((name, arguments, options))
            return answer

        monkeypatch.setattr(owner, name, record)

    replace(lifecycle.vllm_internals_check, "check_installed", None)
    replace(lifecycle.launch, "check_ports", None)
    replace(lifecycle, "read_certificates", "certificates")
    replace(lifecycle.identity, "make_epoch", 7)
    replace(lifecycle, "make_vllm_config", "config")
    replace(lifecycle.launch, "start_core", Core())
    replace(lifecycle.launch, "load_tokenizer", "tokenizer")
    replace(lifecycle, "VllmRequestBuilder", Builder())
    replace(lifecycle.identity, "make_hello", wire.EngineHello(engine_id="e", epoch=7))
    replace(lifecycle, "start_and_serve", "coroutine")
    replace(lifecycle.uvloop, "run", 9)
    for name in ("collect", "freeze", "set_threshold"):
        replace(lifecycle.gc, name, None)
    return calls


def test_an_engine_is_checked_before_its_core_starts_and_serves_as_its_settings_say(lifecycle, settings, started):
    assert lifecycle.run(settings, "stop", Log("tcp")) == 9
    names = [name for name, _, _ in started]
    assert [name for name in names if name in {"collect", "freeze", "set_threshold"}] == [
        "collect",
        "freeze",
        "set_threshold",
    ]
    first = ["check_installed", "check_ports", "read_certificates", "make_epoch", "make_vllm_config", "start_core"]
    assert names[: len(first)] == first
    arguments, options = next((given, named) for name, given, named in started if name == "start_and_serve")
    assert (arguments[0], arguments[3], options) == (settings, "stop", {"certificates": "certificates"})
    server = arguments[1]
    _, stream = server.attach("r")
    hello = stream._waiting.popleft()
    assert (hello.hello.resume_timeout_s, hello.load.transport) == (7.0, "tcp")
    assert server._lease_s == 3.0


def test_an_engine_that_must_use_rdma_does_not_serve_over_tcp(lifecycle, settings, started):
    with pytest.raises(RdmaError, match="KV would go over tcp"):
        lifecycle.run(settings.model_copy(update={"require_rdma": True}), "stop", Log("tcp"))
    assert "start_and_serve" not in [name for name, _, _ in started]


# --- streams over gRPC -----------------------------------------------------------------------------------------------


def test_a_router_that_vanished_is_noticed_after_fifteen_seconds():
    options = dict(GRPC_OPTIONS)
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] == 15_000


async def test_a_router_that_says_no_more_is_told_nothing_more(lifecycle, settings, engine):
    async with serving(lifecycle, settings, engine) as served:
        await served.call.done_writing()
        async with asyncio.timeout(10):
            while await served.call.read() is not grpc.aio.EOF:
                pass
        served.stop.event.set()
        assert await served.task == 0


async def test_a_message_that_cannot_be_taken_costs_its_stream_and_not_the_engine(
    lifecycle, settings, engine, monkeypatch, caplog
):
    async def take(session: Any, message: Any) -> None:
        raise ValueError(f"{session.router_id} sent {len(message.submits)} submits")

    monkeypatch.setattr(engine.server, "take", take)
    async with serving(lifecycle, settings, engine) as served:
        await served.call.write(wire.AttachRequest(submits=[submit(0, "a")]))
        async with asyncio.timeout(10):
            while await served.call.read() is not grpc.aio.EOF:
                pass
        assert "router r: its stream is cut" in caplog.messages
        assert not served.task.done()
        again = engine_pb2_grpc.EngineStub(served.channel).Attach()
        await again.write(wire.AttachRequest(hello=wire.RouterHello(router_id="r")))
        assert (await again.read()).hello.engine_id == "e"
        again.cancel()
        served.stop.event.set()
        assert await served.task == 0


async def test_a_message_may_be_as_large_as_a_prompt_of_a_million_tokens(lifecycle, settings, engine):
    async with serving(lifecycle, settings, engine) as served:
        await served.call.write(wire.AttachRequest(submits=[submit(0, "a", resume_state=bytes(5 << 20))]))
        async with asyncio.timeout(10):
            while not engine.core.requests:  # noqa: ASYNC110 - gRPC brings it
                await asyncio.sleep(0.001)
        served.stop.event.set()
        await engine.core.outputs.put(SimpleNamespace(outputs=[output(engine.core_id("a"), [5], finish_reason=LENGTH)]))
        assert await served.task == 0


async def test_an_engine_says_what_it_serves_and_shares_its_port_with_nobody(lifecycle, settings, engine):
    name = "sluice.v1.Engine"
    async with serving(lifecycle, settings, engine) as served:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        listed = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo(iter([request]))
        (answer,) = [answer async for answer in listed]
        services = {service.name for service in answer.list_services_response.service}
        assert services == {name, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        health = health_pb2_grpc.HealthStub(served.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
        with pytest.raises(RuntimeError, match="Failed to bind"):
            await start_grpc(settings, engine.server)
        served.stop.event.set()
        assert await served.task == 0
