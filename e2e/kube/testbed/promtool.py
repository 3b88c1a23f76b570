"""Prometheus' own checker of rules and queries, built from the Go module ``monitoring`` beside this package.

It is a tool of that module, whose go.mod and go.sum pin it; Go builds it at its first use, in a minute or two, and keeps
it among its other builds.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from testbed.toolchain import find_go

MODULE = Path(__file__).parents[1] / "monitoring"
# Nothing of the clients of clouds is needed to check rules; they would make up most of the build.
FLAGS = "-trimpath -buildvcs=false -mod=readonly -tags=remove_all_sd"


def run_promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs promtool in the folder of its module; returns how it ended and what it said.

    Args:
        arguments: Its arguments; paths are absolute.
    """
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": FLAGS, "GOWORK": "off"}
    command = ["nice", "-n", "10", find_go(), "tool", "promtool", *arguments]
    return subprocess.run(command, cwd=MODULE, env=environment, capture_output=True, text=True, check=False)
