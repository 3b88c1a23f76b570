"""CPU of writing an event to each of many connections, in the open and with TLS, without a router: TLS's own cost.

    .venv/bin/python benchmarks/router/tls_write.py [--connections N] [--rounds N] [--json PATH]

In a round a bare server of uvloop writes an event on every connection; then a child process reads them all. The third
figure is encryption alone: as many ``SSLObject``s and no sockets. Each is the fastest round's CPU per event.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import socket
import ssl
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import uvloop
from secrets_of_clients import write_secrets

from sluice.certificates import make_server_context, read_certificates

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

READ_BYTES = 1 << 16
NEXT, LAST = True, False


def make_client_context() -> ssl.SSLContext:
    """Makes a context that trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def read_events(port: int, options: argparse.Namespace, is_encrypted: bool, pipe: Connection) -> None:  # noqa: FBT001
    """The child: with every message of the pipe, reads an event on each connection."""
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(options.connections)]
    if is_encrypted:
        context = make_client_context()
        clients = [context.wrap_socket(client) for client in clients]
    pipe.send(NEXT)
    while pipe.recv() is NEXT:
        for client in clients:
            missing = options.event_bytes
            while missing > 0:
                missing -= len(client.recv(READ_BYTES))
        pipe.send(NEXT)


class Writer(asyncio.Protocol):
    """A connection of the server.

    Args:
        everyone: Gets its transport once the handshake is over.
    """

    def __init__(self, everyone: list[asyncio.Transport]) -> None:
        self._everyone = everyone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes part."""
        self._everyone.append(cast("asyncio.Transport", transport))


async def measure_writes(options: argparse.Namespace, context: ssl.SSLContext | None) -> float:
    """Returns microseconds per event that is written to a socket."""
    loop = asyncio.get_running_loop()
    everyone: list[asyncio.Transport] = []
    server = await loop.create_server(lambda: Writer(everyone), "127.0.0.1", 0, ssl=context, backlog=4096)
    pipe, other = multiprocessing.Pipe()
    arguments = (server.sockets[0].getsockname()[1], options, context is not None, other)
    child = multiprocessing.Process(target=read_events, args=arguments, daemon=True)
    child.start()
    was_read: asyncio.Queue[bool] = asyncio.Queue()
    loop.add_reader(pipe.fileno(), lambda: was_read.put_nowait(pipe.recv()))
    await was_read.get()
    while len(everyone) < options.connections:  # noqa: ASYNC110 - once
        await asyncio.sleep(0.01)
    event, costs_us = b"d" * options.event_bytes, list[float]()
    gc.collect()
    for _ in range(options.rounds):
        started_ns = time.thread_time_ns()
        for transport in everyone:
            transport.write(event)
        # uvloop sends at the end of an iteration. Nobody reads meanwhile: that would slow both on cores that share.
        await asyncio.sleep(0)
        costs_us.append((time.thread_time_ns() - started_ns) / 1000 / options.connections)
        pipe.send(NEXT)
        await was_read.get()
    pipe.send(LAST)
    loop.remove_reader(pipe.fileno())
    child.join()
    server.close()
    return min(costs_us)


def measure_encryption(options: argparse.Namespace, context: ssl.SSLContext) -> float:
    """Returns microseconds per event that is only encrypted."""
    client_context = make_client_context()
    writers: list[tuple[Callable[[bytes], int], Callable[[], bytes]]] = []
    for _ in range(options.connections):
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        server, client = context.wrap_bio(up, down, server_side=True), client_context.wrap_bio(down, up)
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        down.read()
        writers.append((server.write, down.read))
    event, costs_us = b"d" * options.event_bytes, list[float]()
    for _ in range(options.rounds):
        started_ns = time.thread_time_ns()
        for write, read in writers:
            write(event)
            read()
        costs_us.append((time.thread_time_ns() - started_ns) / 1000 / options.connections)
    return min(costs_us)


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--event-bytes", type=int, default=230, help="of a token's event with its chunk's frame")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        tls, _ = write_secrets(Path(folder))
        context = make_server_context(read_certificates(tls, is_mutual=False))
    result = {
        "open_us": uvloop.run(measure_writes(options, None)),
        "tls_us": uvloop.run(measure_writes(options, context)),
        "encryption_us": measure_encryption(options, context),
    }
    print(", ".join(f"{name} {value:.2f}" for name, value in result.items()))
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
