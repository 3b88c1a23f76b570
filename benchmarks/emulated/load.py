"""Open-loop load over the OpenAI API: a request is sent when it is due, whatever became of the others.

The client shares two cores with everything that it measures, so a token costs it one callback that counts bytes: the
times of a request are the router's (TTFT and TPOT by definition, in the answer's usage), and the client's own stamps
of the first and the last byte stand beside them as a check. A connection serves one request.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.emulated.arrivals import LoadArrival

HOST = "127.0.0.1"
# Within the tiny model's vocabulary, above its special tokens.
FIRST_TOKEN, LAST_TOKEN = 3, 1999
# The end of a stream, with its usage, fits into it.
TAIL_BYTES = 4096
SEPARATOR = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnswer:
    """What came of one request.

    Args:
        arrival: The request.
        lag_s: By how much it was sent late.
        error: Why it failed; empty when it did not.
        ttft_s: Arrival at the router to first token, by the router.
        tpot_s: Time per output token, by the router; None for one token.
        is_slo_met: Both objectives met, by the router.
        num_hand_offs: Moves between engines.
        client_ttft_s: Sending to first byte of the body.
        client_duration_s: Sending to last byte.
    """

    arrival: LoadArrival
    lag_s: float
    error: str = ""
    ttft_s: float = 0.0
    tpot_s: float | None = None
    is_slo_met: bool = False
    num_hand_offs: int = 0
    client_ttft_s: float = 0.0
    client_duration_s: float = 0.0


class AnswerReader(asyncio.Protocol):
    """Reads one streamed answer until the server closes; mutable."""

    def __init__(self) -> None:
        self._head: bytes | None = b""
        self._tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.first_s = self.last_s = 0.0

    @property
    def tail(self) -> bytes:
        """The end of the body, chunk sizes included."""
        return self._tail

    def data_received(self, data: bytes) -> None:
        """Stamps; keeps the end."""
        if self._head is not None:
            self._head += data
            head, separator, data = self._head.partition(SEPARATOR)
            if not separator:
                return
            self.status = int(head.split(b" ", 2)[1])
            self._head = None
        if data:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self._tail = (self._tail + data)[-TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is over, whole or not; which of the two, its end shows."""
        del exc
        if not self.done.done():
            self.done.set_result(None)


def make_request(arrival: LoadArrival, model: str, rng: random.Random) -> bytes:
    """Makes a request of exact lengths, with a prompt that no prefix cache holds.

    Args:
        arrival: Its lengths and objective.
        model: Served name.
        rng: Draws the prompt.
    """
    body = {
        "model": model,
        "prompt": [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(arrival.prompt_tokens)],
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if arrival.ttft_slo_ms is not None:
        body["sluice"] = {"slo_ttft_ms": arrival.ttft_slo_ms}
    content = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def run_load(
    port: int, arrivals: Sequence[LoadArrival], *, model: str, prompt_seed: int, timeout_s: float
) -> list[LoadAnswer]:
    """Sends every request when it is due, and waits for all answers.

    Args:
        port: Of the router's HTTP API.
        arrivals: In order of time.
        model: Served name.
        prompt_seed: Fixes the prompts' tokens.
        timeout_s: Longest time from sending to the end of an answer; longer ones count as failed.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for arrival in arrivals:
            # Made before it is due, so that the making does not delay it.
            request = make_request(arrival, model, random.Random(prompt_seed * 1_000_003 + arrival.number))
            await asyncio.sleep(max(0.0, start_s + arrival.at_s - loop.time()))
            lag_s = loop.time() - start_s - arrival.at_s
            tasks.append(group.create_task(_send(port, arrival, request, lag_s, timeout_s)))
    return [task.result() for task in tasks]


async def _send(port: int, arrival: LoadArrival, request: bytes, lag_s: float, timeout_s: float) -> LoadAnswer:
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            transport, reader = await loop.create_connection(AnswerReader, HOST, port)
            sent_s = time.perf_counter()
            transport.write(request)
            try:
                await reader.done
            finally:
                transport.abort()
    except TimeoutError:
        return LoadAnswer(arrival=arrival, lag_s=lag_s, error=f"no end within {timeout_s:g} s")
    except OSError as error:
        return LoadAnswer(arrival=arrival, lag_s=lag_s, error=f"connection: {error.strerror or error}")
    return read_answer(arrival, lag_s, sent_s, reader)


def read_answer(arrival: LoadArrival, lag_s: float, sent_s: float, reader: AnswerReader) -> LoadAnswer:
    """Reads the usage at the end of a stream; an answer without one, or of the wrong length, has failed."""
    usage = find_usage(reader.tail)
    if reader.status != 200 or usage is None:
        end = reader.tail[-200:].decode(errors="replace").strip()
        return LoadAnswer(arrival=arrival, lag_s=lag_s, error=f"HTTP {reader.status}, no usage at the end: {end}")
    if usage["completion_tokens"] != arrival.output_tokens:
        error = f"{usage['completion_tokens']} tokens instead of {arrival.output_tokens}"
        return LoadAnswer(arrival=arrival, lag_s=lag_s, error=error)
    return LoadAnswer(
        arrival=arrival,
        lag_s=lag_s,
        ttft_s=usage["ttft_ms"] / 1e3,
        tpot_s=None if usage["tpot_ms"] is None else usage["tpot_ms"] / 1e3,
        is_slo_met=usage["slo_met"],
        num_hand_offs=usage["hand_offs"],
        client_ttft_s=reader.first_s - sent_s,
        client_duration_s=reader.last_s - sent_s,
    )


def find_usage(tail: bytes) -> dict[str, Any] | None:
    """Finds the usage in the end of a stream."""
    position = tail.rfind(b'"usage":{')
    if position < 0:
        return None
    try:
        usage, _ = json.JSONDecoder().raw_decode(tail[position + len(b'"usage":') :].decode())
    except ValueError:
        return None
    found: dict[str, Any] = usage
    return found
