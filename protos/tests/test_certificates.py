"""Certificates are used only when they work, and follow their folder; who has none that is trusted is not served."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from pathlib import Path

import grpc
import pytest
import trustme
from certificate_files import make_files, mount_secret
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sluice.certificate_rotation import CertificateFolder, keep_fresh
from sluice.certificates import (
    CertificateError,
    load_chain,
    make_client_context,
    make_server_context,
    read_certificates,
)
from sluice.grpc_credentials import PeerCheck, make_channel, make_server_credentials

LONG_AGO = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
SERVER, CLIENT = "server.ns.svc", "client.ns.svc"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def stranger() -> trustme.CA:
    return trustme.CA()


def test_a_folder_says_whom_it_is_for_and_until_when(tmp_path: Path, authority: trustme.CA) -> None:
    end = dt.datetime(2031, 5, 1, tzinfo=dt.UTC)
    mount_secret(tmp_path, make_files(authority, "a.svc", "127.0.0.1", "b.svc", not_after=end))
    for is_mutual in (True, False):
        found = read_certificates(tmp_path, is_mutual=is_mutual)
        assert found.names == ("a.svc", "b.svc")
        assert found.expires_unix_s == end.timestamp()
        assert bool(found.authorities) == is_mutual


async def test_an_authority_that_is_not_its_own_root_is_trusted_by_openssl_and_grpc(
    tmp_path: Path, authority: trustme.CA
) -> None:
    child = authority.create_child_ca()
    mount_secret(tmp_path, make_files(child, SERVER, CLIENT))
    folder = CertificateFolder(tmp_path, is_mutual=True)
    server = grpc.aio.server(interceptors=[PeerCheck([CLIENT])])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", make_server_credentials(folder))
    await server.start()
    async with make_channel(f"127.0.0.1:{port}", folder.current, SERVER) as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status
    context = make_client_context(folder.current)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=SERVER)
    writer.close()
    await server.stop(0)


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
def test_a_key_may_end_with_or_without_a_new_line(tmp_path: Path, authority: trustme.CA, end: bytes) -> None:
    files = make_files(authority, "a.svc")
    mount_secret(tmp_path, {**files, "tls.key": files["tls.key"].rstrip() + end})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_chain(context, read_certificates(tmp_path, is_mutual=False))


def test_a_front_needs_no_authority(tmp_path: Path, authority: trustme.CA) -> None:
    files = make_files(authority, "a.svc")
    del files["ca.crt"]
    mount_secret(tmp_path, files)
    assert read_certificates(tmp_path, is_mutual=False).names == ("a.svc",)
    with pytest.raises(CertificateError, match=r"ca.crt cannot be read"):
        read_certificates(tmp_path, is_mutual=True)


WRONG = {
    "another's key": ({"tls.key": b"OTHER"}, "key values mismatch"),
    "no PEM": ({"tls.crt": b"canary-7281"}, "not in PEM"),
    "no text": ({"ca.crt": b"\xff\xfe"}, "not in PEM"),
    "nothing in it": ({"ca.crt": b"\n"}, "ca.crt is empty"),
    "signed by somebody else": ({"ca.crt": b"STRANGER"}, "is not valid: unable to get local issuer"),
    "over": ({"tls.crt": b"EXPIRED", "tls.key": b"EXPIRED"}, "is not valid: certificate has expired"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_work_is_refused_and_not_quoted(
    tmp_path: Path, authority: trustme.CA, stranger: trustme.CA, change: dict[str, bytes], message: str
) -> None:
    expired = make_files(authority, "a.svc", not_after=LONG_AGO)
    known = {b"OTHER": make_files(authority, "a.svc"), b"STRANGER": make_files(stranger, "a.svc"), b"EXPIRED": expired}
    files = make_files(authority, "a.svc")
    for name, value in change.items():
        files[name] = known[value][name] if value in known else value
    mount_secret(tmp_path, files)
    with pytest.raises(CertificateError, match=message) as caught:
        read_certificates(tmp_path, is_mutual=True)
    assert str(tmp_path) in str(caught.value)
    assert "canary" not in str(caught.value)


def test_a_key_is_not_shown_with_its_certificate(tmp_path: Path, authority: trustme.CA) -> None:
    files = make_files(authority, "a.svc")
    mount_secret(tmp_path, files)
    assert files["tls.key"].decode().splitlines()[1] not in repr(read_certificates(tmp_path, is_mutual=True))


def test_a_new_version_is_in_force_and_a_bad_one_is_not(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    mount_secret(tmp_path, make_files(authority, "a.svc"))
    folder = CertificateFolder(tmp_path, is_mutual=True)
    first = folder.current
    assert not folder.refresh()
    mount_secret(tmp_path, {**make_files(authority, "b.svc"), "tls.key": b"canary-1734"})
    assert not folder.refresh()
    assert not folder.refresh()
    assert folder.current is first
    assert caplog.text.count("the certificate in force stays") == 1
    mount_secret(tmp_path, make_files(authority, "c.svc"))
    assert folder.refresh()
    assert folder.current.names == ("c.svc",)
    assert "new certificate for c.svc until" in caplog.text
    assert "canary" not in caplog.text


def test_plain_files_are_followed_too_even_half_written(tmp_path: Path, authority: trustme.CA) -> None:
    old, new = make_files(authority, "a.svc"), make_files(authority, "b.svc")
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    folder = CertificateFolder(tmp_path, is_mutual=True)
    (tmp_path / "tls.crt").write_bytes(new["tls.crt"])
    assert not folder.refresh()
    (tmp_path / "tls.key").write_bytes(new["tls.key"])
    assert folder.refresh()
    assert folder.current.names == ("b.svc",)


def test_reading_a_certificate_leaves_no_file_open(tmp_path: Path, authority: trustme.CA) -> None:
    mount_secret(tmp_path, make_files(authority, "a.svc"))
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    for _ in range(3):
        read_certificates(tmp_path, is_mutual=True)
    assert len(list(open_files.iterdir())) == before


def test_the_same_certificate_in_another_version_is_no_news(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_files(authority, "a.svc")
    mount_secret(tmp_path, files)
    folder = CertificateFolder(tmp_path, is_mutual=True)
    first = folder.current
    caplog.set_level("INFO")
    mount_secret(tmp_path, files)
    assert not folder.refresh()
    assert folder.current is first
    assert caplog.text == ""


async def test_what_changed_is_noticed_by_itself(tmp_path: Path, authority: trustme.CA) -> None:
    mount_secret(tmp_path, make_files(authority, "a.svc"))
    folder = CertificateFolder(tmp_path, is_mutual=True)
    task = asyncio.create_task(keep_fresh([folder.refresh], interval_s=0.01))
    mount_secret(tmp_path, make_files(authority, "b.svc"))
    async with asyncio.timeout(10):
        while folder.current.names != ("b.svc",):  # noqa: ASYNC110 - another task changes it, without a word
            await asyncio.sleep(0.01)
    task.cancel()


async def test_a_connection_keeps_its_certificate_and_the_next_one_gets_the_new(
    tmp_path: Path, authority: trustme.CA
) -> None:
    mount_secret(tmp_path, make_files(authority, SERVER, CLIENT))
    folder = CertificateFolder(tmp_path, is_mutual=True)
    context = make_server_context(folder.current)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def connect(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        client = make_client_context(folder.current)
        return await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)

    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async with server:
        reader, writer = await connect(SERVER)
        mount_secret(tmp_path, make_files(authority, "renewed.svc"))
        assert folder.refresh()
        load_chain(context, folder.current)
        writer.write(b"still there\n")
        assert await reader.readline() == b"still there\n"
        with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
            await connect(SERVER)
        await close((await connect("renewed.svc"))[1])
        await close(writer)


def test_less_than_tls_1_2_is_not_spoken(tmp_path: Path, authority: trustme.CA) -> None:
    mount_secret(tmp_path, make_files(authority, SERVER))
    current = CertificateFolder(tmp_path, is_mutual=True).current
    for context in (make_server_context(current), make_client_context(current)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("signed_by", "names", "status"),
    [
        ("authority", (CLIENT,), None),
        ("authority", ("other.svc", CLIENT), None),
        ("authority", ("other.svc",), grpc.StatusCode.PERMISSION_DENIED),
        ("stranger", (CLIENT,), grpc.StatusCode.UNAVAILABLE),
        ("nobody", (), grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["trusted", "one of several names", "another name", "a stranger's authority", "no certificate"],
)
async def test_grpc_serves_whom_an_authority_and_a_name_speak_for(
    tmp_path: Path,
    authority: trustme.CA,
    stranger: trustme.CA,
    signed_by: str,
    names: tuple[str, ...],
    status: grpc.StatusCode | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mount_secret(tmp_path / "server", make_files(authority, SERVER))
    folder = CertificateFolder(tmp_path / "server", is_mutual=True)
    server = grpc.aio.server(interceptors=[PeerCheck([CLIENT])])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", make_server_credentials(folder))
    await server.start()
    address = f"127.0.0.1:{port}"
    if signed_by == "nobody":
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        channel = grpc.aio.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", SERVER)])
    else:
        issuer = {"authority": authority, "stranger": stranger}[signed_by]
        files = make_files(issuer, *names, trusted=(issuer,))
        mount_secret(tmp_path / "client", files)
        shown = CertificateFolder(tmp_path / "client", is_mutual=True).current
        # A stranger who trusts our server gets no further than one who does not.
        trusting = type(shown)(chain=shown.chain, key=shown.key, authorities=authority.cert_pem.bytes())
        channel = make_channel(address, trusting, SERVER)
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        if status is None:
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status
            # Calls that stream pass the same check.
            async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                assert answer.status
                break
        else:
            for call in (
                stub.Check(health_pb2.HealthCheckRequest()),
                aiter(stub.Watch(health_pb2.HealthCheckRequest())),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call if hasattr(call, "__await__") else anext(call))
                assert caught.value.code() is status
    assert ("is refused: the certificate is for" in caplog.text) is (status is grpc.StatusCode.PERMISSION_DENIED)
    await server.stop(0)


async def test_grpc_shows_and_trusts_what_is_new(tmp_path: Path, authority: trustme.CA, stranger: trustme.CA) -> None:
    mount_secret(tmp_path, make_files(authority, SERVER, CLIENT))
    folder = CertificateFolder(tmp_path, is_mutual=True)
    server = grpc.aio.server(interceptors=[PeerCheck([CLIENT])])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", make_server_credentials(folder))
    await server.start()
    request = health_pb2.HealthCheckRequest()
    async with make_channel(f"127.0.0.1:{port}", folder.current, SERVER) as before:
        watching = aiter(health_pb2_grpc.HealthStub(before).Watch(request))
        await anext(watching)
        old = folder.current
        mount_secret(tmp_path, make_files(stranger, SERVER, CLIENT))
        assert folder.refresh()
        async with make_channel(f"127.0.0.1:{port}", folder.current, SERVER) as after:
            assert (await health_pb2_grpc.HealthStub(after).Check(request)).status
        async with make_channel(f"127.0.0.1:{port}", old, SERVER) as late:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(late).Check(request)
        # The connection that was there is not asked again.
        assert (await health_pb2_grpc.HealthStub(before).Check(request)).status
    await server.stop(0)


async def test_a_call_without_a_method_is_refused_as_ever(tmp_path: Path, authority: trustme.CA) -> None:
    mount_secret(tmp_path, make_files(authority, SERVER, CLIENT))
    folder = CertificateFolder(tmp_path, is_mutual=True)
    server = grpc.aio.server(interceptors=[PeerCheck([CLIENT])])
    port = server.add_secure_port("127.0.0.1:0", make_server_credentials(folder))
    await server.start()
    async with make_channel(f"127.0.0.1:{port}", folder.current, SERVER) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)
