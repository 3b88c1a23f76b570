"""The CRD in use: kubectl's columns and explanations, the scale and status subresources, waiting for conditions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from kubectl_cluster import wait_for
from testbed.errors import TestbedError
from testbed.settings import ROOT
from verdicts import make_manifest

from sluice_operator.api.condition_types import REASONS, ConditionType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.client import Client

pytestmark = pytest.mark.usefixtures("crd")

STATUS = {
    "observedGeneration": 1,
    "replicas": 4,
    "readyReplicas": 3,
    "selector": "sluice.dev/cluster=tiny",
    "effective": {
        "strategy": "TaiChi",
        "prefillHeavy": 1,
        "decodeHeavy": 2,
        "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
    },
    "attainment": {"requests": 1000, "ttft": "97.5%", "tpot": "98%", "both": "96.1%"},
}


def path(namespace: str, name: str = "tiny", subresource: str = "") -> str:
    return f"/apis/sluice.dev/v1alpha1/namespaces/{namespace}/servingclusters/{name}{subresource}"


def condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "m",
        "observedGeneration": 1,
        "lastTransitionTime": now,
    }


def apply_status(client: Client, namespace: str, status: dict[str, Any]) -> Any:
    """Writes a status as the operator does: server-side apply on the subresource."""
    content = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", "status": status}
    query = "/status?fieldManager=test&force=true&fieldValidation=Strict"
    return client.request("PATCH", path(namespace, subresource=query), content, "application/apply-patch+yaml")


@pytest.fixture
def cluster(client: Client, namespace: str) -> Iterator[str]:
    """The example in a namespace of its own."""
    manifest = str(ROOT / "examples" / "tiny-cpu.yaml")
    client.kubectl("apply", "--server-side", "-n", namespace, "-f", manifest)
    yield namespace
    client.kubectl("delete", "-n", namespace, "-f", manifest)


def test_columns_show_what_the_status_says(client: Client, cluster: str) -> None:
    ready = condition("Ready", "True", "Serving")
    assert apply_status(client, cluster, {**STATUS, "conditions": [ready]}).is_ok
    lines = client.kubectl("get", "slc", "-n", cluster).splitlines()
    assert [line.split()[:-1] for line in lines] == [
        ["NAME", "READY", "ENGINES", "P", "D", "TTFT", "TPOT", "ATTAINMENT"],
        ["tiny", "True", "3", "1", "2", "97.5%", "98%", "96.1%"],
    ]
    wide = client.kubectl("get", "servingclusters", "-n", cluster, "-o", "wide").splitlines()
    assert wide[0].split()[-5:] == ["S_P", "S_D", "STRATEGY", "MODEL", "REASON"]
    assert wide[1].split()[-5:] == ["512", "64", "TaiChi", "tiny", "Serving"]
    assert "servingcluster.sluice.dev/tiny" in client.kubectl("get", "sluice", "-n", cluster, "-o", "name")


def test_kubectl_wait_sees_ready(client: Client, cluster: str) -> None:
    assert apply_status(client, cluster, {"conditions": [condition("Ready", "True", "Serving")]}).is_ok
    assert "condition met" in client.kubectl(
        "wait", "--for=condition=Ready", "--timeout=10s", "-n", cluster, "slc/tiny"
    )


def test_every_condition_and_reason_can_be_written(client: Client, cluster: str) -> None:
    for index in range(max(map(len, REASONS.values()))):
        conditions = [condition(kind, "Unknown", reasons[index % len(reasons)]) for kind, reasons in REASONS.items()]
        answer = apply_status(client, cluster, {"conditions": conditions})
        assert answer.is_ok, answer
        assert {found["type"] for found in answer.content["status"]["conditions"]} == set(map(str, ConditionType))


def test_two_field_managers_keep_their_own_conditions(client: Client, cluster: str) -> None:
    assert apply_status(client, cluster, {"conditions": [condition("Ready", "True", "Serving")]}).is_ok
    status = {"status": {"conditions": [condition("Degraded", "False", "AsExpected")]}}
    content = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", **status}
    query = path(cluster, subresource="/status?fieldManager=other")
    answer = client.request("PATCH", query, content, "application/apply-patch+yaml")
    # The list is merged by type, so two writers do not overwrite each other's conditions.
    assert {found["type"] for found in answer.content["status"]["conditions"]} == {"Ready", "Degraded"}


def test_spec_and_status_are_written_separately(client: Client, cluster: str) -> None:
    before = client.request("GET", path(cluster)).content
    change = {"spec": {"replicas": 9}, "status": {"replicas": 4, "readyReplicas": 3}}
    by_status = client.request(
        "PATCH", path(cluster, subresource="/status"), change, "application/merge-patch+json"
    ).content
    assert (by_status["spec"], by_status["status"]) == (before["spec"], change["status"])
    assert by_status["metadata"]["generation"] == before["metadata"]["generation"]
    change = {"spec": {"replicas": 6}, "status": {"replicas": 1}}
    by_spec = client.request("PATCH", path(cluster), change, "application/merge-patch+json").content
    assert (by_spec["spec"]["replicas"], by_spec["status"]["replicas"]) == (6, 4)
    assert by_spec["metadata"]["generation"] == before["metadata"]["generation"] + 1


def test_an_invalid_status_is_refused(client: Client, cluster: str) -> None:
    for status, field in (
        ({"attainment": {"ttft": "most"}}, "attainment.ttft"),
        ({"readyReplicas": -1}, "readyReplicas"),
        ({"conditions": [condition("Ready", "Perhaps", "Serving")]}, "conditions[0].status"),
    ):
        answer = apply_status(client, cluster, status)
        # Kubernetes 1.30 names a field of a wrong type by its place in the status.
        assert field in [cause["field"].removeprefix("status.") for cause in answer.content["details"]["causes"]]


def test_kubectl_scale(client: Client, cluster: str) -> None:
    client.kubectl("scale", "-n", cluster, "slc/tiny", "--replicas=7")
    assert apply_status(client, cluster, STATUS).is_ok
    scale = client.request("GET", path(cluster, subresource="/scale")).content
    assert scale["kind"] == "Scale"
    assert (scale["spec"]["replicas"], scale["status"]) == (7, {"replicas": 4, "selector": "sluice.dev/cluster=tiny"})


@pytest.mark.parametrize(
    ("replicas", "message"), [(0, "greater than or equal to 1"), (1025, "less than or equal to 1024")]
)
def test_scaling_out_of_bounds_is_refused(client: Client, cluster: str, replicas: int, message: str) -> None:
    with pytest.raises(TestbedError, match=message):
        client.kubectl("scale", "-n", cluster, "slc/tiny", f"--replicas={replicas}")


def test_scaling_below_an_absolute_count_is_refused_with_the_remedy(client: Client, cluster: str) -> None:
    client.kubectl("patch", "-n", cluster, "slc/tiny", "--type=merge", "-p", json.dumps({"spec": {"prefillHeavy": 3}}))
    with pytest.raises(TestbedError, match="is above replicas; lower it, raise replicas, or use a percentage"):
        client.kubectl("scale", "-n", cluster, "slc/tiny", "--replicas=2")
    client.kubectl(
        "patch", "-n", cluster, "slc/tiny", "--type=merge", "-p", json.dumps({"spec": {"prefillHeavy": "50%"}})
    )
    client.kubectl("scale", "-n", cluster, "slc/tiny", "--replicas=2")


def test_kubectl_prints_the_refusals(client: Client, namespace: str) -> None:
    bounds = {"chunkSizes": {"decodeHeavy": {"min": 99, "max": 32}}}
    spec = {"chunkSizes": {"prefillHeavy": 9000}, "autotune": {"mode": "Apply", "bounds": bounds}}
    manifest = yaml.safe_dump(make_manifest(spec, {}))
    with pytest.raises(TestbedError) as caught:
        client.kubectl("apply", "-n", namespace, "-f", "-", stdin=manifest)
    assert "spec.chunkSizes.prefillHeavy: " in str(caught.value)
    assert "is above engine.maxBatchTokens; lower it, or raise that (which restarts engines)" in str(caught.value)
    assert "is above max; swap them" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("slc", "One model served by P-heavy and D-heavy engines under latency objectives."),
        ("slc.spec.prefillHeavy", "P-heavy engines (slider R_PD), as a count or a share of replicas"),
        ("slc.spec.slo.ttftMilliseconds", "Objective for the time to first token, in milliseconds."),
        ("slc.spec.strategy", "ENUM: TaiChi Aggregated Disaggregated DynaServe FlowPrefill EcoServe Sluice Auto"),
        ("slc.spec.network.rdma", "-required-"),
        ("slc.spec.engine.podTemplate", "Merged over the pod template that the operator renders"),
        ("slc.status.conditions.reason", "Degraded: AsExpected, SpecInvalid, ImagePullBackOff"),
    ],
)
def test_kubectl_explains(client: Client, field: str, words: str) -> None:
    # The API server publishes descriptions some time after it serves the resource.
    wait_for(lambda: is_published(client), "the descriptions of the CRD")
    assert words in " ".join(client.kubectl("explain", field).split())


def is_published(client: Client) -> bool:
    """Says whether the API server publishes the CRD's schema."""
    answer = client.request("GET", "/openapi/v3/apis/sluice.dev/v1alpha1")
    return answer.is_ok and "ServingCluster" in json.dumps(answer.content)


def test_kubectl_explains_every_field(client: Client) -> None:
    text = client.kubectl("explain", "slc.spec", "--recursive")
    assert all(f"\t<{kind}>" in text for kind in ("integer", "string", "[]Object", "map[string]string", "boolean"))
    assert len(text.splitlines()) > 150
