"""The conditions of a ServingCluster: their types, and every reason that they may have.

The texts of ``crds/servingclusters.yaml`` list the same reasons; a test holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Subject(StrEnum):
    """What a condition is about."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    SPEC_VALID = "SpecValid"
    ENGINES_READY = "EnginesReady"
    ROUTER_READY = "RouterReady"
    NETWORK_READY = "NetworkReady"
    SLO_MET = "SLOMet"
    AUTOTUNED = "Autotuned"


class Reason(StrEnum):
    """Why a condition is what it is."""

    SERVING = "Serving"
    STARTING = "Starting"
    SPEC_INVALID = "SpecInvalid"
    ENGINES_NOT_READY = "EnginesNotReady"
    ROUTER_NOT_READY = "RouterNotReady"
    SETTLED = "Settled"
    SCALING = "Scaling"
    ROLLING_OUT = "RollingOut"
    DRAINING = "Draining"
    APPLYING_PLAN = "ApplyingPlan"
    ROLLOUT_STOPPED = "RolloutStopped"
    AS_EXPECTED = "AsExpected"
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff"
    CRASH_LOOP = "CrashLoop"
    UNSCHEDULABLE = "Unschedulable"
    QUOTA_EXCEEDED = "QuotaExceeded"
    NAME_CONFLICT = "NameConflict"
    FORBIDDEN = "Forbidden"
    MOUNT_FAILED = "MountFailed"
    POD_TEMPLATE_REFUSED = "PodTemplateRefused"
    PLAN_REFUSED = "PlanRefused"
    ENGINE_FAULT = "EngineFault"
    VALID = "Valid"
    REFUSED = "Refused"
    NOT_AVAILABLE = "NotAvailable"
    ALL_READY = "AllReady"
    SOME_NOT_READY = "SomeNotReady"
    NONE_READY = "NoneReady"
    TCP = "TCP"
    RDMA = "RDMA"
    RDMA_FALLBACK = "RDMAFallback"
    PREFLIGHT_FAILED = "PreflightFailed"
    NO_REPORT = "NoReport"
    MET = "Met"
    MISSED = "Missed"
    NO_TRAFFIC = "NoTraffic"
    OFF = "Off"


REASONS: dict[Subject, tuple[Reason, ...]] = {
    Subject.READY: (
        Reason.SERVING,
        Reason.STARTING,
        Reason.SPEC_INVALID,
        Reason.ENGINES_NOT_READY,
        Reason.ROUTER_NOT_READY,
    ),
    Subject.PROGRESSING: (
        Reason.SETTLED,
        Reason.STARTING,
        Reason.SCALING,
        Reason.ROLLING_OUT,
        Reason.DRAINING,
        Reason.APPLYING_PLAN,
        Reason.ROLLOUT_STOPPED,
    ),
    Subject.DEGRADED: (
        Reason.AS_EXPECTED,
        Reason.IMAGE_PULL_BACK_OFF,
        Reason.CRASH_LOOP,
        Reason.UNSCHEDULABLE,
        Reason.QUOTA_EXCEEDED,
        Reason.NAME_CONFLICT,
        Reason.FORBIDDEN,
        Reason.MOUNT_FAILED,
        Reason.POD_TEMPLATE_REFUSED,
        Reason.PLAN_REFUSED,
        Reason.ENGINE_FAULT,
    ),
    Subject.SPEC_VALID: (Reason.VALID, Reason.REFUSED, Reason.POD_TEMPLATE_REFUSED, Reason.NOT_AVAILABLE),
    Subject.ENGINES_READY: (Reason.ALL_READY, Reason.SOME_NOT_READY, Reason.NONE_READY),
    Subject.ROUTER_READY: (Reason.ALL_READY, Reason.SOME_NOT_READY, Reason.NONE_READY),
    Subject.NETWORK_READY: (
        Reason.TCP,
        Reason.RDMA,
        Reason.RDMA_FALLBACK,
        Reason.PREFLIGHT_FAILED,
        Reason.NO_REPORT,
    ),
    Subject.SLO_MET: (Reason.MET, Reason.MISSED, Reason.NO_TRAFFIC, Reason.NO_REPORT),
    Subject.AUTOTUNED: (Reason.OFF, Reason.NOT_AVAILABLE),
}
MAX_MESSAGE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One statement.

    Args:
        subject: What it is about.
        is_true: Whether it is so; None: unknown.
        reason: Why, in one word.
        message: The object to look at, what is wrong with it, what to do.
    """

    subject: Subject
    is_true: bool | None
    reason: Reason
    message: str

    def __post_init__(self) -> None:
        assert self.reason in REASONS[self.subject], f"{self.reason} is no reason of {self.subject}"

    @property
    def status(self) -> str:
        """Kubernetes' word for it."""
        return "Unknown" if self.is_true is None else str(self.is_true)
