"""Compiles core and router with mypyc into the wheel: about twice as fast. Editable installs keep the Python code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Folder in the checkout, package.
PACKAGES = (("core", "sluice_core"), ("protos", "sluice"), ("router", "sluice_router"))
# Generated messages; classes that extend a library's (pydantic, jinja2, prometheus_client); errors, which those extend.
INTERPRETED = (
    "sluice",
    "sluice.*",
    "sluice_router.__main__",
    "sluice_router.errors",
    "sluice_router.settings",
    "sluice_router.api.openai_requests",
    "sluice_router.scheduling.status.gauges",
    "sluice_router.text.chat_template",
)
# One C file per module: compiling all in one takes twice as long, and runs no faster. All cores compile; setuptools by
# itself would compile one file after the other. What they made is awaited before it is linked.
SETUP = """
import os
from concurrent.futures import ThreadPoolExecutor
from setuptools import setup
from distutils.unixccompiler import UnixCCompiler  # setuptools' own, under its former name
from mypyc.build import mypycify
threads, running = ThreadPoolExecutor(os.cpu_count()), []
compile_file, link = UnixCCompiler._compile, UnixCCompiler.link
def link_compiled(*arguments, **options):
    while running:
        running.pop().result()
    link(*arguments, **options)
UnixCCompiler._compile = lambda *arguments: running.append(threads.submit(compile_file, *arguments))
UnixCCompiler.link = link_compiled
setup(name="compiled", packages=[], ext_modules=mypycify({modules!r}, opt_level="3", debug_level="0", multi_file=True))
"""
# Libraries are not installed where a wheel is built, so what comes from them has no type. CI checks types with them.
# A compiled class that extends one of theirs would overwrite its fields.
CONFIGURATION = """
[mypy]
ignore_missing_imports = true
disallow_subclassing_any = true
[mypy-{interpreted}]
ignore_errors = true
"""


def _is_interpreted(module: str, source: str) -> bool:
    # Exceptions out of compiled coroutines have crashed the interpreter.
    return "async def" in source or any(fnmatch(module, pattern) for pattern in INTERPRETED)


class CompiledModules(BuildHookInterface[Any]):
    """Adds the compiled modules beside their sources, which the wheel keeps for tracebacks and readers."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles in a temporary folder; see hatchling's ``BuildHookInterface``."""
        if version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-build-"))
        for part, package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(Path(self.root) / part / package, self._folder / package, ignore=ignored)
        compiled, interpreted = [], list(INTERPRETED)
        for path in sorted(self._folder.rglob("*.py")):
            file = path.relative_to(self._folder)
            module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
            if _is_interpreted(module, path.read_text()):
                interpreted.append(module)
            else:
                compiled.append(str(file))
        (self._folder / "setup.py").write_text(SETUP.format(modules=compiled))
        (self._folder / "mypy.ini").write_text(CONFIGURATION.format(interpreted=",".join(interpreted)))
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=self._folder, check=True)
        for library in self._folder.rglob("*.so"):
            target = library.relative_to(self._folder)
            if "build" not in target.parts:
                build_data["force_include"][str(library)] = str(target)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the temporary folder; see hatchling's ``BuildHookInterface``."""
        del build_data, artifact_path
        if version != "editable":
            shutil.rmtree(self._folder)
