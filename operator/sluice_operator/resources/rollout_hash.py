"""Decides whether pods are replaced: only when a field changes that the schema marks as one that restarts them.

The hash of these fields is kept on the Deployment together with the pod template that was rendered then. As long as
the hash stays, that template stays, so that an operator which renders a little differently replaces no pod.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.names import RESTART_HASH_ANNOTATION, TEMPLATE_ANNOTATION
from sluice_operator.kubernetes.interface import annotations_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.kubernetes.interface import Object

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
    fields = {path: value for path, value in _walk(spec, "", FieldEffect.LIVE, effects) if value not in (None, {}, [])}
    other = {"image": image, **({"control": control_name} if control_name else {})}
    text = json.dumps({"fields": fields, **other}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _walk(
    part: BaseModel, path: str, inherited: FieldEffect, effects: frozenset[FieldEffect]
) -> Iterator[tuple[str, Any]]:
    for name, field in type(part).model_fields.items():
        effect = next((mark for mark in field.metadata if isinstance(mark, FieldEffect)), inherited)
        value = getattr(part, name)
        inner = f"{path}.{field.alias or name}"
        if isinstance(value, BaseModel):
            yield from _walk(value, inner, effect, effects)
        elif effect in effects and value != field.default:
            yield inner, part.model_dump(mode="json", include={name}, exclude_defaults=True)


def keep_pod_template(deployment: Object, live: Object | None) -> Object:
    """Gives a rendered Deployment its marks, and the live one's template where nothing that restarts has changed.

    Args:
        deployment: As rendered; its pod template carries the hash.
        live: As it is in the cluster; None before it exists.
    """
    marked = copy.deepcopy(deployment)
    template = marked["spec"]["template"]
    digest = annotations_of(template)[RESTART_HASH_ANNOTATION]
    kept = annotations_of(live).get(TEMPLATE_ANNOTATION) if live else None
    if kept is not None:
        rendered_then = _read_template(kept)
        if rendered_then and annotations_of(rendered_then).get(RESTART_HASH_ANNOTATION) == digest:
            template = marked["spec"]["template"] = rendered_then
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    marked["metadata"].setdefault("annotations", {})[TEMPLATE_ANNOTATION] = text
    return marked


def _read_template(text: str) -> Object | None:
    """Reads what we wrote; None when somebody else has been at it."""
    try:
        template = json.loads(text)
    except ValueError:
        return None
    is_template = isinstance(template, dict) and isinstance(template.get("metadata"), dict) and "spec" in template
    return template if is_template else None
