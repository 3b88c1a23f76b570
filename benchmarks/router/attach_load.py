"""Loads the engine stub without a router: what the stub alone can do, and whether its answers are right.

Attaches to each engine as a router does, keeps a fixed number of requests running, and checks every token against the
vocabulary and every index against the previous one. Prints "begin", "end" and one line of JSON, like the load
generator.

    python attach_load.py --port-base P --engines N --concurrency N --tokens N --prompt-tokens N --pieces FILE
                          --stamps FILE [--warmup-s S] [--seconds S]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop
from stamps import Stamps, open_stamps
from stub_vocabulary import read_piece_ids

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import engine_pb2_grpc, sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The load goes on this long after the window, so that the observer measures the window only.
LINGER_S = 0.3


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of the window. Mutable.

    Args:
        is_measuring: Whether the window is open.
    """

    is_measuring: bool = False
    tokens: int = 0
    messages: int = 0
    requests_finished: int = 0
    errors: int = 0
    latencies_ns: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A running request. Mutable.

    Args:
        number: Number of the request, which is its seed.
        num_tokens: Tokens that it requests.
        num_received: Tokens received so far.
    """

    number: int
    num_tokens: int
    num_received: int = 0


class EngineClient:
    """One engine's stream."""

    def __init__(
        self, options: argparse.Namespace, vocabulary: Sequence[int], stamps: Stamps, numbers: Iterator[int]
    ) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._stamps = stamps
        self._numbers = numbers
        self._running: dict[int, RunningRequest] = {}
        self._num_submits = 0

    def submit(self, slot: int, num_tokens: int) -> wire.Submit:
        """Makes the next request of a slot."""
        number = next(self._numbers)
        self._num_submits += 1
        self._running[slot] = RunningRequest(number=number, num_tokens=num_tokens)
        prompt = itertools.islice(itertools.cycle(self._vocabulary), self._options.prompt_tokens)
        return wire.Submit(
            slot=slot,
            request_id=str(number),
            fence=1,
            submit_number=self._num_submits,
            prompt_token_ids=prompt,
            sampling=sampling_pb2.SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True),
        )

    def take(self, message: wire.AttachResponse, tally: Tally) -> list[wire.Submit]:
        """Checks a message; returns the requests that follow those that have ended."""
        now_ns = time.monotonic_ns()
        columns = zip(message.slots, message.token_ids, message.output_indexes, strict=True)
        for slot, token_id, output_index in columns:
            request = self._running[slot]
            expected = self._vocabulary[(request.number + output_index) % len(self._vocabulary)]
            tally.errors += output_index != request.num_received or token_id != expected
            request.num_received += 1
        submits = []
        for finished in message.finished:
            request = self._running.pop(finished.slot)
            tally.errors += request.num_received != request.num_tokens
            tally.requests_finished += tally.is_measuring
            submits.append(self.submit(finished.slot, self._options.tokens))
        if tally.is_measuring:
            tally.tokens += len(message.slots)
            tally.messages += 1
            if message.slots and message.slots[-1] in self._running:
                request = self._running[message.slots[-1]]
                sent_ns = self._stamps.sent_at_ns(request.number, message.output_indexes[-1])
                tally.latencies_ns.append(now_ns - sent_ns)
        return submits

    async def run(self, address: str, num_slots: int, tally: Tally) -> None:
        """Keeps the slots busy until cancelled."""
        async with grpc.aio.insecure_channel(address) as channel:
            call = engine_pb2_grpc.EngineStub(channel).Attach()
            await call.write(wire.AttachRequest(hello=wire.RouterHello(router_id="attach-load")))
            lengths = random.Random(address)
            first = [self.submit(slot, lengths.randint(1, self._options.tokens)) for slot in range(num_slots)]
            await call.write(wire.AttachRequest(submits=first))
            async for message in call:
                submits = self.take(message, tally)
                if submits:
                    await call.write(wire.AttachRequest(submits=submits))


def summarize(tally: Tally, seconds: float) -> dict[str, object]:
    """Makes the result."""
    latencies = sorted(tally.latencies_ns) or [0]
    percentiles = {
        name: latencies[min(len(latencies) - 1, int(len(latencies) * share))] / 1e6
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999))
    }
    return {
        "seconds": seconds,
        "tokens": tally.tokens,
        "messages": tally.messages,
        "requests_finished": tally.requests_finished,
        "errors": {"wrong_tokens": tally.errors},
        "first_error": "a token or an index is wrong" if tally.errors else "",
        "token_latency": {"count": len(tally.latencies_ns), **percentiles},
    }


async def load(options: argparse.Namespace) -> None:
    """Runs the load and prints the result."""
    vocabulary = read_piece_ids(options.pieces)
    tally = Tally()
    with open_stamps(options.stamps) as stamps:
        numbers = itertools.count()
        async with asyncio.TaskGroup() as tasks:
            clients = []
            for index in range(options.engines):
                num_slots = options.concurrency // options.engines + (index < options.concurrency % options.engines)
                client = EngineClient(options, vocabulary, stamps, numbers)
                address = f"127.0.0.1:{options.port_base + index}"
                clients.append(tasks.create_task(client.run(address, num_slots, tally)))
            await asyncio.sleep(options.warmup_s)
            print("begin", flush=True)
            offered = stamps.tokens_sent
            tally.is_measuring = True
            begin_s = time.monotonic()
            await asyncio.sleep(options.seconds)
            tally.is_measuring = False
            print("end", flush=True)
            result = summarize(tally, time.monotonic() - begin_s)
            result["offered_tokens"] = stamps.tokens_sent - offered
            await asyncio.sleep(LINGER_S)
            print(json.dumps(result), flush=True)
            for client_task in clients:
                client_task.cancel()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Loads the engine stub directly.")
    parser.add_argument("--port-base", type=int, default=26100)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--warmup-s", type=float, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    uvloop.run(load(parser.parse_args()))


if __name__ == "__main__":
    main()
