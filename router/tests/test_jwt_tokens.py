"""JSON Web Tokens: whose count, whose do not and why, and what happens when the issuer's keys change."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import ssl
import time
from typing import TYPE_CHECKING, Any, Self

import grpc
import httpx
import jwt
import pytest
import trustme
from aiohttp import web
from certificate_files import mount_secret
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from pydantic import ValidationError
from server_harness import get, serving_ready

from sluice.v1 import router_pb2, router_pb2_grpc
from sluice_router.errors import KeysUnavailableError, UnauthenticatedError
from sluice_router.observability.metrics import MAX_OWNERS, RouterMetrics
from sluice_router.security import jwt_tokens
from sluice_router.security.jwt_tokens import JwtSettings, JwtVerifier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

ISSUER, AUDIENCE = "https://issuer.example.com", "llm"
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
LEEWAY_S = 300
AUTHORITY = trustme.CA()
ELLIPTIC, OTHER, RSA = (
    AUTHORITY.issue_cert("localhost", key_type=kind).private_key_pem.bytes()
    for kind in (trustme.KeyType.ECDSA, trustme.KeyType.ECDSA, trustme.KeyType.RSA)
)


def make_key_set(**keys: Any) -> bytes:
    found = []
    for key_id, key in keys.items():
        algorithm = RSAAlgorithm(RSAAlgorithm.SHA256) if key is RSA else ECAlgorithm(ECAlgorithm.SHA256)
        public = algorithm.prepare_key(key).public_key()
        found.append({**json.loads(algorithm.to_jwk(public)), "kid": key_id, "use": "sig"})
    return json.dumps({"keys": found}).encode()


def make_token(
    key: Any = ELLIPTIC, key_id: str | None = "one", algorithm: str = "ES256", ends_in_s: float = 3600, **claims: Any
) -> str:
    given = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time() + ends_in_s), "sub": "alice", **claims}
    headers = {} if key_id is None else {"kid": key_id}
    kept = {name: value for name, value in given.items() if value is not None}
    return jwt.encode(kept, key, algorithm=algorithm, headers=headers)


def make_settings(path: Path, **changes: Any) -> JwtSettings:
    fields = {"jwt_keys": path.as_uri(), "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_leeway_s": LEEWAY_S}
    return JwtSettings(**{**fields, **changes})


@pytest.fixture
async def verifier(tmp_path: Path) -> JwtVerifier:
    path = tmp_path / "jwks.json"
    path.write_bytes(make_key_set(one=ELLIPTIC, two=RSA))
    verifier = JwtVerifier(make_settings(path))
    await verifier.refresh()
    return verifier


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"key": RSA, "key_id": "two", "algorithm": "RS256"},
        {"aud": ["other", AUDIENCE]},
        {"ends_in_s": -1},
    ],
    ids=["elliptic curve", "RSA", "several audiences", "within the leeway"],
)
async def test_a_token_names_its_owner(verifier: JwtVerifier, fields: dict[str, Any]) -> None:
    token = make_token(**fields)
    assert verifier.find_owner(token) == "alice"
    assert verifier.find_owner(token) == "alice"
    assert not verifier.fault


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"key": OTHER}, "Signature verification failed"),
        ({"key": OTHER, "key_id": "three"}, "its key is not the issuer's"),
        ({"key_id": None}, "its key is not the issuer's"),
        ({"ends_in_s": -LEEWAY_S - 100}, "expired"),
        ({"nbf": 2**34}, "not yet valid"),
        ({"iss": "https://evil"}, "issuer"),
        ({"aud": "other"}, "[Aa]udience"),
        ({"exp": None}, '"exp"'),
        ({"sub": None}, '"sub"'),
        ({"sub": ""}, "claim sub must be 1 to 253 characters"),
        ({"sub": "a b"}, "claim sub must be 1 to 253 characters"),
        ({"key": "", "algorithm": "none"}, "not valid"),
        ({"key": "canary-secret-canary-secret-canary", "algorithm": "HS256"}, "not valid"),
    ],
)
async def test_others_do_not_count(verifier: JwtVerifier, fields: dict[str, Any], words: str) -> None:
    token = make_token(**fields)
    with pytest.raises(UnauthenticatedError, match=words) as caught:
        verifier.find_owner(token)
    assert caught.value.code == "invalid_token"
    assert token not in caught.value.message


@pytest.mark.parametrize("token", ["eyJ.canary.x", "canary", "ключ.canary.\udcff"])
async def test_what_is_no_token_does_not_count_and_is_not_quoted(verifier: JwtVerifier, token: str) -> None:
    with pytest.raises(UnauthenticatedError, match="the token is not valid") as caught:
        verifier.find_owner(token)
    assert "canary" not in caught.value.message


@pytest.mark.parametrize("excess", [0, 1])
async def test_an_owner_may_have_253_characters_and_no_more(verifier: JwtVerifier, excess: int) -> None:
    owner = "a" * (253 + excess)
    if not excess:
        assert verifier.find_owner(make_token(sub=owner)) == owner
        return
    with pytest.raises(UnauthenticatedError, match="must be 1 to 253 characters"):
        verifier.find_owner(make_token(sub=owner))


async def test_another_claim_may_name_the_owner(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(make_key_set(one=ELLIPTIC))
    verifier = JwtVerifier(make_settings(tmp_path / "keys", jwt_owner_claim="tenant"))
    await verifier.refresh()
    assert verifier.find_owner(make_token(tenant="team-a@example.com")) == "team-a@example.com"
    assert verifier.find_owner(make_token(tenant="b", key_id=None)) == "b"


async def test_a_token_that_was_right_ends_with_its_time_and_with_its_key(tmp_path: Path) -> None:
    ahead_s = 0.0
    path = tmp_path / "keys"
    path.write_bytes(make_key_set(one=ELLIPTIC))
    verifier = JwtVerifier(make_settings(path), clock=lambda: time.time() + ahead_s)
    await verifier.refresh()
    token = make_token(ends_in_s=-1)
    assert verifier.find_owner(token) == "alice"
    (owner, end_s) = next(iter(verifier._checked.values()))
    assert owner == "alice"
    assert end_s < time.time() + LEEWAY_S
    path.write_bytes(make_key_set(one=OTHER))
    assert verifier.find_owner(token) == "alice"
    ahead_s = 2 * LEEWAY_S
    await verifier.refresh()
    with pytest.raises(UnauthenticatedError, match="Signature"):
        verifier.find_owner(token)
    path.write_bytes(make_key_set(one=ELLIPTIC))
    await verifier.refresh()
    assert verifier.find_owner(token) == "alice"


async def test_a_token_that_was_right_counts_no_longer_than_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0

    class Later(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Self:
            return super().now(tz) + dt.timedelta(seconds=ahead_s)

    monkeypatch.setattr("jwt.api_jwt.datetime", Later)
    path = tmp_path / "keys"
    path.write_bytes(make_key_set(one=ELLIPTIC))
    verifier = JwtVerifier(make_settings(path), clock=lambda: time.time() + ahead_s)
    await verifier.refresh()
    token = make_token(ends_in_s=1000)
    for each_s in (0.0, 900.0, 1000.0 + LEEWAY_S - 50.0):
        ahead_s = each_s
        assert verifier.find_owner(token) == "alice"
    ahead_s = 1000.0 + LEEWAY_S + 50.0
    with pytest.raises(UnauthenticatedError, match="expired"):
        verifier.find_owner(token)


async def test_a_token_of_a_key_that_was_withdrawn_counts_no_more(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(make_key_set(one=ELLIPTIC, three=OTHER))
    verifier, token = JwtVerifier(make_settings(path)), make_token()
    await verifier.refresh()
    assert verifier.find_owner(token) == "alice"
    path.write_bytes(make_key_set(three=OTHER))
    await verifier.refresh()
    with pytest.raises(UnauthenticatedError, match="its key is not the issuer's"):
        verifier.find_owner(token)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"{}", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b'{"keys": []}', "cannot be read"),
        (b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "one", "alg": "HS256"}]}', "no key for signatures"),
        (make_key_set(one=ELLIPTIC).replace(b'"sig"', b'"enc"'), "no key for signatures"),
    ],
    ids=["no file", "no keys", "no text", "an empty set", "a shared secret", "a key to encrypt with"],
)
async def test_keys_that_cannot_be_read_let_nobody_in_and_old_ones_stay(
    tmp_path: Path, content, words, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    verifier = JwtVerifier(make_settings(path))
    await verifier.refresh()
    assert words in verifier.fault
    assert f"{path.as_uri()} cannot be read" in caplog.text
    with pytest.raises(KeysUnavailableError):
        verifier.find_owner(make_token())
    path.write_bytes(make_key_set(one=ELLIPTIC))
    await verifier.refresh()
    assert not verifier.fault
    assert caplog.text.count("keys of tokens: 1 are in force") == 1
    path.write_bytes(b"")
    await verifier.refresh()
    assert not verifier.fault
    assert verifier.find_owner(make_token()) == "alice"


class Waits:
    """The pauses of what reads keys again and again: none lasts, and each is noted.

    Args:
        monkeypatch: Puts it in the place of asyncio's own.
        num_looks: After so many time-outs the reader is cancelled.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_looks: int) -> None:
        self.noted: list[tuple[str, float]] = []
        self._num_left = num_looks
        self._yield = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", self.sleep)
        monkeypatch.setattr(asyncio, "timeout", self.end_at_once)

    async def sleep(self, delay_s: float) -> None:
        self.noted.append(("sleep", delay_s))
        self._num_left -= 1
        if self._num_left < 0:
            raise asyncio.CancelledError
        await self._yield(0)

    @contextlib.asynccontextmanager
    async def end_at_once(self, delay_s: float) -> AsyncIterator[None]:
        self.noted.append(("wait", delay_s))
        raise TimeoutError
        yield


async def test_keys_are_read_every_five_minutes_and_every_five_seconds_while_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    verifier, waits, faults = JwtVerifier(make_settings(path)), Waits(monkeypatch, 4), []

    def note() -> None:
        faults.append(bool(verifier.fault))
        if len(faults) == 2:
            path.write_bytes(make_key_set(one=ELLIPTIC))

    with pytest.raises(asyncio.CancelledError):
        await verifier.keep(note)
    assert faults == [True, True, False, False, False]
    assert waits.noted == [
        *([("sleep", 5.0)] * 3),
        *[("wait", 295.0), ("sleep", 5.0)] * 2,
    ]


async def test_a_token_of_an_unknown_key_has_the_keys_read_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, looks = tmp_path / "keys", asyncio.Queue[None]()
    path.write_bytes(make_key_set(one=ELLIPTIC))
    verifier, pause = JwtVerifier(make_settings(path)), asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: pause(0))
    keeping = asyncio.create_task(verifier.keep(lambda: looks.put_nowait(None)))
    await asyncio.wait_for(looks.get(), 20)
    path.write_bytes(make_key_set(one=ELLIPTIC, three=OTHER))
    token = make_token(key=OTHER, key_id="three")
    with pytest.raises(UnauthenticatedError, match="its key is not the issuer's"):
        verifier.find_owner(token)
    await asyncio.wait_for(looks.get(), 20)
    assert verifier.find_owner(token) == "alice"
    for _ in range(20):
        await pause(0)
    assert looks.empty()
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_the_oldest_of_the_checked_tokens_is_forgotten_first(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jwt_tokens, "MAX_CHECKED", 2)
    path = tmp_path / "keys.json"
    path.write_bytes(make_key_set(one=ELLIPTIC))
    verifier = JwtVerifier(JwtSettings(jwt_keys=path.as_uri(), jwt_issuer=ISSUER, jwt_audience=AUDIENCE))
    await verifier.refresh()
    for name in ("alice", "bob", "carol"):
        assert verifier.find_owner(make_token(sub=name)) == name
    assert [owner for owner, _ in verifier._checked.values()] == ["bob", "carol"]


@contextlib.asynccontextmanager
async def issuing(answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[JwtVerifier]:
    """Somebody who asks an issuer for its keys over HTTPS."""
    server_tls, client_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    AUTHORITY.issue_cert("localhost").configure_cert(server_tls)
    AUTHORITY.configure_trust(client_tls)
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "localhost", 0, ssl_context=server_tls).start()
    url = f"https://localhost:{runner.addresses[0][1]}/keys"
    try:
        yield JwtVerifier(JwtSettings(jwt_keys=url, jwt_issuer=ISSUER, jwt_audience=AUDIENCE), tls=client_tls)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("excess", [0, 1])
async def test_a_key_set_may_come_in_pieces_and_be_as_large_as_the_limit(monkeypatch, excess: int) -> None:
    keys = make_key_set(one=ELLIPTIC)
    monkeypatch.setattr(jwt_tokens, "MAX_KEY_SET_BYTES", len(keys) - excess)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(keys), 50):
            await response.write(keys[start : start + 50])
            await asyncio.sleep(0.001)
        return response

    async with issuing(answer) as verifier:
        await verifier.refresh()
    if excess:
        assert f"more than {len(keys) - 1} bytes" in verifier.fault
    else:
        assert verifier.find_owner(make_token()) == "alice"


async def test_keys_come_from_the_issuer_over_https_alone(tmp_path: Path) -> None:
    answers = [web.Response(body=make_key_set(one=ELLIPTIC)), web.Response(status=302, headers={"Location": "/x"})]

    async def answer(_: web.BaseRequest) -> web.Response:
        return answers.pop(0)

    async with issuing(answer) as verifier:
        settings, client_tls = verifier._settings, verifier._tls
        await verifier.refresh()
        assert verifier.find_owner(make_token()) == "alice"
        moved = JwtVerifier(settings, tls=client_tls)
        await moved.refresh()
        assert "status 302" in moved.fault
        stranger = JwtVerifier(settings)
        await stranger.refresh()
        assert "cannot be read" in stranger.fault
    with pytest.raises(ValidationError, match="jwt_keys"):
        JwtSettings(jwt_keys="http://localhost/keys", jwt_issuer=ISSUER, jwt_audience=AUDIENCE)
    with pytest.raises(ValidationError, match="--jwt-keys needs --jwt-issuer and --jwt-audience"):
        JwtSettings(jwt_keys=settings.jwt_keys, jwt_issuer=ISSUER)


async def test_tokens_and_keys_open_http_and_grpc_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "jwks").write_bytes(make_key_set(one=ELLIPTIC))
    keys = mount_secret(tmp_path / "keys", {"bob": b"sk-canary-bob-000001"})
    settings = make_settings(tmp_path / "jwks")
    async with serving_ready(tmp_path, api_keys=str(keys), jwt=settings) as server:
        url = f"http://127.0.0.1:{server.ports['http']}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            for bearer, status in (
                (make_token(), 200),
                ("sk-canary-bob-000001", 200),
                (make_token(OTHER), 401),
                ("sk-canary-nobody-00", 401),
                ("", 401),
            ):
                answer = await http.post(
                    "/v1/completions", json=BODY, headers={"Authorization": f"Bearer {bearer}".strip()}
                )
                assert answer.status_code == status, answer.text
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel:
            request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(values=[1, 2, 3]))
            request.sampling.max_tokens = 4
            request.sampling.ignore_eos = True
            call = router_pb2_grpc.RouterStub(channel).Generate(
                request, metadata=(("authorization", f"Bearer {make_token()}"),)
            )
            assert [delta async for delta in call]
        metrics = (await get(server, "/metrics"))[1]
    assert 'sluice_key_requests_total{owner="alice",result="length"} 2.0' in metrics
    assert 'sluice_key_requests_total{owner="bob",result="length"} 1.0' in metrics


async def test_without_readable_keys_the_router_is_not_ready_unless_api_keys_let_clients_in(tmp_path: Path) -> None:
    keys = mount_secret(tmp_path / "keys", {"bob": b"sk-canary-bob-000001"})
    settings = make_settings(tmp_path / "nowhere")
    async with serving_ready(tmp_path, api_keys=str(keys), jwt=settings) as server:
        assert server.router.is_ready
        server.router.set_edge_fault(server._security.tokens.fault)
        assert "nowhere cannot be read" in server.router.not_ready_reason


def test_owners_beyond_so_many_share_a_label() -> None:
    metrics = RouterMetrics()
    labels = {metrics.label_owner(f"owner-{number}") for number in range(2 * MAX_OWNERS)}
    assert len(labels) == MAX_OWNERS + 1
    assert metrics.label_owner("owner-1") == "owner-1"
    names = ("key_requests", "key_tokens", "key_limited")
    for name in names:
        for owner in ("owner-1", "owner-2"):
            metrics.count(name, owner, "x")
    metrics.keep_owners({"owner-1"})
    assert metrics.label_owner("new") == "new"
    assert [dict(metrics.counters[name]) for name in names] == [{("owner-1", "x"): 1}] * 3
