"""The table of strategies, and what pages say of its rows: a row that is added is missed where it is not described."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from test_pages import ROOT, read_sections

from sluice_core.strategies import DEFAULT_STRATEGY, PARAMETERS, STRATEGIES
from sluice_core.strategies.placements import PLACEMENTS

if TYPE_CHECKING:
    from sluice_core.strategies import Strategy

DOCS = ROOT / "docs"
ROWS = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
# Aggregation is nobody's paper, and Sluice has none.
WITHOUT_PAPER = {"aggregated", "sluice"}


def read_page(name: str) -> str:
    return (DOCS / name).read_text()


@ROWS
def test_every_row_has_its_section_and_its_paper(strategy: Strategy) -> None:
    """A paper is named with title and number, and so it is in the file of the strategy."""
    section = read_sections(read_page("internals/strategies.md"), "##")[strategy.title]
    module = (ROOT / "core" / "sluice_core" / "strategies" / f"{strategy.name}.py").read_text()
    numbers = [set(re.findall(r"arXiv:(\d{4}\.\d{5})", text)) for text in (section, module.split('"""')[1])]
    assert numbers[0] == numbers[1]
    assert bool(numbers[0]) is (strategy.name not in WITHOUT_PAPER)


@ROWS
def test_the_guide_says_what_speaks_against_every_row(strategy: Strategy) -> None:
    text = read_sections(read_page("guides/strategies.md"), "##")["What speaks against each"]
    assert re.findall(rf"^\| {strategy.title} \| .+ \|$", text, re.MULTILINE) != []


def test_the_guide_knows_no_other_strategies() -> None:
    text = read_sections(read_page("guides/strategies.md"), "##")["What speaks against each"]
    named = re.findall(r"^\| (\w+) \|", text, re.MULTILINE)[1:]
    assert sorted(named) == sorted(strategy.title for strategy in STRATEGIES.values())


def test_the_simulator_s_reference_lists_rows_placements_and_parameters() -> None:
    page = read_page("reference/simulator.md")
    (listed,) = re.findall(r"^\| strategies \| (.+) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", listed)) == set(STRATEGIES)
    assert f"`{DEFAULT_STRATEGY.name}` (default)" in listed
    (placements,) = re.findall(r"^\| `placement` \| by strategy \| (.+) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", placements)) - set(STRATEGIES) == set(PLACEMENTS)
    parameters = read_sections(page, "##")["Parameters"]
    cells = [row.split("|")[1] for row in parameters.splitlines() if row.startswith("| `")]
    explained = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert {row.field for row in PARAMETERS} <= explained


def test_a_parameter_that_is_a_number_has_a_unit_and_bounds() -> None:
    numbers = [row for row in PARAMETERS if not row.choices]
    assert [row.name for row in numbers if not row.unit or row.low >= row.high] == []
