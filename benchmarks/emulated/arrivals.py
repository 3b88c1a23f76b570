"""The offered load: lengths from a trace, Poisson arrivals, the same for every strategy.

One seed fixes the lengths and the gaps of a rate of one request per second; a rate divides the gaps. So a higher rate
offers the same requests in the same order, only faster, and strategies are compared on the same requests.
"""

from __future__ import annotations

import csv
import gzip
import random
from dataclasses import dataclass
from pathlib import Path

TRACES = Path(__file__).parents[1] / "traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Where lengths come from.

    Args:
        source: For people and for the result.
        rows: Prompt and output length of each request, in tokens.
        num_left_out: Rows of the trace that are longer than the limits.
    """

    source: str
    rows: list[tuple[int, int]]
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArrival:
    """One request.

    Args:
        number: Counts from 0.
        at_s: When it arrives, from the start of the load.
        prompt_tokens: Its prompt's length.
        output_tokens: Its output's length.
        ttft_slo_ms: Its own objective for the time to first token; None: the manifest's.
    """

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_slo_ms: int | None = None


def load_lengths(trace: str, *, limit_tokens: int, limit_output_tokens: int, folder: Path = TRACES) -> Lengths:
    """Loads the lengths of a trace.

    Args:
        trace: Name of a file in the folder, without its ending.
        limit_tokens: Longest prompt + output that the engines take.
        limit_output_tokens: Longest output; bounds the time that a load takes to empty.
        folder: Of traces.

    Raises:
        ValueError: The folder has no such trace.
    """

    def fits(row: tuple[int, int]) -> bool:
        return min(row) > 0 and sum(row) <= limit_tokens and row[1] <= limit_output_tokens

    known = sorted(path.name.removesuffix(".csv.gz") for path in folder.glob("*.csv.gz"))
    if trace not in known:
        raise ValueError(f"trace {trace} is not in {folder}; it has {', '.join(known)}")
    with gzip.open(folder / f"{trace}.csv.gz", "rt", newline="") as file:
        rows = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    fitting = list(filter(fits, rows))
    return Lengths(source=f"trace {trace}", rows=fitting, num_left_out=len(rows) - len(fitting))


def make_arrivals(lengths: Lengths, *, rate: float, seconds: float, seed: int) -> list[LoadArrival]:
    """Makes a Poisson load; lengths are drawn without replacement until the trace is used up.

    Args:
        lengths: Where lengths come from.
        rate: Requests per second.
        seconds: Length of the load.
        seed: Fixes lengths and gaps.
    """
    gaps, order = random.Random(seed), random.Random(seed + 1)
    rows: list[tuple[int, int]] = []
    arrivals: list[LoadArrival] = []
    at_s = gaps.expovariate(1.0) / rate
    while at_s < seconds:
        if not rows:
            rows = order.sample(lengths.rows, len(lengths.rows))
        prompt_tokens, output_tokens = rows.pop()
        arrivals.append(
            LoadArrival(number=len(arrivals), at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        )
        at_s += gaps.expovariate(1.0) / rate
    return arrivals
