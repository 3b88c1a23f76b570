"""A local cluster follows its manifest: real processes (small stand-ins for engines and routers), real gRPC."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml
from local_cluster_harness import MANIFEST, OTHER_PORT, PORT, THIRD_PORT, D, P, Running, run_cluster

from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_operator.api.manifest import parse_manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with run_cluster(tmp_path) as running:
        yield running


async def test_a_cluster_starts_with_the_roles_and_chunk_sizes_of_its_manifest(running: Running) -> None:
    assert sorted(running.engines().values()) == [D, D, P]
    assert running.cluster.status().url == f"http://127.0.0.1:{PORT}"
    plan = json.loads(running.directory.plan_file.read_text())
    assert len(plan["engines"]) == 3
    assert json.loads(running.directory.engines_file.read_text())


async def test_a_live_edit_is_in_force_without_any_restart(running: Running) -> None:
    before = running.pids()
    assert running.edit("decodeHeavy: 64", "decodeHeavy: 128")
    await running.until(lambda: sorted(running.engines().values()) == [("D-heavy", 128), ("D-heavy", 128), P])
    assert running.pids() == before
    assert "test.yaml: spec.chunkSizes.decodeHeavy 64 -> 128 (live)" in running.lines


async def test_a_role_flip_moves_the_fewest_engines(running: Running) -> None:
    before, pids = running.engines(), running.pids()
    running.edit("prefillHeavy: 1", "prefillHeavy: 2")
    await running.until(lambda: sorted(running.engines().values()) == [D, P, P])
    assert sum(running.engines()[name] != before[name] for name in before) == 1
    assert running.pids() == pids


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("prefillHeavy: 1", "prefillHeavy: 9", "spec.prefillHeavy: 9 is above replicas, 3"),
        ("decodeHeavy: 64", "decodeHeavy: 7", "spec.chunkSizes.decodeHeavy: 7 is below the least chunk size, 16"),
        ("name: test", "name: other", "metadata.name: 'other' is another cluster"),
        ("kind: ServingCluster", "kind: [", "not valid YAML"),
    ],
    ids=["cross-field", "bound", "name", "yaml"],
)
async def test_an_invalid_edit_is_refused_by_name_and_the_plan_stays(
    running: Running, old: str, new: str, named: str
) -> None:
    plan = running.directory.plan_file.read_text()
    assert not running.edit(old, new)
    assert any(named in line for line in running.lines)
    assert running.directory.plan_file.read_text() == plan


async def test_a_plan_that_a_router_refuses_is_said_with_its_reason(running: Running) -> None:
    running.edit("tpotMilliseconds: 50", 'tpotMilliseconds: 50, attainment: "13%"')
    await running.until(lambda: any("13 is unlucky" in line for line in running.lines))
    running.edit('attainment: "13%"', 'attainment: "14%"')
    await running.until(lambda: any(line.startswith("plan") for line in running.lines[-1:]))


async def test_an_edit_that_changes_nothing_makes_no_plan(running: Running) -> None:
    plan = running.directory.plan_file.read_text()
    assert running.edit("replicas: 3", "replicas:   3")
    assert running.directory.plan_file.read_text() == plan


async def test_a_killed_engine_starts_again_and_keeps_its_role(running: Running) -> None:
    before, pid = running.engines(), running.pids()["engine-1"]
    os.kill(pid, signal.SIGKILL)
    await running.until(lambda: running.pids()["engine-1"] not in (pid, None))
    await running.until(running.is_ready)
    assert running.engines() == before
    assert any("engine-1 ended (killed by SIGKILL); it starts again" in line for line in running.lines)


async def test_a_killed_router_starts_again_and_gets_the_plan(running: Running) -> None:
    pid = running.pids()["router-0"]
    os.kill(pid, signal.SIGKILL)
    await running.until(lambda: running.pids()["router-0"] not in (pid, None))
    await running.until(running.is_ready)
    assert running.cluster.status().routers[0].generation > 0


async def test_engines_are_added_and_removed_with_replicas(running: Running) -> None:
    running.edit("replicas: 3", "replicas: 4")
    # A program that has just begun does not catch signals yet.
    await running.until(lambda: sorted(running.engines().values()) == [D, D, D, P] and running.is_ready())
    running.edit("replicas: 4", "replicas: 2")
    await running.until(lambda: sorted(running.engines().values()) == [D, P])
    log = running.directory.log_path("engine-3").read_text()
    assert "ended by SIGTERM" in log


async def test_routers_are_added_and_removed_with_their_replicas(running: Running) -> None:
    running.edit("router: {replicas: 1", "router: {replicas: 2")
    await running.until(lambda: len(running.cluster.status().routers) == 2 and running.is_ready())
    running.edit("router: {replicas: 2", "router: {replicas: 1")
    await running.until(lambda: [r.name for r in running.cluster.status().routers] == ["router-0"])


async def test_the_port_of_the_router_moves_and_the_engines_stay(running: Running) -> None:
    before, roles = running.pids(), running.engines()
    running.edit(f"port: {PORT}", f"port: {OTHER_PORT}")
    await running.until(lambda: running.cluster.status().url == f"http://127.0.0.1:{OTHER_PORT}" and running.is_ready())
    assert {name for name, pid in running.pids().items() if pid != before[name]} == {"router-0"}
    assert running.engines() == roles
    assert running.cluster.status().routers[0].generation > 0
    (router,) = [record for record in running.directory.read_processes() if record.kind == "router"]
    assert {name: router.ports[name] for name in ("http", "grpc", "control")} == {
        "http": OTHER_PORT,
        "grpc": OTHER_PORT + 1,
        "control": OTHER_PORT + 2,
    }
    assert f"router-0 stops once its streams have ended, then starts again on port {OTHER_PORT}" in running.lines
    # The old port is free again, for whoever wants it.
    assert running.ports.take(PORT, "a test", "none") == PORT


async def test_only_routers_restart_when_api_keys_are_required(running: Running) -> None:
    running.edit("router: {replicas: 1", "router: {replicas: 2")
    await running.until(lambda: len(running.cluster.status().routers) == 2 and running.is_ready())
    before = running.pids()
    running.edit(f"port: {PORT}}}", f"port: {PORT}}}, auth: {{mode: APIKey, apiKey: {{secretName: keys}}}}")
    await running.until(lambda: all(router.needs_key for router in running.cluster.status().routers))
    await running.until(lambda: len(running.cluster.status().routers) == 2 and running.is_ready())
    after = running.pids()
    assert {name for name, pid in after.items() if pid != before[name]} == {"router-0", "router-1"}
    for name in ("router-0", "router-1"):
        command = psutil.Process(after[name]).cmdline()
        assert command[command.index("--api-keys") + 1].endswith("/keys")
    assert running.cluster.status().url == f"http://127.0.0.1:{PORT}"


@pytest.mark.parametrize(
    "field",
    ["drainTimeoutSeconds: 7", "env: [{name: A, value: b}]"],
    ids=["drain timeout", "environment"],
)
async def test_only_routers_restart_for_a_field_of_theirs(running: Running, field: str) -> None:
    before = running.pids()
    running.edit(f"service: {{port: {PORT}}}", f"service: {{port: {PORT}}}, {field}")
    await running.until(lambda: running.pids().get("router-0") not in (None, before["router-0"]) and running.is_ready())
    assert {name for name, pid in running.pids().items() if pid != before[name]} == {"router-0"}
    process = psutil.Process(running.pids()["router-0"])
    command = process.cmdline()
    assert command[command.index("--grace-s") + 1] == ("7" if "drain" in field else "300")
    assert ("A" in process.environ()) == ("env" in field)


async def test_a_port_in_use_is_said_and_the_router_stays_until_another_is_named(running: Running) -> None:
    before = running.pids()
    with socket.create_server(("127.0.0.1", OTHER_PORT)):
        running.edit(f"port: {PORT}", f"port: {OTHER_PORT}")
        await running.until(lambda: any("router-0 stays at its port" in line for line in running.lines))
        assert any(f"port {OTHER_PORT} (spec.router.service.port) is in use" in line for line in running.lines)
        assert running.pids() == before
        assert running.is_ready()
        # The rest of the manifest is followed all the same.
        running.edit("replicas: 3", "replicas: 4")
        await running.until(lambda: sorted(running.engines().values()) == [D, D, D, P])
        assert running.cluster.status().url == f"http://127.0.0.1:{PORT}"
    running.edit(f"port: {OTHER_PORT}", f"port: {THIRD_PORT}")
    await running.until(lambda: running.cluster.status().url == f"http://127.0.0.1:{THIRD_PORT}" and running.is_ready())


async def test_another_model_restarts_everything(running: Running) -> None:
    before = running.pids()
    running.edit("name: tiny", "name: other")
    await running.until(lambda: all(pid and pid != before[name] for name, pid in running.pids().items()))
    await running.until(running.is_ready)
    assert running.cluster.status().model == "other"


async def test_generations_only_grow_over_restarts_of_the_launcher(tmp_path: Path) -> None:
    directory = ClusterDirectory("test", tmp_path)
    directory.path.mkdir(parents=True)
    first = directory.next_generation()
    again = ClusterDirectory("test", tmp_path).next_generation()
    assert again == (first[0], first[1] + 1)


def test_the_manifest_of_these_tests_is_valid() -> None:
    assert yaml.safe_load(MANIFEST)["spec"]["replicas"] == parse_manifest(MANIFEST).spec.replicas
