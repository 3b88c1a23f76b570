"""What a local cluster does in its life, second by second, is as it was told when the stories were written.

``stories/NAME.txt`` has a story per play. After a change of behaviour that is wanted, write them anew, and read the
difference before it is committed:

    SLUICE_WRITE_STORIES=1 .venv/bin/python -m pytest cli/tests/test_played_clusters.py
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from played_cluster import Play
from worker_ports import CLUSTER_PORTS, NAMED_PORTS

STORIES = Path(__file__).with_name("stories")
PORT, OTHER_PORT = NAMED_PORTS[50], NAMED_PORTS[60]
MANIFEST = f"""
apiVersion: sluice.dev/v1alpha1
kind: ServingCluster
metadata: {{name: test}}
spec:
  replicas: 3
  prefillHeavy: 1
  chunkSizes: {{prefillHeavy: 512, decodeHeavy: 64}}
  strategy: TaiChi
  slo: {{ttftMilliseconds: 500, tpotMilliseconds: 50}}
  model: {{name: tiny, source: {{persistentVolumeClaim: {{claimName: models}}}}}}
  engine: {{drainTimeoutSeconds: 5, startupTimeoutSeconds: 30}}
  router: {{replicas: 1, drainTimeoutSeconds: 4, service: {{port: {PORT}}}}}
"""
AUTOTUNE = """
  autotune:
    mode: Apply
    cooldownSeconds: 1
    bounds:
      prefillHeavy: {min: 1, max: 2}
      chunkSizes: {prefillHeavy: {min: 256, max: 2048}, decodeHeavy: {min: 0, max: 256}}
"""


async def start(play: Play) -> None:
    await play.until(lambda: play.is_settled(3))
    await play.pass_time(1.0)
    play.show()


async def live_edits(play: Play) -> None:
    await start(play)
    for old, new in (
        ("decodeHeavy: 64", "decodeHeavy: 128"),
        ("prefillHeavy: 1\n", "prefillHeavy: 2\n"),
        ("tpotMilliseconds: 50", "tpotMilliseconds: 40"),
        ("replicas: 3\n", "replicas:   3\n"),
        ("prefillHeavy: 2\n", "prefillHeavy: 9\n"),
        ("strategy: TaiChi", "strategy: Aggregated"),
    ):
        play.edit(old, new)
        await play.pass_time(1.0)
        play.show()


async def more_and_fewer(play: Play) -> None:
    await start(play)
    play.edit("replicas: 3\n", "replicas: 5\n")
    await play.until(lambda: play.is_settled(5))
    play.show()
    play.edit("router: {replicas: 1", "router: {replicas: 2")
    await play.until(lambda: play.is_settled(5, 2))
    play.show()
    play.loads = {"engine-0": 1, "engine-1": 9, "engine-2": 8, "engine-3": 2, "engine-4": 7}
    await play.pass_time(1.0)
    play.edit("replicas: 5\n", "replicas: 3\n")
    await play.until(lambda: play.is_settled(3, 2))
    play.show()
    play.edit("router: {replicas: 2", "router: {replicas: 1")
    await play.until(lambda: play.is_settled(3, 1))
    play.edit("replicas: 3\n", "replicas: 4\n")
    await play.until(lambda: play.is_settled(4))
    play.show()


async def crashes(play: Play) -> None:
    await start(play)
    play.children["engine-0"].end(-signal.SIGKILL)
    await play.pass_time(0.05)
    play.show()
    await play.until(lambda: play.is_settled(3))
    for code in (1, 1, -signal.SIGSEGV):
        play.children["engine-0"].end(code)
        await play.pass_time(0.2)
        await play.until(lambda: play.is_settled(3))
    await play.pass_time(70.0)
    play.children["engine-0"].end(1)
    await play.pass_time(0.2)
    await play.until(lambda: play.is_settled(3))
    play.children["router-0"].end(3)
    await play.pass_time(0.2)
    play.show()
    await play.until(lambda: play.is_settled(3))
    play.show()


async def refusals(play: Play) -> None:
    play.exit_codes = {"engine-1": 3}
    play.last_words = "a line\nsluice_engine: no such model\nsluice_engine: the model has no weights\nbye\n"
    await play.pass_time(6.0)
    play.show()
    play.exit_codes = {}
    play.edit("startupTimeoutSeconds: 30", "startupTimeoutSeconds: 30, env: [{name: A, value: b}]")
    await play.until(lambda: play.is_settled(3))
    play.show()


async def refusals_without_words(play: Play) -> None:
    play.exit_codes = {"engine-1": 3, "router-0": 3}
    await play.pass_time(6.0)
    play.show()


async def rolling_restart(play: Play) -> None:
    await start(play)
    play.edit("startupTimeoutSeconds: 30", "startupTimeoutSeconds: 30, env: [{name: A, value: b}]")
    await play.pass_time(2.0)
    play.show()
    await play.until(lambda: play.is_settled(3))
    await play.pass_time(12.0)
    play.show()
    # An edit in the middle of a restart, that comes before the engine serves again.
    play.edit("value: b", "value: c")
    await play.pass_time(2.5)
    play.edit("value: c", "value: d")
    await play.pass_time(20.0)
    play.show()


async def engines_that_do_not_drain(play: Play) -> None:
    await start(play)
    play.clingy = {"engine-1", "engine-2"}
    play.deaf = {"engine-2"}
    play.edit("replicas: 3\n", "replicas: 1\n")
    await play.until(lambda: play.is_settled(1))
    play.show()


async def engines_that_never_connect(play: Play) -> None:
    play.mute = {"engine-2"}
    await play.pass_time(33.0)
    play.show()
    play.mute = set()
    await play.until(lambda: play.is_settled(3))
    await play.pass_time(40.0)
    # One that was connected is not late, whatever routers say of it now.
    play.mute = {"engine-1"}
    await play.pass_time(40.0)
    play.show()


async def routers_move_and_change(play: Play) -> None:
    await start(play)
    play.edit("router: {replicas: 1", "router: {replicas: 2")
    await play.until(lambda: play.is_settled(3, 2))
    play.edit(f"port: {PORT}", f"port: {OTHER_PORT}")
    await play.pass_time(1.0)
    await play.until(lambda: play.is_settled(3, 2))
    play.show()
    with socket.create_server(("127.0.0.1", PORT)):
        play.edit(f"port: {OTHER_PORT}", f"port: {PORT}")
        await play.pass_time(3.0)
    play.show()
    play.deaf = {"router-0", "router-1"}
    play.edit("drainTimeoutSeconds: 4", "drainTimeoutSeconds: 6, env: [{name: A, value: b}]")
    await play.pass_time(1.0)
    await play.until(lambda: play.is_settled(3, 2) and play.children["router-1"].started_s > 9.0)
    await play.pass_time(20.0)
    play.show()


async def another_model(play: Play) -> None:
    await start(play)
    play.deaf = {"engine-1"}
    play.edit("name: tiny", "name: other")
    await play.pass_time(9.0)
    await play.until(lambda: play.is_settled(3))
    play.show()


async def api_keys(play: Play) -> None:
    await start(play)
    keys = f"port: {PORT}}}, auth: {{mode: APIKey, apiKey: {{secretName: keys}}}}"
    play.edit(f"port: {PORT}}}", keys)
    await play.pass_time(1.0)
    await play.until(lambda: play.is_settled(3))
    play.show()


async def tuning(play: Play) -> None:
    await start(play)
    play.edit("  router: {replicas", AUTOTUNE + "  router: {replicas")
    for number in range(60):
        play.finish(10, 1.0 if number < 30 else 0.1)
        await play.pass_time(1.0)
    play.show()
    play.edit("mode: Apply", 'mode: "Off"')
    await play.pass_time(1.0)
    play.show()


async def hurry(play: Play) -> None:
    await start(play)
    play.deaf = {"router-0", "engine-0"}
    play.stop.set()
    await play.pass_time(2.0)
    play.show()
    play.hurry.set()


async def patient_stop(play: Play) -> None:
    await start(play)
    play.deaf = {"router-0", "engine-0"}


async def stop_during_a_start(play: Play) -> None:
    await play.pass_time(0.5)
    play.show()


PLAYS = {
    play.__name__: play
    for play in (
        start,
        live_edits,
        more_and_fewer,
        crashes,
        refusals,
        refusals_without_words,
        rolling_restart,
        engines_that_do_not_drain,
        engines_that_never_connect,
        routers_move_and_change,
        another_model,
        api_keys,
        tuning,
        hurry,
        patient_stop,
        stop_during_a_start,
    )
}


@pytest.mark.parametrize("name", PLAYS)
def test_a_cluster_lives_as_its_story_tells(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    http_port = OTHER_PORT if name == "patient_stop" else None
    story = Play(tmp_path, MANIFEST, CLUSTER_PORTS, monkeypatch, http_port).tell(PLAYS[name])
    file = STORIES / f"{name}.txt"
    if "SLUICE_WRITE_STORIES" in os.environ:
        file.write_text(story)
    assert story == file.read_text()


def test_what_routers_say_during_the_stop_makes_no_cluster_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []

    async def stop_slowly(play: Play) -> None:
        await start(play)
        play.deaf = {"router-0"}
        phases.append(play.cluster.phase)
        play.stop.set()
        await play.pass_time(1.0)
        play.links["router-0"].on_status()
        phases.append(play.cluster.phase)

    Play(tmp_path, MANIFEST, CLUSTER_PORTS, monkeypatch, None).tell(stop_slowly)
    assert phases == ["ready", "stopping"]


def test_an_engine_that_fails_during_the_stop_makes_no_new_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations: list[list[int]] = []

    async def fail_while_streams_end(play: Play) -> None:
        await start(play)
        play.deaf = {"router-0"}
        link = play.links["router-0"]
        play.stop.set()
        await play.pass_time(0.1)
        for name in ("engine-0", "engine-1"):
            generations.append([plan.generation for _, plan in link.plans])
            play.children[name].end(-signal.SIGKILL)
            await play.pass_time(0.5)
        generations.append([plan.generation for _, plan in link.plans])

    Play(tmp_path, MANIFEST, CLUSTER_PORTS, monkeypatch, None).tell(fail_while_streams_end)
    assert generations[0]
    assert generations == [generations[0]] * 3


def test_nothing_is_settled_while_a_router_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[bool] = []

    async def fall_silent(play: Play) -> None:
        await play.until(lambda: play.is_settled(3, 2))
        await play.pass_time(1.0)
        verdicts.append(play.cluster._is_settled())
        play.links["router-1"].status = None
        verdicts.append(play.cluster._is_settled())

    text = MANIFEST.replace("router: {replicas: 1", "router: {replicas: 2")
    Play(tmp_path, text, CLUSTER_PORTS, monkeypatch, None).tell(fall_silent)
    assert verdicts == [True, False]


def test_workers_of_the_first_replica_move_to_its_new_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[set[str]] = []

    async def move(play: Play) -> None:
        for port in (PORT, OTHER_PORT):
            play.edit(f"port: {PORT}", f"port: {port}")
            await play.pass_time(30.0)
            assert play.is_settled(3, 2)
            urls.append({router.url for router in play.cluster.status().routers})

    text = MANIFEST.replace("router: {replicas: 1", "router: {replicas: 1, workers: 2")
    Play(tmp_path, text, CLUSTER_PORTS, monkeypatch, None).tell(move)
    assert urls == [{f"http://127.0.0.1:{port}"} for port in (PORT, OTHER_PORT)]


def test_a_router_that_gets_a_second_worker_starts_again_to_share_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int | None] = []

    async def add_a_worker(play: Play) -> None:
        await start(play)
        pids.append(play.cluster.status().routers[0].pid)
        play.edit("router: {replicas: 1", "router: {replicas: 1, workers: 2")
        await play.until(lambda: play.is_settled(3, 2))
        await play.pass_time(30.0)
        pids.extend(router.pid for router in play.cluster.status().routers)

    Play(tmp_path, MANIFEST, CLUSTER_PORTS, monkeypatch, None).tell(add_a_worker)
    assert len(set(pids)) == 3


def test_every_story_is_played() -> None:
    assert {file.stem for file in STORIES.iterdir()} == set(PLAYS)
