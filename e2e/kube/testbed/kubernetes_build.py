"""Builds Kubernetes from its Go modules, once per set of modules and version of Go.

``go/`` holds three modules: ``kubernetes`` (control plane, node and kubectl in one binary), ``tools`` (helm, kwok and
CoreDNS, whose dependencies must not touch those of Kubernetes) and ``pause``. Their go.mod and go.sum are committed, so
what is built is what was pinned. Binaries are kept in ``~/.cache/sluice/kube/<key>``, which any checkout may use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import MissingError, TestbedError
from testbed.settings import find_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

THIS = Path(__file__)
MODULES = THIS.parents[1] / "go"
# Names by which the one binary is called.
PROGRAMS = ("etcd", "kubectl", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")
# What fake nodes and their pods do, as kwok's authors publish it.
STAGES = (
    "node/fast/node-initialize",
    "node/heartbeat-with-lease/node-heartbeat-with-lease",
    "pod/fast/pod-ready",
    "pod/fast/pod-complete",
    "pod/fast/pod-delete",
)
# Without these stamps the API server calls itself v0.0.0, and clients that compare versions go astray.
STAMPED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
KEPT_BUILDS = 2
OLDEST_GO = (1, 26)


def build(*, is_quiet: bool = False) -> Path:
    """Builds what is not built yet; a run that finds everything takes no time.

    Args:
        is_quiet: Says nothing while it builds.

    Returns:
        Folder of the binaries.

    Raises:
        MissingError: There is no Go, or it is too old.
        TestbedError: A build failed.
    """
    sources = [*sorted(MODULES.rglob("*.*")), THIS]
    return build_once("Kubernetes", find_cache("kube"), sources, _build_into, is_quiet=is_quiet)


def build_once(
    what: str, cache: Path, sources: Sequence[Path], build_into: Callable[[Path, str], None], *, is_quiet: bool = False
) -> Path:
    """Builds something unless it was built before from the same sources with the same Go.

    Args:
        what: Its name, for people.
        cache: Folder of its builds.
        sources: Every file that it depends on.
        build_into: Builds it into a folder that does not exist yet, with a ``go`` command.
        is_quiet: Says nothing while it builds.

    Returns:
        Folder of this build.

    Raises:
        MissingError: There is no Go, or it is too old.
        TestbedError: A build failed.
    """
    go = find_go()
    version = run_go(go, MODULES, "env", "GOVERSION").strip()
    if tuple(int(part) for part in version.removeprefix("go").split(".")[:2]) < OLDEST_GO:
        raise MissingError(f"{go} is {version}; {what} needs Go {OLDEST_GO[0]}.{OLDEST_GO[1]} or newer")
    folder = cache / _key(version, sources)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        if not folder.is_dir():
            if not is_quiet:
                print(f"building {what} into {folder}: minutes once, seconds from then on", flush=True)
            build_into(folder, go)
            _forget_old_builds(cache)
    return folder


def find_go() -> str:
    """The ``go`` command.

    Raises:
        MissingError: There is none.
    """
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin:/usr/lib/go/bin")
    if go is None:
        raise MissingError(
            f"there is no go command; install Go {OLDEST_GO[0]}.{OLDEST_GO[1]} or newer, and put it on PATH"
        )
    return go


def _key(version: str, sources: Sequence[Path]) -> str:
    """Identifies a build: the version of Go, every source file with its name, and how it is built."""
    digest = hashlib.sha256(version.encode())
    for path in sources:
        digest.update(path.relative_to(MODULES.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _build_into(folder: Path, go: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as temporary:
        target = Path(temporary) / "bin"
        target.mkdir()
        kubernetes, tools = MODULES / "kubernetes", MODULES / "tools"
        kube = _version(go, kubernetes, "k8s.io/kubernetes")
        _, minor, _ = kube.split(".")
        stamps = {"gitVersion": kube, "gitMajor": "1", "gitMinor": minor, "gitTreeState": "clean"}
        flags = {f"{package}.{name}": value for package in STAMPED for name, value in stamps.items()}
        compile_program(go, kubernetes, ".", target / "kube", flags)
        for name in PROGRAMS:
            (target / name).symlink_to("kube")
        helm, kwok = _version(go, tools, "helm.sh/helm/v4"), _version(go, tools, "sigs.k8s.io/kwok")
        compile_program(
            go, tools, "helm.sh/helm/v4/cmd/helm", target / "helm", {"helm.sh/helm/v4/internal/version.version": helm}
        )
        compile_program(
            go, tools, "sigs.k8s.io/kwok/cmd/kwok", target / "kwok", {"sigs.k8s.io/kwok/pkg/consts.Version": kwok[1:]}
        )
        compile_program(go, tools, "./dns", target / "coredns", {})
        compile_program(go, MODULES / "pause", ".", target / "pause", {})
        stages = (
            Path(run_go(go, tools, "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kwok").strip()) / "kustomize" / "stage"
        )
        texts = [(stages / f"{name}.yaml").read_text() for name in STAGES]
        (target / "kwok-stages.yaml").write_text("\n---\n".join(texts))
        target.rename(folder)  # whole or not at all


def compile_program(go: str, module: Path, package: str, binary: Path, stamps: dict[str, str]) -> None:
    """Compiles a package of a module, or of one that it requires, with strings set by the linker."""
    flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])
    run_go(go, module, "build", "-p", str(os.cpu_count() or 1), "-ldflags", flags, "-o", str(binary), package)


def _version(go: str, module: Path, name: str) -> str:
    return run_go(go, module, "list", "-m", "-f", "{{.Version}}", name).strip()


def run_go(go: str, module: Path, *arguments: str) -> str:
    """Runs go at low priority: a build must not starve what else runs on the machine."""
    # Flags of the user's own would make another build under the same key.
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-trimpath -buildvcs=false -mod=readonly",
        "GOWORK": "off",
    }
    done = subprocess.run(
        ["nice", "-n", "10", go, *arguments], cwd=module, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise TestbedError(f"go {' '.join(arguments[:1])} failed in {module}:\n{done.stderr[-4000:]}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One build at a time, for all checkouts; the kernel lets go when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget_old_builds(cache: Path) -> None:
    builds = sorted((path for path in cache.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for old in builds[:-KEPT_BUILDS]:
        shutil.rmtree(old)
