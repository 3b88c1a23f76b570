"""Chooses the engines that hand their work over before Kubernetes ends their pods, because their nodes say so.

Those who drain nodes evict as many pods at a time as the disruption budget allows. So no more engines stand idle than
are evicted next; only a machine that ends at a time of its own sends all its engines away at once. The last engine of a
model that serves goes on until its pod ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.resources.disruption_budgets import EVICTIONS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from sluice_core.records import EngineId
    from sluice_operator.planning.node_notices import NodeNotices
    from sluice_operator.resources.pods.pod_status import Pod


def choose_leaving(
    pods: Sequence[Pod],
    notices: NodeNotices,
    *,
    replicas: int,
    draining: Collection[EngineId],
    loads: Mapping[EngineId, int],
    find_model: Callable[[Pod], str] = lambda _: "",
) -> dict[EngineId, str]:
    """Chooses who leaves.

    Args:
        pods: Engine pods.
        notices: What nodes announce.
        replicas: Engines that there are to be.
        draining: Engines that drain by the present plan: they go on.
        loads: Work of each engine, in any one unit; absent ones have none.
        find_model: Id of the model that a pod serves.

    Returns:
        Why each engine leaves, in words.
    """
    serving = [pod for pod in pods if pod.is_serving]
    at_once: dict[EngineId, str] = {}
    in_turn: dict[EngineId, str] = {}
    for pod in serving:
        notice = notices.find(pod.node)
        if pod.is_disrupted:
            at_once[pod.engine_id] = f"Kubernetes is about to end pod {pod.name}"
        elif notice is not None:
            chosen = at_once if notice.has_deadline else in_turn
            chosen[pod.engine_id] = f"node {pod.node} has the taint {notice.taint}"
    # What a disruption budget counts: engines that are away use up the evictions that it allows.
    num_away = max(0, replicas - len(serving)) + len(at_once)
    turns = sorted(in_turn, key=lambda engine: (engine not in draining, loads.get(engine, 0), engine))
    leaving = at_once | {engine: in_turn[engine] for engine in turns[: max(0, EVICTIONS_AT_ONCE - num_away)]}
    kept = {find_model(pod) for pod in serving if pod.engine_id not in leaving}
    return {
        pod.engine_id: leaving[pod.engine_id] for pod in serving if pod.engine_id in leaving and find_model(pod) in kept
    }
