"""The client against a server: what it sends, and what it makes of answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from sluice_operator.kubernetes import client as client_module
from sluice_operator.kubernetes.client import KubernetesClient
from sluice_operator.kubernetes.errors import (
    BusyError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    make_error,
)
from sluice_operator.kubernetes.kinds import CLUSTERS, DEPLOYMENTS, PODS, SERVICE_MONITORS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Server:
    """Records requests, and answers what the test sets."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], str, Any]] = []
        self.authorizations: list[str] = []
        self.status, self.body, self.headers = 200, {}, {}
        self.delay_s = 0.0
        self.address = ""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        text = await request.text()
        content_type = request.headers.get("Content-Type", "")
        query = dict(request.query)
        self.authorizations.append(request.headers.get("Authorization", ""))
        self.requests.append((request.method, request.path, query, content_type, json.loads(text) if text else None))
        await asyncio.sleep(self.delay_s)
        return web.json_response(self.body, status=self.status, headers=self.headers)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    runner = web.ServerRunner(web.Server(made.answer), handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def calls() -> list[tuple[str, str, int]]:
    return []


@pytest.fixture
async def client(server: Server, calls: list[tuple[str, str, int]]) -> AsyncIterator[KubernetesClient]:
    configuration = Configuration()
    configuration.host = server.address
    async with ApiClient(configuration) as api:
        yield KubernetesClient(
            api, timeout_s=0.5, on_call=lambda verb, plural, status, _: calls.append((verb, plural, status))
        )


CONTENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d", "namespace": "n"}, "spec": {"x": 1}}
OWNER = {"fieldManager": "sluice-operator"}


async def test_each_request_carries_the_service_account_s_token(server, client) -> None:
    client._api.configuration.api_key["BearerToken"] = "Bearer t"
    await client.get(DEPLOYMENTS, "n", "d")
    assert server.authorizations == ["Bearer t"]


async def test_each_verb_is_the_request_that_it_should_be(server, client) -> None:
    server.body = {"items": []}
    await client.get(DEPLOYMENTS, "n", "d")
    await client.list(PODS, "n", {"b": "2", "a": "1"})
    await client.apply(CONTENT)
    await client.create(CONTENT)
    await client.patch(PODS, "n", "p", {"metadata": {}})
    await client.patch_status(CLUSTERS, "n", "c", {"status": {}})
    await client.delete(DEPLOYMENTS, "n", "d", "u")
    deployments, merge = "/apis/apps/v1/namespaces/n/deployments", "application/merge-patch+json"
    precondition = {"preconditions": {"uid": "u"}, "propagationPolicy": "Background"}
    assert [request[:2] + request[2:3] for request in server.requests] == [
        ("GET", f"{deployments}/d", {}),
        ("GET", "/api/v1/namespaces/n/pods", {"labelSelector": "a=1,b=2"}),
        ("PATCH", f"{deployments}/d", {**OWNER, "force": "true"}),
        ("POST", deployments, OWNER),
        ("PATCH", "/api/v1/namespaces/n/pods/p", OWNER),
        ("PATCH", "/apis/sluice.dev/v1alpha1/namespaces/n/servingclusters/c/status", OWNER),
        ("DELETE", f"{deployments}/d", {}),
    ]
    assert [request[3] for request in server.requests[2:6]] == [
        "application/apply-patch+yaml",
        "application/json",
        merge,
        merge,
    ]
    assert [request[4] for request in server.requests[2:]] == [
        CONTENT,
        CONTENT,
        {"metadata": {}},
        {"status": {}},
        precondition,
    ]


async def test_items_of_a_list_say_what_they_are(server, client) -> None:
    server.body = {"items": [{"metadata": {"name": "p"}}]}
    assert await client.list(PODS, "n", {}) == [{"metadata": {"name": "p"}, "apiVersion": "v1", "kind": "Pod"}]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (409, ConflictError),
        (422, InvalidError),
        (429, BusyError),
        (500, BusyError),
        (503, BusyError),
    ],
)
async def test_each_status_is_its_error_with_the_servers_words(server, client, calls, status, error) -> None:
    server.status, server.body, server.headers = status, {"message": "spec.x: too large"}, {"Retry-After": "7"}
    with pytest.raises(error, match=r"spec\.x: too large") as caught:
        await client.apply(CONTENT)
    assert type(caught.value) is error
    assert caught.value.retry_after_s == 7.0
    assert calls == [("apply", "deployments", status)]


async def test_a_field_that_no_such_object_has_is_invalid_though_the_server_calls_it_its_own_fault(
    server, client
) -> None:
    words = "failed to create typed patch object (n/d; apps/v1, Kind=Deployment): .spec.x: field not declared in schema"
    server.status, server.body = 500, {"message": words}
    with pytest.raises(InvalidError, match="field not declared in schema"):
        await client.apply(CONTENT)


async def test_what_is_not_there_is_none_and_its_deletion_no_error(server, client) -> None:
    server.status = 404
    assert await client.get(DEPLOYMENTS, "n", "d") is None
    await client.delete(DEPLOYMENTS, "n", "d", "u")
    with pytest.raises(NotFoundError):
        await client.patch(PODS, "n", "p", {})


async def test_a_server_that_does_not_answer_is_busy(server, client, calls) -> None:
    server.delay_s = 1.0
    with pytest.raises(BusyError, match="no answer"):
        await client.get(DEPLOYMENTS, "n", "d")
    assert calls == [("get", "deployments", 0)]


async def test_a_server_that_is_gone_is_busy() -> None:
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:1"
    async with ApiClient(configuration) as api:
        client = KubernetesClient(api, timeout_s=0.5, on_call=lambda *_: None)
        with pytest.raises(BusyError):
            await client.get(DEPLOYMENTS, "n", "d")


async def test_a_kind_whose_crd_is_removed_is_discovered_again_at_once(server) -> None:
    configuration = Configuration()
    configuration.host = server.address
    async with ApiClient(configuration) as api:
        client = KubernetesClient(api, timeout_s=0.5, on_call=lambda *_: None)
        server.body = {"resources": [{"name": "servicemonitors"}]}
        assert await client.is_served(SERVICE_MONITORS)
        server.status = 404
        with pytest.raises(NotFoundError):
            await client.list(SERVICE_MONITORS, "n", {})
        assert not await client.is_served(SERVICE_MONITORS)


async def test_discovery_is_cached_for_a_while(server) -> None:
    now = 0.0
    configuration = Configuration()
    configuration.host = server.address
    async with ApiClient(configuration) as api:
        client = KubernetesClient(api, timeout_s=0.5, on_call=lambda *_: None, now=lambda: now)
        server.status = 404
        assert not await client.is_served(SERVICE_MONITORS)
        server.status, server.body = 200, {"resources": [{"name": "servicemonitors"}]}
        assert not await client.is_served(SERVICE_MONITORS)
        now = 26.0
        assert await client.is_served(SERVICE_MONITORS)
        now = 300.0
        assert await client.is_served(SERVICE_MONITORS)
    assert len(server.requests) == 2


@pytest.mark.parametrize("is_in_pod", [True, False])
async def test_the_api_server_is_the_pod_s_or_that_of_the_kubeconfig(monkeypatch, tmp_path, *, is_in_pod: bool) -> None:
    token, certificate = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("from the pod")
    certificate.write_text("a certificate")
    monkeypatch.setattr(client_module.incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(client_module.incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    for name, value in (("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("KUBERNETES_SERVICE_PORT", "443")):
        monkeypatch.setenv(name, value) if is_in_pod else monkeypatch.delenv(name, raising=False)
    user = {"name": "u", "user": {"token": "from the kubeconfig"}}
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    kubeconfig = {"current-context": "x", "users": [user], "clusters": [cluster], "contexts": [context]}
    (tmp_path / "config").write_text(json.dumps(kubeconfig))
    monkeypatch.setattr(client_module.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    configuration = await client_module.load_configuration()
    assert configuration.connection_pool_maxsize == client_module.MAX_CONNECTIONS
    (key,) = configuration.api_key.values()
    if is_in_pod:
        assert (configuration.host, configuration.ssl_ca_cert) == ("https://10.0.0.1:443", str(certificate))
        assert key.endswith("from the pod")
    else:
        assert configuration.host == "http://127.0.0.1:9"
        assert key.endswith("from the kubeconfig")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"message": "spec.x: too large", "code": 422}', "spec.x: too large"),
        (b'{"message": 7}', "7"),
        (b"no route to the pod", "no route to the pod"),
        (b"{}", "{}"),
        (b"[1]", "[1]"),
        (b"", ""),
        (b"a" * 300, "a" * 200),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_an_error_has_the_server_s_words_or_the_beginning_of_what_it_sent(body: bytes, message: str) -> None:
    assert client_module._read_message(body) == message


@pytest.mark.parametrize(
    ("message", "added"),
    [
        ('apply /x: deployments.apps "tiny-router" is forbidden: ', 'cannot create resource "deployments"'),
        ('networkpolicies.networking.k8s.io "tiny" is forbidden: ', 'cannot create resource "networkpolicies"'),
        ('certificates.cert-manager.io "front" is forbidden: ', 'cannot create resource "certificates"'),
        ('apply /x: services "tiny-engines" is forbidden: ', 'cannot create resource "services"'),
        ('apply /x: services "tiny-engines" is forbidden: exceeded quota: q', ""),
        ("apply /x: is forbidden", ""),
    ],
)
def test_the_missing_right_is_named_where_kubernetes_1_30_does_not(message: str, added: str) -> None:
    error = make_error(403, message)
    assert isinstance(error, ForbiddenError)
    assert str(error) == message + added


@pytest.mark.parametrize(("header", "pause_s"), [("7", 7.0), ("0", 0.0), ("", None), ("soon", None), ("1.5", None)])
def test_a_pause_is_as_long_as_the_server_says_in_seconds(header: str, pause_s: float | None) -> None:
    assert client_module._read_retry_after({"Retry-After": header} if header else {}) == pause_s


@pytest.mark.parametrize("is_served", [True, False])
async def test_discovery_is_repeated_after_its_time_and_calls_say_how_long_they_took(
    server, *, is_served: bool
) -> None:
    clock = itertools.count(0.0, 0.25)  # each look at it is a quarter of a second later
    offset_s = 0.0
    calls: list[tuple[Any, ...]] = []
    configuration = Configuration()
    configuration.host = server.address
    server.body = {"resources": [{"name": "others"}, *([{"name": "servicemonitors"}] if is_served else [])]}
    async with ApiClient(configuration) as api:
        client = KubernetesClient(
            api, timeout_s=0.5, on_call=lambda *call: calls.append(call), now=lambda: next(clock) + offset_s
        )
        kept_s = client_module.DISCOVERY_S if is_served else client_module.ABSENCE_S
        assert await client.is_served(SERVICE_MONITORS) is is_served
        offset_s = kept_s - 1.0
        assert await client.is_served(SERVICE_MONITORS) is is_served
        assert calls == [("discover", "servicemonitors", 200, 0.25)]
        offset_s = kept_s
        assert await client.is_served(SERVICE_MONITORS) is is_served
    assert [request[:2] for request in server.requests] == [("GET", "/apis/monitoring.coreos.com/v1")] * 2
