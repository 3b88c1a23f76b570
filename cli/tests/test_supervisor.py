"""A supervised program: back-off, restart, stop, with stand-ins for processes and a clock that tests move."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from sluice_cli.processes.child_processes import LaunchSpec
from sluice_cli.processes.supervisor import (
    LONGEST_BACKOFF_S,
    SupervisedProcess,
    backoff_s,
    describe_exit,
    read_last_words,
)


class FakeChild:
    """A process that ends when the test says so, or at SIGTERM unless it is stubborn."""

    def __init__(self, pid: int, *, is_stubborn: bool) -> None:
        self.pid = pid
        self.is_stubborn = is_stubborn
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.signals: list[int] = []
        self.is_group_killed = False

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if not self.is_stubborn:
            self.end(-number)

    def kill_group(self) -> None:
        self.is_group_killed = True
        self.end(-signal.SIGKILL)


class World:
    """Time, processes and what was said."""

    def __init__(self, *, is_stubborn: bool = False) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []
        self.children: list[FakeChild] = []
        self.lines: list[str] = []
        self.is_stubborn = is_stubborn
        self.started = asyncio.Event()
        # Closed, it holds starts up; and pauses of the back-off.
        self.may_start, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.paused = asyncio.Event()
        self.may_start.set()
        self.may_go_on.set()
        self.program = SupervisedProcess(
            "engine-0",
            LaunchSpec(command=("x",), log=Path("engine-0.log")),
            spawner=self.spawn,
            report=self.lines.append,
            on_change=lambda: None,
            refusals={7},
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )

    async def spawn(self, launch: LaunchSpec) -> FakeChild:
        self.children.append(FakeChild(100 + len(self.children), is_stubborn=self.is_stubborn))
        self.started.set()
        await self.may_start.wait()
        return self.children[-1]

    async def sleep(self, delay_s: float) -> None:
        self.sleeps.append(delay_s)
        self.now_s += delay_s
        self.paused.set()
        await self.may_go_on.wait()

    async def crash(self, after_s: float) -> None:
        """Ends the present process after it ran so long, and waits for the next."""
        await self.started.wait()
        self.started.clear()
        self.now_s += after_s
        self.children[-1].end(1)
        await self.started.wait()


async def test_crashes_in_a_row_are_waited_for_longer_and_a_healthy_run_resets_that() -> None:
    world = World()
    task = asyncio.create_task(world.program.run())
    for after_s in (1.0, 1.0, 1.0, 61.0, 1.0):
        await world.crash(after_s)
    assert world.sleeps == [0.5, 1.0, 2.0, 0.5, 1.0]
    assert world.lines[0] == "engine-0 ended (exit code 1); it starts again in 0.5 s; see engine-0.log"
    await world.program.stop(1.0)
    await task
    assert world.program.num_starts == 6


async def test_a_refusal_is_said_in_one_line_and_not_tried_again(tmp_path: Path) -> None:
    world = World()
    world.program.launch = LaunchSpec(command=("x",), log=tmp_path / "engine-0.log")
    world.program.launch.log.write_text("INFO loads\nsluice_engine: /m: sliding_window is 4096\nends\n")
    task = asyncio.create_task(world.program.run())
    await world.started.wait()
    world.children[-1].end(7)
    async with asyncio.timeout(10):
        while not world.lines:  # noqa: ASYNC110 - it becomes true within the loop's next rounds
            await asyncio.sleep(0)
    assert world.lines == [
        "engine-0 refuses to start: /m: sliding_window is 4096; it is tried again when the manifest changes it"
    ]
    assert world.program.refusal == "/m: sliding_window is 4096"
    await world.program.stop(1.0)
    await task
    assert (world.sleeps, world.program.num_starts) == ([], 1)


async def test_stop_ends_the_process_and_starts_no_other() -> None:
    world = World()
    task = asyncio.create_task(world.program.run())
    await world.started.wait()
    await world.program.stop(1.0)
    await task
    assert world.children[0].signals == [signal.SIGTERM]
    assert len(world.children) == 1
    assert world.program.pid is None


async def test_a_process_that_ignores_sigterm_is_killed_when_the_grace_is_over() -> None:
    world = World(is_stubborn=True)
    task = asyncio.create_task(world.program.run())
    await world.started.wait()
    await world.program.stop(0.0)
    await task
    assert world.children[0].ended.result() == -signal.SIGKILL
    assert world.lines == ["engine-0 did not end within 0 s; it is killed"]


async def test_stop_before_the_first_start_starts_nothing() -> None:
    world = World()
    task = asyncio.create_task(world.program.run())
    stop = asyncio.create_task(world.program.stop(1.0))
    await asyncio.gather(task, stop)
    assert all(child.ended.done() for child in world.children)


async def test_stop_during_a_start_ends_what_starts() -> None:
    world = World()
    world.may_start.clear()
    task = asyncio.create_task(world.program.run())
    await world.started.wait()
    stop = asyncio.create_task(world.program.stop(20.0))
    await asyncio.sleep(0)
    world.may_start.set()
    async with asyncio.timeout(10):
        await asyncio.gather(task, stop)
    assert world.children[0].signals == [signal.SIGTERM]
    assert world.lines == []


async def test_stop_during_a_pause_ends_the_pause_and_starts_nothing() -> None:
    world = World()
    world.may_go_on.clear()
    task = asyncio.create_task(world.program.run())
    await world.started.wait()
    world.children[0].end(1)
    await world.paused.wait()
    async with asyncio.timeout(10):
        await world.program.stop(20.0)
        await task
    assert len(world.children) == 1
    assert len(world.lines) == 1


async def test_what_a_process_left_behind_is_killed_when_it_ends() -> None:
    world = World()
    task = asyncio.create_task(world.program.run())
    await world.crash(1.0)
    assert world.children[0].is_group_killed
    await world.program.stop(1.0)
    await task


def test_backoff_doubles_up_to_a_limit() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 7, 8, 1000)] == [0.5, 1.0, 2.0, LONGEST_BACKOFF_S, 30.0, 30.0]


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_ends_are_described(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_last_words_are_of_the_end_of_the_log_and_of_no_log_there_are_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_last_words(log) == ""
    log.write_text("sluice_engine: no such model\n" + "x" * 65_536)
    assert read_last_words(log) == ""
    log.write_text("sluice_engine: first\nsluice_engine: no such model\nsaid sluice_engine: by another\n")
    assert read_last_words(log) == "no such model"
