"""Chooses which engines leave at a scale-down. The operator and ``sluice up`` both call this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_core.records import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """Chooses engines to remove.

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
