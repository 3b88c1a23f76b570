"""What the steps of workflows run: each script runs here, with programs in place of those that push and sign.

Scripts see the environment that GitHub gives them. The programs note their arguments, and do nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import release_files
import yaml
from publication import IMAGES, Publication
from release_files import ROOT, read_version

if TYPE_CHECKING:
    from pathlib import Path

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
RELEASE, TEST = WORKFLOWS["release"]["jobs"], WORKFLOWS["test"]["jobs"]
VERSION = read_version()
# What GitHub puts in place of expressions, beside the matrix.
CONTEXT = {
    "secrets.GITHUB_TOKEN": "token",
    "github.repository_owner": "Team",
    "github.server_url": "https://host",
    "github.repository": "Team/sluice",
}
RUNNER = {"GITHUB_REF_NAME": f"v{VERSION}", "GITHUB_ACTOR": "actor", "GITHUB_SHA": "c0ffee"}
PROGRAMS = ("docker", "helm", "gh", "make", "sudo", ".venv/bin/python")
NOTE = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps([os.environ["NAME_" + os.path.basename(sys.argv[0]).upper()], *sys.argv[1:]]) + "\\n")
"""


def run_steps(folder: Path, job: dict[str, Any], **matrix: dict[str, str]) -> list[list[str]]:
    """Runs the scripts of a job as a runner does; returns the commands that they ran."""
    names = {}
    for name in PROGRAMS:
        program = folder / name if "/" in name else folder / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(NOTE)
        program.chmod(0o755)
        names[f"NAME_{program.name.upper()}"] = name
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    rows = {f"matrix.{name}.{key}": value for name, row in matrix.items() for key, value in row.items()}
    values = CONTEXT | rows
    for step in job["steps"]:
        given = {
            name: re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values[match[1]], text)
            for name, text in step.get("env", {}).items()
        }
        environment = {"PATH": path, "NOTES": str(folder / "notes"), **names, **RUNNER, **given}
        if "run" in step:
            subprocess.run(["bash", "-e", "-c", step["run"]], cwd=folder, env=environment, check=True)
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


@pytest.mark.parametrize("image", RELEASE["images"]["strategy"]["matrix"]["image"], ids=lambda row: row["name"])
@pytest.mark.parametrize("arch", RELEASE["images"]["strategy"]["matrix"]["arch"], ids=lambda row: row["name"])
def test_an_image_is_pushed_under_the_name_that_is_published(
    tmp_path: Path, image: dict[str, str], arch: dict[str, str]
) -> None:
    login, create, build = run_steps(tmp_path, RELEASE["images"], image=image, arch=arch)
    assert login == ["docker", "login", "ghcr.io", "--username", "actor", "--password-stdin"]
    assert create == ["docker", "buildx", "create", "--use"]
    assert build[:4] == ["docker", "buildx", "build", "--push"]
    assert build[-1] == "."
    options = [text for text in build[4:-1] if text.startswith("--") and "=" in text]
    assert options == ["--provenance=mode=max", "--sbom=true"]
    rest = [text for text in build[4:-1] if text not in options]
    pairs = list(zip(rest[::2], rest[1::2], strict=True))
    arguments = [("--build-arg", f"VERSION={VERSION}"), ("--build-arg", "REVISION=c0ffee")]
    if image["engine"]:
        arguments.append(("--build-arg", f"ENGINE={image['engine']}"))
    number = IMAGES.index((image["name"], image["suffix"]))
    tag = list_published()[number] + f"-{arch['name']}"
    assert pairs == [("--file", f"{image['folder']}/Dockerfile"), *arguments, ("--tag", tag)]


def list_published() -> list[str]:
    """References of the images that are published."""
    registry = "ghcr.io/team"
    return Publication(version=VERSION, registry=registry, helm="helm", buildx=(), cosign="cosign").list_images()


def test_files_are_made_published_and_released_by_commands_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev, making, *logins, publishing, releasing = run_steps(tmp_path, RELEASE["publish"])
    assert dev == ["make", "dev"]
    login = ["login", "ghcr.io", "--username", "actor", "--password-stdin"]
    assert logins == [["docker", *login], ["helm", "registry", *login]]
    given = []
    for command in (making, publishing):
        assert command[:2] == [".venv/bin/python", ".ci/release_files.py"]
        monkeypatch.setattr(sys, "argv", command[1:])
        given.append(release_files.parse_arguments())
    made, published = given
    assert (made.what, made.tag, made.registry) == ("make", f"v{VERSION}", "ghcr.io/Team")
    assert made.site == "https://host/Team/sluice"
    assert (published.what, published.tag, published.registry) == ("publish", made.tag, made.registry)
    output = f"{release_files.OUTPUT.relative_to(ROOT)}/*"
    assert releasing == ["gh", "release", "create", made.tag, "--verify-tag", "--generate-notes", output]


def test_every_target_that_ci_has_is_run(tmp_path: Path) -> None:
    commands = []
    for number, job in enumerate(TEST.values()):
        (folder := tmp_path / str(number)).mkdir()
        commands += run_steps(folder, job)
    run, kubernetes, release = commands
    assert run == ["make", "test"]
    assert (kubernetes[:2], kubernetes[3:]) == (["sudo", "env"], ["make", "e2e-k8s"])
    assert release == ["make", "release-check"]


def test_a_release_is_tested_first_and_may_sign() -> None:
    assert RELEASE["test"]["uses"] == "./.github/workflows/test.yml"
    assert (RELEASE["images"]["needs"], RELEASE["publish"]["needs"]) == ("test", "images")
    assert RELEASE["images"]["permissions"] == {"contents": "read", "packages": "write"}
    assert RELEASE["publish"]["permissions"] == {"contents": "write", "packages": "write", "id-token": "write"}


def test_no_token_stays_in_a_checkout() -> None:
    steps = [step for job in (*RELEASE.values(), *TEST.values()) for step in job.get("steps", [])]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) == len(RELEASE) - 1 + len(TEST)
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)
