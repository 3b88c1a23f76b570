"""What all our containers and pods have in common: no privileges, probes, timing of their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_operator.api.names import METRICS_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sluice_operator.api.spec import Resources
    from sluice_operator.kubernetes.interface import Object

# Routers hear of a pod that ends within a DNS look-up; until then it must still answer.
PRE_STOP_S = 2
# Beyond the drain: the interpreter's end and the kubelet's own.
TERMINATION_MARGIN_S = 15
STARTUP_PERIOD_S = 2

# Kubernetes' Pod Security level "restricted".
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
POD_SECURITY: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
# The root is read-only: caches go to an emptyDir.
TMP_MOUNT: Object = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - a volume of the pod's own
TMP_VOLUME: Object = {"name": "tmp", "emptyDir": {}}


def render_resources(resources: Resources) -> Object:
    """Renders a container's resource requirements, without empty parts."""
    rendered: Object = {
        "limits": {name: str(amount) for name, amount in resources.limits.items()},
        "requests": {name: str(amount) for name, amount in resources.requests.items()},
        "claims": [claim.model_dump(mode="json", by_alias=True, exclude_none=True) for claim in resources.claims],
    }
    return {name: value for name, value in rendered.items() if value}


def render_probes(startup_path: str, startup_s: int) -> Object:
    """Renders the probes; readiness and liveness have pages of their own.

    Args:
        startup_path: Page that says that the program has started.
        startup_s: Longest time until it says so, in seconds.
    """

    def get(path: str) -> Object:
        return {"path": path, "port": METRICS_PORT}

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


def render_termination(drain_s: int) -> tuple[Object, int]:
    """Renders how a container ends.

    Args:
        drain_s: Longest time that it hands its work over, in seconds.

    Returns:
        Its lifecycle, and the pod's grace period in seconds; the API server wants the second above the first.
    """
    return {"preStop": {"sleep": {"seconds": PRE_STOP_S}}}, PRE_STOP_S + drain_s + TERMINATION_MARGIN_S


def render_environment(own: Mapping[str, Any], users: Sequence[Object] = ()) -> list[Object]:
    """Renders environment variables, each name once; what we own is not the user's to set (rules.py).

    Args:
        own: Values, or ``valueFrom`` as a dict.
        users: The user's own.
    """
    given = {variable["name"]: variable for variable in users}
    rendered = [
        {"name": name, **({"valueFrom": value} if isinstance(value, dict) else {"value": str(value)})}
        for name, value in own.items()
        if name not in given
    ]
    return [*rendered, *given.values()]


def render_init_container(container: Object, image: str) -> Object:
    """Completes a container that prepares the pod."""
    return {**container, "image": image, "imagePullPolicy": "IfNotPresent", "securityContext": CONTAINER_SECURITY}


def render_pod_defaults(service_account: str) -> Object:
    """Renders what every pod of ours says: no token, no environment of Services, no privileges."""
    return {
        "serviceAccountName": service_account,
        "automountServiceAccountToken": False,
        # Environment variables of Services break vLLM (vllm-project/vllm issue 34199).
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
    }


def render_topology_spread(labels: dict[str, str]) -> list[Object]:
    """Spreads pods over nodes as far as that goes."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
    ]
