"""One model replaces another: new engines first, then the routers at once, then the old engines.

Engines of both models run side by side: beyond ``replicas`` as far as ``maxSurge`` allows, otherwise the fleet is split
step by step. Each router serves the model that it was started for, by that model's engines and name, so a request
belongs to one model from its beginning to its end. The switch is the moment in which the routers are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice_operator.api.model_identity import identify_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
    from sluice_operator.api.fields_and_defaults.rollout_spec import RolloutSpec
    from sluice_operator.resources.pods.pod_status import Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSwitch:
    """Which models a cluster serves.

    Args:
        served: The model that new requests are for.
        replaced: The model that it has replaced, while routers of that one finish their streams; None: they are gone.
    """

    served: ModelSpec
    replaced: ModelSpec | None = None

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models that are answered for, the present one first."""
        return (self.served,) if self.replaced is None else (self.served, self.replaced)

    def find_model(self, pod: Pod) -> str:
        """Id of the model that a pod serves; pods without one were made for the older model."""
        return pod.model_id or identify_model(self.models[-1])


def decide_switch(
    switch: ModelSwitch,
    target: ModelSpec,
    engines: Sequence[Pod],
    routers: Sequence[Pod],
    *,
    num_needed: int,
    may_return: bool = False,
) -> ModelSwitch:
    """Decides which model new requests are for.

    Args:
        switch: As it is stored.
        target: The model that the engines are to serve.
        engines: Engine pods.
        routers: Router pods.
        num_needed: Engines of the target that must serve before the routers switch.
        may_return: Whether the roll may still go back, so that the replaced model must not be forgotten.
    """
    wanted = identify_model(target)
    if identify_model(switch.served) == wanted:
        # Its name for clients and the way to its files may change at any time.
        switch = replace(switch, served=target)
    elif count_ready(switch, target, engines) >= num_needed:
        switch = ModelSwitch(served=target, replaced=switch.served)
    if switch.replaced is None:
        return switch
    old = identify_model(switch.replaced)
    served = identify_model(switch.served)
    has_begun = any(switch.find_model(pod) == served and pod.is_ready for pod in routers)
    # What the routers are to go back to is never forgotten: its engines may all be away.
    if may_return or old == wanted or has_routers(switch, old, routers) or not has_begun:
        return switch
    return replace(switch, replaced=None)


def has_routers(switch: ModelSwitch, model_id: str, routers: Sequence[Pod]) -> bool:
    """Whether routers of a model run, those that finish their last streams included."""
    return any(switch.find_model(pod) == model_id and not pod.has_ended for pod in routers)


def is_split(switch: ModelSwitch, target: ModelSpec, routers: Sequence[Pod]) -> bool:
    """Whether engines of the older model must stay: its routers get requests, or have streams that end there."""
    if identify_model(switch.served) != identify_model(target):
        return True
    return switch.replaced is not None and has_routers(switch, identify_model(switch.replaced), routers)


def count_ready(switch: ModelSwitch, model: ModelSpec, pods: Sequence[Pod]) -> int:
    """Pods of a model that serve."""
    wanted = identify_model(model)
    return sum(pod.is_serving and switch.find_model(pod) == wanted for pod in pods)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """How far a fleet is split between two models now.

    Args:
        num_needed: Engines of the new model that must serve before the routers switch.
        max_unavailable: Engines of the old model that may be away now.
    """

    num_needed: int
    max_unavailable: int


def split_fleet(rollout: RolloutSpec, replicas: int, num_ready: int) -> SplitStep:
    """Decides how many engines of the old model give way to new ones.

    With as many spares as engines none does. Otherwise half of the fleet does, one step after the other.

    Args:
        rollout: Its maxSurge are the spares, its maxUnavailable is the length of a step.
        replicas: Engines of the cluster.
        num_ready: Engines of the new model that serve.
    """
    surge = _resolve(rollout.max_surge, replicas, round_up=True)
    step = _resolve(rollout.max_unavailable, replicas, round_up=False)
    num_needed = min(replicas, max(-(-replicas // 2), surge))
    most = max(0, num_needed - surge)
    # Spares first; then each step waits for the engines of the last one.
    begun = max(0, num_ready - surge)
    allowed = begun + max(1, step) if num_ready >= surge else step
    return SplitStep(num_needed=num_needed, max_unavailable=min(most, allowed))


def _resolve(value: int | str, replicas: int, *, round_up: bool) -> int:
    """Resolves a count or a percentage as Kubernetes does."""
    if isinstance(value, int):
        return value
    hundredths = int(value.removesuffix("%")) * replicas
    return -(-hundredths // 100) if round_up else hundredths // 100


def choose_router_model(switch: ModelSwitch, routers: Sequence[Pod]) -> str:
    """Id of the model whose routers get new connections: the served one's once one of them is ready.

    Returns:
        The id; empty: there is no choice, or the routers in question are too old to have one.
    """
    for model in switch.models:
        model_id = identify_model(model)
        if any(pod.model_id == model_id and pod.is_serving for pod in routers):
            return model_id
    return ""
