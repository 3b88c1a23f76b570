"""Engines, routers and operator in pods that authenticate one another: they serve, and refuse every other client."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING

import grpc
import pytest
import trustme
from certificate_files import make_files
from examples.tiny_model import make_tiny_model
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pod_cluster import MODELS, PodCluster, Trust, list_sizes, make_pods_manifest, open_channel
from release import RESTRICTED
from test_exactness import check
from testbed.helm import CHART, SYSTEM

from sluice_operator.api.ports import CONTROL_PORT, ENGINE_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from release import Release
    from testbed.client import Client
    from workload import Answer, Request

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SECURED = "secured"
OPERATOR_NAME = f"sluice-operator.{SYSTEM}.svc"
ENGINE_NAME, ROUTER_NAME = f"tiny-engines.{SECURED}.svc", f"tiny-router-control.{SECURED}.svc"
TLS = {"tls": {"mode": "SecretRef", "secretName": "peers"}}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secured(client: Client, release: Release, authority: trustme.CA) -> Iterator[PodCluster]:
    """A cluster whose engines, routers and operator authenticate one another with certificates."""

    def give(namespace: str, files: dict[str, bytes]) -> None:
        metadata = {"name": "peers", "namespace": namespace}
        data = {name: base64.b64encode(content).decode() for name, content in files.items()}
        client.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})

    make_tiny_model(MODELS / "tiny")
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SECURED, "labels": RESTRICTED}})
    give(SECURED, make_files(authority, ENGINE_NAME, ROUTER_NAME))
    give(SYSTEM, make_files(authority, OPERATOR_NAME))
    release.upgrade(CHART, "tls.mode=SecretRef", "tls.secretName=peers")
    manifest = make_pods_manifest(replicas=1, network=TLS)
    manifest["spec"]["router"]["replicas"] = 1
    made = PodCluster(client, SECURED, manifest, Trust(files=make_files(authority, OPERATOR_NAME), name=ROUTER_NAME))
    release.begin(made)
    yield made
    made.remove()


async def test_engines_and_routers_with_tls_serve_and_refuse_other_clients(
    secured: PodCluster, authority: trustme.CA, known: list[tuple[Request, Answer]]
) -> None:
    async with secured.connect() as clients:
        for (_, answer), result in zip(
            known[:8], await asyncio.gather(*(clients.generate(request) for request, _ in known[:8])), strict=True
        ):
            check(result, answer)
    print(f"with certificates: {secured.time_edit(lambda s: list_sizes(s) == [96], chunkSizes={'prefillHeavy': 96})}")
    (engine,), (router,) = secured.addresses("engine").values(), secured.addresses("router").values()
    for address, name in ((f"{engine}:{ENGINE_PORT}", ENGINE_NAME), (f"{router}:{CONTROL_PORT}", ROUTER_NAME)):
        own = ROUTER_NAME if name == ENGINE_NAME else OPERATOR_NAME
        assert probe_health(address, Trust(files=make_files(authority, own), name=name)) is grpc.StatusCode.OK
        # Without TLS; with a certificate of another authority; with a trusted certificate for another name.
        assert probe_health(address, None) is grpc.StatusCode.UNAVAILABLE
        stranger = {**make_files(trustme.CA(), own), "ca.crt": authority.cert_pem.bytes()}
        assert probe_health(address, Trust(files=stranger, name=name)) is grpc.StatusCode.UNAVAILABLE
        other = make_files(authority, f"other.{SECURED}.svc")
        assert probe_health(address, Trust(files=other, name=name)) is grpc.StatusCode.PERMISSION_DENIED


def probe_health(address: str, trust: Trust | None) -> grpc.StatusCode:
    """Sends a health check to a port; returns the status of the call."""
    with open_channel(address, trust) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()
            return status
    return grpc.StatusCode.OK
