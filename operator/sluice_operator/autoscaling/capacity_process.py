"""Runs a search for capacity in a process of its own, as searches for sliders are, and among them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sluice_operator.autoscaling.capacity_messages import CapacityRequest, CapacityResult
from sluice_operator.autotune.search_process import MAX_LIMIT_S, compute_limit_s

if TYPE_CHECKING:
    from sluice_operator.autotune.search_process import SearchRunner

RunCapacitySearch = Callable[[CapacityRequest], Awaitable[CapacityResult]]

COMMAND = (sys.executable, "-m", "sluice_operator.autoscaling.capacity_search")


async def run_capacity_search(runner: SearchRunner, request: CapacityRequest) -> CapacityResult:
    """Runs one search; cancelling this kills it.

    Args:
        runner: Runs searches, a few at a time.
        request: What it is for.

    Raises:
        SearchError: There is no result.
    """
    limit_s = min(sum(compute_limit_s(sized.constraints) for sized in request.requests), MAX_LIMIT_S)
    return await runner.call(COMMAND, request.to_json(), limit_s, CapacityResult.from_json)
