"""Runs helm on the chart, without the user's own configuration."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import yaml

from testbed.settings import ROOT

if TYPE_CHECKING:
    from pathlib import Path

Object = dict[str, Any]

CHART = ROOT / "helm" / "sluice"
RELEASE = "sluice"
SYSTEM = "sluice-system"


class Helm:
    """The helm program.

    Args:
        path: The program.
        home: Folder for its caches and for values files.
    """

    def __init__(self, path: Path, home: Path) -> None:
        self._path = path
        self._home = home

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command that needs no cluster."""
        environment = {**os.environ, "HOME": str(self._home), "KUBECONFIG": "/dev/null"}
        return subprocess.run(
            [self._path, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def template(
        self, values: Object, *arguments: str, release: str = RELEASE, namespace: str = SYSTEM
    ) -> list[Object]:
        """Renders the chart; an error of helm is an error here."""
        file = self._home / "values.json"
        file.write_text(json.dumps(values))
        done = self.run("template", release, str(CHART), "-n", namespace, "-f", str(file), *arguments)
        assert done.returncode == 0, done.stderr
        return [item for item in yaml.safe_load_all(done.stdout) if item]
