"""How nodes pull the images of pods: when, and by which credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.pod_fields import PodFields
    from sluice_operator.kubernetes.objects import Object

# A tag that moves is not followed: pods of one template run one image.
PULL_POLICY = "IfNotPresent"


def render_pull_secrets(fields: PodFields) -> Object:
    """Renders the Secrets by which a pod's images are pulled, or nothing."""
    secrets = [{"name": name} for name in fields.image_pull_secrets]
    return {"imagePullSecrets": secrets} if secrets else {}
