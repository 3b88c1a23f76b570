"""The Dockerfiles agree with the repository, and with the pods that run their images.

None is built here (`make images-check`).

Read are the instructions that the files use: no heredocs, no escape directive.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_kubernetes import make_cluster

from sluice_operator.api.manifest import check_manifest
from sluice_operator.resources.deployments.engine_deployment import render_engines
from sluice_operator.resources.deployments.router_deployment import render_routers
from sluice_operator.resources.pods.container_fields import TMP_MOUNT
from sluice_operator.resources.pods.security_context import CONTAINER_SECURITY, POD_SECURITY
from sluice_operator.settings import OperatorSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Values of the build argument ENGINE; the first is the default.
ENGINES = ("engine", "engine-cpu")
FILES = {"operator": "operator", "router": "router", "engine": "engine_image", "engine-cpu": "engine_image"}
SETTINGS = OperatorSettings()
VENV = "/opt/sluice"
HUB = {"name": "org/model", "source": {"huggingFace": {}}}
RDMA = {"mode": "RDMA", "rdma": {"fabric": "RoCE", "resourceName": "rdma/hca", "resourceCount": 1}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a Dockerfile: what it starts from, and its instructions as (name, arguments)."""

    name: str
    base: str
    instructions: tuple[tuple[str, str], ...]

    def find(self, name: str) -> list[str]:
        return [arguments for instruction, arguments in self.instructions if instruction == name]


def read_instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name.upper(), arguments) for name, arguments in (line.split(None, 1) for line in whole.splitlines())]


def fill(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)


def declare(argument: str, given: dict[str, str], inherited: dict[str, str]) -> dict[str, str]:
    """The value of an ARG: the build's, or its default, or that of the same ARG above the first stage."""
    name, _, default = argument.partition("=")
    return {name: given.get(name) or default or inherited[name]}


def read_stages(image: str) -> dict[str, Stage]:
    """The stages in order, with build arguments filled in where they are declared; the last is ``final``."""
    text = (ROOT / FILES[image] / "Dockerfile").read_text()
    given = {"ENGINE": image} if image in ENGINES[1:] else {}
    above: dict[str, str] = {}
    declared: dict[str, dict[str, str]] = {}
    found: list[tuple[str, str, list[tuple[str, str]]]] = []
    for name, arguments in read_instructions(text):
        if name == "FROM":
            base, *alias = fill(arguments, above).split()
            found.append((alias[1] if alias else "final", base, []))
            declared[found[-1][0]] = dict(declared.get(base, {}))
        elif not found:
            assert name == "ARG", "only ARG may stand above the first stage"
            above |= declare(arguments, given, {})
        else:
            values = declared[found[-1][0]]
            if name == "ARG":
                values |= declare(arguments, given, above)
            found[-1][2].append((name, fill(arguments, values)))
    assert found[-1][0] == "final"
    return {name: Stage(name=name, base=base, instructions=tuple(items)) for name, base, items in found}


def lineage(stages: dict[str, Stage], name: str = "final") -> list[Stage]:
    """A stage and those it starts from, the first one first."""
    stage = stages[name]
    return [*(lineage(stages, stage.base) if stage.base in stages else []), stage]


def final(image: str, name: str) -> list[str]:
    """The arguments of an instruction in all that an image is made of."""
    return [item for stage in lineage(read_stages(image)) for item in stage.find(name)]


def environment(image: str) -> dict[str, str]:
    return dict(part.split("=", 1) for item in final(image, "ENV") for part in shlex.split(item))


def list_copies(stage: Stage) -> list[tuple[list[str], str]]:
    """What a stage copies from the repository: sources, destination."""
    copies = [shlex.split(item) for item in stage.find("COPY")]
    return [(parts[:-1], parts[-1]) for parts in copies if not parts[0].startswith("--from=")]


def list_sources(image: str) -> set[str]:
    return {source for stage in read_stages(image).values() for sources, _ in list_copies(stage) for source in sources}


def matches(pattern: str, path: str) -> bool:
    """Docker's rule: ``*`` within a part, ``**`` over parts; what matches a folder matches all in it."""
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
    rules = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return re.fullmatch("".join(rules.get(part, re.escape(part)) for part in parts) + "(?:/.*)?", path) is not None


def is_in_context(path: str) -> bool:
    """The last pattern that matches decides."""
    verdict = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#") and matches(pattern.removeprefix("!"), path):
            verdict = pattern.startswith("!")
    return verdict


def render_pods(**spec: Any) -> dict[str, Any]:
    """Pod specs of a cluster, by image."""
    cluster = check_manifest(make_cluster(**spec))
    engines = render_engines(cluster, 1, SETTINGS.engine_image)["spec"]["template"]["spec"]
    return {
        "router": render_routers(cluster, SETTINGS.router_image, "operator.svc")["spec"]["template"]["spec"],
        **dict.fromkeys(ENGINES, engines),
    }


def list_containers(image: str) -> list[Any]:
    """Every container that pods of ours run an image in."""
    pods = [render_pods()[image], render_pods(model=HUB, network=RDMA)[image]]
    return [item for pod in pods for item in [*pod["containers"], *pod.get("initContainers", [])]]


images = pytest.mark.parametrize("image", FILES)
images_of_pods = pytest.mark.parametrize("image", [image for image in FILES if image != "operator"])


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        ("pyproject.toml", True),
        ("core/sluice_core/scheduling/engine_table.py", True),
        ("core/sluice_core/__pycache__/engines.cpython-312.pyc", False),
        ("core/sluice_core/engines.cpython-312-x86_64-linux-gnu.so", False),
        ("core/tests/test_slo.py", False),
        ("requirements/dev.txt", False),
        (".git/config", False),
        (".sluice/volumes/models/tiny/model.safetensors", False),
        ("pyproject.toml.orig", False),
    ],
)
def test_the_context_is_what_is_needed(path, verdict) -> None:
    assert is_in_context(path) is verdict


@images
def test_every_base_is_pinned_to_a_patch_release_and_all_are_of_one_system(image: str) -> None:
    stages = read_stages(image)
    bases = {stage.base for stage in stages.values()} - set(stages)
    matched = [re.fullmatch(r"python:(\d+\.\d+\.\d+)(-slim)?-([a-z]+)", base) for base in bases]
    assert len(bases) == 2
    assert len({match and (match[1], match[3]) for match in matched}) == 1
    assert all(matched)
    assert lineage(stages)[0].base.split("-")[1] == "slim"


@images
def test_python_is_one_that_the_project_is_for(image: str) -> None:
    version = re.findall(r"python:(\d+\.\d+)\.", lineage(read_stages(image))[0].base)[0]
    numbers = tuple(map(int, version.split(".")))
    least = tuple(map(int, PROJECT["project"]["requires-python"].removeprefix(">=").split(".")))
    assert least <= numbers < (3, 15)
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]
    assert all("python_version < '3.15'" in item for item in PROJECT["tool"]["uv"]["environments"])
    # The standard library whose bytecode is compiled is that of the base, whichever BUILD_BASE and RUN_BASE name.
    (compiled,) = [shlex.split(item) for item in final(image, "RUN") if "compileall" in item]
    assert fnmatchcase(f"/usr/local/lib/python{version}", compiled[-1])


@images
def test_everything_that_is_copied_exists_and_is_in_the_context(image: str) -> None:
    for source in list_sources(image):
        path = ROOT / source
        files = [path] if path.is_file() else [item for item in path.rglob("*.py") if "__pycache__" not in item.parts]
        assert files, f"{source} is not there, or empty"
        for file in files:
            assert is_in_context(str(file.relative_to(ROOT))), file


def test_nothing_else_is_in_the_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    admitted = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert admitted == set().union(*map(list_sources, FILES))
    assert next(line for line in lines if not line.startswith("#")) == "*"


@images
def test_folders_keep_their_place(image: str) -> None:
    for stage in read_stages(image).values():
        for sources, destination in list_copies(stage):
            for source in sources:
                parent = str(Path(source).parent)
                assert destination in (source, "./" if parent == "." else f"{parent}/")


@images
def test_the_wheel_is_built_from_all_that_it_needs(image: str) -> None:
    copied = {source for sources, _ in list_copies(read_stages(image)["wheel"]) for source in sources}
    project = PROJECT["project"]
    needed = {"pyproject.toml", "hatch_build.py", project["readme"], *project["license-files"]}
    assert copied == needed | set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def test_the_stages_before_the_dependencies_are_built_once_for_all_images() -> None:
    for name in ("tools", "wheel"):
        assert len({read_stages(image)[name] for image in FILES}) == 1


def test_what_the_files_repeat_is_the_same_in_all() -> None:
    def generalize(image: str, items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Without what an image has of its own: the name of its lock, its system packages."""
        texts = [(name, text.replace(f"{image}.txt", "lock.txt")) for name, text in items]
        return [(name, text) for name, text in texts if name != "ARG" and "apt-get" not in text]

    installed = {tuple(generalize(image, read_stages(image)["install"].instructions)) for image in FILES}
    assert len(installed) == 1
    system = {tuple(item for item in final(image, "RUN") if "apt-get" not in item) for image in FILES}
    assert len(system) == 1
    common = environment("operator").items()
    assert all(environment(image).items() >= common for image in FILES)


@images
def test_what_is_installed_is_locked(image: str) -> None:
    """Each package has a hash, and nothing is resolved while an image is built."""
    commands = [item for stage in read_stages(image).values() for item in stage.find("RUN") if "pip install" in item]
    locks = []
    for command in commands:
        words = shlex.split(command)
        named = [words[at + 1] for at, word in enumerate(words) if word == "-r"]
        locks += named
        assert "--require-hashes" in words if named else {"--no-deps", "--offline"} <= set(words)
        assert "uv" not in words or "--no-deps" in words
    assert locks == ["requirements/uv.txt", f"requirements/{image}.txt"]
    for lock in locks:
        text = (ROOT / lock).read_text()
        assert len(re.findall(r"^\S+==", text, re.MULTILINE)) >= 1
        assert "--hash=sha256:" in text


@images
def test_what_is_installed_is_run_without_writing_bytecode(image: str) -> None:
    stages = read_stages(image)
    settings = {word for item in stages["install"].find("ENV") for word in shlex.split(item)}
    assert "PYC_INVALIDATION_MODE=UNCHECKED_HASH" in settings
    # At each installation: one compiles only what it installs itself.
    assert "UV_COMPILE_BYTECODE=1" in settings
    assert f"--python {VENV}/bin/python" in stages["install"].find("RUN")[-1]
    assert environment(image)["PYTHONDONTWRITEBYTECODE"] == "1"


@images
def test_an_image_runs_as_a_user_that_kubernetes_sees_is_not_root(image: str) -> None:
    assert POD_SECURITY["runAsNonRoot"] is True
    assert "runAsUser" not in POD_SECURITY, "the image's user counts"
    (user,) = final(image, "USER")
    number, group = map(int, user.split(":"))
    assert number == group > 0
    # The same as in the images of the tests on a real Kubernetes.
    assert f"\nUSER = {number}\n" in (ROOT / "e2e" / "kube" / "testbed" / "images.py").read_text()
    instructions = [name for name, _ in read_stages(image)["final"].instructions]
    assert not {"RUN", "COPY", "ADD"} & set(instructions[instructions.index("USER") :])


@images
def test_the_entry_point_is_a_module_of_ours_and_no_shell(image: str) -> None:
    (entry,) = final(image, "ENTRYPOINT")
    python, option, module = json.loads(entry)
    assert (python, option) == ("python", "-m")
    assert (ROOT / FILES[image] / module / "__main__.py").is_file()
    assert not final(image, "CMD")
    assert not final(image, "SHELL")
    assert environment(image)["PATH"].split(":")[0] == f"{VENV}/bin"
    assert f"--from=install {VENV} {VENV}" in final(image, "COPY")


@images_of_pods
def test_pods_start_what_the_image_starts(image: str) -> None:
    (entry,) = final(image, "ENTRYPOINT")
    for container in list_containers(image):
        if container["name"] == image.removesuffix("-cpu"):
            assert container["command"][:3] == json.loads(entry)


@images_of_pods
def test_every_program_of_the_pods_is_in_their_image(image: str) -> None:
    lock = (ROOT / "requirements" / f"{image}.txt").read_text()
    commands = {tuple(container["command"][:3]) for container in list_containers(image)}
    # Programs that resolve a revision and fetch an engine's model are given whole; fetching routers' files imports all
    # that they import of others.
    given = {command for command in commands if command[1] == "-c"}
    assert (len(commands), len(given)) == ((3, 1) if image == "router" else (4, 2))
    started = {
        tuple(words[first : first + 3])
        for words in (container["command"] for container in list_containers(image))
        for first, word in enumerate(words)
        if word == "python" and words[first + 1] == "-m"
    }
    for _, _, program in given:
        started |= {("python", *found) for found in re.findall(r'"(-m)", "([\w.]+)"', program)}
    assert len(started) == (2 if image == "router" else 4)
    for python, option, module in started:
        assert (python, option) == ("python", "-m")
        package, *rest = module.split(".")
        if package.startswith("sluice_"):
            path = ROOT / FILES[image] / package / Path(*rest or ["__main__"]).with_suffix(".py")
            assert path.is_file()
        else:
            assert re.search(rf"^{package.replace('_', '-')}==", lock, re.MULTILINE)


@images_of_pods
def test_what_pods_mount_hides_nothing_of_the_image(image: str) -> None:
    destinations = [shlex.split(item)[-1] for item in final(image, "COPY")] + final(image, "WORKDIR")
    for container in list_containers(image):
        for mount in (item["mountPath"] for item in container.get("volumeMounts", [])):
            assert not any(f"{destination}/".startswith(f"{mount}/") for destination in destinations)


@images
def test_what_is_written_goes_to_the_volume_that_pods_have_for_it(image: str) -> None:
    assert CONTAINER_SECURITY["readOnlyRootFilesystem"] is True
    assert environment(image)["HOME"] == TMP_MOUNT["mountPath"]
    assert not final(image, "VOLUME")


@images_of_pods
def test_the_ports_are_those_of_the_pods(image: str) -> None:
    (exposed,) = final(image, "EXPOSE")
    (container,) = render_pods()[image]["containers"]
    assert set(map(int, exposed.split())) == {port["containerPort"] for port in container["ports"]}


def test_the_ports_of_the_operator_are_its_settings() -> None:
    assert final("operator", "EXPOSE") == [str(SETTINGS.port)]


@images
def test_compilers_stay_where_they_are_needed(image: str) -> None:
    """In the builder; and in the engine's image for GPUs, where torch.compile calls one."""
    packages = [word for item in final(image, "RUN") if "apt-get" in item for word in shlex.split(item)]
    assert ("g++" in packages) is (image == "engine")
    assert ("libnuma1" in packages) is (image in ENGINES)
    assert ("TORCH_COMPILE_DISABLE" in environment(image)) is (image == "engine-cpu")
    assert lineage(read_stages(image), "wheel")[0].base == read_stages(image)["tools"].base
    assert "slim" not in read_stages(image)["tools"].base


@images
def test_no_image_asks_for_all_gpus(image: str) -> None:
    assert "NVIDIA_VISIBLE_DEVICES" not in environment(image)


@images
def test_the_labels_name_the_version_of_the_project(image: str) -> None:
    labels = dict(part.split("=", 1) for item in final(image, "LABEL") for part in shlex.split(item))
    project = PROJECT["project"]
    name = f"sluice-{image.removesuffix('-cpu')}"
    assert labels["org.opencontainers.image.title"] == name
    assert labels["org.opencontainers.image.version"] == project["version"]
    assert labels["org.opencontainers.image.licenses"] == project["license"]
    # The names by which the operator knows its images are those that the files' heads build.
    text = (ROOT / FILES[image] / "Dockerfile").read_text()
    assert f"docker build -f {FILES[image]}/Dockerfile -t {name}:{project['version']} ." in text
    if image != "operator":
        assert getattr(SETTINGS, name.removeprefix("sluice-") + "_image") == f"{name}:{project['version']}"
