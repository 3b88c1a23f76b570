"""One router's link, call by call, with a router that the test plays: what is asked, pushed again, refused and told."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from sluice.v1 import control_pb2, plan_pb2
from sluice_operator.routers import router_connection
from sluice_operator.routers.router_connection import (
    ControlTls,
    RouterConnection,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TURNS = 20
PAUSE = asyncio.sleep


def make_error(details: str = "gone", code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class Link:
    """A connection, the router at its other end, and what each heard of the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tls: ControlTls | None) -> None:
        self.logged: list[str] = []
        self.told: list[int | None] = []
        self.slept_s: list[float] = []
        self.channels: list[tuple[str, Any]] = []
        # Version after which a status is asked for, and the time that the router and we wait for it.
        self.asked: list[tuple[int, float, float]] = []
        self.pushed: list[tuple[int, float]] = []
        self.answers: asyncio.Queue[control_pb2.GetStatusResponse | grpc.aio.AioRpcError] = asyncio.Queue()
        self.answer_push: Callable[[int], control_pb2.ApplyPlanResponse] = lambda number: control_pb2.ApplyPlanResponse(
            is_applied=True, generation=number
        )
        self.woken = asyncio.Event()
        monkeypatch.setattr(router_connection, "open_channel", self.open_channel)
        monkeypatch.setattr(router_connection.control_pb2_grpc, "ControlStub", lambda _channel: self)
        monkeypatch.setattr(router_connection.asyncio, "sleep", self.sleep)
        self.connection = RouterConnection(
            "r1", "10.0.0.1:7", log=self.logged.append, on_status=self.note_status, tls=tls
        )

    @asynccontextmanager
    async def open_channel(self, address: str, tls: ControlTls | None, options: Any) -> AsyncIterator[None]:
        self.channels.append((address, tls and tls.certificates.current))
        self.options = dict(options)
        yield

    async def sleep(self, seconds: float) -> None:
        if seconds == 1.0:
            # The wait for another certificate: it looks again when the test says so.
            await self.woken.wait()
            self.woken.clear()
            return
        self.slept_s.append(seconds)
        await PAUSE(0)

    def note_status(self) -> None:
        status = self.connection.status
        self.told.append(None if status is None else status.generation)

    async def GetStatus(self, request: Any, timeout: float) -> control_pb2.GetStatusResponse:  # noqa: ASYNC109, N802
        self.asked.append((request.after_version, request.timeout_s, timeout))
        answer = await self.answers.get()
        if isinstance(answer, grpc.aio.AioRpcError):
            raise answer
        return answer

    async def ApplyPlan(self, request: Any, timeout: float) -> control_pb2.ApplyPlanResponse:  # noqa: ASYNC109, N802
        self.pushed.append((request.plan.generation, timeout))
        return self.answer_push(request.plan.generation)

    async def say(self, *answers: int | grpc.aio.AioRpcError) -> None:
        """Answers with a status of a generation, or an error, and lets everything come of it that does."""
        for answer in answers:
            is_error = isinstance(answer, grpc.aio.AioRpcError)
            version = len(self.asked) + 40
            self.answers.put_nowait(
                answer if is_error else control_pb2.GetStatusResponse(version=version, generation=answer)
            )
            await turn()

    async def set_plan(self, generation: int) -> None:
        self.connection.set_plan(plan_pb2.Plan(generation=generation))
        await turn()

    @property
    def generations(self) -> list[int]:
        return [generation for generation, _ in self.pushed]


async def turn() -> None:
    for _ in range(TURNS):
        await PAUSE(0)


@pytest.fixture
async def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Link]:
    made = Link(monkeypatch, getattr(request, "param", None))
    task = asyncio.create_task(made.connection.run())
    await turn()
    yield made
    assert not task.done(), "a connection ends when it is cancelled, and at nothing else"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_status_is_asked_for_after_the_one_that_is_known(link: Link) -> None:
    assert link.asked == [(0, 10.0, 15.0)]
    assert link.connection.generation == 0
    await link.say(3)
    await link.say(4)
    assert [version for version, *_ in link.asked] == [0, 41, 42]
    assert link.connection.generation == 4
    assert (link.told, link.slept_s, link.logged) == ([3, 4], [], [])
    assert link.channels == [("10.0.0.1:7", None)]
    assert link.options["grpc.max_reconnect_backoff_ms"] <= 1000, "a router that starts again is reached soon"


async def test_a_router_that_is_gone_is_told_once_and_asked_from_the_beginning(link: Link) -> None:
    await link.say(make_error(), make_error())
    assert (link.told, link.slept_s) == ([], [0.25] * 2), "nobody knew of it"
    await link.say(3, make_error(), make_error(), 5)
    assert link.told == [3, None, 5]
    assert [version for version, *_ in link.asked] == [0, 0, 0, 43, 0, 0, 46]
    assert link.slept_s == [0.25] * 4
    assert (link.logged, link.connection.refusal) == ([], "")


async def test_a_plan_is_pushed_until_the_router_says_that_it_is_in_force(link: Link) -> None:
    await link.say(1)
    assert link.pushed == []
    await link.set_plan(2)
    assert link.pushed == [(2, 5.0)]
    await link.say(1)
    assert link.generations == [2, 2], "it took the plan, and has forgotten it"
    await link.say(2, 2)
    await link.set_plan(2)
    assert link.generations == [2, 2]
    await link.say(1)
    assert link.generations == [2, 2, 2]
    # Another leader's plan is in force there: ours has the say as long as we lead.
    await link.say(9)
    assert link.generations == [2, 2, 2, 2]
    assert (link.logged, link.connection.refusal) == ([], "")


async def test_a_push_that_does_not_arrive_is_repeated_at_the_next_status(link: Link) -> None:
    def fail(_generation: int) -> control_pb2.ApplyPlanResponse:
        raise make_error()

    link.answer_push = fail
    await link.set_plan(2)
    assert link.generations == [2]
    await link.say(1)
    assert link.generations == [2, 2]
    assert (link.logged, link.connection.refusal) == ([], "")


async def test_a_refused_plan_is_told_once_and_not_pushed_again_until_the_router_starts_again(link: Link) -> None:
    link.answer_push = lambda _: control_pb2.ApplyPlanResponse(is_applied=False, generation=1, error="too much")
    await link.say(1)
    await link.set_plan(2)
    assert link.connection.refusal == "too much"
    assert link.logged == ["r1 refused plan 2: too much"]
    await link.say(1, 1)
    await link.set_plan(2)
    assert link.generations == [2]
    await link.set_plan(3)
    assert (link.generations, link.connection.refusal) == ([2, 3], "too much")
    link.answer_push = lambda number: control_pb2.ApplyPlanResponse(is_applied=True, generation=number)
    await link.set_plan(4)
    assert (link.generations, link.connection.refusal) == ([2, 3, 4], "")
    await link.set_plan(3)
    assert link.connection.refusal == "too much", "it is the plan that was refused"
    await link.say(make_error())
    assert link.connection.refusal == ""
    await link.say(1)
    assert link.generations == [2, 3, 4, 3]
    assert len(link.logged) == 2


@pytest.mark.parametrize(("in_force", "is_refused"), [(1, True), (2, False), (3, False)])
async def test_a_router_that_has_a_newer_plan_has_not_refused_ours(
    link: Link, in_force: int, *, is_refused: bool
) -> None:
    link.answer_push = lambda _: control_pb2.ApplyPlanResponse(is_applied=False, generation=in_force, error="older")
    await link.set_plan(2)
    assert link.connection.refusal == ("older" if is_refused else "")
    assert len(link.logged) == is_refused


@pytest.mark.parametrize(
    "link",
    [ControlTls(certificates=SimpleNamespace(current="one"), server_name="c.n.svc")],
    indirect=True,
    ids=["tls"],
)
async def test_a_router_that_is_not_trusted_is_told_after_so_many_equal_errors_in_a_row(link: Link) -> None:
    distrust = make_error("Hostname Verification failed")
    said = "the connection is not trusted: the certificate shown there is not for c.n.svc"
    for other in (make_error(), make_error("only o.n.svc", grpc.StatusCode.PERMISSION_DENIED), 1):
        await link.say(*[distrust] * (8 - 1))
        assert (link.connection.refusal, link.logged) == ("", [])
        await link.say(other)
    await link.say(*[distrust] * (8 - 1))
    assert link.connection.refusal == ""
    await link.say(distrust)
    assert (link.connection.refusal, link.logged) == (said, [f"r1: {said}"])
    await link.say(distrust, distrust)
    assert (link.connection.refusal, link.logged) == (said, [f"r1: {said}"])
    await link.say(make_error())
    assert link.connection.refusal == "", "it is away, whatever it was before"
    await link.say(*[distrust] * 8)
    assert link.logged == [f"r1: {said}"] * 2
    await link.say(4)
    assert link.connection.refusal == ""
    # The first of other errors counts as one.
    await link.say(distrust, *[make_error("only o.n.svc", grpc.StatusCode.PERMISSION_DENIED)] * 8)
    assert link.connection.refusal == "the connection is not trusted: only o.n.svc"


async def test_without_tls_no_error_is_one_of_trust(link: Link) -> None:
    await link.say(*[make_error("Hostname Verification failed")] * (8 + 1))
    assert (link.connection.refusal, link.logged) == ("", [])


@pytest.mark.parametrize(
    "link",
    [ControlTls(certificates=SimpleNamespace(current="one"), server_name="c.n.svc")],
    indirect=True,
    ids=["tls"],
)
async def test_another_certificate_has_a_channel_of_its_own_on_which_the_plan_is_pushed_again(link: Link) -> None:
    await link.say(1)
    await link.set_plan(2)
    link.woken.set()
    await turn()
    assert (link.channels, link.generations) == ([("10.0.0.1:7", "one")], [2]), "the certificate is the same"
    link.connection._tls.certificates.current = "two"
    link.woken.set()
    await turn()
    assert link.channels == [("10.0.0.1:7", "one"), ("10.0.0.1:7", "two")]
    assert link.generations == [2, 2]
    assert link.told == [1], "what was known of the router stays known"
