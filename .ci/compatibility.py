"""Proves what README says is supported, and CI does not run: other Pythons, other versions of Kubernetes, our images.

    .venv/bin/python .ci/compatibility.py [PART...] [--only VERSION]

Parts are ``python``, ``kubernetes``, ``images`` and ``autoscalers``; without any, all run. ``--only 3.12`` leaves the
other versions out. A failed proof does not hide the next one. At its limit a step is stopped, says where it stood, and
has failed. The last lines name every proof, and whether it was made.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checks import (
    BIN,
    CHECKOUT_TESTS,
    ENGINE_TESTS,
    ENGINE_TESTS_LIMIT_S,
    IS_COMPILED,
    ON_ALL_CORES,
    ROOT,
    UNIT_TESTS_LIMIT_S,
    WHEEL_TESTS,
)
from limited_runs import Counts, end_steps_with_this_process, run_limited, run_pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LOCKS = ("router", "operator", "cli", "engine-cpu", "dev")
FOLDER = ROOT / "build" / "compatibility"
VERSIONS = ROOT / "e2e" / "kube" / "versions"
# Limits of steps, several times what they take on two quiet cores. A step is a command here, or one run of pytest.
INSTALL_LIMIT_S = 1800.0
BUILD_LIMIT_S = 3600.0
KUBE_TESTS_LIMIT_S = 4500.0
TARGET_LIMIT_S = 7200.0
# Of the clusters of the first version: others may run on the default ports.
FIRST_KUBE_PORT = 16440
NOT_HERE = "not on this machine"
NOT_ASKED = "not asked for"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What can be proved by itself.

    Args:
        part: What a person asks for.
        only: What ``--only`` calls it, such as ``3.12``.
        name: What it proves, such as ``Python 3.12.1``.
        run: Makes the proof; None if that is impossible here.
    """

    part: str
    only: str
    name: str
    run: Callable[[], Counts] | None


def find_python(version: str, *, uv: Path = BIN / "uv") -> Path | None:
    """Finds an interpreter on PATH or among pyenv's; uv names those that it manages. Nothing is fetched.

    Args:
        version: Such as ``3.12``.
        uv: The command.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    # pyenv's shims stand on PATH, and fail for versions that are not chosen.
    folders = [*map(str, sorted(pyenv.glob(f"versions/{version}.*/bin"))), os.environ["PATH"]]
    options = ("--offline", "--no-python-downloads", "--no-project", "--system")
    command: list[str | Path] = [uv, "python", "find", *options, version]
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def find_proofs() -> list[Proof]:
    """Every proof of README's claims, in the order in which they are made."""
    proofs = []
    for version in PYTHONS:
        name, run = f"Python {version}", None
        if (python := find_python(version)) is not None:
            name = subprocess.check_output([python, "-V"], text=True).strip()
            run = functools.partial(prove_python, version, python)
        proofs.append(Proof(part="python", only=version, name=name, run=run))
    minors = sorted((path.name for path in VERSIONS.iterdir()), key=lambda name: int(name.split(".")[1]))
    for index, minor in enumerate(minors):
        prove = functools.partial(prove_kubernetes, minor, FIRST_KUBE_PORT + 20 * index)
        proofs.append(Proof(part="kubernetes", only=minor, name=f"Kubernetes {minor}", run=prove))
    for part in ("images", "autoscalers"):
        target = functools.partial(run_step, "make", f"{part}-check", limit_s=TARGET_LIMIT_S)
        proofs.append(Proof(part=part, only=part, name=part, run=target))
    return proofs


def run_step(*command: str | Path, limit_s: float, environment: dict[str, str] | None = None) -> Counts:
    """Runs a command, which counts as one test."""
    print("+", *command, flush=True)
    status = run_limited(command, limit_s=limit_s, environment={**os.environ, **(environment or {})}, cwd=ROOT)
    if status == 0:
        return Counts(passed=1)
    words = " ".join(map(str, command))
    return Counts(failed=1, failures=[f"{words[:100]}: exit status {status}"])


def prove_python(version: str, python: Path) -> Counts:
    """Makes an environment from the locks, builds the wheel, and runs every part's tests on wheel and checkout."""
    folder = FOLDER / f"python{version}"
    own, compiled, wheels = folder / "bin" / "python", folder / "compiled", folder / "wheel"
    install: tuple[str | Path, ...] = (BIN / "uv", "pip", "install", "--quiet", "--python", own, "--no-deps")
    locks: list[str | Path] = [part for name in LOCKS for part in ("-r", f"requirements/{name}.txt")]
    commands: tuple[tuple[str | Path, ...], ...] = (
        (BIN / "uv", "venv", "--quiet", "--clear", "--python", python, folder),
        (own, "-VV"),
        (*install, "--compile-bytecode", *locks),
        (*install, "--editable", "."),
        (BIN / "uv", "build", "--quiet", "--python", own, "--wheel", "--out-dir", wheels),
        (*install, "--target", compiled, "--find-links", wheels, "--no-index", "sluice-serve"),
        ("env", f"PYTHONPATH={compiled}", own, "-c", IS_COMPILED),
    )
    counts = Counts()
    for command in commands:
        counts.add(run_step(*command, limit_s=INSTALL_LIMIT_S))
        if counts.failed:  # what follows would test nothing, or something else
            return counts
    path = {"PATH": f"{own.parent}{os.pathsep}{os.environ['PATH']}"}
    on_wheel = {**path, "PYTHONPATH": str(compiled)}
    for arguments, environment, limit_s in (
        ((*ON_ALL_CORES, *WHEEL_TESTS), on_wheel, UNIT_TESTS_LIMIT_S),
        ((*ON_ALL_CORES, *CHECKOUT_TESTS), path, UNIT_TESTS_LIMIT_S),
        (ENGINE_TESTS, path, ENGINE_TESTS_LIMIT_S),
    ):
        counts.add(run_pytest(arguments, limit_s=limit_s, folder=ROOT, environment=environment, python=own))
    return counts


def prove_kubernetes(minor: str, port: int) -> Counts:
    """Builds a version of Kubernetes, and runs the tests on its control plane whose nodes are played."""
    environment = {
        "SLUICE_KUBE_VERSION": minor,
        "SLUICE_KUBE_FOLDER": str(ROOT / ".sluice" / f"kube-{minor}"),
        "SLUICE_KUBE_PORT": str(port),
        "PYTHONPATH": f"{ROOT / 'e2e' / 'kube'}{os.pathsep}{ROOT / '.ci'}",
    }
    counts = run_step(sys.executable, "-m", "testbed", "build", limit_s=BUILD_LIMIT_S, environment=environment)
    if not counts.failed:
        arguments = ["--durations=5", "--nodes=played", "e2e/kube"]
        counts.add(run_pytest(arguments, limit_s=KUBE_TESTS_LIMIT_S, folder=ROOT, environment=environment))
    return counts


def run_proofs(proofs: list[Proof], is_asked: Callable[[Proof], bool]) -> tuple[list[str], bool]:
    """Makes the proofs that are asked for, one after the other.

    Args:
        proofs: All that there are.
        is_asked: Whether a proof is asked for.

    Returns:
        A line for each proof, then one that says what was proved and what not; and whether nothing failed, and
        something was proved.
    """
    lines, proved, missing, has_failed = [], [], [], False
    for proof in proofs:
        if proof.run is None or not is_asked(proof):
            missing.append(f"{proof.name} ({NOT_ASKED if not is_asked(proof) else NOT_HERE})")
            continue
        print(f"== {proof.name}", flush=True)
        started = time.monotonic()
        try:
            counts = proof.run()
        except OSError as error:  # a program that is not there; the next proof may not need it
            counts = Counts(failed=1, failures=[str(error)])
        lines += [f"skipped  {proof.name}: {skip}" for skip in counts.skips]
        lines += [f"failed  {proof.name}: {failure}" for failure in counts.failures]
        lines.append(f"{proof.name}, {time.monotonic() - started:.0f} s: {counts}")
        has_failed |= counts.failed > 0
        if counts.failed:
            missing.append(f"{proof.name} ({counts.failed} failed)")
        else:
            proved.append(proof.name)
    lines.append(f"proved: {', '.join(proved) or 'nothing'}; not proved: {', '.join(missing) or 'nothing'}")
    return lines, bool(proved) and not has_failed


def main() -> None:
    """Makes the proofs, and says which were made."""
    proofs = find_proofs()
    parts = list(dict.fromkeys(proof.part for proof in proofs))
    parser = argparse.ArgumentParser(description="Proves on this machine what README says is supported.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(parts)}; all by default")
    parser.add_argument("--only", action="append", metavar="VERSION", help="a version, such as 3.12; may be repeated")
    asked = parser.parse_args()
    versions = [proof.only for proof in proofs]
    for given, known in ((asked.parts, parts), (asked.only or (), versions)):
        if unknown := set(given) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    end_steps_with_this_process()
    # A step that is stopped shall leave stacks, not core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines, is_good = run_proofs(
        proofs, lambda proof: proof.part in (asked.parts or parts) and proof.only in (asked.only or versions)
    )
    print(*lines, sep="\n")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
