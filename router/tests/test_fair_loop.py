"""Turns of the event loop: one piece of work each, in order, and none for who does not need to wait."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from sluice_router.fair_loop import Turns

if TYPE_CHECKING:
    from collections.abc import Iterator


def count_turns(stop: asyncio.Event) -> Iterator[int]:
    """Counts the loop's turns from here on, until ``stop`` is set."""
    turns = itertools.count()
    loop = asyncio.get_running_loop()
    present = [next(turns)]

    def advance() -> None:
        present[0] = next(turns)
        if not stop.is_set():
            loop.call_soon(advance)

    loop.call_soon(advance)
    return iter(lambda: present[0], None)


async def until_idle(turns: Turns) -> None:
    """Waits for a turn behind all others."""
    async with asyncio.timeout(5):
        await turns.wait()


async def test_work_that_comes_alone_is_done_at_once():
    turns, done = Turns(), []
    turns.run(lambda: done.append(1))
    assert done == [1]
    await asyncio.sleep(0)
    turns.run(lambda: done.append(2))
    assert done == [1, 2]


async def test_burst_is_done_in_order_and_one_piece_per_turn():
    turns, stop = Turns(), asyncio.Event()
    clock = count_turns(stop)
    done: list[tuple[int, int]] = []
    for number in range(5):
        turns.run(lambda number=number: done.append((number, next(clock))))
    await until_idle(turns)
    stop.set()
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    assert all(later > earlier for (_, earlier), (_, later) in itertools.pairwise(done))


async def test_who_waits_alone_does_not_give_up_control():
    turns = Turns()
    waiting = turns.wait()
    try:
        waiting.send(None)
    except StopIteration:
        return
    raise AssertionError("the turn was free")


async def test_tasks_that_come_at_once_have_a_turn_each():
    turns, stop = Turns(), asyncio.Event()
    clock = count_turns(stop)

    async def work() -> int:
        await turns.wait()
        return next(clock)

    seen = await asyncio.gather(*(work() for _ in range(5)))
    stop.set()
    assert seen == sorted(set(seen))


async def test_who_is_cancelled_while_waiting_holds_nobody_up():
    turns = Turns()
    first, second, third = (asyncio.create_task(turns.wait()) for _ in range(3))
    await first
    second.cancel()
    async with asyncio.timeout(5):
        await third
    assert second.cancelled()


async def test_work_that_fails_costs_no_later_turn():
    turns, done = Turns(), []
    turns.run(lambda: None)

    def fail() -> None:
        raise ZeroDivisionError

    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    turns.run(fail)
    turns.run(lambda: done.append(1))
    await until_idle(turns)
    assert done == [1]
    assert [type(fault["exception"]) for fault in faults] == [ZeroDivisionError]
