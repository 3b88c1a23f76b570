"""Reproduces the figures of papers in the simulator, beside what they state and the band of a reproduction.

python -m benchmarks.papers.run [PAPER] [--only NAME] [--quick] [--document docs/measurements/papers.md]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.papers.experiment_runner import FULL, QUICK, ExperimentRunner, MissingTraceError
from benchmarks.papers.experiments import measure_experiment
from benchmarks.papers.findings import Results
from benchmarks.papers.goodput import measure_cell, measure_tuned_cell
from benchmarks.papers.paper_file import PAPERS, load_paper
from benchmarks.papers.plots import write_plot
from benchmarks.papers.report import (
    count_verdicts,
    make_table,
    merge,
    read_results,
    write_document,
    write_results,
)
from benchmarks.papers.trial_store import FOLDER, TrialStore, describe_state
from benchmarks.papers.trials import PaperTrialPool
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.papers.findings import Chapter

TRACES = Path(__file__).parents[1] / "traces"
_TUNED = "-tuned"


def list_experiments(name: str) -> Mapping[str, Callable[[ExperimentRunner], Chapter]]:
    """Lists the experiments of a paper, by name, in the order of its document."""
    paper = load_paper(name)
    known: dict[str, Callable[[ExperimentRunner], Chapter]] = {
        table.name: partial(measure_experiment, paper, table) for table in paper.experiments
    }
    for cell in paper.cells:
        known[cell.name] = partial(measure_cell, name, cell)
        known[cell.name + _TUNED] = partial(measure_tuned_cell, paper, cell)
    return {experiment: known[experiment] for experiment in paper.order}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", nargs="?", choices=PAPERS, default=PAPERS[0], help="default %(default)s")
    parser.add_argument("--only", action="append", metavar="NAME", help="an experiment; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the experiments")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="short runs of one seed: shows that it works")
    parser.add_argument("--document", type=Path, help="write results, plots and this document; other chapters stay")
    parser.add_argument("--anew", action="store_true", help="measure again what a run that was stopped has found")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    known = list_experiments(options.paper)
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"--only: {', '.join(unknown)} is unknown; known are {', '.join(known)}")
    if options.quick and options.document is not None:
        parser.error("--quick measures nothing that a document should say")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_options(arguments)
    experiments = list_experiments(options.paper)
    if options.list:
        print("\n".join(experiments))
        return 0
    chapters = []
    try:
        store = None if options.anew or options.quick else TrialStore(FOLDER, describe_state())
        with PaperTrialPool(options.jobs, partial(print, file=sys.stderr, flush=True), store) as pool:
            runner = ExperimentRunner(pool=pool, traces=options.traces, effort=QUICK if options.quick else FULL)
            for name in options.only or experiments:
                chapters.append(experiments[name](runner))
                if not options.json:
                    Console().print(make_table(chapters[-1]))
    except MissingTraceError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    results = Results(paper=options.paper, chapters=tuple(chapters))
    if options.document is not None:
        write_all(options.document, results, list(experiments))
    if options.json:
        print(json.dumps(results.model_dump(mode="json"), indent=2))
    else:
        print("{} of {} figures that have a band lie in it".format(*count_verdicts(chapters)))
    return 0


def write_all(document: Path, results: Results, order: list[str]) -> None:
    """Writes the file of results, the document of all papers and the plots."""
    folder = document.parent / document.stem
    write_results(folder, merge(read_results(folder, results.paper), results, order))
    document.write_text(write_document(folder))
    for chapter in results.chapters:
        for plot in chapter.plots:
            write_plot(plot, folder)


if __name__ == "__main__":
    sys.exit(main())
