"""The engine stream over real gRPC: faults of the connection, recovery, fencing, moves and plans as they happen."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import grpc
import pytest
from data_plane_harness import CheckingResponseStream, make_request, until
from fake_engine import FakeCore, FakeEngine, expected_output, make_plan, make_rng, serving

from sluice.v1 import control_pb2, control_pb2_grpc, engine_pb2
from sluice_router.api.control_service import ControlService
from sluice_router.engines import engine_connections
from sluice_router.engines.engine_connections import HELLO_TIMEOUT_S, EngineConnections
from sluice_router.scheduling.router import Router
from sluice_router.scheduling.state import RouterState
from sluice_router.settings import make_limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sluice_router.limit_type import Limits

# Generous where a busy machine could be taken for a fault, short where the fault itself is awaited.
SHORT = {
    "silence_limit_s": 1.5,
    "iteration_age_floor_s": 2.0,
    "hello_timeout_s": 5.0,
    "max_deaths": 9,
    "max_recoveries": 9,
}
LIMITS = make_limits(**SHORT)

# On a busy machine a new stream takes its time.
PATIENT = make_limits(**SHORT, resume_grace_s=10.0)


class Wired:
    """A data plane with real connections."""

    def __init__(self, router: Router, connections: EngineConnections, tasks: asyncio.TaskGroup) -> None:
        self.router = router
        self.connections = connections
        self._tasks = tasks
        self.response_streams: list[CheckingResponseStream] = []

    def use(self, *addresses: str) -> None:
        self.connections.set_addresses(
            frozenset(addresses), lambda address: self._tasks.create_task(self.connections.keep(address))
        )

    def admit(self, max_tokens: int = 40, *, first: int = 1) -> CheckingResponseStream:
        request = make_request(20, max_tokens, first=first, now=self.router.now())
        response_stream = CheckingResponseStream(list(request.prompt_token_ids))
        self.response_streams.append(response_stream)
        self.router.admit(request, response_stream)
        return response_stream

    async def start_streams(self, number: int, max_tokens: int) -> None:
        """Admits requests, and waits until all of them have some tokens."""
        for first in range(number):
            self.admit(max_tokens, first=first)
        await until(lambda: all(len(response_stream.token_ids) > 3 for response_stream in self.response_streams))

    def state_of(self, engine_id: str) -> control_pb2.EngineState.ValueType:
        states = {engine.engine_id: engine.state for engine in self.router.describe().engines}
        return states.get(engine_id, control_pb2.ENGINE_STATE_CONNECTING)


@contextlib.asynccontextmanager
async def wiring(*engines: FakeEngine, router_id: str = "router-1", limits: Limits = LIMITS) -> AsyncIterator[Wired]:
    """Connects a data plane to engines, and takes it down with the block."""
    state = RouterState(router_id=router_id, limits=limits, rng=make_rng())
    router = Router(state, time.monotonic)
    connections = EngineConnections(router, hello_timeout_s=limits[HELLO_TIMEOUT_S], rng=make_rng())
    router.connect(connections)

    async def tick() -> None:
        while True:
            router.tick()
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(tick())
        wired = Wired(router, connections, tasks)
        try:
            wired.use(*(engine.address for engine in engines))
            yield wired
        finally:
            connections.stop()
            ticking.cancel()


def engines_of(roles: dict[str, str], **fields: object) -> list[FakeEngine]:
    return [FakeEngine(FakeCore(name), **fields) for name in roles]


PD = {"p0": "P", "d0": "D"}
DD = {"d0": "D", "d1": "D"}


def is_ready(wired: Wired, number: int) -> bool:
    return len(wired.router.state.engines.table) == number


@contextlib.asynccontextmanager
async def connecting(
    roles: dict[str, str], *, limits: Limits = LIMITS, **fields: object
) -> AsyncIterator[tuple[Wired, list[FakeEngine]]]:
    """A data plane whose engines have all acknowledged a plan."""
    engines = engines_of(roles, **fields)
    async with serving(*engines), wiring(*engines, limits=limits) as wired:
        wired.router.apply_plan(make_plan(roles))
        await until(lambda: is_ready(wired, len(roles)))
        yield wired, engines


async def finish_all(wired: Wired) -> None:
    await until(lambda: all(response_stream.is_over for response_stream in wired.response_streams))
    for response_stream in wired.response_streams:
        assert response_stream.error is None
        assert response_stream.finish is not None
        assert response_stream.token_ids == expected_output(
            response_stream.prompt, response_stream.finish.usage.output_tokens
        )


async def test_requests_stream_and_move_between_engines():
    async with connecting(PD) as (wired, engines):
        for number in range(8):
            wired.admit(first=number)
        await finish_all(wired)
        assert wired.router.state.metrics.counters["moves"]["prefill_done", "done"] > 0
        await until(lambda: all(engine.core.is_idle for engine in engines))


@pytest.mark.parametrize("fault", ["kill", "silence", "hang"])
async def test_fault_in_mid_stream_costs_no_token(fault):
    async with connecting(DD, step_s=0.02) as (wired, engines):
        await wired.start_streams(6, 40)
        victim = engines[0]
        assert victim.core.running
        if fault == "kill":
            await victim.kill()
        elif fault == "silence":
            victim.is_silent = True
        else:
            victim.is_stepping = False
        await finish_all(wired)
        reasons = {"kill": "stream", "silence": "silence", "hang": "hang"}
        assert wired.router.state.metrics.counters["engine_losses"][(reasons[fault],)] >= 1
        assert (
            sum(
                response_stream.finish.usage.num_recoveries
                for response_stream in wired.response_streams
                if response_stream.finish
            )
            >= 1
        )


async def test_stream_that_breaks_is_taken_up_again_by_the_same_engine():
    async with connecting(DD, step_s=0.02, limits=PATIENT) as (wired, engines):
        await wired.start_streams(6, 60)
        victim = engines[0]
        running = len(victim.core.running)
        victim.end_stream()
        await finish_all(wired)
        assert running > 0
        assert len(victim.core.resumed) == running
        assert wired.router.state.metrics.counters["resumed"][()] == running
        assert not wired.router.state.metrics.counters["recoveries"]
        await until(lambda: all(engine.core.is_idle for engine in engines))


async def test_restarted_engine_is_found_again():
    (engine,) = engines_of({"d0": "D"})
    address = await engine.start()
    port = int(address.rsplit(":", 1)[1])
    async with wiring(engine) as wired:
        wired.router.apply_plan(make_plan({"d0": "D"}))
        await until(lambda: is_ready(wired, 1))
        response_stream = wired.admit(60)
        await until(lambda: len(response_stream.token_ids) > 3)
        await engine.kill()
        await until(lambda: wired.state_of("d0") == control_pb2.ENGINE_STATE_LOST)
        again = FakeEngine(FakeCore("d0", epoch=2))
        await again.start(port)
        await finish_all(wired)
        assert again.core.submitted[0].fence == 2
        assert again.core.configured.generation == 1
        await again.kill()


async def test_engine_that_starts_late_is_used():
    early, late = engines_of(DD)
    async with serving(early), wiring(early) as wired:
        wired.router.apply_plan(make_plan(DD))
        await until(lambda: is_ready(wired, 1))
        async with serving(late):
            wired.use(early.address, late.address)
            await until(lambda: is_ready(wired, 2))
            for number in range(8):
                wired.admit(10, first=number)
            await finish_all(wired)
        assert late.core.submitted


async def test_address_that_leaves_the_discovery_serves_until_its_stream_ends():
    async with connecting(DD, step_s=0.02) as (wired, engines):
        await wired.start_streams(4, 40)
        wired.use(engines[1].address)
        assert is_ready(wired, 2)
        await engines[0].kill()
        await finish_all(wired)
        await until(lambda: len(wired.router.describe().engines) == 1)


async def test_port_without_an_engine_is_reported():
    async with wiring() as wired:
        wired.use("127.0.0.1:1")
        await until(lambda: wired.router.describe().engines[0].last_fault)
        assert "unavailable" in wired.router.describe().engines[0].last_fault


class RudeEngine(FakeEngine):
    """Says something else than hello, or nothing."""

    def __init__(self, message: engine_pb2.AttachResponse | None) -> None:
        super().__init__(FakeCore("rude"))
        self._message = message

    async def Attach(self, request_iterator, context) -> None:  # noqa: N802
        self.num_streams += 1
        if self._message is not None:
            await context.write(self._message)
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (None, "the engine did not say hello within 0.2 s"),
        (engine_pb2.AttachResponse(load=engine_pb2.LoadReport()), "the engine did not say hello"),
    ],
    ids=["nothing", "something else"],
)
async def test_port_that_does_not_say_hello_is_reported_and_tried_again(message, fault):
    engine = RudeEngine(message)
    hello_timeout_s = 0.2 if message is None else 20.0
    limits = make_limits(**SHORT | {"hello_timeout_s": hello_timeout_s})
    async with serving(engine), wiring(engine, limits=limits) as wired:
        await until(lambda: wired.router.describe().engines[0].last_fault)
        (status,) = wired.router.describe().engines
        assert (status.last_fault, status.state) == (fault, control_pb2.ENGINE_STATE_CONNECTING)
        await until(lambda: engine.num_streams > 1)


async def test_drain_empties_an_engine_while_streams_go_on():
    async with connecting(DD, step_s=0.02) as (wired, _):
        await wired.start_streams(6, 100)
        wired.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
        await until(lambda: wired.state_of("d0") == control_pb2.ENGINE_STATE_DRAINED)
        assert not any(response_stream.is_over for response_stream in wired.response_streams)
        await finish_all(wired)


@contextlib.asynccontextmanager
async def controlling(router: Router) -> AsyncIterator[control_pb2_grpc.ControlAsyncStub]:
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(router), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield control_pb2_grpc.ControlStub(channel)  # type: ignore[misc]
    finally:
        await server.stop(None)


async def test_control_applies_plans_tells_status_and_moves():
    engines = engines_of(DD, step_s=0.02)
    async with serving(*engines), wiring(*engines) as wired, controlling(wired.router) as control:
        answer = await control.ApplyPlan(control_pb2.ApplyPlanRequest(plan=make_plan(DD, generation=3)))
        assert (answer.is_applied, answer.generation) == (True, 3)
        answer = await control.ApplyPlan(control_pb2.ApplyPlanRequest(plan=make_plan(DD, generation=2)))
        assert (answer.is_applied, answer.generation) == (False, 3)
        assert "generation is 2" in answer.error
        await until(lambda: is_ready(wired, 2))
        response_stream = wired.admit(100)
        await until(lambda: len(response_stream.token_ids) > 3)
        (request_id,) = wired.router.state.requests.live
        submission = wired.router.state.requests.live[request_id].submission
        assert submission is not None
        other = "d0" if submission.engine.engine_id == "d1" else "d1"
        moved = await control.Move(control_pb2.MoveRequest(request_id=request_id, engine_id=other))
        assert moved.is_started, moved.reason
        await finish_all(wired)
        assert response_stream.finish is not None
        assert response_stream.finish.usage.num_hand_offs == 1
        status = await control.GetStatus(control_pb2.GetStatusRequest())
        assert status.acknowledged_generation == 3


async def test_a_plan_that_is_refused_before_any_is_in_force_leaves_none():
    async with wiring() as wired, controlling(wired.router) as control:
        answer = await control.ApplyPlan(control_pb2.ApplyPlanRequest(plan=make_plan(DD, strategy="none")))
        assert (answer.is_applied, answer.generation) == (False, 0)
        assert "none" in answer.error


@pytest.mark.parametrize("jitter", [0.0, 1.0])
async def test_pauses_before_an_address_is_tried_again_grow_until_it_says_hello(monkeypatch, jitter):
    served, pauses, now = iter([None, None, False, None, *[None] * 12, True, None]), [], [0.0]
    connections = EngineConnections(
        SimpleNamespace(forget=pauses.append),  # type: ignore[arg-type]
        hello_timeout_s=1.0,
        rng=SimpleNamespace(random=lambda: jitter),  # type: ignore[arg-type]
    )

    async def run_stream(_: str) -> bool:
        has_served = next(served)
        now[0] += 1000.0 if has_served else 0.0
        return has_served is not None

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 18:
            connections._addresses = frozenset()

    monkeypatch.setattr(connections, "_run_stream", run_stream)
    loop = SimpleNamespace(time=lambda: now[0])
    monkeypatch.setattr(engine_connections, "asyncio", SimpleNamespace(sleep=pause, get_running_loop=lambda: loop))
    connections._addresses = frozenset({"a"})
    await connections.keep("a")
    least, most = 0.1, 2.0
    grown = [min(most, least * 2**number) for number in range(14)]
    # Two that failed; a hello; failures up to the longest pause; a long stream, behind which it is tried at once.
    expected = [least, 2 * least, *grown, 0.02, least]
    assert pauses == [*(each * (0.5 + jitter / 2) for each in expected), "a"]


async def test_status_poll_waits_for_news():
    engines = engines_of(DD)
    async with serving(*engines), wiring(*engines) as wired, controlling(wired.router) as control:
        wired.router.apply_plan(make_plan(DD))
        await until(lambda: is_ready(wired, 2))
        status = await control.GetStatus(control_pb2.GetStatusRequest())
        async with asyncio.timeout(5):
            # A version of this router's predecessor, which had more to report, is news too.
            for version in (status.version - 1, status.version + 100):
                earlier = control_pb2.GetStatusRequest(after_version=version, timeout_s=30)
                assert (await control.GetStatus(earlier)).version == status.version
        started_s = time.monotonic()
        same = await control.GetStatus(control_pb2.GetStatusRequest(after_version=status.version, timeout_s=0.2))
        assert same.version == status.version
        assert time.monotonic() - started_s >= 0.2
        poll = asyncio.ensure_future(
            control.GetStatus(control_pb2.GetStatusRequest(after_version=status.version, timeout_s=30))
        )
        await asyncio.sleep(0.05)
        assert not poll.done()
        wired.router.apply_plan(make_plan(DD, generation=2))
        async with asyncio.timeout(5):
            news = await poll
        assert news.version > status.version
        assert news.generation == 2


async def test_message_out_of_order_costs_the_stream_and_no_token():
    async with connecting(DD, step_s=0.02) as (wired, engines):
        response_stream = wired.admit(40)
        await until(lambda: len(response_stream.token_ids) > 3)
        victim = next(engine for engine in engines if engine.core.running)
        victim.say(engine_pb2.AttachResponse(slots=[0], token_ids=[1], output_indexes=[1000]))
        await finish_all(wired)
        assert wired.router.state.metrics.counters["engine_losses"][("protocol",)] == 1
        # Its connection comes back by itself.
        await until(lambda: is_ready(wired, 2))
