"""Nodes that kwok plays. Pods that tolerate their taint become Ready there, but nothing runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.client import Client
    from testbed.processes import Processes
    from testbed.settings import Settings

TAINT = "kwok.x-k8s.io/node"


def start_fake_nodes(settings: Settings, processes: Processes, client: Client, path: Path) -> None:
    """Starts kwok and its nodes, and waits until they are Ready.

    Args:
        settings: The cluster.
        processes: Starts programs.
        client: The administrator.
        path: Folder of the binaries and of kwok's stages.
    """
    processes.start(
        "kwok",
        [
            "kwok",
            f"--kubeconfig={settings.kubeconfig()}",
            f"--config={path / 'kwok-stages.yaml'}",
            f"--manage-nodes-with-annotation-selector={TAINT}=fake",
            "--node-ip=127.0.0.1",
            "--cidr=10.201.0.0/16",
            "--node-lease-duration-seconds=40",
            f"--server-address=127.0.0.1:{settings.ports.kwok}",
        ],
    )
    client.apply(*(make_node(f"fake-{index}") for index in range(settings.num_fake_nodes)))
    nodes = [f"fake-{index}" for index in range(settings.num_fake_nodes)]
    processes.wait_for("fake nodes", lambda: all(is_ready(client, node) for node in nodes))


def make_node(name: str) -> dict[str, Any]:
    """Describes a large node with GPUs."""
    room = {"cpu": "64", "memory": "512Gi", "pods": "1000", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {TAINT: "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "type": "kwok",
            },
        },
        "spec": {"taints": [{"key": TAINT, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }


def is_ready(client: Client, node: str) -> bool:
    """Whether a node is Ready."""
    answer = client.request("GET", f"/api/v1/nodes/{node}")
    return answer.is_ok and says_ready(answer.content)


def says_ready(content: dict[str, Any]) -> bool:
    """Whether the conditions of a node or a pod say that it is Ready."""
    conditions = content["status"].get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
