"""A whole router: starts, becomes ready, serves over HTTP, and stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import aiohttp
import grpc
import pytest
from data_plane_harness import until
from fake_engine import FakeCore, FakeEngine, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server_harness import PD, get, make_settings, running, until_ready, write_engine_addresses

from sluice.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc, sampling_pb2
from sluice_router.server import TICK_S, ListenError, RouterServer, serve
from sluice_router.settings import make_limits

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(name="settings")
def _settings(tmp_path: Path):
    yield make_settings(tmp_path)
    gc.unfreeze()


async def test_router_becomes_ready_serves_and_lets_answers_end_at_shutdown(settings, tmp_path):
    engines = [FakeEngine(FakeCore(name), step_s=0.02) for name in PD]
    async with serving(*engines), running(settings) as server:
        assert (await get(server, "/livez"))[0] == 200
        status, text = await get(server, "/readyz")
        assert status == 503
        assert "no engine" in text
        write_engine_addresses(tmp_path, *engines)
        await until_ready(server)
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 60, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{server.ports['http']}/v1/completions"
            asking = asyncio.create_task(session.post(url, json=body))
            await until(lambda: server.router.state.requests.live)
            server.stop()
            await until(lambda: not server.router.is_ready)
            assert (await get(server, "/readyz"))[0] == 503
            refused = await session.post(url, json=body)
            assert refused.status == 503
            assert refused.headers["retry-after"]
            # The client's next requests go elsewhere.
            assert refused.headers["connection"] == "close"
            answer = await asking
            assert answer.status == 200
            usage = (await answer.json())["usage"]
        assert usage["completion_tokens"] == 60


@pytest.mark.parametrize("name", ["control", "metrics", "grpc", "http"])
async def test_two_routers_never_share_a_port(settings, name):
    """gRPC servers share a port by default: each would then get part of the calls, and answer for the other."""
    async with running(settings) as first:
        port = first.ports[name]
        second = RouterServer(settings.model_copy(update={f"{name}_port": port}))
        with pytest.raises(ListenError, match=f"^--{name}-port {port}: the router cannot listen on it at 127.0.0.1"):
            async with asyncio.timeout(10):
                await second.run()


async def test_workers_share_the_clients_ports_and_explain_their_own_requests(tmp_path):
    engines = [FakeEngine(FakeCore("d0")), FakeEngine(FakeCore("d1"))]
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
    async with sharing_ports(tmp_path, engines) as (first, second):
        url = f"http://127.0.0.1:{first.ports['http']}/v1/completions"
        served = []
        # The kernel chooses by the client's port: each connection is another draw.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            for _ in range(32):
                answer = await session.post(url, json=body)
                assert answer.status == 200
                path = f"/debug/requests/{answer.headers['x-request-id']}"
                known = [
                    (await session.get(f"http://127.0.0.1:{worker.ports['metrics']}{path}")).status
                    for worker in (first, second)
                ]
                assert sorted(known) == [200, 404]
                served.append(known.index(200))
        assert set(served) == {0, 1}


async def test_a_worker_that_leaves_takes_no_new_connection_while_its_answers_end(tmp_path):
    engines = [FakeEngine(FakeCore(name), step_s=0.02) for name in ("d0", "d1")]
    async with sharing_ports(tmp_path, engines) as (first, second):
        url = f"http://127.0.0.1:{first.ports['http']}/v1/completions"
        body = {"model": "tiny", "prompt": [1, 2, 3], "ignore_eos": True}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            long = []
            while not first.router.state.requests.live:
                long.append(asyncio.create_task(session.post(url, json=body | {"max_tokens": 100})))
                await until(lambda: len(list_live(first, second)) == len(long))
            first.stop()
            await until(lambda: not first.router.is_ready)
            for _ in range(16):
                answer = await session.post(url, json=body | {"max_tokens": 1})
                assert answer.status == 200
            assert first.router.state.requests.live
            for answer in await asyncio.gather(*long):
                assert (await answer.json())["usage"]["completion_tokens"] == 100


def list_live(*routers):
    return [request for server in routers for request in server.router.state.requests.live]


@contextlib.asynccontextmanager
async def sharing_ports(folder, engines):
    """Two workers, each with an engine of its own, since an engine of the tests serves one router."""
    folders = [folder / name for name in ("first", "second")]
    for each in folders:
        each.mkdir()
    shared: dict[str, object] = {"share_ports": True}
    async with serving(*engines), running(make_settings(folders[0]).model_copy(update=shared)) as first:
        shared |= {f"{name}_port": first.ports[name] for name in ("http", "grpc")}
        async with running(make_settings(folders[1]).model_copy(update=shared)) as second:
            for worker, each, engine in zip((first, second), folders, engines, strict=True):
                write_engine_addresses(each, engine)
                await until(lambda: worker.router.is_ready)  # noqa: B023
            yield first, second


async def test_a_router_listens_on_ipv6(settings):
    async with (
        running(settings.model_copy(update={"host": "::1"})) as server,
        grpc.aio.insecure_channel(f"[::1]:{server.ports['control']}") as channel,
    ):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_grpc_clients_get_goaway_while_their_calls_go_on(settings, tmp_path):
    engine = FakeEngine(FakeCore("d0"), step_s=0.05)
    async with serving(engine), running(settings) as server:
        write_engine_addresses(tmp_path, engine)
        await until_ready(server)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            sampling = sampling_pb2.SamplingParams(max_tokens=60, ignore_eos=True)
            call = stub.Generate(
                router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(values=[1, 2, 3]), sampling=sampling)
            )
            deltas = aiter(call)
            num_tokens = len((await anext(deltas)).token_ids)
            server.stop()
            async with asyncio.timeout(10):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert server.router.state.requests.live
            async for delta in deltas:
                num_tokens += len(delta.token_ids)
        assert num_tokens == 60


async def test_lag_of_the_event_loop_is_measured(settings):
    """A callback that holds the loop up for longer than a tick is seen in full."""
    async with running(settings) as server:
        lag_s = server.router.state.metrics.loop_lag_s
        await until(lambda: sum(lag_s.counts) > 1)
        before_s = lag_s.total
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        seen = sum(lag_s.counts)
        await until(lambda: sum(lag_s.counts) > seen)
        assert lag_s.total - before_s >= 0.5 - 2 * TICK_S
        assert "sluice_loop_lag_seconds_bucket" in (await get(server, "/metrics"))[1]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics", 200),
        ("HEAD", "/livez", 200),
        ("GET", "/v1/models", 200),
        ("POST", "/metrics", 404),
        ("GET", "/none", 404),
        ("GET", "/v1/completions", 404),
        ("GET", "/v1/models/none", 404),
    ],
)
async def test_the_port_of_probes_and_metrics_answers_questions_alone(settings, method, path, status):
    async with running(settings) as server, aiohttp.ClientSession() as session:
        answer = await session.request(method, f"http://127.0.0.1:{server.ports['metrics']}{path}")
        assert answer.status == status


async def test_garbage_is_collected_rarely_and_never_where_it_lives_since_the_start(settings):
    """A full collection under load stops every stream for tens of milliseconds."""
    before = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    try:
        async with running(settings):
            assert gc.get_threshold() == (1_000, 1_000, 10)
            assert gc.get_freeze_count() > 10_000
    finally:
        gc.set_threshold(*before)


async def test_nothing_of_a_router_that_has_stopped_goes_on(settings):
    async with running(settings) as server:
        ports = dict(server.ports)
    assert sorted(ports) == ["control", "grpc", "http", "metrics"]
    for port in ports.values():
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
    left = {task.get_name() for task in asyncio.all_tasks()}
    assert (
        left & {"tick", "health", "discovery", "keys and certificates", "report health", "sweep slow readers"} == set()
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_begins_the_shutdown(settings, number):
    before = signal.getsignal(number)
    serving_on = asyncio.create_task(serve(settings))
    await until(lambda: signal.getsignal(number) is not before)
    os.kill(os.getpid(), number)
    async with asyncio.timeout(30):
        await serving_on
    asyncio.get_running_loop().remove_signal_handler(number)


async def test_grace_is_limited(settings, tmp_path):
    engine = FakeEngine(FakeCore("d0"), step_s=0.05)
    async with serving(engine), running(settings.model_copy(update={"grace_s": 0.3})) as server:
        write_engine_addresses(tmp_path, engine)
        await until_ready(server)
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{server.ports['http']}/v1/completions"
            asking = asyncio.create_task(session.post(url, json=body))
            await until(lambda: server.router.state.requests.live)
            server.stop()
            answer = await asking
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "draining"


async def test_a_plan_of_a_newer_release_counts_and_an_engine_has_as_long_for_its_hello_as_the_option_says(tmp_path):
    settings = make_settings(tmp_path, limits=make_limits(hello_timeout_s=0.1))
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "whatComesNext": 1}))
    # It takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "engines.json").write_text(json.dumps([address]))
        async with running(settings) as server:
            assert server.router.state.active.plan is not None
            endpoints = server.router.state.engines.endpoints
            await until(lambda: address in endpoints and endpoints[address].last_fault)
            assert endpoints[address].last_fault == "the engine did not say hello within 0.1 s"
    gc.unfreeze()


@pytest.mark.parametrize("plan", ["{", '{"generation": "x"}', "{}", None], ids=["text", "field", "refused", "none"])
async def test_broken_plan_file_is_no_reason_not_to_start(settings, tmp_path, caplog, plan):
    (tmp_path / "plan.json").unlink()
    if plan is not None:
        (tmp_path / "plan.json").write_text(plan)
    async with running(settings) as server:
        status, text = await get(server, "/readyz")
        assert status == 503
        assert "no plan" in text
        assert f"plan {tmp_path / 'plan.json'} is not applied" in caplog.text


async def test_control_server_has_health_and_reflection(settings):
    async with (
        running(settings) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.ports['control']}") as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="sluice.v1.Control"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        asks = [reflection_pb2.ServerReflectionRequest(list_services="")]
        listed = [item async for item in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asks)]
        names = {service.name for service in listed[0].list_services_response.service}
        assert {"sluice.v1.Control", "grpc.health.v1.Health"} <= names
        control = control_pb2_grpc.ControlStub(channel)
        status = await control.GetStatus(control_pb2.GetStatusRequest())
        assert status.generation == 1
