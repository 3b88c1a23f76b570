"""Prefills of an iteration that was stopped where an operator ends; they go on later where they stopped.

Source: FlowPrefill (arXiv:2602.16603), section 5.1, operator-level preemption: the execution pool keeps the state of a
task that was preempted until it is resumed, and computes nothing twice.
"""

from __future__ import annotations

from sluice_core.sim.requests import SimRequest


class IterationRest:
    """What is left of an iteration when it stops; never changed.

    Args:
        time_s: Its time.
        share: Of the whole iteration, or of what was left of it when it last went on.
        num_operators: Its operators.
    """

    __slots__ = ("num_operators", "share", "time_s")

    def __init__(self, *, time_s: float, share: float, num_operators: int) -> None:
        self.time_s = time_s
        self.share = share
        self.num_operators = num_operators


class SuspendedBatch:
    """The chunks of a stopped iteration; never changed.

    Args:
        rest: What is left of it.
        chunks: Each prefill, and its tokens that had KV before the iteration.
        completing: Prefills that it completes.
        num_tokens: Its prefill tokens.
        work2: Twice their attention work.
        queued_tokens: Prefill tokens that take as long as what is left of it.
        queued_work2: Twice the attention work of these.
    """

    __slots__ = ("chunks", "completing", "num_tokens", "queued_tokens", "queued_work2", "rest", "work2")

    def __init__(
        self,
        *,
        rest: IterationRest,
        chunks: list[tuple[SimRequest, int]],
        completing: list[SimRequest],
        num_tokens: int,
        work2: int,
        queued_tokens: int,
        queued_work2: int,
    ) -> None:
        self.rest = rest
        self.chunks = chunks
        self.completing = completing
        self.num_tokens = num_tokens
        self.work2 = work2
        self.queued_tokens = queued_tokens
        self.queued_work2 = queued_work2
