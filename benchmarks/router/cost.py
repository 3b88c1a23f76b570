"""CPU cost of our router per token and per request, with no peers.

    .venv/bin/python benchmarks/router/cost.py [--seconds S] [--repeats N] [--json PATH]

The router is measured idle (engines report, nobody asks), under long streams, and under short requests. In each repeat
the cost of a token and of a request follow from three trials: CPU above idle = a * tokens + b * requests, for the long
streams and for the short requests of the same prompt length.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from traffic import Workload

LONG_PROMPT_TOKENS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load whose cost is measured.

    Args:
        name: For tables.
        workload: The load.
    """

    name: str
    workload: Workload


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Makes the loads: streams at several widths, then short requests."""

    def workload(**values: float) -> Workload:
        common = Workload(
            num_engines=options.engines,
            chunk_tokens=options.chunk_tokens,
            warmup_s=options.warmup_seconds,
            seconds=options.seconds,
            prompt_tokens=options.prompt_tokens,
        )
        return Workload(**{**common.as_json(), **values})

    streams = [
        Case(name=f"{count} streams", workload=workload(concurrency=count, num_tokens=options.tokens))
        for count in options.streams
    ]
    rate = options.request_rate
    long_prompt = workload(rate=rate, num_tokens=1, prompt_tokens=LONG_PROMPT_TOKENS)
    return [
        *streams,
        Case(name=f"{rate:g} one-token streams/s", workload=workload(rate=rate, num_tokens=1)),
        Case(name=f"{rate:g} one-token unary/s", workload=workload(rate=rate, num_tokens=1, is_unary=True)),
        Case(name=f"the same, prompts of {LONG_PROMPT_TOKENS}", workload=long_prompt),
    ]
