"""Kubernetes Events of a ServingCluster: which transitions of its conditions make one, and how it reads.

`kubectl describe` shows them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sluice_operator.api.condition_types import ConditionType, Reason
from sluice_operator.api.names import MANAGER
from sluice_operator.controller.conditions import MEASURED_CONDITION
from sluice_operator.kubernetes.errors import KubernetesError

if TYPE_CHECKING:
    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.objects import Object

logger = logging.getLogger(__name__)

# The API's own limit.
MAX_NOTE_CHARACTERS = 1024
# Reasons that are no news when a cluster is new, and no warning.
NORMAL_REASONS = frozenset(
    {
        Reason.AS_EXPECTED,
        Reason.VALID,
        Reason.OFF,
        Reason.SIZED,
        Reason.IDLE,
        Reason.TUNED,
        Reason.ON_TRIAL,
        Reason.RECOMMENDED,
        Reason.COOLING_DOWN,
        Reason.MEASURING,
        Reason.SEARCHING,
        Reason.NO_SAMPLE,
        Reason.NO_LATENCY_MODEL,
        Reason.NO_REPORT,
        Reason.STARTING,
        Reason.NONE_READY,
        Reason.SETTLED,
        Reason.ROLLOUT_PAUSED,
        Reason.UPGRADE_WAITING,
    }
)


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


def list_transitions(old: Object, new: Object) -> list[Object]:
    """Lists conditions that changed in status or reason, without measurements and without normal initial reasons."""
    before = {item["type"]: (item["status"], item["reason"]) for item in old.get("conditions", [])}
    return [
        item
        for item in new["conditions"]
        if item["type"] != MEASURED_CONDITION
        and before.get(item["type"]) != (item["status"], item["reason"])
        and (item["type"] in before or item["reason"] not in NORMAL_REASONS)
    ]


def is_warning(condition: Object) -> bool:
    """Whether a condition says that something is wrong."""
    bad = "True" if condition["type"] == ConditionType.DEGRADED else "False"
    return bool(condition["status"] == bad) and condition["reason"] not in NORMAL_REASONS


async def create_events(kubernetes: Kubernetes, body: Object, new: Object, identity: str, now_text: str) -> None:
    """Creates an Event for each transition. One that cannot be created is no reason to reconcile again.

    Args:
        kubernetes: The API server.
        body: The ServingCluster, with the status before.
        new: The status after.
        identity: Name of this replica.
        now_text: The time, as Kubernetes writes it.
    """
    for condition in list_transitions(body.get("status") or {}, new):
        try:
            await kubernetes.create(render_event(body, condition, identity, now_text))
        except KubernetesError as error:
            logger.warning("the Event of condition %s was not created: %s", condition["type"], error)
