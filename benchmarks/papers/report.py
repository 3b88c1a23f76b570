"""Results as a document, as a table on the terminal, and as the file that both are made from."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from benchmarks.papers.findings import Chapter, Finding, Results
from benchmarks.papers.paper_file import PAPERS, load_paper
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

INTRODUCTION = """
# Papers reproduced in the simulator

    make bench-paper

makes this page and its plots anew from the traces in `benchmarks/traces`.
`python -m benchmarks.papers.run taichi --only NAME` shows one experiment. Every run is a function of its seed: figures
repeat exactly. A run that was stopped goes on where it was. [DynaServe](dynaserve.md) has a page of its own.

| column | meaning |
| --- | --- |
| paper | what the paper states in its text; empty: nothing |
| ours | what the simulator gives: the mean over seeds ± their standard deviation |
| ours / paper | the ratio of the two; ratios between systems are paired by seed |
| band | where an independent simulation of the same published data came out |

Bands that say *about* are 5 to 10 % around that, and 30 % in Figure 17. *Overloaded* means that P90 TTFT grows by 1.3
or more with twice the run.

Nothing but kernel measurements is fitted ([latency profiles](latency-profiles.md)). Semantics are the papers'. TaiChi's
are `no_grant=wait`, `ttft_end=decode_join`, `early_rejection=random`, `min_tokens_between_moves=0` and
`prefill_batch_tokens=0` ([simulator](../reference/simulator.md#parameters)).
"""
_COLUMNS = ("setting", "quantity", "unit", "paper", "ours", "ours / paper", "band", "in band")


def merge(old: Results, new: Results, order: Sequence[str]) -> Results:
    """Replaces the chapters of experiments that were carried out again.

    Args:
        old: Earlier results.
        new: Of some experiments.
        order: Names of all experiments; chapters that no longer are experiments are dropped.
    """
    chapters = {chapter.name: chapter for chapter in (*old.chapters, *new.chapters)}
    return Results(paper=new.paper, chapters=tuple(chapters[name] for name in order if name in chapters))


def read_results(folder: Path, paper: str) -> Results:
    """Reads the results of a paper; none where there is no file."""
    path = folder / f"{paper}.json"
    return Results.model_validate_json(path.read_text()) if path.is_file() else Results(paper=paper, chapters=())


def write_results(folder: Path, results: Results) -> None:
    """Writes the results of a paper, a line per finding so that changes can be read."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _format_json(results.model_dump(mode="json", exclude_defaults=True))
    (folder / f"{results.paper}.json").write_text(text + "\n")


def _format_json(value: Any, depth: int = 4) -> str:
    """Formats JSON that breaks lines down to a depth; each finding stands four levels down, so on one line."""
    if not depth or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(_format_json(item, depth - 1) for item in value) + "\n]"
    return "{" + ",\n".join(f"{json.dumps(key)}: {_format_json(item, depth - 1)}" for key, item in value.items()) + "}"


def list_cells(finding: Finding) -> tuple[str, ...]:
    """Writes a finding as the cells of a row."""
    verdict = {True: "yes", False: "**no**", None: ""}[finding.is_expected]
    return (
        finding.setting,
        finding.quantity,
        finding.unit,
        "" if finding.paper is None else str(finding.paper),
        finding.format_ours(),
        "" if finding.ratio is None else f"{finding.ratio:.2f}",
        "" if finding.expected is None else str(finding.expected),
        verdict,
    )


def make_table(chapter: Chapter) -> Table:
    """Shows a chapter on a terminal."""
    table = Table(*_COLUMNS, title=chapter.title, caption=chapter.setting, title_justify="left", caption_justify="left")
    for finding in chapter.findings:
        table.add_row(*(cell.replace("**", "") for cell in list_cells(finding)))
    return table


def count_verdicts(chapters: Iterable[Chapter]) -> tuple[int, int]:
    """Counts the findings that have a band: inside and all."""
    verdicts = [finding.is_expected for chapter in chapters for finding in chapter.findings]
    return verdicts.count(True), len(verdicts) - verdicts.count(None)


def write_chapter(chapter: Chapter, pictures: str) -> list[str]:
    """Writes a chapter as Markdown.

    Args:
        chapter: The chapter.
        pictures: Folder of the pictures, as seen from the document.
    """
    lines = [f"### {chapter.title}", "", *_wrap(f"{chapter.setting} (`--only {chapter.name}`)"), ""]
    lines += [_write_row(_COLUMNS), _write_row(("---",) * len(_COLUMNS))]
    lines += [_write_row(list_cells(finding)) for finding in chapter.findings]
    lines += ["", *(line for note in chapter.notes for line in _wrap(f"- {note}")), *[""] * bool(chapter.notes)]
    for plot in chapter.plots:
        lines += [f"![{plot.title}]({pictures}/{plot.name}.svg)", ""]
    return lines


def _wrap(text: str) -> list[str]:
    """Breaks a paragraph or an item of a list into lines."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _write_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_document(folder: Path) -> str:
    """Writes the document of all papers that have results.

    Args:
        folder: Of the results and the pictures; it has the name of the document, without its ending.
    """
    lines = [INTRODUCTION.strip(), ""]
    for paper in PAPERS:
        results = read_results(folder, paper)
        if not results.chapters:
            continue
        inside, total = count_verdicts(results.chapters)
        lines += [load_paper(paper).introduction.strip(), ""]
        lines += [f"{inside} of {total} figures that have a band lie in it.", ""]
        for chapter in results.chapters:
            lines += write_chapter(chapter, folder.name)
    return "\n".join(lines).rstrip() + "\n"
