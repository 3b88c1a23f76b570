"""The product's engine and router run in restricted pods: an image of this machine's Python, the checkout from a volume."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from conftest import make_volume
from test_node import RESTRICTED, create
from testbed.product import make_engine_image
from testbed.settings import ROOT

from sluice.v1 import control_pb2, control_pb2_grpc
from sluice_cli.tiny_model import make_tiny_model
from sluice_core.records import EngineId, Role
from sluice_operator.manifest import parse_manifest
from sluice_operator.render import EngineSite, RouterSite, render_engine_command, render_plan, render_router_command

if TYPE_CHECKING:
    from testbed.client import Client
    from testbed.node import Node

IMAGE = "docker.io/local/sluice:1"
MODEL = ROOT / ".sluice" / "volumes" / "models" / "tiny"
# The root file system is read-only; what is written while it starts goes to an emptyDir.
# There is no compiler in the image, and nothing in a tiny model that would be worth compiling.
ENVIRONMENT = {"HOME": "/tmp", "VLLM_CACHE_ROOT": "/tmp/vllm", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


@pytest.fixture(scope="module")
def image(node: Node) -> str:
    """The image, and the model on this machine."""
    make_tiny_model(MODEL)
    node.load_image(make_engine_image(IMAGE))
    return IMAGE


def serving_pod(name: str, command: list[str], probe: dict[str, Any], memory: str) -> dict[str, Any]:
    python, *arguments = command
    assert python == "python"
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [sys.executable],
        "args": arguments,
        "env": [{"name": variable, "value": value} for variable, value in ENVIRONMENT.items()],
        "securityContext": RESTRICTED,
        "resources": {"limits": {"memory": memory}},
        "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": 180},
        "volumeMounts": [
            {"name": "checkout", "mountPath": str(ROOT), "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeSelector": {"type": "real"},
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [
                {"name": "checkout", "persistentVolumeClaim": {"claimName": "checkout", "readOnly": True}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


@pytest.mark.timeout(420)
def test_a_router_streams_from_an_engine_in_pods(client: Client, namespace: str, image: str) -> None:
    assert image
    manifest = parse_manifest((ROOT / "examples" / "tiny-cpu.yaml").read_text())
    engine = EngineSite(
        engine_id=EngineId("engine-0"),
        host="0.0.0.0",
        port=8010,
        metrics_port=9090,
        kv_host="0.0.0.0",
        kv_port=5600,
        model_directory=str(MODEL),
    )
    router = RouterSite(
        host="0.0.0.0",
        http_port=8000,
        grpc_port=8001,
        control_port=8002,
        metrics_port=9090,
        model_directory=str(MODEL),
        engines=f"dns:engines.{namespace}.svc.cluster.local:8010",
    )
    volume, claim = make_volume(namespace, "checkout", ROOT)
    client.apply(volume)
    ports = [{"name": "grpc", "port": 8010}]
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "engine"}, "ports": ports}
    create(
        client,
        namespace,
        claim,
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "engines"}, "spec": headless},
        serving_pod("engine", render_engine_command(manifest.spec, engine), {"tcpSocket": {"port": 8010}}, "2Gi"),
        serving_pod("router", render_router_command(router), {"tcpSocket": {"port": 8000}}, "1Gi"),
    )
    client.kubectl("wait", "--for=condition=Ready", "--timeout=120s", "-n", namespace, "pod/engine", "pod/router")
    address = client.kubectl("get", "pod", "-n", namespace, "router", "-o", "jsonpath={.status.podIP}")
    plan = render_plan(manifest, {engine.engine_id: Role.DECODE_HEAVY}, generation=1, cluster_uid=namespace)
    with grpc.insecure_channel(f"{address}:8002") as channel:
        control_pb2_grpc.ControlStub(channel).ApplyPlan(control_pb2.ApplyPlanRequest(plan=plan), timeout=30)
    request = {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
    program = f"""
import json, time, urllib.request
body = json.dumps({request!r}).encode()
for attempt in range(60):
    try:
        asked = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", body, {{"Content-Type": "application/json"}})
        print(urllib.request.urlopen(asked, timeout=30).read().decode())
        break
    except OSError as error:  # the router has yet to meet the engine
        failure = error.read() if hasattr(error, "read") else error
        time.sleep(1)
else:
    raise SystemExit(failure)
"""
    answer = json.loads(client.kubectl("exec", "-n", namespace, "router", "--", sys.executable, "-c", program))
    assert answer["usage"]["completion_tokens"] == 16
