"""What each command hands on of its options."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sluice_cli.commands.cluster_options import parse_ports
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.launcher import UpOptions
from sluice_cli.main import cli
from sluice_operator.api.manifest import parse_manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-cpu.yaml"
# Modules by their full names: their packages have commands of the same names.
UP, DOWN, EXPLAIN, DEMO = (
    importlib.import_module(f"sluice_cli.commands.{name}") for name in ("up", "down", "explain", "demo")
)
OPTIONS = ("--http-port", "4321", "--volume", "models=/m", "--secret", "keys=/k", "--port-range", "21000-21999")
GIVEN = UpOptions(
    manifest=EXAMPLE,
    http_port=4321,
    volumes={"models": Path("/m")},
    secrets={"keys": Path("/k")},
    ports=range(21000, 22000),
)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments))
    return result.exit_code, result.output


def test_up_hands_every_option_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[UpOptions] = []

    async def launch(options: UpOptions, _report: object, _show: object) -> None:
        launched.append(options)

    monkeypatch.setattr(UP, "run_launcher", launch)
    assert run("up", str(EXAMPLE), *OPTIONS) == (0, "")
    assert launched == [GIVEN]


def test_up_in_the_background_starts_the_same_and_ends_as_the_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(directory: ClusterDirectory, arguments: list[str], _report: object) -> int:
        started.append((directory.name, arguments))
        return 3

    monkeypatch.setattr(UP, "start_detached", start)
    monkeypatch.setattr(UP, "read_manifest", lambda options: parse_manifest(options.manifest.read_text()))
    assert run("up", str(EXAMPLE), "--detach", *OPTIONS)[0] == 3
    assert started == [("tiny", GIVEN.as_arguments())]


@pytest.mark.parametrize(
    ("arguments", "stopped"),
    [
        (("--all",), [("a", False), ("b", False)]),
        (("--all", "--now"), [("a", True), ("b", True)]),
        (("--cluster", "b"), [("b", False)]),
        (("--cluster", "b", "--now"), [("b", True)]),
    ],
    ids=["all", "all now", "one", "one now"],
)
def test_down_stops_the_clusters_that_are_meant_at_once_or_after_their_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], stopped: list[tuple[str, bool]]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        directory = ClusterDirectory(name)
        directory.path.mkdir(parents=True)
        directory.write_launcher("ready")
    found: list[tuple[str, bool]] = []

    def stop(directory: ClusterDirectory, *, is_hurried: bool, report: object) -> None:
        assert report is DOWN.click.echo
        found.append((directory.name, is_hurried))

    monkeypatch.setattr(DOWN, "stop_cluster", stop)
    assert run("down", *arguments)[0] == 0
    assert found == stopped


def test_down_looks_after_a_named_cluster_though_no_launcher_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ClusterDirectory("a").path.mkdir(parents=True)
    found: list[str] = []
    monkeypatch.setattr(DOWN, "stop_cluster", lambda directory, **_: found.append(directory.name))
    assert run("down") == (0, "nothing runs\n")
    assert (run("down", "--cluster", "a"), found) == ((0, ""), ["a"])


@pytest.mark.parametrize("is_kept", [True, False])
def test_demo_keeps_its_cluster_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch, *, is_kept: bool) -> None:
    shown: list[object] = []
    monkeypatch.setattr(DEMO, "run_demo", lambda manifest, ports, *_, is_kept: shown.append((manifest, ports, is_kept)))
    keep = ["--keep"] if is_kept else []
    assert run("demo", "--manifest", str(EXAMPLE), "--port-range", "21000-21999", *keep) == (0, "")
    assert shown == [(EXAMPLE, range(21000, 22000), is_kept)]


@pytest.mark.parametrize("is_variable", [True, False])
def test_explain_asks_the_routers_of_the_cluster_with_the_key(
    monkeypatch: pytest.MonkeyPatch, *, is_variable: bool
) -> None:
    asked: list[object] = []

    async def read(directory: str) -> SimpleNamespace:
        return SimpleNamespace(routers=f"routers of {directory}")

    async def fetch(*arguments: str) -> dict[str, Any]:
        asked.append(arguments)
        return {"request_id": "r", "events": []}

    monkeypatch.setattr(EXPLAIN, "choose_cluster", lambda name: name)
    monkeypatch.setattr(EXPLAIN, "read_cluster_status", read)
    monkeypatch.setattr(EXPLAIN, "fetch_decision_log", fetch)
    if is_variable:
        monkeypatch.setenv("SLUICE_API_KEY", "sk-1")
    code, output = run("explain", "r", "--cluster", "c", "--json", *([] if is_variable else ["--api-key", "sk-1"]))
    assert (code, json.loads(output)) == (0, {"request_id": "r", "events": []})
    assert asked == [("routers of c", "r", "sk-1")]


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("1024-32767", range(1024, 32768)),
        ("20000-20001", range(20000, 20002)),
        ("20000-20000", None),
        ("1023-2000", None),
        ("20000-32768", None),
        ("20000", None),
    ],
)
def test_a_range_of_ports_has_two_ends_below_those_that_the_kernel_takes(text: str, ports: range | None) -> None:
    if ports is None:
        with pytest.raises(click.BadParameter, match="LOW-HIGH"):
            parse_ports(None, None, text)  # type: ignore[arg-type]
    else:
        assert parse_ports(None, None, text) == ports  # type: ignore[arg-type]
