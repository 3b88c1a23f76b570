"""The files of a release: which version, what images are built from, what an SBOM lists, and who may publish.

`make release-check` makes the files themselves.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from typing import TYPE_CHECKING, Any

import publication
import pytest
import release_files
import yaml
from publication import ARCHITECTURES
from release_commands import ReleaseError
from release_files import DOCKERFILES, IMAGES, ROOT, check_contexts, check_tag, list_copies, read_version
from sbom import PACKAGE, read_components, write_sbom

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LOCK = """\
# Made from pyproject.toml
Some_Package==1.2+cpu ; sys_platform == 'linux' \\
    --hash=sha256:{a} \\
    --hash=sha256:{b}
    # via other
other==3
""".format(a="a" * 64, b="b" * 64)


def find_jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.name}: {name}", job


JOBS = dict(find_jobs())


def test_a_release_has_the_tag_of_the_projects_version() -> None:
    assert check_tag(f"v{read_version()}") == read_version()
    with pytest.raises(ReleaseError, match=rf"the tag is v9.9.9, and pyproject.toml has version {read_version()}"):
        check_tag("v9.9.9")


def test_the_package_of_an_sbom_is_the_projects() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == PACKAGE


def copy_contexts(folder: Path) -> Path:
    for path in (*DOCKERFILES, *(f"requirements/{name}.txt" for name in (*IMAGES, "uv"))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    for path in list_copies((ROOT / DOCKERFILES[0]).read_text(), "wheel"):
        source, target = ROOT / path, folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.mkdir()
        else:
            shutil.copy(source, target)
    return folder


def test_images_need_no_file_but_those_that_are_copied(tmp_path: Path) -> None:
    check_contexts(copy_contexts(tmp_path))


@pytest.mark.parametrize("missing", ["requirements/engine-cpu.txt", "requirements/uv.txt", "hatch_build.py"])
def test_a_file_that_images_copy_and_git_does_not_track_is_named(tmp_path: Path, missing: str) -> None:
    (copy_contexts(tmp_path) / missing).unlink()
    with pytest.raises(ReleaseError, match=f"Dockerfile copies {missing}, which git does not track"):
        check_contexts(tmp_path)


def test_copies_are_those_of_a_stage_and_none_from_another_stage() -> None:
    text = "FROM a AS wheel\nCOPY a b \\\n  c ./\nFROM b\nCOPY --from=wheel /x /x\nCOPY d ./ # why\n"
    assert list_copies(text, "wheel") == ["a", "b", "c"]
    assert list_copies(text) == ["a", "b", "c", "d"]


def test_the_packages_of_an_sbom_are_those_of_the_lock_with_their_hashes() -> None:
    first, second = read_components(LOCK)
    assert (first["name"], first["version"], first["purl"]) == (
        "Some_Package",
        "1.2+cpu",
        "pkg:pypi/some-package@1.2%2Bcpu",
    )
    (distribution,) = first["externalReferences"]
    assert [item["content"] for item in distribution["hashes"]] == ["a" * 64, "b" * 64]
    assert (second["purl"], "externalReferences" in second) == ("pkg:pypi/other@3", False)


@pytest.mark.parametrize("image", IMAGES)
def test_an_images_sbom_lists_every_package_that_its_lock_installs(tmp_path: Path, image: str) -> None:
    lock = (ROOT / "requirements" / f"{image}.txt").read_text()
    for name in ("first", "again"):
        write_sbom(tmp_path / name, f"sluice-{image}", "1.0", lock)
    document = json.loads((tmp_path / "first").read_text())
    assert (tmp_path / "first").read_text() == (tmp_path / "again").read_text()
    listed = {(item["name"], item["version"]) for item in document["components"]} - {(PACKAGE, "1.0")}
    assert listed == set(re.findall(r"^([^\s=]+)==([^\s;\\]+)", lock, re.MULTILINE))
    assert document["dependencies"][0]["dependsOn"] == [item["bom-ref"] for item in document["components"]]


def test_workflows_publish_what_the_chart_of_a_release_names() -> None:
    rows = JOBS["release.yml: images"]["strategy"]["matrix"]["image"]
    made = {(row["name"], row["folder"], row["engine"], row["suffix"]) for row in rows}
    assert made == {
        ("sluice-operator", "operator", "", ""),
        ("sluice-router", "router", "", ""),
        ("sluice-engine", "engine_image", "engine", ""),
        ("sluice-engine", "engine_image", "engine-cpu", "-cpu"),
    }
    assert {f"{folder}/Dockerfile" for _, folder, _, _ in made} == set(release_files.DOCKERFILES)
    assert {(name, suffix) for name, _, _, suffix in made} == set(publication.IMAGES)
    assert [row["name"] for row in JOBS["release.yml: images"]["strategy"]["matrix"]["arch"]] == [*ARCHITECTURES]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_has_the_rights_that_it_names_and_runs_nothing_that_may_change(job: str) -> None:
    assert JOBS[job]["permissions"]
    for step in JOBS[job].get("steps", []):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", "a/b@" + "0" * 40))
        # Values that strangers choose come by the environment, never into the text of a script.
        assert "${{" not in step.get("run", "")


def test_only_the_jobs_of_a_release_may_write() -> None:
    writers = {job for job, content in JOBS.items() if "write" in content["permissions"].values()}
    assert writers == {"release.yml: images", "release.yml: publish"}
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {}
