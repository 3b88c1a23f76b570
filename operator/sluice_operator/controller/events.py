"""Renders the Kubernetes Event of a condition's transition, as `kubectl describe` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api.names import MANAGER
from sluice_operator.controller.conditions import is_warning

if TYPE_CHECKING:
    from sluice_operator.kubernetes.interface import Object

# The API's own limit.
MAX_NOTE_CHARACTERS = 1024


def render_event(body: Object, condition: Object, identity: str, now_text: str) -> Object:
    """Renders the event of a transition.

    Args:
        body: The ServingCluster.
        condition: The condition after it.
        identity: Name of this replica.
        now_text: The time, as Kubernetes writes it, with microseconds or without.
    """
    metadata = body["metadata"]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}-", "namespace": metadata["namespace"]},
        "eventTime": now_text.replace("Z", ".000000Z"),
        "type": "Warning" if is_warning(condition) else "Normal",
        "reason": condition["reason"],
        "action": condition["type"],
        "note": f"{condition['type']} is {condition['status']}: {condition['message']}"[:MAX_NOTE_CHARACTERS],
        "reportingController": f"sluice.dev/{MANAGER}",
        "reportingInstance": identity,
        "regarding": {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }
