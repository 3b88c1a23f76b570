"""Samples of ended requests, of which the control plane plans."""

from __future__ import annotations

from sluice.v1 import control_pb2
from sluice_router.limit_type import Limit, Limits
from sluice_router.scheduling.entities import LiveRequest
from sluice_router.scheduling.state import RequestStatistics

NUM_SAMPLES = Limit("num_samples", 4096, "requests sampled for the planner", at_least=0)


def add(statistics: RequestStatistics, limits: Limits, request: LiveRequest, num_output: int) -> None:
    """Keeps a request for the planner, in place of the oldest.

    Requests end in another order than they arrive; the gaps still add up to the time.
    """
    arrival_s = request.new.arrival_s
    last_s = arrival_s if statistics.last_arrival_s is None else statistics.last_arrival_s
    statistics.last_arrival_s = max(last_s, arrival_s)
    statistics.samples.append(
        control_pb2.RequestSample(
            gap_s=statistics.last_arrival_s - last_s,
            prompt_tokens=len(request.new.prompt_token_ids),
            output_tokens=num_output,
            slo_class=request.new.slo_class,
        )
    )
    if len(statistics.samples) > limits[NUM_SAMPLES]:
        statistics.samples.popleft()
