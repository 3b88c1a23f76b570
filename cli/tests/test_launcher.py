"""The launcher's own parts: ports, options, signals, the environment of routers, what an edit restarts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from worker_ports import CLUSTER_PORTS, NAMED_PORTS

from sluice_cli.commands.up import up
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.endpoints import EndpointAllocator, list_ports
from sluice_cli.local_cluster.launcher import UpOptions, _handle_signals
from sluice_cli.local_cluster.manifest_watch import apply_edit, describe_effect, find_ignored_fields, follow_manifest
from sluice_cli.local_cluster.reconcile.desired_processes import make_desired_processes
from sluice_cli.processes.child_processes import LaunchSpec, spawn
from sluice_cli.processes.fork_spawner import ENGINE_MODULES, ForkSpawner
from sluice_cli.processes.ports import PortAllocator, PortError
from sluice_cli.processes.spawners import make_engine_spawner, make_router_spawner
from sluice_core.records import EngineId
from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.manifest import ManifestProblem, check_manifest, parse_manifest
from sluice_operator.api.spec_changes import FieldChange
from sluice_operator.resources.command_lines import Security

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sluice_operator.api.serving_cluster import ServingCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-cpu.yaml"
PORT, OTHER_PORT = NAMED_PORTS[70], NAMED_PORTS[80]


def make_endpoints(home: Path, http_port: int | None = None) -> EndpointAllocator:
    ports = PortAllocator(CLUSTER_PORTS, directory=home / "ports")
    return EndpointAllocator(ports, ClusterDirectory("a", home), http_port)


def test_the_first_router_has_the_port_of_the_option_or_else_the_manifests(tmp_path: Path) -> None:
    assert make_endpoints(tmp_path).choose_http_port(OTHER_PORT) == OTHER_PORT
    assert make_endpoints(tmp_path, PORT).choose_http_port(OTHER_PORT) == PORT
    first = make_endpoints(tmp_path, PORT).make_first_router(OTHER_PORT, tmp_path)
    assert list_ports(first) == {"http": PORT, "grpc": PORT + 1, "control": PORT + 2, "metrics": first.metrics_port}
    assert first.metrics_port in CLUSTER_PORTS


def test_ports_beside_the_first_routers_are_others_where_they_are_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", PORT + 1)):
        router = make_endpoints(tmp_path).make_first_router(PORT, tmp_path)
    assert router.grpc_port in CLUSTER_PORTS
    assert router.control_port == PORT + 2


def test_ports_are_claimed_until_they_are_released(tmp_path: Path) -> None:
    endpoints = make_endpoints(tmp_path)
    router, engine = endpoints.make_first_router(PORT, tmp_path), endpoints.make_engine(EngineId("e"), tmp_path)
    other = make_endpoints(tmp_path)
    with pytest.raises(PortError, match=rf"port {PORT} \(spec.router.service.port\) is in use"):
        other.check_http_port(PORT)
    assert len({*list_ports(router).values(), *list_ports(engine).values()}) == 7
    endpoints.release(router)
    endpoints.release(engine)
    other.check_http_port(PORT)
    # To check it is not to claim it.
    assert endpoints.make_first_router(PORT, tmp_path).http_port == PORT
    assert len({other.make_further_router(tmp_path).http_port for _ in range(4)}) == 4


def test_a_worker_that_ends_leaves_the_ports_that_others_share_with_it(tmp_path: Path) -> None:
    endpoints, other = make_endpoints(tmp_path), make_endpoints(tmp_path)
    first = endpoints.make_first_router(PORT, tmp_path, shares_ports=True)
    worker = endpoints.make_worker(first)
    endpoints.release(worker, [first])
    with pytest.raises(PortError, match=f"port {PORT} "):
        other.check_http_port(PORT)
    endpoints.release(first)
    other.check_http_port(PORT)


def test_options_of_a_launcher_in_the_background_are_those_that_were_given(tmp_path: Path) -> None:
    manifest = tmp_path / "m.yaml"
    manifest.write_text("")
    options = UpOptions(
        manifest=manifest,
        http_port=PORT,
        volumes={"models": Path("/m"), "more": Path("/n")},
        secrets={"keys": Path("/k")},
        ports=CLUSTER_PORTS,
    )
    parsed = up.make_context("up", options.as_arguments()).params
    assert parsed == {
        "manifest": manifest,
        "detach": False,
        "http_port": PORT,
        "volumes": {"models": Path("/m"), "more": Path("/n")},
        "secrets": {"keys": Path("/k")},
        "ports": CLUSTER_PORTS,
    }


async def test_the_first_signal_drains_and_the_second_does_not_wait() -> None:
    stop, hurry, lines = asyncio.Event(), asyncio.Event(), []
    _handle_signals(stop, hurry, lines.append)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await stop.wait()
        assert not hurry.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(10):
            await hurry.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert lines == ["stopping once streams have ended; again to stop at once", "stopping at once"]


@pytest.mark.parametrize("is_cpu", [False, True])
async def test_routers_are_patient_with_engines_on_the_cpu_and_these_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool
) -> None:
    def find_version(_name: str) -> str:
        if is_cpu:
            return "1"
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", find_version)
    engines = make_engine_spawner(ClusterDirectory("a", tmp_path).log_path("forkserver"), lambda _: None)
    assert isinstance(engines, ForkSpawner) == is_cpu
    if isinstance(engines, ForkSpawner):
        assert engines._log == ClusterDirectory("a", tmp_path).path / "logs" / "forkserver.log"
        assert engines._modules == ENGINE_MODULES
    script = "import os; print(os.environ.get('SLUICE_ROUTER_SILENCE_LIMIT_S'), os.environ.get('A'))"
    spawner = make_router_spawner()
    for environment, words in (({"A": "1"}, "10 1"), ({"SLUICE_ROUTER_SILENCE_LIMIT_S": "3"}, "3 None")):
        log = tmp_path / words[0]
        launch = LaunchSpec(command=("python", "-c", script), environment=environment, log=log)
        assert await (await spawner(launch)).wait() == 0
        assert log.read_text().split() == (words if is_cpu else words.replace("10", "None")).split()
    assert is_cpu == (spawner is not spawn)


def desire(
    effective: dict[str, Any] | None = None, http_port: int = 1, security: Security | None = None, **parts: Any
) -> Any:
    content = yaml.safe_load(EXAMPLE.read_text())
    for name, part in parts.items():
        old = content["spec"].get(name)
        content["spec"][name] = {**old, **part} if isinstance(old, dict) else part
    spec = check_manifest(content).spec
    in_force = spec.model_copy(update=effective or {})
    return make_desired_processes(spec, in_force, http_port=http_port, router_security=security or Security())


DESIRED = {
    "nothing": ({}, set()),
    "objectives": ({"slo": {"ttftMilliseconds": 9}}, set()),
    "variable of engines": ({"engine": {"env": [{"name": "A", "value": "b"}]}}, {"engine_hash"}),
    "argument of engines": ({"engine": {"extraArgs": ["--seed", "3"]}}, {"engine_hash"}),
    "port": ({"http_port": 2}, {"router_hash"}),
    "time for answers to end": ({"router": {"drainTimeoutSeconds": 9}}, {"router_hash"}),
    "a pause": ({"rollout": {"paused": True}}, {"is_paused"}),
    "keys": ({"security": Security(api_keys="/k")}, {"router_hash"}),
    "replicas": ({"replicas": 6}, {"num_engines", "num_prefill_heavy"}),
    "routers": ({"router": {"replicas": 3}}, {"routers"}),
    "tuned": ({"effective": {"prefill_heavy": 1}}, {"num_prefill_heavy"}),
    "model": ({"model": {"servedName": "x"}}, {"compatibility_key"}),
    "peers": ({"network": {"tls": {"mode": "SecretRef", "secretName": "p"}}}, {"compatibility_key"}),
}


@pytest.mark.parametrize(("change", "differs"), DESIRED.values(), ids=DESIRED)
def test_an_edit_restarts_what_it_is_about_and_nothing_else(change: dict[str, Any], differs: set[str]) -> None:
    before, after = desire(), desire(**change)
    assert {name for name in before.__slots__ if getattr(before, name) != getattr(after, name)} == differs


@pytest.mark.parametrize(
    ("rollout", "fields"),
    [
        ({"paused": True}, []),
        ({"maxSurge": 1}, ["spec.rollout.maxSurge"]),
        ({"maxUnavailable": 2, "maxSurge": 1, "gate": {}}, ["spec.rollout.maxUnavailable", "spec.rollout.maxSurge"]),
    ],
    ids=["none", "one", "two"],
)
def test_fields_that_only_pods_follow_are_named(rollout: dict[str, Any], fields: list[str]) -> None:
    content = yaml.safe_load(EXAMPLE.read_text())
    content["spec"]["rollout"] = rollout
    assert find_ignored_fields(check_manifest(content).spec) == fields


class Followed:
    """A cluster that takes manifests, and a file that counts how often it is read."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.manifest: ServingCluster = parse_manifest(self.text)
        self.lines: list[str] = []
        self.num_reads = 0
        self.was_read = asyncio.Event()
        followed = self

        class CountedPath(type(path)):  # type: ignore[misc]
            def read_text(self, *arguments: Any, **options: Any) -> str:
                followed.num_reads += 1
                followed.was_read.set()
                return super().read_text(*arguments, **options)

        self.path = CountedPath(path)

    def apply(self, manifest: ServingCluster) -> None:
        self.manifest = manifest

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Follows the file while the block runs, which it must outlive."""
        task = asyncio.create_task(
            follow_manifest(self.path, self.text, self, lambda _: [], self.lines.append)  # type: ignore[arg-type]
        )
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()

    async def wait_for_reads(self, count: int = 2) -> None:
        """Waits until the file has been read so many times more: what the last read found is done by then."""
        wanted = self.num_reads + count
        async with asyncio.timeout(60):
            while self.num_reads < wanted:
                self.was_read.clear()
                await self.was_read.wait()


async def test_a_refused_edit_is_said_once_and_a_missing_file_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    text = EXAMPLE.read_text()
    path.write_text(text)
    followed = Followed(path)
    async with followed.follow():
        path.write_text(text.replace("replicas: 4", "replicas: 0", 1))
        await followed.wait_for_reads(4)
        assert followed.lines[0] == "m.yaml refused, the cluster stays as it is:"
        assert len(followed.lines) == 2
        path.unlink()
        await followed.wait_for_reads()
        path.write_text(text.replace("replicas: 4", "replicas: 5", 1))
        await followed.wait_for_reads()
        assert followed.manifest.spec.replicas == 5
        assert [line for line in followed.lines[2:] if "refused" in line] == []


async def test_a_file_that_cannot_be_read_is_said_once_and_the_next_save_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    text = EXAMPLE.read_text()
    path.write_text(text)
    followed = Followed(path)
    async with followed.follow():
        path.write_bytes(text.encode() + b"# \xff")
        await followed.wait_for_reads(4)
        path.unlink()
        path.mkdir()
        await followed.wait_for_reads(4)
        refused = "m.yaml refused, the cluster stays as it is:"
        problems = [
            f"  {path} is no UTF-8 text: byte {len(text.encode()) + 2} is 0xff",
            f"  {path} cannot be read: Is a directory",
        ]
        assert followed.lines == [refused, problems[0], refused, problems[1]]
        path.rmdir()
        path.write_text(text.replace("replicas: 4", "replicas: 5", 1))
        await followed.wait_for_reads()
        assert followed.manifest.spec.replicas == 5
        # The same fault after a good read is news.
        path.unlink()
        path.mkdir()
        await followed.wait_for_reads()
        assert followed.lines[-2:] == [refused, problems[1]]


async def test_fields_that_only_pods_follow_are_said_at_the_start_and_in_edits(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    content = yaml.safe_load(EXAMPLE.read_text())
    content["spec"]["rollout"] = {"maxSurge": 1}
    path.write_text(yaml.safe_dump(content))
    followed = Followed(path)
    ignored = "(ignored: local engines restart one at a time)"
    async with followed.follow():
        await followed.wait_for_reads(1)
        assert followed.lines == [f"m.yaml: spec.rollout.maxSurge {ignored}"]
        content["spec"]["rollout"] = {"maxSurge": 2}
        path.write_text(yaml.safe_dump(content))
        await followed.wait_for_reads()
        assert followed.lines[1:] == [f"m.yaml: spec.rollout.maxSurge 1 -> 2 {ignored}"]


def test_what_this_machine_cannot_do_is_refused_and_nothing_is_applied(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(EXAMPLE.read_text())

    class Cluster:
        manifest = parse_manifest(path.read_text())

        def apply(self, manifest: ServingCluster) -> None:
            raise AssertionError(manifest)

    lines: list[str] = []
    problem = ManifestProblem(field="spec.network.mode", message="needs pods")
    text = path.read_text().replace("replicas: 4", "replicas: 5", 1)
    assert not apply_edit(text, path, Cluster(), lambda _: [problem], lines.append)  # type: ignore[arg-type]
    assert lines == ["m.yaml refused, the cluster stays as it is:", "  spec.network.mode: needs pods"]


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        (FieldEffect.LIVE, "live"),
        (FieldEffect.RESTARTS_ENGINES, "restarts engines one at a time, after each has handed its requests over"),
        (FieldEffect.RESTARTS_ROUTERS, "restarts routers, after their streams have ended"),
        (FieldEffect.RESTARTS_ALL, "stops the cluster and starts it again"),
    ],
)
def test_each_effect_of_an_edit_is_said_in_words(effect: FieldEffect, words: str) -> None:
    assert describe_effect(FieldChange(field="f", old=1, new=2, effect=effect)) == words
