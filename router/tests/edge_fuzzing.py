"""Requests that no client should send, drawn by a seed, against the router's HTTP and gRPC edges.

    PYTHONPATH=protos/tests .venv/bin/python router/tests/edge_fuzzing.py [--inputs N] [--seed N]

Whatever comes in is answered with success or the client's own fault: never with a 5xx, UNKNOWN or INTERNAL, never with
silence, and nothing is logged as an error. An input is drawn from the seed and its number, so that ``--first`` and
``--inputs 1`` send a faulty one again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import harness_faults
import uvloop
from edge_fakes import FakePlane, say, write_model

from sluice.v1 import router_pb2
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.grpc.grpc_api import GrpcApi
from sluice_router.api.http.http_api import HttpApi, HttpSettings
from sluice_router.api.openai_requests import ChatBody, CompletionBody
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.text.tokenizer import ModelText

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ANSWER_TIMEOUT_S = 20.0
NUM_CONNECTIONS = 16
GRPC_SHARE = 0.2
STATUS = re.compile(rb"HTTP/\d\.\d (\d{3}) ")
METHOD = "/sluice.v1.Router/Generate"
CLIENT_FAULTS = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/", "*", "/v1/%00", "//a?b#c"]
HEADERS = [
    *("x-request-id", "x-sluice-slo-ttft-ms", "x-sluice-slo-tpot-ms", "x-sluice-slo-class"),
    *("x-sluice-priority", "x-sluice-resumable", "x-sluice-resume", "last-event-id", "traceparent"),
    *("tracestate", "expect", "connection", "content-encoding", "content-type", "transfer-encoding"),
    *("content-length", "origin", "authorization", "upgrade"),
]
TEXTS = [
    *("", "a", "tiny", "user", "tool", "auto", "json_object", "gzip", "chunked", "close", "100-continue", "-1", "1e9"),
    *("\x00", "\u2028", "\U0001f389", "é" * 40, "(" * 200, "<|im_start|>", "a b " * 300, "..", "%s{}"),
]
NUMBERS = [
    *(0, 1, -1, 2, 7, 511, 512, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**40),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
]
# What other fields hold as text is read again.
INNER_TEXTS = ["{}", '{"city": "a"}', "[" * 15_000, '{"a":' * 3000, "null", "{"]
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "echo", "best_of", "suffix", "unknown"})
INNER_FIELDS = [
    *("role", "content", "type", "text", "name", "function", "arguments", "tool_calls", "json_schema"),
    *("schema", "json", "regex", "grammar", "choice", "include_usage", "ttft_ms", "class", "priority"),
]


def draw_json(rng: random.Random, depth: int = 0) -> Any:
    """Draws a value of JSON, with the numbers that Python's parser takes beside."""
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice([None, True, False])
    if kind < 8:
        return {rng.choice([*INNER_FIELDS, *TEXTS[:4]]): draw_json(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [draw_json(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 3, 40]) if depth < 2 else 1)]


def draw_body(rng: random.Random) -> bytes:
    """Draws the body of a request: a good one with some fields replaced, or anything."""
    if rng.random() < 0.05:
        return json.dumps(draw_json(rng)).encode()
    body: dict[str, Any] = {"model": "tiny", "stream": rng.random() < 0.5, "max_tokens": 4}
    body |= {"prompt": "hello"} if rng.random() < 0.5 else {"messages": [{"role": "user", "content": "hi"}]}
    if rng.random() < 0.05:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": rng.choice(rng.choice([INNER_TEXTS, TEXTS]))},
        }
        body["messages"] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if rng.random() < 0.05:
        kind = rng.choice(["json", "regex", "grammar", "choice", "json_object"])
        body["structured_outputs"] = {kind: rng.choice([rng.choice(INNER_TEXTS), rng.choice(TEXTS), draw_json(rng)])}
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        body[rng.choice(FIELDS)] = draw_json(rng)
    return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()


def draw_http(rng: random.Random) -> bytes:
    """Draws all bytes of an HTTP request."""
    body = draw_body(rng)
    method = "POST" if rng.random() < 0.9 else rng.choice(["GET", "HEAD", "OPTIONS", "PUT", "", "A\x00", "post"])
    path = rng.choice(PATHS[:2]) if rng.random() < 0.85 else rng.choice(PATHS)
    version = "HTTP/1.1" if rng.random() < 0.95 else rng.choice(["HTTP/1.0", "HTTP/2.0", "HTTP/1.9", "", "ICY"])
    lines = [f"{method} {path} {version}", "Host: a", "Content-Type: application/json"]
    values = [*TEXTS, *map(str, NUMBERS)]
    lines += [f"{rng.choice(HEADERS)}: {rng.choice(values)}" for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    data = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
    return scramble(rng, data) if rng.random() < 0.3 else data


def is_whole(data: bytes) -> bool:
    """Whether a request has all of its headers, and a body of the length that these say."""
    head, end, body = data.partition(b"\r\n\r\n")
    lengths = re.findall(rb"\r\n(?i:content-length): *(\d+)", head)
    return bool(end) and lengths == [b"%d" % len(body)] and b"transfer-encoding" not in head.lower()


def scramble(rng: random.Random, data: bytes) -> bytes:
    """Changes some bytes: overwrites, repeats or removes them, or cuts the end off."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        start = rng.randrange(len(changed) + 1)
        end = min(len(changed), start + rng.choice([0, 1, 1, 4, 60]))
        kind = rng.randrange(4)
        if kind == 0:
            changed[start:end] = rng.randbytes(end - start + 1)
        elif kind == 1:
            changed[start:start] = changed[start:end]
        elif kind == 2:
            del changed[start:end]
        else:
            del changed[start + rng.randrange(1 + len(changed) - start) :]
    return bytes(changed)


def draw_grpc(rng: random.Random) -> bytes:
    """Draws a message to ``Generate``: one with drawn values, changed or not, or any bytes."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.choice([1, 8, 200]))
    request = router_pb2.GenerateRequest(text="hello")
    if rng.random() < 0.3:
        request.token_ids.values.extend(rng.choice([0, 5, 399, 400, 2**32 - 1]) for _ in range(rng.choice([0, 3, 600])))
    elif rng.random() < 0.5:
        for _ in range(rng.randrange(3)):
            request.messages.values.add(role=rng.choice(TEXTS), content=rng.choice(TEXTS))
    for message in (request, request.sampling):
        for descriptor in message.DESCRIPTOR.fields:
            if rng.random() < 0.15:
                set_drawn(rng, message, descriptor)
    data = request.SerializeToString()
    return scramble(rng, data) if rng.random() < 0.3 and data else data


def set_drawn(rng: random.Random, message: Any, descriptor: Any) -> None:
    """Sets a scalar field to a drawn value, if it takes that; messages stay as they are."""
    if descriptor.message_type is not None:
        return
    value = rng.choice(TEXTS) if descriptor.type == descriptor.TYPE_STRING else rng.choice([*NUMBERS, True, False])
    try:
        if descriptor.is_repeated:
            getattr(message, descriptor.name).append(value)
        else:
            setattr(message, descriptor.name, value)
    except (TypeError, ValueError, OverflowError):
        return


@dataclass
class Fuzzing:
    """Sends inputs and counts how they were answered.

    Args:
        port: Of the HTTP API.
        generate: The gRPC method, which takes bytes.
        seed: Of all inputs.
    """

    port: int
    generate: Any
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def send(self, number: int) -> None:
        """Sends one input."""
        rng = random.Random(f"{self.seed}/{number}")
        is_grpc = rng.random() < GRPC_SHARE
        data = draw_grpc(rng) if is_grpc else draw_http(rng)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                outcomes = await (self._call(data) if is_grpc else self._request(data))
        except TimeoutError:
            outcomes = ["timeout"]
        self.outcomes.update(outcomes)
        bad = [outcome for outcome in outcomes if outcome.startswith(("5", "no answer", "timeout", "grpc fault"))]
        if bad:
            self.faults.append(f"input {number} of seed {self.seed}: {', '.join(bad)}: {data[:600]!r}")

    async def _request(self, data: bytes) -> list[str]:
        """Sends bytes over HTTP and then no more; returns the statuses of all answers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        try:
            writer.write(data)
            writer.write_eof()
            while part := await reader.read(1 << 16):
                answer += part
        except ConnectionError:
            pass  # it was closed before all had been read
        finally:
            writer.close()
        statuses = [status.decode() for status in STATUS.findall(answer)]
        if all(status == "100" for status in statuses):
            statuses.append("no answer" if is_whole(data) else "closed")
        return statuses

    async def _call(self, data: bytes) -> list[str]:
        try:
            async for _ in self.generate(data):
                pass
        except grpc.aio.AioRpcError as error:
            name = f"gRPC {error.code().name}"
            return [name if error.code() in CLIENT_FAULTS else f"grpc fault {error.code().name}: {error.details()}"]
        return ["gRPC OK"]


@asynccontextmanager
async def fuzz_edges(text: ModelText, seed: int) -> AsyncIterator[Fuzzing]:
    """Serves both edges in front of a data plane that answers every request; what is logged becomes a fault."""
    watcher = harness_faults.LogWatcher()
    logging.getLogger().addHandler(watcher)
    plane = FakePlane(say(text, "hello world"))
    http = HttpApi(plane, text, HttpSettings(max_body_bytes=20_000))
    rpc = GrpcApi(plane, text, EdgeMetrics(SlowReaders(SlowReaderLimits())))
    http_port, grpc_port = await http.start("127.0.0.1", 0), await rpc.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        fuzzing = Fuzzing(http_port, channel.unary_stream(METHOD), seed)
        yield fuzzing
    await rpc.close(0)
    await http.close(0.1)
    logging.getLogger().removeHandler(watcher)
    fuzzing.faults += harness_faults.take()
    if plane.live:
        fuzzing.faults.append(f"{len(plane.live)} requests were left: {list(plane.live)[:10]}")


async def send_all(fuzzing: Fuzzing, numbers: range, note: Callable[[int], None] = lambda _: None) -> None:
    """Sends inputs, some at a time; after each its number is noted."""
    waiting = iter(numbers)

    async def send_next() -> None:
        for number in waiting:
            await fuzzing.send(number)
            note(number)

    await asyncio.gather(*(send_next() for _ in range(NUM_CONNECTIONS)))


async def run(options: argparse.Namespace) -> Fuzzing:
    """Sends the inputs of the command line, to a small model."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        text = ModelText.load(Path(folder))
        numbers = range(options.first, options.first + options.inputs)
        async with fuzz_edges(text, options.seed) as fuzzing:
            await send_all(fuzzing, numbers, lambda number: print(number, flush=True) if number % 10_000 == 0 else None)
        text.close()
    return fuzzing


def main() -> int:
    """Prints how the inputs were answered, and the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started_s = time.monotonic()
    fuzzing = uvloop.run(run(options))
    print("\n".join(fuzzing.faults[:40]))
    answers = ", ".join(f"{name}: {count}" for name, count in sorted(fuzzing.outcomes.items()))
    print(f"{options.inputs} inputs in {time.monotonic() - started_s:.0f} s: {answers}; {len(fuzzing.faults)} faults")
    return 1 if fuzzing.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
