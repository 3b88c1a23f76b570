"""Steps of drawn runs against a record that has a short hash of what came of each."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

HASH_DIGITS = 5


def shorten(lines: Sequence[str]) -> str:
    """Hashes what came of a step."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:HASH_DIGITS]


def shorten_all(steps: Iterable[Sequence[str]]) -> str:
    """Hashes the steps of a run, as records have them."""
    return " ".join(map(shorten, steps))


def check_steps(steps: Sequence[Sequence[str]], recorded: str, run: str = "") -> None:
    """Checks the steps of a run; says what the first one did that differs."""
    for number, (lines, digits) in enumerate(zip(steps, recorded.split(), strict=True)):
        what = f"{run}step {number} is the first that differs; it did:\n"
        assert shorten(lines) == digits, what + "\n".join(lines)


def check_record(path: Path, name: str, steps: Sequence[Sequence[str]]) -> None:
    """Checks the steps of a run by its name in a file, or writes them anew where ``SLUICE_WRITE_RECORDS`` is set."""
    if "SLUICE_WRITE_RECORDS" in os.environ:
        record = json.loads(path.read_text()) if path.exists() else {}
        record[name] = shorten_all(steps)
        path.write_text(json.dumps(record, indent=1) + "\n")
    check_steps(steps, json.loads(path.read_text())[name])
