"""One cluster for tests that leave it unchanged; other tests start their own with ``start_cluster``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import workload
import yaml
from cluster import Cluster, run_cluster
from examples import tiny_model
from strategy_cluster import run_two_engines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# `make e2e-k8s` runs these: they need root, and minutes to build Kubernetes.
collect_ignore = ["kube"]
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny-cpu.yaml"
NUM_REQUESTS = 200
PORTS = "27000-27999"
# Fields of a spec that the plan follows from.
PLAN_FIELDS = ("strategy", "prefillHeavy", "chunkSizes", "slo", "parameters")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option by which CI runs two halves side by side."""
    help_ = "only tests on the shared cluster, or only those that do not use it"
    parser.addoption("--clusters", choices=("shared", "own"), help=help_)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the other half."""
    if (half := config.getoption("--clusters")) is None:
        return
    chosen = [item for item in items if ("shared_cluster" in getattr(item, "fixturenames", ())) == (half == "shared")]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder with the tiny model, made once per checkout."""
    folder = ROOT / ".sluice" / "volumes" / "models"
    tiny_model.make_tiny_model(folder / "tiny")
    return folder


@pytest.fixture(scope="session")
def known_long(models: Path) -> list[tuple[workload.Request, workload.Answer]]:
    """Requests with the answers of stock vLLM: while a move copies, its request decodes on for dozens of iterations."""
    requests = workload.make_requests(NUM_REQUESTS, tokens_per_hop=64)
    return list(zip(requests, workload.answers(models / "tiny", requests, ROOT / ".sluice" / "e2e"), strict=True))


@pytest.fixture(scope="session")
def known(known_long: list[tuple[workload.Request, workload.Answer]]) -> list[tuple[workload.Request, workload.Answer]]:
    """The same with shorter answers, which are the beginnings of the longer ones."""
    requests = workload.make_requests(NUM_REQUESTS)
    return [(short, answer.cut(short)) for short, (_, answer) in zip(requests, known_long, strict=True)]


@pytest.fixture(scope="session")
def example() -> dict[str, Any]:
    """The example manifest."""
    manifest: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    manifest["spec"]["router"]["service"]["port"] = 27000
    return manifest


@pytest.fixture(scope="session")
def shared_cluster(
    tmp_path_factory: pytest.TempPathFactory, example: dict[str, Any], models: Path
) -> Iterator[Cluster]:
    """The example cluster with two routers, shared by all tests that use ``cluster``."""
    example["spec"]["router"]["replicas"] = 2
    with run_cluster(tmp_path_factory.mktemp("cluster"), example, models=models, ports=PORTS) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The shared cluster: whole before each test, and idle with all blocks free after it."""
    before = shared_cluster.manifest
    shared_cluster.wait_idle()
    yield shared_cluster
    changed = shared_cluster.manifest["spec"]
    if any(changed.get(field) != before["spec"].get(field) for field in PLAN_FIELDS):
        # The next test begins under this plan.
        shared_cluster.edit_plan(lambda spec: spec.update({field: before["spec"].get(field) for field in PLAN_FIELDS}))
    if shared_cluster.manifest != before:
        shared_cluster.write(before)
    shared_cluster.wait_ready()
    shared_cluster.wait_idle()


@pytest.fixture(scope="session")
def two_engines(tmp_path_factory: pytest.TempPathFactory, example: dict[str, Any], models: Path) -> Iterator[Cluster]:
    """Two engines with little KV; tests of a strategy edit it with ``use_strategy``."""
    with run_two_engines(tmp_path_factory.mktemp("two-engines"), example, models) as cluster:
        yield cluster


@pytest.fixture
def start_cluster(tmp_path: Path, models: Path) -> Callable[[dict[str, Any], str], Any]:
    """Starts a cluster for one test, on ports of its own."""
    return lambda manifest, ports: run_cluster(tmp_path / "cluster", manifest, models=models, ports=ports)
