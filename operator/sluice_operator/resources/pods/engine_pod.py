"""The engines' pod: its container, volumes and mounts, environment, resources and GPUs.

One template for P-heavy and D-heavy engines alike: a role is a label that the operator sets on running pods, outside
template and selector, so that changing it replaces no pod. Nothing live (sliders, objectives, strategy) is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.records import EngineId
from sluice_operator.api import names
from sluice_operator.api.labels import MODEL_LABEL, RESTART_HASH_ANNOTATION, label_child, select_component
from sluice_operator.api.model_identity import identify_model
from sluice_operator.api.ports import ENGINE_PORT, METRICS_PORT
from sluice_operator.kubernetes.quantities import add_bytes
from sluice_operator.resources.command_lines import EngineSite, render_engine_command, render_engine_environment
from sluice_operator.resources.pods import (
    common_pod_fields,
    container_fields,
    image_pull,
    pod_placement,
    probes,
    rdma,
    security_context,
    termination,
)
from sluice_operator.resources.pods.model_volume import MODEL_DIRECTORY, ROUTER_FILES, mount_model
from sluice_operator.resources.pods.secrets import describe_security, locate_in_pod, mount_secrets
from sluice_operator.resources.pods.user_pod_template import strategic_merge
from sluice_operator.resources.rollout_hash import RESTARTS_ENGINES, compute_rollout_hash

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster, ServingClusterSpec
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.command_lines import Security

# The kubelet fills these in: Kubernetes replaces $(NAME) in a command by the variable's value.
ENGINE_ID_VARIABLE = "SLUICE_ENGINE_ID"
KV_HOST_VARIABLE = "SLUICE_KV_HOST"
# The id of the model, as the engine program reads it.
MODEL_ID_VARIABLE = "SLUICE_MODEL_ID"
SHARED_MEMORY = "shared-memory"
# What vLLM and its libraries write beside the model; the root is read-only.
CACHES = {
    "HOME": "/tmp",  # noqa: S108 - an emptyDir of the pod's own
    "XDG_CACHE_HOME": "/tmp/cache",  # noqa: S108
    "VLLM_CACHE_ROOT": "/tmp/vllm",  # noqa: S108
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",  # noqa: S108
    "TRITON_CACHE_DIR": "/tmp/triton",  # noqa: S108
}


def render_engine_pod(cluster: ServingCluster, image: str, gpu_resource_name: str) -> Object:
    """Renders the template of the engines' pods, the user's ``podTemplate`` merged in.

    Args:
        cluster: The manifest.
        image: Of all its containers.
        gpu_resource_name: Extended resource of GPUs, of manifests that name none; empty: nodes have none.
    """
    name, spec = cluster.metadata.name, cluster.spec
    labels = select_component(name, names.ENGINE)
    # Emulated engines load no weights.
    files = ROUTER_FILES if spec.engine.emulation else ()
    model = mount_model(spec.model, names.name_plan(name), files=files, vllm_arguments=spec.engine.extra_args)
    # Engines ask routers for certificates; the control plane speaks with routers only.
    security = describe_security(cluster, names.ENGINE, locate_in_pod, control_name="")
    volumes, mounts = mount_secrets(cluster, names.ENGINE)
    container = _render_container(spec, image, security)
    container["resources"] = _render_resources(spec, gpu_resource_name)
    container["volumeMounts"] += [model.mount, *mounts]
    container["env"] = [*model.variables, *container["env"]]
    template: Object = {
        "metadata": {
            "labels": {**label_child(name, names.ENGINE), MODEL_LABEL: identify_model(spec.model)},
            "annotations": {},
        },
        "spec": {
            **common_pod_fields.render_common_pod_fields(
                spec.engine.service_account_name or names.name_workload(name, names.ENGINE),
                # An engine that ends together with routers, in a cluster that is deleted, waits for their streams.
                max(spec.engine.drain_timeout_seconds, spec.router.drain_timeout_seconds),
            ),
            "topologySpreadConstraints": pod_placement.render_topology_spread(labels),
            "containers": [container],
            "volumes": [*model.volumes, common_pod_fields.TMP_VOLUME, _render_shared_memory(spec), *volumes],
            **image_pull.render_pull_secrets(spec.engine),
            **pod_placement.render_placement(spec.engine),
        },
    }
    if model.init_containers:
        template["spec"]["initContainers"] = [
            container_fields.render_init_container(container, image) for container in model.init_containers
        ]
    if spec.network.rdma:
        rdma.add_rdma(template, container, spec.network.rdma, image)
    merged: Object = strategic_merge(template, spec.engine.pod_template)
    digest = compute_rollout_hash(spec, RESTARTS_ENGINES, image)
    merged["metadata"].setdefault("annotations", {})[RESTART_HASH_ANNOTATION] = digest
    return merged


def _render_shared_memory(spec: ServingClusterSpec) -> Object:
    volume: Object = {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}
    if spec.engine.shared_memory is not None:
        volume["emptyDir"]["sizeLimit"] = str(spec.engine.shared_memory)
    return volume


def _render_container(spec: ServingClusterSpec, image: str, security: Security) -> Object:
    site = EngineSite(
        engine_id=EngineId(f"$({ENGINE_ID_VARIABLE})"),
        host="0.0.0.0",
        port=ENGINE_PORT,
        metrics_port=METRICS_PORT,
        kv_host=f"$({KV_HOST_VARIABLE})",
        kv_port=spec.network.kv_port,
        model_directory=MODEL_DIRECTORY,
    )
    ports = {"grpc": ENGINE_PORT, "metrics": METRICS_PORT, "kv": spec.network.kv_port}
    return {
        "name": names.ENGINE,
        "image": image,
        "imagePullPolicy": image_pull.PULL_POLICY,
        "command": render_engine_command(spec, site, security),
        "env": _render_variables(spec),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "securityContext": security_context.CONTAINER_SECURITY,
        "lifecycle": termination.LIFECYCLE,
        **probes.render_probes("/readyz", spec.engine.startup_timeout_seconds, METRICS_PORT),
        "volumeMounts": [container_fields.TMP_MOUNT, {"name": SHARED_MEMORY, "mountPath": "/dev/shm"}],  # noqa: S108
    }


def _render_variables(spec: ServingClusterSpec) -> list[Object]:
    own: Object = {
        ENGINE_ID_VARIABLE: {"fieldRef": {"fieldPath": "metadata.uid"}},
        KV_HOST_VARIABLE: {"fieldRef": {"fieldPath": "status.podIP"}},
        # A variable and no option: an older image, which a manifest may name, ignores it.
        MODEL_ID_VARIABLE: identify_model(spec.model),
        **CACHES,
    }
    if "cpu" in spec.engine.resources.limits:
        # The quota of a container is invisible to the libraries that count cores.
        limit = {"containerName": names.ENGINE, "resource": "limits.cpu", "divisor": "1"}
        own["OMP_NUM_THREADS"] = {"resourceFieldRef": limit}
    network = render_engine_environment(spec)
    return container_fields.render_environment({**own, **network}, container_fields.render_user_variables(spec.engine))


def _render_resources(spec: ServingClusterSpec, gpu_resource_name: str) -> Object:
    """The user's resources and GPUs; shared memory counts as memory of the container, so that it is added to it."""
    resources = container_fields.render_resources(spec.engine.resources)
    gpus = _count_gpus(spec, gpu_resource_name)
    if gpus:
        resources["limits"] = {**resources.get("limits", {}), **gpus}
    if spec.engine.shared_memory is not None:
        for part in ("requests", "limits"):
            amounts = resources.get(part, {})
            if "memory" in amounts:
                resources[part] = {**amounts, "memory": add_bytes(amounts["memory"], spec.engine.shared_memory)}
    return resources


def _count_gpus(spec: ServingClusterSpec, default_name: str) -> dict[str, str]:
    """GPUs by resource name, where the manifest names no device itself: devices are extended resources or claims."""
    engine = spec.engine
    name = default_name if engine.gpu_resource_name is None else engine.gpu_resource_name
    named = {*engine.resources.limits, *engine.resources.requests}
    if not name or engine.emulation or engine.resources.claims or any("/" in resource for resource in named):
        return {}
    return {name: str(engine.tensor_parallel_size)}
