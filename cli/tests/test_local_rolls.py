"""Rolls of a local cluster: one engine at a time, each waiting for the new process; starts and drains have limits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING

import pytest
from local_cluster_harness import MANIFEST, Running, run_cluster

from sluice.v1 import control_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with run_cluster(tmp_path) as running:
        yield running


async def test_a_restart_class_edit_rolls_one_engine_at_a_time(running: Running) -> None:
    before, roles = running.pids(), running.engines()
    # A process that has served once is there, even while the router does not answer.
    have_served = set(before.items())
    most_away = 0

    def is_rolled() -> bool:
        nonlocal most_away
        view, pids = running.cluster.status(), running.pids()
        have_served.update((engine.engine_id, engine.pid) for engine in view.engines if engine.state == "ready")
        most_away = max(most_away, sum((e.engine_id, e.pid) not in have_served for e in view.engines))
        changed = [name for name, pid in pids.items() if pid != before[name]]
        return changed == ["engine-0", "engine-1", "engine-2"] and view.is_ready

    running.edit("engine: {", "engine: {maxBatchTokens: 4096, ")
    await running.until(is_rolled)
    assert most_away == 1
    # While the only P-heavy engine is away, another one has its role.
    assert sorted(running.engines().values()) == sorted(roles.values())
    assert any("restarts engines one at a time" in line for line in running.lines)


async def test_a_roll_that_fails_stops_at_the_first_engine_until_the_manifest_is_mended(running: Running) -> None:
    before = running.pids()
    running.edit("engine: {", "engine: {extraArgs: [--fail], ")
    await running.until(lambda: sum("engine-0 ended (exit code 4)" in line for line in running.lines) >= 2)
    assert {name for name, pid in running.pids().items() if pid != before[name]} == {"engine-0"}
    running.edit("extraArgs: [--fail], ", "")
    await running.until(running.is_ready)
    assert {name for name, pid in running.pids().items() if pid != before[name]} == {"engine-0"}


async def test_an_engine_that_refuses_its_model_is_started_again_only_for_an_edit(running: Running) -> None:
    running.edit("engine: {", "engine: {extraArgs: [--refuse], ")
    refusal = "/model: sliding_window is 4096"
    await running.until(lambda: any(engine.state == "refused" for engine in running.cluster.status().engines))
    (refused,) = (engine for engine in running.cluster.status().engines if engine.state == "refused")
    assert (refused.engine_id, refused.last_fault, refused.pid) == ("engine-0", refusal, None)
    assert len([line for line in running.lines if f"engine-0 refuses to start: {refusal}" in line]) == 1
    running.edit("extraArgs: [--refuse], ", "")
    await running.until(running.is_ready)
    assert not any(line.startswith("engine-0 ended") for line in running.lines)


async def test_a_roll_waits_for_the_new_process_and_not_for_what_a_router_says_of_the_old_one(
    running: Running,
) -> None:
    before = running.pids()
    running.misreport(engine_0={"epoch": before["engine-0"] or 0})
    running.edit("engine: {", "engine: {maxBatchTokens: 4096, ")
    await running.until(lambda: running.pids()["engine-0"] not in (before["engine-0"], None))
    await running.until(lambda: running.cluster.status().engines[0].state == "ready")
    for _ in range(10):
        await asyncio.sleep(0)
    running.report("the router knows the new process")
    running.misreport()
    await running.until(lambda: running.is_ready() and not set(before.values()) & {running.pids()["engine-2"]})
    assert running.lines.index("engine-0 serves again") > running.lines.index("the router knows the new process")


async def test_an_old_report_counts_for_no_new_process_though_the_router_knew_nothing_meanwhile(
    running: Running,
) -> None:
    old = running.pids()["engine-0"]
    running.misreport(engine_0=None)
    await running.until(lambda: running.cluster.status().engines[0].state != "ready")
    os.kill(old, signal.SIGKILL)
    await running.until(lambda: running.pids()["engine-0"] is None)
    running.misreport(engine_0={"epoch": old})
    await running.until(lambda: running.pids()["engine-0"] is not None)
    await running.until(lambda: running.cluster.status().engines[0].state == "ready")
    assert not running.cluster._is_serving("engine-0")
    running.misreport()
    await running.until(lambda: running.cluster._is_serving("engine-0"))


GATED = MANIFEST.replace(
    "  engine: {",
    "  rollout: {gate: {durationSeconds: 1, minRequests: 10, timeoutSeconds: 600}}\n  engine: {extraArgs: [--seed=1], ",
)


def list_seeds(running: Running) -> list[str]:
    """The seed of each engine's command."""
    engines = running.cluster._engines.values()
    return [next(part for part in engine.process.launch.command if "--seed" in part) for engine in engines]


async def test_a_gated_roll_replaces_the_next_engine_once_requests_met_their_objectives(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, GATED) as running:
        running.edit("--seed=1", "--seed=2")
        await running.until(lambda: "engine-0 serves again" in running.lines)
        # Nothing ends meanwhile: the verdict waits, and so do the other engines.
        running.offset_s += 100.0
        await asyncio.sleep(2.5)
        assert [seed[-1] for seed in list_seeds(running)] == ["2", "1", "1"]
        assert running.cluster.status().rollout == "rollout.gate let 0 of 3 engines pass"
        await running.serve_until(lambda: not running.cluster.status().rollout)
        assert [seed[-1] for seed in list_seeds(running)] == ["2", "2", "2"]
    passed = [line for line in running.lines if line.startswith("rollout.gate let")]
    assert passed == [f"rollout.gate let {number} of 3 engines pass" for number in range(4)]


@pytest.mark.parametrize(
    ("edit", "share", "why"),
    [
        ("--seed=2", 0.5, "met their objectives, less than rollout.gate.minAttainment 90%"),
        ("--seed=2, --refuse", 1.0, "/model: sliding_window is 4096"),
    ],
    ids=["worse", "refused"],
)
async def test_a_gated_roll_goes_back_by_itself_and_says_why(tmp_path: Path, edit: str, share: float, why: str) -> None:
    async with run_cluster(tmp_path, GATED) as running:
        before = running.pids()
        running.edit("--seed=1", edit)
        await running.serve_until(lambda: why in running.cluster.status().rollout, share)
        await running.until(lambda: running.is_ready() and list_seeds(running)[0].endswith("1"))
        assert {name for name, pid in running.pids().items() if pid != before[name]} == {"engine-0"}
        # It stays so, also for an engine that comes, until the manifest is edited.
        running.edit("replicas: 3", "replicas: 4")
        await running.until(lambda: running.is_ready() and len(running.engines()) == 4)
        assert [seed[-1] for seed in list_seeds(running)] == ["1"] * 4
        running.edit(edit, "--seed=3")
        await running.serve_until(lambda: not running.cluster.status().rollout)
        assert [seed[-1] for seed in list_seeds(running)] == ["3"] * 4
    assert sum(why in line and line.startswith("rolled back: ") for line in running.lines) == 1


async def test_another_model_is_no_roll(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, GATED) as running:
        running.edit("--seed=1", "--seed=2")
        await running.until(lambda: "engine-0 serves again" in running.lines)
        running.edit("model: {name: tiny", "model: {name: tiny, servedName: other")
        await running.until(lambda: running.is_ready() and [seed[-1] for seed in list_seeds(running)] == ["2"] * 3)
        assert running.cluster.status().rollout == ""


LOST, READY = control_pb2.ENGINE_STATE_LOST, control_pb2.ENGINE_STATE_READY


async def test_an_engine_that_does_not_serve_in_time_is_killed_and_starts_again(tmp_path: Path) -> None:
    text = MANIFEST.replace("engine: {", "engine: {startupTimeoutSeconds: 60, ")
    async with run_cluster(tmp_path, text) as running:
        before = running.pids()
        # One that was connected once is no late one, whatever has become of it.
        running.misreport(engine_2={"state": LOST})
        running.edit("engine: {", "engine: {extraArgs: [--deaf], ")
        await running.until(lambda: running.pids()["engine-0"] not in (before["engine-0"], None))
        late = running.pids()["engine-0"]
        running.offset_s += 59.0
        assert not any("did not serve" in line for line in running.lines)
        running.offset_s += 2.0
        await running.until(lambda: running.pids()["engine-0"] not in (late, None))
        (line,) = [line for line in running.lines if "did not serve" in line]
        assert "engine-0 did not serve within 60 s (spec.engine.startupTimeoutSeconds)" in line
        assert {name: pid for name, pid in running.pids().items() if name != "engine-0"} == {
            name: pid for name, pid in before.items() if name != "engine-0"
        }
        running.misreport()
        running.edit("extraArgs: [--deaf], ", "")
        await running.until(running.is_ready)


@pytest.mark.parametrize(
    ("old", "new", "engine"),
    [("replicas: 3", "replicas: 2", ""), ("engine: {", "engine: {maxBatchTokens: 4096, ", "engine-0")],
    ids=["removed", "restarted"],
)
async def test_an_engine_that_does_not_drain_in_time_goes_all_the_same(
    tmp_path: Path, old: str, new: str, engine: str
) -> None:
    text = MANIFEST.replace("drainTimeoutSeconds: 5", "drainTimeoutSeconds: 1")
    async with run_cluster(tmp_path, text) as running:
        before = running.pids()
        running.misreport(**{name.replace("-", "_"): {"state": READY} for name in running.engines()})
        running.edit(old, new)
        await running.until(lambda: any("did not drain" in line for line in running.lines))
        plan = json.loads(running.directory.plan_file.read_text())
        (draining,) = [part["engine_id"] for part in plan["engines"] if part.get("is_draining")]
        assert draining == engine or not engine
        assert f"{draining} did not drain within 1 s; its requests are recovered elsewhere" in running.lines
        assert running.pids()[draining] == before[draining]
        running.misreport()
        await running.until(lambda: running.pids().get(draining) != before[draining] and running.is_ready())
        plan = json.loads(running.directory.plan_file.read_text())
        assert engine in (part["engine_id"] for part in plan["engines"]) or not engine


STUBBORN = MANIFEST.replace("replicas: 3", "replicas: 2").replace("engine: {", "engine: {extraArgs: [--stubborn], ")


async def test_what_ignores_sigterm_is_killed_when_its_drain_and_the_margin_are_over(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, STUBBORN.replace("drainTimeoutSeconds: 5", "drainTimeoutSeconds: 1")) as running:
        lines = running.lines
    assert [f"engine-{number} did not end within 1.5 s; it is killed" for number in range(2)] == sorted(
        line for line in lines if "did not end" in line
    )


async def test_whoever_hurries_does_not_wait_for_what_ignores_sigterm(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, STUBBORN.replace("drainTimeoutSeconds: 5", "drainTimeoutSeconds: 300")) as running:
        running.stop.set()
        await running.until(lambda: not running.cluster.status().routers)
        running.hurry.set()
    assert not any("did not end" in line for line in running.lines)
