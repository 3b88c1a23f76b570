"""What tests of rendered objects share."""

from __future__ import annotations

from typing import Any

from fake_kubernetes import make_cluster

from sluice_operator.api.manifest import check_manifest
from sluice_operator.resources.children import RenderInputs, key_of, render_children
from sluice_operator.settings import OperatorSettings

SETTINGS = OperatorSettings(namespace="sluice-system", identity="a")


def check(**spec: Any) -> Any:
    content = make_cluster(**spec)
    content["metadata"]["uid"] = "u"
    return check_manifest(content)


def render(live: Any = None, *, has_monitors: bool = False, replicas: int = 4, **spec: Any) -> dict[Any, Any]:
    inputs = RenderInputs(engine_replicas=replicas, has_monitors=has_monitors, live=live or {})
    return {key_of(child): child for child in render_children(check(**spec), inputs, SETTINGS)}


def engine_template(**spec: Any) -> Any:
    return render(**spec)["Deployment", "tiny-engine"]["spec"]["template"]


def router_template(**spec: Any) -> Any:
    return render(**spec)["Deployment", "tiny-router"]["spec"]["template"]
