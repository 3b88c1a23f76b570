"""What connections tell the data plane and the streams, call by call: no network, played streams."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from data_plane_harness import until
from fake_engine import make_rng

from sluice.v1 import engine_pb2
from sluice_router.engines import engine_connections
from sluice_router.engines.engine_connections import EngineConnections
from sluice_router.engines.engine_stream import StreamEndedError

HELLO = engine_pb2.AttachResponse(hello=engine_pb2.EngineHello(engine_id="d0"))
LOAD = engine_pb2.AttachResponse(load=engine_pb2.LoadReport(running_decodes=1))


class PlayedEngine(SimpleNamespace):
    __hash__ = object.__hash__


class PlayedStream:
    """A stream whose engine says what the test has it say."""

    def __init__(self, first: engine_pb2.AttachResponse | Exception | None) -> None:
        self.calls: list[Any] = []
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[engine_pb2.AttachResponse] = loop.create_future()
        self.over: asyncio.Future[str] = loop.create_future()
        self.disconnected: asyncio.Future[None] = loop.create_future()
        self.disconnected.set_result(None)
        if isinstance(first, Exception):
            self._first.set_exception(first)
        elif first is not None:
            self._first.set_result(first)

    def send(self, message: engine_pb2.AttachRequest) -> None:
        self.calls.append(message)

    def read_first(self) -> asyncio.Future[engine_pb2.AttachResponse]:
        return self._first

    def serve(self, handler) -> asyncio.Future[str]:
        handler(LOAD)
        return self.over

    def cancel(self, fault: str = "cancelled") -> None:
        self.calls.append(("cancel", fault))

    def wait_disconnected(self) -> asyncio.Future[None]:
        self.calls.append("wait")
        return self.disconnected


class Notes:
    """What the data plane was told."""

    router_id = "router-1"

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.engine = PlayedEngine(engine_id="d0", address="a:1", last_fault="")
        self.has_stream = False

    def set_addresses(self, addresses) -> None:
        self.told.append(addresses)

    def traffic_of(self, address: str) -> str:
        return f"traffic of {address}"

    def attach(self, address, hello, register):
        register(self.engine)
        self.told.append(("attach", address, hello.engine_id))
        return self.engine

    def handle_message(self, engine, message) -> None:
        assert engine is self.engine
        self.told.append(message)

    def lose(self, engine, fault: str) -> None:
        self.told.append(("lose", engine.engine_id, fault))

    def note_fault(self, address: str, fault: str) -> None:
        self.told.append((address, fault))

    def forget(self, address: str) -> None:
        self.told.append(("forget", address))


class Play:
    """Connections to one address, whose next stream is ``stream``."""

    def __init__(self, monkeypatch, first, **fields: Any) -> None:
        self.notes, self.stream, self.asked = Notes(), PlayedStream(first), []
        self.connections: EngineConnections[Any] = EngineConnections(
            self.notes, hello_timeout_s=0.05, rng=make_rng(), **fields
        )

        async def connect(*values: object) -> PlayedStream:
            self.asked.append(values)
            return self.stream

        monkeypatch.setattr(engine_connections, "connect", connect)

    def run(self) -> asyncio.Task[bool]:
        return asyncio.ensure_future(self.connections._run_stream("a:1"))


@pytest.mark.parametrize("is_known", [True, False], ids=["known still", "gone from the discovery"])
async def test_a_stream_from_its_hello_to_its_end(monkeypatch, is_known):
    play = Play(monkeypatch, HELLO, tls=lambda: "the secret")
    if is_known:
        play.connections.set_addresses(frozenset({"a:1"}), lambda _: SimpleNamespace(done=lambda: False))
        play.notes.told.clear()
    running = play.run()
    await until(lambda: LOAD in play.notes.told)
    [(address, traffic, _, tls)] = play.asked
    assert (address, traffic, tls) == ("a:1", "traffic of a:1", "the secret")
    [hello] = play.stream.calls
    assert hello.hello.router_id == "router-1"
    message = engine_pb2.AttachRequest(released_slots=[3])
    play.connections.send(play.notes.engine, message)
    assert play.stream.calls[-1] is message
    play.stream.over.set_result("it has ended")
    assert await running is True
    assert play.notes.told == [("attach", "a:1", "d0"), HELLO, LOAD, ("lose", "d0", "it has ended")]
    assert play.stream.calls[2:] == [("cancel", "cancelled"), *(["wait"] * (not is_known))]
    # What is sent to a stream that is gone is dropped, and it is not closed again.
    play.connections.send(play.notes.engine, message)
    play.connections.close(play.notes.engine, "silence")
    assert len(play.stream.calls) == 3 + (not is_known)


@pytest.mark.parametrize(("last_fault", "said"), [("silent for 3 s", "silent for 3 s"), ("", "silence")])
async def test_a_closed_stream_hears_why(monkeypatch, last_fault, said):
    play = Play(monkeypatch, HELLO)
    running = play.run()
    await until(lambda: LOAD in play.notes.told)
    play.notes.engine.last_fault = last_fault
    play.connections.close(play.notes.engine, "silence")
    assert play.stream.calls[-1] == ("cancel", said)
    play.connections.send(play.notes.engine, engine_pb2.AttachRequest())
    assert play.stream.calls[-1] == ("cancel", said)
    play.stream.over.set_result(said)
    assert await running is True


FIRSTS = {
    "nothing": (None, "the engine did not say hello within 0.05 s"),
    "something else": (LOAD, "the engine did not say hello"),
    "an end": (StreamEndedError("unimplemented: no such method"), "unimplemented: no such method"),
}


@pytest.mark.parametrize("name", FIRSTS)
async def test_who_does_not_say_hello_is_noted_and_left(monkeypatch, name):
    first, fault = FIRSTS[name]
    play = Play(monkeypatch, first)
    assert await play.run() is False
    assert play.notes.told == [("a:1", fault)]
    assert play.stream.calls[1:] == [("cancel", "cancelled"), "wait"]
    [(*_, tls)] = play.asked
    assert tls is None


async def test_a_router_that_leaves_says_so_for_its_streams(monkeypatch):
    play = Play(monkeypatch, HELLO)
    running = play.run()
    await until(lambda: LOAD in play.notes.told)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert play.notes.told[-1] == ("lose", "d0", "this router is about to leave")
    assert ("cancel", "cancelled") in play.stream.calls


class PlayedTask:
    def __init__(self) -> None:
        self.is_done = self.is_cancelled = False

    def done(self) -> bool:
        return self.is_done

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_each_address_has_one_task_until_that_is_done():
    notes, started = Notes(), []
    connections: EngineConnections[Any] = EngineConnections(notes, hello_timeout_s=1.0, rng=make_rng())  # type: ignore[arg-type]

    def start(address: str) -> PlayedTask:
        started.append((address, PlayedTask()))
        return started[-1][1]

    connections.set_addresses(frozenset({"a:1"}), start)
    connections.set_addresses(frozenset({"a:1", "b:1"}), start)
    connections.set_addresses(frozenset(), start)
    # It is back before its stream has ended.
    connections.set_addresses(frozenset({"a:1"}), start)
    assert [address for address, _ in started] == ["a:1", "b:1"]
    started[0][1].is_done = True
    connections.set_addresses(frozenset({"a:1"}), start)
    assert [address for address, _ in started] == ["a:1", "b:1", "a:1"]
    assert notes.told == [{"a:1"}, {"a:1", "b:1"}, set(), {"a:1"}, {"a:1"}]
    connections.stop()
    assert [task.is_cancelled for _, task in started] == [False, True, True]
    # Nobody connects again.
    await connections.keep("a:1")
    assert notes.told[-1] == ("forget", "a:1")


async def test_a_fault_of_ones_own_costs_one_try(monkeypatch, caplog):
    notes, tries = Notes(), []
    connections: EngineConnections[Any] = EngineConnections(notes, hello_timeout_s=1.0, rng=make_rng())  # type: ignore[arg-type]
    connections.set_addresses(frozenset({"a:1"}), lambda _: PlayedTask())  # type: ignore[arg-type,return-value]

    async def fail(_: str) -> bool:
        tries.append(1)
        if len(tries) == 2:
            connections.stop()
        raise ZeroDivisionError

    monkeypatch.setattr(connections, "_run_stream", fail)
    async with asyncio.timeout(20):
        await connections.keep("a:1")
    assert len(tries) == 2
    assert "ZeroDivisionError" in caplog.text
