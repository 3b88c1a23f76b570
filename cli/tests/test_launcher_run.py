"""A launcher from its start to its end, with a cluster that a test plays: files, order, signals, what it passes on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sluice_cli.local_cluster import launcher
from sluice_cli.local_cluster.cluster_directory import AlreadyRunningError, ClusterDirectory
from sluice_cli.local_cluster.launcher import UpOptions, run_launcher
from sluice_operator.api.manifest import ManifestError, ManifestProblem, parse_manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-cpu.yaml"
TEXT = EXAMPLE.read_text()
NAME = parse_manifest(TEXT).metadata.name


class PlayedCluster:
    """A cluster that is ready at once, and ends when it is told to."""

    made: ClassVar[list[PlayedCluster]] = []
    failure: ClassVar[Exception | None] = None

    def __init__(self, manifest: Any, directory: ClusterDirectory, **arguments: Any) -> None:
        self.manifest, self.directory, self.arguments = manifest, directory, arguments
        self.phase, self.rollout = "starting", ""
        self.applied: list[int] = []
        self.phases: list[str] = []
        self.rollouts: list[str] = []
        self._changed = asyncio.Event()
        self.made.append(self)

    def change(self, phase: str) -> None:
        self.phase = phase
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self) -> None:
        found = self.directory.read_launcher()
        assert found is not None
        self.phases.append(found[1]["phase"])
        self.rollouts.append(found[1].get("rollout", ""))
        await self._changed.wait()

    def apply(self, manifest: Any) -> None:
        self.manifest = manifest
        self.applied.append(manifest.spec.replicas)

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        await asyncio.sleep(0)
        self.change("ready")
        await asyncio.sleep(0)
        self.rollout = "rolled back"
        self.change("ready")
        await stop.wait()
        assert not hurry.is_set()
        self.change("stopping")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UpOptions:
    monkeypatch.setattr(launcher, "LocalCluster", PlayedCluster)
    monkeypatch.setattr(launcher, "check_local", lambda *_arguments, **_options: [])
    monkeypatch.setattr(PlayedCluster, "made", [])
    manifest = tmp_path / "m.yaml"
    manifest.write_text(TEXT)
    return UpOptions(
        manifest=manifest,
        http_port=4321,
        volumes={"models": tmp_path / "models"},
        secrets={"keys": tmp_path / "keys"},
        ports=range(5000, 5010),
        home=tmp_path,
    )


async def run(options: UpOptions, lines: list[str]) -> list[str]:
    """Runs a launcher that gets SIGTERM once it is shown; returns what became of the show."""
    shown: list[str] = []

    async def show(cluster: PlayedCluster) -> None:
        shown.append(cluster.phase)
        try:
            while cluster.phase != "ready":
                await cluster.wait_for_change()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            shown.append("cancelled")
            raise

    try:
        async with asyncio.timeout(30):
            await run_launcher(options, lines.append, show)  # type: ignore[arg-type]
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
    return shown


def read_facts(options: UpOptions) -> dict[str, Any]:
    found = ClusterDirectory(NAME, options.home).read_launcher()
    assert found is not None
    return found[1]


async def test_a_launcher_says_how_far_it_is_from_its_start_to_its_end(options: UpOptions) -> None:
    lines: list[str] = []
    assert await run(options, lines) == ["starting", "cancelled"]
    (cluster,) = PlayedCluster.made
    assert {"starting", "ready"} <= set(cluster.phases)
    assert set(cluster.rollouts) == {"", "rolled back"}
    assert cluster.phases[-1] == "stopping"
    facts = read_facts(options)
    assert facts["phase"] == "stopped"
    assert (facts["manifest"], facts["model"]) == (str(options.manifest), parse_manifest(TEXT).served_name)
    assert lines == ["stopping once streams have ended; again to stop at once"]


async def test_a_launcher_that_fails_says_so(options: UpOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedCluster, "failure", ValueError("a mistake"))
    with pytest.raises(ExceptionGroup):
        await run(options, [])
    assert read_facts(options)["phase"] == "failed"


async def test_the_cluster_gets_the_options(options: UpOptions) -> None:
    lines: list[str] = []
    await run(options, lines)
    (cluster,) = PlayedCluster.made
    given = cluster.arguments
    assert cluster.manifest == parse_manifest(TEXT)
    assert cluster.directory.path == ClusterDirectory(NAME, options.home).path
    assert (given["manifest_path"], given["http_port"]) == (options.manifest, 4321)
    assert given["report"] == lines.append
    # Claims and Secrets are where the options say.
    assert given["find_secret"]("keys") == options.secrets["keys"]
    assert given["find_model"].keywords == {"home": options.home, "volumes": options.volumes}
    assert given["ports"]._ports == options.ports


async def test_a_second_launcher_of_a_cluster_is_refused_and_leaves_the_first_alone(options: UpOptions) -> None:
    first = ClusterDirectory(NAME, options.home)
    first.lock()
    first.write_launcher("ready")
    with pytest.raises(AlreadyRunningError, match="already runs"):
        await run(options, [])
    assert read_facts(options)["phase"] == "ready"
    assert PlayedCluster.made == []


async def test_what_an_earlier_launcher_left_is_killed_before_anything_starts(
    options: UpOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any, int]] = []

    def kill(directory: ClusterDirectory, report: Any) -> None:
        report("killed")
        seen.append((directory.name, directory.read_launcher(), len(PlayedCluster.made)))

    monkeypatch.setattr(launcher, "kill_leftovers", kill)
    lines: list[str] = []
    await run(options, lines)
    assert seen == [(NAME, None, 0)]
    assert lines[0] == "killed"


async def test_what_this_machine_cannot_do_is_refused_at_the_start_and_in_edits(
    options: UpOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ManifestProblem(field="spec.network.mode", message="needs pods")
    asked: list[tuple[Any, ...]] = []

    def check(manifest: Any, home: Any, volumes: Any, secrets: Any) -> list[ManifestProblem]:
        asked.append((manifest.spec.replicas, home, volumes, secrets))
        return [problem] if manifest.spec.replicas == 7 else []

    async def follow(path: Path, text: str, cluster: Any, check_edit: Any, report: Any) -> None:
        assert (path, text, cluster) == (options.manifest, TEXT, PlayedCluster.made[0])
        edited = parse_manifest(TEXT.replace("replicas: 4", "replicas: 7", 1))
        report(str(check_edit(edited)))

    monkeypatch.setattr(launcher, "check_local", check)
    monkeypatch.setattr(launcher, "follow_manifest", follow)
    lines: list[str] = []
    await run(options, lines)
    assert lines[0] == str([problem])
    assert asked == [(replicas, options.home, options.volumes, options.secrets) for replicas in (4, 7)]
    options.manifest.write_text(TEXT.replace("replicas: 4", "replicas: 7", 1))
    with pytest.raises(ManifestError) as refused:
        await run(options, [])
    assert list(refused.value.problems) == [problem]
    assert len(PlayedCluster.made) == 1
