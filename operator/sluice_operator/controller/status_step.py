"""The status step of a reconcile: writes the status when it changed, and an Event for each transition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from sluice_operator.controller.events import create_events
from sluice_operator.controller.status import make_patch, render_forbidden_status, render_status, strip_measurements
from sluice_operator.kubernetes.kinds import CLUSTERS
from sluice_operator.kubernetes.objects import uid_of

if TYPE_CHECKING:
    from sluice_operator.api.names import ClusterKey
    from sluice_operator.controller.cluster_state import ClusterState
    from sluice_operator.controller.status_inputs import StatusInputs
    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.kubernetes.own_writes import OwnWrites

# Namespace and name of a cluster, and its conditions.
RecordConditions = Callable[[str, str, Sequence[Mapping[str, str]]], None]

# Measurements change all the time; they are written to the status at most this often.
MEASURE_INTERVAL_S = 15.0


class StatusWriter:
    """Writes statuses.

    Args:
        kubernetes: The API server.
        own_writes: Records the writes: their events need no reconcile.
        identity: Name of this replica, for Events.
        now: Monotonic seconds.
        now_text: The time, as Kubernetes writes it.
        record_conditions: Takes the conditions of a cluster, for metrics.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        own_writes: OwnWrites,
        identity: str,
        *,
        now: Callable[[], float],
        now_text: Callable[[], str],
        record_conditions: RecordConditions,
    ) -> None:
        self._kubernetes = kubernetes
        self._own_writes = own_writes
        self._identity = identity
        self._now = now
        self._now_text = now_text
        self._record_conditions = record_conditions

    async def update(self, key: ClusterKey, inputs: StatusInputs, state: ClusterState) -> bool:
        """Writes the status if it changed; returns whether measurements wait for the end of their interval."""
        old = inputs.body.get("status") or {}
        new = render_status(inputs, self._now_text())
        is_measurement = new != old and strip_measurements(new) == strip_measurements(old)
        if is_measurement and self._now() - state.measured_s < MEASURE_INTERVAL_S:
            return True
        await self._write(key, inputs.body, new)
        # Also where nothing changed: measurements of five minutes stay the same for as long after the last request.
        state.measured_s = self._now()
        return False

    async def write_forbidden(self, key: ClusterKey, body: Object, message: str) -> None:
        """Writes that a read is denied; the rest of the status stays."""
        await self._write(key, body, render_forbidden_status(body, message, self._now_text()))

    async def _write(self, key: ClusterKey, body: Object, new: Object) -> None:
        """Writes a status and the Events of its transitions, if anything has changed."""
        old = body.get("status") or {}
        self._record_conditions(key.namespace, key.name, new["conditions"])
        patch = make_patch(old, new)
        if patch:
            guarded = {"metadata": {"uid": uid_of(body)}, "status": patch}
            answer = await self._kubernetes.patch_status(CLUSTERS, key.namespace, key.name, guarded)
            self._own_writes.record(body, guarded, answer)
            await create_events(self._kubernetes, body, new, self._identity, self._now_text())
