"""Mutual TLS between a router and its engines, and at its control port: strangers are refused on either side."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
import trustme
from certificate_files import make_files, mount_secret
from data_plane_harness import until
from fake_engine import FakeCore, FakeEngine, serving
from pydantic import ValidationError
from server_harness import PD, get, make_settings, running, until_ready, write_engine_addresses

from sluice.certificate_rotation import CertificateFolder
from sluice.grpc_credentials import PeerCheck, make_channel, make_server_credentials
from sluice.v1 import control_pb2, control_pb2_grpc
from sluice_router.security.tls import RouterSecurity, SecuritySettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sluice_router.server import RouterServer
    from sluice_router.settings import RouterSettings

ENGINE, ROUTER, CONTROL = "tiny-engines.ns.svc", "tiny-router.ns.svc", "sluice-operator.system.svc"
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def stranger() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def settings(tmp_path: Path, authority: trustme.CA) -> RouterSettings:
    folder = mount_secret(tmp_path / "router", make_files(authority, ROUTER))
    return make_settings(tmp_path, peer_tls=str(folder), engine_name=ENGINE, control_name=CONTROL)


def make_engines(folder: Path, step_s: float = 0.005) -> tuple[CertificateFolder, list[FakeEngine]]:
    """Engines with the certificate of a folder, which serve routers only."""
    certificates = CertificateFolder(folder, is_mutual=True)
    engines = [
        FakeEngine(
            FakeCore(name),
            step_s=step_s,
            credentials=make_server_credentials(certificates),
            interceptors=[PeerCheck([ROUTER])],
        )
        for name in PD
    ]
    return certificates, engines


def faults(server: RouterServer) -> list[str]:
    return [endpoint.last_fault for endpoint in server.router.state.engines.endpoints.values()]


def client(server: RouterServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.ports['http']}", trust_env=False)


async def test_engines_that_may_be_trusted_serve(tmp_path, settings, authority):
    _, engines = make_engines(mount_secret(tmp_path / "engine", make_files(authority, ENGINE)))
    async with serving(*engines), running(settings) as server, client(server) as http:
        write_engine_addresses(tmp_path, *engines)
        await until_ready(server)
        assert (await http.post("/v1/completions", json=BODY)).json()["usage"]["completion_tokens"] == 4
        assert 'sluice_certificate_expiry_timestamp_seconds{use="peers"}' in (await get(server, "/metrics"))[1]


@pytest.mark.parametrize(
    ("names", "signer", "trusted", "fault"),
    [
        ((ENGINE,), "stranger", "both", "self-signed certificate in certificate chain|unable to get local issuer"),
        (("other-engines.ns.svc",), "authority", "both", f"certificate is not valid for '{ENGINE}'"),
        ((ROUTER,), "authority", "both", f"certificate is not valid for '{ENGINE}'"),
        ((ENGINE,), "authority", "stranger", "may have refused this router's certificate"),
    ],
    ids=["an engine of a stranger's", "another cluster's engine", "a router", "an engine that does not trust us"],
)
async def test_engines_that_may_not_be_trusted_do_not(
    tmp_path, settings, authority, stranger, names, signer, trusted, fault
):
    known = {"authority": (authority,), "stranger": (stranger,), "both": (authority, stranger)}
    files = make_files(known[signer][0], *names, trusted=(*known[trusted], known[signer][0]))
    if trusted == "stranger":
        # It shows what we trust, and trusts somebody else.
        files["ca.crt"] = stranger.cert_pem.bytes()
        (tmp_path / "engine").mkdir()
        for name, content in files.items():
            (tmp_path / "engine" / name).write_bytes(content)
        credentials = grpc.ssl_server_credentials(
            [(files["tls.key"], files["tls.crt"])], files["ca.crt"], require_client_auth=True
        )
        engines = [FakeEngine(FakeCore("p0"), credentials=credentials)]
    else:
        _, engines = make_engines(mount_secret(tmp_path / "engine", files))
    async with serving(*engines), running(settings) as server:
        write_engine_addresses(tmp_path, *engines)
        await until(lambda: any(faults(server)))
        # One of the engines is asked first.
        assert any(re.search(fault, told) for told in faults(server)), faults(server)
        assert not server.router.is_ready
        assert not any(engine.num_streams for engine in engines)


async def test_an_engine_without_tls_is_not_spoken_with(tmp_path, settings):
    engine = FakeEngine(FakeCore("p0"))
    async with serving(engine), running(settings) as server:
        write_engine_addresses(tmp_path, engine)
        await until(lambda: any(faults(server)))
        assert not engine.num_streams


async def test_an_engine_refuses_whoever_is_no_router(tmp_path, settings, authority):
    _, engines = make_engines(mount_secret(tmp_path / "engine", make_files(authority, ENGINE)))
    mount_secret(tmp_path / "router", make_files(authority, "other-router.ns.svc"))
    async with serving(*engines), running(settings) as server:
        write_engine_addresses(tmp_path, *engines)

        def refusals() -> list[str]:
            return [fault for fault in faults(server) if "permission_denied" in fault]

        # One of the engines is asked first.
        await until(refusals)
        assert f"the certificate is for other-router.ns.svc; this port serves {ROUTER} only" in refusals()[0]
        assert not any(engine.num_streams for engine in engines)


async def test_certificates_and_their_authority_change_under_a_stream(tmp_path, settings, authority, stranger):
    """First both trust both authorities, then both get certificates of the new one, then nobody trusts the old one."""
    both = (authority, stranger)
    certificates, engines = make_engines(
        mount_secret(tmp_path / "engine", make_files(authority, ENGINE, trusted=both)), step_s=0.02
    )
    mount_secret(tmp_path / "router", make_files(authority, ROUTER, trusted=both))
    async with serving(*engines), running(settings) as server, client(server) as http:
        write_engine_addresses(tmp_path, *engines)
        await until_ready(server)
        body = {**BODY, "max_tokens": 300, "stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            peers = server._security.peers
            for step in ((stranger, both), (stranger, (stranger,))):
                before = peers.engine_tls
                mount_secret(tmp_path / "engine", make_files(step[0], ENGINE, trusted=step[1]))
                assert certificates.refresh()
                mount_secret(tmp_path / "router", make_files(step[0], ROUTER, trusted=step[1]))
                await until(lambda before=before: peers.engine_tls is not before)
            # An engine that comes now is trusted by its new certificate alone.
            late = FakeEngine(
                FakeCore("late"), credentials=make_server_credentials(certificates), interceptors=[PeerCheck([ROUTER])]
            )
            async with serving(late):
                write_engine_addresses(tmp_path, *engines, late)
                await until(lambda: "late" in server.router.state.engines.connected)
                rest = [line async for line in lines]
            assert rest[-2] == "data: [DONE]"
            assert json.loads(rest[-4].removeprefix("data: "))["usage"]["completion_tokens"] == 300
        assert all(engine.num_streams == 1 for engine in engines)


@pytest.mark.parametrize(
    ("names", "signer", "status"),
    [
        ((CONTROL,), "authority", None),
        ((ENGINE,), "authority", grpc.StatusCode.PERMISSION_DENIED),
        ((ROUTER,), "authority", grpc.StatusCode.PERMISSION_DENIED),
        ((CONTROL,), "stranger", grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["the operator", "an engine", "a router", "a stranger"],
)
async def test_the_control_port_is_the_control_planes(tmp_path, settings, authority, stranger, names, signer, status):
    issuer = {"authority": authority, "stranger": stranger}[signer]
    folder = mount_secret(tmp_path / "client", make_files(issuer, *names, trusted=(authority, issuer)))
    shown = CertificateFolder(folder, is_mutual=True).current
    async with running(settings) as server:
        address = f"127.0.0.1:{server.ports['control']}"
        async with make_channel(address, shown, ROUTER) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            calls = (stub.GetStatus(control_pb2.GetStatusRequest()), stub.ApplyPlan(control_pb2.ApplyPlanRequest()))
            for call in calls:
                if status is None:
                    assert (await call).generation == 1
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is status
        async with grpc.aio.insecure_channel(address) as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await control_pb2_grpc.ControlStub(plain).GetStatus(control_pb2.GetStatusRequest())
        async with asyncio.timeout(10):
            assert (await get(server, "/livez"))[0] == 200


@pytest.mark.parametrize(
    ("given", "origins"),
    [("", set()), ("https://a", {"https://a"}), ("https://a,https://b,", {"https://a", "https://b"})],
)
def test_pages_that_may_call_stand_between_commas(given, origins):
    assert RouterSecurity(SecuritySettings(allowed_origins=given)).client_access.origins == origins


def test_peers_must_be_named(tmp_path):
    with pytest.raises(ValidationError, match="--peer-tls needs --engine-name and --control-name"):
        make_settings(tmp_path, peer_tls="x", control_name="y")
    with pytest.raises(ValidationError, match="--peer-tls needs --engine-name and --control-name"):
        make_settings(tmp_path, peer_tls="x", engine_name=ENGINE)
