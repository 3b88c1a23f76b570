"""KEDA and prometheus-adapter scale a cluster in real pods, by the manifests of docs/guides/autoscaling.md.

`make autoscalers-check` runs this. Prometheus scrapes what the operator's ServiceMonitors name. Every stream is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from conftest import FAILED
from scaled_cluster import check_scaling_by_others, read_guide, read_hpa, run_scaled_cluster
from scraping import run_prometheus
from testbed.autoscalers import build_autoscalers, make_adapter, make_keda, run_autoscaler
from testbed.prometheus import find_program, read_version

from sluice_operator.api.manifest import check_manifest
from sluice_operator.resources.service_monitors import render_service_monitors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pod_cluster import PodCluster
    from release import Release
    from testbed.client import Client
    from testbed.cluster import Testbed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NAMESPACE = "scaled-by-others"


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    """The programs, built or fetched before the cluster starts."""
    build_autoscalers()
    find_program("prometheus")


@pytest.fixture(scope="module")
def scaled(client: Client, release: Release) -> Iterator[PodCluster]:
    """One engine; the operator leaves their number alone."""
    with run_scaled_cluster(client, release, NAMESPACE, mode="Disabled") as made:
        yield made


@pytest.fixture(scope="module")
def prometheus(scaled: PodCluster, testbed: Testbed) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the cluster's engines and routers."""
    monitors = render_service_monitors(check_manifest(scaled.manifest), {})
    with run_prometheus(testbed, monitors, NAMESPACE) as url:
        print(f"Prometheus {read_version()}")
        yield url


@pytest.fixture
def cluster(scaled: PodCluster, request: pytest.FixtureRequest) -> Iterator[PodCluster]:
    """The cluster; a test that fails says how it is."""
    yield scaled
    if request.node.stash.get(FAILED, False):
        print(scaled.describe(), scaled.kubectl("describe", "hpa"), sep="\n")


async def test_an_hpa_scales_by_prometheus_adapter(cluster: PodCluster, prometheus: str, testbed: Testbed) -> None:
    rules = read_guide("externalRules:\n", NAMESPACE)
    with run_autoscaler(testbed, make_adapter(rules, prometheus)):
        await check_scaling_by_others(cluster, read_hpa(NAMESPACE))


async def test_keda_scales(cluster: PodCluster, prometheus: str, testbed: Testbed) -> None:
    manifest = read_guide("apiVersion: keda.sh/v1alpha1\nkind: ScaledObject\n", NAMESPACE)
    assert f"serverAddress: {prometheus}" in manifest
    with run_autoscaler(testbed, make_keda(testbed)):
        await check_scaling_by_others(cluster, manifest)
