"""What the benchmark runs on: a real control plane, nodes of kwok, emulated routers, and the operator."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml
from benchmarks.operator.scrape import read_page
from testbed.cluster import run_testbed
from testbed.fake_nodes import make_node
from testbed.settings import ROOT, make_settings

from sluice_operator.kubernetes.rbac import LEASE_RULES, RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.cluster import Testbed

SYSTEM, SPACE = "sluice-system", "scale"
PODS_PER_NODE = 900
API_PORT, OPERATOR_PORT = 16600, 17600
MERGE = "application/merge-patch+json"
CLUSTERS = f"/apis/sluice.dev/v1alpha1/namespaces/{SPACE}/servingclusters"
GENERATION = "sluice.dev/plan-generation"


@contextmanager
def run_stage(num_pods: int) -> Iterator[Testbed]:
    """Runs a control plane with room for that many pods, the CRD, and an account for the operator."""
    settings = make_settings(
        folder=ROOT / "build" / "benchmarks" / "kube", first_port=API_PORT, num_fake_nodes=1, has_real_node=False
    )
    with run_testbed(settings) as testbed:
        client = testbed.client
        nodes = [make_node(f"scale-{index}") for index in range(-(-num_pods // PODS_PER_NODE))]
        for node in nodes:
            del node["spec"]["taints"]
        spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in (SYSTEM, SPACE)]
        client.apply(*nodes, *spaces)
        client.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "servingclusters.yaml"))
        client.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd/servingclusters.sluice.dev")
        client.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "nodes", "--all")
        yield testbed


@contextmanager
def run_routers() -> Iterator[None]:
    """Runs all routers in another process."""
    command = [sys.executable, str(Path(__file__).parent / "routers.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        yield
        process.stdin.close()


def make_kubeconfig(testbed: Testbed) -> Path:
    """Makes the operator's account with the rights of the code; returns its kubeconfig."""
    client, name = testbed.client, "operator"
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": SYSTEM}}
    ]
    group = "rbac.authorization.k8s.io"
    for kind, rules in (("Role", LEASE_RULES), ("ClusterRole", RULES)):
        metadata = {"name": name, **({"namespace": SYSTEM} if kind == "Role" else {})}
        written = [
            {"apiGroups": [of.group], "resources": [f"{of.plural}/{part}" if part else of.plural], "verbs": list(verbs)}
            for (of, part), verbs in rules.items()
        ]
        reference = {"apiGroup": group, "kind": kind, "name": name}
        subject = {"kind": "ServiceAccount", "name": name, "namespace": SYSTEM}
        objects += [
            {"apiVersion": f"{group}/v1", "kind": kind, "metadata": metadata, "rules": written},
            {
                "apiVersion": f"{group}/v1",
                "kind": f"{kind}Binding",
                "metadata": metadata,
                "roleRef": reference,
                "subjects": [subject],
            },
        ]
    client.apply(*objects)
    content = yaml.safe_load(client.kubeconfig.read_text())
    token = client.kubectl("create", "token", "-n", SYSTEM, name, "--duration=6h").strip()
    for user in content["users"]:
        user["user"] = {"token": token}
    path = testbed.settings.folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path


@contextmanager
def run_operator(testbed: Testbed, resync_s: float, profile: Path | None) -> Iterator[psutil.Process]:
    """Runs the operator, from the moment that it leads, for the length of the block.

    Args:
        testbed: The control plane.
        resync_s: Longest time between two reconciles of a cluster, in seconds.
        profile: File for cProfile's output; None turns the profiler off.
    """
    profiled = ["-m", "cProfile", "-o", str(profile)] if profile else []
    options = {"namespace": SYSTEM, "host": "127.0.0.1", "port": str(OPERATOR_PORT), "resync-s": str(resync_s)}
    command = [sys.executable, *profiled, "-m", "sluice_operator"]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "KUBECONFIG": str(make_kubeconfig(testbed))}
    log = testbed.settings.logs / "operator.log"
    with log.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        try:
            deadline = time.monotonic() + 60
            while read_page(OPERATOR_PORT, "/readyz") != "ok\n" or not is_leader():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"the operator does not lead; see {log}")
                time.sleep(0.2)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def is_leader() -> bool:
    """Whether the operator leads."""
    return "sluice_operator_is_leader 1.0" in read_page(OPERATOR_PORT, "/metrics")


def make_manifest(name: str, num_engines: int, num_routers: int) -> dict[str, Any]:
    """Makes a cluster that mounts nothing, since no program runs in its pods."""
    manifest: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny-cpu.yaml").read_text())
    manifest["metadata"] |= {"name": name, "namespace": SPACE}
    manifest["spec"]["model"]["source"] = {"huggingFace": {}}
    manifest["spec"] |= {"replicas": num_engines}
    manifest["spec"]["router"]["replicas"] = num_routers
    return manifest


def send_all(testbed: Testbed, requests: list[tuple[str, str, dict[str, Any]]]) -> None:
    """Sends requests, eight at a time.

    Args:
        testbed: The control plane.
        requests: Method, path and content of each.
    """

    def send(request: tuple[str, str, dict[str, Any]]) -> None:
        method, path, content = request
        media = MERGE if method == "PATCH" else "application/json"
        answer = testbed.client.request(method, path, content, media)
        if not answer.is_ok:
            raise RuntimeError(f"{method} {path}: {answer.content.get('message')}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, requests))


class PlanWatch:
    """Records when each plan was stored, with a watch on the ConfigMaps in another thread.

    Args:
        testbed: The control plane.

    Attributes:
        stored: Time of each plan by cluster and number, in seconds on the monotonic clock.
    """

    def __init__(self, testbed: Testbed) -> None:
        self.stored: dict[tuple[str, int], float] = {}
        self.newest: dict[str, int] = {}
        settings = testbed.settings
        self._tls = ssl.create_default_context(cafile=str(settings.pki / "ca.crt"))
        self._tls.load_cert_chain(settings.pki / "admin.crt", settings.pki / "admin.key")
        selector = "labelSelector=app.kubernetes.io%2Fmanaged-by%3Dsluice-operator"
        self._url = f"{settings.api_url}/api/v1/namespaces/{SPACE}/configmaps?watch=1&{selector}"
        threading.Thread(target=self._watch, daemon=True).start()

    def wait_for(self, name: str, generation: int, timeout_s: float = 60.0) -> float:
        """Waits until a plan of at least this generation is stored; returns the time."""
        deadline = time.monotonic() + timeout_s
        while self.newest.get(name, 0) < generation:
            if time.monotonic() > deadline:
                raise RuntimeError(f"plan {generation} of {name} was not stored in {timeout_s:.0f} s")
            time.sleep(0.001)
        return min(at_s for (of, number), at_s in list(self.stored.items()) if of == name and number >= generation)

    def _watch(self) -> None:
        try:
            with urllib.request.urlopen(self._url, context=self._tls) as answer:
                for line in answer:
                    now_s, content = time.monotonic(), json.loads(line)["object"]
                    number = content["metadata"].get("annotations", {}).get(GENERATION)
                    if number:
                        name = content["metadata"]["name"].removesuffix("-plan")
                        self.stored.setdefault((name, int(number)), now_s)
                        self.newest[name] = max(self.newest.get(name, 0), int(number))
        except OSError:
            return  # the API server may end before this thread
