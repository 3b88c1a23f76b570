"""The page of limits and times says what the code has."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "limits.md").read_text()
ROWS = re.findall(r"^\| .+ \| (\S+)(?: (\S+))? \| `([\w.]+)\.(\w+)` \|$", PAGE, re.MULTILINE)
UNITS = {"": 1, "s": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}


def test_every_row_names_a_number_of_the_code() -> None:
    headings = 2 * PAGE.count("| what | value | where |")
    assert len(ROWS) == len(re.findall(r"^\|", PAGE, re.MULTILINE)) - headings


@pytest.mark.parametrize(("value", "unit", "module", "name"), ROWS, ids=lambda part: part)
def test_the_page_has_the_numbers_of_the_code(value: str, unit: str, module: str, name: str) -> None:
    assert float(value) * UNITS[unit] == getattr(importlib.import_module(module), name)
