"""CPU of the router's token path alone: from an engine's parsed message to the bytes of its streams, without sockets.

    .venv/bin/python benchmarks/router/token_path.py [--engines N] [--streams N] [--rounds N] [--json PATH]

The tests' engine makes the messages beforehand; the transport drops what is written. A round is one message of every
engine. The figure is the fastest round's CPU per token, which other programs on the machine disturb least. Compare two
checkouts by running both in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part / "tests") for part in ("router", "protos")]

from data_plane_harness import Harness, make_request  # noqa: E402
from edge_fakes import make_sse_response_stream  # noqa: E402

from sluice_router.api.http.http_stream import HttpStream  # noqa: E402
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders  # noqa: E402
from sluice_router.text.tokenizer import ModelText  # noqa: E402

WARM_UP_ROUNDS = 5


class DroppingTransport:
    """Counts what is written, then drops it."""

    def __init__(self) -> None:
        self.num_writes = 0

    def is_closing(self) -> bool:
        """It never is."""
        return False

    def write(self, data: bytes) -> None:
        """Drops an event."""
        assert data
        self.num_writes += 1


class Connection:
    """The parts of a connection that ``HttpStream`` uses."""

    def __init__(self, transport: DroppingTransport) -> None:
        self.transport = transport
        self.writing_paused = False


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the rounds.

    Returns:
        Microseconds of CPU per token, of the fastest round and of the median one.
    """
    text = await asyncio.to_thread(ModelText.load, options.model)
    harness, transport = Harness({f"d{number}": "D" for number in range(options.engines)}), DroppingTransport()
    num_rounds = options.rounds + WARM_UP_ROUNDS
    response_streams = []
    for number in range(options.streams):
        response_stream = make_sse_response_stream(
            text, slow_readers=SlowReaders(SlowReaderLimits()), cancel=lambda: None
        )
        stream = HttpStream(Connection(transport), is_chunked=True)  # type: ignore[arg-type]
        harness.router.admit(make_request(20, num_rounds + 50, first=1 + number % 400), response_stream)
        response_streams.append((response_stream, stream))
    while not all(request.output_token_ids for request in harness.state.requests.live.values()):
        harness.step_all()
    for response_stream, stream in response_streams:
        response_stream.open(stream, harness.clock())
    harness.deliver()
    gc.collect()
    gc.freeze()
    costs_us = []
    for _ in range(num_rounds):
        harness.clock.advance(0.03)
        messages = [(harness.engines[name], core.step()) for name, core in harness.cores.items()]
        before, started = transport.num_writes, time.process_time()
        for engine, message in messages:
            harness.router.handle_message(engine, message)
        elapsed_s = time.process_time() - started
        costs_us.append(elapsed_s / (transport.num_writes - before) * 1e6)
    costs_us = sorted(costs_us[WARM_UP_ROUNDS:])
    return {"fastest_us": costs_us[0], "median_us": costs_us[len(costs_us) // 2], "writes": transport.num_writes}


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--model", type=Path, default=ROOT / ".sluice" / "volumes" / "models" / "tiny")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    print(f"CPU per token: fastest round {result['fastest_us']:.2f} us, median {result['median_us']:.2f} us")
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
