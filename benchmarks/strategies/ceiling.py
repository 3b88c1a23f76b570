"""About what no scheduler can exceed in a cell: nine tenths of the requests on engines that are never idle.

    PYTHONPATH=build/compiled .venv/bin/python benchmarks/strategies/ceiling.py [--cells FILE] [--only CELL] ...

The tenth with the longest prompts is never computed. The others cost what the latency model says of iterations that are
all alike: as many decodes in each as TPOT, seats and KV allow, and any share of the prompts beside them. The rest of
the prompts is computed alone, as efficiently as can be. Left out are chance, TTFT, moves and transfers, so no strategy
comes near 1. It says where room is left: what a strategy has of it in one cell and lacks in another.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_cli.simulation.plan_inputs import make_inputs
from sluice_cli.simulation.strategy_cells import load_cells
from sluice_cli.simulation.trace_cache import load_rows
from sluice_core.latency.iteration_time import TABLE_STEP_TOKENS, IterationProfile
from sluice_core.sim.sim_setup import MAX_BATCH_TOKENS, MAX_NUM_SEQS
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(__file__).parent
_SHARES = 20  # steps between prompts that are computed alone and beside decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The most of one engine, and how it would work.

    Args:
        rate_rps: Requests per second, those that are never computed included.
        num_decodes: Decodes of an iteration that has some.
        mixed_share: Share of the prompt tokens that are computed in such iterations.
        iteration_s: Time of one.
    """

    rate_rps: float
    num_decodes: float
    mixed_share: float
    iteration_s: float


class ConvexTime:
    """The largest convex function below the time of the GEMMs; iterations of other sizes on average take no less.

    Args:
        profile: Whose ``linear_s``.
    """

    def __init__(self, profile: IterationProfile) -> None:
        self._points: list[tuple[int, float]] = []
        for tokens in range(TABLE_STEP_TOKENS, MAX_BATCH_TOKENS + 1, TABLE_STEP_TOKENS):
            point = tokens, profile.estimate_linear_s(tokens)
            while len(self._points) > 1 and _turns_down(self._points[-2], self._points[-1], point):
                self._points.pop()
            self._points.append(point)
        self._tokens = [tokens for tokens, _ in self._points]
        self.least_token_s = min(time_s / tokens for tokens, time_s in self._points)

    def estimate_s(self, tokens: float) -> float:
        """Estimate an iteration of so many tokens, in seconds."""
        if tokens <= self._tokens[0]:
            return self._points[0][1]
        end = min(bisect_left(self._tokens, tokens), len(self._points) - 1)
        (low, low_s), (high, high_s) = self._points[end - 1], self._points[end]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)


def compute_ceiling(
    profile: IterationProfile, lengths: Sequence[tuple[int, int]], tpot_s: float, kv_tokens: int
) -> Ceiling:
    """Compute the most that one engine serves within a TPOT objective.

    Args:
        profile: How long its iterations take.
        lengths: Tokens of prompts and of their outputs.
        tpot_s: The objective, in seconds.
        kv_tokens: Tokens that its KV cache holds.

    Raises:
        ValueError: No number of decodes meets the objective.
    """
    gemms = ConvexTime(profile)
    served = sorted(lengths)[: math.ceil(DEFAULT_ATTAINMENT * len(lengths))]
    prompt = sum(tokens for tokens, _ in served) / len(served)
    pairs = sum(tokens * tokens / 2 for tokens, _ in served) / len(served)
    decoded = sum(max(0, output - 1) for _, output in served) / len(served)
    contexts = sum(max(0, output - 1) * (tokens + output / 2) for tokens, output in served) / len(served)
    prompt_s = prompt * profile.prefill_token_s + pairs * profile.prefill_work_s
    decode_s = decoded * (profile.decode_request_s + profile.host_sequence_s) + contexts * profile.decode_context_s
    best: Ceiling | None = None
    for half_decodes in range(2, 2 * MAX_NUM_SEQS + 1):
        iterations = 2.0 * decoded / half_decodes
        if not iterations or contexts / iterations > kv_tokens:
            continue
        for step in range(_SHARES + 1):
            share = step / _SHARES
            tokens = (decoded + share * prompt) / iterations
            mixed_s = iterations * (gemms.estimate_s(tokens) + profile.decode_base_s) + decode_s + share * prompt_s
            if mixed_s > tpot_s * iterations:
                break  # more prompts beside decodes take longer
            alone_s = (1.0 - share) * (prompt * gemms.least_token_s + prompt_s)
            rate = 1.0 / (mixed_s + alone_s) / DEFAULT_ATTAINMENT
            if best is None or rate > best.rate_rps:
                best = Ceiling(
                    rate_rps=rate,
                    num_decodes=half_decodes / 2,
                    mixed_share=share,
                    iteration_s=mixed_s / iterations,
                )
    if best is None:
        raise ValueError(f"an iteration with a decode takes longer than the TPOT objective of {tpot_s * 1e3:g} ms")
    return best


def _turns_down(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """Say whether the middle of three points is not below the line through the others."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0])


def main() -> None:
    """Print a row per cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, default=FOLDER / "drawn_cells.toml", help="of draw_cells.py")
    parser.add_argument("--only", action="append", default=[], help="this cell; may be repeated")
    arguments = parser.parse_args()
    print("| cell | ceiling, requests/s | decodes per iteration | its time | prompts beside decodes |")
    print("|---|---|---|---|---|")
    for cell in load_cells(arguments.cells, arguments.only):
        inputs = make_inputs(cell.manifest, cell.flags, load_rows(cell.trace))
        (engine,) = inputs.problem.engines.values()
        lengths = [(row.prompt_tokens, row.output_tokens) for row in inputs.problem.rows]
        kv_tokens = engine.kv_blocks_total * engine.block_size_tokens
        found = compute_ceiling(engine.profile, lengths, inputs.problem.slo.tpot_s, kv_tokens)
        print(
            f"| {cell.name} | {inputs.goal.most_replicas * found.rate_rps:.2f} | {found.num_decodes:.0f} "
            f"| {found.iteration_s * 1e3:.0f} ms | {found.mixed_share:.0%} |"
        )


if __name__ == "__main__":
    main()
