"""Publishes a release, in the order in which clients may need it: images, then the chart that names them, then files.

    .venv/bin/python .ci/release_files.py publish --registry ghcr.io/team      # release.yml, after `make`

The workflow does this at the true registry, with keyless signatures. `release_rehearsal.py` does the same at a registry
on this machine, with a key of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from release_commands import run

if TYPE_CHECKING:
    from pathlib import Path

# Names of the images, each with the suffix of its tags: what the `images` job of release.yml pushes.
IMAGES = (("sluice-operator", ""), ("sluice-router", ""), ("sluice-engine", ""), ("sluice-engine", "-cpu"))
ARCHITECTURES = ("amd64", "arm64")
SIGNATURE = ".sigstore.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Where a release goes, and what brings it there.

    Args:
        version: The version.
        registry: Registry and path of the images.
        helm: The program helm.
        buildx: Command of buildx.
        cosign: The program cosign.
        signing: Options of every signature; keyless without any.
        registry_signing: More options where cosign reaches the registry.
        push_options: Options of `helm push`.
    """

    version: str
    registry: str
    helm: str
    buildx: tuple[str, ...]
    cosign: str
    signing: tuple[str, ...] = ()
    registry_signing: tuple[str, ...] = ()
    push_options: tuple[str, ...] = ()

    def list_images(self) -> list[str]:
        """References of the images, as the chart and `docker pull` have them."""
        return [f"{self.registry}/{name}:{self.version}{suffix}" for name, suffix in IMAGES]

    @property
    def chart(self) -> str:
        """Reference of the chart."""
        return f"{self.registry}/charts/sluice:{self.version}"

    def publish_images(self) -> None:
        """Gives the images of both architectures one name, and signs it."""
        for image in self.list_images():
            parts = [f"{image}-{architecture}" for architecture in ARCHITECTURES]
            run(*self.buildx, "imagetools", "create", "--tag", image, *parts)
            self._sign(image)

    def push_chart(self, package: Path) -> None:
        """Pushes and signs the chart."""
        repository = self.chart.rpartition("/")[0]
        run(self.helm, "push", *self.push_options, str(package), f"oci://{repository}")
        self._sign(self.chart)

    def sign_files(self, folder: Path) -> None:
        """Signs every file of a folder but hidden ones, as the release takes them; a signature lies beside its file."""
        for file in sorted(folder.glob("[!.]*")):
            bundle = ("--bundle", f"{file}{SIGNATURE}")
            run(self.cosign, "sign-blob", "--yes", *self.signing, *bundle, str(file))

    def _sign(self, reference: str) -> None:
        """Signs what a reference names now: a tag could move in between."""
        digest = run(*self.buildx, "imagetools", "inspect", reference, "--format", "{{.Manifest.Digest}}").strip()
        signed = f"{reference.rpartition(':')[0]}@{digest}"
        run(self.cosign, "sign", "--yes", *self.signing, *self.registry_signing, signed)
