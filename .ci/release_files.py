"""Makes the files of a release and checks them; .github/workflows/release.yml publishes what this makes.

    .venv/bin/python .ci/release_files.py check                      # what `make release-check` runs
    .venv/bin/python .ci/release_files.py make --tag v0.1.0 --registry ghcr.io/team --site https://github.com/team/sluice
    .venv/bin/python .ci/release_files.py publish --tag v0.1.0 --registry ghcr.io/team

The files are a wheel, its source, the chart, and an SBOM for each image. All of them are made from what git tracks, and
their version is the one of pyproject.toml.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml
from publication import Publication
from release_commands import ReleaseError, run
from release_programs import MissingGoError, build_program
from release_rehearsal import rehearse
from sbom import write_sbom

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
OUTPUT = ROOT / "build" / "release"
DOCKERFILES = ("operator/Dockerfile", "router/Dockerfile", "engine_image/Dockerfile")
# The locks that images install; the engine has one for GPUs and one without.
IMAGES = ("operator", "router", "engine", "engine-cpu")
# What `check` releases to, and never reaches.
REGISTRY, SITE = "registry.example.com/team", "https://example.com/sluice"
# Programs of the operator's image start with its lock and the wheel alone.
INSTALLED = """
import importlib.metadata, sluice_core.scheduling.engine_table as core
assert core.__file__.endswith(".so"), core.__file__
print(importlib.metadata.version("sluice-serve"))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What the files of a release name.

    Args:
        version: The version.
        registry: Registry and path of the images.
        site: Address of the repository; its pages at this version's tag are at SITE/blob/TAG.
    """

    version: str
    registry: str
    site: str

    @property
    def runbook(self) -> str:
        """Address of the runbook."""
        return f"{self.site}/blob/v{self.version}/docs/guides/runbook.md"


def read_version() -> str:
    """Reads the version: the one place where it is set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def check_tag(tag: str) -> str:
    """Returns the version of a tag.

    Raises:
        ReleaseError: The tag is not the one of pyproject.toml's version.
    """
    version = read_version()
    if tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, and pyproject.toml has version {version}; tag v{version}, or change it")
    return version


def export_tracked(folder: Path) -> Path:
    """Writes the files of the last commit into a folder, as a runner checks them out."""
    archive = folder / "tracked.tar"
    run("git", "-C", str(ROOT), "archive", "--output", str(archive), "HEAD")
    source = folder / "source"
    with tarfile.open(archive) as opened:
        opened.extractall(source, filter="data")
    return source


def list_copies(dockerfile: str, stage: str | None = None) -> list[str]:
    """Lists what a Dockerfile copies from its build context.

    Args:
        dockerfile: Its text.
        stage: One of its stages; all when None.
    """
    found: list[str] = []
    name = ""
    for line in re.sub(r"\\\n", " ", dockerfile).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["FROM"]:
            name = words[-1]
        elif words[:1] == ["COPY"] and not words[1].startswith("--from") and stage in (None, name):
            found += words[1:-1]
    return found


def check_contexts(source: Path) -> None:
    """Checks that images can be built from the files that git tracks.

    Raises:
        ReleaseError: A Dockerfile copies what is not tracked.
    """
    for path in DOCKERFILES:
        for copied in list_copies((source / path).read_text()):
            variants = [copied.replace("${ENGINE}", name) for name in ("engine", "engine-cpu")]
            missing = [variant for variant in variants if not (source / variant).exists()]
            if missing:
                raise ReleaseError(f"{path} copies {missing[0]}, which git does not track")


def build_packages(source: Path, output: Path) -> Path:
    """Builds wheel and source archive from what the images' wheel stage copies, and returns the wheel."""
    context = source.parent / "context"
    for copied in list_copies((source / DOCKERFILES[0]).read_text(), "wheel"):
        target = context / copied
        target.parent.mkdir(parents=True, exist_ok=True)
        if (source / copied).is_dir():
            shutil.copytree(source / copied, target)
        else:
            shutil.copy2(source / copied, target)
    run(str(BIN / "uv"), "build", "--quiet", "--python", sys.executable, "--out-dir", str(output), str(context))
    (wheel,) = output.glob("*.whl")
    return wheel


def package_chart(source: Path, output: Path, helm: str, release: Release) -> Path:
    """Packages the chart, which then names images and runbook of its release, and returns the archive."""
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder) / "sluice"
        shutil.copytree(source / "helm" / "sluice", chart)
        values = (chart / "values.yaml").read_text()
        for name, value in (("registry", release.registry), ("runbookUrl", release.runbook)):
            if values.count(f'{name}: ""\n') != 1:
                raise ReleaseError(f'helm/sluice/values.yaml must have the line {name}: "" once')
            values = values.replace(f'{name}: ""\n', f"{name}: {value}\n")
        (chart / "values.yaml").write_text(values)
        version = ("--version", release.version, "--app-version", release.version)
        run(helm, "package", str(chart), "--destination", str(output), *version)
    return output / f"sluice-{release.version}.tgz"


def check_wheel(wheel: Path, version: str) -> None:
    """Installs the wheel as the operator's image does, and starts its programs.

    Raises:
        ReleaseError: It has another version, is not compiled, or a program does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = str(Path(folder) / "bin" / "python")
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        install = [str(BIN / "uv"), "pip", "install", "--quiet", "--python", python, "--no-deps"]
        run(*install, "--require-hashes", "-r", str(ROOT / "requirements" / "operator.txt"))
        run(*install, "--offline", str(wheel))
        # -I: a PYTHONPATH of the caller would name the checkout.
        found = run(python, "-I", "-c", INSTALLED).strip()
        if found != version:
            raise ReleaseError(f"{wheel.name} installs version {found}, must be {version}")
        run(python, "-I", "-m", "sluice_operator", "--help")


def check_chart(package: Path, helm: str, release: Release) -> None:
    """Renders the packaged chart, and checks that it names what the release makes.

    Raises:
        ReleaseError: It names another image, another version, or another runbook.
    """
    rendered = run(helm, "template", "sluice", str(package), "--set", "prometheusRule.enabled=true")
    objects = [item for item in yaml.safe_load_all(rendered) if item]
    (deployment,) = (item for item in objects if item["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = dict(argument.partition("=")[::2] for argument in container["args"])
    images = [container["image"], arguments["--engine-image"], arguments["--router-image"]]
    expected = [f"{release.registry}/sluice-{part}:{release.version}" for part in ("operator", "engine", "router")]
    if images != expected:
        raise ReleaseError(f"the chart names the images {images}, must be {expected}")
    if deployment["metadata"]["labels"]["app.kubernetes.io/version"] != release.version:
        raise ReleaseError(f"the chart is not of version {release.version}")
    (rules,) = (item["spec"] for item in objects if item["kind"] == "PrometheusRule")
    links = [rule["annotations"].get("runbook_url", "") for group in rules["groups"] for rule in group["rules"]]
    if not all(link.startswith(f"{release.runbook}#") for link in links):
        raise ReleaseError(f"alerts link to {links[0]!r}, must be {release.runbook}")
    if arguments["--runbook-url"] != release.runbook:
        raise ReleaseError(f"conditions link to {arguments['--runbook-url']!r}, must be {release.runbook}")


def make(output: Path, helm: str, release: Release) -> None:
    """Makes all files, and checks them."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        source = export_tracked(Path(folder))
        check_contexts(source)
        wheel = build_packages(source, output)
        package = package_chart(source, output, helm, release)
        for image in IMAGES:
            lock = (source / "requirements" / f"{image}.txt").read_text()
            write_sbom(output / f"sluice-{image}-{release.version}.cdx.json", f"sluice-{image}", release.version, lock)
    check_wheel(wheel, release.version)
    check_chart(package, helm, release)


def publish(output: Path, helm: str, release: Release) -> None:
    """Publishes images that are pushed for each architecture, the chart, and signatures of these and of all files."""
    publication = Publication(
        version=release.version,
        registry=release.registry,
        helm=helm,
        buildx=("docker", "buildx"),
        cosign=str(build_program("cosign")),
    )
    publication.publish_images()
    publication.push_chart(output / f"sluice-{release.version}.tgz")
    publication.sign_files(output)


def find_helm() -> str:
    """Finds helm on the path, or the one that tests on Kubernetes have built."""
    built = sorted((Path.home() / ".cache" / "sluice" / "kube").glob("*/helm"))
    return shutil.which("helm") or (str(built[-1]) if built else "helm")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Makes, checks and publishes the files of a release.")
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("check", help="make all files, and publish them at a registry on this machine")
    options = {
        "tag": "v and the version of pyproject.toml",
        "registry": "registry and path of the images",
        "site": "address of the repository",
    }
    making = commands.add_parser("make", help="make the files of a tag")
    publishing = commands.add_parser("publish", help="publish and sign what `make` made, and the images of the tag")
    for command, names in ((making, ("tag", "registry", "site")), (publishing, ("tag", "registry"))):
        for name in names:
            command.add_argument(f"--{name}", required=True, help=options[name])
    for command in commands.choices.values():
        command.add_argument("--helm", default=find_helm(), help="the program helm")
    return parser.parse_args()


def main() -> None:
    """Runs the command line."""
    given = parse_arguments()
    try:
        if given.what == "check":
            release = Release(version=read_version(), registry=REGISTRY, site=SITE)
            make(OUTPUT, given.helm, release)
            rehearse(OUTPUT, given.helm, release.version)
        elif given.what == "make":
            release = Release(version=check_tag(given.tag), registry=given.registry.lower(), site=given.site)
            make(OUTPUT, given.helm, release)
        else:
            release = Release(version=check_tag(given.tag), registry=given.registry.lower(), site="")
            publish(OUTPUT, given.helm, release)
    except (MissingGoError, ReleaseError) as error:
        sys.exit(f"release: {error}")
    print(*sorted(path.name for path in OUTPUT.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
