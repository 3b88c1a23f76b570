"""What nodes announce about their end: cordons, and the taints of those who take nodes away.

``ANNOUNCEMENTS`` is the only list of them; ``docs/guides/node-drains.md`` shows it, and a test holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.kubernetes.objects import name_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from sluice_operator.api.names import ClusterKey

CORDON = "node.kubernetes.io/unschedulable"
# Taints by key, and whether the machine ends at a time that no disruption budget moves. Candidates for removal, such as
# DeletionCandidateOfClusterAutoscaler, are none: most of them stay.
ANNOUNCEMENTS: dict[str, bool] = {
    CORDON: False,
    # https://github.com/kubernetes/autoscaler, cluster-autoscaler; GKE and AKS run it too.
    "ToBeDeletedByClusterAutoscaler": False,
    # https://karpenter.sh, v1 and v1beta1.
    "karpenter.sh/disrupted": False,
    "karpenter.sh/disruption": False,
    # https://github.com/aws/aws-node-termination-handler, with TAINT_NODE. A spot instance has two minutes.
    "aws-node-termination-handler/asg-lifecycle-termination": False,
    "aws-node-termination-handler/rebalance-recommendation": False,
    "aws-node-termination-handler/scheduled-maintenance": False,
    "aws-node-termination-handler/spot-itn": True,
    # GKE, from seconds to an hour before.
    "cloud.google.com/impending-node-termination": True,
    # AKS, for events of the host: half a minute for a spot machine.
    "remediator.kubernetes.azure.com/unschedulable": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What a node announces.

    Args:
        taint: The taint's key.
        has_deadline: Whether its machine ends at a time that no disruption budget moves.
    """

    taint: str
    has_deadline: bool


def read_notice(node: Mapping[str, Any]) -> Notice | None:
    """Reads what a node announces; of several announcements, one with a deadline."""
    spec = node.get("spec") or {}
    keys = {taint.get("key", "") for taint in spec.get("taints") or []}
    if spec.get("unschedulable"):
        # The taint follows a moment later.
        keys.add(CORDON)
    found = [Notice(taint=key, has_deadline=late) for key, late in ANNOUNCEMENTS.items() if key in keys]
    return max(found, key=lambda notice: notice.has_deadline, default=None)


class NodeNotices:
    """What every node announces, as far as nodes are watched. Mutable; only its methods change it."""

    def __init__(self) -> None:
        self._notices: dict[str, Notice] = {}
        self._clusters: dict[str, set[ClusterKey]] = {}

    def take_node(self, node: Mapping[str, Any], *, is_gone: bool = False) -> set[ClusterKey]:
        """Takes a node as it is now.

        Returns:
            The clusters that had a pod there, if the node announces something else than before.
        """
        name = name_of(dict(node))
        notice = None if is_gone else read_notice(node)
        has_changed = notice != self._notices.get(name)
        if notice is None:
            self._notices.pop(name, None)
        else:
            self._notices[name] = notice
        clusters = self._clusters.get(name, set())
        if is_gone:
            self._clusters.pop(name, None)
        return clusters if has_changed else set()

    def take_pod(self, key: ClusterKey, pod: Mapping[str, Any]) -> None:
        """Notes where a pod of a cluster runs."""
        if name := (pod.get("spec") or {}).get("nodeName"):
            self._clusters.setdefault(name, set()).add(key)

    def find(self, node: str) -> Notice | None:
        """What a node announces; None: nothing, or nodes are not watched."""
        return self._notices.get(node)
