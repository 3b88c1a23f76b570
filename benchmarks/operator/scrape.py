"""Reads the operator's /metrics, as differences between two moments."""

from __future__ import annotations

import math
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

LOOK_S = "sluice_operator_reconcile_seconds_bucket"
CALLS = "sluice_operator_api_calls_total"
READS = frozenset({"get", "list", "discover"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """Counters at one moment, or their change between two.

    Args:
        reconciles: Cumulative number of reconciles by the upper bound of their duration, in seconds.
        calls: Requests to the API server by verb, resource and status, without those for the lease.
    """

    reconciles: dict[float, float]
    calls: dict[tuple[str, str, str], float]

    def __sub__(self, before: Scrape) -> Scrape:
        return Scrape(
            reconciles={bound: count - before.reconciles.get(bound, 0.0) for bound, count in self.reconciles.items()},
            calls={
                key: count - before.calls.get(key, 0.0)
                for key, count in self.calls.items()
                if count > before.calls.get(key, 0.0)
            },
        )

    @property
    def num_reconciles(self) -> float:
        """Looks in all."""
        return self.reconciles.get(math.inf, 0.0)

    @property
    def num_calls(self) -> float:
        """Requests in all."""
        return sum(self.calls.values())

    @property
    def num_writes(self) -> float:
        """Requests that change something."""
        return sum(count for (verb, _, _), count in self.calls.items() if verb not in READS)

    def reconcile_quantile_s(self, share: float) -> float | None:
        """Quantile of the duration of reconciles, in seconds, interpolated as Prometheus does; None without any."""
        rank, low_s, below = share * self.num_reconciles, 0.0, 0.0
        if not rank:
            return None
        for bound_s, count in sorted(self.reconciles.items()):
            if count >= rank:
                if math.isinf(bound_s):
                    return low_s
                return low_s + (bound_s - low_s) * (rank - below) / (count - below)
            low_s, below = bound_s, count
        return low_s


def read_page(port: int, path: str) -> str:
    """Reads a page of the operator; empty if the operator does not answer with success."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def scrape(port: int) -> Scrape:
    """Reads the operator's counters."""
    reconciles: dict[float, float] = {}
    calls: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(read_page(port, "/metrics")):
        for sample in family.samples:
            if sample.name == LOOK_S:
                reconciles[float(sample.labels["le"])] = sample.value
            elif sample.name == CALLS and sample.labels["resource"] != "leases":
                labels = sample.labels
                calls[labels["verb"], labels["resource"], labels["status"]] = sample.value
    return Scrape(reconciles=reconciles, calls=calls)
