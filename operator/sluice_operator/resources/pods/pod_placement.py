"""Where pods run, and how they spread over nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.pod_fields import PodFields
    from sluice_operator.kubernetes.objects import Object


def render_placement(fields: PodFields) -> Object:
    """Renders where a pod runs, without empty parts."""
    placement: Object = {
        "nodeSelector": dict(fields.node_selector),
        "tolerations": [item.model_dump(by_alias=True, exclude_none=True) for item in fields.tolerations],
        "affinity": fields.affinity,
    }
    return {name: value for name, value in placement.items() if value}


def render_topology_spread(labels: dict[str, str]) -> list[Object]:
    """Renders the constraint that spreads pods over nodes where possible."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
    ]
