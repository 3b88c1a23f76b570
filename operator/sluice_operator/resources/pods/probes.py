"""Probes of engines and routers: startup, readiness and liveness."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object

STARTUP_PERIOD_S = 2


def render_probes(startup_path: str, startup_s: int, port: int) -> Object:
    """Renders the probes; readiness and liveness have pages of their own.

    Args:
        startup_path: Page that says that the program has started.
        startup_s: Longest time until it says so, in seconds.
        port: Port of the pages.
    """

    def get(path: str) -> Object:
        return {"path": path, "port": port}

    return {
        "startupProbe": {
            "httpGet": get(startup_path),
            "periodSeconds": STARTUP_PERIOD_S,
            "timeoutSeconds": 5,
            "failureThreshold": -(-startup_s // STARTUP_PERIOD_S),
        },
        "readinessProbe": {"httpGet": get("/readyz"), "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {"httpGet": get("/livez"), "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }
