"""Connections to routers over real gRPC: plans arrive, statuses come back, refusals are reported."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import grpc
import pytest
import trustme
from certificate_files import make_files, mount_secret

from sluice.certificate_rotation import CertificateFolder
from sluice.grpc_credentials import PeerCheck, make_server_credentials
from sluice.v1 import control_pb2, control_pb2_grpc, plan_pb2
from sluice_operator.api.names import ClusterKey
from sluice_operator.routers.connection_table import RouterAddress, RouterConnections
from sluice_operator.routers.engine_reports import count_loads, merge_reports, needs_reconcile
from sluice_operator.routers.router_connection import fetch_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY = ClusterKey("n", "c")


def at(host: str, server_name: str = "") -> RouterAddress:
    return RouterAddress(host=host, server_name=server_name)


class Router(control_pb2_grpc.ControlServicer):
    """Accepts plans, unless it is set to refuse them."""

    def __init__(self) -> None:
        self.status = control_pb2.GetStatusResponse(version=1, router_id="r")
        self.refusal = ""
        self.port = 0
        self.news = asyncio.Event()
        self.server: grpc.aio.Server
        self.is_ending = False

    async def serve(self) -> None:
        """Serves, at the port of before if there was one."""
        self.is_ending = False
        self.server = grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def end(self) -> None:
        """Ends as a router does: calls that wait are answered first, and none is cancelled."""
        self.is_ending = True
        self.news.set()
        await self.server.stop(1.0)

    def change(self, **fields: object) -> None:
        self.status = control_pb2.GetStatusResponse(version=self.status.version + 1, router_id="r", **fields)
        self.news.set()

    async def ApplyPlan(self, request, context):  # noqa: N802
        if self.refusal:
            return control_pb2.ApplyPlanResponse(is_applied=False, error=self.refusal)
        self.change(generation=request.plan.generation)
        return control_pb2.ApplyPlanResponse(is_applied=True, generation=request.plan.generation)

    async def GetStatus(self, request, context):  # noqa: N802
        while request.after_version == self.status.version and not self.is_ending:
            self.news.clear()
            await self.news.wait()
        if self.is_ending:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it ends")
        return self.status


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router()
    await made.serve()
    yield made
    await made.end()


async def test_a_router_is_reached_directly_where_a_proxy_is_set_for_other_traffic(router, monkeypatch):
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert await fetch_status(f"127.0.0.1:{router.port}", timeout_s=60.0) == router.status


class Following:
    """Links in a task group, and what they call."""

    def __init__(self, router: Router, certificates: CertificateFolder | None = None) -> None:
        self.port = router.port
        self.certificates = certificates
        self.enqueued, self.heard = asyncio.Event(), asyncio.Event()
        self.measured: list[control_pb2.GetStatusResponse] = []

    async def __aenter__(self) -> Self:
        self.group = asyncio.TaskGroup()
        await self.group.__aenter__()
        self.connections = RouterConnections(
            self.group,
            enqueue=lambda _: self.enqueued.set(),
            record_status=lambda _, status: self.record_status(status),
            port=self.port,
            certificates=self.certificates,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self.connections.set_routers(KEY, {})
        await self.group.__aexit__(None, None, None)

    def record_status(self, status: control_pb2.GetStatusResponse) -> None:
        self.measured.append(status)
        self.heard.set()

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self.enqueued.wait()
        self.enqueued.clear()


async def test_a_plan_gets_there_and_its_status_comes_back(router) -> None:
    async with Following(router) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1")})
        await following.wait()
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=3))
        await following.wait()
        assert following.connections.statuses(KEY)["pod"].generation == 3
        assert following.connections.count() == 1


ROUTER_NAME, OPERATOR_NAME = "c-router-control.n.svc", "sluice-operator.system.svc"


async def until_following(following: Following, generation: int) -> None:
    """Waits until the router's status with a generation has come back."""
    async with asyncio.timeout(20):
        while True:
            status = following.connections.statuses(KEY).get("pod")
            if status is not None and status.generation == generation:
                return
            await asyncio.sleep(0.02)


async def test_a_control_port_with_tls_is_spoken_with_and_certificates_change_under_the_link(tmp_path) -> None:
    authority, second = trustme.CA(), trustme.CA()
    trusted = (authority, second)
    folders = {}
    for name in (ROUTER_NAME, OPERATOR_NAME):
        mount_secret(tmp_path / name, make_files(authority, name, trusted=trusted))
        folders[name] = CertificateFolder(tmp_path / name, is_mutual=True)
    made = Router()
    server = grpc.aio.server(interceptors=[PeerCheck([OPERATOR_NAME])])
    control_pb2_grpc.add_ControlServicer_to_server(made, server)
    made.port = server.add_secure_port("127.0.0.1:0", make_server_credentials(folders[ROUTER_NAME]))
    await server.start()
    async with Following(made, folders[OPERATOR_NAME]) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1", ROUTER_NAME)})
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=3))
        await until_following(following, 3)
        before = following.connections._clusters[KEY].routers["pod"].connection
        for step in ((second, trusted), (second, (second,))):
            for name, folder in folders.items():
                mount_secret(tmp_path / name, make_files(step[0], name, trusted=step[1]))
                assert folder.refresh()
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=4))
        await until_following(following, 4)
        # The old authority is trusted by nobody: what comes now has come over a new connection.
        await server.stop(0)
        again = grpc.aio.server(interceptors=[PeerCheck([OPERATOR_NAME])])
        control_pb2_grpc.add_ControlServicer_to_server(made, again)
        again.add_secure_port(f"127.0.0.1:{made.port}", make_server_credentials(folders[ROUTER_NAME]))
        await again.start()
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=5))
        await until_following(following, 5)
        assert following.connections._clusters[KEY].routers["pod"].connection is before
        # Another name is another router.
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1", "other-router-control.n.svc")})
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=6))
        async with asyncio.timeout(20):
            while not following.connections.refusals(KEY):
                await following.wait()
        (refusal,) = following.connections.refusals(KEY).values()
        assert refusal.endswith("not trusted: the certificate shown there is not for other-router-control.n.svc")
        assert following.connections.statuses(KEY) == {}
        assert made.status.generation == 5
    await again.stop(0)


@pytest.mark.parametrize(
    ("signers", "operator_name", "words"),
    [
        (("second", "first"), OPERATOR_NAME, "the certificate shown there is not valid: unable to get local issuer"),
        (("first", "second"), OPERATOR_NAME, "our certificate may not be trusted there"),
        (("first", "first"), "sluice-operator.elsewhere.svc", f"this port serves {OPERATOR_NAME} only"),
    ],
    ids=["a router of a stranger's", "a router that does not know our authority", "a router of another operator's"],
)
async def test_a_tls_error_is_reported_in_words(tmp_path, signers, operator_name, words) -> None:
    authorities = {"first": trustme.CA(), "second": trustme.CA()}
    router, own = (authorities[name] for name in signers)
    # The operator trusts its own authority alone, the router what it must to come that far.
    folders = [
        CertificateFolder(mount_secret(tmp_path / name, make_files(authority, name)), is_mutual=True)
        for name, authority in ((ROUTER_NAME, router), (operator_name, own))
    ]
    made = Router()
    server = grpc.aio.server(interceptors=[PeerCheck([OPERATOR_NAME])])
    control_pb2_grpc.add_ControlServicer_to_server(made, server)
    made.port = server.add_secure_port("127.0.0.1:0", make_server_credentials(folders[0]))
    await server.start()
    certificates = folders[1]
    if words.startswith("our certificate"):
        trusting = replace(certificates.current, authorities=router.cert_pem.bytes())
        certificates.current = trusting
    async with Following(made, certificates) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1", ROUTER_NAME)})
        async with asyncio.timeout(20):
            while not following.connections.refusals(KEY):
                await following.wait()
        assert words in following.connections.refusals(KEY)["pod"]
    await server.stop(0)


async def test_a_router_that_comes_later_gets_the_plan_too(router) -> None:
    async with Following(router) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1")})
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=4))
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1"), "later": at("127.0.0.1")})
        while len(following.connections.statuses(KEY)) < 2 or router.status.generation != 4:
            await following.wait()


async def test_a_refused_plan_is_reported(router) -> None:
    router.refusal = "engines[0].chunk_size_tokens is 9, allowed are 0 to 8"
    async with Following(router) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1")})
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=5))
        while not following.connections.refusals(KEY):
            await following.wait()
        assert following.connections.refusals(KEY) == {"pod": router.refusal}
        router.refusal = ""
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=6))
        assert following.connections.refusals(KEY) == {}


async def test_a_router_that_starts_again_gets_the_plan_again_even_one_that_it_had_refused(router) -> None:
    router.refusal = "engines[0].chunk_size_tokens is 9, allowed are 0 to 8"
    async with Following(router) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1")})
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=5))
        while not following.connections.refusals(KEY):
            await following.wait()
        for restart in range(2):
            await router.end()
            # What it said last is not what it does now.
            while following.connections.statuses(KEY):
                await following.wait()
            assert following.connections.refusals(KEY) == {}
            router.refusal = ""
            router.status = control_pb2.GetStatusResponse(version=1, router_id=f"r{restart}")
            await router.serve()
            await until_following(following, 5)


async def test_a_router_whose_pod_has_another_address_is_another_router(router) -> None:
    async with Following(router) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1")})
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=5))
        await until_following(following, 5)
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1")})
        assert set(following.connections.statuses(KEY)) == {"pod"}
        following.connections.set_routers(KEY, {"pod": at("127.0.0.2")})
        assert following.connections.statuses(KEY) == {}
        assert following.connections.count() == 1


async def test_counters_are_recorded_and_enqueue_nothing(router) -> None:
    async with Following(router) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1")})
        await following.wait()
        router.change(classes=[control_pb2.ClassCounters(num_finished=7)])
        async with asyncio.timeout(10):
            while not following.measured[-1].classes:
                await following.heard.wait()
                following.heard.clear()
        assert not following.enqueued.is_set()


async def test_a_deleted_cluster_has_no_connections(router) -> None:
    async with Following(router) as following:
        following.connections.set_routers(KEY, {"pod": at("127.0.0.1")})
        await following.wait()
        following.connections.set_routers(KEY, {})
        assert following.connections.count() == 0
        assert following.connections.statuses(KEY) == {}
        following.connections.set_plan(KEY, plan_pb2.Plan(generation=1))


def engine(**fields) -> control_pb2.EngineStatus:
    values = {"engine_id": "e", "state": control_pb2.ENGINE_STATE_READY, "role": plan_pb2.ROLE_PREFILL_HEAVY}
    return control_pb2.EngineStatus(**{**values, **fields})


def reports(*engines: control_pb2.EngineStatus):
    return merge_reports([control_pb2.GetStatusResponse(engines=[item]) for item in engines])


def test_a_role_counts_when_all_routers_have_it() -> None:
    assert reports(engine(), engine())["e"].role == "P-heavy"
    assert reports(engine(), engine(role=plan_pb2.ROLE_DECODE_HEAVY))["e"].role is None


def test_an_engine_is_drained_when_no_router_has_work_there() -> None:
    drained, draining = (engine(state=getattr(control_pb2, f"ENGINE_STATE_{name}")) for name in ("DRAINED", "DRAINING"))
    assert reports(drained, drained)["e"].is_drained
    assert not reports(drained, draining)["e"].is_drained


def test_routers_without_a_stream_have_no_say() -> None:
    lost = engine(state=control_pb2.ENGINE_STATE_LOST, role=plan_pb2.ROLE_DECODE_HEAVY)
    assert reports(engine(), lost)["e"].role == "P-heavy"
    assert reports(lost) == {}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"running_decodes": 9}, False),
        ({"kv_blocks_used": 9}, False),
        ({"state": control_pb2.ENGINE_STATE_DRAINED}, True),
        ({"acknowledged_generation": 9}, True),
        ({"transport": "tcp"}, True),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_states_need_a_reconcile_and_loads_do_not(change, verdict) -> None:
    old = control_pb2.GetStatusResponse(version=1, engines=[engine()])
    new = control_pb2.GetStatusResponse(version=2, engines=[engine(**change)])
    assert needs_reconcile(old, new) is verdict
    assert needs_reconcile(old, None)


def test_the_load_of_an_engine_is_the_highest_that_a_router_with_a_stream_to_it_says() -> None:
    def report(state: control_pb2.EngineState.ValueType, decodes: int, waiting: int = 0) -> control_pb2.EngineStatus:
        return control_pb2.EngineStatus(engine_id="e", state=state, running_decodes=decodes, waiting_requests=waiting)

    ready, lost = control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_LOST
    statuses = [
        control_pb2.GetStatusResponse(engines=[engine])
        for engine in (report(ready, 2), report(ready, 3, 1), report(lost, 9))
    ]
    assert count_loads(merge_reports(statuses)) == {"e": 4}
    assert count_loads(merge_reports(statuses[2:])) == {}
