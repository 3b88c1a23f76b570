"""Stand-ins for the base images of the product's images, on machines that reach no container registry.

The Dockerfiles name ``python:<version>-<debian>`` and its slim variant. A stand-in has the same Debian, from its
packages, and a CPython of this machine in /usr/local, where those images have theirs. Its minor version is the same if
this machine has one. So layout and system are those that users get, but not every byte.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from testbed.builder import Build, Builder
from testbed.errors import MissingError, TestbedError
from testbed.packages import install_packages
from testbed.settings import find_cache

PACKAGES = {"mmdebstrap": "mmdebstrap", "runc": "runc"}
DOCKERFILE = Path(__file__).parents[1] / "bases" / "Dockerfile"
# Debian's own slim images leave out the same files.
LEFT_OUT = ("path-exclude=/usr/share/doc/*", "path-exclude=/usr/share/man/*", "path-exclude=/usr/share/locale/*")
# Left out of CPython: what its slim images leave out, packages of this machine, and bytecode.
NOT_PACKED = {"test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "__pycache__"}
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bases:
    """The base images that a Dockerfile names by default.

    Args:
        full: Name of the image with compilers.
        slim: Name of the image without.
    """

    full: str
    slim: str

    @property
    def python(self) -> str:
        """Version of CPython."""
        return self.slim.partition(":")[2].partition("-")[0]

    @property
    def debian(self) -> str:
        """Name of the Debian release."""
        return self.slim.rpartition("-")[2]


def read_bases(dockerfile: Path) -> Bases:
    """Reads the base images of one of the product's Dockerfiles."""
    defaults = dict(re.findall(r"^ARG (\w+_BASE)=(\S+)$", dockerfile.read_text(), re.MULTILINE))
    return Bases(full=defaults["BUILD_BASE"], slim=defaults["RUN_BASE"])


def make_bases(builder: Builder, bases: Bases, folder: Path) -> dict[str, Path]:
    """Makes stand-ins.

    Args:
        builder: Builds them.
        bases: Names of the images to stand in for.
        folder: Where the stand-ins are put.

    Returns:
        OCI layouts by the names of the images that they stand in for.

    Raises:
        MissingError: This machine lacks root, apt, or a CPython that can be copied.
        TestbedError: They cannot be made.
    """
    install_packages(PACKAGES)
    context = folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    (context / "etc").mkdir(parents=True)
    shutil.copy(_fetch_debian(bases.debian), context / "debian.tar")
    python = find_python(bases.python)
    _pack_python(python, context / "python.tar")
    _write_configuration(context / "etc")
    print(
        f"bases: Debian {bases.debian} from its packages, CPython of {python}, for {bases.slim} and {bases.full}",
        flush=True,
    )
    made = {}
    for name, target in ((bases.slim, "slim"), (bases.full, "full")):
        made[name] = folder / target
        builder.build(Build(dockerfile=DOCKERFILE, context=context, target=target), layout=made[name])
    shutil.rmtree(context)
    return made


def find_python(version: str) -> Path:
    """Finds the prefix of a CPython that can be copied: one with a folder of its own.

    Args:
        version: Version such as ``3.12.12``. A CPython of the same minor version goes before the one that runs this.

    Raises:
        MissingError: This machine has none.
    """
    minor = ".".join(version.split(".")[:2])
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [*sorted(root.glob(f"versions/{minor}.*"), reverse=True), Path(sys.base_prefix)]
    for prefix in candidates:
        if prefix != Path("/usr") and list(prefix.glob("lib/python3.*/os.py")):
            return prefix
    raise MissingError(
        f"no CPython of {candidates} can be copied; install {minor} with pyenv, or run this with a Python outside /usr"
    )


def _fetch_debian(release: str) -> Path:
    """A minimal Debian as a tar archive, kept between runs."""
    cached = find_cache("bases") / f"{release}.tar"
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        # This machine's mirrors if they serve this release, otherwise mmdebstrap's own.
        is_same = SOURCES.is_file() and release in SOURCES.read_text()
        new = cached.with_name(f"new-{cached.name}")
        options = ["--quiet", "--mode=root", "--variant=minbase", *(f"--dpkgopt={option}" for option in LEFT_OUT)]
        command = ["mmdebstrap", *options, release, str(new), *([str(SOURCES)] if is_same else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise TestbedError(f"mmdebstrap failed:\n{done.stderr[-2000:]}")
        new.rename(cached)
    return cached


def _pack_python(prefix: Path, archive: Path) -> None:
    def keep(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = Path(entry.name)
        parts = path.parts
        is_foreign = "site-packages" in parts[:-1] and not parts[parts.index("site-packages") + 1].startswith("pip")
        if NOT_PACKED & set(parts) or path.suffix in (".a", ".pyc") or is_foreign:
            return None
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    with tarfile.open(archive, "w") as packed:
        for name in ("bin", "include", "lib"):
            packed.add(prefix / name, name, filter=keep)


def _write_configuration(folder: Path) -> None:
    """Writes how build stages reach package registries from this machine: certificates and index."""
    (folder / "ssl" / "certs").mkdir(parents=True)
    (folder / "uv").mkdir()
    shutil.copy(os.environ.get("SSL_CERT_FILE") or CERTIFICATES, folder / "ssl" / "certs" / CERTIFICATES.name)
    ask = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX") or done.stdout.strip()
    (folder / "pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}\n" + (f"index-url = {index}\n" if index else ""))
    table = f'[[index]]\nurl = "{index}"\ndefault = true\n' if index else ""
    (folder / "uv" / "uv.toml").write_text(f"native-tls = true\n{table}")
