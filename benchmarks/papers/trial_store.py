"""Results of trials in a file, so that a run that was stopped goes on there; each state of the code has its own."""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "papers"
# What a result follows from, besides the trial and its trace.
_SOURCES = ("core/sluice_core/**/*", "cli/sluice_cli/simulation/*.py", "benchmarks/papers/*.py")


class TrialStore:
    """The results of one state of the code; those of others are deleted.

    Args:
        folder: Of the file.
        state: Names the state of the code.
    """

    def __init__(self, folder: Path, state: str) -> None:
        self._path = folder / f"{state}.pickle"

    def load(self) -> Iterator[tuple[object, object]]:
        """Loads the key and the result of each trial; one whose writing was cut short is none."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    return

    def add(self, key: object, result: object) -> None:
        """Adds the result of a trial to the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for other in self._path.parent.glob("*.pickle"):
            if other != self._path:
                other.unlink()
        with self._path.open("ab") as file:
            pickle.dump((key, result), file)


def describe_state(root: Path = ROOT) -> str:
    """Describes the state of the code by a hash."""
    digest = hashlib.sha256(sys.version.encode())
    for pattern in _SOURCES:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
