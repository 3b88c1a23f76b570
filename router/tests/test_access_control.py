"""The clients' ports with API keys and TLS: who is served, who is told what, and that keys go nowhere."""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
from typing import TYPE_CHECKING

import aiohttp
import grpc
import httpx
import openai
import pytest
import trustme
from certificate_files import make_files, mount_secret
from data_plane_harness import until
from edge_fakes import FakePlane
from fake_engine import FakeCore, FakeEngine, make_plan, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_harness import PD, get, make_settings, running, serving_ready, until_ready, write_engine_addresses

from sluice.certificate_rotation import CertificateFolder
from sluice.v1 import plan_pb2, router_pb2, router_pb2_grpc
from sluice_router.api.http.http_api import HttpApi, HttpSettings
from sluice_router.security.access_control import ClientAccess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sluice_router.server import RouterServer

KEY, SECOND_KEY, WRONG_KEY = "sk-canary-alice-0001", "sk-canary-alice-0002", "sk-canary-wrong-0003"
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
NAME = "llm.example.com"


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return mount_secret(tmp_path / "keys", {"alice": KEY.encode()})


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def client(server: RouterServer, **arguments: object) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.ports['http']}",
        trust_env=False,
        **arguments,  # type: ignore[arg-type]
    )


async def test_requests_need_a_key_and_probes_do_not(tmp_path, keys):
    async with serving_ready(tmp_path, api_keys=str(keys)) as server, client(server) as http:
        assert (await http.post("/v1/completions", json=BODY, headers=bearing(KEY))).status_code == 200
        for header, code in ((None, "missing_api_key"), (bearing(WRONG_KEY), "invalid_api_key")):
            answer = await http.post("/v1/completions", json=BODY, headers=header)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-sluice-reason"] == code
            assert answer.json()["error"]["code"] == code
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert answer.json()["error"]["param"] is None
        for path in ("/livez", "/readyz", "/health"):
            assert (await http.get(path)).status_code == 200
        for path in ("/v1/models", "/v1/models/tiny", "/version", "/debug/requests/x", "/metrics", "/nowhere"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/v1/models", headers=bearing(KEY))).status_code == 200
        # What is counted of others is on the scrapers' port only; what else is there needs a key too.
        assert (await http.get("/metrics", headers=bearing(KEY))).status_code == 404
        assert (await get(server, "/metrics"))[0] == 200
        assert (await get(server, "/v1/models"))[0] == 401
        assert (await get(server, "/debug/requests/x"))[0] == 401
        debug = f"http://127.0.0.1:{server.ports['metrics']}/debug/requests/x"
        assert (await http.get(debug, headers=bearing(KEY))).json()["error"]["code"] == "unknown_request"


async def test_the_official_client_knows_what_is_wrong(tmp_path, keys):
    async with serving_ready(tmp_path, api_keys=str(keys)) as server:
        url = f"http://127.0.0.1:{server.ports['http']}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as good:
            answer = await good.completions.create(
                model="tiny", prompt=[1, 2, 3], max_tokens=4, extra_body={"ignore_eos": True}
            )
            assert answer.usage.completion_tokens == 4
        async with openai.AsyncOpenAI(base_url=url, api_key=WRONG_KEY, max_retries=0) as bad:
            with pytest.raises(openai.AuthenticationError, match="the API key is not valid"):
                await bad.completions.create(model="tiny", prompt="x")


async def test_grpc_needs_a_key_and_its_health_does_not(tmp_path, keys):
    async with (
        serving_ready(tmp_path, api_keys=str(keys)) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel,
    ):
        stub = router_pb2_grpc.RouterStub(channel)
        request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(values=[1, 2, 3]))
        request.sampling.max_tokens = 4
        request.sampling.ignore_eos = True
        for metadata, code in (
            ((), "missing_api_key"),
            ((("authorization", f"Bearer {WRONG_KEY}"),), "invalid_api_key"),
        ):
            for call in (
                aiter(stub.Generate(request, metadata=metadata)),
                stub.ListModels(router_pb2.ListModelsRequest(), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call if hasattr(call, "__await__") else anext(call))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert dict(caught.value.trailing_metadata())["x-sluice-reason"] == code
                assert "canary" not in caught.value.details()
        good = (("authorization", f"Bearer {KEY}"),)
        deltas = [delta async for delta in stub.Generate(request, metadata=good)]
        assert deltas[-1].usage.output_tokens == 4
        assert (await stub.ListModels(router_pb2.ListModelsRequest(), metadata=good)).models
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status


async def test_a_change_of_keys_is_in_force_at_once_and_breaks_no_stream(tmp_path, keys):
    async with serving_ready(tmp_path, step_s=0.02, api_keys=str(keys)) as server, client(server) as http:
        body = {**BODY, "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=body, headers=bearing(KEY)) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            mount_secret(keys, {"alice": SECOND_KEY.encode()})

            async def is_let_in(key: str) -> bool:
                return (await http.get("/v1/models", headers=bearing(key))).status_code == 200

            async with asyncio.timeout(10):
                while not await is_let_in(SECOND_KEY):  # noqa: ASYNC110 - the folder is looked at from time to time
                    await asyncio.sleep(0.05)
            assert not await is_let_in(KEY)
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        assert json.loads(rest[-4].removeprefix("data: "))["usage"]["completion_tokens"] == 200


async def test_without_keys_the_router_is_not_ready_and_says_why(tmp_path, keys, caplog):
    mount_secret(keys, {})
    engines = [FakeEngine(FakeCore(name)) for name in PD]
    async with (
        serving(*engines),
        running(make_settings(tmp_path, api_keys=str(keys))) as server,
        client(server) as http,
    ):
        write_engine_addresses(tmp_path, *engines)
        await until(lambda: len(server.router.state.engines.connected) == len(PD))
        status, text = await get(server, "/readyz")
        assert status == 503
        assert f"{keys} holds no key that can be used; all are refused" in text
        answer = await http.post("/v1/completions", json=BODY, headers=bearing(KEY))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "keys_unavailable"
        assert answer.headers["retry-after"]
        mount_secret(keys, {"alice": KEY.encode()})
        await until_ready(server)
        assert (await http.post("/v1/completions", json=BODY, headers=bearing(KEY))).status_code == 200


async def test_keys_go_to_no_engine_no_log_no_answer_and_no_metric(tmp_path, keys, caplog):
    caplog.set_level("DEBUG")
    engines = [FakeEngine(FakeCore(name)) for name in PD]
    answers = []
    async with (
        serving(*engines),
        running(make_settings(tmp_path, api_keys=str(keys))) as server,
        client(server) as http,
    ):
        write_engine_addresses(tmp_path, *engines)
        await until_ready(server)
        for key in (KEY, WRONG_KEY):
            answers += [
                await http.post("/v1/completions", json=content, headers=bearing(key))
                for content in (BODY, {**BODY, "max_tokens": 0}, {**BODY, "max_tokens": 3, "stream": True})
            ]
            answers.append(await http.get("/nowhere", headers=bearing(key)))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.ports["http"])
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\x00\r\n\r\n".encode())
        malformed = await reader.read()
        writer.close()
        statuses, metrics = [answer.status_code for answer in answers], (await get(server, "/metrics"))[1]
        explained = await http.get(f"/debug/requests/{answers[0].headers['x-request-id']}", headers=bearing(KEY))
    assert statuses == [200, 400, 200, 404, 401, 401, 401, 401]
    assert b"400" in malformed.splitlines()[0]
    sent = b"".join(message.SerializeToString() for engine in engines for message in engine.core.commands)
    assert sent
    seen = sent + malformed + caplog.text.encode() + metrics.encode() + explained.content
    seen += b"".join(answer.content + str(answer.headers).encode() for answer in answers)
    assert b"canary" not in seen
    assert 'sluice_key_requests_total{owner="alice",result="length"} 2.0' in metrics
    assert 'sluice_key_tokens_total{kind="output",owner="alice"} 7.0' in metrics
    assert 'sluice_key_tokens_total{kind="prompt",owner="alice"} 6.0' in metrics
    assert 'sluice_answers_total{protocol="http",reason="invalid_api_key",status="401"} 4.0' in metrics


async def test_owners_who_are_gone_leave_the_metrics(tmp_path, keys):
    async with serving_ready(tmp_path, api_keys=str(keys)) as server, client(server) as http:
        await http.post("/v1/completions", json=BODY, headers=bearing(KEY))
        assert 'owner="alice"' in (await get(server, "/metrics"))[1]
        mount_secret(keys, {"bob": SECOND_KEY.encode()})
        await until(lambda: not server.router.state.metrics.counters["key_requests"])
        await http.post("/v1/completions", json=BODY, headers=bearing(SECOND_KEY))
        metrics = (await get(server, "/metrics"))[1]
        assert 'owner="bob"' in metrics
        assert 'owner="alice"' not in metrics


async def test_limits_of_an_owner_are_refused_by_name_over_http_and_grpc(tmp_path, keys):
    limits = [plan_pb2.OwnerLimits(owner="*", requests_per_minute=2, max_output_tokens=3, weight=1)]
    async with (
        serving_ready(tmp_path, api_keys=str(keys)) as server,
        client(server, headers=bearing(KEY)) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel,
    ):
        server.router.apply_plan(make_plan(PD, generation=2, owner_limits=limits))
        too_long = await http.post("/v1/completions", json=BODY)
        assert too_long.status_code == 400
        assert too_long.json()["error"]["message"] == "max_tokens: at most 3 for alice, not 4"
        assert too_long.json()["error"]["code"] == "max_output_tokens"
        unsaid = {name: value for name, value in BODY.items() if name != "max_tokens"}
        for body in (unsaid, {**BODY, "max_tokens": 3}):
            assert (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 3
        refused = await http.post("/v1/completions", json=unsaid)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == refused.headers["x-sluice-reason"] == "requests_per_minute"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "requests_per_minute of alice is 2: 2 are in use" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 61
        stub = router_pb2_grpc.RouterStub(channel)
        request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(values=[1, 2, 3]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(request, metadata=(("authorization", f"Bearer {KEY}"),))))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata())
        assert trailing["x-sluice-reason"] == "requests_per_minute"
        assert float(trailing["retry-after"]) >= 1
        server.router.apply_plan(make_plan(PD, generation=3))
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        metrics = (await get(server, "/metrics"))[1]
        assert 'sluice_key_limited_total{limit="requests_per_minute",owner="alice"} 2.0' in metrics
        assert 'sluice_key_requests_total{owner="alice",result="limited"} 2.0' in metrics


# --- web pages -------------------------------------------------------------------------------------------------------

PAGE = "https://chat.example.com"


async def test_pages_of_allowed_origins_may_ask_first_without_a_key_and_read_what_comes(tmp_path, keys):
    origins = f"{PAGE},http://localhost:3000"
    async with serving_ready(tmp_path, api_keys=str(keys), allowed_origins=origins) as server, client(server) as http:
        asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        asks["Access-Control-Request-Headers"] = "authorization, x-stainless-os"
        preflight = await http.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert preflight.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        for body in (BODY, {**BODY, "stream": True}, {**BODY, "max_tokens": 0}):
            answer = await http.post("/v1/completions", json=body, headers={**bearing(KEY), "Origin": PAGE})
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "Origin"
            foreign = await http.post("/v1/completions", json=body, headers={**bearing(KEY), "Origin": "https://evil"})
            assert foreign.status_code == answer.status_code
            assert "access-control-allow-origin" not in foreign.headers
            assert foreign.headers["vary"] == "Origin"
        refused = await http.options("/v1/completions", headers={**asks, "Origin": "https://evil"})
        assert "access-control-allow-origin" not in refused.headers
        assert (await http.options("/v1/completions", headers=bearing(KEY))).status_code == 405
        without_key = await http.post("/v1/completions", json=BODY, headers={"Origin": PAGE})
        assert (without_key.status_code, without_key.headers["access-control-allow-origin"]) == (401, PAGE)


async def test_no_page_may_call_unless_it_is_allowed_and_a_star_allows_all(tmp_path):
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with serving_ready(tmp_path) as server, client(server) as http:
        assert (await http.options("/v1/completions", headers=asks)).status_code == 405
        answer = await http.post("/v1/completions", json=BODY, headers={"Origin": PAGE})
        assert not {"vary", "access-control-allow-origin"} & set(answer.headers)
    async with serving_ready(tmp_path, allowed_origins="*") as server, client(server) as http:
        preflight = await http.options("/v1/completions", headers=asks)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, "*")


# --- TLS -------------------------------------------------------------------------------------------------------------


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_http_and_grpc_are_encrypted_and_nothing_else_is_spoken(tmp_path, authority):
    folder = mount_secret(tmp_path / "tls", make_files(authority, NAME, "localhost", "127.0.0.1"))
    async with serving_ready(tmp_path, front_tls=str(folder)) as server:
        url = f"https://127.0.0.1:{server.ports['http']}"
        async with httpx.AsyncClient(base_url=url, verify=trusting(authority), trust_env=False) as http:
            assert (await http.post("/v1/completions", json=BODY)).json()["usage"]["completion_tokens"] == 4
            streamed = await http.post("/v1/completions", json={**BODY, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        async with client(server) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/livez")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.maximum_version, old.check_hostname, old.verify_mode = ssl.TLSVersion.TLSv1_2, False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", server.ports["http"], ssl=old)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        writer.close()
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.ports['grpc']}", credentials) as channel:
            assert (await router_pb2_grpc.RouterStub(channel).ListModels(router_pb2.ListModelsRequest())).models
        metrics = (await get(server, "/metrics"))[1]
        assert 'sluice_certificate_expiry_timestamp_seconds{use="front"}' in metrics


async def test_a_new_certificate_is_shown_to_new_clients_while_a_stream_goes_on(tmp_path, authority):
    folder = mount_secret(tmp_path / "tls", make_files(authority, "127.0.0.1"))
    second = trustme.CA()
    async with serving_ready(tmp_path, step_s=0.02, front_tls=str(folder)) as server:
        url = f"https://127.0.0.1:{server.ports['http']}"
        grpc_address = f"127.0.0.1:{server.ports['grpc']}"

        async def trusts_http(ca: trustme.CA) -> bool:
            async with httpx.AsyncClient(base_url=url, verify=trusting(ca), trust_env=False) as http:
                try:
                    return (await http.get("/livez")).status_code == 200
                except httpx.ConnectError:
                    return False

        async def trusts_grpc(ca: trustme.CA) -> bool:
            credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
            async with grpc.aio.secure_channel(grpc_address, credentials) as channel:
                try:
                    await router_pb2_grpc.RouterStub(channel).ListModels(router_pb2.ListModelsRequest())
                except grpc.aio.AioRpcError:
                    return False
                return True

        async with httpx.AsyncClient(base_url=url, verify=trusting(authority), trust_env=False) as http:
            body = {**BODY, "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}
            async with http.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                assert await trusts_http(authority)
                mount_secret(folder, make_files(second, "127.0.0.1"))
                async with asyncio.timeout(10):
                    while not await trusts_http(second):  # noqa: ASYNC110 - looked at from time to time
                        await asyncio.sleep(0.05)
                assert not await trusts_http(authority)
                assert await trusts_grpc(second)
                assert not await trusts_grpc(authority)
                rest = [line async for line in lines]
            assert rest[-2] == "data: [DONE]"
            assert json.loads(rest[-4].removeprefix("data: "))["usage"]["completion_tokens"] == 200
            # The connection goes on as well, with the certificate that it began with.
            assert (await http.get("/livez")).status_code == 200


async def test_a_client_that_does_not_end_its_handshake_is_cut_off(tmp_path, authority, text):
    folder = mount_secret(tmp_path / "tls", make_files(authority, "127.0.0.1"))
    access = ClientAccess(certificates=CertificateFolder(folder, is_mutual=False))
    api = HttpApi(FakePlane(), text, HttpSettings(header_timeout_s=0.3), access=access)
    port = await api.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # The first byte of a handshake, and no more.
    writer.write(b"\x16")
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    await api.close(0)


async def test_a_client_that_leaves_is_noticed_through_tls_too(tmp_path, authority):
    folder = mount_secret(tmp_path / "tls", make_files(authority, "127.0.0.1"))
    engines = [FakeEngine(FakeCore(name), step_s=0.02) for name in PD]
    async with serving(*engines), running(make_settings(tmp_path, front_tls=str(folder))) as server:
        write_engine_addresses(tmp_path, *engines)
        await until_ready(server)
        connector = aiohttp.TCPConnector(ssl=trusting(authority))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"https://127.0.0.1:{server.ports['http']}/v1/completions"
            answer = await session.post(url, json={**BODY, "max_tokens": 400, "stream": True})
            await answer.content.readline()
            assert server.router.state.requests.live
            answer.close()
            await until(lambda: not server.router.state.requests.live)
        await until(lambda: not any(engine.core.running for engine in engines))


def test_a_router_does_not_start_without_its_certificate(tmp_path, monkeypatch, capsys):
    from sluice_router import __main__ as program  # noqa: PLC0415 - the program itself

    make_settings(tmp_path)
    monkeypatch.setattr(
        "sys.argv",
        ["sluice_router", "--model", str(tmp_path), "--engines", "dns:x:1", "--front-tls", str(tmp_path / "none")],
    )
    assert program.main() == 2
    assert "none: tls.crt cannot be read: No such file or directory" in capsys.readouterr().err
