"""CPU of the router's request path in one process: one-token requests over real sockets, without engines of its own.

    .venv/bin/python benchmarks/router/request_path.py [--requests N] [--rounds N] [--unary] [--chat] [--json PATH]
    .venv/bin/python benchmarks/router/request_path.py --against OTHER_CHECKOUT
    .venv/bin/python benchmarks/router/request_path.py --tls --keys [--tokens N]

In a round every connection of a child process sends one request and reads its answer. Messages to engines become
HTTP/2 frames, which are dropped; the engine's answer comes at the next iteration of the loop, and each further token at
the one after. The figure is the fastest round's CPU per request, which other programs disturb least. ``--against`` runs
another checkout in turn and prints the ratio; what is imported, the tests' harness included, is each checkout's own.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import multiprocessing
import os
import pstats
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secrets_of_clients import KEY, write_secrets

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sluice.v1 import engine_pb2

OWN_ROOT = Path(__file__).parents[2]
WARM_UP_ROUNDS = 5
READ_BYTES = 1 << 16
# What goes over the pipe to the child and back.
NEXT, LAST = True, False
# DATA (0) of stream 1 without flags, as gRPC's servers send it.
DATA_FRAME = b"\0\0\0\0\0\1"


class EngineSide:
    """Plays the engines behind the router's own ``EngineStream``. Mutable.

    Args:
        router: The data plane.
        loop: Its event loop.
        token_id: What every answer consists of.
        num_tokens: Tokens of an answer.

    Attributes:
        spent_ns: CPU that the engines' side took, which is none of the router's.
    """

    def __init__(self, router: Any, loop: asyncio.AbstractEventLoop, token_id: int, num_tokens: int) -> None:
        self._router = router
        self._loop = loop
        self._token_id = token_id
        self._num_tokens = num_tokens
        self._streams: dict[str, Any] = {}
        self.spent_ns = 0

    def attach(self, engine: Any) -> None:
        """Gives an engine a stream whose transport drops what is written."""
        from sluice_router.engines.engine_stream import EngineStream  # noqa: PLC0415 - after the checkout is chosen
        from sluice_router.event_loop_bursts import BurstQueue  # noqa: PLC0415
        from sluice_router.observability.metrics import EngineTraffic  # noqa: PLC0415

        stream = EngineStream("engine", EngineTraffic(), BurstQueue(), self._loop)
        stream.connection_made(_Dropping())
        windows = b"".join(b"\0\0\4\x08\0" + number.to_bytes(4, "big") + b"\x7f\0\0\0" for number in (0, 1))
        stream.data_received(b"\0\0\0\x04\0\0\0\0\0" + windows)
        stream._handler = lambda message: self._router.handle_message(engine, message)  # noqa: SLF001
        self._streams[engine.engine_id] = stream

    def send(self, engine: Any, message: engine_pb2.AttachRequest) -> None:
        """Sends a message; every submit is answered at once."""
        self._streams[engine.engine_id].send(message)
        if message.submits:
            started_ns = time.thread_time_ns()
            answer = [_answer(message, self._token_id, index, self._num_tokens) for index in range(self._num_tokens)]
            self._loop.call_soon(self._deliver, self._streams[engine.engine_id], answer)
            self.spent_ns += time.thread_time_ns() - started_ns

    def _deliver(self, stream: Any, answer: list[bytes]) -> None:
        stream.data_received(answer.pop(0))
        if answer:
            self._loop.call_soon(self._deliver, stream, answer)

    def close(self, engine: Any, reason: str) -> None:
        """Fails: no engine is lost here."""
        raise AssertionError(f"{engine.engine_id}: {reason}")


class _Dropping(asyncio.Transport):
    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        del data

    def abort(self) -> None:
        raise AssertionError("the stream was given up")


def _answer(message: engine_pb2.AttachRequest, token_id: int, index: int, num_tokens: int) -> bytes:
    from sluice.v1 import engine_pb2 as engine  # noqa: PLC0415 - after the checkout is chosen
    from sluice.v1 import sampling_pb2 as sampling  # noqa: PLC0415

    slots = [submit.slot for submit in message.submits]
    answer = engine.AttachResponse(slots=slots, token_ids=[token_id] * len(slots), output_indexes=[index] * len(slots))
    for slot in slots if index == num_tokens - 1 else ():
        answer.finished.add(slot=slot, reason=sampling.FINISH_REASON_LENGTH, num_output_tokens=num_tokens)
    answer.load.kv_blocks_total = 1 << 20
    answer.load.last_submit_number = message.submits[-1].submit_number
    data = answer.SerializeToString()
    data = b"\0" + len(data).to_bytes(4, "big") + data
    return len(data).to_bytes(3, "big") + DATA_FRAME + data


def send_requests(port: int, request: bytes, options: argparse.Namespace, end: bytes, pipe: Connection) -> None:
    """The child: with every message of the pipe, sends a request on each connection and reads the answers."""
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(options.requests)]
    if options.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        clients = [context.wrap_socket(client) for client in clients]
    pipe.send(NEXT)
    while pipe.recv() is NEXT:
        for client in clients:
            client.sendall(request)
        for client in clients:
            answer = b""
            while not answer.endswith(end):
                part = client.recv(READ_BYTES)
                assert part, answer
                answer += part
            assert answer.startswith(b"HTTP/1.1 200"), answer
        pipe.send(NEXT)


def make_http_request(options: argparse.Namespace) -> bytes:
    """Makes the request that all send."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "again"]
    text = " ".join(words[index % len(words)] for index in range(options.prompt_words))
    fields = {
        "model": "tiny",
        "max_tokens": options.tokens,
        "stream": not options.unary,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    prompt = {"messages": [{"role": "user", "content": text}]} if options.chat else {"prompt": text}
    body = json.dumps(fields | prompt).encode()
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {KEY}"] if options.keys else []
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def make_access(options: argparse.Namespace) -> Any:
    """Makes what guards the router, as a mounted Secret would: 1,000 keys, and a certificate of P-256."""
    from sluice.certificate_rotation import CertificateFolder  # noqa: PLC0415 - after the checkout is chosen
    from sluice_router.security.access_control import ClientAccess  # noqa: PLC0415
    from sluice_router.security.api_keys import ApiKeys  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        tls, keys = write_secrets(Path(folder))
        return ClientAccess(
            keys=ApiKeys(keys) if options.keys else None,
            certificates=CertificateFolder(tls, is_mutual=False) if options.tls else None,
        )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the rounds.

    Returns:
        Microseconds of CPU per request, of the fastest round and of the median one.
    """
    from data_plane_harness import Harness  # noqa: PLC0415 - after the checkout is chosen

    from sluice_router.api.http.http_api import HttpApi  # noqa: PLC0415
    from sluice_router.text.tokenizer import ModelText  # noqa: PLC0415

    loop = asyncio.get_running_loop()
    text = await asyncio.to_thread(ModelText.load, options.model)
    harness = Harness({f"d{number}": "D" for number in range(options.engines)})
    harness.router.now = time.monotonic
    engines = EngineSide(harness.router, loop, text.encode_now(" the", add_special_tokens=False)[0], options.tokens)
    for engine in harness.engines.values():
        engines.attach(engine)
    harness.router.connect(engines)
    api = HttpApi(harness.router, text, access=make_access(options))
    port = await api.start("127.0.0.1", 0)
    pipe, other = multiprocessing.Pipe()
    end = b"}" if options.unary else b"data: [DONE]\n\n\r\n0\r\n\r\n"
    arguments = (port, make_http_request(options), options, end, other)
    child = multiprocessing.Process(target=send_requests, args=arguments, daemon=True)
    child.start()
    answered: asyncio.Queue[bool] = asyncio.Queue()
    loop.add_reader(pipe.fileno(), lambda: answered.put_nowait(pipe.recv()))
    await answered.get()
    gc.collect()
    gc.freeze()
    costs_us = []
    profile = cProfile.Profile() if options.profile else None
    for number in range(options.rounds + WARM_UP_ROUNDS):
        if profile is not None and number == WARM_UP_ROUNDS:
            profile.enable()
        engines.spent_ns, started_ns = 0, time.thread_time_ns()
        pipe.send(NEXT)
        await answered.get()
        costs_us.append((time.thread_time_ns() - started_ns - engines.spent_ns) / 1000 / options.requests)
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    pipe.send(LAST)
    child.join()
    loop.remove_reader(pipe.fileno())
    await api.close(0.1)
    text.close()
    costs_us = sorted(costs_us[WARM_UP_ROUNDS:])
    return {"fastest_us": costs_us[0], "median_us": costs_us[len(costs_us) // 2]}


def compare(options: argparse.Namespace, arguments: list[str]) -> None:
    """Runs this checkout and another one in turn, each in processes of its own; prints both and the ratio."""
    fastest = {root: float("inf") for root in (OWN_ROOT, options.against.resolve())}
    for _ in range(options.turns):
        for root, fastest_us in fastest.items():
            command = [sys.executable, __file__, *arguments, "--root", str(root)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment(root))
            fastest[root] = min(fastest_us, json.loads(done.stdout.splitlines()[-1])["fastest_us"])
    own_us, other_us = fastest.values()
    print(f"this checkout {own_us:.0f} us, {options.against} {other_us:.0f} us a request: {own_us / other_us:.2f}")


def _environment(root: Path) -> dict[str, str]:
    parts = [str(root), *(str(root / part) for part in ("core", "protos", "router"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(parts)}


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--requests", type=int, default=10, help="of a round, each on a connection of its own")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--prompt-words", type=int, default=120)
    parser.add_argument("--unary", action="store_true", help="answers that do not stream")
    parser.add_argument("--tokens", type=int, default=1, help="of an answer")
    parser.add_argument("--tls", action="store_true", help="encrypted connections, which stay open")
    parser.add_argument("--keys", action="store_true", help="requests with an API key")
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--profile", action="store_true", help="prints where the time goes by function")
    parser.add_argument("--model", type=Path, default=OWN_ROOT / ".sluice" / "volumes" / "models" / "tiny")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path, help="root of another checkout")
    parser.add_argument("--turns", type=int, default=5, help="runs of each checkout, with --against")
    parser.add_argument("--root", type=Path, default=OWN_ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.against:
        skipped = {"--against", str(options.against)}
        compare(options, [argument for argument in sys.argv[1:] if argument not in skipped])
        return
    for part in ("protos/tests", "router/tests"):
        sys.path.insert(0, str(options.root / part))
    import uvloop  # noqa: PLC0415 - only this process needs it

    result = uvloop.run(measure(options))
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
