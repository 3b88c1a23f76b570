"""The page of commands is what the commands themselves say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_written_from_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "docs/cli_reference.py", "check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
