"""Reads CPU time and memory of processes from the kernel, foreign load, and the machine's present speed.

CPU time of a process is the run time of its threads (nanoseconds, ``/proc/PID/task/*/schedstat``), not ticks: ticks
miss a router that wakes up thousands of times a second for microseconds. Network work of loopback within a system call
counts for the caller.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of a cpu line of /proc/stat: user nice system idle iowait irq softirq steal.
IDLE_FIELDS = (3, 4)
STEAL_FIELD = 7
# User and system time of reaped children: fields of /proc/PID/stat, counted from behind the name.
REAPED_FIELDS = (13, 14)
KERNEL_PARENT = 2


def find_tree(root: int) -> set[int]:
    """Finds a process and its descendants."""
    parents = {}
    for directory in PROC.iterdir():
        if directory.name.isdigit():
            try:
                # The name is in parentheses and may contain anything. The fields after it are regular.
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(directory.name)] = int(fields[1])
    tree = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in tree} - tree
        if not more:
            return tree & (parents.keys() | {root})
        tree |= more


def read_cpu_s(pids: set[int]) -> float:
    """Reads the CPU time of processes in seconds, over all threads that still live."""
    total_ns = 0
    for pid in pids:
        for schedstat in (PROC / str(pid) / "task").glob("*/schedstat"):
            try:
                total_ns += int(schedstat.read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return total_ns / 1e9


def read_foreign_s(own: set[int]) -> float:
    """Reads the CPU time of all other processes in seconds: their own, and that of the children they have reaped.

    When a process ends, its time moves to the process that reaps it. So the sum loses nothing and repeats nothing.
    Kernel threads are left out, because here they work for the benchmark.
    The busy time of ``/proc/stat`` would be simpler. But it counts whole ticks, and what a timer wakes runs at ticks.
    """
    total_s = 0.0
    for directory in PROC.iterdir():
        if not directory.name.isdigit() or int(directory.name) in own:
            continue
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == KERNEL_PARENT:
            continue
        reaped_ticks = sum(int(fields[index]) for index in REAPED_FIELDS)
        total_s += read_cpu_s({int(directory.name)}) + reaped_ticks / TICKS_PER_S
    return total_s


def read_pss_bytes(pids: set[int]) -> int:
    """Reads the proportional set size of processes, in bytes."""
    total = 0
    for pid in pids:
        try:
            rollup = (PROC / str(pid) / "smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
        total += int(line.split()[1]) * 1024
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTimes:
    """Busy and stolen time of each core since boot, in seconds.

    Args:
        busy_s: Busy time by core.
        steal_s: Time that the hypervisor took, by core.
    """

    busy_s: tuple[float, ...]
    steal_s: tuple[float, ...]

    @classmethod
    def read(cls) -> CoreTimes:
        """Reads ``/proc/stat``."""
        busy, steal = [], []
        for line in (PROC / "stat").read_text().splitlines():
            if line.startswith("cpu") and line[3].isdigit():
                fields = [int(field) for field in line.split()[1:9]]
                idle = sum(fields[index] for index in IDLE_FIELDS)
                busy.append((sum(fields) - idle - fields[STEAL_FIELD]) / TICKS_PER_S)
                steal.append(fields[STEAL_FIELD] / TICKS_PER_S)
        return cls(busy_s=tuple(busy), steal_s=tuple(steal))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """CPU time at one moment.

    Args:
        at_s: Monotonic time.
        router_s: CPU time of the router under test, its children included.
        foreign_s: CPU time of every process that is not the benchmark's.
        cores: Times of the machine's cores.
    """

    at_s: float
    router_s: float
    foreign_s: float
    cores: CoreTimes

    @classmethod
    def take(cls, router: int | None) -> Snapshot:
        """Takes a snapshot.

        Args:
            router: Process id of the router; None without a router.
        """
        return cls(
            at_s=time.monotonic(),
            router_s=read_cpu_s(find_tree(router)) if router is not None else 0.0,
            foreign_s=read_foreign_s(find_tree(os.getpid())),
            cores=CoreTimes.read(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUsage:
    """Mean use of the machine between two snapshots, in cores unless stated.

    Args:
        seconds: Time between the two.
        router_cpu_s: CPU time of the router, in seconds.
        router_cores: Use of the router.
        core_busy: Busy share of each core, 0 to 1.
        steal: Use that the hypervisor took, all cores together.
        foreign: Use of processes that are not the benchmark's.
    """

    seconds: float
    router_cpu_s: float
    router_cores: float
    core_busy: tuple[float, ...]
    steal: float
    foreign: float

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> MachineUsage:
        """Subtracts."""
        seconds = after.at_s - before.at_s
        busy = tuple(
            (late - early) / seconds for early, late in zip(before.cores.busy_s, after.cores.busy_s, strict=True)
        )
        router_s = after.router_s - before.router_s
        return cls(
            seconds=seconds,
            router_cpu_s=router_s,
            router_cores=router_s / seconds,
            core_busy=busy,
            steal=sum(
                (late - early) / seconds for early, late in zip(before.cores.steal_s, after.cores.steal_s, strict=True)
            ),
            foreign=max(0.0, after.foreign_s - before.foreign_s) / seconds,
        )


def calibrate(load: Path, core: int) -> dict[str, float]:
    """Measures the present speed of a core.

    Args:
        load: The load generator.
        core: The core.

    Returns:
        ``loop_ns`` (one round of arithmetic) and ``send_receive_us`` (200 bytes over loopback).
    """
    command = ["taskset", "-c", str(core), str(load), "--calibrate"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    values: dict[str, float] = json.loads(answer.stdout)
    return values


def describe() -> dict[str, str]:
    """Describes the machine."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in (PROC / "cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
