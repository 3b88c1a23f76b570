"""What all pods share: service account, token, environment of Services, security, grace period."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.resources.pods.security_context import POD_SECURITY
from sluice_operator.resources.pods.termination import compute_grace_period_s

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object


TMP_VOLUME: Object = {"name": "tmp", "emptyDir": {}}


def render_common_pod_fields(service_account: str, drain_s: int) -> Object:
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
        "terminationGracePeriodSeconds": compute_grace_period_s(drain_s),
    }
