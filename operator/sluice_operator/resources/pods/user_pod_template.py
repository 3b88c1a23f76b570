"""``podTemplate`` of engines and routers: merged over the rendered template, checked so that it stays in its namespace.

Whoever may write a ServingCluster controls its pods, as with any Deployment, but reaches neither the host nor another
identity, unless the operator was started with ``--allow-host-access``. What Sluice sets itself is refused before, with
the manifest (``api.pod_template_rules``). The API server checks the merged result once more: types, and the namespace's
Pod Security.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sluice_operator.api.names import ENGINE, ROUTER
from sluice_operator.resources.pods.model_volume import FETCH_MODEL, RESOLVE_MODEL
from sluice_operator.resources.pods.pod_isolation import find_cross_namespace_terms, find_isolation_violations
from sluice_operator.resources.pods.rdma import PREFLIGHT
from sluice_operator.resources.pods.security_context import CONTAINER_SECURITY, POD_SECURITY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sluice_operator.kubernetes.objects import Object

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
LISTS = ("containers", "initContainers", "volumes")
OUR_CONTAINERS = frozenset({ENGINE, ROUTER, FETCH_MODEL, RESOLVE_MODEL, PREFLIGHT})


def strategic_merge(base: Any, over: Any, field: str = "") -> Any:
    """Merges one value over another: maps by key, Kubernetes' keyed lists by their key, the rest is replaced.

    Args:
        base: As rendered.
        over: What goes over it; None removes a field of a map.
        field: Name of the field that both are the value of.
    """
    if isinstance(base, dict) and isinstance(over, dict):
        merged = {**base}
        for name, value in over.items():
            merged[name] = strategic_merge(base.get(name), value, name)
        return {name: value for name, value in merged.items() if value is not None}
    key = MERGE_KEYS.get(field)
    if key and isinstance(base, list) and isinstance(over, list):
        changed = {item[key]: item for item in over if isinstance(item, dict) and key in item}
        kept = [strategic_merge(item, changed.pop(item.get(key), {})) for item in base]
        return [*kept, *(item for item in over if not isinstance(item, dict) or item.get(key) in changed)]
    return copy.deepcopy(over)


def find_refused_fields(over: Object, component: str, *, allow_host_access: bool) -> list[str]:
    """Finds what a podTemplate may not say.

    Args:
        over: The podTemplate.
        component: Whose: ``engine`` or ``router``.
        allow_host_access: Whether it may reach the host.

    Returns:
        A line for each field, with what to do; empty when there is none.
    """
    path = f"spec.{component}.podTemplate"
    try:
        return [f"{path}.{line}" for line in _find(over, component, allow_host_access=allow_host_access)]
    except (AttributeError, TypeError) as error:
        return [f"{path} is not a pod template ({error}); compare it with `kubectl explain pod.spec`"]


def find_refused_affinity_terms(affinity: Object, component: str, *, allow_host_access: bool) -> list[str]:
    """Finds what ``affinity`` of a component may not say; see ``find_refused_fields``."""
    path = f"spec.{component}.affinity"
    try:
        return [] if allow_host_access else list(find_cross_namespace_terms(affinity, path))
    except (AttributeError, TypeError) as error:
        return [f"{path} is not an affinity ({error}); compare it with `kubectl explain pod.spec.affinity`"]


def _find(over: Object, component: str, *, allow_host_access: bool) -> Iterator[str]:
    for field in set(over) - {"metadata", "spec"}:
        yield f"{field} is not a field of a pod template; use metadata or spec"
    spec = over.get("spec", {})
    for field in set(over.get("metadata", {})) - {"labels", "annotations"}:
        yield f"metadata.{field} cannot be set; remove it"
    wrong = [field for field in LISTS if not isinstance(spec.get(field, []), list)]
    if wrong:
        yield f"spec.{wrong[0]} is not a list; write it as `kubectl explain pod.spec.{wrong[0]}` says"
        return
    yield from _find_unkeyed(spec, "spec")
    if not allow_host_access:
        yield from find_isolation_violations(strategic_merge(_make_isolation_defaults(component), over), OUR_CONTAINERS)


def _find_unkeyed(fields: Object, path: str) -> Iterator[str]:
    """Finds elements of merged lists that lack the field by which they are merged: they would be dropped."""
    for name, value in fields.items():
        where, key = f"{path}.{name}", MERGE_KEYS.get(name)
        if isinstance(value, dict):
            yield from _find_unkeyed(value, where)
        for index, item in enumerate(value if key and isinstance(value, list) else ()):
            if not isinstance(item, dict) or key not in item:
                yield f"{where}[{index}] has no {key}, by which the list is merged; add it"
            else:
                yield from _find_unkeyed(item, f"{where}[{index}]")


def _make_isolation_defaults(component: str) -> Object:
    """The rendered fields that isolate a pod; the check needs no others."""
    inits = (FETCH_MODEL, RESOLVE_MODEL, PREFLIGHT)
    return {
        "metadata": {},
        "spec": {
            "securityContext": POD_SECURITY,
            "containers": [{"name": component, "securityContext": CONTAINER_SECURITY}],
            "initContainers": [{"name": name, "securityContext": CONTAINER_SECURITY} for name in inits],
        },
    }
