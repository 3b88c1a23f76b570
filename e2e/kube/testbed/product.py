"""The product's images, made without a container engine: what the Dockerfiles install, with user and entry points.

Operator and router have environments at the Dockerfiles' path. They are installed from the hashes of ``requirements/``
and from the wheel that ``make`` built. The engine's environment (vLLM, 5.5 GB) is not copied: a link leads to the
checkout's own environment, which pods mount from a volume.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from testbed.errors import MissingError, TestbedError
from testbed.images import SEARCH_PATH, Image, find_library, find_program, make_python_image
from testbed.settings import ROOT

# Folder of an image's environment in the Dockerfiles.
ENVIRONMENT = "/opt/sluice"
WHEELS = ROOT / "build" / "wheel"
# Programs that vLLM runs and libraries that it loads.
VLLM_NEEDS = ("libnuma.so.1",)
VLLM_RUNS = ("lscpu",)


def make_service_image(name: str, part: str, folder: Path) -> Image:
    """Makes the image of the operator or of the router.

    Args:
        name: Name with tag.
        part: ``operator`` or ``router``.
        folder: Where its environment is installed first.

    Raises:
        MissingError: The wheel is not built.
        TestbedError: The installation failed.
    """
    return _make_image(name, part, trees={ENVIRONMENT: install_environment(part, folder)})


def make_engine_image(name: str) -> Image:
    """Makes the image of the engine without GPUs; a volume mounts the checkout at its own path."""
    # The image has no compiler, and compiling a tiny model would gain nothing.
    environment = {"TORCH_COMPILE_DISABLE": "1"}
    links = {ENVIRONMENT: str(ROOT / ".venv")}
    return _make_image(name, "engine", programs=VLLM_RUNS, libraries=VLLM_NEEDS, links=links, environment=environment)


def _make_image(
    name: str,
    part: str,
    *,
    programs: tuple[str, ...] = (),
    libraries: tuple[str, ...] = (),
    trees: dict[str, Path] | None = None,
    links: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
) -> Image:
    python = make_python_image(name)
    files = [*map(find_program, programs), *map(find_library, libraries)]
    return Image(
        name=name,
        base=python,
        command=("python", "-m", f"sluice_{part}"),
        files={str(path): path.resolve() for path in files},
        trees=trees or {},
        links=links or {},
        environment={
            **python.environment,
            "PATH": f"{ENVIRONMENT}/bin:{SEARCH_PATH}",
            "HOME": "/tmp",
            **(environment or {}),
        },
    )


def install_environment(part: str, folder: Path) -> Path:
    """Installs what the Dockerfile of a part installs; returns the folder."""
    wheels = sorted(WHEELS.glob("*.whl"))
    if len(wheels) != 1:
        raise MissingError(f"{WHEELS} holds {len(wheels)} wheels instead of one; run `make build/compiled/stamp`")
    uv = Path(sys.executable).with_name("uv")
    python = ("--python", str(folder / "bin" / "python"))
    install = [str(uv), "pip", "install", "--quiet", *python, "--no-deps", "--compile-bytecode"]
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    _run(*install, "--require-hashes", "-r", str(ROOT / "requirements" / f"{part}.txt"))
    _run(*install, "--offline", str(wheels[0]))
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(command[:4])} failed:\n{done.stderr[-4000:]}")
