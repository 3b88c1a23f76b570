"""What the launcher concludes from the routers' statuses about the processes that it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sluice.v1 import control_pb2, plan_pb2
from sluice_cli.local_cluster.managed_processes import ManagedEngine, has_connected, is_drained, is_serving
from sluice_core.records import EngineId
from sluice_operator.resources.commands import EngineSite

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
