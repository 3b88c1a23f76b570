"""Benchmarks run in their smallest form, and write the figures that documents cite."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Runs a benchmark, on the wheel where these tests do; returns the figures that it wrote."""
    report = tmp_path / "figures.json"
    environment = {**os.environ}
    if arguments[0] == "benchmarks/prefixes/run.py":
        # Its placement extends a class, which none that is compiled allows.
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, *arguments, "--json", report],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures


@pytest.mark.parametrize("cell", ["arxiv taichi", "chat disaggregated"])
def test_simulator_counts_requests_and_iterations(tmp_path: Path, cell: str) -> None:
    figures = run(tmp_path, "benchmarks/simulator/run.py", "--quick", "--cell", cell)
    assert set(figures["cells"]) == {cell}
    found = figures["cells"][cell]
    assert found["requests"] > 100
    assert found["iterations"] > found["requests"]
    assert found["requests_per_s"] == pytest.approx(found["requests"] / found["cpu_s"])
    assert found["iterations_per_s"] == pytest.approx(found["iterations"] / found["cpu_s"])
    assert 0.5 < found["attainment"] <= 1.0


def test_drawn_cells_are_those_of_the_seed_and_cover_every_value() -> None:
    program = ROOT / "benchmarks/strategies/draw_cells.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "benchmarks/strategies/drawn_cells.toml").read_text()
    cells = list(tomllib.loads(done.stdout)["cells"].values())
    assert len(cells) == 24
    values = [cell["title"].split(", ") for cell in cells]
    assert [len(set(column)) for column in zip(*values, strict=True)] == [3, 2, 8, 3, 2, 2]
    assert all(cell["replicas"] == int(title[3].split()[0]) for cell, title in zip(cells, values, strict=True))
    assert all(bool(cell["set"]) == (title[4] == "4 routers") for cell, title in zip(cells, values, strict=True))
    others = subprocess.run([sys.executable, program, "15"], capture_output=True, text=True, check=True).stdout
    assert "with seed 15" in others
    assert tomllib.loads(others)["cells"] != tomllib.loads(done.stdout)["cells"]


def test_strategies_are_compared_on_the_same_requests(tmp_path: Path) -> None:
    options = ("--only", "code", "--seeds", "2", "--scale", "0.05", "--ablations")
    figures = run(tmp_path, "benchmarks/strategies/run.py", *options)
    (rates,) = figures["cells"].values()
    own = rates.pop("sluice 4xmax")
    ablations = [name for name in rates if "x" not in name]
    assert ablations == list(tomllib.loads((ROOT / "benchmarks/strategies/cells.toml").read_text())["ablations"])
    assert len(own) == 2
    assert all(rate > 0 for rate in own)
    rivals = [rates[name] for name in rates if name not in ablations]
    assert len(rivals) == 5
    least = min(sum(one / other for one, other in zip(own, rival, strict=True)) / 2 for rival in rivals)
    assert figures["least"] == figures["geometric_mean"] == pytest.approx(least)


def test_placement_measures_each_number_of_engines(tmp_path: Path) -> None:
    figures = run(tmp_path, "benchmarks/placement/run.py", "--decisions", "20", "--repeats", "1")
    cells = [(row["strategy"], row["engines"], row["case"]) for row in figures["placement"]]
    assert len(set(cells)) == len(cells) == 32
    assert {engines for _, engines, _ in cells} == {int(number) for number in figures["target_p99_us"]} | {8, 256}
    for row in figures["placement"]:
        assert 0 < row["decision_us"]["p50"] <= row["decision_us"]["p99"]
    assert len(figures["flow"]) == 6


def test_one_process_of_the_router_is_measured_with_the_harness_of_its_tests(tmp_path: Path) -> None:
    tokens = run(tmp_path, "benchmarks/router/token_path.py", "--engines", "2", "--streams", "6", "--rounds", "4")
    assert tokens["writes"] >= 6 * 4
    requests = run(tmp_path, "benchmarks/router/request_path.py", "--engines", "2", "--requests", "2", "--rounds", "4")
    options = ("--engines", "2", "--requests", "2", "--rounds", "4", "--tokens", "3", "--tls", "--keys")
    guarded = run(tmp_path, "benchmarks/router/request_path.py", *options)
    for figures in (tokens, requests, guarded):
        assert 0 < figures["fastest_us"] <= figures["median_us"]


def test_an_event_costs_more_with_tls(tmp_path: Path) -> None:
    figures = run(tmp_path, "benchmarks/router/tls_write.py", "--connections", "20", "--rounds", "20")
    assert 0 < figures["open_us"] < figures["tls_us"]
    assert 0 < figures["encryption_us"] < figures["tls_us"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="router and load are pinned to a core each")
def test_guards_of_the_router_are_measured_with_clients_that_have_both(tmp_path: Path) -> None:
    shape = ("--units", "token", "--guards", "both", "--turns", "1", "--seconds", "1", "--warmup-seconds", "0.5")
    load = ("--engines", "2", "--streams", "4", "--tokens", "4")
    (turn,) = run(tmp_path, "benchmarks/router/guard_cost.py", *shape, *load)["turns"]
    assert set(turn) == {"token"}
    assert set(turn["token"]) == {"in the open", "TLS and API keys"}
    assert all(cost_us > 0 for cost_us in turn["token"].values())


@pytest.mark.parametrize(("trace", "rate_rps"), [("conversation", "5"), ("chats", "40")])
def test_prefixes_are_compared_on_the_same_requests(tmp_path: Path, trace: str, rate_rps: str) -> None:
    options = ("--duration-s", "20", "--seeds", "1", "--trace", trace, "--rate", rate_rps)
    rows = run(tmp_path, "benchmarks/prefixes/run.py", *options)["rows"]
    places = [(row["strategy"], row["placement"]) for row in rows]
    assert len(set(places)) == len(places) == 10
    assert {placement for _, placement in places} == {"unaware", "affinity", "aware", "llm-d", "sglang"}
    for row in rows:
        assert 0.0 < row["hit_rate"] < 1.0
        assert 0.0 < row["ttft_p50_s"] <= row["ttft_p90_s"]
        assert 1.0 <= row["load"] <= 4.0


def test_prefixes_are_found_in_host_memory_too(tmp_path: Path) -> None:
    small = ("--duration-s", "60", "--kv-scale", "0.1", "--placements", "aware")
    without = run(tmp_path, "benchmarks/prefixes/run.py", *small)["rows"]
    hosted = run(tmp_path, "benchmarks/prefixes/run.py", *small, "--host-gib", "50", "--knows-host-kv")["rows"]
    assert [row["strategy"] for row in hosted] == ["aggregated", "taichi"]
    assert {row["host_hit_rate"] for row in without} == {0.0}
    assert sum(row["host_hit_rate"] for row in hosted) > 0.0


def test_messages_of_engine_streams_cost_something() -> None:
    program = ROOT / "benchmarks/router/engine_stream_path.py"
    options = ("--engines", "2", "--tokens", "4", "--seconds", "1")
    done = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, check=True)
    costs_us = [float(figure) for figure in re.findall(r"([\d.]+) us", done.stdout)]
    assert len(costs_us) == 2
    assert 0 < costs_us[0] <= costs_us[1]


def test_strategies_are_compared_on_paired_seeds_and_go_on_where_they_were(tmp_path: Path) -> None:
    results = tmp_path / "paired.json"
    command = [sys.executable, "benchmarks/strategies/paired.py", "--only", "c03", "--scale", "0.03", "--jobs", "1"]
    tables = []
    for seeds, num_made in (("1,2", 4), ("1,2,3", 2)):
        options = ("--seeds", seeds, "--results", results)
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True)
        *made, _, _, row = done.stdout.splitlines()
        assert len(made) == num_made
        tables.append([cell.strip() for cell in row.split("|")[1:-1]])
    for table, num_seeds in zip(tables, (2, 3), strict=True):
        assert table[:3] == ["c03", "flowprefill 3x2048,1x0", "45.07"]
        others, own = ([float(share) for share in column.split(", ")] for column in table[3:5])
        assert len(others) == len(own) == num_seeds
        gain = sum(own) / num_seeds - sum(others) / num_seeds
        assert float(table[5].split()[0]) == pytest.approx(gain, abs=0.2)
    # A seed draws the same requests however many there are.
    assert tables[1][3].startswith(tables[0][3])
