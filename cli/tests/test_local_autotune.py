"""The tuner of a local cluster: sliders change without a restart, and return."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from local_cluster_harness import ROUTER, D, P, Running, run_cluster

from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.local_autotune import LocalAutotuner
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.manifest import parse_manifest
from sluice_operator.autotune.condition import AutotuneStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-cpu.yaml"
AUTOTUNE = """
  autotune:
    mode: Apply
    cooldownSeconds: 1
    bounds:
      prefillHeavy: {min: 1, max: 2}
      chunkSizes: {prefillHeavy: {min: 256, max: 2048}, decodeHeavy: {min: 0, max: 256}}
"""
TUNED = [("D-heavy", 128), ("P-heavy", 1024), ("P-heavy", 1024)]


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with run_cluster(tmp_path) as running:
        yield running


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


def test_what_an_earlier_launcher_tuned_is_gone_at_the_start(tmp_path: Path) -> None:
    directory = ClusterDirectory("a", tmp_path)
    directory.path.mkdir(parents=True)
    directory.write_autotune({"reason": "Tuned"})
    LocalAutotuner(directory, report=lambda _: None, wake=lambda: None, clock=lambda: 0.0)
    assert directory.read_autotune() is None


def test_a_verdict_is_said_once_for_each_reason_and_always_kept(tmp_path: Path) -> None:
    directory, lines = ClusterDirectory("a", tmp_path), []
    directory.path.mkdir(parents=True)
    tuner = LocalAutotuner(directory, report=lines.append, wake=lambda: None, clock=lambda: 0.0)
    said: list[AutotuneStatus] = []
    tuner._tuner = SimpleNamespace(update=lambda given: given.cluster, describe_status=lambda: said[-1], result=None)
    circumstances = SimpleNamespace(cluster=parse_manifest(EXAMPLE.read_text()))
    for reason, message in ((Reason.NO_SAMPLE, "a"), (Reason.NO_SAMPLE, "b"), (Reason.SEARCHING, "b")):
        said.append(AutotuneStatus(is_true=False, reason=reason, message=message))
        tuner.reconcile(circumstances)
        kept = directory.read_autotune()
        assert kept is not None
        assert (kept["reason"], kept["message"]) == (reason, message)
    assert lines == ["autotune: a", "autotune: b"]
    said.append(AutotuneStatus(is_true=False, reason=Reason.OFF, message="autotune is off"))
    tuner.reconcile(circumstances)
    assert (tuner.status, directory.read_autotune(), len(lines)) == (None, None, 2)
