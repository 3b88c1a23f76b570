"""The placements that a strategy's row may name; to add one, add it here."""

from __future__ import annotations

import random
from collections.abc import Callable

from sluice_core.scheduling.prefill_placement import LengthAwarePlacement, PlacementPolicy
from sluice_core.scheduling.rolling.rolling_activation import RollingPlacement
from sluice_core.scheduling.shortest_queue_placement import ShortestQueuePlacement
from sluice_core.scheduling.slo_blind_placement import LeastWorkPlacement, RoundRobinPlacement
from sluice_core.strategy_parameters import StrategyParameters

PLACEMENTS: dict[str, Callable[[StrategyParameters, random.Random, int], PlacementPolicy]] = {
    "length_aware": LengthAwarePlacement,
    "round_robin": RoundRobinPlacement,
    "least_work": LeastWorkPlacement,
    "shortest_queue": ShortestQueuePlacement,
    "rolling": RollingPlacement,
}
