"""Results as a document, as a table on the terminal, and as the file that both are made from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.papers.findings import Chapter, Finding, Results
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

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


def read_results(path: Path, paper: str) -> Results:
    """Reads a file of results; none is no results."""
    return Results.model_validate_json(path.read_text()) if path.is_file() else Results(paper=paper, chapters=())


def write_results(path: Path, results: Results) -> None:
    """Writes a file of results, a line per finding so that changes can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n")


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
    lines = [f"### {chapter.title}", "", f"{chapter.setting} (`--only {chapter.name}`)", ""]
    lines += [_write_row(_COLUMNS), _write_row(("---",) * len(_COLUMNS))]
    lines += [_write_row(list_cells(finding)) for finding in chapter.findings]
    lines += [""] + [f"- {note}" for note in chapter.notes] + [""] * bool(chapter.notes)
    for plot in chapter.plots:
        lines += [f"![{plot.title}]({pictures}/{plot.name}.svg)", ""]
    return lines


def _write_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_document(introduction: str, results: Results, pictures: str) -> str:
    """Writes the document: what was done, the count of bands, every chapter."""
    inside, total = count_verdicts(results.chapters)
    lines = [introduction.strip(), "", f"{inside} of {total} figures that have a band lie in it.", ""]
    for chapter in results.chapters:
        lines += write_chapter(chapter, pictures)
    return "\n".join(lines).rstrip() + "\n"
