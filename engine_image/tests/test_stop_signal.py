"""SIGTERM and SIGINT of an engine: at once before it serves, with a drain afterwards."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from sluice_engine.stop_signal import StopSignal

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Puts the test runner's own handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@SIGNALS
def test_before_there_is_anything_to_drain_a_signal_ends_the_engine_at_once(number) -> None:
    statuses: list[int] = []
    StopSignal(statuses.append).install()
    signal.raise_signal(number)
    assert statuses == [0]


@SIGNALS
async def test_a_serving_engine_drains_first_and_only_a_second_interrupt_ends_it_at_once(number) -> None:
    statuses: list[int] = []
    stop = StopSignal(statuses.append)
    stop.install()
    loop = asyncio.get_running_loop()
    event = stop.bind(loop)
    assert not event.is_set()
    signal.raise_signal(number)
    async with asyncio.timeout(10):
        await event.wait()
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(again)
    async with asyncio.timeout(10):
        while not statuses:  # noqa: ASYNC110 - the loop handles signals in its own time
            await asyncio.sleep(0.001)
    for handled in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(handled)
    assert statuses == [0]
