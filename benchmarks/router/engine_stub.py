"""Serves emulated engines (``emulated_engine``) over the engine stream, one port each, all in one process.

    python engine_stub.py --port-base P --engines N --step-us US --chunk-tokens N --pieces FILE --stamps FILE
                          [--lockstep] [--fault KIND:ENGINE:AT_S[:FOR_S]]...

Faults: ``die`` (the streams break; the engine comes back after FOR_S, empty and with a new epoch), ``hang`` (the engine
sends nothing for FOR_S), ``refuse`` (it refuses grants for FOR_S), ``error`` (submits end in an error for FOR_S).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop
from emulated_engine import EmulatedEngine, EngineShape, StubLink
from stamps import open_stamps
from stub_vocabulary import read_piece_ids

from sluice.v1 import engine_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from sluice.v1 import engine_pb2 as wire

    Context = grpc.aio.ServicerContext[wire.AttachRequest, wire.AttachResponse]

FAULT_KINDS = ("die", "hang", "refuse", "error")
DEFAULT_FAULT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one engine.

    Args:
        kind: One of ``FAULT_KINDS``.
        engine: Index of the engine.
        at_s: Time since the start of the program, in seconds.
        for_s: Duration in seconds.
    """

    kind: str
    engine: int
    at_s: float
    for_s: float

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Reads KIND:ENGINE:AT_S[:FOR_S].

        Raises:
            ValueError: The text has another form.
        """
        kind, engine, at_s, *rest = text.split(":")
        if kind not in FAULT_KINDS or len(rest) > 1:
            raise ValueError(f"fault {text!r}: KIND:ENGINE:AT_S[:FOR_S], kinds {', '.join(FAULT_KINDS)}")
        return cls(kind=kind, engine=int(engine), at_s=float(at_s), for_s=float(rest[0]) if rest else DEFAULT_FAULT_S)


class StubStream:
    """Messages to one router that wait for the stream's one writer; None ends the stream."""

    def __init__(self) -> None:
        self._waiting: deque[wire.AttachResponse | None] = deque()
        self._has_news = asyncio.Event()

    def send(self, message: wire.AttachResponse | None) -> None:
        """Queues a message; None breaks the stream."""
        self._waiting.append(message)
        self._has_news.set()

    async def write(self, context: Context) -> None:
        """Sends messages until the first None."""
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                if message is None:
                    return
                await context.write(message)
            self._has_news.clear()
            await self._has_news.wait()


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """The engine stream of one emulated engine."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine = engine
        self.is_down = False
        self.is_hanging = False
        self._streams: dict[StubLink, StubStream] = {}

    async def Attach(self, request_iterator: AsyncIterator[wire.AttachRequest], context: Context) -> None:  # type: ignore[override]  # noqa: N802 - gRPC's name
        """One router's stream."""
        if self.is_down:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "emulated death")
        stream = StubStream()
        link = StubLink(send=stream.send)
        self._streams[link] = stream
        writer = asyncio.create_task(stream.write(context))
        reader = asyncio.create_task(self._read(link, request_iterator))
        self.engine.attach(link, time.monotonic())
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.engine.detach(link)
            self._streams.pop(link, None)
            for task in (writer, reader):
                task.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)
        if self.is_down:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "emulated death")

    def step(self) -> None:
        """Runs one step, unless the engine is down or hangs."""
        if not self.is_down and not self.is_hanging:
            self.engine.step(time.monotonic(), time.monotonic_ns())

    async def suffer(self, fault: Fault) -> None:
        """Starts a fault, and ends it after its duration."""
        await asyncio.sleep(fault.at_s)
        self._set_fault(fault.kind, is_on=True)
        await asyncio.sleep(fault.for_s)
        self._set_fault(fault.kind, is_on=False)

    def _set_fault(self, kind: str, *, is_on: bool) -> None:
        match kind:
            case "die":
                self.is_down = is_on
                if is_on:
                    for link in self.engine.restart():
                        self._streams[link].send(None)
            case "hang":
                self.is_hanging = is_on
            case "refuse":
                self.engine.is_refusing_grants = is_on
            case "error":
                self.engine.is_failing_submits = is_on

    async def _read(self, link: StubLink, messages: AsyncIterator[wire.AttachRequest]) -> None:
        async for message in messages:
            self.engine.take(link, message, time.monotonic(), time.monotonic_ns())


async def run_clock(servicers: Sequence[EngineServicer], step_s: float, *, is_lockstep: bool) -> None:
    """Steps the engines for ever, staggered over the step or all at once.

    A late step is made up for, but never more than one of each engine: further lost time stays lost.
    """
    groups = [list(servicers)] if is_lockstep else [[servicer] for servicer in servicers]
    interval_s = step_s / len(groups)
    due_s, index = time.monotonic(), 0
    while True:
        now_s = time.monotonic()
        due_s = max(due_s, now_s - step_s)
        while due_s <= now_s:
            for servicer in groups[index]:
                servicer.step()
            index = (index + 1) % len(groups)
            due_s += interval_s
        await asyncio.sleep(due_s - time.monotonic())


async def serve(options: argparse.Namespace) -> None:
    """Serves until cancelled."""
    vocabulary = read_piece_ids(options.pieces)
    shape = EngineShape(step_s=options.step_us / 1e6, chunk_size_tokens=options.chunk_tokens)
    with open_stamps(options.stamps) as stamps:
        servicers, servers = [], []
        for index in range(options.engines):
            servicer = EngineServicer(EmulatedEngine(f"stub-{index}", shape, vocabulary, stamps))
            server = grpc.aio.server()
            engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
            server.add_insecure_port(f"127.0.0.1:{options.port_base + index}")
            await server.start()
            servicers.append(servicer)
            servers.append(server)
        gc.freeze()
        gc.set_threshold(50_000, 50, 50)
        print("ready", flush=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_clock(servicers, shape.step_s, is_lockstep=options.lockstep))
            for fault in options.fault:
                tasks.create_task(servicers[fault.engine].suffer(fault))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Emulated engines that speak the engine stream.")
    parser.add_argument("--port-base", type=int, default=26100, help="port of the first engine")
    parser.add_argument("--engines", type=int, default=32, help="engines, 1 to 64")
    parser.add_argument("--step-us", type=float, default=33333, help="time between two steps of an engine")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="chunk size until a plan says otherwise")
    parser.add_argument("--pieces", type=Path, required=True, help="vocabulary (stub_vocabulary.py)")
    parser.add_argument("--stamps", type=Path, required=True, help="table of stamps (stamps.py)")
    parser.add_argument("--lockstep", action="store_true", help="all engines step at once")
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[], help="KIND:ENGINE:AT_S[:FOR_S]")
    options = parser.parse_args()
    if not 1 <= options.engines <= 64 or options.step_us <= 0:
        parser.error("--engines is 1 to 64, --step-us above 0")
    if any(not 0 <= fault.engine < options.engines for fault in options.fault):
        parser.error("--fault names an engine that does not exist")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(options))


if __name__ == "__main__":
    main()
