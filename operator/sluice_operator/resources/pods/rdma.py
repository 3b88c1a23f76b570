"""RDMA in engine pods: devices, networks, locked memory, and a preflight check before vLLM loads.

UCX falls back to TCP silently. Three checks catch that: the preflight container (devices and the memlock limit), the
transport that engines report (condition NetworkReady), and ``requireRDMA``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.resources.pods.image_pull import PULL_POLICY
from sluice_operator.resources.pods.security_context import CONTAINER_SECURITY

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.network_spec import RdmaSpec
    from sluice_operator.kubernetes.objects import Object

CLAIM = "rdma"
PREFLIGHT = "rdma-preflight"
# Annotation by which Multus joins a pod to further networks.
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"


def add_rdma(template: Object, container: Object, rdma: RdmaSpec, image: str) -> None:
    """Adds what RDMA needs to an engine's pod template under construction.

    Args:
        template: The template.
        container: The engine's container in it.
        rdma: What to add.
        image: Image of the engine, which holds the preflight too.
    """
    devices = _render_devices(rdma)
    resources = container.setdefault("resources", {})
    for part, names in devices.items():
        resources[part] = (
            {**resources.get(part, {}), **names}
            if isinstance(names, dict)
            else [
                *resources.get(part, []),
                *names,
            ]
        )
    if rdma.resource_claim_template_name:
        claim = {"name": CLAIM, "resourceClaimTemplateName": rdma.resource_claim_template_name}
        template["spec"]["resourceClaims"] = [claim]
    if rdma.memlock == "IPCLock":
        container["securityContext"] = {**CONTAINER_SECURITY, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    annotations = template["metadata"].setdefault("annotations", {})
    if rdma.networks:
        annotations[NETWORKS_ANNOTATION] = ",".join(rdma.networks)
    annotations.update(rdma.pod_annotations)
    template["spec"].setdefault("initContainers", []).insert(0, _render_preflight(rdma, container, devices, image))


def _render_devices(rdma: RdmaSpec) -> Object:
    """Resources of each container that touches the devices."""
    if rdma.resource_name:
        count = {rdma.resource_name: str(rdma.resource_count)}
        return {"requests": count, "limits": count}
    return {"claims": [{"name": CLAIM}]}


def _render_preflight(rdma: RdmaSpec, container: Object, devices: Object, image: str) -> Object:
    command = ["python", "-m", "sluice_engine.kv_transfer.rdma_preflight", "--fabric", rdma.fabric]
    if rdma.require_rdma:
        command.append("--require")
    return {
        "name": PREFLIGHT,
        "image": image,
        "imagePullPolicy": PULL_POLICY,
        "command": command,
        # The same rights as the engine's, so that the check sees what the engine will have.
        "securityContext": container["securityContext"],
        "resources": devices,
    }
