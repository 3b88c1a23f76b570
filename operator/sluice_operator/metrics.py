"""The operator's metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONDITION_LABELS = ("cluster_namespace", "cluster", "condition", "status", "reason")
# An edit should be in force in about a second.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class OperatorMetrics:
    """Counters and gauges, in a registry of their own."""

    # Labels of the conditions that are exported now, by cluster.
    _shown: dict[tuple[str, str], set[tuple[str, ...]]] = field(default_factory=dict)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    reconciles: Counter = field(init=False)
    reconcile_s: Histogram = field(init=False)
    calls: Counter = field(init=False)
    call_s: Histogram = field(init=False)
    queue: Gauge = field(init=False)
    queue_age_s: Gauge = field(init=False)
    event_age_s: Gauge = field(init=False)
    loop_lag_s: Gauge = field(init=False)
    leader: Gauge = field(init=False)
    clusters: Gauge = field(init=False)
    router_connections: Gauge = field(init=False)
    conditions: Gauge = field(init=False)

    def __post_init__(self) -> None:
        registry = self.registry
        made = {
            "reconciles": Counter(
                "sluice_operator_reconciles", "Reconciles of clusters, by outcome.", ["outcome"], registry=registry
            ),
            "reconcile_s": Histogram(
                "sluice_operator_reconcile_seconds", "Duration of a reconcile.", buckets=BUCKETS_S, registry=registry
            ),
            "calls": Counter(
                "sluice_operator_api_calls",
                "Requests to the API server; status 0: no answer.",
                ["verb", "resource", "status"],
                registry=registry,
            ),
            "call_s": Histogram(
                "sluice_operator_api_call_seconds",
                "Duration of a request to the API server.",
                ["verb"],
                buckets=BUCKETS_S,
                registry=registry,
            ),
            "queue": Gauge("sluice_operator_queue_length", "Clusters scheduled for a reconcile.", registry=registry),
            "queue_age_s": Gauge(
                "sluice_operator_queue_age_seconds",
                "How long the oldest cluster has been due or in work.",
                registry=registry,
            ),
            "event_age_s": Gauge(
                "sluice_operator_last_event_age_seconds", "Time since the last event of a watch.", registry=registry
            ),
            "loop_lag_s": Gauge("sluice_operator_loop_lag_seconds", "Lag of the event loop.", registry=registry),
            "leader": Gauge("sluice_operator_is_leader", "1 on the replica that leads.", registry=registry),
            "clusters": Gauge("sluice_operator_clusters", "ServingClusters known.", registry=registry),
            "conditions": Gauge(
                "sluice_operator_cluster_condition",
                "1 for the status and the reason of each condition of a ServingCluster.",
                CONDITION_LABELS,
                registry=registry,
            ),
            "router_connections": Gauge("sluice_operator_router_links", "Connections to routers.", registry=registry),
        }
        for name, metric in made.items():
            object.__setattr__(self, name, metric)

    def record_call(self, verb: str, resource: str, status: int, duration_s: float) -> None:
        """Counts a request to the API server."""
        self.calls.labels(verb, resource, str(status)).inc()
        self.call_s.labels(verb).observe(duration_s)

    def record_conditions(self, namespace: str, cluster: str, conditions: Sequence[Mapping[str, str]]) -> None:
        """Shows the conditions of a cluster, and no earlier ones; none: the cluster is gone."""
        key = namespace, cluster
        new: set[tuple[str, ...]] = {
            (namespace, cluster, item["type"], item["status"], item["reason"]) for item in conditions
        }
        for labels in self._shown.pop(key, set()) - new:
            self.conditions.remove(*labels)
        for labels in new:
            self.conditions.labels(*labels).set(1)
        if new:
            self._shown[key] = new
