"""What runs have found, in files that a killed run leaves usable: one line per mutant, the last line counts."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


# Of the mutants that are not listed as equivalent, as many must be noticed.
LEAST_SHARE = 0.9
# The table of parts.toml that is no part: modules that are not mutated, with the reason.
LEFT_OUT = "left-out"


class Outcome(StrEnum):
    """What became of a mutant."""

    NOTICED = "noticed"
    TIMED_OUT = "timed out"  # noticed too: tests that end quickly did not end
    UNNOTICED = "unnoticed"
    UNCOVERED = "no test runs it"
    SAME = "compiles to the same"


NOTICED = frozenset({Outcome.NOTICED, Outcome.TIMED_OUT})


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one mutant.

    Args:
        identity: The mutant's.
        outcome: What became of it.
        tests: A hash: of the test that noticed it, or else of the files of all tests that ran.
        killer: The test that noticed it.
    """

    identity: str
    outcome: Outcome
    tests: str
    killer: str = ""


class ResultFile:
    """The results of a part, kept from run to run.

    Args:
        path: The file; a missing one is empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: dict[str, Result] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                fields = json.loads(line)
                result = Result(**fields | {"outcome": Outcome(fields["outcome"])})
                self.results[result.identity] = result

    def add(self, result: Result) -> None:
        """Adds a result, at once."""
        self.results[result.identity] = result
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def keep(self, identities: set[str]) -> None:
        """Forgets all other mutants: their functions have changed."""
        self.results = {identity: result for identity, result in self.results.items() if identity in identities}
        lines = [json.dumps(asdict(result)) + "\n" for result in self.results.values()]
        new = self._path.with_suffix(".new")
        new.write_text("".join(lines))
        new.replace(self._path)


@dataclass(frozen=True, slots=True)
class Part:
    """Modules that decide, and the tests that shall notice.

    Args:
        name: Its name on the command line.
        modules: Patterns of their files, from the root; one that begins with ``!`` leaves files out.
        tests: Files or folders of tests, from the root.
        least_share: Of the mutants that are not listed, how many must be noticed, 0 to 1.
        deselect: Beginnings of tests' names that are left out, as pytest has it: they start processes, or take long.
    """

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    least_share: float = LEAST_SHARE
    deselect: tuple[str, ...] = ()

    def list_modules(self, root: Path) -> list[Path]:
        """Lists the modules' files.

        Raises:
            ValueError: A pattern stands for no file.
        """
        found: set[Path] = set()
        for pattern in self.modules:
            files = {path for path in root.glob(pattern.removeprefix("!")) if path.suffix == ".py"}
            if not files:
                raise ValueError(f"part {self.name}: {pattern} is no file below {root}")
            found = found - files if pattern.startswith("!") else found | files
        return sorted(found)


def read_parts(path: Path) -> dict[str, Part]:
    """Reads the table of parts."""
    return {
        name: Part(
            name,
            tuple(fields["modules"]),
            tuple(fields["tests"]),
            fields.get("least_share", LEAST_SHARE),
            tuple(fields.get("deselect", ())),
        )
        for name, fields in tomllib.loads(path.read_text()).items()
        if name != LEFT_OUT
    }


def read_left_out(path: Path) -> dict[str, str]:
    """Reads the product modules that belong to no part, with the reason."""
    return dict(tomllib.loads(path.read_text()).get(LEFT_OUT, {}))


def read_equivalent(path: Path, part: str) -> dict[tuple[str, str, str], str]:
    """Reads a part's mutants that nothing can notice: function, before, after; and the reason."""
    listed = tomllib.loads(path.read_text()).get("mutant", [])
    return {
        (each["function"], each["before"], each["after"]): each["reason"] for each in listed if each["part"] == part
    }
