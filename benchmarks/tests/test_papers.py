"""``make bench-paper``: a smoke cell, what a document says, and how it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from benchmarks.papers.experiment import Bench, Effort, System
from benchmarks.papers.findings import Band, Chapter, Finding, Plot, PlotKind, Results, Series, Unit, band, exactly
from benchmarks.papers.library import INTRODUCTION, PAPERS
from benchmarks.papers.plots import write_plot
from benchmarks.papers.report import list_cells, merge, read_results, write_document, write_results
from benchmarks.papers.run import paper
from benchmarks.papers.taichi import AGGREGATED_GRID, GOODPUT_CELLS, MOTIVATION, TAICHI_GRID, aggregate
from benchmarks.papers.taichi_motivation import observe_interference
from benchmarks.papers.trials import Laboratory
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
NAMES = {"arxiv_16k_recon": "arxiv-16k.csv", "arxiv_4k": "arxiv-16k.csv", "sharegpt_dist": "sharegpt.csv"}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' traces under the names of the papers'."""
    folder = tmp_path_factory.mktemp("traces")
    for name, example in NAMES.items():
        text = (ROOT / "examples" / "traces" / example).read_bytes()
        (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text))
    return folder


def reproduce(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(paper, ["taichi", "--jobs", "1", *arguments])
    return result.exit_code, result.stdout + (result.stderr if result.exit_code else "")


def make_finding(ours: float = 1.26, expected: Band | None = None) -> Finding:
    return Finding(
        setting="cell", quantity="goodput", unit=Unit.FACTOR, ours=ours, paper=exactly(1.27), expected=expected
    )


def make_chapter(name: str, ours: float = 1.26) -> Chapter:
    plot = Plot(
        name=f"plot-{name}",
        title="title",
        x_label="x",
        y_label="y",
        kind=PlotKind.LINES,
        series=(Series(name="one", x=(1.0, 2.0), y=(3.0, 4.0)),),
    )
    findings = (make_finding(ours, band(1.15, 1.32)),)
    return Chapter(name=name, title=f"Title {name}", setting="a setting", findings=findings, plots=(plot,))


def test_a_smoke_cell_gives_goodputs_and_their_ratios(traces: Path) -> None:
    code, output = reproduce("--traces", str(traces), "--only", "arxiv-slo1", "--quick", "--json")
    assert code == 0, output
    (chapter,) = Results.model_validate(json.loads(output)).chapters
    goodputs = {
        finding.setting.split()[0]: finding.ours
        for finding in chapter.findings
        if finding.quantity == "goodput" and finding.unit is Unit.REQUESTS_PER_S
    }
    assert set(goodputs) == {"aggregated", "disaggregated", "taichi"}
    ratio = next(finding for finding in chapter.findings if finding.setting == "taichi / aggregated")
    assert ratio.ours == pytest.approx(goodputs["taichi"] / goodputs["aggregated"])
    assert goodputs["taichi"] > goodputs["aggregated"] > 1.0


def test_tuning_takes_the_system_with_the_highest_goodput(traces: Path) -> None:
    with Laboratory(1, lambda _: None) as laboratory:
        bench = Bench(laboratory=laboratory, traces=traces, effort=Effort(seeds=(1,), scale=0.05))
        testbed = GOODPUT_CELLS[0].testbed
        starved, usual = aggregate(64), aggregate(512)
        assert bench.tune("test", testbed, [starved, usual]) == usual
        assert bench.tune("test", testbed, [usual, starved]) == usual


def test_a_trial_is_carried_out_once(traces: Path) -> None:
    with Laboratory(1, lambda _: None) as laboratory:
        bench = Bench(laboratory=laboratory, traces=traces, effort=Effort(seeds=(1, 2), scale=0.02))
        systems = [aggregate(512), aggregate(512)]
        first, second = bench.measure("test", GOODPUT_CELLS[0].testbed, systems, rate_rps=1.0)
        assert first == second
        assert laboratory.num_trials == 2


def test_interference_explains_tpot_of_aggregation(traces: Path) -> None:
    with Laboratory(1, lambda _: None) as laboratory:
        bench = Bench(laboratory=laboratory, traces=traces, effort=Effort(seeds=(1,), scale=0.05))
        (trial,) = bench.make_trials(MOTIVATION, aggregate(1024, num_engines=8), rate_rps=4.0, seeds=(1,))
    points = observe_interference(trial)
    assert len(points) > 10
    slow, fast = max(points), min(points)
    assert slow[0] > fast[0] >= 0.0
    assert slow[1] > fast[1]


def test_a_missing_trace_is_named_with_what_to_do(tmp_path: Path) -> None:
    code, output = reproduce("--traces", str(tmp_path), "--only", "arxiv-slo1")
    assert code == 1
    assert "arxiv_16k_recon.csv.gz" in output
    assert "--traces" in output


def test_an_unknown_experiment_is_refused_with_the_known_ones() -> None:
    code, output = reproduce("--only", "figure99")
    assert code == 2
    assert "figure99" in output
    assert "figure18" in output


def test_quick_figures_never_reach_a_document(tmp_path: Path) -> None:
    code, _ = reproduce("--quick", "--document", str(tmp_path / "results.md"))
    assert code == 2


@pytest.mark.parametrize(("ours", "verdict"), [(1.14, "**no**"), (1.15, "yes"), (1.32, "yes"), (1.33, "**no**")])
def test_a_row_says_whether_a_figure_lies_in_its_band(ours: float, verdict: str) -> None:
    row = list_cells(make_finding(ours, band(1.15, 1.32)))
    assert row[-1] == verdict
    assert row[3] == "1.27"
    assert row[5] == f"{ours / 1.27:.2f}"


def test_a_figure_without_a_band_has_no_verdict() -> None:
    assert list_cells(make_finding())[-1] == ""


def test_chapters_measured_again_replace_their_old_ones_in_order(tmp_path: Path) -> None:
    old = Results(paper="taichi", chapters=(make_chapter("b"), make_chapter("gone")))
    new = Results(paper="taichi", chapters=(make_chapter("c"), make_chapter("a", 9.0)))
    write_results(tmp_path / "taichi.json", old)
    merged = merge(read_results(tmp_path / "taichi.json", "taichi"), new, ["a", "b", "c"])
    assert [chapter.name for chapter in merged.chapters] == ["a", "b", "c"]
    assert merged.chapters[0].findings[0].ours == 9.0


def test_a_plot_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    plot = make_chapter("a").plots[0]
    first = write_plot(plot, tmp_path / "one").read_bytes()
    assert first == write_plot(plot, tmp_path / "two").read_bytes()
    assert b"<svg" in first
    assert len(first) < 40_000


def test_every_experiment_has_a_name_of_its_own_and_grids_hold_no_system_twice() -> None:
    names = [cell.name for cell in GOODPUT_CELLS]
    assert len(set(names)) == len(names)
    assert set(names) < set(PAPERS["taichi"])
    for grid in (AGGREGATED_GRID, TAICHI_GRID):
        assert len(set(grid)) == len(grid)
        assert all(isinstance(system, System) for system in grid)


def test_the_document_is_made_from_the_results_beside_it() -> None:
    results = read_results(ROOT / "docs" / "measurements" / "papers" / "taichi.json", "taichi")
    assert results.chapters
    assert (ROOT / "docs" / "measurements" / "papers.md").read_text() == write_document(INTRODUCTION, results, "papers")
    for chapter in results.chapters:
        for plot in chapter.plots:
            assert (ROOT / "docs" / "measurements" / "papers" / f"{plot.name}.svg").is_file()
