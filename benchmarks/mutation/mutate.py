"""Changes what the programs decide, one small change at a time, and shows which changes no test notices.

    .venv/bin/python -m benchmarks.mutation.mutate [PART ...]      # parts.toml lists the parts; all without

A mutant that no test notices is a hole in the tests, or nothing can notice it: then ``equivalent.toml`` lists it with
the reason. The exit status is 1 if a part has too many holes (``least_share`` in parts.toml), or if one is listed that
no longer exists or that a test notices. A run that is killed goes on where it was. A later run tests what changed:
mutants of functions with another text, noticed ones whose test has another text, and unnoticed ones if a file of tests
that run them has changed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutation.mutants import Mutant, MutatedModule
from benchmarks.mutation.part_run import draw_sample, make_parser
from benchmarks.mutation.results import NOTICED, Outcome, Part, ResultFile, read_equivalent, read_parts

ROOT = Path(__file__).parents[2]
HEADER = ("part", "mutants", "noticed", "listed", "unnoticed", "not run", "share", "needed")


@dataclass(frozen=True, slots=True)
class PartReport:
    """What is known of a part.

    Args:
        part: The part.
        num_mutants: Those whose code differs.
        num_noticed: By a test that failed or did not end.
        num_listed: As equivalent, and unnoticed.
        holes: Those that nothing noticed and nobody listed.
        num_open: Not tested yet.
        stale: Keys that are listed, and noticed or gone.
    """

    part: Part
    num_mutants: int
    num_noticed: int
    num_listed: int
    holes: list[tuple[Mutant, Outcome]]
    num_open: int
    stale: list[tuple[str, str, str]]

    @property
    def share(self) -> float:
        """Of the mutants that are not listed, how many are noticed."""
        return self.num_noticed / max(self.num_noticed + len(self.holes), 1)

    @property
    def is_good(self) -> bool:
        """Whether enough is noticed, and the list is true."""
        return self.share >= self.part.least_share and not self.stale

    @property
    def row(self) -> tuple[str, ...]:
        """What the table says."""
        counts = (self.num_mutants, self.num_noticed, self.num_listed, len(self.holes), self.num_open)
        return self.part.name, *map(str, counts), f"{self.share:.1%}", f"{self.part.least_share:.0%}"


def report(part: Part, options: argparse.Namespace) -> PartReport:
    """Reads what is known of a part's mutants as they are now."""
    equivalent = read_equivalent(options.equivalent, part.name)
    results = ResultFile(options.folder / part.name / "results.jsonl").results
    root = options.root.resolve()
    counts: Counter[str] = Counter()
    holes: list[tuple[Mutant, Outcome]] = []
    found: set[tuple[str, str, str]] = set()
    paths = part.list_modules(root)
    mutants = [mutant for path in paths for mutant in MutatedModule(root, str(path.relative_to(root))).mutants]
    drawn = draw_sample(mutants, options)
    for mutant in mutants:
        result = results.get(mutant.identity)
        if mutant.identity not in drawn or result is None:
            counts["open"] += mutant.identity in drawn
            found.add(mutant.key)
        elif result.outcome in NOTICED:
            counts["noticed"] += 1
        elif result.outcome is not Outcome.SAME:
            found.add(mutant.key)
            if mutant.key in equivalent:
                counts["listed"] += 1
            else:
                holes.append((mutant, result.outcome))
    num_mutants = counts["open"] + counts["noticed"] + counts["listed"] + len(holes)
    stale = [key for key in equivalent if key not in found]
    return PartReport(part, num_mutants, counts["noticed"], counts["listed"], holes, counts["open"], stale)


def print_report(each: PartReport) -> None:
    """Prints the holes of a part, and what is wrong with its list."""
    for mutant, outcome in each.holes:
        print(f"\n{mutant.path}:{mutant.lines[0]} {mutant.function}: {outcome}")
        print(f"  - {mutant.before}\n  + {mutant.after}")
    for function, before, after in each.stale:
        print(f"\nlisted as equivalent, and noticed or gone: {each.part.name} {function}\n  - {before}\n  + {after}")


def print_table(reports: list[PartReport]) -> None:
    """Prints one line per part."""
    rows = [HEADER, *(each.row for each in reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    print()
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[make_parser()]
    )
    parser.add_argument("chosen", nargs="*", metavar="PART", help="of parts.toml; all without")
    parser.add_argument("--report", action="store_true", help="only say what earlier runs found")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    parts = read_parts(options.parts)
    if unknown := set(options.chosen) - set(parts):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known are {', '.join(parts)}")
    chosen = [part for name, part in parts.items() if not options.chosen or name in options.chosen]
    passed_on = [argument for argument in arguments if argument not in parts]
    is_broken = False
    for part in chosen:
        if not options.report:
            command = [sys.executable, "-m", "benchmarks.mutation.part_run", *passed_on, part.name]
            is_broken |= subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    reports = [report(part, options) for part in chosen]
    for each in reports:
        print_report(each)
    print_table(reports)
    is_chosen = any(each is not None for each in (options.module, options.function, options.since))
    is_open = not is_chosen and any(each.num_open for each in reports)
    return 0 if all(each.is_good for each in reports) and not (is_broken or is_open) else 1


if __name__ == "__main__":
    sys.exit(main())
