"""This machine is a node as usual: pods, probes, Services, DNS, storage, evictions, Pod Security."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import PYTHON_IMAGE, make_volume
from testbed.errors import TestbedError
from testbed.fake_nodes import TAINT
from testbed.settings import NODE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from testbed.client import Client
    from testbed.cluster import Testbed

pytestmark = pytest.mark.usefixtures("node")

# Security context that Pod Security `restricted` requires of a container.
RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
SERVE = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port=8080)"


def pod(name: str, program: str, **spec: Any) -> dict[str, Any]:
    """Describes a pod that runs a Python program on the real node; ``spec`` may have fields of the container too."""
    container = {
        "name": "main",
        "image": PYTHON_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-c", program],
        "securityContext": RESTRICTED,
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeSelector": {"type": "real"},
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 5,
            "containers": [container],
            **spec,
        },
    }


def create(client: Client, namespace: str, *objects: dict[str, Any]) -> None:
    for content in objects:
        content["metadata"]["namespace"] = namespace
    client.apply(*objects)


def wait_phase(client: Client, namespace: str, name: str, phase: str) -> None:
    client.kubectl("wait", f"--for=jsonpath={{.status.phase}}={phase}", "--timeout=60s", "-n", namespace, f"pod/{name}")


def output(client: Client, namespace: str, name: str, program: str, **spec: Any) -> str:
    """Runs a program in a pod of its own, and returns its output."""
    create(client, namespace, pod(name, program, **spec))
    wait_phase(client, namespace, name, "Succeeded")
    return client.kubectl("logs", "-n", namespace, name).strip()


def test_a_restricted_pod_runs_without_root(client: Client, namespace: str) -> None:
    program = """
import os, pathlib
try:
    pathlib.Path("/file").write_text("")
except OSError as error:
    print(os.getuid(), type(error).__name__)
"""
    assert output(client, namespace, "user", program) == "65532 OSError"


def test_pod_security_refuses_an_unrestricted_pod(client: Client, namespace: str) -> None:
    host = [{"name": "host", "hostPath": {"path": "/"}}]
    with pytest.raises(TestbedError, match=r"violates PodSecurity.*restricted volume types"):
        create(client, namespace, pod("host", "", volumes=host))
    with pytest.raises(TestbedError, match=r"violates PodSecurity.*unrestricted capabilities"):
        create(client, namespace, pod("free", "", container={"securityContext": {}}))


def test_pods_find_each_other_by_name(client: Client, namespace: str) -> None:
    probe = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    server = pod("server", SERVE, container={"readinessProbe": probe, "workingDir": "/tmp"})
    ports = [{"port": 80, "targetPort": 8080}]
    services = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": {"app": "server"}, "ports": ports, **more},
        }
        for name, more in (("server", {}), ("pods", {"clusterIP": "None"}))
    ]
    create(client, namespace, server, *services)
    client.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "-n", namespace, "pod/server")
    program = """
import socket, time, urllib.request

def insist(ask):  # the DNS server and kube-proxy learn of the Services a moment after they are made
    for _ in range(30):
        try:
            return ask()
        except OSError:
            time.sleep(1)
    return ask()

print(insist(lambda: urllib.request.urlopen("http://server/", timeout=10)).status)
print(insist(lambda: socket.gethostbyname("pods")))
"""
    address = client.kubectl("get", "pod", "-n", namespace, "server", "-o", "jsonpath={.status.podIP}")
    assert output(client, namespace, "caller", program).split() == ["200", address]


def test_a_pod_reaches_the_api_server_with_its_token(client: Client, namespace: str) -> None:
    program = """
import pathlib, ssl, urllib.request, urllib.error
folder = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
tls = ssl.create_default_context(cafile=folder / "ca.crt")
token = (folder / "token").read_text()
url = "https://kubernetes.default/api/v1/nodes"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
try:
    urllib.request.urlopen(request, context=tls)
except urllib.error.HTTPError as error:
    print(error.code, "system:serviceaccount" in error.read().decode())
"""
    assert output(client, namespace, "token", program, automountServiceAccountToken=True) == "403 True"


def test_a_restricted_pod_mounts_a_local_volume(client: Client, namespace: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "weights").write_text("here")
    volume, claim = make_volume(namespace, "models", tmp_path)
    client.apply(volume)
    create(client, namespace, claim)
    # The pod mounts it read-only: otherwise the kubelet changes owner and mode of the files on the machine.
    volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}]
    mounts = [{"name": "models", "mountPath": "/model", "readOnly": True}]
    program = "import pathlib; print(pathlib.Path('/model/weights').read_text())"
    assert output(client, namespace, "reader", program, volumes=volumes, container={"volumeMounts": mounts}) == "here"


def test_a_pod_gets_sigterm_before_it_is_killed(client: Client, namespace: str) -> None:
    program = """
import signal, sys, time
def end(*_):
    print("asked")
    time.sleep(3)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready")
time.sleep(600)
"""
    create(client, namespace, pod("polite", program, terminationGracePeriodSeconds=60))
    wait_phase(client, namespace, "polite", "Running")
    wait_logged(client, namespace, "polite", "ready")
    client.kubectl("delete", "pod", "-n", namespace, "polite", "--wait=false")
    wait_logged(client, namespace, "polite", "asked")
    client.kubectl("wait", "--for=delete", "--timeout=30s", "-n", namespace, "pod/polite")


def wait_logged(client: Client, namespace: str, name: str, word: str) -> None:
    deadline = time.monotonic() + 30
    while word not in client.kubectl("logs", "-n", namespace, name).split():
        assert time.monotonic() < deadline, f"{name} has not printed {word}"
        time.sleep(0.1)


def test_a_missing_image_is_named(client: Client, namespace: str) -> None:
    create(
        client,
        namespace,
        pod("absent", "", container={"image": "docker.io/local/absent:1", "imagePullPolicy": "Never"}),
    )
    reason = "jsonpath={.status.containerStatuses[0].state.waiting.reason}"
    client.kubectl("wait", f"--for={reason}=ErrImageNeverPull", "--timeout=60s", "-n", namespace, "pod/absent")


def test_a_pod_that_takes_too_much_memory_is_killed(client: Client, namespace: str) -> None:
    limits = {"resources": {"limits": {"memory": "64Mi"}}}
    create(client, namespace, pod("greedy", "print(len(bytearray(512 << 20)))", container=limits))
    wait_phase(client, namespace, "greedy", "Failed")
    status = client.request("GET", f"/api/v1/namespaces/{namespace}/pods/greedy").content["status"]
    assert status["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"


def test_pods_become_ready_on_fake_nodes(client: Client, make_namespace: Callable[[str], str]) -> None:
    namespace = make_namespace("restricted")
    tolerations = [{"key": TAINT, "operator": "Exists"}]
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    for name in ("first", "second", "third"):
        create(client, namespace, pod(name, "", nodeSelector={"type": "kwok"}, tolerations=tolerations, container=gpu))
    client.kubectl("wait", "--for=condition=Ready", "--timeout=30s", "-n", namespace, "pod/first", "pod/second")
    # Two nodes have eight GPUs each, so the third pod has to wait.
    client.kubectl("wait", "--for=condition=PodScheduled=False", "--timeout=30s", "-n", namespace, "pod/third")


def test_programs_can_be_stopped_and_started(client: Client, testbed: Testbed, namespace: str) -> None:
    testbed.control_plane.stop_program("kube-apiserver")
    assert not client.is_ready()
    testbed.control_plane.start_program("kube-apiserver")
    testbed.processes.stop("kubelet")
    testbed.node.start_program("kubelet")
    testbed.node.wait_ready()
    assert output(client, namespace, "after", "print('alive')") == "alive"
    assert NODE_NAME in client.kubectl("get", "nodes", "-o", "name")
