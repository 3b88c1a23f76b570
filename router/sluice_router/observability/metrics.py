"""What the router counts, and how Prometheus sees it.

Labels are bounded: engines, roles, causes, reasons, SLO classes of the plan, owners of API keys; never a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

# Seconds. Wide enough for a tiny model on a CPU and a long prompt on a busy GPU.
_TTFT_BOUNDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TPOT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_SHORT_BOUNDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LAG_BOUNDS = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1, 1.0, 2.0)
_DECISION_BOUNDS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 1e-1)
_SIGNED_BOUNDS = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


# Owners of API keys and tokens that have series of their own; the others share one.
MAX_OWNERS = 1000
OTHER_OWNERS = "(others)"


class Histogram:
    """Counts of observations per bucket; mutable.

    Args:
        bounds: Upper bounds of the buckets, ascending; the last one, infinity, is implied.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def format_buckets(self) -> list[tuple[str, float]]:
        """Returns cumulative counts by upper bound, as Prometheus wants them."""
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        return buckets


@dataclass(slots=True)
class EngineTraffic:
    """Bytes that went over all streams to one address; mutable, changed by the stream.

    Args:
        num_bytes_up: From the engine.
        num_bytes_down: To it.
    """

    num_bytes_up: int = 0
    num_bytes_down: int = 0


def _histograms(bounds: Sequence[float]) -> defaultdict[str, Histogram]:
    return defaultdict(lambda: Histogram(bounds))


class RouterMetrics:
    """Everything that is counted: plain numbers, which ``collect`` turns into families when a scrape asks.

    Counters are keyed by their label values, in the order that ``_COUNTERS`` names.
    """

    def __init__(self) -> None:
        # By SLO class.
        self.ttft_s = _histograms(_TTFT_BOUNDS)
        self.tpot_s = _histograms(_TPOT_BOUNDS)
        self.itl_s = _histograms(_TPOT_BOUNDS)
        self.duration_s = _histograms(_TTFT_BOUNDS)
        self.queue_s = _histograms(_SHORT_BOUNDS)
        self.ttft_prediction_error_s = _histograms(_SIGNED_BOUNDS)
        # By cause of the move.
        self.move_s = _histograms(_SHORT_BOUNDS)
        # By why the engine was lost.
        self.recovery_stall_s = _histograms(_SHORT_BOUNDS)
        self.decision_s = Histogram(_DECISION_BOUNDS)
        self.loop_lag_s = Histogram(_LAG_BOUNDS)
        self._owners: set[str] = set()
        self.counters: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in _COUNTERS}

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add to a counter of ``_COUNTERS``."""
        self.counters[name][labels] += by

    def label_owner(self, owner: str) -> str:
        """Chooses the label of an owner: issuers may name any number of them, and labels stay bounded."""
        if owner in self._owners or len(self._owners) < MAX_OWNERS:
            self._owners.add(owner)
            return owner
        return OTHER_OWNERS

    def keep_owners(self, owners: Collection[str]) -> None:
        """Forgets the counters of API keys' owners that are no longer among these, so that labels stay bounded."""
        for name in ("key_requests", "key_tokens", "key_limited"):
            kept = {labels: count for labels, count in self.counters[name].items() if labels[0] in owners}
            self.counters[name] = Counter(kept)
        self._owners &= set(owners)

    def collect(self) -> Iterator[Metric]:
        """Yields every family; called by ``prometheus_client`` at a scrape."""
        for name, label, text, attribute in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=(label,))
            for value, histogram in sorted(getattr(self, attribute).items()):
                family.add_metric((value,), histogram.format_buckets(), histogram.total)
            yield family
        for name, text, histogram in (
            ("sluice_decision_seconds", "Admission and placement of a new request.", self.decision_s),
            (
                "sluice_loop_lag_seconds",
                "Time by which the event loop is late, sampled at every tick.",
                self.loop_lag_s,
            ),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.format_buckets(), sum_value=histogram.total)
        for name, (text, label_names) in _COUNTERS.items():
            counter = CounterMetricFamily(f"sluice_{name}", text, labels=label_names)
            for labels, count in sorted(self.counters[name].items()):
                counter.add_metric(labels, count)
            yield counter


# Name, label, help, attribute.
_HISTOGRAMS = (
    ("sluice_ttft_seconds", "slo_class", "Arrival at the router to first token.", "ttft_s"),
    ("sluice_tpot_seconds", "slo_class", "Time per output token, pauses included.", "tpot_s"),
    ("sluice_itl_seconds", "slo_class", "Gap between two tokens of an answer.", "itl_s"),
    ("sluice_request_duration_seconds", "slo_class", "Arrival to last token.", "duration_s"),
    ("sluice_queue_seconds", "slo_class", "Wait in the router for an engine.", "queue_s"),
    (
        "sluice_ttft_prediction_error_seconds",
        "slo_class",
        "Predicted minus actual TTFT.",
        "ttft_prediction_error_s",
    ),
    ("sluice_move_duration_seconds", "cause", "Grant asked for to first token on the target.", "move_s"),
    ("sluice_recovery_stall_seconds", "reason", "Engine lost to next token.", "recovery_stall_s"),
)

# Name without prefix and suffix: help, labels.
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Requests that ended.", ("slo_class", "result")),
    "rejected": ("Requests refused or failed by the router.", ("reason",)),
    "tokens": ("Tokens in and out.", ("kind",)),
    "key_requests": ("Requests that ended, by owner of their API key.", ("owner", "result")),
    "key_tokens": ("Tokens computed for requests that ended, by owner of their API key.", ("owner", "kind")),
    "key_limited": ("Requests refused by a limit of their API key's owner.", ("owner", "limit")),
    "placements": ("Prefills placed.", ("role", "reason")),
    "moves": ("Moves that ended.", ("cause", "result")),
    "kv_copies": ("Copies of KV made while their request went on where it was, by what became of them.", ("result",)),
    "cut_prompts": ("Prompts that were cut between two engines, by what became of them.", ("result",)),
    "flow_blocked": ("Moves that did not begin.", ("cause", "reason")),
    "recoveries": ("Requests that went on elsewhere.", ("reason",)),
    "resumed": ("Requests that went on where they were after their engine's stream broke.", ()),
    "adopted": ("Answers that clients resumed here, by what had become of them.", ("state",)),
    "engine_losses": ("Engine streams lost.", ("reason",)),
    "stale_tokens": ("Tokens of a former owner, dropped.", ()),
    "sink_faults": ("Answers given up because writing them failed.", ()),
    "grpc_messages": ("Messages on engine streams.", ("direction",)),
    "strategy_events": ("What the strategy has done that no request shows.", ("event",)),
    "plans": ("Plans received.", ("result",)),
}
