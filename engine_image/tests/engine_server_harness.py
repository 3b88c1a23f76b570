"""A router and the engine's server against a fake EngineCore."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sluice.v1 import engine_pb2 as wire
from sluice_engine import core_encoding, core_messages

if TYPE_CHECKING:
    from fake_core import Clock, Core

    from sluice_engine.server import attach_stream, router_session
    from sluice_engine.server.engine_server import EngineServer

STOP, LENGTH, ERROR = 0, 1, 3  # vllm.v1.engine.FinishReason


def find_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Router:
    """A router's end of a stream, without gRPC."""

    server: EngineServer
    session: router_session.RouterSession
    stream: attach_stream.AttachStream

    async def send(self, **fields: Any) -> None:
        await self.server.take(self.session, wire.AttachRequest(**fields))
        await settle()

    def receive(self) -> list[wire.AttachResponse]:
        messages = list(self.stream._waiting)
        self.stream._waiting.clear()
        return messages

    def lose_stream(self) -> None:
        self.server.detach(self.session, self.stream)


@dataclass
class Engine:
    """A server with its fakes."""

    server: EngineServer
    core: Core
    clock: Clock

    def attach(self, router_id: str = "router-1") -> Router:
        return Router(self.server, *self.server.attach(router_id))

    def attached(self, router_id: str = "router-1") -> Router:
        """Attaches, and reads the hello away."""
        router = self.attach(router_id)
        router.receive()
        return router

    def put_out(self, *outputs: Any, report: core_messages.SchedulerReport | None = None) -> None:
        if report is not None:
            outputs = (
                *outputs,
                output(core_messages.REPORT_ID, (), kv_transfer_params=core_encoding.encode_report(report)),
            )
        self.server.take_outputs(SimpleNamespace(outputs=list(outputs)), self.clock.now_s)

    def core_id(self, request_id: str) -> str:
        return next(core_id for core_id in reversed(self.core.requests) if core_id.startswith(f"{request_id}-"))


async def settle() -> None:
    """Lets every ready task run."""
    for _ in range(5):
        await asyncio.sleep(0)


def submit(slot: int, request_id: str, **fields: Any) -> wire.Submit:
    defaults = {"fence": 1, "submit_number": slot + 1, "prompt_token_ids": [1, 2, 3]}
    return wire.Submit(slot=slot, request_id=request_id, **{**defaults, **fields})


def output(core_id: str, tokens: Any, **fields: Any) -> Any:
    defaults = dict.fromkeys(("new_logprobs", "finish_reason", "stop_reason", "kv_transfer_params", "prefill_stats"))
    return SimpleNamespace(request_id=core_id, new_token_ids=list(tokens), **{**defaults, **fields})


def report(number: int = 1, **fields: Any) -> core_messages.SchedulerReport:
    iteration = core_messages.IterationReport(
        number=number,
        prefill_tokens=0,
        attention_work=0.0,
        num_chunks=0,
        num_decodes=1,
        decode_context_tokens=3,
        duration_s=0.03,
    )
    return core_messages.SchedulerReport(
        load=core_messages.SchedulerLoad(running_decodes=1), iteration=iteration, **fields
    )
