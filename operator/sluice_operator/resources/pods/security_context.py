"""Security contexts of pods and containers: those of Kubernetes' Pod Security level ``restricted``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object

CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
# The images' user. Volumes belong to its group, so that a model cache that root made can be written.
IMAGE_USER = 65532
POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    "fsGroup": IMAGE_USER,
    # Not file by file where the group is right already: a cache holds hundreds of gigabytes.
    "fsGroupChangePolicy": "OnRootMismatch",
}
