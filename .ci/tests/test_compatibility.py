"""The long proofs outside CI: which interpreters are found, and what the last lines and the exit status say."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checks import BIN
from compatibility import NOT_ASKED, NOT_HERE, PYTHONS, ROOT, Proof, find_proofs, find_python, run_proofs, run_step
from limited_runs import Counts

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def link_python(folder: Path, version: str) -> Path:
    """Puts this Python into a folder, under the name of a version."""
    folder.mkdir(parents=True)
    program = folder / f"python{version}"
    program.write_text(f'#!/bin/sh\nexec "{Path(sys.base_prefix) / "bin" / f"python{HERE}"}" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without interpreters; returns a folder for what a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    return tmp_path


@pytest.mark.parametrize("version", PYTHONS)
def test_without_an_interpreter_none_is_found_or_fetched(bare: Path, version: str) -> None:
    assert find_python(version) is None
    assert not (bare / "uv").exists()


@pytest.mark.parametrize("place", ["bin", f"pyenv/versions/{HERE}.99/bin"])
def test_an_interpreter_is_found_on_the_path_and_among_those_of_pyenv(bare: Path, place: str) -> None:
    link_python(bare / place, HERE)
    found = find_python(HERE)
    assert found is not None
    assert subprocess.check_output([found, "-c", "import sys; print(sys.prefix)"], text=True).strip() == sys.base_prefix


def test_an_interpreter_is_named_with_its_whole_version(bare: Path) -> None:
    link_python(bare / "bin", HERE)
    (found,) = [proof for proof in find_proofs() if proof.only == HERE]
    assert found.run is not None
    assert found.name == f"Python {sys.version.split()[0]}"


def test_an_interpreter_that_is_another_version_than_its_name_says_is_not_taken(bare: Path) -> None:
    other = next(version for version in PYTHONS if version != HERE)
    link_python(bare / "bin", other)
    assert find_python(other) is None


def test_the_proofs_are_those_of_the_readme(bare: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in readme
    proofs = find_proofs()
    pythons = [proof for proof in proofs if proof.part == "python"]
    assert [(proof.name, proof.run) for proof in pythons] == [(f"Python {version}", None) for version in PYTHONS]
    oldest, *_ = [proof.name for proof in proofs if proof.part == "kubernetes"]
    assert f"| {oldest.replace(' ', ' | ')} or newer |" in readme
    assert [proof.name for proof in proofs if proof.part not in ("python", "kubernetes")] == ["images", "autoscalers"]


def passes() -> Counts:
    return Counts(passed=3, skips=["a.b: no device"])


def fails() -> Counts:
    return Counts(passed=2, failed=1, failures=["a.c: 1 != 2"])


def lacks_a_program() -> Counts:
    return run_step("no-such-program", limit_s=1)


def prove(*runs: Callable[[], Counts] | None, asked: int = 9) -> tuple[list[str], bool]:
    proofs = [
        Proof(part="python", only=str(number), name=f"Python {number}", run=run) for number, run in enumerate(runs)
    ]
    return run_proofs(proofs, lambda proof: proofs.index(proof) < asked)


def test_a_failed_proof_fails_the_whole_and_does_not_hide_the_next_one() -> None:
    lines, is_good = prove(fails, lacks_a_program, passes)
    assert not is_good
    assert "failed  Python 0: a.c: 1 != 2" in lines
    assert "skipped  Python 2: a.b: no device" in lines
    assert [line.rpartition(" s: ")[2] for line in lines if line.startswith("Python ")] == [
        "2 passed, 1 failed, 0 skipped",
        "0 passed, 1 failed, 0 skipped",
        "3 passed, 0 failed, 1 skipped",
    ]
    assert lines[-1] == "proved: Python 2; not proved: Python 0 (1 failed), Python 1 (1 failed)"


def test_what_is_not_here_or_not_asked_for_is_named_and_does_not_fail() -> None:
    lines, is_good = prove(passes, None, fails, None, asked=2)
    assert is_good
    assert (
        lines[-1]
        == f"proved: Python 0; not proved: Python 1 ({NOT_HERE}), Python 2 ({NOT_ASKED}), Python 3 ({NOT_ASKED})"
    )


def test_a_run_that_proves_nothing_fails() -> None:
    lines, is_good = prove(None)
    assert not is_good
    assert lines == [f"proved: nothing; not proved: Python 0 ({NOT_HERE})"]


def test_a_step_fails_by_its_status_and_at_its_limit(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_step("true", limit_s=60) == Counts(passed=1)
    assert run_step("sh", "-c", "exit 3", limit_s=60).failures == ["sh -c exit 3: exit status 3"]
    assert run_step("sleep", "60", limit_s=0.1).failed == 1
    assert "STOPPED at its limit of 0.1 s: sleep 60" in capfd.readouterr().out


def test_a_part_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [BIN / "python", ROOT / ".ci" / "compatibility.py", "pythn"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no pythn; there are python, kubernetes, images, autoscalers" in done.stderr
