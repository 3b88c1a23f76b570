"""Writes and checks the lock files of this folder: one per image extra, and one of the development tools.

    python requirements/lock.py check     # do the locks belong to pyproject.toml? needs no network
    python requirements/lock.py write     # resolve anew with uv, keeping versions that still fit; then prove
    python requirements/lock.py prove     # asks a registry: does the lock for GPUs hold all that its packages need?

A lock names every package with its version and hashes, and no registry: any mirror will do. Its header holds a hash
of the tables of pyproject.toml that it was made from. The locks for machines without a GPU leave packages out
(``tool.sluice.locks-without-gpu``), so only the one for GPUs can be proved.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parent / "pyproject.toml"
# One lock per extra of pyproject.toml and one for its group of development tools. `make up` installs several of them
# together, so what they share has the same version in all.
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
    """Finds locks that do not belong to pyproject.toml.

    Returns:
        A line for each problem; empty when there is none.
    """
    problems = []
    for name in (*EXTRAS, TOOLS):
        path = HERE / f"{name}.txt"
        if not path.is_file():
            problems.append(f"{path.name} is missing")
            continue
        text = path.read_text()
        if f"{HASH_LINE}{hash_inputs(project)}\n" not in text:
            problems.append(f"{path.name} was made from another pyproject.toml")
        if "://" in text:
            problems.append(f"{path.name} names a registry")
        locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))
        for dependency in _direct_dependencies(project, name):
            package, version = dependency.split("==")
            found = locked.get(package.lower(), "nothing")
            if found != version:
                problems.append(f"{path.name} holds {found} of {package}, pyproject.toml asks for {version}")
        problems += _check_excluded(project, name, locked)
    return problems


def _check_excluded(project: dict[str, Any], name: str, locked: dict[str, str]) -> list[str]:
    """What is left out without a GPU stands in the lock for GPUs, and in no other."""
    excluded: list[str] = project["tool"]["sluice"]["locks-without-gpu"]["excludes"]
    if name == GPU:
        return [
            f"{name}.txt lacks {package}, which only locks without GPUs do"
            for package in excluded
            if package not in locked
        ]
    return [f"{name}.txt holds {package}, which is for GPUs" for package in excluded if package in locked]


def _direct_dependencies(project: dict[str, Any], name: str) -> list[str]:
    if name == TOOLS:
        tools: list[str] = project["dependency-groups"][TOOLS]
        return tools
    return [*project["project"]["dependencies"], *project["project"]["optional-dependencies"][name]]


def write(project: dict[str, Any]) -> None:
    """Resolves every lock."""
    with tempfile.TemporaryDirectory() as temporary:
        together = Path(temporary) / "together.txt"
        everything_on_cpu = [name for name in EXTRAS if name != GPU]
        options = _write_without_gpu_options(project, Path(temporary))
        _compile(together, [*_extra_options(everything_on_cpu), *_tool_options(), *options])
        options += ["--constraint", str(together)]
        for name in everything_on_cpu:
            _compile(HERE / f"{name}.txt", [*_extra_options([name]), *options])
        _compile(HERE / f"{TOOLS}.txt", [*_tool_options(), *options])
    shared = [
        part for name in ("router", "operator", "cli", TOOLS) for part in ("--constraint", str(HERE / f"{name}.txt"))
    ]
    _compile(HERE / f"{GPU}.txt", [*_extra_options([GPU]), *shared])
    _compile(HERE / "uv.txt", ["-"], UV)
    for name in (*EXTRAS, TOOLS):
        path = HERE / f"{name}.txt"
        path.write_text(f"{HEADER}{HASH_LINE}{hash_inputs(project)}\n{path.read_text()}")
        print(f"wrote requirements/{path.name}")


def prove() -> list[str]:
    """Asks a registry whether the lock for GPUs is complete: an installer that insists on hashes must miss none.

    Nothing is installed, and no wheel is fetched where the registry tells their metadata.

    Returns:
        A line for each Python and platform for which it is not; empty when all is well.
    """
    problems = []
    with tempfile.TemporaryDirectory() as target:
        # Run outside the project, whose settings for uv are not those of who installs an image.
        options = ["--dry-run", "--quiet", "--only-binary", ":all:", "--require-hashes"]
        command = ["uv", "pip", "install", *options, "--target", target, "-r", str(HERE / f"{GPU}.txt")]
        for platform in PLATFORMS:
            for python in PYTHONS:
                aim = ["--python-platform", platform, "--python-version", python]
                done = subprocess.run([*command, *aim], check=False, cwd=target, capture_output=True, text=True)
                if done.returncode != 0:
                    problems.append(f"{GPU}.txt, Python {python}, {platform}: {done.stderr.strip()}")
    return problems


def _write_without_gpu_options(project: dict[str, Any], folder: Path) -> list[str]:
    """Options that resolve for machines without a GPU; uv takes them from files only."""
    options = []
    for name, lines in project["tool"]["sluice"]["locks-without-gpu"].items():
        path = folder / f"{name}.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        options += [f"--{name}", str(path)]
    return options


def _extra_options(extras: list[str]) -> list[str]:
    return [str(PROJECT), *(part for extra in extras for part in ("--extra", extra))]


def _tool_options() -> list[str]:
    return ["--group", f"{PROJECT}:{TOOLS}"]


def _compile(path: Path, options: list[str], text: str = "") -> None:
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "-o", str(path), *options]
    quiet = ["--no-emit-index-url", "--no-emit-find-links", "--no-annotate", "--no-header"]
    subprocess.run([*command, *quiet], check=True, cwd=PROJECT.parent, input=text, text=True)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Writes or checks the lock files.")
    parser.add_argument("what", choices=["check", "write", "prove"])
    what = parser.parse_args().what
    project = tomllib.loads(PROJECT.read_text())
    if what == "write":
        write(project)
    problems = check(project) if what == "check" else prove()
    if problems:
        print("\n".join(problems))
        sys.exit("run `make lock`" if what == "check" else f"{GPU}.txt cannot be installed as it is")
    print("the locks belong to pyproject.toml" if what == "check" else f"{GPU}.txt holds all that its packages need")


if __name__ == "__main__":
    main()
