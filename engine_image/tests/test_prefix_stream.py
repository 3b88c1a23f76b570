"""What routers hear of an engine's prefix cache, over changes and reconnects; without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from engine_server_harness import Engine, report
from fake_core import FINGERPRINT, Builder, Clock, Core

from sluice.v1 import engine_pb2 as wire
from sluice_engine import core_messages
from sluice_engine.server import pending_prefixes
from sluice_engine.server.engine_server import EngineServer


@pytest.fixture
def engine() -> Engine:
    core, clock = Core(), Clock()
    hello = wire.EngineHello(engine_id="engine-1", epoch=7, fingerprint=FINGERPRINT, prefix_root=b"root")
    return Engine(EngineServer(hello, core, Builder(), clock=clock), core, clock)


def tell(engine: Engine, stored: Any = (), removed: Any = ()) -> None:
    changes = core_messages.PrefixChanges(stored=list(stored), removed=list(removed))
    engine.put_out(report=report(prefixes=changes))
    engine.clock.now_s += 1.0
    engine.server.tick(engine.clock.now_s)


def read(router: Any) -> list[wire.PrefixChanges]:
    return [message.prefixes for message in router.receive() if message.HasField("prefixes")]


def add_up(changes: list[wire.PrefixChanges]) -> set[int]:
    known: set[int] = set()
    for each in changes:
        known = (known | set(each.stored)) - set(each.removed)
    return known


async def test_routers_are_told_what_changed_and_nothing_when_nothing_did(engine):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    tell(engine, stored=[1, 2**64 - 1])
    tell(engine, stored=[3], removed=[1])
    tell(engine)
    tell(engine, removed=[3])
    tell(engine, stored=[4])
    for router in (first, second):
        changes = read(router)
        assert [(each.sequence, each.is_reset) for each in changes] == [(1, True), (2, False), (3, False), (4, False)]
        assert [list(each.removed) for each in changes[1:]] == [[1], [3], []]
        assert add_up(changes) == {4, 2**64 - 1}


async def test_a_new_stream_begins_with_all_that_is_cached(engine):
    router = engine.attached()
    tell(engine, stored=[1, 2, 3])
    router.lose_stream()
    tell(engine, stored=[4], removed=[1])
    again = engine.attached()
    tell(engine, stored=[5], removed=[2])
    changes = read(again)
    assert changes[0].is_reset
    assert changes[0].sequence == 1
    assert add_up(changes) == {3, 4, 5}


async def test_a_large_cache_is_told_in_parts_that_later_changes_join(engine, monkeypatch):
    monkeypatch.setattr(pending_prefixes, "MAX_HASHES", 10)
    tell(engine, stored=range(35))
    router = engine.attached()
    tell(engine, stored=[100], removed=[0])
    for _ in range(5):
        tell(engine)
    changes = read(router)
    assert all(len(each.stored) + len(each.removed) <= 10 for each in changes)
    assert [each.sequence for each in changes] == list(range(1, len(changes) + 1))
    assert add_up(changes) == {*range(1, 35), 100}
