"""``spec.engine.podTemplate``: merged over the rendered template, and checked so that it stays inside its namespace.

Whoever may write a ServingCluster controls its pods, as with any Deployment, but reaches neither the host nor another
identity, unless the operator was started with ``--allow-host-access``. The API server checks the merged result once
more: types, and the namespace's Pod Security.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sluice_operator.names import CLUSTER_LABEL, COMPONENT_LABEL, ENGINE, ROLE_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sluice_operator.kubernetes_port import Object

# Fields by which lists of Kubernetes are merged; other lists are replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "resourceClaims": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
# A pod's ways out of its namespace.
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
# Belong to the operator: who the pod is, where it finds its model, and how it ends.
OWNED_POD_FIELDS = (
    "serviceAccountName",
    "serviceAccount",
    "automountServiceAccountToken",
    "terminationGracePeriodSeconds",
    "restartPolicy",
    "hostname",
    "subdomain",
    "nodeName",
    "activeDeadlineSeconds",
)
OWNED_ENGINE_FIELDS = ("command", "args", "image", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe")
OWNED_LABELS = (CLUSTER_LABEL, COMPONENT_LABEL, ROLE_LABEL)


def merge(base: Any, over: Any, field: str = "") -> Any:
    """Merges one value over another: maps by key, Kubernetes' keyed lists by their key, the rest is replaced.

    Args:
        base: As rendered.
        over: What goes over it; None removes a field of a map.
        field: Name of the field that both are the value of.
    """
    if isinstance(base, dict) and isinstance(over, dict):
        merged = {**base}
        for name, value in over.items():
            merged[name] = merge(base.get(name), value, name)
        return {name: value for name, value in merged.items() if value is not None}
    key = MERGE_KEYS.get(field)
    if key and isinstance(base, list) and isinstance(over, list):
        changed = {item[key]: item for item in over if isinstance(item, dict) and key in item}
        kept = [merge(item, changed.pop(item.get(key), {})) for item in base]
        return [*kept, *(item for item in over if not isinstance(item, dict) or item.get(key) in changed)]
    return copy.deepcopy(over)


def find_refused(over: Object, *, allow_host_access: bool) -> list[str]:
    """Finds what a podTemplate may not say.

    Args:
        over: The podTemplate.
        allow_host_access: Whether it may reach the host.

    Returns:
        A line for each field, with what to do; empty when there is none.
    """
    try:
        return [f"spec.engine.podTemplate.{line}" for line in _find(over, allow_host_access=allow_host_access)]
    except (AttributeError, TypeError) as error:
        return [f"spec.engine.podTemplate is not a pod template ({error}); compare it with `kubectl explain pod.spec`"]


def _find(over: Object, *, allow_host_access: bool) -> Iterator[str]:
    for field in set(over) - {"metadata", "spec"}:
        yield f"{field} is not a field of a pod template; use metadata or spec"
    metadata, spec = over.get("metadata", {}), over.get("spec", {})
    for field in set(metadata) - {"labels", "annotations"}:
        yield f"metadata.{field} cannot be set; remove it"
    for label in OWNED_LABELS:
        if label in metadata.get("labels", {}):
            yield f"metadata.labels[{label}] is set by Sluice; remove it"
    for field in OWNED_POD_FIELDS:
        if field in spec:
            yield f"spec.{field} is set by Sluice; remove it"
    for container in spec.get("containers", []):
        if container.get("name") == ENGINE:
            yield from (
                f"spec.containers[engine].{field} is set by Sluice; remove it (see spec.engine)"
                for field in OWNED_ENGINE_FIELDS
                if field in container
            )
    if not allow_host_access:
        yield from _find_host_access(spec)


def _find_host_access(spec: Object) -> Iterator[str]:
    advice = "reaches the host; remove it, or have the operator started with --allow-host-access"
    yield from (f"spec.{field} {advice}" for field in HOST_FIELDS if spec.get(field))
    for volume in spec.get("volumes", []):
        name = volume.get("name")
        if "hostPath" in volume:
            yield f"spec.volumes[{name}].hostPath {advice}"
        sources = volume.get("projected", {}).get("sources", [])
        if any("serviceAccountToken" in source for source in sources):
            yield f"spec.volumes[{name}] holds a service account's token; engines have none, remove it"
    yield from _find_privileges(spec.get("securityContext", {}), "spec.securityContext", advice)
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind, []):
            path = f"spec.{kind}[{container.get('name')}]"
            yield from _find_privileges(container.get("securityContext", {}), f"{path}.securityContext", advice)
            if any(port.get("hostPort") for port in container.get("ports", [])):
                yield f"{path}.ports has a hostPort, which {advice}"
            if container.get("volumeDevices"):
                yield f"{path}.volumeDevices {advice}"


def _find_privileges(context: Object, path: str, advice: str) -> Iterator[str]:
    for field in ("privileged", "allowPrivilegeEscalation"):
        if context.get(field):
            yield f"{path}.{field} {advice}"
    if context.get("procMount") not in (None, "Default"):
        yield f"{path}.procMount {advice}"
    if context.get("sysctls"):
        yield f"{path}.sysctls {advice}"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield f"{path}.windowsOptions.hostProcess {advice}"
    if context.get("runAsUser") == 0 or context.get("runAsNonRoot") is False:
        yield f"{path} runs as root, which {advice}"
    profiles = (context.get("seccompProfile", {}), context.get("appArmorProfile", {}))
    if any(profile.get("type") == "Unconfined" for profile in profiles):
        yield f"{path} is unconfined, which {advice}"
    added = set(context.get("capabilities", {}).get("add", [])) - {"IPC_LOCK", "NET_BIND_SERVICE"}
    if added:
        yield f"{path}.capabilities.add holds {', '.join(sorted(added))}, which {advice}"
