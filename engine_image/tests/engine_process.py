"""Whole engines (``python -m sluice_engine``), and a router's end of their streams, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import harness_faults
import psutil
from core_processes import SERVER, run_program
from engine_ports import PORTS

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import engine_pb2_grpc, sampling_pb2

if TYPE_CHECKING:
    from pathlib import Path

START_TIMEOUT_S = 240.0  # a start takes 12 s, unless the machine is overcommitted
ANSWER_TIMEOUT_S = 30.0


class EngineProcess:
    """One ``python -m sluice_engine``.

    Args:
        engine_id: Its id.
        model: Directory of the model.
        log: File for its output.
        arguments: Further arguments.
    """

    def __init__(self, engine_id: str, model: Path, log: Path, *arguments: str) -> None:
        self.engine_id = engine_id
        self.port, self.metrics_port, self.kv_port = (next(PORTS) for _ in range(3))
        self.log = log
        command = ["--engine-id", engine_id, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--metrics-port", str(self.metrics_port)]
        command += ["--kv-host", "127.0.0.1", "--kv-port", str(self.kv_port), "--model", str(model)]
        command += ["--max-batch-tokens", "512", "--max-num-seqs", "64", *arguments]
        self.process = SERVER.Process(target=run_program, args=("sluice_engine", command, dict(os.environ), str(log)))
        self.process.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_ready(self) -> EngineProcess:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.get("/readyz") != 200:
            if self.process.exitcode is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"{self.engine_id} did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)
        return self

    def get(self, path: str) -> int:
        """Status of a probe; 0 when nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def core(self) -> psutil.Process:
        """The EngineCore process."""
        [core] = psutil.Process(self.process.pid).children()
        return core

    def wait_end(self) -> int | None:
        """Waits until it has ended; returns its exit status, None where it goes on."""
        self.process.join(10)
        return self.process.exitcode

    def close(self) -> None:
        self.process.kill()
        self.process.join(10)


@dataclass
class Answer:
    """What a router has of one slot."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: wire.Finished | None = None


class RouterStream:
    """A router's end of one stream.

    Args:
        call: The gRPC call.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._slots = itertools.count()
        self._submit_numbers = itertools.count(1)
        self.hello = wire.EngineHello()
        self.answers: dict[int, Answer] = {}
        self.messages: list[wire.AttachResponse] = []
        self.has_ended = False
        self._news = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None

    async def start(self, router_id: str) -> None:
        await self._call.write(wire.AttachRequest(hello=wire.RouterHello(router_id=router_id)))
        self.hello = (await self._call.read()).hello
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._take(message)
                async with self._news:
                    self._news.notify_all()
        self.has_ended = True
        async with self._news:
            self._news.notify_all()

    @harness_faults.recorded()
    def _take(self, message: wire.AttachResponse) -> None:
        self.messages.append(message)
        for slot, token, index in zip(message.slots, message.token_ids, message.output_indexes, strict=True):
            answer = self.answers[slot]
            assert index == len(answer.tokens), f"slot {slot}: token {index} after {len(answer.tokens)}"
            answer.tokens.append(token)
        for logprobs in message.logprobs:
            self.answers[message.slots[logprobs.column]].logprobs.append(logprobs.logprob)
        for finished in message.finished:
            assert self.answers[finished.slot].finished is None
            self.answers[finished.slot].finished = finished

    async def send(self, **fields: Any) -> None:
        await self._call.write(wire.AttachRequest(**fields))

    async def submit(self, prompt: list[int], sampling: dict[str, Any] | None = None, **fields: Any) -> int:
        """Submits a request (greedy, unless said otherwise); returns its slot."""
        slot = next(self._slots)
        self.answers[slot] = Answer(tokens=list(fields.get("output_token_ids", ())))
        parameters = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **(sampling or {})}
        defaults = {"request_id": f"request-{slot}", "fence": 1, "submit_number": next(self._submit_numbers)}
        submit = wire.Submit(
            slot=slot,
            prompt_token_ids=prompt,
            sampling=sampling_pb2.SamplingParams(**parameters),
            **{**defaults, **fields},
        )
        await self.send(submits=[submit])
        return slot

    async def resume(self, answer: Answer, *, request_id: str, fence: int) -> int:
        """Resumes a request that the engine holds from an earlier stream; returns its slot."""
        slot = next(self._slots)
        self.answers[slot] = answer
        resume = wire.Resume(slot=slot, request_id=request_id, fence=fence, next_output_index=len(answer.tokens))
        await self.send(resumes=[resume])
        return slot

    async def until(self, condition: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Waits until ``condition()`` is true, and returns it."""
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(condition)
        return condition()

    async def finished(self, slot: int) -> wire.Finished:
        return await self.until(lambda: self.answers[slot].finished)

    async def run(self, prompt: list[int], sampling: dict[str, Any] | None = None, **fields: Any) -> list[int]:
        """Submits and waits; returns the tokens."""
        slot = await self.submit(prompt, sampling, **fields)
        finished = await self.finished(slot)
        assert not finished.error
        return self.answers[slot].tokens

    async def tokens(self, slot: int, count: int) -> list[int]:
        """Waits for so many output tokens."""
        await self.until(lambda: len(self.answers[slot].tokens) >= count or self.answers[slot].finished)
        return self.answers[slot].tokens

    def newest(self, field_name: str) -> Any:
        """The newest value of a message's field, if there was one."""
        found = [getattr(message, field_name) for message in self.messages if message.HasField(field_name)]
        return found[-1] if found else None

    def find(self, field_name: str) -> list[Any]:
        """All entries of a repeated field, in order."""
        return [entry for message in self.messages for entry in getattr(message, field_name)]

    async def grant(self, grant_id: int, num_tokens: int) -> wire.Grant:
        request = wire.GrantRequest(grant_id=grant_id, num_tokens=num_tokens, cause=wire.MOVE_CAUSE_MANUAL)
        await self.send(grant_requests=[request])
        answers = lambda: [grant for grant in self.find("grants") if grant.grant_id == grant_id]  # noqa: E731
        return (await self.until(answers))[0]


@contextlib.asynccontextmanager
async def attach(engine: EngineProcess, router_id: str = "router-1") -> Any:
    """A router's stream to an engine."""
    async with grpc.aio.insecure_channel(engine.address) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Attach()
        stream = RouterStream(call)
        await stream.start(router_id)
        yield stream
        call.cancel()


def emulation(**fields: Any) -> tuple[str, str]:
    """Arguments of an emulated engine."""
    return "--emulation", json.dumps(fields)
