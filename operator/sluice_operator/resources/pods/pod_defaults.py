"""What all pods share: security context, grace period, service account."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.resources.pods.containers import PRE_STOP_S

if TYPE_CHECKING:
    from sluice_operator.kubernetes.interface import Object

# Time beyond the drain for the interpreter and the kubelet to finish.
TERMINATION_MARGIN_S = 15

# The images' user. Volumes belong to its group, so that a model cache that root made can be written.
IMAGE_USER = 65532
POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    "fsGroup": IMAGE_USER,
    # Not file by file where the group is right already: a cache holds hundreds of gigabytes.
    "fsGroupChangePolicy": "OnRootMismatch",
}
TMP_VOLUME: Object = {"name": "tmp", "emptyDir": {}}


def render_pod_defaults(service_account: str, drain_s: int) -> Object:
    """Renders the defaults of every pod: no token, no environment of Services, no privileges, time to end.

    Args:
        service_account: Name.
        drain_s: Longest time that the pod hands its work over, in seconds.
    """
    return {
        "serviceAccountName": service_account,
        "automountServiceAccountToken": False,
        # Environment variables of Services break vLLM (vllm-project/vllm issue 34199).
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        # Longer than the preStop sleep and the drain together.
        "terminationGracePeriodSeconds": PRE_STOP_S + drain_s + TERMINATION_MARGIN_S,
    }
