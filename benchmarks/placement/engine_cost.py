"""What our part of an engine's scheduler costs per iteration of decodes alone: CPU time of one core, without vLLM.

    .venv/bin/python benchmarks/placement/engine_cost.py [--decodes N ...] [--iterations N] [--repeats N]

Per iteration: the limits of the batch policy, one question per decode for its room, what the iteration computes, and
the proposals of moves. The requests are stand-ins that nothing else reads. What vLLM does for each decode anyway, to
ask its own method and to count the token, is taken off. The least of some repeats counts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sluice_core.kv_blocks import KvBlocks
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_engine.core_messages import ConfigureCommand, RequestExtras
from sluice_engine.request_tracker import RequestTracker, TrackedRequest
from sluice_engine.scheduling.move_proposals import MoveProposer
from sluice_engine.scheduling.prefill_chunks import PrefillChunks
from sluice_engine.scheduling.received_plan import ReceivedPlan
from sluice_engine.scheduling.scheduled_batch import describe_batch, settle_batch
from sluice_engine.scheduling.scheduler import SluiceMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

STRATEGIES = ("taichi", "sluice")
ITERATION_S = 0.03
PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_SIZE = 400, 100_000, 16


class Engine:
    """The parts of an engine's scheduler that we add, and its decodes; mutable.

    Args:
        strategy: Name.
        num_decodes: Decodes that run.
    """

    def __init__(self, strategy: str, num_decodes: int) -> None:
        decodes = DecodeSet(block_size_tokens=BLOCK_SIZE, max_num_seqs=num_decodes)
        self.plan = ReceivedPlan(decodes, max_batch_tokens=2048)
        self.plan.configure(ConfigureCommand(generation=1, role="D-heavy", chunk_size_tokens=512, strategy=strategy))
        self.kv = KvBlocks(total=100 * num_decodes, used=40 * num_decodes)
        self.tracker = RequestTracker(self.plan.policy)
        self.moves = MoveProposer(decodes, self.plan)
        usage: Any = SimpleNamespace(measure=lambda: self.kv)
        self.chunks = PrefillChunks(
            self.tracker, None, usage, max_batch_tokens=2048, block_size_tokens=BLOCK_SIZE, now_s=0.0
        )
        self.requests = [self._add_decode(number) for number in range(num_decodes)]
        self.scheduled: Any = SimpleNamespace(num_scheduled_tokens={each.request_id: 1 for each in self.requests})
        self.scheduler: Any = SimpleNamespace(_tracker=self.tracker, _prefill_chunks=self.chunks)

    def _add_decode(self, number: int) -> Any:
        request: Any = SimpleNamespace(
            request_id=f"request-{number}",
            num_prompt_tokens=PROMPT_TOKENS,
            num_tokens=PROMPT_TOKENS + 1,
            num_output_tokens=1,
            num_computed_tokens=PROMPT_TOKENS,
            num_output_placeholders=1,
            max_tokens=OUTPUT_TOKENS,
            priority=0,
            arrival_time=0.0,
        )
        tracked = TrackedRequest(
            request=request,
            extras=RequestExtras(tpot_slo_s=0.1),
            kind=RequestKind.DECODE,
            arrival_s=0.0,
            user_priority=0,
        )
        self.tracker.add(tracked)
        self.moves.join(tracked, 0.0)
        return request

    def iterate(self, now_s: float) -> None:
        """Does what we add to one iteration."""
        self.chunks.renew(self.plan.command, 512, now_s)
        for request in self.requests:
            SluiceMixin._reserve_prefill_lookahead(self.scheduler, request, 0, 1)  # noqa: SLF001
            request.num_computed_tokens += 1
        batch = describe_batch(self.scheduled, self.tracker, now_s)
        settle_batch(batch, self.tracker)
        self.moves.advance(self.scheduled.num_scheduled_tokens)
        self.moves.propose(now_s, self.kv)


def answer_as_vllm(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
    """Does as vLLM's own method: it reserves nothing."""
    del request, num_computed_tokens
    return num_new_tokens


def measure_us(strategy: str, num_decodes: int, iterations: int, repeats: int) -> float:
    """Measures one iteration in microseconds."""
    engine, now_s, least_s, least_without_s = Engine(strategy, num_decodes), 0.0, math.inf, math.inf
    for _ in range(repeats):
        started_s = time.process_time()
        for _ in range(iterations):
            now_s += ITERATION_S
            engine.iterate(now_s)
        ended_s = time.process_time()
        least_s = min(least_s, ended_s - started_s)
        for _ in range(iterations):
            for request in engine.requests:
                answer_as_vllm(request, 0, 1)
                request.num_computed_tokens += 1
        least_without_s = min(least_without_s, time.process_time() - ended_s)
    return (least_s - least_without_s) / iterations * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    print("| decodes | strategy | us per iteration | of 30 ms |\n|---|---|---|---|")
    for num_decodes in options.decodes:
        for strategy in STRATEGIES:
            us = measure_us(strategy, num_decodes, options.iterations, options.repeats)
            print(f"| {num_decodes} | {strategy} | {us:.0f} | {us / ITERATION_S / 1e4:.2f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
