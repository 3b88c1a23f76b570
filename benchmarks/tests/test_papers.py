"""``make bench-paper``: a smoke cell, what a document says, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from benchmarks.papers.experiment_runner import ExperimentRunner, PaperEffort
from benchmarks.papers.findings import Band, Chapter, Finding, Plot, PlotKind, Results, Series, Unit
from benchmarks.papers.observations import observe_interference
from benchmarks.papers.paper_file import PAPERS, ExperimentTable, GoodputCell, System, load_paper
from benchmarks.papers.plots import write_plot
from benchmarks.papers.report import list_cells, merge, read_results, write_document, write_results
from benchmarks.papers.run import list_experiments, main
from benchmarks.papers.trial_store import TrialStore, describe_state
from benchmarks.papers.trials import PaperTrialPool

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


def reproduce(*arguments: str) -> int:
    return main(["taichi", "--jobs", "1", *arguments])


def make_runner(pool: PaperTrialPool, traces: Path, *, seeds: tuple[int, ...], scale: float) -> ExperimentRunner:
    return ExperimentRunner(pool=pool, traces=traces, effort=PaperEffort(seeds=seeds, scale=scale))


def aggregate(chunk_size: int, num_engines: int = 4) -> System:
    return System(strategy="aggregated", engines=f"{num_engines}x{chunk_size}", placement="round_robin")


def make_finding(ours: float = 1.26, expected: Band | None = None) -> Finding:
    return Finding(
        setting="cell",
        quantity="goodput",
        unit=Unit.FACTOR,
        ours=ours,
        paper=Band(low=1.27, high=1.27),
        expected=expected,
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
    findings = (make_finding(ours, Band(low=1.15, high=1.32)),)
    return Chapter(name=name, title=f"Title {name}", setting="a setting", findings=findings, plots=(plot,))


def test_a_smoke_cell_gives_goodputs_and_their_ratios(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("--traces", str(traces), "--only", "arxiv-slo1", "--quick", "--json") == 0
    (chapter,) = Results.model_validate(json.loads(capsys.readouterr().out)).chapters
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
    with PaperTrialPool(1, lambda _: None) as pool:
        runner = make_runner(pool, traces, seeds=(1,), scale=0.05)
        cell = load_paper("taichi").cells[0]
        starved, usual = aggregate(64), aggregate(512)
        assert runner.tune("test", cell, [starved, usual]) == usual
        assert runner.tune("test", cell, [usual, starved]) == usual


def test_a_trial_runs_once(traces: Path) -> None:
    with PaperTrialPool(1, lambda _: None) as pool:
        runner = make_runner(pool, traces, seeds=(1, 2), scale=0.02)
        systems = [aggregate(512), aggregate(512)]
        first, second = runner.measure("test", load_paper("taichi").cells[0], systems, rate_rps=1.0)
        assert first == second
        assert pool.num_trials == 2


def test_interference_explains_tpot_of_aggregation(traces: Path) -> None:
    with PaperTrialPool(1, lambda _: None) as pool:
        runner = make_runner(pool, traces, seeds=(1,), scale=0.05)
        testbed = load_paper("taichi").find_testbed("motivation")
        observation = observe_interference(runner.make_trial(testbed, aggregate(1024, num_engines=8), 1, 4.0))
    points = observation.points
    assert len(points) > 10
    slow, fast = max(points), min(points)
    assert slow[0] > fast[0] >= 0.0
    assert slow[1] > fast[1]


def test_a_missing_trace_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("--traces", str(tmp_path), "--only", "arxiv-slo1") == 1
    output = capsys.readouterr().err
    assert "arxiv_16k_recon.csv.gz" in output
    assert "--traces" in output


def test_an_unknown_experiment_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        reproduce("--only", "figure99")
    output = capsys.readouterr().err
    assert "figure99" in output
    assert "figure18" in output


def test_quick_figures_never_reach_a_document(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        reproduce("--quick", "--document", str(tmp_path / "papers.md"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ours", "verdict"), [(1.14, "**no**"), (1.15, "yes"), (1.32, "yes"), (1.33, "**no**")])
def test_a_row_says_whether_a_figure_lies_in_its_band(ours: float, verdict: str) -> None:
    row = list_cells(make_finding(ours, Band(low=1.15, high=1.32)))
    assert row[-1] == verdict
    assert row[3] == "1.27"
    assert row[5] == f"{ours / 1.27:.2f}"


def test_a_figure_without_a_band_has_no_verdict() -> None:
    assert list_cells(make_finding())[-1] == ""


def test_chapters_measured_again_replace_their_old_ones_in_order(tmp_path: Path) -> None:
    old = Results(paper="taichi", chapters=(make_chapter("b"), make_chapter("gone")))
    new = Results(paper="taichi", chapters=(make_chapter("c"), make_chapter("a", 9.0)))
    write_results(tmp_path, old)
    merged = merge(read_results(tmp_path, "taichi"), new, ["a", "b", "c"])
    assert [chapter.name for chapter in merged.chapters] == ["a", "b", "c"]
    assert merged.chapters[0].findings[0].ours == 9.0


def test_a_plot_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    plot = make_chapter("a").plots[0]
    first = write_plot(plot, tmp_path / "one").read_bytes()
    assert first == write_plot(plot, tmp_path / "two").read_bytes()
    assert b"<svg" in first
    assert len(first) < 40_000


@pytest.mark.parametrize("name", PAPERS)
def test_the_tables_of_a_paper_name_nothing_twice_and_nothing_unknown(name: str) -> None:
    paper = load_paper(name)
    tables: list[GoodputCell | ExperimentTable] = [*paper.cells, *paper.experiments]
    assert len({table.name for table in tables}) == len(tables)
    known = {name for table in tables for name in (table.name, f"{table.name}-tuned")}
    assert set(paper.order) <= known
    assert list(list_experiments(name)) == list(paper.order)
    for table in paper.experiments:
        rows = [row.name for row in paper.list_rows(table)]
        assert len(set(rows)) == len(rows)
        compared = {name for ratio in table.ratios for name in (ratio.of, ratio.over)}
        drawn = {name for plot in table.plots for series in plot.series for name in series.rows}
        assert compared | drawn <= set(rows)
    for strategy in paper.grids:
        grid = paper.list_grid(strategy)
        assert len(set(grid)) == len(grid)
        assert {system.strategy for system in grid} == {strategy}


def test_bands_and_systems_are_read_from_their_short_form() -> None:
    assert Band.model_validate(1.27) == Band(low=1.27, high=1.27)
    assert Band.model_validate([1.3, float("inf")]) == Band(low=1.3)
    assert Band.model_validate([float("-inf"), 1.0]) == Band(high=1.0)
    system = System.model_validate("taichi 2x1024,2x256 round_robin no_flow")
    assert system == System(strategy="taichi", engines="2x1024,2x256", placement="round_robin", flow=False)
    assert str(System.model_validate("taichi 2x1024,2x256")) == "2x1024,2x256"


def test_a_run_that_was_stopped_goes_on_where_it_was(traces: Path, tmp_path: Path) -> None:
    """The last result was cut short, so it is none; another state of the code knows nothing."""
    cell = GoodputCell.model_validate(
        load_paper("taichi").find_testbed("chat-slo1").model_dump() | {"systems": (aggregate(512),)}
    )

    def measure(state: str, *rates: float) -> tuple[int, list[float]]:
        with PaperTrialPool(1, lambda _: None, TrialStore(tmp_path, state)) as pool:
            runner = make_runner(pool, traces, seeds=(1,), scale=0.02)
            found = [runner.measure("one", cell, cell.systems, rate)[0][0].run.attainment for rate in rates]
            return pool.num_trials, found

    num_trials, first = measure("one", 4.0, 8.0)
    assert num_trials == 2
    assert measure("one", 4.0, 8.0) == (0, first)
    path = tmp_path / "one.pickle"
    path.write_bytes(path.read_bytes()[:-20])
    assert measure("one", 4.0, 8.0) == (1, first)
    assert measure("two", 4.0) == (1, first[:1])
    assert [each.name for each in tmp_path.iterdir()] == ["two.pickle"]


def test_another_state_of_the_code_has_another_name(tmp_path: Path) -> None:
    source = tmp_path / "core" / "sluice_core" / "one.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1")
    before = describe_state(tmp_path)
    assert describe_state(tmp_path) == before
    source.write_text("a = 2")
    assert describe_state(tmp_path) != before


def test_the_document_is_made_from_the_results_beside_it() -> None:
    folder = ROOT / "docs" / "measurements" / "papers"
    assert folder.with_suffix(".md").read_text() == write_document(folder)
    for name in PAPERS:
        results = read_results(folder, name)
        assert results.chapters
        for chapter in results.chapters:
            for plot in chapter.plots:
                assert (folder / f"{plot.name}.svg").is_file()


def test_the_page_of_traces_lists_every_file() -> None:
    folder = ROOT / "benchmarks" / "traces"
    page = (folder / "README.md").read_text()
    assert {path.name for path in folder.glob("*.gz")} == set(re.findall(r"^\| `([^`]+\.gz)` \|", page, re.MULTILINE))
