"""The clock of ``cpu_cost.py --split``: every function of a stage exists, and wrapping one changes nothing it does."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from traced_router import LOOP, OTHER_THREADS, REQUESTS, STAGES, StageClock


@pytest.mark.parametrize("path", [path for functions in STAGES.values() for path in functions])
def test_a_function_of_a_stage_exists(path: str) -> None:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_time_counts_for_the_innermost_stage() -> None:
    clock = StageClock()
    inner = clock.time_function("inner", lambda: sum(range(200_000)))
    outer = clock.time_function("outer", inner)
    assert outer() == sum(range(200_000))
    assert clock.spent_ns["inner"] > clock.spent_ns["outer"] > 0
    assert clock.calls == {"inner": 1, "outer": 1}


def test_what_came_before_the_first_request_does_not_count() -> None:
    clock = StageClock()
    clock.time_function("early", lambda: None)()
    clock.time_function(REQUESTS, lambda: None)()
    split = clock.as_json()
    assert split["requests"] == 1
    assert set(split["us_per_request"]) == {LOOP, REQUESTS}


def test_another_thread_has_a_row_of_its_own() -> None:
    clock = StageClock()
    thread = threading.Thread(target=clock.time_function("work", lambda: sum(range(100_000))))
    thread.start()
    thread.join()
    assert clock.spent_ns["work" + OTHER_THREADS] > 0
    assert "work" not in clock.spent_ns


async def test_a_coroutine_gets_what_it_waits_for() -> None:
    async def add(future: asyncio.Future[int]) -> int:
        return 1 + await future

    clock, future = StageClock(), asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 2)
    assert await clock.time_function("stage", add)(future) == 3


async def test_a_coroutine_hears_that_it_is_cancelled() -> None:
    ends = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    task = asyncio.ensure_future(StageClock().time_function("stage", wait)())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends == ["cancelled"]
