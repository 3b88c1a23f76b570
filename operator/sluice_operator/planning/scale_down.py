"""Scale-down without a broken stream: mark victims, drain them, mark who has drained, then lower the replicas by those.

Kubernetes deletes pods that are not ready first, then those with the least deletion cost; victims are chosen in that
order. Every step follows from what is observed, so that it can be interrupted anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_core.records import Role
from sluice_operator.routers.engine_reports import count_loads

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sluice_core.records import EngineId
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.routers.engine_reports import EngineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """What to do about the number of engines.

    Args:
        replicas: For the Deployment, now.
        victims: Engines that hand their work over and then go.
        undrained: Those of them that stay for now.
        drained: Those of them that have drained, or had their time to.
    """

    replicas: int
    victims: frozenset[EngineId] = frozenset()
    undrained: frozenset[EngineId] = frozenset()
    drained: frozenset[EngineId] = frozenset()


def decide_scale(
    desired_replicas: int,
    current_replicas: int | None,
    pods: Sequence[Pod],
    *,
    roles: Mapping[EngineId, Role],
    num_prefill_heavy: int,
    reports: Mapping[EngineId, EngineReport],
    drain_expired: Collection[EngineId] = frozenset(),
    leaving: Collection[EngineId] = frozenset(),
) -> ScaleDecision:
    """Decides how many engine pods there should be now, and which leave.

    Args:
        desired_replicas: Engines that the manifest asks for.
        current_replicas: Replicas of the Deployment; None before it exists.
        pods: Engine pods.
        roles: Roles in the plan.
        num_prefill_heavy: P-heavy engines that the manifest asks for.
        reports: What routers say of the engines.
        drain_expired: Engines that had their time to drain.
        leaving: Engines that leave in any case, because their nodes do: they are chosen first.
    """
    present = [pod for pod in pods if pod.is_present]
    num_victims = len(present) - desired_replicas
    if current_replicas is None or num_victims <= 0:
        return ScaleDecision(replicas=desired_replicas)
    if current_replicas <= desired_replicas:
        # Kubernetes ends those that are marked in a moment: until then they must get no requests again.
        going = frozenset([pod.engine_id for pod in present if pod.goes_next][:num_victims])
        return ScaleDecision(replicas=desired_replicas, victims=going, drained=going)
    victims = frozenset(_choose_victims(present, num_victims, roles, num_prefill_heavy, reports, leaving=leaving))
    chosen = [pod for pod in present if pod.engine_id in victims]
    # A pod that serves goes once it is marked as drained, so that Kubernetes takes this one.
    undrained = frozenset(pod.engine_id for pod in chosen if pod.is_ready and not pod.goes_next)
    drained = frozenset(
        pod.engine_id
        for pod in chosen
        if pod.goes_next or pod.engine_id in drain_expired or _is_empty(reports.get(pod.engine_id))
    )
    replicas = min(current_replicas, desired_replicas + len(undrained))
    return ScaleDecision(replicas=replicas, victims=victims, undrained=undrained, drained=drained)


def _is_empty(report: EngineReport | None) -> bool:
    return report is not None and report.is_drained


def _choose_victims(
    pods: Sequence[Pod],
    num_victims: int,
    roles: Mapping[EngineId, Role],
    num_prefill_heavy: int,
    reports: Mapping[EngineId, EngineReport],
    *,
    leaving: Collection[EngineId],
) -> set[EngineId]:
    loads = count_loads(reports)
    engines = [
        RemovableEngine(
            engine_id=pod.engine_id,
            role=roles.get(pod.engine_id),
            load=loads.get(pod.engine_id, 0),
            is_serving=pod.is_ready,
            is_victim=pod.has_deletion_cost or pod.engine_id in leaving,
        )
        for pod in sorted(pods, key=lambda pod: (pod.created, pod.name))
    ]
    return set(choose_victims(engines, num_victims, num_prefill_heavy))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovableEngine:
    """An engine that may be chosen.

    Args:
        engine_id: The engine.
        role: Role in the plan; None: it has none yet.
        load: Requests on it.
        is_serving: Whether it takes requests.
        is_victim: Whether it leaves already, chosen before or with its node: the choice stays while it drains.
    """

    engine_id: EngineId
    role: Role | None
    load: int
    is_serving: bool
    is_victim: bool = False


def choose_victims(engines: Sequence[RemovableEngine], num_victims: int, num_prefill_heavy: int) -> list[EngineId]:
    """Chooses engines to remove. The operator and ``sluice up`` both call this.

    First those that do not serve, as Kubernetes deletes pods that are not ready first. Then those of the role that has
    too many, the least loaded, the youngest.

    Args:
        engines: All engines, the oldest first.
        num_victims: Engines to remove, at most ``len(engines)``.
        num_prefill_heavy: P-heavy engines desired among those that stay.

    Returns:
        The victims, in the order of ``engines``.
    """
    num_kept = len(engines) - num_victims
    excess = {role: sum(engine.role is role for engine in engines) for role in Role}
    excess[Role.PREFILL_HEAVY] -= num_prefill_heavy
    excess[Role.DECODE_HEAVY] -= num_kept - num_prefill_heavy
    remaining = dict(enumerate(engines))
    victims = []

    def rank(age: int) -> tuple[bool, bool, bool, int, int]:
        engine = remaining[age]
        is_needed = engine.role is not None and excess[engine.role] <= 0
        return engine.is_serving, not engine.is_victim, is_needed, engine.load, -age

    for _ in range(num_victims):
        age = min(remaining, key=rank)
        victims.append(age)
        role = remaining.pop(age).role
        if role is not None:
            excess[role] -= 1
    return [engines[age].engine_id for age in sorted(victims)]
