"""Reproduces the figures of papers in the simulator: ``make bench-paper``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from benchmarks.papers.experiment import FULL, QUICK, Bench, MissingTraceError
from benchmarks.papers.findings import Results
from benchmarks.papers.library import INTRODUCTION, PAPERS
from benchmarks.papers.plots import NoMatplotlibError, write_plot
from benchmarks.papers.report import (
    count_verdicts,
    make_table,
    merge,
    read_results,
    write_document,
    write_results,
)
from benchmarks.papers.trials import Laboratory

from sluice_cli.output.cluster_display import make_console

_TRACES = Path(__file__).parents[1] / "traces"
_PICTURES = "papers"


@click.command()
@click.argument("name", metavar="PAPER", type=click.Choice(list(PAPERS)))
@click.option("--only", multiple=True, metavar="NAME", help="An experiment; may be repeated.  [default: all]")
@click.option("--list", "is_list", is_flag=True, help="List the experiments.")
@click.option(
    "--traces",
    default=_TRACES,
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the traces.",
)
@click.option(
    "--jobs", default=os.cpu_count() or 1, type=click.IntRange(min=1), help="Processes.  [default: all cores]"
)
@click.option("--quick", is_flag=True, help="Short runs of one seed: shows that it works; figures mean nothing.")
@click.option(
    "--document",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write results, plots and this document; experiments that --only leaves out stay as they are.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def paper(
    name: str,
    *,
    only: tuple[str, ...],
    is_list: bool,
    traces: Path,
    jobs: int,
    quick: bool,
    document: Path | None,
    as_json: bool,
) -> None:
    """Reproduces the figures of PAPER in the simulator, beside what it states and the band of a reproduction."""
    experiments = PAPERS[name]
    if is_list:
        click.echo("\n".join(experiments))
        return
    unknown = [wanted for wanted in only if wanted not in experiments]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)} is unknown; known are {', '.join(experiments)}")
    if quick and document is not None:
        raise click.UsageError("--quick measures nothing that a document should say")
    chapters = []
    console = make_console()
    try:
        with Laboratory(jobs, lambda line: click.echo(line, err=True)) as laboratory:
            given = Bench(laboratory=laboratory, traces=traces, effort=QUICK if quick else FULL)
            for wanted in only or experiments:
                chapters.append(experiments[wanted](given))
                if not as_json:
                    console.print(make_table(chapters[-1]))
        results = Results(paper=name, chapters=tuple(chapters))
        if document is not None:
            _write(document, results, list(experiments))
    except (MissingTraceError, NoMatplotlibError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(results.model_dump(mode="json"), indent=2))
    else:
        inside, total = count_verdicts(chapters)
        click.echo(f"{inside} of {total} figures that have a band lie in it")


def _write(document: Path, results: Results, order: list[str]) -> None:
    """Writes the file of results, the document and the plots."""
    folder = document.parent / _PICTURES
    file = folder / f"{results.paper}.json"
    merged = merge(read_results(file, results.paper), results, order)
    write_results(file, merged)
    document.write_text(write_document(INTRODUCTION, merged, _PICTURES))
    for chapter in results.chapters:
        for plot in chapter.plots:
            write_plot(plot, folder)


if __name__ == "__main__":
    paper()
