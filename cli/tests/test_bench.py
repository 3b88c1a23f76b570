"""``sluice bench strategies``: what it compares, refuses, keeps and prints."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from sluice_cli.main import cli
from sluice_operator.api.manifest import parse_manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-cpu.yaml"
CLUSTER = ("--model", "llama-3-8b", "--gpu", "a100", "--replicas", "2", "--ttft-ms", "2000", "--tpot-ms", "80")
QUICK = ("--seeds", "1,2", "--scale", "0.02", "--jobs", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "strategies", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    rows = [f"{2000 + 100 * number},{20 + number}" for number in range(20)]
    path.write_text("\n".join(["input_tokens,output_tokens", *rows]) + "\n")
    return path


def write_cells(path: Path, trace: Path, **changes: object) -> Path:
    """Writes a file of two cells, the second with twice as many engines; ``changes`` are of the first."""
    cell: dict[str, object] = {
        "title": "a small one",
        "model": "llama-3-8b",
        "gpu": "a100-80g",
        "tensor_parallel": 1,
        "trace": trace.name,
        "replicas": 1,
        "ttft_ms": 2000,
        "tpot_ms": 80,
        "set": ["routers=2"],
    }
    lines = []
    for name, table in (("one", cell | changes), ("two", cell | {"replicas": 2})):
        lines += [f"[cells.{name}]", *[f"{key} = {json.dumps(value)}" for key, value in table.items()]]
    path.write_text("\n".join(lines))
    return path


def test_own_requests_are_served_by_every_strategy_asked_for_the_best_first(trace: Path, tmp_path: Path) -> None:
    own = (*CLUSTER, *QUICK, "--trace", str(trace), "--results", str(tmp_path / "kept" / "figures.json"))
    done = run(*own, "--strategy", "aggregated,disaggregated,sluice", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    cell = report["cells"]["mine"]
    found = cell["strategies"]
    assert {one["strategy"] for one in found} == {"aggregated", "disaggregated", "sluice"}
    goodputs = [one["goodput_rps"] for one in found]
    assert goodputs == sorted(goodputs, reverse=True)
    assert goodputs[-1] > 0
    assert found[0]["of_best"] == 1.0
    assert found[0]["of_best_interval"] == [1.0, 1.0]
    best, last = found[0]["goodput_per_seed"], found[-1]["goodput_per_seed"]
    assert found[-1]["of_best"] == pytest.approx(statistics.fmean(b / a for a, b in zip(best, last, strict=True)))
    assert report["summary"][found[0]["strategy"]]["least"] == pytest.approx(goodputs[0] / goodputs[1])
    text = run(*own, "--strategy", "aggregated,disaggregated,sluice").stdout
    positions = [text.index(one["strategy"]) for one in found]
    assert positions == sorted(positions)
    assert all(one["engines"] in text for one in found)


def test_a_comparison_goes_on_where_it_stopped_and_refuses_figures_of_another_one(trace: Path, tmp_path: Path) -> None:
    cells, kept = write_cells(tmp_path / "cells.toml", trace), tmp_path / "figures.json"
    pinned = ("--cells", str(cells), "--results", str(kept), *QUICK)
    first = run(*pinned, "--only", "one", "--strategy", "aggregated")
    assert first.exit_code == 0, first.output
    assert "one, aggregated: " in first.stderr
    assert "(1 of 1)" in first.stderr
    content = json.loads(kept.read_text())
    assert list(content["cells"]) == ["one"]
    content["cells"]["one"]["strategies"]["aggregated"]["goodputs_rps"] = [1.5, 1.5]  # what is there is not measured
    kept.write_text(json.dumps(content))
    table, heat_map = tmp_path / "table.md", tmp_path / "map.svg"
    again = run(*pinned, "--strategy", "aggregated", "--table", str(table), "--heat-map", str(heat_map))
    assert again.exit_code == 0, again.output
    assert "(1 of 1)" in again.stderr
    assert "| one | a small one | 1.50 | 1.00 |" in table.read_text()
    assert "| two | a small one |" in table.read_text()
    assert heat_map.read_text().startswith("<svg")
    assert heat_map.read_text().count(">1.00<") == 2
    other = run(*pinned[:-6], *QUICK, "--scale", "0.1")
    assert other.exit_code == 1
    assert "was measured with --seeds 1,2 --scale 0.02" in " ".join(other.output.split())
    write_cells(cells, trace, ttft_ms=3000)
    changed = run(*pinned, "--strategy", "aggregated")
    assert changed.exit_code == 1
    assert "figures of another cell one" in " ".join(changed.output.split())


def test_a_setting_is_added_to_what_every_cell_sets(trace: Path, tmp_path: Path) -> None:
    cells, kept = write_cells(tmp_path / "cells.toml", trace), tmp_path / "figures.json"
    only_one = ("--cells", str(cells), "--only", "one", "--strategy", "aggregated", "--results", str(kept), *QUICK)
    done = run(*only_one, "--set", "early_rejection=Reject")
    assert done.exit_code == 0, done.output
    flags = json.loads(kept.read_text())["cells"]["one"]["cell"]["flags"]
    assert flags["changes"] == ["routers=2", "early_rejection=Reject"]
    assert "figures of another cell one" in " ".join(run(*only_one).output.split())


def test_a_strategy_that_meets_the_objectives_at_no_rate_counts_as_nothing(trace: Path, tmp_path: Path) -> None:
    impossible = (*CLUSTER[:-4], "--ttft-ms", "1", "--tpot-ms", "80", *QUICK, "--trace", str(trace))
    done = run(*impossible, "--strategy", "aggregated", "--results", str(tmp_path / "figures.json"))
    assert done.exit_code == 0, done.output
    assert "meets the objectives at no rate" in done.stdout


def test_a_manifest_says_what_the_cluster_is(trace: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(EXAMPLE.read_text())
    content["spec"]["engine"]["emulation"] = {"model": "llama-3-8b", "gpu": "a100-80g"}
    content["spec"]["slo"] = {"ttftMilliseconds": 2000, "tpotMilliseconds": 80}
    content["spec"]["replicas"] = 2
    manifest = tmp_path / "cluster.yaml"
    manifest.write_text(yaml.safe_dump(content))
    done = run(
        str(manifest), "--trace", str(trace), *QUICK, "--strategy", "sluice", "--results", str(tmp_path / "f.json")
    )
    assert done.exit_code == 0, done.output
    most_tokens = parse_manifest(manifest.read_text()).spec.engine.max_batch_tokens
    assert f"sluice    2x{most_tokens} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cells", "nowhere.toml"), "nowhere.toml cannot be read"),
        (("--cells", "{cells}", "--only", "three"), "has no cell three; it has one, two"),
        (("--ttft-ms", "5"), "need --trace"),
        (("--trace", "{trace}", "--only", "one"), "--trace has no others"),
        (("--trace", "{trace}"), "without a manifest, --model, --gpu, --replicas, --ttft-ms, --tpot-ms must be given"),
        (("--strategy", "fastest"), "strategy 'fastest' is unknown"),
        (("--cells", "{broken}"), "cell one: replicas (int) is missing"),
        (("--cells", "{cells}", "--results", "{trace}"), "is no file of figures"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout may hold figures of its own
    files = {"trace": str(trace), "cells": str(write_cells(tmp_path / "cells.toml", trace))}
    files["broken"] = str(write_cells(tmp_path / "broken.toml", trace, replicas="four"))
    done = run(*[argument.format(**files) for argument in arguments])
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
