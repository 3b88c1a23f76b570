"""The images of the Dockerfiles: built by BuildKit, installed with the chart, run under Pod Security ``restricted``.

``testbed.bases`` makes stand-ins for their base images. `make images-check` runs this. SLUICE_KEEP_IMAGES=1 keeps the
builder's cache, about 25 GB in .sluice/images, so that the next run builds only what has changed. SLUICE_GPU_IMAGE=1
also builds the engine's image for GPUs, and inspects it in an idle pod: the engines that serve here run without a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from examples.tiny_model import make_tiny_model
from kubectl_cluster import make_manifest
from pod_cluster import MODELS, PodCluster
from release import OPERATOR, RESTRICTED, Release, name_image, run_release
from test_dockerfiles import list_containers
from testbed.bases import make_bases, read_bases
from testbed.builder import Build, run_builder
from testbed.helm import SYSTEM
from testbed.images import USER
from testbed.settings import ROOT
from tuner_harness import make_question

from sluice_operator.autotune.search_messages import SearchResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.client import Client
    from testbed.node import Node

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

FOLDER = ROOT / ".sluice" / "images"
NAMESPACE = "images"
GPU_ENGINE = "engine-gpu"
FOLDERS = {"operator": "operator", "router": "router", "engine": "engine_image"}
if os.environ.get("SLUICE_GPU_IMAGE"):
    FOLDERS[GPU_ENGINE] = "engine_image"
# The engines that serve in this test run on CPUs.
ARGUMENTS = {"engine": {"ENGINE": "engine-cpu"}}
# Libraries of the GPU driver, which the node brings.
OF_THE_NODE = ("libcuda.so", "libnvidia-ml.so")
# Files that engines never load, so their missing libraries do not matter.
UNUSED = re.compile(
    r"""
    /lib(omptarget|archer)[.\w]*\.so                   # Intel's OpenMP: GPU offloading, race detection
    | /libplugin_(GPUNETIO|INFINIA|LIBFABRIC|OBJ)\.so  # NIXL's other backends; docs/guides/rdma.md says what EFA takes
    | /libtelemetry_exporter_doca\.so                  # NIXL's telemetry
    | /libuct_ib_(efa|mlx5_gdp)\.so                    # UCX's transports for AWS' NICs and for GPU-driven NICs
    | /libucx_perftest_\w+\.so                         # UCX's benchmark
    | /nixl_ep_cu\d+/                                  # NIXL's expert parallelism, for mixtures of experts
    | /nvidia/nvshmem/                                 # also for expert parallelism
    | /\.?nixl(_ep)?_cu12[./]                          # NIXL for CUDA 12; NIXL loads the one for torch's CUDA
    | /torchcodec/                                     # video and sound, with a file for each version of FFmpeg
    | /libcufile_rdma\.so                              # GPUDirect Storage
    | /numba/np/ufunc/(omp|tbb)pool                    # numba falls back to its own pool without these
    """,
    re.VERBOSE,
)
UNUSED_WITHOUT_GPU = re.compile(r"/libtorch_cuda_\w+\.so")

parts = pytest.mark.parametrize("part", FOLDERS)


@pytest.fixture(scope="session", autouse=True)
def archives() -> Iterator[dict[str, Path]]:
    """All three images by part, built from this checkout before the cluster starts."""
    made = {part: FOLDER / f"{part}.tar" for part in FOLDERS}
    # The builder's cache of both engine images at once would take 50 GB.
    for batch in ([part for part in FOLDERS if part != GPU_ENGINE], [part for part in FOLDERS if part == GPU_ENGINE]):
        if batch:
            build_images({part: made[part] for part in batch})
        if not os.environ.get("SLUICE_KEEP_IMAGES"):
            shutil.rmtree(FOLDER / "state", ignore_errors=True)
    yield made
    for archive in made.values():
        archive.unlink()
    if not os.environ.get("SLUICE_KEEP_IMAGES"):
        shutil.rmtree(FOLDER)


def build_images(archives: dict[str, Path]) -> None:
    """Builds images, by part, into archives."""
    with run_builder(FOLDER) as builder:
        bases = make_bases(builder, read_bases(ROOT / "operator" / "Dockerfile"), FOLDER / "bases")
        for part, archive in archives.items():
            started_s = time.monotonic()
            dockerfile = ROOT / FOLDERS[part] / "Dockerfile"
            build = Build(dockerfile=dockerfile, context=ROOT, arguments=ARGUMENTS.get(part, {}), bases=bases)
            builder.build(build, archive=archive, name=name_image(part))
            print(f"{part}: built in {time.monotonic() - started_s:.0f} s\n{describe_layers(archive)}", flush=True)


def describe_layers(archive: Path) -> str:
    """Lists the size of each layer, as a registry would store it, and the command that made it."""
    with closing(tarfile.open(archive)) as opened:

        def read(digest: str) -> Any:
            return json.load(opened.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}"))  # type: ignore[arg-type]

        index = json.load(opened.extractfile("index.json"))  # type: ignore[arg-type]
        manifest = read(index["manifests"][0]["digest"])
        history = [item for item in read(manifest["config"]["digest"])["history"] if not item.get("empty_layer")]
    pairs = zip(manifest["layers"], history, strict=True)
    lines = [f"{layer['size'] / 1e6:9.1f} MB  {made['created_by'][:100]}" for layer, made in pairs]
    return "\n".join([*lines, f"{sum(layer['size'] for layer in manifest['layers']) / 1e6:9.1f} MB  in all"])


@pytest.fixture(scope="module")
def release(client: Client, node: Node, archives: dict[str, Path]) -> Iterator[Release]:
    """The chart, with these images under its default names."""
    for archive in archives.values():
        node.load_archive(archive)
    with run_release(client) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(client: Client, release: Release) -> Iterator[PodCluster]:
    """The example, with as many engines as two cores can start. Its pods mount nothing but the model."""
    make_tiny_model(MODELS / "tiny")
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}})
    manifest = make_manifest()
    manifest["spec"]["replicas"] = 2
    made = PodCluster(client, NAMESPACE, manifest, claims={"models": MODELS})
    started_s = time.monotonic()
    made.create()
    try:
        made.wait_whole()
    except AssertionError:
        print(release.describe(), made.kubectl("get", "slc,pods", "-o", "wide"), made.kubectl("events"), sep="\n")
        raise
    print(f"from `kubectl apply` to two engines and a router that serve: {time.monotonic() - started_s:.0f} s")
    yield made
    made.kubectl("delete", "slc", "tiny", "--timeout=120s")
    made.wait_for(lambda: not made.engines and not made.routers, "the end of the pods")


DEPLOYED = {"router": "deployment/tiny-router", "engine": "deployment/tiny-engine", GPU_ENGINE: f"pod/{GPU_ENGINE}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """Runs Python in the containers of running pods, with their user and restrictions."""

    client: Client

    def run(self, part: str, *arguments: str, stdin: str | None = None) -> str:
        namespace, pods = (SYSTEM, OPERATOR) if part == "operator" else (NAMESPACE, DEPLOYED[part])
        return self.client.kubectl("exec", "-i", "-n", namespace, pods, "--", "python", *arguments, stdin=stdin)


@pytest.fixture(scope="module")
def inside(client: Client, cluster: PodCluster) -> Inside:
    """Runs Python in the pods."""
    if GPU_ENGINE in FOLDERS:
        client.apply(make_idle_pod(GPU_ENGINE))
        client.kubectl("wait", "-n", NAMESPACE, f"pod/{GPU_ENGINE}", "--for=condition=Ready", "--timeout=300s")
    return Inside(client=client)


def make_idle_pod(part: str) -> dict[str, Any]:
    """Makes an idle pod of an image, with the restrictions of the pods that serve."""
    container = {
        "name": part,
        "image": name_image(part),
        "imagePullPolicy": "Never",
        "command": ["python", "-c", "import time; time.sleep(3600)"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": part, "namespace": NAMESPACE},
        "spec": {
            "containers": [container],
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "terminationGracePeriodSeconds": 0,
        },
    }


SURVEY = """
import importlib.util, json, os, sys, sysconfig
from pathlib import Path

import sluice_core.scheduling.engine_table

FOLDERS = ("/", "/opt/sluice", "/usr/local", "/etc", "/var", "/home", "/tmp")

def can_write(folder):
    try:
        Path(folder, "probe").touch()
    except OSError:
        return False
    return True

def lacks_bytecode(folder, skipped):
    files = [path for path in Path(folder).rglob("*.py") if not skipped & set(path.parts[len(Path(folder).parts):])]
    lacking = [str(path) for path in files if not Path(importlib.util.cache_from_source(path)).is_file()]
    return len(files), lacking

print(json.dumps({
    "python": sys.version.split()[0],
    "user": [os.getuid(), os.getgid()],
    "core": sluice_core.scheduling.engine_table.__file__,
    "writable": [folder for folder in FOLDERS if can_write(folder)],
    "standard": lacks_bytecode(sysconfig.get_path("stdlib"), {"site-packages"}),
    "installed": lacks_bytecode(sysconfig.get_path("purelib"), set()),
}))
"""
# Share of Python files that do not compile on this Python: templates, and examples of wrong code.
UNCOMPILABLE = 0.005


@parts
def test_an_image_runs_as_its_user_on_a_read_only_root(inside: Inside, part: str) -> None:
    found = json.loads(inside.run(part, "-c", SURVEY))
    assert found["user"] == [USER, USER]
    assert found["writable"] == ["/tmp"]


@parts
def test_an_image_has_bytecode_and_the_compiled_core(inside: Inside, part: str) -> None:
    found = json.loads(inside.run(part, "-c", SURVEY))
    print(f"{part}: Python {found['python']}, {found['installed'][0]} files of packages")
    assert found["core"].endswith(".so")
    for files, lacking in (found["standard"], found["installed"]):
        assert files > 100
        assert len(lacking) <= UNCOMPILABLE * files, lacking[:20]


MISSING = """
import json, os, subprocess
from pathlib import Path

found = [path for path in Path("/opt/sluice").rglob("*.so*") if not path.is_symlink()]
names = {path.name for path in Path("/opt/sluice").rglob("*.so*")}
missing = {}
for path in found:
    for line in subprocess.run(["ldd", path], capture_output=True, text=True).stdout.splitlines():
        name = line.split()[0]
        if line.endswith("not found") and name not in names:
            missing.setdefault(name, []).append(str(path))
print(json.dumps(missing))
"""


@parts
def test_no_library_is_missing(inside: Inside, part: str) -> None:
    """Libraries in other packages count: a package loads those itself before it needs them."""
    found = json.loads(inside.run(part, "-c", MISSING))
    unused = [UNUSED, UNUSED_WITHOUT_GPU] if part == "engine" else [UNUSED]
    used = {
        name: [user for user in users if not any(pattern.search(user) for pattern in unused)]
        for name, users in found.items()
    }
    assert {name: users for name, users in used.items() if users and not name.startswith(OF_THE_NODE)} == {}


IMPORT = "import importlib, sys; print(*(importlib.import_module(name).__name__ for name in sys.argv[1:]))"


@pytest.mark.parametrize("part", [part for part in FOLDERS if part != "operator"])
def test_every_program_of_the_pods_can_be_imported(inside: Inside, part: str) -> None:
    containers = list_containers({"engine": "engine-cpu", GPU_ENGINE: "engine"}.get(part, part))
    modules = sorted({container["command"][2] for container in containers} - {f"sluice_{part.removesuffix('-gpu')}"})
    assert inside.run(part, "-c", IMPORT, *modules).split()[-len(modules) :] == modules


def test_the_operator_searches_for_sliders_in_its_image(inside: Inside) -> None:
    answer = SearchResult.from_json(
        inside.run("operator", "-m", "sluice_operator.autotune.search", stdin=make_question().to_json())
    )
    assert answer.goodput_rps > 0


def test_the_example_streams_a_chat(cluster: PodCluster, release: Release) -> None:
    lines = cluster.chat()
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["choices"][0]["finish_reason"] in ("length", "stop")
    assert "Succeeded" in release.test()
