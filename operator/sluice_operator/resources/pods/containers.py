"""What all containers share: security context, probes, resources, environment; ``pod_defaults`` has what pods share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_operator.api.names import METRICS_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sluice_operator.api.spec.pod_fields import PodFields, Resources
    from sluice_operator.kubernetes.interface import Object

# Routers notice a terminating pod at their next DNS resolution; until then it must still answer.
PRE_STOP_S = 2
LIFECYCLE: Object = {"preStop": {"sleep": {"seconds": PRE_STOP_S}}}
STARTUP_PERIOD_S = 2

# Kubernetes' Pod Security level "restricted".
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
# The root is read-only: caches go to an emptyDir.
TMP_MOUNT: Object = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - a volume of the pod's own


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


def render_environment(own: Mapping[str, Any], users: Sequence[Object] = ()) -> list[Object]:
    """Renders environment variables, each name once; validation refuses users' values for our own names.

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


def render_user_variables(fields: PodFields) -> list[Object]:
    """Renders the environment variables that the user adds."""
    return [variable.model_dump(mode="json", by_alias=True, exclude_none=True) for variable in fields.env]


def render_init_container(container: Object, image: str) -> Object:
    """Completes an init container."""
    return {**container, "image": image, "imagePullPolicy": "IfNotPresent", "securityContext": CONTAINER_SECURITY}
