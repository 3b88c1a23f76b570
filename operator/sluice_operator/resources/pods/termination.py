"""How pods end: the sleep before SIGTERM, and the grace period until SIGKILL."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object

# Routers notice a terminating pod at their next DNS resolution; until then it must still answer.
PRE_STOP_S = 2
LIFECYCLE: Object = {"preStop": {"sleep": {"seconds": PRE_STOP_S}}}
# Time beyond the drain for the interpreter and the kubelet to finish.
TERMINATION_MARGIN_S = 15


def compute_grace_period_s(drain_s: int) -> int:
    """Computes a pod's ``terminationGracePeriodSeconds``: the preStop sleep, the drain and the end of the process.

    Args:
        drain_s: Longest time that the pod hands its work over, in seconds.
    """
    return PRE_STOP_S + drain_s + TERMINATION_MARGIN_S
