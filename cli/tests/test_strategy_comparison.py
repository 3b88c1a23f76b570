"""Comparisons of strategies whose runs are stood in for by formulas: what is simulated, kept and told."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest

from sluice_cli.simulation import strategy_comparison
from sluice_cli.simulation.comparison_file import ComparisonFile, ComparisonSettings
from sluice_cli.simulation.plan_inputs import PlanFlags, make_inputs
from sluice_cli.simulation.strategy_cells import StrategyCell, load_cells, make_own_cell
from sluice_cli.simulation.strategy_comparison import compare_strategies
from sluice_cli.simulation.trace_cache import load_rows
from sluice_core.planning.planner import Planner
from sluice_core.planning.slider_search import SearchEffort
from sluice_core.planning.trials import SearchTrial, TrialEvaluator, TrialResult, build_cell
from sluice_core.sim.goodput_search import NoGoodputError
from sluice_core.sim.workload import DrawnWorkload
from sluice_operator.api.manifest import parse_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_core.planning.slider_candidates import SliderCandidate

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-cpu.yaml"
# Requests/s of two engines, as the planner has them.
GOODPUTS_RPS = {"aggregated": 20.0, "disaggregated": 40.0, "sluice": 4.0, "ecoserve": 100.0}


class Formulas:
    """What would be simulated; the planner's runs and the search of a goodput note what they are asked for."""

    def __init__(self) -> None:
        self.trials: list[SearchTrial] = []
        self.pools: list[tuple[Any, int]] = []
        self.searches: list[SimpleNamespace] = []
        self.hopeless = ""

    def make_pool(self, problem: Any, num_processes: int) -> Formulas:
        self.pools.append((problem, num_processes))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.pools.append(("closed", 0))

    def run(self, trials: Sequence[SearchTrial]) -> list[TrialResult]:
        self.trials += trials
        return [self._run_one(trial) for trial in trials]

    def _run_one(self, trial: SearchTrial) -> TrialResult:
        name = trial.candidate.strategy
        over = math.log(trial.rate_rps / GOODPUTS_RPS[name])
        attainment = 0.0 if name == self.hopeless else min(1.0, max(0.0, 0.9 - 4.0 * over))
        # What the plan says of its requests, which nobody reads here, is that of a short run.
        short = replace(trial, rate_rps=2.0, duration_s=5.0, least_attainment=0.0)
        detail = TrialEvaluator(self.pools[-1][0]).evaluate(short).detail if trial.is_detailed else None
        return TrialResult(trial=trial, attainment=attainment, num_iterations=1, detail=detail)

    def search(self, cell: Any, workload: Any, **arguments: float) -> SimpleNamespace:
        self.searches.append(SimpleNamespace(cell=cell, workload=workload, **arguments))
        if len(self.searches) == 3:
            raise NoGoodputError("no rate passes")
        return SimpleNamespace(rate_rps=float(len(self.searches)))


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> Formulas:
    stand_in = Formulas()
    monkeypatch.setattr(strategy_comparison, "TrialPool", stand_in.make_pool)
    monkeypatch.setattr(strategy_comparison, "search_goodput", stand_in.search)
    return stand_in


def make_cell(folder: Path, name: str = "one") -> StrategyCell:
    trace = folder / "mine.csv"
    rows = [f"{2000 + 100 * number},{20 + number}" for number in range(20)]
    trace.write_text("\n".join(["input_tokens,output_tokens", *rows]) + "\n")
    flags = PlanFlags(model="llama-3-8b", gpu="a100", replicas=(2, 2), ttft_ms=2000, tpot_ms=80, target=0.85)
    return StrategyCell(name=name, title="a small one", trace=trace, flags=flags)


def make_settings(*strategies: str, seeds: tuple[int, ...] = (5, 6), scale: float = 0.5) -> ComparisonSettings:
    return ComparisonSettings(strategies=strategies, seeds=seeds, scale=scale, num_processes=1)


def compare(cells: list[StrategyCell], settings: ComparisonSettings, path: Path) -> tuple[Any, list[Any], list[str]]:
    told: list[tuple[float, str]] = []
    notes: list[str] = []
    file = ComparisonFile(path, settings)
    every = compare_strategies(cells, settings, file, lambda share, what: told.append((share, what)), notes.append)
    return every, told, notes


def test_all_strategies_serve_the_same_requests_for_the_time_that_the_first_one_says(formulas, tmp_path) -> None:
    cell = make_cell(tmp_path)
    settings = make_settings("aggregated", "disaggregated")
    (figures,), told, notes = compare([cell], settings, tmp_path / "kept" / "well" / "figures.json")
    # 1500 requests at 20 per second take 75 s, of which this is the half.
    assert figures.duration_s == pytest.approx(37.5, rel=0.05)
    assert [search.duration_s for search in formulas.searches] == [figures.duration_s] * 4
    assert [search.start_rps for search in formulas.searches] == pytest.approx([20, 20, 40, 40], rel=0.05)
    assert {search.target for search in formulas.searches} == {0.85}
    # The third search finds no rate.
    assert [figures.strategies[name].goodputs_rps for name in settings.strategies] == [(1.0, 2.0), (0.0, 4.0)]
    rows = load_rows(cell.trace)
    problem = make_inputs(None, cell.flags, rows).problem
    chosen_on = {trial.seed for trial in formulas.trials if not trial.is_detailed}
    assert 1000 in chosen_on
    assert not chosen_on & set(settings.seeds)
    for number, search in enumerate(formulas.searches):
        seed, name = settings.seeds[number % 2], settings.strategies[number // 2]
        sliders: SliderCandidate = figures.strategies[name].sliders
        assert sliders.strategy == name
        assert search.cell == build_cell(problem, sliders, seed)
        expected = DrawnWorkload(rows, problem.slo, seed, problem.classes)
        assert search.workload.make_arrivals(3.0, 9.0) == expected.make_arrivals(3.0, 9.0)
    assert [what for what, _ in formulas.pools] == [problem, "closed"] * 2
    assert {number for _, number in formulas.pools} == {1, 0}
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert [share for share, what in told if what.endswith(": goodput")] == [0.25, 0.75]
    assert {what.split(":")[0] for _, what in told} == {"one, aggregated", "one, disaggregated"}
    # The planner's share of a strategy is the half.
    assert max(share for share, what in told if what.startswith("one, agg")) == 0.25
    assert notes == [
        "one, aggregated: 1.50 requests/s (1 of 2)",
        "one, disaggregated: 2.00 requests/s (2 of 2)",
    ]


@pytest.mark.parametrize(("name", "duration_s"), [("sluice", 375.0), ("ecoserve", 30.0)])
def test_runs_have_1500_requests_within_bounds(formulas, tmp_path, name, duration_s) -> None:
    """At 4 requests/s they take 375 s, at 100 the least."""
    (figures,), _, _ = compare([make_cell(tmp_path)], make_settings(name, scale=1.0), tmp_path / "figures.json")
    assert figures.duration_s == pytest.approx(duration_s, rel=0.05)


def test_no_run_is_longer_than_400_s(formulas, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(GOODPUTS_RPS, "sluice", 0.5)
    (figures,), _, _ = compare([make_cell(tmp_path)], make_settings("sluice", scale=0.1), tmp_path / "figures.json")
    assert figures.duration_s == 40.0


def test_a_short_comparison_has_short_runs(formulas, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(GOODPUTS_RPS, "sluice", 1000.0)
    efforts = []

    def make_planner(problem: Any, space: Any, effort: SearchEffort, *rest: Any) -> Planner:
        efforts.append(effort)
        return Planner(problem, space, effort, *rest)

    monkeypatch.setattr(strategy_comparison, "Planner", make_planner)
    (figures,), _, _ = compare([make_cell(tmp_path)], make_settings("sluice", scale=0.1), tmp_path / "figures.json")
    assert figures.duration_s == 3.0
    assert efforts == [SearchEffort(seeds=(1000,), num_requests=150, least_duration_s=3.0)]


def test_a_strategy_without_a_rate_counts_as_nothing_and_says_no_length(formulas, tmp_path) -> None:
    formulas.hopeless = "aggregated"
    path = tmp_path / "figures.json"
    settings = make_settings("aggregated", "disaggregated")
    (figures,), _, notes = compare([make_cell(tmp_path)], settings, path)
    assert figures.strategies["aggregated"].sliders is None
    assert figures.strategies["aggregated"].goodputs_rps == (0.0, 0.0)
    assert notes[0] == "one, aggregated: 0.00 requests/s (1 of 2)"
    assert [search.start_rps for search in formulas.searches] == pytest.approx([40.0, 40.0], rel=0.05)
    assert figures.duration_s == pytest.approx(18.75, rel=0.05)
    again, _, notes = compare([make_cell(tmp_path)], settings, path)
    assert again == [figures]
    assert not notes


def test_what_is_missing_is_measured_for_as_long_as_the_rest(formulas, tmp_path) -> None:
    path = tmp_path / "figures.json"
    cells = [make_cell(tmp_path), make_cell(tmp_path, "two")]
    before, _, _ = compare(cells[:1], make_settings("aggregated", "disaggregated"), path)
    num_before = len(formulas.searches)
    after, told, notes = compare(cells, make_settings("disaggregated", "sluice", "aggregated"), path)
    assert notes == [
        f"{what} requests/s ({number} of 4)"
        for number, what in enumerate(
            ("one, sluice: 5.50", "two, disaggregated: 7.50", "two, sluice: 9.50", "two, aggregated: 11.50"), 1
        )
    ]
    assert [share for share, what in told if what.endswith(": goodput")] == [0.125, 0.375, 0.625, 0.875]
    assert after[0].duration_s == before[0].duration_s
    assert {name: after[0].strategies[name] for name in before[0].strategies} == before[0].strategies
    assert [search.duration_s for search in formulas.searches[num_before : num_before + 2]] == [after[0].duration_s] * 2
    # Of the second cell, another strategy was the first.
    assert after[1].duration_s == pytest.approx(18.75, rel=0.05)
    content = json.loads(path.read_text())
    assert list(content) == ["seeds", "scale", "cells"]
    assert (content["seeds"], content["scale"]) == ([5, 6], 0.5)
    assert content["cells"]["two"]["title"] == "a small one"
    assert content["cells"]["two"]["strategies"]["sluice"]["goodputs_rps"] == [9.0, 10.0]
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".part"] == []


def test_seeds_run_in_processes_where_allowed(formulas, tmp_path, monkeypatch) -> None:
    started: list[int] = []

    class Pool:
        def map(self, search: Any, seeds: Any) -> Any:
            return map(search, seeds)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_error: object) -> None:
            started.append(-1)

    def start(num_processes: int) -> Pool:
        started.append(num_processes)
        return Pool()

    monkeypatch.setattr(strategy_comparison, "start_workers", start)
    for num_processes, expected in ((8, 2), (1, 1)):
        settings = ComparisonSettings(strategies=("sluice",), seeds=(5, 6), scale=0.5, num_processes=num_processes)
        formulas.searches.clear()
        (figures,), _, _ = compare([make_cell(tmp_path)], settings, tmp_path / f"{num_processes}.json")
        assert figures.strategies["sluice"].goodputs_rps == (1.0, 2.0)
        assert started == [expected, -1]
        started.clear()
        assert formulas.pools[-2][1] == num_processes


# Cells, and the file of figures.

TABLE = {
    "title": "a small one",
    "model": "llama-3-8b",
    "gpu": "a100-80g",
    "tensor_parallel": 2,
    "trace": "traces/mine.csv.gz",
    "replicas": 4,
    "ttft_ms": 2000,
    "tpot_ms": 80,
    "set": ["routers=2", "kv_scale=0.5"],
}


def write_cells(path: Path, **tables: dict[str, Any]) -> Path:
    lines = []
    for name, table in tables.items():
        lines += [f"[cells.{name}]", *[f"{key} = {json.dumps(value)}" for key, value in table.items()]]
    path.write_text("\n".join(lines))
    return path


def test_a_cell_is_what_its_table_says(tmp_path) -> None:
    path = write_cells(tmp_path / "cells.toml", one=TABLE, two=TABLE | {"replicas": 1}, three=TABLE)
    one, two, _ = load_cells(path, ())
    flags = PlanFlags(
        model="llama-3-8b",
        gpu="a100-80g",
        tensor_parallels=(2,),
        replicas=(4, 4),
        ttft_ms=2000,
        tpot_ms=80,
        changes=("routers=2", "kv_scale=0.5"),
    )
    assert one == StrategyCell(
        name="one", title="a small one", trace=tmp_path / "traces" / "mine.csv.gz", flags=flags, manifest=None
    )
    assert two == replace(one, name="two", flags=replace(flags, replicas=(1, 1)))
    assert [cell.name for cell in load_cells(path, ("three", "one"))] == ["one", "three"]
    assert one.describe() == {
        "trace": "mine.csv.gz",
        "manifest": None,
        "flags": {
            "model": "llama-3-8b",
            "gpu": "a100-80g",
            "tensor_parallels": (2,),
            "replicas": (4, 4),
            "ttft_ms": 2000,
            "tpot_ms": 80,
            "changes": ("routers=2", "kv_scale=0.5"),
        },
    }


@pytest.mark.parametrize(
    ("text", "only", "words"),
    [
        (None, (), "cannot be read: No such file or directory; run this in a checkout"),
        ("cells = ", (), "is no TOML file with a table of cells"),
        ("[others]", (), "is no TOML file with a table of cells: 'cells'"),
        ("[cells.one]\n[cells.two]", ("two", "four", "three"), "has no cell four, three; it has one, two"),
        ("[cells.one]", ("one",), "cell one: title (str), model (str), gpu (str), tensor_parallel (int), trace (str)"),
        ("[cells.one]\nset = 'a'\ntitle = ''", (), "tpot_ms (int), set (list) is missing or of another type"),
    ],
)
def test_a_file_without_usable_cells_is_named(tmp_path, text, only, words) -> None:
    path = tmp_path / "cells.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        load_cells(path, only)
    assert str(refused.value).startswith(str(path))


def test_a_cell_of_ones_own_is_named_after_its_requests(tmp_path) -> None:
    flags = PlanFlags(model="llama-3-8b", gpu="a100")
    cell = make_own_cell(tmp_path / "mine.csv.gz", flags, None)
    assert (cell.name, cell.title, cell.flags) == ("mine", "llama-3-8b, a100, mine.csv.gz", flags)
    manifest = parse_manifest(EXAMPLE.read_text())
    cell = make_own_cell(tmp_path / "mine.csv", flags, manifest)
    assert (cell.title, cell.manifest) == ("the manifest's engines, mine.csv", manifest)
    described = cell.describe()["manifest"]
    assert described["replicas"] == manifest.spec.replicas
    assert "podTemplate" not in json.dumps(described), "what has its default is left out"


def test_figures_of_another_comparison_or_cell_are_refused(formulas, tmp_path) -> None:
    path, cell, settings = tmp_path / "kept.json", make_cell(tmp_path), make_settings("aggregated")
    compare([cell], settings, path)
    for changed in (make_settings("sluice", seeds=(5,)), make_settings("sluice", scale=0.25)):
        with pytest.raises(ValueError, match=r"was measured with --seeds 5,6 --scale 0.5; say the same"):
            ComparisonFile(path, changed)
    other = replace(cell, flags=replace(cell.flags, tpot_ms=81))
    with pytest.raises(ValueError, match="figures of another cell one; name another file with --results"):
        ComparisonFile(path, settings).load(other)
    assert ComparisonFile(path, settings).load(replace(cell, name="two")).strategies == {}
    content = json.loads(path.read_text())
    for broken in ("", "[]", json.dumps({"seeds": [5, 6], "cells": {}}), json.dumps({**content, "cells": 3})):
        path.write_text(broken)
        with pytest.raises(ValueError, match="is no file of figures; name another one"):
            ComparisonFile(path, settings)
