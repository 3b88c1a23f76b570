"""Workflows are what GitHub can run; `zizmor` looks at their rights beside this (.ci/checks.py)."""

from __future__ import annotations

import subprocess

import pytest
from release_files import ROOT
from release_programs import MissingGoError, build_program


# The first run builds actionlint, while other steps take the cores.
@pytest.mark.timeout(900)
def test_actionlint_finds_nothing_in_the_workflows() -> None:
    try:
        actionlint = build_program("actionlint")
    except MissingGoError:
        pytest.skip("there is no Go to build actionlint with")
    # What shells run is told by no program that a machine may or may not have.
    done = subprocess.run(
        [str(actionlint), "-no-color", "-shellcheck=", "-pyflakes="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
