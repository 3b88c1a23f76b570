"""A cluster's status: every field is the launcher's, or that of the router that knows best."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.v1 import control_pb2, plan_pb2
from sluice_cli.local_cluster.cluster_directory import ProcessRecord
from sluice_cli.local_cluster.cluster_status import (
    AutotuneSummary,
    ClassAttainment,
    ClusterStatus,
    EngineStatusRow,
    RouterStatusRow,
    make_cluster_status,
)

READY, DRAINING, DRAINED = (
    control_pb2.ENGINE_STATE_READY,
    control_pb2.ENGINE_STATE_DRAINING,
    control_pb2.ENGINE_STATE_DRAINED,
)
CONNECTING, LOST = control_pb2.ENGINE_STATE_CONNECTING, control_pb2.ENGINE_STATE_LOST


def make_engine(state: control_pb2.EngineState.ValueType, **fields: Any) -> control_pb2.EngineStatus:
    values: dict[str, Any] = {
        "engine_id": "engine-0",
        "role": plan_pb2.ROLE_PREFILL_HEAVY,
        "chunk_size_tokens": 512,
        "running_decodes": 3,
        "waiting_requests": 4,
        "kv_blocks_total": 100,
        "kv_blocks_used": 21,
        "kv_blocks_granted": 5,
        "kv_blocks_pinned": 6,
        "num_moved_in": 7,
        "num_moved_out": 8,
        "transport": "ucx",
        "last_fault": "it stalled",
    }
    return control_pb2.EngineStatus(state=state, **(values | fields))


def view(
    processes: list[ProcessRecord],
    statuses: dict[str, control_pb2.GetStatusResponse | None],
    phase: str = "ready",
    **fields: Any,
) -> ClusterStatus:
    return make_cluster_status(
        name="c", phase=phase, manifest="m.yaml", model="tiny", processes=processes, statuses=statuses, **fields
    )


def view_engine(*engines: control_pb2.EngineStatus, phase: str = "ready", **process: Any) -> EngineStatusRow:
    values: dict[str, Any] = {"name": "engine-0", "kind": "engine", "pid": 11, "num_starts": 1}
    statuses: dict[str, control_pb2.GetStatusResponse | None] = {
        f"router-{number}": control_pb2.GetStatusResponse(engines=[engine]) for number, engine in enumerate(engines)
    }
    (row,) = view([ProcessRecord(**(values | process))], statuses, phase).engines
    return row


def test_an_engine_that_has_not_reported_its_load_has_no_figures() -> None:
    """A router may have a plan acknowledged before the first report: then it knows the chunk size, and no figure."""
    row = view_engine(make_engine(READY, **dict.fromkeys(("kv_blocks_total", "kv_blocks_used", "num_moved_in"), 0)))
    assert (row.state, row.chunk_size_tokens, row.transport) == ("ready", 512, "ucx")
    assert (row.kv_blocks_free, row.kv_blocks_total, row.running_decodes, row.num_moved_in) == (None,) * 4


def test_every_figure_of_an_engine_is_the_routers_and_its_process_the_launchers() -> None:
    assert view_engine(make_engine(READY), num_starts=4) == EngineStatusRow(
        engine_id="engine-0",
        role="P-heavy",
        state="ready",
        chunk_size_tokens=512,
        running_decodes=3,
        waiting_requests=4,
        kv_blocks_free=74,
        kv_blocks_used=21,
        kv_blocks_granted=5,
        kv_blocks_pinned=6,
        kv_blocks_total=100,
        num_moved_in=7,
        num_moved_out=8,
        num_restarts=3,
        pid=11,
        transport="ucx",
        last_fault="it stalled",
    )
    assert view_engine(make_engine(READY, role=plan_pb2.ROLE_UNSPECIFIED)).role == ""
    assert view_engine(make_engine(READY, kv_blocks_granted=90)).kv_blocks_free == 0


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((CONNECTING,), "starting"),
        ((LOST,), "lost"),
        ((DRAINED, DRAINING), "drained"),
        ((DRAINING, READY, DRAINED), "ready"),
        ((LOST, DRAINING, CONNECTING), "draining"),
    ],
)
def test_of_several_routers_the_one_with_the_best_link_says_how_an_engine_is(states: Any, expected: str) -> None:
    assert view_engine(*(make_engine(state) for state in states)).state == expected


@pytest.mark.parametrize(
    ("process", "phase", "expected"),
    [
        ({}, "ready", ("starting", 0, 11, "")),
        ({"num_starts": 0}, "ready", ("starting", 0, 11, "")),
        ({"pid": None, "num_starts": 0}, "ready", ("starting", 0, None, "")),
        ({"pid": None, "num_starts": 3}, "ready", ("restarting", 2, None, "")),
        ({"pid": None, "refusal": "no GPU"}, "ready", ("refused", 0, None, "no GPU")),
        ({"pid": None, "refusal": "no GPU"}, "stopping", ("stopping", 0, None, "no GPU")),
        ({}, "stopping", ("stopping", 0, 11, "")),
    ],
)
def test_an_engine_that_no_router_knows_is_as_its_process_is(
    process: dict[str, Any], phase: str, expected: tuple[str, int, int | None, str]
) -> None:
    row = view_engine(phase=phase, **process)
    assert (row.state, row.num_restarts, row.pid, row.last_fault) == expected
    assert (row.role, row.kv_blocks_total) == ("", None)


def test_an_engine_without_a_process_has_none_of_the_figures_it_had() -> None:
    assert view_engine(make_engine(READY), pid=None) == EngineStatusRow(engine_id="engine-0", state="restarting")


@pytest.mark.parametrize(("tls", "scheme"), [("", "http"), ("certificates", "https")])
def test_every_figure_of_a_router_is_its_own(tls: str, scheme: str) -> None:
    process = ProcessRecord(
        name="router-0",
        kind="router",
        pid=5,
        num_starts=3,
        ports={"http": 8000, "control": 8001, "metrics": 8003},
        front_tls=tls,
        needs_key=True,
    )
    answer = control_pb2.GetStatusResponse(
        is_ready=True, generation=4, acknowledged_generation=2, num_requests=9, num_waiting=6
    )
    known = {"name": "router-0", "url": f"{scheme}://127.0.0.1:8000", "front_tls": tls, "needs_key": True}
    known |= {"metrics_url": "http://127.0.0.1:8003", "num_restarts": 2, "pid": 5}
    assert view([process], {"router-0": None}).routers == (RouterStatusRow(**known),)
    said = {"is_ready": True, "generation": 4, "acknowledged_generation": 2, "num_requests": 9, "num_waiting": 6}
    assert view([process], {"router-0": answer}).routers == (RouterStatusRow(**known, **said),)


def test_classes_are_summed_over_the_routers_by_their_names() -> None:
    def make_counters(name: str, *counts: int) -> control_pb2.ClassCounters:
        fields = ("num_finished", "num_met_ttft", "num_met_tpot", "num_met_both")
        return control_pb2.ClassCounters(name=name, **dict(zip(fields, counts, strict=True)))

    first = control_pb2.GetStatusResponse(classes=[make_counters("chat", 10, 9, 8, 7), make_counters("", 1, 1, 0, 0)])
    second = control_pb2.GetStatusResponse(
        classes=[make_counters("batch", 5, 4, 3, 2), make_counters("chat", 40, 30, 20, 9)]
    )
    classes = view([], {"router-0": first, "router-1": None, "router-2": second}).classes
    rows = [(each.name, each.num_finished, each.num_met_ttft, each.num_met_tpot, each.num_met_both) for each in classes]
    assert rows == [("chat", 50, 39, 28, 16), ("default", 1, 1, 0, 0), ("batch", 5, 4, 3, 2)]
    assert isinstance(classes[0], ClassAttainment)


def test_the_whole_is_plain_data_and_ready_when_every_part_is() -> None:
    router = ProcessRecord(name="router-0", kind="router", pid=5, num_starts=1, ports={"http": 8000, "metrics": 8003})
    engine = ProcessRecord(name="engine-0", kind="engine", pid=6, num_starts=1)
    launcher = ProcessRecord(name="launcher", kind="launcher", pid=7)
    tuner = AutotuneSummary(reason="Settled", message="all is well")

    def answer(*, is_ready: bool = True, **fields: Any) -> dict[str, control_pb2.GetStatusResponse | None]:
        engines = [make_engine(READY, **fields)]
        return {"router-0": control_pb2.GetStatusResponse(engines=engines, is_ready=is_ready)}

    whole = view([launcher, router, engine], answer(), autotune=tuner)
    data = whole.to_dict()
    names = ("name", "phase", "manifest", "model", "is_ready", "url")
    assert [data[name] for name in names] == ["c", "ready", "m.yaml", "tiny", True, "http://127.0.0.1:8000"]
    assert (len(data["routers"]), len(data["engines"]), data["autotune"]["reason"]) == (1, 1, "Settled")
    assert (view([engine], {}).url, view([engine], {}).autotune) == ("", None)
    assert not view([router], answer()).is_ready
    assert not view([engine], answer()).is_ready
    assert not view([router, engine], answer(is_ready=False)).is_ready
    assert not view([router, engine], answer(role=plan_pb2.ROLE_UNSPECIFIED)).is_ready
    assert not view([router, engine], answer(engine_id="engine-1")).is_ready
