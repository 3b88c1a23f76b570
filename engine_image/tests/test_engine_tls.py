"""The engine's gRPC server with mutual TLS: only routers are served, and rotation breaks no stream."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trustme
from certificate_files import make_files, mount_secret
from engine_server_harness import find_port
from fake_core import FINGERPRINT, Builder, Clock, Core
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.certificate_rotation import CertificateFolder
from sluice.grpc_credentials import make_channel
from sluice.v1 import engine_pb2 as wire
from sluice.v1 import engine_pb2_grpc
from sluice_engine.errors import SettingsError, StartError
from sluice_engine.server.engine_server import EngineServer
from sluice_engine.server.grpc_server import read_certificates, start_grpc
from sluice_engine.settings import EngineSettings, parse_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ENGINE, ROUTER = "tiny-engines.ns.svc", "tiny-router.ns.svc"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def stranger() -> trustme.CA:
    return trustme.CA()


def make_settings(folder: Path) -> EngineSettings:
    port = find_port()
    return EngineSettings(
        engine_id="e",
        host="127.0.0.1",
        port=port,
        metrics_port=1,
        kv_host="127.0.0.1",
        kv_port=1,
        model="m",
        max_batch_tokens=16,
        peer_tls=str(folder),
        router_name=ROUTER,
    )


@contextlib.asynccontextmanager
async def listening(settings: EngineSettings, certificates: CertificateFolder | None) -> AsyncIterator[str]:
    hello = wire.EngineHello(engine_id="e", epoch=1, fingerprint=FINGERPRINT, max_batch_tokens=16)
    server = EngineServer(hello, Core(), Builder(), clock=Clock())  # type: ignore[arg-type]
    listener, _ = await start_grpc(settings, server, certificates)
    try:
        yield f"127.0.0.1:{settings.port}"
    finally:
        await listener.stop(0)


def attach(channel: grpc.aio.Channel) -> Any:
    return engine_pb2_grpc.EngineStub(channel).Attach()


async def say_hello(channel: grpc.aio.Channel, router_id: str = "r") -> tuple[Any, wire.AttachResponse]:
    call = attach(channel)
    await call.write(wire.AttachRequest(hello=wire.RouterHello(router_id=router_id)))
    return call, await call.read()


@pytest.mark.parametrize(
    ("names", "signer", "status"),
    [
        ((ROUTER,), "authority", None),
        ((ENGINE,), "authority", grpc.StatusCode.PERMISSION_DENIED),
        (("other-router.ns.svc",), "authority", grpc.StatusCode.PERMISSION_DENIED),
        ((ROUTER,), "stranger", grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["a router", "an engine", "another cluster's router", "a stranger"],
)
async def test_only_routers_are_served(tmp_path, authority, stranger, names, signer, status):
    settings = make_settings(mount_secret(tmp_path / "engine", make_files(authority, ENGINE)))
    issuer = {"authority": authority, "stranger": stranger}[signer]
    folder = mount_secret(tmp_path / "client", make_files(issuer, *names, trusted=(authority, issuer)))
    shown = CertificateFolder(folder, is_mutual=True).current
    async with (
        listening(settings, read_certificates(settings)) as address,
        make_channel(address, shown, ENGINE) as channel,
    ):
        if status is None:
            _, first = await say_hello(channel)
            assert first.hello.engine_id == "e"
            assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status
            return
        # Nothing is written: gRPC makes another status of a write to a call that has just been refused.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attach(channel).read()
        assert caught.value.code() is status


async def test_a_router_in_the_open_is_not_served(tmp_path, authority):
    settings = make_settings(mount_secret(tmp_path, make_files(authority, ENGINE)))
    async with (
        listening(settings, read_certificates(settings)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await say_hello(channel)


async def test_rotation_reaches_new_streams_and_leaves_the_old_ones(tmp_path, authority, stranger):
    settings = make_settings(mount_secret(tmp_path, make_files(authority, ENGINE, ROUTER)))
    certificates = read_certificates(settings)
    assert certificates is not None
    async with listening(settings, certificates) as address:
        old = certificates.current
        async with make_channel(address, old, ENGINE) as before:
            call, _ = await say_hello(before)
            mount_secret(tmp_path, make_files(stranger, ENGINE, ROUTER))
            assert certificates.refresh()
            async with make_channel(address, certificates.current, ENGINE) as after:
                _, first = await say_hello(after, "second")
                assert first.hello.engine_id == "e"
            async with make_channel(address, old, ENGINE) as late:
                with pytest.raises(grpc.aio.AioRpcError):
                    await say_hello(late, "third")
            await call.write(wire.AttachRequest(configure=wire.Configure(generation=1, chunk_size_tokens=16)))
            assert (await call.read()).HasField("configured")


def test_an_engine_does_not_start_without_its_certificate(tmp_path):
    with pytest.raises(StartError, match=r"--peer-tls: .*: tls.crt cannot be read: No such file"):
        read_certificates(make_settings(tmp_path / "none"))


def test_folder_and_name_need_each_other():
    required = "--engine-id e --port 1 --metrics-port 2 --kv-host h --kv-port 3 --model m --max-batch-tokens 16"
    with pytest.raises(SettingsError, match="--peer-tls and --router-name need each other"):
        parse_settings([*required.split(), "--router-name", ROUTER], {})
