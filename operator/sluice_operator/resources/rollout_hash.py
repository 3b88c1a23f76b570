"""Decides whether pods are replaced: only when a field changes whose effect is a restart.

The hash of these fields is kept on the Deployment with the pod template of that time. While the hash stays, the
template stays, so that a new operator version which renders differently replaces no pod.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from sluice_operator.api.field_effects import FieldEffect, walk_fields
from sluice_operator.api.labels import RESTART_HASH_ANNOTATION, TEMPLATE_ANNOTATION
from sluice_operator.kubernetes.objects import annotations_of

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.kubernetes.objects import Object

RESTARTS_ENGINES = frozenset({FieldEffect.RESTARTS_ENGINES, FieldEffect.RESTARTS_ALL})
RESTARTS_ROUTERS = frozenset({FieldEffect.RESTARTS_ROUTERS, FieldEffect.RESTARTS_ALL})


def compute_rollout_hash(
    spec: ServingClusterSpec, effects: frozenset[FieldEffect], image: str, control_name: str | None = None
) -> str:
    """Hashes the fields that replace pods.

    Args:
        spec: The spec.
        effects: Which fields count.
        image: The image in use: the operator's own is none of the spec's fields.
        control_name: Whom routers trust as their control plane; None: everybody.
    """
    # Fields at their default are left out, so that a field that a new version adds replaces no pod.
    fields = {}
    for leaf in walk_fields(spec, path=""):
        (owner,), (value,) = leaf.owners, leaf.values
        if leaf.effect in effects and value != leaf.field.default:
            dumped = owner.model_dump(include={leaf.name}, exclude_defaults=True)
            if dumped:
                fields[leaf.path] = dumped
    other = {"image": image, **({"control": control_name} if control_name else {})}
    text = json.dumps({"fields": fields, **other}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep_pod_template(deployment: Object, live: Object | None) -> Object:
    """Keeps the live Deployment's pod template while the rollout hash stays the same.

    Args:
        deployment: As rendered; its pod template carries the hash.
        live: As it is in the cluster; None before it exists.
    """
    template = deployment["spec"]["template"]
    digest = annotations_of(template)[RESTART_HASH_ANNOTATION]
    rendered_then = read_kept_template(live)
    if rendered_then and annotations_of(rendered_then).get(RESTART_HASH_ANNOTATION) == digest:
        template = rendered_then
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    metadata = deployment["metadata"] | {"annotations": {**annotations_of(deployment), TEMPLATE_ANNOTATION: text}}
    return deployment | {"metadata": metadata, "spec": deployment["spec"] | {"template": template}}


def read_kept_template(live: Object | None) -> Object | None:
    """Reads the template that a Deployment was last rendered with; None: there is none, or somebody edited it."""
    try:
        template = json.loads(annotations_of(live).get(TEMPLATE_ANNOTATION, "")) if live else None
    except ValueError:
        return None
    is_template = isinstance(template, dict) and isinstance(template.get("metadata"), dict) and "spec" in template
    return template if is_template else None
