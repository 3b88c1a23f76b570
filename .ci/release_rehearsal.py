"""Rehearses the publication of a release at a registry on this machine, and verifies what came of it.

Stand-ins take the place of the images: each an index with one file for one architecture, and an attestation beside it,
as BuildKit pushes them. The rest is what is released. Signatures are by a key that is made for it, in no public log.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from publication import ARCHITECTURES, SIGNATURE, Publication
from release_commands import ReleaseError, run
from release_programs import build_program

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 20.0
# No public log, no authorities, none to ask for: only the key counts.
SIGSTORE = {
    "signing-config": {"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json"},
    "trusted-root": {"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"},
}
OCI = "application/vnd.oci.image"


def rehearse(output: Path, helm: str, version: str) -> None:
    """Publishes at a registry of this machine, and verifies it.

    Args:
        output: Folder of the files; it gets their signatures.
        helm: The program helm.
        version: Their version.

    Raises:
        ReleaseError: A step failed, or what was published is not what it should be.
    """
    crane, cosign = (str(build_program(name)) for name in ("crane", "cosign"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = make_key(cosign, folder)
        signing = ["--key", f"{key}.key"]
        for option, content in SIGSTORE.items():
            (folder / option).write_text(json.dumps(content))
            signing += [f"--{option}", str(folder / option)]
        with run_registry(crane, folder) as host:
            publication = Publication(
                version=version,
                registry=f"{host}/team",
                helm=helm,
                buildx=(str(build_program("buildx")),),
                cosign=cosign,
                signing=tuple(signing),
                registry_signing=("--allow-http-registry",),
                push_options=("--plain-http",),
            )
            push_stand_ins(crane, folder, publication)
            publication.publish_images()
            publication.push_chart(output / f"sluice-{version}.tgz")
            publication.sign_files(output)
            check(publication, crane, Path(f"{key}.pub"), output)


def make_key(cosign: str, folder: Path) -> Path:
    """Makes a pair of keys, and returns their path without its suffix."""
    # Whoever starts a rehearsal types no password.
    os.environ["COSIGN_PASSWORD"] = ""
    run(cosign, "generate-key-pair", "--output-key-prefix", str(folder / "release"))
    return folder / "release"


@contextlib.contextmanager
def run_registry(crane: str, folder: Path) -> Iterator[str]:
    """Runs a registry for the length of the block, and yields its host and port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"localhost:{free.getsockname()[1]}"
    (folder / "blobs").mkdir()
    command = [crane, "registry", "serve", "--address", host, "--disk", str(folder / "blobs")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as registry:
        try:
            wait_for_registry(f"http://{host}/v2/")
            yield host
        finally:
            registry.terminate()


def wait_for_registry(address: str) -> None:
    """Waits until a registry answers.

    Raises:
        ReleaseError: It does not.
    """
    end = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(address, timeout=1).close()
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > end:
                raise ReleaseError(f"no registry answers at {address}: {error}") from error
            time.sleep(0.1)
        else:
            return


def push_stand_ins(crane: str, folder: Path, publication: Publication) -> None:
    """Pushes what the workflow's jobs push for each architecture."""
    for architecture in ARCHITECTURES:
        layout = folder / architecture
        write_layout(layout, architecture)
        for image in publication.list_images():
            run(crane, "push", "--index", str(layout), f"{image}-{architecture}")


def write_layout(folder: Path, architecture: str) -> None:
    """Writes an OCI layout: an image of one file, and an attestation that names it, as BuildKit writes them."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def keep(kind: str, content: bytes, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content), **more}

    def keep_manifest(platform: dict[str, str], layer: dict[str, Any], diff: bytes, **more: Any) -> dict[str, Any]:
        diffs = [f"sha256:{hashlib.sha256(diff).hexdigest()}"]
        config = {**platform, "config": {}, "rootfs": {"type": "layers", "diff_ids": diffs}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": keep(f"{OCI}.config.v1+json", json.dumps(config).encode()),
            "layers": [layer],
        }
        return keep(f"{OCI}.manifest.v1+json", json.dumps(manifest).encode(), platform=platform, **more)

    tar = tar_file("architecture", architecture.encode())
    image = keep_manifest({"os": "linux", "architecture": architecture}, keep(f"{OCI}.layer.v1.tar", tar), tar)
    statement = json.dumps({"_type": "https://in-toto.io/Statement/v0.1", "subject": [image["digest"]]}).encode()
    attestation = keep_manifest(
        {"os": "unknown", "architecture": "unknown"},
        keep("application/vnd.in-toto+json", statement),
        statement,
        annotations={
            "vnd.docker.reference.type": "attestation-manifest",
            "vnd.docker.reference.digest": image["digest"],
        },
    )
    index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [image, attestation]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def tar_file(name: str, content: bytes) -> bytes:
    """Packs a file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        information = tarfile.TarInfo(name)
        information.size = len(content)
        archive.addfile(information, io.BytesIO(content))
    return packed.getvalue()


def check(publication: Publication, crane: str, public_key: Path, output: Path) -> None:
    """Checks what clients find: images for each architecture, the chart, and signatures of all.

    Raises:
        ReleaseError: Something is not what it should be, or its signature is not ours.
    """
    trust = ("--key", str(public_key), "--insecure-ignore-tlog=true")
    for image in publication.list_images():
        index = json.loads(run(crane, "manifest", image))
        platforms = [part["platform"]["architecture"] for part in index["manifests"]]
        if sorted(platforms) != [*ARCHITECTURES, "unknown", "unknown"]:
            raise ReleaseError(f"{image} is for {platforms}, must be for {ARCHITECTURES} with an attestation of each")
        for architecture in ARCHITECTURES:
            if run(crane, "export", "--platform", f"linux/{architecture}", image, "-").find(architecture) < 0:
                raise ReleaseError(f"{image} is not what was pushed for {architecture}")
    for reference in (*publication.list_images(), publication.chart):
        run(publication.cosign, "verify", *trust, "--allow-http-registry", reference)
    check_chart(publication, output)
    for signature in output.glob(f"*{SIGNATURE}"):
        signed = str(signature).removesuffix(SIGNATURE)
        run(publication.cosign, "verify-blob", *trust, "--bundle", str(signature), signed)


def check_chart(publication: Publication, output: Path) -> None:
    """Checks that helm pulls the chart that was pushed.

    Raises:
        ReleaseError: It is another one.
    """
    with tempfile.TemporaryDirectory() as folder:
        chart, _, version = publication.chart.rpartition(":")
        pull = (publication.helm, "pull", "--plain-http", f"oci://{chart}", "--version", version)
        run(*pull, "--destination", folder)
        name = f"sluice-{version}.tgz"
        if (Path(folder) / name).read_bytes() != (output / name).read_bytes():
            raise ReleaseError(f"{publication.chart} is not {name}")
