"""Compiles ``sluice_core`` with mypyc into the wheel: about twice as fast. Editable installs keep the Python code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "sluice_core"


class CompiledCore(BuildHookInterface[Any]):
    """Adds the compiled modules beside their sources, which the wheel keeps for tracebacks and readers."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles in a temporary folder; see hatchling's ``BuildHookInterface``."""
        if version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-build-"))
        sources = Path(self.root) / "core" / PACKAGE
        shutil.copytree(sources, self._folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        subprocess.run(  # noqa: S603 - mypyc of this environment
            [Path(sys.executable).with_name("mypyc"), PACKAGE], cwd=self._folder, check=True
        )
        for module in [*self._folder.glob("*.so"), *self._folder.glob(f"{PACKAGE}/**/*.so")]:
            build_data["force_include"][str(module)] = str(module.relative_to(self._folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the temporary folder; see hatchling's ``BuildHookInterface``."""
        del build_data, artifact_path
        if version != "editable":
            shutil.rmtree(self._folder)
