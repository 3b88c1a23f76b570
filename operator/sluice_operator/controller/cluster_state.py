"""What the reconciler keeps of a cluster between two reconciles: timing and counters, nothing that a restart loses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_operator.planning.roll_observation import RollMeasurement
from sluice_operator.routers.attainment import AttainmentWindow

if TYPE_CHECKING:
    from sluice_core.records import EngineId
    from sluice_operator.autoscaling.scaler import Scaler
    from sluice_operator.autotune.tuner import Tuner, TunerInputs

# Routers and engines have taken a plan by then; otherwise the status says that they have not.
DEFER_S = 0.2
# However fast edits come, children and status wait no longer than this.
MAX_DEFER_S = 1.0


@dataclass(slots=True)
class ClusterState:
    """The state of one cluster. Mutable; only the reconciler and its steps change it.

    Times are seconds on the operator's monotonic clock: a step of the wall clock moves nothing.

    Attributes:
        first_reconcile_s: When this process reconciled the cluster first.
        tuner: Its autotuner.
        scaler: What says how many engines there are to be, where autoscaling does.
        uid: Uid of the cluster; another one under the same name begins anew.
        drain_started_s: When each victim of a scale-down began to drain.
        measured_s: When measurements were written to the status last.
        window: What routers counted in the last five minutes.
        rolling: What became of requests, by engine, and the batch of a roll that is measured.
        tuner_inputs: What the tuner went by last.
        deferred_since_s: Since when children and status wait for the next reconcile; None: they do not.
    """

    first_reconcile_s: float
    tuner: Tuner
    scaler: Scaler
    uid: str = ""
    drain_started_s: dict[EngineId, float] = field(default_factory=dict)
    measured_s: float = float("-inf")
    window: AttainmentWindow = field(default_factory=AttainmentWindow)
    rolling: RollMeasurement = field(default_factory=RollMeasurement)
    tuner_inputs: TunerInputs | None = None
    deferred_since_s: float | None = None

    def defer(self, now: float) -> bool:
        """Puts children and status off; returns False once they have waited for ``MAX_DEFER_S``."""
        if self.deferred_since_s is None:
            self.deferred_since_s = now
        return now - self.deferred_since_s < MAX_DEFER_S
