"""The choice of ports: which one, who has claimed it, and what is said of one that is taken."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sluice_cli.processes import ports
from sluice_cli.processes.ports import PortAllocator, PortError

PORTS = range(5000, 5004)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Addresses that somebody listens on; no port of this machine is touched."""
    found: set[tuple[str, int]] = set()
    monkeypatch.setattr(ports, "_is_free", lambda host, port: (host, port) not in found)
    return found


def allocate(folder: Path, start: int = 2, **options: Any) -> PortAllocator:
    def choose_start(number: int) -> int:
        assert number == len(PORTS)
        return start

    rng: Any = SimpleNamespace(randrange=choose_start)
    return PortAllocator(PORTS, directory=folder / "a" / "claims", rng=rng, **options)


def test_each_port_is_chosen_once_preferred_ones_first_from_a_start_around(tmp_path: Path, taken: Any) -> None:
    taken.add(("127.0.0.1", 5003))
    book = allocate(tmp_path)
    assert book.choose([9000]) == 9000
    assert book.choose([9000, 9001]) == 9001
    assert [book.choose() for _ in range(3)] == [5002, 5000, 5001]
    with pytest.raises(PortError, match=r"no port from 5000 to 5003 is free on 127\.0\.0\.1"):
        book.choose()
    book.release(5000)
    book.release(5000)
    book.release(1)
    assert book.choose() == 5000


def test_a_claim_is_a_locked_file_that_nobody_else_may_open(tmp_path: Path) -> None:
    first, second = allocate(tmp_path), allocate(tmp_path)
    assert (first.choose(), second.choose()) == (5002, 5003)
    assert oct((tmp_path / "a" / "claims").stat().st_mode)[-3:] == "700"
    assert oct((tmp_path / "a" / "claims" / "5002").stat().st_mode)[-3:] == "600"
    first.release(5002)
    assert second.choose() == 5002


def test_a_port_that_is_in_use_leaves_no_claim(tmp_path: Path, taken: Any) -> None:
    book, other = allocate(tmp_path), allocate(tmp_path)
    taken.add(("127.0.0.1", 5002))
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert book.choose() == 5003
    with pytest.raises(PortError):
        other.take(5003, "p", "r")
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    taken.clear()
    assert other.choose() == 5002


def test_ports_are_looked_for_on_the_host_that_they_are_for(tmp_path: Path, taken: Any) -> None:
    taken.add(("10.0.0.1", 5002))
    assert allocate(tmp_path, host="10.0.0.1").choose() == 5003
    assert allocate(tmp_path).choose() == 5002


def test_launchers_of_a_user_share_their_claims() -> None:
    assert PortAllocator()._directory == Path(tempfile.gettempdir()) / f"sluice-ports-{os.getuid()}"
    assert PortAllocator()._ports == ports.DEFAULT_RANGE


def listen(port: int, pid: int | None, status: str = psutil.CONN_LISTEN) -> Any:
    return SimpleNamespace(status=status, pid=pid, laddr=("127.0.0.1", port))


@pytest.mark.parametrize(
    ("connections", "owner"),
    [
        ([listen(5001, 7), listen(5000, 8)], " by process 8 (nginx)"),
        ([listen(5001, 7)], ""),
        ([listen(5000, None)], ""),
        ([listen(5000, 8, psutil.CONN_ESTABLISHED)], ""),
        (psutil.AccessDenied(), ""),
    ],
    ids=["another process", "another port", "of another user", "no listener", "unreadable"],
)
def test_a_port_that_is_taken_is_said_with_its_owner_and_the_remedy(
    tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch, connections: Any, owner: str
) -> None:
    def list_connections(kind: str) -> Any:
        assert kind == "tcp"
        if isinstance(connections, Exception):
            raise connections
        return connections

    monkeypatch.setattr(psutil, "net_connections", list_connections)
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(name=lambda: {7: "other", 8: "nginx"}[pid]))
    book = allocate(tmp_path)
    assert book.take(5000, "spec.port", "choose another") == 5000
    for holder in (book, allocate(tmp_path)):
        with pytest.raises(PortError) as refused:
            holder.take(5000, "spec.port", "choose another")
        assert str(refused.value) == f"port 5000 (spec.port) is in use on 127.0.0.1{owner}; choose another"
    taken.add(("127.0.0.1", 5001))
    with pytest.raises(PortError, match="port 5001"):
        book.take(5001, "spec.port", "choose another")
