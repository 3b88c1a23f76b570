"""Renders fields of containers: resources, environment, init containers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_operator.resources.pods.image_pull import PULL_POLICY
from sluice_operator.resources.pods.security_context import CONTAINER_SECURITY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sluice_operator.api.fields_and_defaults.pod_fields import PodFields, Resources
    from sluice_operator.kubernetes.objects import Object


# The root is read-only: caches go to an emptyDir.
TMP_MOUNT: Object = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - a volume of the pod's own


def render_resources(resources: Resources) -> Object:
    """Renders a container's resource requirements, without empty parts."""
    rendered: Object = {
        "limits": {name: str(amount) for name, amount in resources.limits.items()},
        "requests": {name: str(amount) for name, amount in resources.requests.items()},
        "claims": [claim.model_dump(by_alias=True, exclude_none=True) for claim in resources.claims],
    }
    return {name: value for name, value in rendered.items() if value}


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
    return [variable.model_dump(by_alias=True, exclude_none=True) for variable in fields.env]


def render_init_container(container: Object, image: str) -> Object:
    """Completes an init container."""
    return {**container, "image": image, "imagePullPolicy": PULL_POLICY, "securityContext": CONTAINER_SECURITY}
