"""What the reconciler keeps of a cluster between two reconciles: timing and counters, nothing that a restart loses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_operator.routers.attainment import AttainmentWindow
from sluice_operator.routers.engine_outcomes import EngineOutcomes, Outcomes

if TYPE_CHECKING:
    from sluice_core.records import EngineId
    from sluice_operator.autoscaling.scaler import Scaler
    from sluice_operator.autotune.tuner import Tuner, TunerInputs

# Routers and engines have taken a plan by then; otherwise the status says that they have not.
DEFER_S = 0.2
# However fast edits come, children and status wait no longer than this.
MAX_DEFER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """A batch of new engines, as this process found it.

    Args:
        key: Tells it from other batches.
        seen_s: When it was found.
        total: What had ended by then, on all engines.
        on_new: What had ended on the new ones.
    """

    key: object
    seen_s: float
    total: Outcomes
    on_new: Outcomes


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
        outcomes: What became of requests, by engine.
        batch: The batch of a roll that is measured; None: none is.
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
    outcomes: EngineOutcomes = field(default_factory=EngineOutcomes)
    batch: MeasuredBatch | None = None
    tuner_inputs: TunerInputs | None = None
    deferred_since_s: float | None = None

    def defer(self, now: float) -> bool:
        """Puts children and status off; returns False once they have waited for ``MAX_DEFER_S``."""
        if self.deferred_since_s is None:
            self.deferred_since_s = now
        return now - self.deferred_since_s < MAX_DEFER_S
