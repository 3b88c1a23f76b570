"""An EngineCore that computes nothing, for tests of the engine's server without vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import harness_faults

from sluice_engine import core_encoding, core_messages
from sluice_engine.errors import SubmitRefusedError

if TYPE_CHECKING:
    from sluice.v1 import engine_pb2 as wire

FINGERPRINT = "tiny/abc"


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Core:
    """An EngineCore that computes nothing: tests say what it puts out."""

    requests: dict[str, Any] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    commands: list[core_messages.Command] = field(default_factory=list)
    answers: dict[type, core_messages.Answer] = field(default_factory=dict)
    outputs: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    is_broken: bool = False

    async def get_output_async(self) -> Any:
        return await self.outputs.get()

    async def add_request_async(self, request: Any) -> None:
        self.requests[request.core_id] = request

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("scheduler raised")
        with harness_faults.recorded():
            assert method == core_messages.UTILITY
            commands = core_encoding.decode_commands(args[0])
            self.commands += commands
            return core_encoding.encode_answers([self.answer(command) for command in commands])

    def answer(self, command: core_messages.Command) -> core_messages.Answer:
        if type(command) in self.answers:
            return self.answers[type(command)]
        match command:
            case core_messages.ConfigureCommand():
                return core_messages.ConfigureAnswer(
                    generation=command.generation, role=command.role, chunk_size_tokens=command.chunk_size_tokens
                )
            case core_messages.GrantCommand():
                return core_messages.GrantAnswer(key=command.key, is_granted=True, ttl_s=2.0)
            case core_messages.HandOffCommand():
                return core_messages.HandOffAnswer(request_id=command.request_id, is_accepted=True)
            case core_messages.ReadLoadCommand():
                return core_messages.SchedulerLoad(kv_blocks_total=99)
        return core_messages.EmptyAnswer()


class Builder:
    """Passes submits on; an empty prompt is refused."""

    def build(self, core_id: str, submit: wire.Submit, extras: core_messages.RequestExtras) -> Any:
        if not submit.prompt_token_ids:
            raise SubmitRefusedError("prompt_token_ids: empty")
        return SimpleNamespace(core_id=core_id, submit=submit, extras=extras)
