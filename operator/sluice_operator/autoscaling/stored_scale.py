"""What is stored of a scaler with the plan: the number in force, and what it was found with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from sluice_operator.autoscaling.capacity_messages import CapacityResult

# Until an engine of a cluster has been seen to start.
DEFAULT_START_S = 120.0
# Start times that differ by more than this factor are another start time.
CHANGED_START_RATIO = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScale:
    """What a new process goes on with.

    Args:
        basis: ``replicas`` of the spec that the number began with.
        replicas: Engines there are to be.
        reason: What the number was chosen for, for people.
        start_s: How long an engine takes to start.
        capacity: What fleets of several sizes serve; None: no search has found it.
    """

    basis: int
    replicas: int
    reason: str = ""
    start_s: float = DEFAULT_START_S
    capacity: CapacityResult | None = None

    def note_start(self, start_s: float | None) -> StoredScale:
        """Takes a measured start time, unless it is about the one that is known."""
        if start_s is None or 1.0 / CHANGED_START_RATIO <= start_s / self.start_s <= CHANGED_START_RATIO:
            return self
        return replace(self, start_s=start_s)

    def to_json(self) -> str:
        """Serializes to JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StoredScale | None:
        """Reads what ``to_json`` wrote; None: there is nothing, or somebody edited it."""
        try:
            data = json.loads(text)
            capacity = data["capacity"] and CapacityResult.from_data(data["capacity"])
            return cls(
                basis=int(data["basis"]),
                replicas=int(data["replicas"]),
                reason=str(data["reason"]),
                start_s=max(float(data["start_s"]), 1.0),
                capacity=capacity or None,
            )
        except (ValueError, TypeError, KeyError):
            return None
