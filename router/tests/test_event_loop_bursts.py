"""Turns of the event loop: one piece of work each, in order, and none for who does not need to wait."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from sluice_router.event_loop_bursts import BurstQueue

if TYPE_CHECKING:
    from collections.abc import Iterator


def count_iterations(stop: asyncio.Event) -> Iterator[int]:
    """Counts the loop iterations from here on, until ``stop`` is set."""
    iterations = itertools.count()
    loop = asyncio.get_running_loop()
    present = [next(iterations)]

    def advance() -> None:
        present[0] = next(iterations)
        if not stop.is_set():
            loop.call_soon(advance)

    loop.call_soon(advance)
    return iter(lambda: present[0], None)


async def until_idle(burst_queue: BurstQueue) -> None:
    """Waits for a turn behind all others."""
    async with asyncio.timeout(5):
        await burst_queue.wait()


async def test_work_that_comes_alone_is_done_at_once():
    burst_queue, done = BurstQueue(), []
    burst_queue.run(lambda: done.append(1))
    assert done == [1]
    await asyncio.sleep(0)
    burst_queue.run(lambda: done.append(2))
    assert done == [1, 2]


async def test_burst_runs_in_order_and_one_piece_per_loop_iteration():
    burst_queue, stop = BurstQueue(), asyncio.Event()
    clock = count_iterations(stop)
    done: list[tuple[int, int]] = []
    for number in range(5):
        burst_queue.run(lambda number=number: done.append((number, next(clock))))
    await until_idle(burst_queue)
    stop.set()
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    assert all(later > earlier for (_, earlier), (_, later) in itertools.pairwise(done))


async def test_who_waits_alone_does_not_give_up_control():
    burst_queue = BurstQueue()
    waiting = burst_queue.wait()
    try:
        waiting.send(None)
    except StopIteration:
        return
    raise AssertionError("the turn was free")


async def test_tasks_that_come_at_once_get_one_loop_iteration_each():
    burst_queue, stop = BurstQueue(), asyncio.Event()
    clock = count_iterations(stop)

    async def work() -> int:
        await burst_queue.wait()
        return next(clock)

    seen = await asyncio.gather(*(work() for _ in range(5)))
    stop.set()
    assert seen == sorted(set(seen))


async def test_cancelled_waiter_delays_nobody():
    burst_queue = BurstQueue()
    first, second, third = (asyncio.create_task(burst_queue.wait()) for _ in range(3))
    await first
    second.cancel()
    async with asyncio.timeout(5):
        await third
    assert second.cancelled()


async def test_work_that_fails_does_not_stop_the_queue():
    burst_queue, done = BurstQueue(), []
    burst_queue.run(lambda: None)

    def fail() -> None:
        raise ZeroDivisionError

    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    burst_queue.run(fail)
    burst_queue.run(lambda: done.append(1))
    await until_idle(burst_queue)
    assert done == [1]
    assert [type(fault["exception"]) for fault in faults] == [ZeroDivisionError]
