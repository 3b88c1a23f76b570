"""``make mutation`` on a toy package: what no test notices is reported and fails, what a test notices is not."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.mutation.mutants import MutatedModule
from benchmarks.mutation.mutate import main
from benchmarks.mutation.part_run import draw_sample
from benchmarks.mutation.results import read_equivalent, read_left_out, read_parts

ROOT = Path(__file__).parents[2]
REAL_PARTS = ROOT / "benchmarks/mutation/parts.toml"
EQUIVALENT = ROOT / "benchmarks/mutation/equivalent.toml"
PYPROJECT = """
[tool.pytest.ini_options]
pythonpath = ["."]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
"""
PARTS = """
[toy]
modules = ["toy/*.py"]
tests = ["tests"]
"""
# One mutant per function, of every kind of function that the product has.
TOY = '''
"""A module."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    free_tokens: int

    @property
    def is_full(self) -> bool:
        """Whether nothing fits."""
        return self.free_tokens == 0

    @staticmethod
    async def wait(fits: bool) -> str:
        if not fits:
            logging.getLogger(__name__).info("refused: %s", fits + 1)
        match fits:
            case False:
                raise ValueError(f"does not fit: {fits + 1}")
        return "fits"


@contextlib.contextmanager
def hold(held: list[int]):
    held.append(7)
    yield held
    held.clear()


async def count(limit):
    number = 0
    while number < limit:
        yield number
        number += 1
'''
TESTS = """
import pytest

from toy.room import Room, count, hold


@pytest.mark.parametrize(("free_tokens", "is_full"), [(0, True), (1, False)])
def test_room(free_tokens, is_full):
    assert Room(free_tokens).is_full is is_full


async def test_wait():
    assert await Room.wait(True) == "fits"
    with pytest.raises(ValueError, match="does not fit"):
        await Room.wait(False)


def test_hold():
    held = []
    with hold(held) as inner:
        assert inner is held == [7]
    assert held == []


async def test_count():
    assert [number async for number in count(3)] == [0, 1, 2]
"""
# The quick cases look at nothing, and take longer than the budget all in all.
MANY_CASES = """
import time

import pytest

from toy.room import Room


@pytest.mark.parametrize("case", range(300))
def test_quick(case):
    Room(case).is_full


def test_slow():
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    assert (Room(0).is_full, Room(1).is_full) == (True, False)
"""
FUNCTIONS = ("Room.is_full", "Room.wait", "hold", "count")
WITHOUT_CLEAR = TESTS.replace("    assert held == []\n", "")
LISTED = """
[[mutant]]
part = "toy"
function = "room.hold"
before = "held.clear()"
after = "pass"
reason = "Nobody asks."
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for path, text in (
        ("pyproject.toml", PYPROJECT),
        ("parts.toml", PARTS),
        ("equivalent.toml", ""),
        ("toy/__init__.py", ""),
        ("toy/room.py", TOY),
        ("tests/test_room.py", TESTS),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def mutate(toy: Path, *arguments: str) -> int:
    paths = {"parts": "parts.toml", "equivalent": "equivalent.toml", "root": ".", "folder": "found"}
    return main([*arguments, *(f"--{name}={toy / path}" for name, path in paths.items())])


def read_row(text: str) -> dict[str, str]:
    """Reads the line of the table."""
    row = text.splitlines()[-1].split()
    return dict(zip(("part", "mutants", "noticed", "listed", "unnoticed", "open", "share"), row, strict=False))


def test_what_tests_notice_is_no_hole_and_only_what_changed_is_tested_again(
    toy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert mutate(toy) == 0
    row = read_row(capfd.readouterr().out)
    assert row["noticed"] == row["mutants"]
    assert row["open"] == "0"
    mutants = MutatedModule(toy, "toy/room.py").mutants
    assert {mutant.function for mutant in mutants} == {f"room.{name}" for name in FUNCTIONS}
    # `number -= 1`: a loop that does not end is noticed too.
    assert '"timed out"' in (toy / "found/toy/results.jsonl").read_text()
    (toy / "toy/room.py").write_text(TOY.replace("number += 1", "number = number + 1"))
    assert mutate(toy) == 0
    num_changed = sum(mutant.function == "room.count" for mutant in MutatedModule(toy, "toy/room.py").mutants)
    assert f"toy: {len(mutants)} mutants, {num_changed} to test" in capfd.readouterr().err


def test_what_no_test_notices_is_reported_until_one_does_or_it_is_listed(
    toy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (toy / "parts.toml").write_text(PARTS + "least_share = 1.0\n")
    (toy / "tests/test_room.py").write_text(WITHOUT_CLEAR)
    assert mutate(toy, "--function", "hold") == 1
    assert "room.hold: unnoticed\n  - held.clear()\n  + pass" in capfd.readouterr().out
    (toy / "equivalent.toml").write_text(LISTED)
    assert mutate(toy, "--function", "hold") == 0
    assert read_row(capfd.readouterr().out)["listed"] == "1"
    # The test notices it from now on, so the list is wrong.
    (toy / "tests/test_room.py").write_text(TESTS)
    assert mutate(toy, "--function", "hold") == 1
    assert "noticed or gone: toy room.hold" in capfd.readouterr().out
    (toy / "equivalent.toml").write_text("")
    assert mutate(toy, "--function", "hold") == 0


def test_a_sample_is_drawn_by_its_seed(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert mutate(toy, "--sample", "3", "--draw", "1") == 0
    first = capfd.readouterr()
    assert "3 to test" in first.err
    assert read_row(first.out)["mutants"] == "3"
    assert mutate(toy, "--sample", "3", "--draw", "1") == 0
    assert "0 to test" in capfd.readouterr().err
    drawn = {
        tuple(sorted(draw_sample(MutatedModule(toy, "toy/room.py").mutants, argparse.Namespace(sample=3, draw=draw))))
        for draw in range(8)
    }
    assert len(drawn) > 1


def test_one_module_is_tested_alone(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (toy / "toy/hall.py").write_text("def get_size() -> int:\n    return 7\n")
    (toy / "tests/test_hall.py").write_text(
        "from toy.hall import get_size\n\n\ndef test_size() -> None:\n    assert get_size() == 7\n"
    )
    assert mutate(toy, "--module", "toy/hall") == 0
    row = read_row(capfd.readouterr().out)
    assert (row["noticed"], row["unnoticed"]) == ("2", "0")
    assert int(row["open"]) == int(row["mutants"]) - 2


def test_many_cases_of_one_test_leave_time_for_another(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (toy / "tests/test_room.py").write_text(MANY_CASES)
    assert mutate(toy, "--function", "is_full", "--budget", "0.2") == 0
    assert read_row(capfd.readouterr().out)["unnoticed"] == "0"


def test_messages_are_no_decisions(toy: Path) -> None:
    shown = [mutant.before for mutant in MutatedModule(toy, "toy/room.py").mutants if "wait" in mutant.function]
    assert shown == ["raise ValueError(f'does not fit: {fits + 1}')", "return 'fits'", "return 'fits'"]


def test_the_name_of_a_task_is_no_decision_and_another_name_is(toy: Path) -> None:
    (toy / "toy/hall.py").write_text("def run(loop, work):\n    loop.create_task(work, name='x')\n    work(name='y')\n")
    shown = [mutant.after for mutant in MutatedModule(toy, "toy/hall.py").mutants]
    assert shown == ["pass", "pass", "work()", "work(name='XXy')"]


def test_a_name_that_is_not_used_is_no_decision_and_an_item_that_goes_is(toy: Path) -> None:
    (toy / "toy/hall.py").write_text("def drop(held, name):\n    del name\n    del held[0]\n")
    shown = [(mutant.before, mutant.after) for mutant in MutatedModule(toy, "toy/hall.py").mutants]
    assert ("del held[0]", "pass") in shown
    assert all("name" not in before for before, _ in shown)


@pytest.mark.parametrize("package", ["core/sluice_core", "operator/sluice_operator"])
def test_every_module_that_decides_belongs_to_one_part_or_is_left_out_with_a_reason(package: str) -> None:
    left_out = read_left_out(REAL_PARTS)
    places = Counter(path for part in read_parts(REAL_PARTS).values() for path in part.list_modules(ROOT))
    deciding = [
        path
        for path in sorted((ROOT / package).rglob("*.py"))
        if MutatedModule(ROOT, str(path.relative_to(ROOT))).mutants
    ]
    found = {str(path.relative_to(ROOT)): places[path] for path in deciding}
    assert {path: count for path, count in found.items() if count != (path not in left_out)} == {}
    assert all((ROOT / path).exists() and reason for path, reason in left_out.items())


def test_mutants_that_are_listed_are_there() -> None:
    """Otherwise a rename loses the reason why nothing notices a mutant, and the mutant counts as a hole again."""
    gone = []
    for part in read_parts(REAL_PARTS).values():
        listed = read_equivalent(EQUIVALENT, part.name)
        modules = {function.partition(".")[0] for function, _, _ in listed}
        paths = [str(path.relative_to(ROOT)) for path in part.list_modules(ROOT) if path.stem in modules]
        found = {mutant.key for path in paths for mutant in MutatedModule(ROOT, path).mutants}
        gone += [key for key in listed if key not in found]
    assert gone == []


def test_the_tests_of_every_part_are_there() -> None:
    parts = read_parts(REAL_PARTS).values()
    assert [path for part in parts for path in part.tests if not (ROOT / path).exists()] == []
    assert [begin for part in parts for begin in part.deselect if not any(ROOT.glob(f"{begin}*"))] == []
