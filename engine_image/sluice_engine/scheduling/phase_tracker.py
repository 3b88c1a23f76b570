"""Phases of prefills and of decodes, where the policy in force separates them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_core.scheduling.engine_policy import EnginePolicy, PhaseReport
    from sluice_engine.request_tracker import RequestTracker
    from sluice_engine.scheduling.scheduled_batch import ScheduledBatch


class PhaseTracker:
    """Tells the policy in force what iterations hold, and counts its switches over all policies.

    Args:
        tracker: Has the policy in force.

    Attributes:
        num_switches: Since the start.
    """

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._policy: EnginePolicy = tracker.policy
        self._num_counted = 0  # of the policy
        self.num_switches = 0

    def note_batch(self, now_s: float, batch: ScheduledBatch) -> None:
        """Notes an iteration that was scheduled."""
        policy = self._tracker.policy
        if policy.separates_phases:
            policy.note_batch(now_s, has_prefills=batch.prefill_tokens > 0)

    def describe(self, now_s: float, *, is_prefilling: bool) -> PhaseReport | None:
        """Describes the phase; None with a policy that knows none.

        Args:
            now_s: Monotonic time.
            is_prefilling: Prefills wait or run.
        """
        policy = self._tracker.policy
        if policy is not self._policy:
            self._policy, self._num_counted = policy, 0
        report = policy.describe_phase(now_s, is_prefilling=is_prefilling)
        if report is not None:
            self.num_switches += report.num_switches - self._num_counted
            self._num_counted = report.num_switches
        return report
