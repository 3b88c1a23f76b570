"""The routers' pod: a container for each worker, volumes and mounts, ports and resources.

Routers never talk to the API server: engines are found by DNS, the plan is pushed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import (
    CONTROL_TLS_ANNOTATION,
    MODEL_LABEL,
    RESTART_HASH_ANNOTATION,
    label_child,
    select_component,
)
from sluice_operator.api.model_identity import identify_model
from sluice_operator.api.ports import ENGINE_PORT, GRPC_PORT, HTTP_PORT
from sluice_operator.api.router_workers import control_port, metrics_port, name_worker
from sluice_operator.resources.command_lines import RouterSite, render_router_command
from sluice_operator.resources.pods import (
    common_pod_fields,
    container_fields,
    image_pull,
    pod_placement,
    probes,
    security_context,
    termination,
)
from sluice_operator.resources.pods.model_volume import MODEL_DIRECTORY, ROUTER_FILES, mount_model
from sluice_operator.resources.pods.secrets import describe_security, locate_in_pod, mount_secrets
from sluice_operator.resources.pods.user_pod_template import strategic_merge
from sluice_operator.resources.rollout_hash import RESTARTS_ROUTERS, compute_rollout_hash

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.pod_fields import Resources
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.command_lines import Security

PLAN_DIRECTORY = "/etc/sluice/plan"
PLAN_VOLUME = "plan"
# The id of the model, as the router program reads it.
MODEL_ID_VARIABLE = "SLUICE_ROUTER_MODEL_ID"
# Reading a tokenizer from a slow volume.
STARTUP_S = 120
# A pod without a CPU request gets what others leave: nothing while an engine on its node imports vLLM. Routers took
# 97 s to start there, and every token waits as long. 200m is a fifth of what a busy router uses at most (one thread).
CPU_REQUEST = "200m"


def render_router_pod(cluster: ServingCluster, image: str, control_name: str) -> Object:
    """Renders the template of the routers' pods, the user's ``podTemplate`` merged in.

    Args:
        cluster: The manifest.
        image: Of all its containers.
        control_name: Name in the operator's certificate.
    """
    name, spec = cluster.metadata.name, cluster.spec
    labels = select_component(name, names.ROUTER)
    model = mount_model(spec.model, names.name_plan(name), files=ROUTER_FILES)
    security = describe_security(cluster, names.ROUTER, locate_in_pod, control_name)
    volumes, mounts = mount_secrets(cluster, names.ROUTER)
    containers = [_render_worker(cluster, worker, image, security) for worker in range(spec.router.workers)]
    for container in containers:
        container["volumeMounts"] += [model.mount, *mounts]
        container["env"] = [*model.variables, *container["env"]]
    template: Object = {
        "metadata": {"labels": {**label_child(name, names.ROUTER), MODEL_LABEL: identify_model(spec.model)}},
        "spec": {
            **common_pod_fields.render_common_pod_fields(
                spec.router.service_account_name or names.name_workload(name, names.ROUTER),
                spec.router.drain_timeout_seconds,
            ),
            "topologySpreadConstraints": pod_placement.render_topology_spread(labels),
            "containers": containers,
            "volumes": [*model.volumes, common_pod_fields.TMP_VOLUME, _render_plan_volume(name), *volumes],
            **image_pull.render_pull_secrets(spec.router),
            **pod_placement.render_placement(spec.router),
        },
    }
    if model.init_containers:
        template["spec"]["initContainers"] = [
            container_fields.render_init_container(container, image) for container in model.init_containers
        ]
    merged: Object = strategic_merge(template, _repeat_for_workers(spec.router.pod_template, spec.router.workers))
    merged["metadata"].setdefault("annotations", {}).update(
        {
            RESTART_HASH_ANNOTATION: compute_rollout_hash(spec, RESTARTS_ROUTERS, image, security.control_name),
            **({CONTROL_TLS_ANNOTATION: security.router_name} if security.router_name else {}),
        }
    )
    return merged


def _render_plan_volume(cluster: str) -> Object:
    """The plan for a cold start; the operator may not have made it yet."""
    items = [{"key": names.PLAN_FILE, "path": names.PLAN_FILE}]
    return {
        "name": PLAN_VOLUME,
        "configMap": {"name": names.name_plan(cluster), "optional": True, "items": items},
    }


def _repeat_for_workers(over: Object, workers: int) -> Object:
    """Repeats what the user's ``podTemplate`` says of the router's container for each worker."""
    spec = over.get("spec", {})
    given = next((each for each in spec.get("containers", []) if each.get("name") == names.ROUTER), None)
    if given is None:
        return over
    repeated = [{**given, "name": name_worker(names.ROUTER, worker)} for worker in range(1, workers)]
    return {**over, "spec": {**spec, "containers": [*spec["containers"], *repeated]}}


def _render_worker(cluster: ServingCluster, worker: int, image: str, security: Security) -> Object:
    site = RouterSite(
        host="0.0.0.0",
        http_port=HTTP_PORT,
        grpc_port=GRPC_PORT,
        control_port=control_port(worker),
        metrics_port=metrics_port(worker),
        shares_ports=cluster.spec.router.shares_ports,
        model_directory=MODEL_DIRECTORY,
        engines=f"dns:{names.name_engine_service(cluster.metadata.name)}:{ENGINE_PORT}",
        plan_file=f"{PLAN_DIRECTORY}/{names.PLAN_FILE}",
    )
    # Containers of a pod cannot declare one port twice.
    ports = {} if worker else {"http": HTTP_PORT, "grpc": GRPC_PORT}
    ports |= {
        name_worker("control", worker): control_port(worker),
        name_worker("metrics", worker): metrics_port(worker),
    }
    return {
        "name": name_worker(names.ROUTER, worker),
        "image": image,
        "imagePullPolicy": image_pull.PULL_POLICY,
        "command": render_router_command(cluster.spec, site, security),
        "env": container_fields.render_environment(
            {"HOME": container_fields.TMP_MOUNT["mountPath"], MODEL_ID_VARIABLE: identify_model(cluster.spec.model)},
            container_fields.render_user_variables(cluster.spec.router),
        ),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "resources": _render_resources(cluster.spec.router.resources),
        "securityContext": security_context.CONTAINER_SECURITY,
        "lifecycle": termination.LIFECYCLE,
        **probes.render_probes("/livez", STARTUP_S, metrics_port(worker)),
        "volumeMounts": [
            container_fields.TMP_MOUNT,
            {"name": PLAN_VOLUME, "mountPath": PLAN_DIRECTORY, "readOnly": True},
        ],
    }


def _render_resources(resources: Resources) -> Object:
    """The user's resources; where they say nothing about the CPU, enough of it to serve beside engines that start."""
    rendered = container_fields.render_resources(resources)
    if "cpu" not in {**resources.requests, **resources.limits}:
        rendered["requests"] = {"cpu": CPU_REQUEST, **rendered.get("requests", {})}
    return rendered
