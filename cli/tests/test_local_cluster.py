"""A local cluster follows its manifest: real processes (small stand-ins for engines and routers), real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml
from worker_ports import CLUSTER_PORTS, NAMED_PORTS

from sluice.v1 import control_pb2
from sluice_cli.local_cluster.cluster import LocalCluster
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.manifest_watch import apply_edit
from sluice_cli.processes.child_processes import spawn
from sluice_cli.processes.ports import PortAllocator
from sluice_operator.api.manifest import parse_manifest
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune.search_messages import SearchResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sluice_cli.processes.child_processes import ChildProcess, LaunchSpec
    from sluice_operator.autotune.search_messages import SearchRequest

PROGRAMS = Path(__file__).parent / "programs"
PORT, OTHER_PORT, THIRD_PORT = NAMED_PORTS[0], NAMED_PORTS[10], NAMED_PORTS[20]
ROUTER = f"  router: {{replicas: 1, service: {{port: {PORT}}}}}\n"
MANIFEST = (
    """
apiVersion: sluice.dev/v1alpha1
kind: ServingCluster
metadata: {name: test}
spec:
  replicas: 3
  prefillHeavy: 1
  chunkSizes: {prefillHeavy: 512, decodeHeavy: 64}
  slo: {ttftMilliseconds: 500, tpotMilliseconds: 50}
  model: {name: tiny, source: {persistentVolumeClaim: {claimName: models}}}
  engine: {drainTimeoutSeconds: 5}
"""
    + ROUTER
)


async def spawn_stand_in(launch: LaunchSpec) -> ChildProcess:
    """Runs the container's command with the program replaced by its stand-in."""
    stand_ins = {"sluice_engine": "fake_engine.py", "sluice_router": "fake_router.py"}
    python, _, module, *arguments = launch.command
    return await spawn(replace(launch, command=(python, str(PROGRAMS / stand_ins[module]), *arguments)))


class Running:
    """A running cluster, and what it said."""

    def __init__(self, home: Path, text: str = MANIFEST) -> None:
        self.lines: list[str] = []
        self.text = text
        self.offset_s = 0.0
        self.path = home / "test.yaml"
        self.directory = ClusterDirectory("test", home)
        self.directory.path.mkdir(parents=True)
        self.ports = PortAllocator(CLUSTER_PORTS, directory=home / "ports")
        self.cluster = LocalCluster(
            parse_manifest(self.text),
            self.directory,
            manifest_path=self.path,
            ports=self.ports,
            spawn_engine=spawn_stand_in,
            spawn_router=spawn_stand_in,
            find_model=lambda manifest: home,
            find_secret=lambda name: home / name,
            report=self.report,
            clock=lambda: time.monotonic() + self.offset_s,
            ask=self.answer,
            stop_margin_s=0.5,
        )
        # What searches for sliders are asked, and what they answer.
        self.asked: list[SearchRequest] = []
        self.sliders = Sliders(num_prefill_heavy=2, prefill_heavy_tokens=1024, decode_heavy_tokens=128)
        self.num_finished = self.num_met = 0
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()

    def report(self, line: str) -> None:
        self.lines.append(line)
        self.cluster._notify()

    async def answer(self, request: SearchRequest) -> SearchResult:
        self.asked.append(request)
        return SearchResult(
            sliders=self.sliders,
            goodput_rps=3.0,
            attainment=0.97,
            in_force_goodput_rps=2.0,
            in_force_attainment=0.8,
            least_gain=0.4,
        )

    def finish(self, count: int, share: float = 1.0, prompt_tokens: int = 1000) -> None:
        """Has the router say that so many more requests finished, of so many tokens."""
        self.num_finished += count
        self.num_met += round(count * share)
        file = self.directory.engines_file.with_name("requests.json")
        requests = {"num_finished": self.num_finished, "num_met": self.num_met, "prompt_tokens": prompt_tokens}
        file.with_suffix(".new").write_text(json.dumps(requests))
        file.with_suffix(".new").replace(file)

    def misreport(self, **views: dict[str, int] | None) -> None:
        """Has the router say of engines what is not so."""
        file = self.directory.engines_file.with_name("views.json")
        file.with_suffix(".new").write_text(json.dumps({name.replace("_", "-"): view for name, view in views.items()}))
        file.with_suffix(".new").replace(file)

    async def serve_until(self, is_reached: Callable[[], bool], share: float = 1.0, prompt_tokens: int = 1000) -> None:
        """Has requests finish until something is the case."""
        async with asyncio.timeout(30):
            while not is_reached():
                self.finish(10, share, prompt_tokens)
                await asyncio.sleep(0.1)

    def edit(self, old: str, new: str) -> bool:
        assert old in self.text
        text = self.text.replace(old, new)
        is_taken = apply_edit(text, self.path, self.cluster, lambda manifest: [], self.report)
        self.text = text if is_taken else self.text
        return is_taken

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_reached():
                await self.cluster.wait_for_change()

    def engines(self) -> dict[str, tuple[str, int]]:
        return {e.engine_id: (e.role, e.chunk_size_tokens or 0) for e in self.cluster.status().engines}

    def pids(self) -> dict[str, int | None]:
        view = self.cluster.status()
        return {e.engine_id: e.pid for e in view.engines} | {r.name: r.pid for r in view.routers}

    def is_ready(self) -> bool:
        return self.cluster.status().is_ready


@contextlib.asynccontextmanager
async def run_cluster(home: Path, text: str = MANIFEST) -> AsyncIterator[Running]:
    """Runs a cluster until its end, and makes sure that it leaves no process."""
    running = Running(home, text)
    task = asyncio.create_task(running.cluster.run(running.stop, running.hurry))
    await running.until(running.is_ready)
    await running.until(lambda: len(running.engines()) == running.cluster.manifest.spec.replicas)
    try:
        yield running
    finally:
        pids = [pid for pid in running.pids().values() if pid]
        running.stop.set()
        try:
            async with asyncio.timeout(30):
                await task
        except TimeoutError:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        # A stand-in that raises would be started again, as if nothing had happened.
        for log in running.directory.log_path("x").parent.iterdir():
            assert not TRACEBACK.search(log.read_text()), log.read_text()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with run_cluster(tmp_path) as running:
        yield running


# gRPC prints one for each call that is cancelled.
TRACEBACK = re.compile(r"^Traceback .*\n( .*\n)+(?!asyncio.exceptions.CancelledError)", re.MULTILINE)
P, D = ("P-heavy", 512), ("D-heavy", 64)


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


AUTOTUNE = """
  autotune:
    mode: Apply
    cooldownSeconds: 1
    bounds:
      prefillHeavy: {min: 1, max: 2}
      chunkSizes: {prefillHeavy: {min: 256, max: 2048}, decodeHeavy: {min: 0, max: 256}}
"""
TUNED = [("D-heavy", 128), ("P-heavy", 1024), ("P-heavy", 1024)]


def start_tuning(running: Running) -> None:
    assert running.edit(ROUTER, ROUTER + AUTOTUNE)


async def test_the_tuner_changes_sliders_and_restarts_nothing(running: Running) -> None:
    pids = running.pids()
    start_tuning(running)
    await running.serve_until(lambda: sorted(running.engines().values()) == TUNED)
    assert running.pids() == pids
    tuning = running.cluster.status().autotune
    assert tuning is not None
    assert (tuning.prefill_heavy, tuning.prefill_heavy_tokens, tuning.predicted_attainment) == (2, 1024, 0.97)
    assert "autotune: prefillHeavy 1, chunks 512/64 -> prefillHeavy 2, chunks 1024/128 (live)" in running.lines
    await running.serve_until(lambda: running.cluster.status().autotune.reason == "Tuned")
    assert json.loads((running.directory.path / "autotune.json").read_text())["reason"] == "Tuned"
    assert len(running.asked) == 1
    assert len([line for line in running.lines if "recommends" in line]) == 1


async def test_tuned_sliders_return_when_attainment_falls_and_a_users_edit_wins(running: Running) -> None:
    start_tuning(running)
    await running.serve_until(lambda: sorted(running.engines().values()) == TUNED)
    await running.serve_until(lambda: sorted(running.engines().values()) == [D, D, P], share=0.1)
    await running.until(lambda: running.cluster.status().autotune.reason == "Returned")
    assert running.edit("decodeHeavy: 64", "decodeHeavy: 96")
    await running.until(lambda: sorted(running.engines().values()) == [("D-heavy", 96), ("D-heavy", 96), P])


async def test_an_edited_objective_and_a_shifted_workload_start_a_new_search(running: Running) -> None:
    start_tuning(running)
    await running.serve_until(lambda: sorted(running.engines().values()) == TUNED)
    running.sliders = replace(running.sliders, prefill_heavy_tokens=2048)
    assert running.edit("tpotMilliseconds: 50", "tpotMilliseconds: 80")
    await running.serve_until(lambda: ("P-heavy", 2048) in running.engines().values())
    assert [request.constraints.classes[0].tpot_milliseconds for request in running.asked] == [50, 80]
    await running.serve_until(lambda: len(running.asked) == 3, prompt_tokens=4000)
    assert running.asked[2].workload.rows[0] == (4000, 50, "")


async def test_a_tuner_that_is_turned_off_gives_the_sliders_back(running: Running) -> None:
    start_tuning(running)
    await running.serve_until(lambda: sorted(running.engines().values()) == TUNED)
    assert running.edit("mode: Apply", 'mode: "Off"')
    await running.until(lambda: sorted(running.engines().values()) == [D, D, P])
    assert running.cluster.status().autotune is None
    assert not (running.directory.path / "autotune.json").exists()
