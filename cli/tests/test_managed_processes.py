"""What the launcher concludes from the routers' statuses about the processes that it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from certificate_files import make_files, mount_secret

from sluice.v1 import control_pb2, plan_pb2
from sluice_cli.local_cluster import managed_processes
from sluice_cli.local_cluster.cluster_directory import ProcessRecord
from sluice_cli.local_cluster.managed_processes import (
    ManagedEngine,
    has_connected,
    is_drained,
    is_first_start,
    is_serving,
    keep_link,
    list_processes,
    make_control_tls,
)
from sluice_core.records import EngineId
from sluice_operator.resources.command_lines import EngineSite, RouterSite

if TYPE_CHECKING:
    from pathlib import Path

ENGINE, OTHER = EngineId("engine-0"), EngineId("engine-1")
READY, DRAINING, DRAINED, LOST, CONNECTING = (
    getattr(control_pb2, f"ENGINE_STATE_{name}") for name in ("READY", "DRAINING", "DRAINED", "LOST", "CONNECTING")
)


def make_engine(pid: int | None = 7, stale_epoch: int = 3, last_epoch: int = 3) -> ManagedEngine:
    site = EngineSite(engine_id=ENGINE, host="", port=0, metrics_port=0, kv_host="", kv_port=0, model_directory="")
    process: Any = SimpleNamespace(pid=pid)
    return ManagedEngine(site=site, process=process, spec_hash="", stale_epoch=stale_epoch, last_epoch=last_epoch)


def make_status(
    *views: tuple[EngineId, int, control_pb2.EngineState.ValueType], generation: int = 5
) -> control_pb2.GetStatusResponse:
    return control_pb2.GetStatusResponse(
        generation=generation,
        engines=[control_pb2.EngineStatus(engine_id=name, epoch=epoch, state=state) for name, epoch, state in views],
    )


@pytest.mark.parametrize(
    ("engine", "statuses", "serves", "was_connected"),
    [
        (make_engine(), [], False, False),
        (make_engine(), [make_status((OTHER, 4, READY))], False, False),
        (make_engine(), [make_status((ENGINE, 4, READY))], True, True),
        (make_engine(), [make_status((ENGINE, 4, DRAINING))], True, True),
        (make_engine(), [make_status((ENGINE, 4, DRAINED))], False, True),
        (make_engine(), [make_status((ENGINE, 4, LOST))], False, True),
        (make_engine(), [make_status((ENGINE, 3, READY))], False, False),
        (make_engine(), [make_status((ENGINE, 0, CONNECTING))], False, False),
        (make_engine(pid=None), [make_status((ENGINE, 4, READY))], False, True),
        (make_engine(), [make_status((ENGINE, 3, LOST)), make_status((ENGINE, 4, READY))], True, True),
        (make_engine(last_epoch=4), [], False, True),
    ],
    ids=[
        "no router",
        "unknown to the router",
        "ready",
        "draining",
        "drained",
        "lost",
        "the process before this one",
        "never connected",
        "no process",
        "one router knows more than another",
        "the router has ended since",
    ],
)
def test_an_engine_serves_by_what_routers_say_of_its_present_process(
    engine: ManagedEngine, statuses: list[control_pb2.GetStatusResponse], *, serves: bool, was_connected: bool
) -> None:
    assert is_serving(engine, statuses) == serves
    assert has_connected(engine, statuses) == was_connected


@pytest.mark.parametrize(
    ("num_starts", "pid", "is_first"), [(0, None, True), (1, 7, True), (1, None, False), (2, 7, False)]
)
def test_a_first_start_ends_with_the_first_process(num_starts: int, pid: int | None, *, is_first: bool) -> None:
    engine = make_engine(pid=pid)
    engine.process.num_starts = num_starts
    assert is_first_start(engine) == is_first


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ([], True),
        ([make_status((ENGINE, 4, DRAINED))], True),
        ([make_status((OTHER, 4, READY))], True),
        ([make_status((ENGINE, 4, LOST))], True),
        ([make_status((ENGINE, 4, DRAINING))], False),
        ([make_status((ENGINE, 4, READY))], False),
        ([make_status((ENGINE, 4, DRAINED), generation=4)], False),
        ([make_status((ENGINE, 4, DRAINED)), make_status((ENGINE, 4, DRAINING))], False),
        ([make_status((ENGINE, 4, DRAINED)), make_status(generation=4)], False),
    ],
    ids=[
        "no router",
        "drained",
        "unknown to the router",
        "lost",
        "draining",
        "ready",
        "by an older plan",
        "another router has work there",
        "another router has an older plan",
    ],
)
def test_an_engine_is_drained_when_every_router_has_the_plan_and_no_work_there(
    statuses: list[control_pb2.GetStatusResponse], *, verdict: bool
) -> None:
    assert is_drained(ENGINE, plan_pb2.Plan(generation=5), statuses) == verdict


def test_without_a_plan_nothing_has_work() -> None:
    assert is_drained(ENGINE, None, [make_status((ENGINE, 4, READY))])


def make_router(**security: str | None) -> Any:
    site = RouterSite(
        host="127.0.0.1",
        http_port=1,
        grpc_port=2,
        control_port=3,
        metrics_port=4,
        engines="file:x",
        plan_file="y",
        model_directory="m",
    )
    launch = SimpleNamespace(log="router-0.log")
    process = SimpleNamespace(pid=None, num_starts=2, launch=launch, refusal="")
    found = SimpleNamespace(**{"front_tls": None, "api_keys": None, "peer_tls": None, "router_name": None, **security})
    return SimpleNamespace(site=site, process=process, security=found)


def test_a_routers_record_says_how_to_reach_it() -> None:
    routers = {
        "router-0": make_router(),
        "router-1": make_router(front_tls="/front", api_keys="/keys", peer_tls="/peers", router_name="control"),
    }
    plain, secured = list_processes(routers, {})
    ports = {"http": 1, "grpc": 2, "control": 3, "metrics": 4}
    common = {"kind": "router", "pid": None, "num_starts": 2, "ports": ports, "log": "router-0.log"}
    assert plain == ProcessRecord(name="router-0", **common)
    assert secured == ProcessRecord(
        name="router-1", front_tls="/front", needs_key=True, peer_tls="/peers", peer_name="control", **common
    )


def test_a_control_port_is_encrypted_where_peers_are(tmp_path: Path) -> None:
    assert make_control_tls(make_router().security) is None
    assert make_control_tls(make_router(peer_tls=str(tmp_path)).security) is None
    assert make_control_tls(make_router(router_name="control").security) is None
    mount_secret(tmp_path / "peers", make_files(trustme.CA(), "control"))
    found = make_control_tls(make_router(peer_tls=str(tmp_path / "peers"), router_name="control").security)
    assert found is not None
    assert (found.server_name, found.certificates.folder) == ("control", tmp_path / "peers")
    # Both sides show who they are.
    assert found.certificates.current.authorities


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_a_link_is_kept_and_its_certificate_up_to_date(monkeypatch: pytest.MonkeyPatch, *, is_encrypted) -> None:
    done: list[Any] = []

    async def keep_fresh(refreshes: Any) -> None:
        done.append(refreshes)

    async def run() -> None:
        done.append("link")

    monkeypatch.setattr(managed_processes, "keep_fresh", keep_fresh)
    tls: Any = SimpleNamespace(certificates=SimpleNamespace(refresh="refresh")) if is_encrypted else None
    link: Any = SimpleNamespace(run=run)
    await keep_link(link, tls)
    assert done == ["link", ["refresh"]][: 1 + is_encrypted]
