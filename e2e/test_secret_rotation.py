"""API keys and certificates on real processes: who is served, and rotation of all of them under a running stream."""

from __future__ import annotations

import asyncio
import copy
import json
import signal
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import psutil
import pytest
import trustme
from certificate_files import make_files, mount_secret
from cluster import SLUICE
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cluster import Cluster

PORTS = "26000-26099"
HTTP_PORT = 26100
KEY, NEXT_KEY = "sk-canary-first-1843", "sk-canary-second-2950"
PEERS = ("secured-engines.default.svc", "secured-router-control.default.svc")
END = "-----END CERTIFICATE-----"
NUM_TOKENS = 400
BODY = {"model": "tiny", "prompt": "def f(x):", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secrets(tmp_path: Path, authority: trustme.CA) -> Path:
    """Folder with the cluster's Secrets."""
    folder = tmp_path / "cluster" / ".sluice" / "secrets"
    mount_secret(folder / "keys", {"alice": KEY.encode()})
    mount_secret(folder / "front", make_files(authority, "127.0.0.1"))
    mount_secret(folder / "peers", make_files(authority, *PEERS))
    return folder


@pytest.fixture
def secured(example: dict[str, Any], secrets: Path, start_cluster: Callable[..., Any]) -> Iterator[Cluster]:
    """A small cluster with API keys and TLS on all ports."""
    manifest = copy.deepcopy(example)
    manifest["metadata"]["name"] = "secured"
    spec = manifest["spec"]
    spec["replicas"] = 2
    spec["router"] |= {
        "replicas": 1,
        "service": {"port": HTTP_PORT},
        "auth": {"mode": "APIKey", "apiKey": {"secretName": "keys"}},
        "tls": {"mode": "SecretRef", "secretName": "front"},
    }
    spec["network"] = {"tls": {"mode": "SecretRef", "secretName": "peers"}}
    with start_cluster(manifest, PORTS) as cluster:
        cluster.wait_ready()
        yield cluster


def connect(cluster: Cluster, authority: trustme.CA, key: str) -> httpx.AsyncClient:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return httpx.AsyncClient(
        base_url=f"https://{cluster.address(port='http')}",
        verify=context,
        headers={"Authorization": f"Bearer {key}"},
        trust_env=False,
        timeout=60,
    )


async def is_let_in(cluster: Cluster, authority: trustme.CA, key: str) -> bool:
    async with connect(cluster, authority, key) as http:
        try:
            return (await http.get("/v1/models")).status_code == 200
        except httpx.ConnectError:
            return False


async def is_shown(cluster: Cluster, chain: bytes) -> bool:
    """Whether all engines and the router show a certificate to their peers: then they also trust what came with it."""
    engines = (f"127.0.0.1:{record['ports']['grpc']}" for record in cluster.processes("engine").values())
    wanted = ssl.PEM_cert_to_DER_cert(chain.decode().partition(END)[0] + END)
    for address in (cluster.address(port="control"), *engines):
        host, _, port = address.rpartition(":")
        shown = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=10)
        if ssl.PEM_cert_to_DER_cert(shown) != wanted:
            return False
    return True


def read_tokens(lines: list[str]) -> list[int]:
    """Reads the token ids of a whole stream."""
    assert lines[-2] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert not any("error" in event for event in events)
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


def explain(cluster: Cluster, request_id: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLUICE, "explain", request_id],
        cwd=cluster.directory,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.engine
async def test_keys_and_certificates_rotate_under_a_stream_and_stay_secret(
    secured: Cluster, secrets: Path, authority: trustme.CA
) -> None:
    second = trustme.CA()
    async with connect(secured, authority, KEY) as http:
        reference = (await http.post("/v1/completions", json={**BODY, "return_token_ids": True})).json()
        expected = reference["choices"][0]["token_ids"]
        assert len(expected) == NUM_TOKENS
        async with http.stream("POST", "/v1/completions", json=STREAM) as stream:
            assert stream.status_code == 200
            request_id = stream.headers["x-request-id"]
            lines = stream.aiter_lines()
            got = [await anext(lines) for _ in range(3)]
            # First everybody trusts both authorities. Then everybody uses the new one's certificate. Last, the old one
            # is no longer trusted.
            for issuer, trusted in (
                (authority, (authority, second)),
                (second, (authority, second)),
                (second, (second,)),
            ):
                files = make_files(issuer, *PEERS, trusted=trusted)
                mount_secret(secrets / "peers", files)
                async with asyncio.timeout(30):
                    while not await is_shown(secured, files["tls.crt"]):  # noqa: ASYNC110 - it is another process
                        await asyncio.sleep(0.1)
            mount_secret(secrets / "keys", {"alice": NEXT_KEY.encode()})
            mount_secret(secrets / "front", make_files(second, "127.0.0.1"))
            async with asyncio.timeout(30):
                while not await is_let_in(secured, second, NEXT_KEY):  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.1)
            assert not await is_let_in(secured, second, KEY)
            assert not await is_let_in(secured, authority, NEXT_KEY)
            got += [line async for line in lines]
        assert read_tokens(got) == expected
    # An engine that restarts uses the new certificate, and the others trust it.
    secured.kill("engine-0", signal.SIGKILL)
    secured.wait("engine-0 is away", lambda status: not status["is_ready"])
    secured.wait_ready()
    async with connect(secured, second, NEXT_KEY) as http:
        answer = await http.post("/v1/completions", json={**BODY, "return_token_ids": True})
        assert answer.json()["choices"][0]["token_ids"] == expected
    assert request_id in explain(secured, request_id, SLUICE_API_KEY=NEXT_KEY).stdout
    refused = explain(secured, request_id)
    assert refused.returncode == 1
    assert "asks for a valid API key" in refused.stderr
    await check_clients_without_certificate_are_refused(secured, second)
    check_keys_stay_secret(secured, secrets)


async def check_clients_without_certificate_are_refused(cluster: Cluster, trusted: trustme.CA) -> None:
    """Engines and control ports refuse clients without a certificate, or with one of another authority."""
    files = make_files(trustme.CA(), *PEERS)
    root = trusted.cert_pem.bytes()
    engine = f"127.0.0.1:{cluster.processes('engine')['engine-1']['ports']['grpc']}"
    for address, name in ((engine, PEERS[0]), (cluster.address(port="control"), PEERS[1])):
        for credentials in (
            grpc.ssl_channel_credentials(root),
            grpc.ssl_channel_credentials(root, files["tls.key"], files["tls.crt"]),
        ):
            options = [("grpc.ssl_target_name_override", name)]
            async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def check_keys_stay_secret(cluster: Cluster, secrets: Path) -> None:
    written = [
        path.read_bytes() for path in cluster.directory.rglob("*") if path.is_file() and secrets not in path.parents
    ]
    assert len(written) > 5
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    seen = b"".join(written) + json.dumps(cluster.status()).encode()
    seen += b"".join(" ".join(process.cmdline()).encode() for process in family)
    seen += b"".join(str(process.environ()).encode() for process in family)
    assert b"canary" not in seen
    assert b"PRIVATE KEY" not in seen
