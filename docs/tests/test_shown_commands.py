"""Runs the marked commands of the documents, against a cluster started as the README says.

A fenced block has its mark after its language. ``ci`` blocks run as shown. ``ci-background`` blocks run beside the
others until those are done (`make up`). ``ci-elsewhere`` blocks are commands of CI itself, and only have to exist.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from checks import CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "docs/reference/api.md",
    "docs/guides/resume.md",
    "docs/guides/security.md",
    "docs/guides/simulate.md",
    "docs/guides/planning.md",
    "CONTRIBUTING.md",
)
URL = "http://127.0.0.1:8000"
# Of the clusters that documents start; their own manifests name ports below 20000.
PORTS = "28000-28999"
ENVIRONMENT = {**os.environ, "URL": URL, "SLUICE_PORT_RANGE": PORTS}
# CI runs these tests on the wheel. What the README starts, and what developers type, runs as in a checkout.
CHECKOUT_ENVIRONMENT = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
FENCE = re.compile(r"^```sh (ci\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A marked block of a document."""

    document: str
    kind: str
    commands: str


def find_blocks() -> list[Block]:
    """Finds the marked blocks of all documents, in order."""
    return [
        Block(document, match[1], match[2])
        for document in DOCUMENTS
        for match in FENCE.finditer((ROOT / document).read_text())
    ]


BLOCKS = find_blocks()


@pytest.fixture(scope="module")
def made_up() -> Iterator[None]:
    """Runs what the README starts in the background, until the URL that it names answers."""
    (background,) = (block for block in BLOCKS if block.kind == "ci-background")
    process = subprocess.Popen(
        ["bash", "-ec", background.commands],
        cwd=ROOT,
        env=CHECKOUT_ENVIRONMENT,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 240
        while not is_ready():
            assert process.poll() is None, "the README's background command has ended"
            assert time.monotonic() < deadline, "not ready in 240 s"
            time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        # A page may leave behind what it started.
        subprocess.run([ROOT / ".venv" / "bin" / "sluice", "down", "--all", "--now"], cwd=ROOT, check=False)


def is_ready() -> bool:
    """Whether the example's router is ready."""
    try:
        with urllib.request.urlopen(f"{URL}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_each_document_shows_what_ci_runs() -> None:
    assert {block.document for block in BLOCKS} == set(DOCUMENTS)
    assert any(block.kind == "ci-elsewhere" and "make test" in block.commands for block in BLOCKS)


def test_the_parts_of_make_test_are_shown_as_they_run() -> None:
    (shown,) = (block for block in BLOCKS if ".venv/bin/lint-imports" in block.commands)
    checks = [list(command) for _, _, command in CHECKS]
    commands = [shlex.split(line.removeprefix(".venv/bin/")) for line in shown.commands.splitlines()]
    assert {command[0] for command in commands} == {"ruff", "mypy", "lint-imports", "pytest"}
    for command in commands:
        match command[0]:
            case "mypy":
                assert any(check[0] == "mypy" and set(command) <= set(check) for check in checks)
            case "pytest":
                assert (ROOT / command[-1]).is_file()
            case _:
                assert command in checks


@pytest.mark.usefixtures("made_up")
@pytest.mark.timeout(420)
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "ci"], ids=lambda b: b.commands.split("\n")[0][:40])
def test_a_shown_command_works(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.commands],
        cwd=ROOT,
        env=CHECKOUT_ENVIRONMENT if block.document == "CONTRIBUTING.md" else ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A field: the random answer of a model may be the word itself.
    assert not re.search(r'"error"\s*:', done.stdout)
    assert done.stdout.strip()
