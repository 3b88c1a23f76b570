"""CPU of the router's side of engine streams: sockets, event loop, HTTP/2 and parsing, with an empty handler.

    .venv/bin/python benchmarks/router/engine_stream_path.py [--engines N] [--tokens N] [--seconds S]

A second process plays the engines. Their messages are spread evenly over each step of 33 ms, so that the event loop's
cost between them counts too. The figure is the CPU per message of the cheapest second, which other programs on the
machine disturb least. Compare two checkouts by running both in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import time
from typing import cast

import uvloop
from h2.config import H2Configuration
from h2.connection import H2Connection

from sluice.v1 import engine_pb2
from sluice_router.engines.engine_stream import EngineStream
from sluice_router.event_loop_bursts import BurstQueue
from sluice_router.observability.metrics import EngineTraffic

STEPS_PER_S = 30
WARM_UP_S = 0.5
READ_BYTES = 65536
HEADERS = [(":status", "200"), ("content-type", "application/grpc")]


def make_message(num_tokens: int) -> bytes:
    """Makes the message of one iteration, as gRPC sends it."""
    context_tokens = 200 * num_tokens
    message = engine_pb2.AttachResponse(
        slots=range(num_tokens),
        token_ids=range(3000, 3000 + num_tokens),
        output_indexes=[100] * num_tokens,
        load=engine_pb2.LoadReport(
            running_decodes=num_tokens,
            decode_context_tokens=context_tokens,
            kv_blocks_total=10_000,
            kv_blocks_used=context_tokens // 16,
            iteration=engine_pb2.Iteration(
                number=4000, num_decodes=num_tokens, decode_context_tokens=context_tokens, duration_s=1 / STEPS_PER_S
            ),
        ),
    ).SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message


def play_engines(ends: list[socket.socket], message: bytes, seconds: float) -> None:
    """Answers the calls, then sends messages in turn until the time is up."""
    engines = []
    for end in ends:
        engine = H2Connection(H2Configuration(client_side=False))
        engine.initiate_connection()
        engine.receive_data(end.recv(READ_BYTES))
        engine.send_headers(1, HEADERS)
        end.sendall(engine.data_to_send())
        end.settimeout(0)
        engines.append(engine)
    due_s = time.monotonic()
    for number in range(int(seconds * STEPS_PER_S * len(ends))):
        due_s += 1 / STEPS_PER_S / len(ends)
        time.sleep(max(0.0, due_s - time.monotonic()))
        engine, end = engines[number % len(ends)], ends[number % len(ends)]
        with contextlib.suppress(BlockingIOError):
            engine.receive_data(end.recv(READ_BYTES))
        engine.send_data(1, message)
        end.sendall(engine.data_to_send())


async def measure(ends: list[socket.socket], seconds: float) -> list[float]:
    """Receives for that time; returns microseconds of CPU per message, one figure per second, ascending."""
    loop, burst_queue, num_messages = asyncio.get_running_loop(), BurstQueue(), 0

    def take(_message: engine_pb2.AttachResponse) -> None:
        nonlocal num_messages
        num_messages += 1

    async def serve(end: socket.socket) -> None:
        stream = EngineStream("engine", EngineTraffic(), burst_queue, loop)
        await loop.create_connection(lambda: cast("asyncio.BaseProtocol", stream), sock=end)
        await stream.serve(take)

    async with asyncio.TaskGroup() as tasks:
        serving = [tasks.create_task(serve(end)) for end in ends]
        await asyncio.sleep(WARM_UP_S)
        costs_us = []
        for _ in range(int(seconds)):
            before, started_s = num_messages, time.process_time()
            await asyncio.sleep(1.0)
            costs_us.append((time.process_time() - started_s) / (num_messages - before) * 1e6)
        for task in serving:
            task.cancel()
    return sorted(costs_us)


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=31, help="tokens of a message (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    pairs = [socket.socketpair() for _ in range(options.engines)]
    child = os.fork()
    if child == 0:
        message = make_message(options.tokens)
        play_engines([far for _, far in pairs], message, options.seconds + 2 * WARM_UP_S)
        os._exit(0)
    costs_us = uvloop.run(measure([near for near, _ in pairs], options.seconds))
    os.waitpid(child, 0)
    print(f"CPU per message: fastest second {costs_us[0]:.1f} us, median {costs_us[len(costs_us) // 2]:.1f} us")


if __name__ == "__main__":
    main()
