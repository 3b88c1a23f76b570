"""A model that engines refuse, in real pods: no weights are fetched, the condition says why, and nothing is retried."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import FAILED, make_volume
from examples.tiny_model import make_tiny_model
from pod_cluster import CLAIMS, MODELS, PodCluster, make_pods_manifest
from release import RESTRICTED
from stand_in_hub import run_stand_in_hub
from test_refusals import BY_CONFIG, BY_VLLM, MAMBA, OVERRIDE
from testbed.helm import CHART
from testbed.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from release import Release
    from testbed.client import Client
    from testbed.cluster import Testbed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NAMESPACE, MODEL = "refused", "sluice/mamba"
RUNBOOK = "https://example.org/runbook.md"
# The kubelet waits 10 s before it starts a container for the second time, and 20 s before the third.
QUIET_S = 35.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    return folder


@pytest.fixture
def refused(
    client: Client, testbed: Testbed, release: Release, tmp_path: Path, cache: Path, request: pytest.FixtureRequest
) -> Iterator[PodCluster]:
    """One engine and one router, of a Mamba on a Hub."""
    make_tiny_model(MODELS / "tiny")
    shutil.copytree(MODELS / "tiny", tmp_path / "mamba")
    (tmp_path / "mamba" / "config.json").write_text(json.dumps(MAMBA))
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}})
    release.upgrade(CHART, f"prometheusRule.runbookUrl={RUNBOOK}")
    with run_stand_in_hub(testbed.settings.address, MODEL, tmp_path / "mamba") as endpoint:
        made = PodCluster(client, NAMESPACE, describe_mamba(endpoint), claims={"checkout": CLAIMS["checkout"]})
        volume, claim = make_volume(NAMESPACE, "cache", cache, "ReadWriteMany")
        claim["metadata"]["namespace"] = NAMESPACE
        client.apply(volume, claim)
        made.create()
        yield made
        if request.node.stash.get(FAILED, False):
            print(release.describe(), made.describe(), sep="\n")
        made.remove()


def describe_mamba(endpoint: str) -> dict[str, Any]:
    """Makes the manifest. What fetches and checks the model is in the engine's environment, which pods mount."""
    manifest = make_pods_manifest(replicas=1, prefillHeavy=0)
    source = {"huggingFace": {"endpoint": endpoint, "cacheClaimName": "cache"}}
    manifest["spec"]["model"] = {"name": MODEL, "servedName": "mamba", "source": source}
    manifest["spec"]["router"].update(replicas=1)
    mounts = [{"name": "checkout", "mountPath": str(ROOT), "readOnly": True}]
    manifest["spec"]["engine"]["podTemplate"]["spec"]["initContainers"] = [
        {"name": name, "volumeMounts": mounts} for name in ("resolve-model", "fetch-model")
    ]
    return manifest


def read_message(cluster: PodCluster) -> str:
    """Reads the message of Degraded, while its reason is that of a refusal; empty: it is another."""
    conditions = cluster.read("slc/tiny").get("status", {}).get("conditions", [])
    found = {item["type"]: item for item in conditions}.get("Degraded", {})
    return str(found["message"]) if found.get("reason") == "EngineRefused" else ""


def read_engine(cluster: PodCluster) -> dict[str, Any]:
    """Reads the status of the only engine's container; empty while there is none, or two."""
    pods = [pod for pod in cluster.engines.values() if "deletionTimestamp" not in pod["metadata"]]
    found = pods[0]["status"].get("containerStatuses") if len(pods) == 1 else None
    return dict(found[0]) if found else {}


def test_a_refused_model_is_said_by_the_condition_and_not_tried_again(refused: PodCluster, cache: Path) -> None:
    refused.wait("Degraded", "EngineRefused")
    message = read_message(refused)
    assert f"refuses to start: /model/config.json: {BY_CONFIG}; " in message
    assert message.endswith(f"see {RUNBOOK}#enginerefused")
    # The router fetches its tokenizer beside config.json, at its own pace.
    refused.wait_for(lambda: len(list(cache.rglob("config.json"))) == 2, "the files of the engine and of the router")
    assert not list(cache.rglob("*.safetensors"))

    # The kubelet starts the container once more: it waits then, and the pod's status keeps saying why.
    def waits() -> bool:
        container = read_engine(refused)
        return container.get("restartCount") == 1 and "running" in container["state"]

    refused.wait_for(waits, "the engine that waits")
    before = refused.identify("engine")
    time.sleep(QUIET_S)
    assert refused.identify("engine") == before
    assert waits()
    assert read_message(refused) == message
    pod = next(iter(refused.engines.values()))["metadata"]["name"]
    said = refused.kubectl("logs", pod, "-c", "engine").splitlines()
    assert said == [f"sluice_engine: /model/config.json: {BY_CONFIG}; waits for another config.json, spec or image"]

    # An edit makes another pod, whose engine vLLM refuses: its weights were fetched.
    refused.edit(engine=OVERRIDE)
    refused.wait_for(lambda: BY_VLLM in read_message(refused), "the refusal of vLLM")
    assert list(cache.rglob("*.safetensors"))
