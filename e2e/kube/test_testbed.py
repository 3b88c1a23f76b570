"""The test cluster leaves nothing behind, however it ends."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from testbed.certificates import CLIENTS
from testbed.cleanup import clean
from testbed.client import send
from testbed.errors import MissingError, TestbedError
from testbed.images import Image, make_python_image, write_image
from testbed.packages import install_packages
from testbed.settings import make_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.settings import Settings

PORT = 16500
HERE = Path(__file__).parent


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Settings]:
    """Settings of another cluster, without a real node."""
    settings = make_settings(folder=tmp_path / "kube", first_port=PORT, has_real_node=False)
    yield settings
    clean(settings)


@pytest.fixture
def program(small: Settings, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that runs a cluster until it is stopped."""
    code = """
import signal, sys
from pathlib import Path
from testbed.cluster import run_testbed
from testbed.settings import make_settings
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it from birth
with run_testbed(make_settings(folder=Path(sys.argv[1]), first_port=int(sys.argv[2]), has_real_node=False)) as testbed:
    print("up", flush=True)
    signal.pause()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(small.folder), str(PORT)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        start_new_session=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def programs_of(settings: Settings) -> list[str]:
    """Lists command lines that name the cluster's folder. The reaper's is among them while it runs."""
    found = []
    for process in psutil.process_iter(["cmdline", "status", "pid"]):
        command = " ".join(process.info["cmdline"] or [])
        if (
            str(settings.folder) in command
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and "-c" not in command.split()
        ):
            found.append(command)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_its_program_ends(
    small: Settings, program: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert len(programs_of(small)) >= 5
    program.send_signal(number)
    program.wait(180)
    deadline = time.monotonic() + 60
    while programs_of(small) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert programs_of(small) == []
    assert [path.name for path in small.folder.iterdir()] == ["logs"]


def test_a_second_cluster_in_one_folder_is_refused(small: Settings, program: subprocess.Popen[str]) -> None:
    from testbed.cluster import run_testbed  # noqa: PLC0415 - after the first one runs

    assert program.poll() is None
    with pytest.raises(TestbedError, match="another test cluster holds"), run_testbed(small):
        pass
    assert len(programs_of(small)) >= 5


def test_a_reused_pid_is_left_alone(small: Settings) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    small.pids.mkdir(parents=True)
    (small.pids / "etcd").write_text(f'{{"pid": {other.pid}, "created": 1.0}}')
    clean(small)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_node_is_refused_without_root() -> None:
    code = "import os; from testbed.packages import install_packages; os.setuid(65534); install_packages()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert MissingError.__name__ in done.stderr
    assert "needs root" in done.stderr
    install_packages()  # as root, and everything is there: nothing to do


def test_an_image_is_reproducible(tmp_path: Path) -> None:
    image = make_python_image("docker.io/local/python:1")
    write_image(image, tmp_path / "one.tar")
    write_image(image, tmp_path / "two.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_an_image_has_the_libraries_of_its_programs(tmp_path: Path) -> None:
    write_image(Image(name="a:1", command=("/bin/ls",), files={"/bin/ls": Path("/bin/ls")}), tmp_path / "image.tar")
    subprocess.run(["tar", "-xf", "image.tar"], cwd=tmp_path, check=True)
    names = subprocess.run(
        ["tar", "-tf", "layer-0.tar"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert {"bin/ls", "etc/passwd", "tmp/"} <= set(names.split())
    assert any(name.endswith("/libc.so.6") for name in names.split())


def test_images_of_one_base_share_its_layer(tmp_path: Path) -> None:
    base = Image(name="a:1", command=("/bin/sh",), files={"/bin/sh": Path("/bin/sh").resolve()})
    image = Image(name="b:1", command=("/bin/ls",), files={"/bin/ls": Path("/bin/ls")}, base=base)
    write_image(base, tmp_path / "base.tar")
    write_image(image, tmp_path / "image.tar")
    with tarfile.open(tmp_path / "base.tar") as one, tarfile.open(tmp_path / "image.tar") as other:
        assert read_member(one, "layer-0.tar") == read_member(other, "layer-0.tar")
        with tarfile.open(fileobj=io.BytesIO(read_member(other, "layer-1.tar"))) as layer:
            own = layer.getnames()
        config = json.loads(read_member(other, "config.json"))
        digests = [hashlib.sha256(read_member(other, f"layer-{number}.tar")).hexdigest() for number in (0, 1)]
    assert "bin/ls" in own
    assert not any(name.endswith("/libc.so.6") for name in own)
    assert config["rootfs"]["diff_ids"] == [f"sha256:{digest}" for digest in digests]


def read_member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"HTTP/1.1 2", b""], ids=repr)
def test_answer_that_breaks_off_is_a_connection_error(answer: bytes) -> None:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match=r"."):
            send(urllib.request.Request(f"http://127.0.0.1:{server.getsockname()[1]}/readyz"))
        thread.join()


def test_private_keys_are_private(testbed: object) -> None:
    settings = testbed.settings  # type: ignore[attr-defined]
    private = [*settings.pki.glob("*.key"), *(settings.kubeconfig(name) for name in CLIENTS)]
    assert len(private) > 10
    assert {path.stat().st_mode & 0o077 for path in private} == {0}
