"""How engines are replaced: how many at once."""

from __future__ import annotations

from sluice_operator.api.field_types import CountOrPercentage, ManifestModel, StrictBool
from sluice_operator.api.fields_and_defaults.rollout_gate_spec import RolloutGateSpec  # noqa: TC001 - pydantic reads it


class RolloutSpec(ManifestModel):
    """How engines are replaced when a field that restarts them changes. `sluice up` replaces one at a time."""

    max_unavailable: CountOrPercentage = 1
    """Engines that may be away at once, as a count or a share of replicas, rounded down; at least 1 where shares leave
    no engine to replace."""
    max_surge: CountOrPercentage = 0
    """Engines beyond replicas that may run meanwhile, as a count or a share of replicas, rounded up. They need spare
    GPUs. With 0, a cluster of one engine does not serve while it is replaced."""
    paused: StrictBool = False
    """Stops between two engines: no further one is replaced until it is false again."""
    gate: RolloutGateSpec | None = None
    """Stops the roll, and goes back to the engines that served before, where the new ones are worse. Nothing is
    measured when absent."""
