"""The table of connections to routers, with connections that a test plays: who gets which plan, and who is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from sluice.v1 import control_pb2, plan_pb2
from sluice_operator.api.names import ClusterKey
from sluice_operator.routers import connection_table
from sluice_operator.routers.connection_table import RouterAddress, RouterConnections

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

KEY, OTHER = ClusterKey("n", "a"), ClusterKey("n", "b")
PLANS = [plan_pb2.Plan(generation=number) for number in range(4)]


def at(host: str, server_name: str = "") -> RouterAddress:
    return RouterAddress(host=host, server_name=server_name)


class PlayedConnection:
    """A connection that does what the test says."""

    made: ClassVar[list[PlayedConnection]] = []

    def __init__(
        self, name: str, address: str, *, log: Callable[[str], None], on_status: Callable[[], None], tls: Any
    ) -> None:
        self.name, self.address, self.log, self.on_status, self.tls = name, address, log, on_status, tls
        self.plans: list[plan_pb2.Plan] = []
        self.status: control_pb2.GetStatusResponse | None = None
        self.refusal = ""
        self.is_running = False
        self.failures: list[Exception] = []
        self.made.append(self)

    def set_plan(self, plan: plan_pb2.Plan) -> None:
        self.plans.append(plan)

    async def run(self) -> None:
        self.is_running = True
        try:
            if self.failures:
                raise self.failures.pop()
            await asyncio.Event().wait()
        finally:
            self.is_running = False

    def say(self, **fields: Any) -> None:
        self.status = control_pb2.GetStatusResponse(router_id=self.name, **fields)
        self.on_status()


class Table:
    """The connections, and what they told."""

    def __init__(self, group: asyncio.TaskGroup, certificates: Any) -> None:
        self.enqueued: list[ClusterKey] = []
        self.recorded: list[tuple[ClusterKey, str]] = []
        self.connections = RouterConnections(
            group,
            enqueue=self.enqueued.append,
            record_status=lambda key, status: self.recorded.append((key, status.router_id)),
            port=1234,
            certificates=certificates,
        )

    def take(self) -> tuple[list[ClusterKey], list[tuple[ClusterKey, str]]]:
        told = list(self.enqueued), list(self.recorded)
        self.enqueued.clear()
        self.recorded.clear()
        return told


@pytest.fixture(params=[None])
async def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Table]:
    monkeypatch.setattr(connection_table, "RouterConnection", PlayedConnection)
    monkeypatch.setattr(PlayedConnection, "made", [])
    async with asyncio.TaskGroup() as group:
        made = Table(group, request.param)
        yield made
        for key in (KEY, OTHER):
            made.connections.set_routers(key, {})


async def test_every_router_gets_each_plan_once_whenever_it_comes(table: Table) -> None:
    table.connections.set_plan(KEY, PLANS[0])  # of a cluster without routers
    table.connections.set_routers(KEY, {"r1": at("10.0.0.1")})
    table.connections.set_routers(OTHER, {"r1": at("10.0.0.9")})
    table.connections.set_plan(KEY, PLANS[1])
    table.connections.set_routers(KEY, {"r1": at("10.0.0.1"), "r2": RouterAddress(host="10.0.0.2", worker=2)})
    table.connections.set_plan(KEY, PLANS[1])
    table.connections.set_plan(KEY, PLANS[2])
    first, foreign, second = PlayedConnection.made
    assert [each.address for each in PlayedConnection.made] == ["10.0.0.1:1234", "10.0.0.9:1234", "10.0.0.2:1236"]
    assert first.plans == second.plans == [PLANS[1], PLANS[2]]
    assert foreign.plans == []
    assert table.connections.count() == 3
    table.connections.set_routers(KEY, {})
    table.connections.set_plan(KEY, PLANS[3])
    table.connections.set_routers(KEY, {"r3": at("10.0.0.3")})
    assert first.plans[-1] == PLANS[2]
    assert PlayedConnection.made[-1].plans == []
    assert table.connections.count() == 2


async def test_a_router_with_another_address_or_certificate_is_connected_anew(table: Table) -> None:
    table.connections.set_routers(
        KEY,
        {
            "r1": at("10.0.0.1"),
            "r2": at("10.0.0.2"),
            "r3": at("10.0.0.3"),
        },
    )
    await asyncio.sleep(0)
    before = list(PlayedConnection.made)
    assert all(each.is_running for each in before)
    table.connections.set_routers(
        KEY,
        {
            "r1": at("10.0.0.1"),
            "r2": at("10.0.0.22"),
            "r3": at("10.0.0.3", "c.n.svc"),
        },
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [each.is_running for each in before] == [True, False, False]
    assert [(each.name, each.address) for each in PlayedConnection.made[3:]] == [
        ("r2", "10.0.0.22:1234"),
        ("r3", "10.0.0.3:1234"),
    ]
    # What the old connection still says counts for nothing.
    before[1].say(generation=1)
    assert table.take() == ([], [])
    assert table.connections.statuses(KEY) == {}


@pytest.mark.parametrize("table", [None, "ours"], indirect=True)
async def test_tls_is_spoken_with_routers_that_have_a_name_where_we_have_a_certificate(table: Table) -> None:
    table.connections.set_routers(KEY, {"r1": at("10.0.0.1"), "r2": at("10.0.0.2", "c.n.svc")})
    plain, secured = PlayedConnection.made
    assert plain.tls is None
    if table.connections._certificates is None:
        assert secured.tls is None
    else:
        assert (secured.tls.certificates, secured.tls.server_name) == ("ours", "c.n.svc")


async def test_statuses_are_recorded_and_news_enqueue_the_cluster(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    table.connections.set_routers(KEY, {"r1": at("10.0.0.1"), "r2": at("10.0.0.2")})
    one, other = PlayedConnection.made
    one.say(generation=1)
    assert table.take() == ([KEY], [(KEY, "r1")])
    one.say(generation=1, num_failed=3)
    assert table.take() == ([], [(KEY, "r1")]), "counters are no news"
    one.say(generation=2)
    assert table.take() == ([KEY], [(KEY, "r1")])
    assert table.connections.statuses(KEY) == {"r1": one.status}
    other.refusal = "engines[0] is unknown"
    assert table.connections.refusals(KEY) == {"r2": "engines[0] is unknown"}
    one.status = None
    one.on_status()
    assert table.take() == ([KEY], []), "a router that is gone is news, and has counted nothing"
    assert table.connections.statuses(KEY) == table.connections.statuses(OTHER) == table.connections.refusals(OTHER)
    other.log("the certificate is another one's")
    assert table.take() == ([KEY], [])
    (line,) = caplog.records
    assert (line.getMessage(), line.__dict__["object"]) == ("the certificate is another one's", str(KEY))
    table.connections.set_routers(KEY, {})
    other.say(generation=9)
    assert table.take() == ([], [])


async def test_a_connection_that_fails_is_opened_again(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        slept_s.append(seconds)
        await sleep(0)

    monkeypatch.setattr(connection_table.asyncio, "sleep", note)
    table.connections.set_routers(KEY, {"r1": at("10.0.0.1")})
    (connection,) = PlayedConnection.made
    connection.failures = [ValueError("a mistake"), ValueError("another")]
    for _ in range(6):
        await sleep(0)
    assert slept_s == [5.0, 5.0]
    assert connection.is_running
