"""A router's data plane without I/O: a clock in hand, fake engine cores, response streams that check what they get."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import harness_faults
from fake_engine import FakeCore, expected_output, make_plan, make_rng

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_core.records import RequestId
from sluice_router.scheduling.requests import NewRequest, ResponseStream
from sluice_router.scheduling.router import Router
from sluice_router.scheduling.state import RouterState
from sluice_router.settings import make_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_core.latency import LatencyModel
    from sluice_core.records import EngineId
    from sluice_router.errors import RouterError
    from sluice_router.limit_type import Limits
    from sluice_router.observability.request_traces import RequestTraces
    from sluice_router.scheduling.entities import ConnectedEngine
    from sluice_router.scheduling.requests import Finish


_REQUEST_NUMBERS = itertools.count(1)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class CheckingResponseStream(ResponseStream):
    """Takes tokens as a client would, and fails the test on anything that comes twice, late or out of order.

    ``raises`` and ``raises_on_flush`` are raised as a client's broken transport would be; no call may follow.
    """

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    num_flushes: int = 0
    finish: Finish | None = None
    error: RouterError | None = None
    stop_at: int | None = None
    is_cancelled: bool = False
    raises: Exception | None = None
    raises_on_flush: Exception | None = None
    has_raised: bool = False

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.error is not None

    def _check_is_live(self) -> None:
        assert not self.is_over
        assert not self.is_cancelled
        assert not self.has_raised

    def _raise(self, error: Exception | None) -> None:
        if error is not None:
            self.has_raised = True
            raise error

    def on_token(self, token_id, logprobs) -> int | None:
        with harness_faults.recorded():
            self._check_is_live()
            self.token_ids.append(token_id)
            if logprobs is not None:
                self.logprobs.append(logprobs)
            assert self.token_ids == expected_output(self.prompt, len(self.token_ids))
        self._raise(self.raises)
        if self.stop_at is not None and len(self.token_ids) >= self.stop_at:
            return self.stop_at
        return None

    def flush(self, now: float) -> None:
        with harness_faults.recorded():
            self._check_is_live()
        self.num_flushes += 1
        self._raise(self.raises_on_flush)

    def on_finished(self, finish: Finish) -> None:
        with harness_faults.recorded():
            self._check_is_live()
        self.finish = finish

    def on_error(self, error: RouterError) -> None:
        with harness_faults.recorded():
            self._check_is_live()
        self.error = error


def make_request(prompt_tokens: int = 20, max_tokens: int = 8, *, first: int = 1, now: float = 1000.0, **fields):
    sampling = fields.pop("sampling", None) or sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompt = array("I", range(first, first + prompt_tokens))
    request_id = RequestId(f"req-{next(_REQUEST_NUMBERS)}")
    return NewRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, arrival_s=now, **fields)


class Harness:
    """Router, cores and the wires between them.

    Messages wait on the wires until ``deliver``; ``run`` delivers and steps until nothing is left to do.
    """

    def __init__(
        self,
        roles: dict[str, str] | None = None,
        *,
        limits: Limits | None = None,
        plan: bool = True,
        model_id: str = "",
        make_latency_model: Callable[[EngineId], LatencyModel] | None = None,
        make_traces: Callable[[Clock], RequestTraces] | None = None,
    ) -> None:
        self.clock = Clock()
        self.state = RouterState(
            router_id="router-1",
            limits=limits or make_limits(),
            rng=make_rng(),
            model_id=model_id,
            make_latency_model=make_latency_model,
            traces=make_traces(self.clock) if make_traces else None,
        )
        self.router = Router(self.state, self.clock)
        self.router.connect(self)
        self.cores: dict[str, FakeCore] = {}
        self.num_attached = 0
        self.engines: dict[str, ConnectedEngine] = {}
        self.down: dict[str, deque[engine_pb2.AttachRequest]] = {}
        self.up: dict[str, deque[engine_pb2.AttachResponse]] = {}
        self.closed: list[tuple[str, str]] = []
        self.response_streams: dict[RequestId, CheckingResponseStream] = {}
        for name in roles or {}:
            self.attach(name)
        if roles and plan:
            self.router.apply_plan(make_plan(roles))
            self.deliver()

    # LinkWriter

    def send(self, engine: ConnectedEngine, message: engine_pb2.AttachRequest) -> None:
        if self.engines.get(engine.engine_id) is engine:
            self.down[engine.engine_id].append(message)

    def close(self, engine: ConnectedEngine, reason: str) -> None:
        self.closed.append((engine.engine_id, reason))
        if self.engines.get(engine.engine_id) is engine:
            del self.engines[engine.engine_id]

    # wires

    def attach(self, name: str, **fields) -> FakeCore:
        core = self.cores[name] = FakeCore(name, **fields)
        self._attach(core)
        return core

    def _attach(self, core: FakeCore) -> None:
        name = core.engine_id
        self.down[name], self.up[name] = deque(), deque()
        self.num_attached += 1
        address = f"127.0.0.1:{self.num_attached}"
        hello = core.hello()
        self.router.set_addresses(frozenset({*self.state.engines.endpoints, address}))

        def register(engine: ConnectedEngine) -> None:
            self.engines[name] = engine

        engine = self.router.attach(address, hello.hello, register)
        self.router.handle_message(engine, hello)

    def kill(self, name: str) -> None:
        """The engine's process is gone."""
        engine = self.engines.pop(name, None)
        self.cores.pop(name, None)
        if engine is not None:
            self.router.lose(engine, "killed")
            self.router.note_fault(engine.address, "refused")

    def cut(self, name: str) -> None:
        """The stream breaks and takes along what is on the wires; the engine goes on."""
        engine = self.engines.pop(name, None)
        self.down[name].clear()
        self.up[name].clear()
        if engine is not None:
            self.cores[name].hold()
            self.router.lose(engine, "cut")

    def replace_stream(self, name: str) -> None:
        """A new stream to the same process, which says hello before the old one is known to be over."""
        self.cores[name].hold()
        self._attach(self.cores[name])

    def reconnect(self, name: str) -> None:
        """A new stream to the same process."""
        if name not in self.engines:
            self._attach(self.cores[name])

    def deliver_down(self, name: str) -> None:
        if self.down[name] and name in self.engines:
            core = self.cores[name]
            core.take(self.down[name].popleft())
            self.up[name] += core.outbox
            core.outbox.clear()

    def deliver_up(self, name: str) -> None:
        if self.up[name] and name in self.engines:
            self.router.handle_message(self.engines[name], self.up[name].popleft())

    def deliver(self) -> None:
        """Delivers everything that is on a wire, and what comes of it."""
        while any((self.down[name] or self.up[name]) for name in self.engines):
            for name in list(self.engines):
                self.deliver_down(name)
                self.deliver_up(name)

    def step(self, name: str) -> None:
        message = self.cores[name].step()
        if name in self.engines:
            self.up[name].append(message)

    def step_all(self) -> None:
        """One iteration of every engine, 10 ms later."""
        self.deliver()
        self.clock.advance(0.01)
        for name in list(self.cores):
            self.step(name)
        self.deliver()
        self.router.tick()
        self.deliver()

    def run(self, num_steps: int = 100) -> None:
        for _ in range(num_steps):
            if not self.state.requests.live:
                break
            self.step_all()
        for _ in range(3):
            self.step_all()

    # clients

    def admit(self, prompt_tokens: int = 20, max_tokens: int = 8, **fields) -> tuple[RequestId, CheckingResponseStream]:
        request = make_request(prompt_tokens, max_tokens, now=self.clock.now_s, **fields)
        response_stream = CheckingResponseStream(list(request.prompt_token_ids))
        self.router.admit(request, response_stream)
        self.response_streams[request.request_id] = response_stream
        return request.request_id, response_stream

    def engine_of(self, request_id: RequestId) -> str:
        submission = self.state.requests.live[request_id].submission
        assert submission is not None
        return str(submission.engine.engine_id)

    def count(self, name: str, *labels: str) -> int:
        return self.state.metrics.counters[name][labels]

    def assert_idle(self) -> None:
        """Nothing leaked (no request, no slot, no KV block, no grant), and no response stream saw a fault."""
        harness_faults.check()
        assert self.count("sink_faults") == sum(stream.has_raised for stream in self.response_streams.values())
        assert not self.state.requests.live
        assert not self.state.requests.waiting
        for engine in self.engines.values():
            assert engine.num_taken_slots == 0, f"{engine.engine_id} has submissions"
            assert all(submission is None for submission in engine.slots)
            assert not engine.grants
            assert (engine.migrations_in, engine.migrations_out) == (0, 0)
        for name in self.engines:
            core = self.cores[name]
            assert core.is_idle, f"{name}: {core.running} {core.pinned} {core.grants}"


async def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    """Waits for a condition of the real world."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)
