"""The gated roll of a local cluster: the operator's verdicts, on processes in place of pods."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sluice_operator.api.labels import RESTART_HASH_ANNOTATION
from sluice_operator.planning.roll_observation import RollMeasurement, follow_roll
from sluice_operator.planning.rollout_gate import GateDecision
from sluice_operator.resources.rollout_state import continue_roll, hash_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice.v1 import control_pb2
    from sluice_cli.local_cluster.reconcile.reconcile_steps import DesiredProcesses
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.planning.roll_observation import RollingEngine
    from sluice_operator.resources.rollout_state import RolloutState

ADVICE = "edit the manifest, or take spec.rollout.gate away to roll all the same"


class LocalRoll:
    """The roll that local engines are in, and the manifest to which it goes back.

    Args:
        manifest: The one that the cluster starts with.
        engine_hash: Identifies the command and environment of its engines.
        report: Takes a line for people.
        clock: Monotonic seconds.
    """

    def __init__(
        self, manifest: ServingCluster, engine_hash: str, *, report: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._report = report
        self._clock = clock
        self._measurement = RollMeasurement()
        self.begin_anew(manifest, engine_hash)

    def begin_anew(self, manifest: ServingCluster, engine_hash: str) -> None:
        """Takes a manifest for good whose engines start all at once."""
        self._good, self._good_template = manifest, _make_template(engine_hash)
        self._decision = GateDecision(state=None)
        self.summary = ""

    def take(self, statuses: Sequence[control_pb2.GetStatusResponse]) -> None:
        """Takes the routers' counters."""
        for status in statuses:
            self._measurement.outcomes.take(status)

    def follow(
        self, manifest: ServingCluster, engine_hash: str, engines: Sequence[RollingEngine], *, has_reports: bool
    ) -> bool:
        """Decides about the roll.

        Args:
            manifest: What shall run.
            engine_hash: Identifies the command and environment of its engines.
            engines: Those that are there.
            has_reports: Whether any router answers.

        Returns:
            Whether something else is decided than before.
        """
        old = self._decision
        now = self._clock()
        self._decision = follow_roll(
            manifest.spec,
            continue_roll(old.state, self._good_template, engine_hash),
            engines,
            self._measurement,
            has_reports=has_reports,
            now=now,
            # No other process reads what is stored, so that any clock serves.
            wall_s=now,
        )
        if self._decision.state is None:
            self._good, self._good_template = manifest, _make_template(engine_hash)
        if self._decision == old:
            return False
        self._show(old.state, manifest.spec.replicas)
        return True

    @property
    def state(self) -> RolloutState | None:
        """The roll; None: there is none."""
        return self._decision.state

    def choose_manifest(self, manifest: ServingCluster) -> ServingCluster:
        """Chooses by which manifest engines start: the present one, or the one before a roll that failed."""
        return self._good if self._has_failed else manifest

    def restrain(self, desired: DesiredProcesses) -> DesiredProcesses:
        """Makes of what the manifest asks for what the gate lets run."""
        if self._has_failed:
            return replace(desired, engine_hash=hash_of(self._good_template))
        return replace(desired, is_paused=desired.is_paused or self._decision.is_held)

    @property
    def _has_failed(self) -> bool:
        return self._decision.state is not None and bool(self._decision.state.failure)

    def _show(self, old: RolloutState | None, replicas: int) -> None:
        roll = self._decision.state
        if roll is None:
            self.summary = ""
            return
        if roll.failure:
            self.summary = f"rolled back: {roll.failure}; {ADVICE}"
        else:
            unmeasured = f", {roll.num_unmeasured} without enough requests to judge" if roll.num_unmeasured else ""
            self.summary = f"rollout.gate let {roll.num_passed} of {replicas} engines pass{unmeasured}"
        if old is None or (roll.failure, roll.num_passed) != (old.failure, old.num_passed):
            self._report(self.summary)


def _make_template(engine_hash: str) -> Object:
    """What stands for a pod template here: engines with the same hash have the same command and environment."""
    return {"metadata": {"annotations": {RESTART_HASH_ANNOTATION: engine_hash}}}
