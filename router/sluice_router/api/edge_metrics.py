"""What the client edge counts, for ``/metrics``: answers by status and reason, tokenizing, slow readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from sluice_router.api.slow_readers import SlowReaders
from sluice_router.observability.metrics import Histogram

_TOKENIZE_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0)


class EdgeMetrics:
    """Counters of the HTTP and gRPC edges of one process; a collector of ``prometheus_client``.

    Args:
        slow_readers: The paused streams, shared by both.
    """

    def __init__(self, slow_readers: SlowReaders) -> None:
        self.slow_readers = slow_readers
        self.tokenize_s = Histogram(_TOKENIZE_BOUNDS)
        # By protocol, status and reason.
        self.answers: Counter[tuple[str, str, str]] = Counter()

    def count_answer(self, protocol: str, status: str, reason: str) -> None:
        """Counts an answer.

        Args:
            protocol: ``http`` or ``grpc``.
            status: Status sent.
            reason: The error's code; empty for a good answer.
        """
        self.answers[protocol, status, reason] += 1

    def collect(self) -> Iterator[Metric]:
        """Yields every family; called by ``prometheus_client`` at a scrape."""
        answers = CounterMetricFamily("sluice_answers", "Answers sent.", labels=("protocol", "status", "reason"))
        for labels, count in sorted(self.answers.items()):
            answers.add_metric(labels, count)
        yield answers
        tokenize = HistogramMetricFamily("sluice_tokenize_seconds", "Chat template and tokenizer, per request.")
        tokenize.add_metric((), self.tokenize_s.format_buckets(), self.tokenize_s.total)
        yield tokenize
        shed = CounterMetricFamily(
            "sluice_slow_readers_shed", "Clients cut because they read too slowly.", labels=("limit",)
        )
        for limit, count in sorted(self.slow_readers.num_shed.items()):
            shed.add_metric((limit,), count)
        yield shed
        yield GaugeMetricFamily("sluice_slow_readers", "Streams paused by their client.", len(self.slow_readers))
