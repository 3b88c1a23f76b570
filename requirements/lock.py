"""Writes and checks the lock files of this folder: one per extra of pyproject.toml, and one of the development tools.

    python requirements/lock.py check     # do the locks belong to pyproject.toml? needs no network
    python requirements/lock.py write     # resolves with uv, keeps versions that still fit, checks the lock for GPUs

A lock names every package with version and hashes, and no registry, so that any mirror will do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parent / "pyproject.toml"
# `make up` installs several locks together, so a package that they share has the same version in all.
# `uv export` cannot write them: uv.lock names registries, and its overrides hold for every extra, GPUs included.
EXTRAS = ("router", "operator", "cli", "engine-cpu", "engine")
TOOLS = "dev"
# The lock of engines on GPUs, and what a Python that it is for looks like: Debian bookworm's C library or a newer one.
GPU = "engine"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_36", "aarch64-manylinux_2_36")
# The installer itself; pip installs it, it installs the rest.
UV = "uv==0.13.8"
HASH_LINE = "# Made from pyproject.toml, inputs sha256:"
HEADER = "# Written by requirements/lock.py; run it again after changing dependencies.\n"


def hash_inputs(project: dict[str, Any]) -> str:
    """Hash of everything in pyproject.toml that a resolution depends on."""
    inputs = [
        project["project"]["requires-python"],
        project["project"]["dependencies"],
        project["project"]["optional-dependencies"],
        project["dependency-groups"],
        project["tool"]["uv"],
        project["tool"]["sluice"],
    ]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def check(project: dict[str, Any]) -> list[str]:
    """Finds locks that do not belong to pyproject.toml; returns a line for each problem."""
    problems = []
    for name in (*EXTRAS, TOOLS):
        text = (HERE / f"{name}.txt").read_text()
        if f"{HASH_LINE}{hash_inputs(project)}\n" not in text:
            problems.append(f"{name}.txt was made from another pyproject.toml")
        if "://" in text:
            problems.append(f"{name}.txt names a registry")
        locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))
        for dependency in _direct_dependencies(project, name):
            # Without a version: whichever another package names.
            package, _, version = dependency.partition("==")
            # Extras are not part of a name: a lock lists what they bring.
            found = locked.get(package.partition("[")[0].lower(), "nothing")
            if found not in ((version,) if version else locked.values()):
                problems.append(f"{name}.txt holds {found} of {package}, pyproject.toml asks for {version or 'one'}")
        # What is left out without a GPU stands in the lock for GPUs, and in no other.
        excludes = project["tool"]["sluice"]["locks-without-gpu"]["excludes"]
        wrong = [package for package in excludes if (package in locked) != (name == GPU)]
        verdict = "lacks {}, which only locks without GPUs do" if name == GPU else "holds {}, which is for GPUs"
        problems += [f"{name}.txt {verdict.format(package)}" for package in wrong]
    return problems


def _direct_dependencies(project: dict[str, Any], name: str) -> list[str]:
    if name == TOOLS:
        return [*project["dependency-groups"][TOOLS]]
    return [*project["project"]["dependencies"], *project["project"]["optional-dependencies"][name]]


def write(project: dict[str, Any]) -> None:
    """Resolves every lock."""
    without_gpu = [name for name in EXTRAS if name != GPU]
    with tempfile.TemporaryDirectory() as temporary:
        together = Path(temporary) / "together.txt"
        # uv keeps the versions that stand where it writes.
        together.write_text("".join((HERE / f"{name}.txt").read_text() for name in (*without_gpu, TOOLS)))
        # uv takes them from files only.
        overrides = _write_option(Path(temporary), "overrides", "all", project["tool"]["sluice"]["locks"]["overrides"])
        options = [*overrides]
        for name, lines in project["tool"]["sluice"]["locks-without-gpu"].items():
            options += _write_option(Path(temporary), name, "without-gpu", lines)
        _compile(together, [*_select(*without_gpu, TOOLS), *options])
        for name in (*without_gpu, TOOLS):
            _compile(HERE / f"{name}.txt", [*_select(name), *options, "--constraint", str(together)])
        shared = (
            part
            for name in ("router", "operator", "cli", TOOLS)
            for part in ("--constraint", str(HERE / f"{name}.txt"))
        )
        _compile(HERE / f"{GPU}.txt", [*_select(GPU), *overrides, *shared])
    _compile(HERE / "uv.txt", ["-"], UV)
    for name in (*EXTRAS, TOOLS):
        path = HERE / f"{name}.txt"
        path.write_text(f"{HEADER}{HASH_LINE}{hash_inputs(project)}\n{path.read_text()}")
        print(f"wrote requirements/{path.name}")


def _write_option(folder: Path, name: str, which: str, lines: list[str]) -> list[str]:
    """Writes the file of an option of uv, and returns the option."""
    path = folder / f"{name}-{which}.txt"
    path.write_text("\n".join(lines))
    return [f"--{name}", str(path)]


def _select(*names: str) -> list[str]:
    """Options that name what is resolved: extras, and the group of the development tools."""
    extras = [part for name in names if name != TOOLS for part in ("--extra", name)]
    project = [str(PROJECT)] if extras else []
    return [*project, *extras, *(["--group", f"{PROJECT}:{TOOLS}"] if TOOLS in names else [])]


def _compile(path: Path, options: list[str], text: str = "") -> None:
    quiet = ["--quiet", "--no-annotate", "--no-header"]
    command = ["uv", "pip", "compile", "--universal", "--generate-hashes", *quiet, "-o", str(path), *options]
    subprocess.run(command, check=True, cwd=PROJECT.parent, input=text, text=True)


def check_gpu_lock(project: dict[str, Any]) -> list[str]:
    """Asks a registry whether the lock for GPUs, which no test installs, holds all that its packages need.

    Nothing is installed, and no wheel is fetched where the registry tells their metadata.

    Returns:
        A line for each Python and platform for which something is missing.
    """
    problems = []
    with tempfile.TemporaryDirectory() as target:
        options = ["--dry-run", "--quiet", "--only-binary", ":all:", "--require-hashes", "--target", target]
        options += _write_option(Path(target), "overrides", "all", _find_overrides(project))
        command = ["uv", "pip", "install", *options, "-r", str(HERE / f"{GPU}.txt")]
        for platform, python in product(PLATFORMS, PYTHONS):
            aim = ["--python-platform", platform, "--python-version", python]
            # Outside the project, whose settings for uv are not those of who installs an image.
            done = subprocess.run([*command, *aim], check=False, cwd=target, capture_output=True, text=True)
            if done.returncode != 0:
                problems.append(f"{GPU}.txt, Python {python}, {platform}: {done.stderr.strip()}")
    return problems


def _find_overrides(project: dict[str, Any]) -> list[str]:
    """Finds what overrides say in the lock for GPUs, with its hashes: uv asks for those too."""
    text = (HERE / f"{GPU}.txt").read_text()
    overrides = project["tool"]["sluice"]["locks"]["overrides"]
    patterns = [rf"^{re.escape(each)} (?:.*\\\n)+.*" for each in overrides]
    return [found[0] for pattern in patterns for found in re.finditer(pattern, text, re.MULTILINE)]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Writes or checks the lock files.")
    parser.add_argument("what", choices=["check", "write"])
    project = tomllib.loads(PROJECT.read_text())
    if parser.parse_args().what == "check":
        problems, verdict = check(project), "run `make lock`"
    else:
        write(project)
        problems, verdict = check_gpu_lock(project), f"{GPU}.txt cannot be installed as it is"
    if problems:
        print("\n".join(problems))
        sys.exit(verdict)
    print("the locks belong to pyproject.toml")


if __name__ == "__main__":
    main()
