"""Builds the Kubernetes that tests run on: the pinned one, or the other version that ``SLUICE_KUBE_VERSION`` names.

A module of ``versions/``, with go.mod and go.sum of its own, holds the programs of another version's control plane and
node. kubectl, helm, kwok and CoreDNS are the pinned build's, so that tests speak to every version in the same words.
This stands apart from ``kubernetes_build.py``, whose text is part of the key of the pinned build.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from testbed import kubernetes_build
from testbed.errors import MissingError
from testbed.kubernetes_build import MODULES, PROGRAMS, STAMPED, build, build_once, compile_program, run_go
from testbed.settings import find_cache

CHOICE = "SLUICE_KUBE_VERSION"
VERSIONS = MODULES.parent / "versions"
# Those that tests, and not the cluster, call.
CLIENTS = ("kubectl",)


def list_versions() -> list[str]:
    """Minor versions besides the pinned one, oldest first."""
    return sorted((path.name for path in VERSIONS.iterdir()), key=lambda name: [int(part) for part in name.split(".")])


def build_chosen() -> Path:
    """Builds the chosen Kubernetes unless it is built; without a choice, the pinned one.

    Returns:
        Folder of the binaries.

    Raises:
        MissingError: There is no such version here, or no Go.
        TestbedError: A build failed.
    """
    pinned, minor = build(), os.environ.get(CHOICE, "")
    if not minor:
        return pinned
    if minor not in list_versions():
        raise MissingError(
            f"{CHOICE} is {minor!r}; there are {', '.join(list_versions())}, and the pinned one without it"
        )
    module = VERSIONS / minor
    builders = [Path(kubernetes_build.__file__), Path(__file__)]
    sources = [*sorted(MODULES.rglob("*.*")), *builders, *sorted(module.iterdir())]
    return build_once(
        f"Kubernetes {minor}",
        find_cache(f"kube-{minor}"),
        sources,
        lambda folder, go: _build_into(folder, go, module, pinned),
    )


def _build_into(folder: Path, go: str, module: Path, pinned: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as temporary:
        target = Path(temporary) / "bin"
        # The pinned build may be forgotten before this one is; a second name of a file takes no space.
        shutil.copytree(pinned, target, symlinks=True, copy_function=_link)
        (target / "kube").rename(target / "clients")
        for name in CLIENTS:
            (target / name).unlink()
            (target / name).symlink_to("clients")
        version = run_go(go, module, "list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes").strip()
        stamps = {"gitVersion": version, "gitMajor": "1", "gitMinor": version.split(".")[1], "gitTreeState": "clean"}
        flags = {f"{package}.{name}": value for package in STAMPED for name, value in stamps.items()}
        compile_program(go, module, ".", target / "kube", flags)
        assert all((target / name).exists() for name in PROGRAMS)
        target.rename(folder)  # whole or not at all


def _link(source: str, target: str) -> None:
    """Gives a file a second name, or copies it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
