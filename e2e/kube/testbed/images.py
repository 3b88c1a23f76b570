"""Container images from files of this machine, without a registry or a daemon.

An image has one layer on top of those of its base: the named files, and the shared libraries that programs among them
need. Name images ``docker.io/local/<name>:<tag>`` and use the pull policy Never or IfNotPresent.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import MissingError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

USER = 65532
ELF = b"\x7fELF"
LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(", re.MULTILINE)
FOLDERS = {"tmp": 0o1777, "etc": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755}
ACCOUNTS = {
    "etc/passwd": f"root:x:0:0:root:/:/sbin/nologin\nnonroot:x:{USER}:{USER}:nonroot:/tmp:/sbin/nologin\n",
    "etc/group": f"root:x:0:\nnonroot:x:{USER}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
# Parts of Python that no program in these images runs.
UNUSED = ("test", "tests", "idlelib", "ensurepip", "turtledemo", "site-packages")
# What binary wheels expect of every system (PEP 600), in addition to what Python itself loads.
WHEELS_NEED = (
    *("libpthread.so.0", "libdl.so.2", "libutil.so.1", "librt.so.1", "libm.so.6", "libz.so.1"),
    *("libgcc_s.so.1", "libstdc++.so.6"),
)
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What an image contains and runs.

    Args:
        name: Name with tag.
        command: Entry point and arguments.
        files: Path on this machine by path in the image. Folders come with all below but unused parts of Python.
        trees: Like ``files``, with nothing left out; for Python environments.
        links: Symbolic links: target by path in the image.
        environment: Environment variables.
        user: User and group id. Numeric, because Kubernetes checks ``runAsNonRoot`` by the number.
        base: Image whose layers come first; only its files count. Images of one base share them on a node.
    """

    name: str
    command: tuple[str, ...]
    files: Mapping[str, Path]
    trees: Mapping[str, Path] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    user: int = USER
    base: Image | None = None


def make_pause_image(path: Path) -> Image:
    """Makes the image that holds a pod's namespaces open; ``path`` is the folder of the binaries."""
    return Image(name="docker.io/local/pause:1", command=("/pause",), files={"/pause": path / "pause"})


def make_python_image(name: str) -> Image:
    """Makes an image with the Python that runs this, at the path that it has here, without any package.

    A virtual environment of this machine works in it when mounted at its own path.

    Args:
        name: Name with tag.

    Raises:
        MissingError: This machine lacks a library that binary wheels expect.
    """
    python = Path(sys.executable).resolve()
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    # A virtual environment may refer to Python by another name in the same folder.
    others = [python.with_name(name) for name in ("python", "python3") if python.with_name(name).exists()]
    files = [python, *others, standard, *map(find_library, WHEELS_NEED)]
    return Image(
        name=name,
        command=("python",),
        files={str(path): path.resolve() for path in files} | {"/bin/sh": Path("/bin/sh").resolve()},
        links={"/usr/local/bin/python": str(python)},
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"},
    )


def find_program(name: str) -> Path:
    """Finds a program of this machine.

    Raises:
        MissingError: It is not on PATH.
    """
    found = shutil.which(name)
    if found is None:
        raise MissingError(f"program {name} is not on PATH; install it")
    return Path(found)


def find_library(name: str) -> Path:
    """Finds a shared library of this machine, such as ``libnuma.so.1``.

    Raises:
        MissingError: ``ldconfig`` does not know it.
    """
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    match = re.search(rf"^\s*{re.escape(name)} .* => (/\S+)$", known, re.MULTILINE)
    if match is None:
        raise MissingError(f"library {name} is not known to ldconfig; install it")
    return Path(match[1])


def write_image(image: Image, path: Path) -> None:
    """Writes an image as an archive that ``ctr images import`` and ``docker load`` can read.

    Args:
        image: The image.
        path: The archive.
    """
    layers = _make_layers(image)
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {
            "Entrypoint": list(image.command),
            "Env": [f"{name}={value}" for name, value in ({"PATH": SEARCH_PATH} | dict(image.environment)).items()],
            "User": f"{image.user}:{image.user}",
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]},
    }
    names = [f"layer-{number}.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": [image.name], "Layers": names}]
    with tarfile.open(path, "w") as archive:
        for name, content in (("config.json", json.dumps(config)), ("manifest.json", json.dumps(manifest))):
            _add_bytes(archive, name, content.encode())
        for name, layer in zip(names, layers, strict=True):
            _add_bytes(archive, name, layer)


def _make_layers(image: Image) -> list[bytes]:
    """Makes the layers of the image's bases, then its own."""
    return [*(_make_layers(image.base) if image.base else ()), _make_layer(image)]


def _make_layer(image: Image) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as layer:
        folders = _Folders(layer)
        for name, mode in FOLDERS.items():
            folders.add(name, mode)
        for name, text in ACCOUNTS.items():
            _add_bytes(layer, name, text.encode())
        for link, target in image.links.items():
            folders.add_parents(link)
            entry = tarfile.TarInfo(link.lstrip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            layer.addfile(entry)
        for inside, outside in sorted(_with_libraries(image).items()):
            folders.add_parents(inside)
            # Files keep their times: Python takes bytecode for stale when its source has another second.
            layer.add(outside, inside.lstrip("/"), recursive=False, filter=_owned_by_root)
    return content.getvalue()


class _Folders:
    """Adds each folder to a layer once, before its contents."""

    def __init__(self, layer: tarfile.TarFile) -> None:
        self._layer = layer
        self._added: set[str] = set()

    def add(self, name: str, mode: int = 0o755) -> None:
        if name in self._added:
            return
        self._added.add(name)
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        self._layer.addfile(entry)

    def add_parents(self, path: str) -> None:
        for folder in reversed(Path(path.lstrip("/")).parents[:-1]):
            self.add(str(folder))


def _with_libraries(image: Image) -> dict[str, Path]:
    """Lists the files below the named ones, and the libraries that programs among them load; not those of the base."""
    found: dict[str, Path] = {}
    for folders, left_out in ((image.files, UNUSED), (image.trees, ())):
        for inside, outside in folders.items():
            for path in _walk(outside, left_out):
                found[f"{inside}{str(path)[len(str(outside)) :]}"] = path
    for path in list(found.values()):
        for library in _libraries(path):
            found.setdefault(str(library), library.resolve())
    below = _with_libraries(image.base) if image.base else {}
    return {inside: path for inside, path in found.items() if inside not in below}


def _walk(path: Path, left_out: Collection[str]) -> Iterator[Path]:
    if not path.is_dir() or path.is_symlink():
        yield path
        return
    for child in sorted(path.iterdir()):
        if child.name not in left_out and child.suffix != ".a":
            yield from _walk(child, left_out)


@functools.cache
def _libraries(path: Path) -> list[Path]:
    if path.is_symlink() or not path.is_file():
        return []
    with path.open("rb") as file:
        if file.read(len(ELF)) != ELF:
            return []
    done = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)  # fails for static programs
    return [Path(match) for match in LIBRARY.findall(done.stdout)]


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode |= 0o444
    entry.mtime = int(entry.mtime)  # fractions would take a header of their own for each file
    return entry


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))
