"""The conditions of a ServingCluster's status, and the reasons that each may give.

``crds/servingclusters.yaml`` documents the same for users; a test holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConditionType(StrEnum):
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
    AUTOSCALED = "Autoscaled"


class Reason(StrEnum):
    """One word for why a condition has its status; the message names the object concerned."""

    SERVING = "Serving"
    SPEC_INVALID = "SpecInvalid"
    ENGINES_NOT_READY = "EnginesNotReady"
    ROUTER_NOT_READY = "RouterNotReady"
    SETTLED = "Settled"
    STARTING = "Starting"
    SCALING = "Scaling"
    ROLLING_OUT = "RollingOut"
    DRAINING = "Draining"
    APPLYING_PLAN = "ApplyingPlan"
    ROLLOUT_STOPPED = "RolloutStopped"
    ROLLOUT_PAUSED = "RolloutPaused"
    UPGRADE_WAITING = "UpgradeWaiting"
    ROLLED_BACK = "RolledBack"
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
    ENGINE_REFUSED = "EngineRefused"
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
    TUNED = "Tuned"
    ON_TRIAL = "OnTrial"
    RECOMMENDED = "Recommended"
    COOLING_DOWN = "CoolingDown"
    MEASURING = "Measuring"
    SEARCHING = "Searching"
    RETURNED = "Returned"
    NO_SAMPLE = "NoSample"
    NO_LATENCY_MODEL = "NoLatencyModel"
    NOTHING_TO_TUNE = "NothingToTune"
    SEARCH_FAILED = "SearchFailed"
    SIZED = "Sized"
    IDLE = "Idle"
    AT_MAXIMUM = "AtMaximum"


# The reasons of each condition, those of the good state first.
REASONS: dict[ConditionType, tuple[Reason, ...]] = {
    ConditionType.READY: (
        Reason.SERVING,
        Reason.IDLE,
        Reason.STARTING,
        Reason.SPEC_INVALID,
        Reason.ENGINES_NOT_READY,
        Reason.ROUTER_NOT_READY,
    ),
    ConditionType.PROGRESSING: (
        Reason.SETTLED,
        Reason.STARTING,
        Reason.SCALING,
        Reason.ROLLING_OUT,
        Reason.DRAINING,
        Reason.APPLYING_PLAN,
        Reason.ROLLOUT_STOPPED,
        Reason.ROLLOUT_PAUSED,
        Reason.UPGRADE_WAITING,
        Reason.ROLLED_BACK,
    ),
    ConditionType.DEGRADED: (
        Reason.AS_EXPECTED,
        Reason.SPEC_INVALID,
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
        Reason.ENGINE_REFUSED,
        Reason.ROLLED_BACK,
    ),
    ConditionType.SPEC_VALID: (
        Reason.VALID,
        Reason.REFUSED,
        Reason.POD_TEMPLATE_REFUSED,
        Reason.NOT_AVAILABLE,
    ),
    ConditionType.ENGINES_READY: (Reason.ALL_READY, Reason.SOME_NOT_READY, Reason.NONE_READY),
    ConditionType.ROUTER_READY: (Reason.ALL_READY, Reason.SOME_NOT_READY, Reason.NONE_READY),
    ConditionType.NETWORK_READY: (
        Reason.TCP,
        Reason.RDMA,
        Reason.RDMA_FALLBACK,
        Reason.PREFLIGHT_FAILED,
        Reason.NO_REPORT,
    ),
    ConditionType.SLO_MET: (Reason.MET, Reason.MISSED, Reason.NO_TRAFFIC, Reason.NO_REPORT),
    ConditionType.AUTOTUNED: (
        Reason.TUNED,
        Reason.ON_TRIAL,
        Reason.OFF,
        Reason.RECOMMENDED,
        Reason.COOLING_DOWN,
        Reason.MEASURING,
        Reason.SEARCHING,
        Reason.RETURNED,
        Reason.NO_SAMPLE,
        Reason.NO_LATENCY_MODEL,
        Reason.NOTHING_TO_TUNE,
        Reason.SPEC_INVALID,
        Reason.SEARCH_FAILED,
    ),
    ConditionType.AUTOSCALED: (
        Reason.SIZED,
        Reason.IDLE,
        Reason.OFF,
        Reason.RECOMMENDED,
        Reason.AT_MAXIMUM,
        Reason.SEARCHING,
        Reason.NO_SAMPLE,
        Reason.NO_LATENCY_MODEL,
        Reason.SPEC_INVALID,
        Reason.SEARCH_FAILED,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A cause for a condition: something failed and needs attention.

    Args:
        reason: In one word.
        message: The object concerned, what is wrong with it, what to do.
    """

    reason: Reason
    message: str
