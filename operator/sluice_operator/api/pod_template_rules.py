"""What ``podTemplate`` may not say, whoever allows what: fields that Sluice itself sets.

``crds/servingclusters.yaml`` states the same in CEL. What depends on the installation is checked in
``resources.pods.user_pod_template``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_operator.api.labels import CLUSTER_LABEL, COMPONENT_LABEL, MANAGED_BY_LABEL, NAME_LABEL, ROLE_LABEL
from sluice_operator.api.names import ROUTER
from sluice_operator.api.router_workers import ROUTER_CONTAINERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Variables of the engine's and the router's own container, besides those that begin with the prefix.
OWNED_ENVIRONMENT = frozenset(
    {
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_PLUGINS",
        "UCX_TLS",
        "UCX_NET_DEVICES",
        "UCX_IB_GID_INDEX",
        "UCX_TCP_PORT_RANGE",
    }
)
OWNED_PREFIX = "SLUICE_"
# Of podTemplate.spec: who the pod is, where it runs, and how it ends.
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
OWNED_METADATA = ("name", "namespace")
# By these, pods are selected, watched, and let in by network policies.
OWNED_LABELS = (CLUSTER_LABEL, COMPONENT_LABEL, ROLE_LABEL, MANAGED_BY_LABEL, NAME_LABEL)
OWNED_CONTAINER_FIELDS = ("command", "args", "image", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe")

# A field of the template, its value, and what is wrong with it.
OwnedField = tuple[tuple[str, ...], Any, str]


def is_owned_variable(name: str) -> bool:
    """Whether Sluice sets an environment variable of its containers."""
    return name in OWNED_ENVIRONMENT or name.startswith(OWNED_PREFIX)


def find_owned_fields(template: Mapping[str, Any], component: str) -> Iterator[OwnedField]:
    """Finds what a podTemplate says of fields that Sluice sets.

    Args:
        template: The podTemplate, of whatever form.
        component: Whose: ``engine`` or ``router``.
    """
    metadata, spec = (as_map(template.get(part)) for part in ("metadata", "spec"))
    for name in OWNED_METADATA:
        if name in metadata:
            yield ("metadata", name), metadata[name], "is set by Sluice; remove it"
    labels = [label for label in OWNED_LABELS if label in as_map(metadata.get("labels"))]
    if labels:
        message = "is set by Sluice, which finds its pods by it; remove it"
        yield ("metadata", "labels"), ", ".join(labels), message
    for name in OWNED_POD_FIELDS:
        if name in spec:
            yield ("spec", name), spec[name], "is set by Sluice; remove it"
    containers = spec.get("containers")
    for container in map(as_map, containers if isinstance(containers, list) else ()):
        name, path = str(container.get("name")), ("spec", "containers")
        if component == ROUTER and name in ROUTER_CONTAINERS - {ROUTER}:
            yield path, name, f"is a worker's container; use {ROUTER}, which is for all workers"
        if name == component and (owned := list(_find_in_container(container))):
            message = f"of the container {component} is set by Sluice; remove it (see spec.{component})"
            yield path, ", ".join(owned), message


def _find_in_container(container: Mapping[str, Any]) -> Iterator[str]:
    yield from (field for field in OWNED_CONTAINER_FIELDS if field in container)
    variables = container.get("env")
    for variable in map(as_map, variables if isinstance(variables, list) else ()):
        if is_owned_variable(str(variable.get("name"))):
            yield f"env[{variable['name']}]"


def as_map(value: Any) -> Mapping[str, Any]:
    """The value if it is a map; what is none has no fields."""
    return value if isinstance(value, dict) else {}
