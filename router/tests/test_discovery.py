"""Addresses of engines: a file that is read again when it changes, or a name."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from sluice_router.engines.discovery import DnsDiscovery, FileDiscovery, parse_addresses, parse_discovery, watch


async def test_file_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "engines.json"
    discovery = FileDiscovery(path)
    assert await discovery.find() is None
    path.write_text('["127.0.0.1:1"]')
    assert await discovery.find() == {"127.0.0.1:1"}
    path.write_text('["127.0.0.1:1", "127.0.0.1:2"]')
    os.utime(path, ns=(1, 1))
    assert await discovery.find() == {"127.0.0.1:1", "127.0.0.1:2"}


@pytest.mark.parametrize(
    "text", ["", "[", '"x"', "[1]", '["nowhere"]', '["a:1", 2]', '["nowhere", "a:1"]', '{"a:1": 2}']
)
async def test_broken_file_leaves_what_was_known(tmp_path, text):
    path = tmp_path / "engines.json"
    path.write_text('["127.0.0.1:1"]')
    discovery = FileDiscovery(path)
    await discovery.find()
    path.write_text(text)
    os.utime(path, ns=(2, 2))
    assert await discovery.find() == {"127.0.0.1:1"}
    path.unlink()
    assert await discovery.find() == {"127.0.0.1:1"}


async def test_file_that_has_not_changed_is_not_read_again(tmp_path):
    path = tmp_path / "engines.json"
    path.write_text('["127.0.0.1:1"]')
    discovery = FileDiscovery(path)
    assert await discovery.find() == {"127.0.0.1:1"}
    stamp = path.stat().st_mtime_ns
    path.write_text('["127.0.0.1:2"]')
    os.utime(path, ns=(stamp, stamp))
    assert await discovery.find() == {"127.0.0.1:1"}
    os.utime(path, ns=(stamp, stamp + 1))
    assert await discovery.find() == {"127.0.0.1:2"}


async def test_file_that_another_one_replaced_is_read_though_size_and_time_are_the_same(tmp_path):
    path, other = tmp_path / "engines.json", tmp_path / "other.json"
    for each, text in ((path, '["127.0.0.1:1"]'), (other, '["127.0.0.1:2"]')):
        each.write_text(text)
        os.utime(each, ns=(7, 7))
    discovery = FileDiscovery(path)
    assert await discovery.find() == {"127.0.0.1:1"}
    other.replace(path)
    assert await discovery.find() == {"127.0.0.1:2"}


async def test_file_that_could_not_be_read_is_read_again_though_it_has_not_changed(tmp_path, monkeypatch):
    path = tmp_path / "engines.json"
    path.write_text('["127.0.0.1:1"]')
    discovery = FileDiscovery(path)

    def refuse(*_args, **_options):
        raise PermissionError("no right to read it")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        assert await discovery.find() is None
    assert await discovery.find() == {"127.0.0.1:1"}


async def test_name_is_resolved():
    assert "127.0.0.1:50051" in (await DnsDiscovery("localhost", 50051).find() or ())


@pytest.mark.parametrize(
    ("answer", "addresses"),
    [
        ([("10.0.0.1", 0), ("10.0.0.2", 0), ("10.0.0.1", 0)], {"10.0.0.1:50051", "10.0.0.2:50051"}),
        ([("fd00::1", 0, 0, 0)], {"[fd00::1]:50051"}),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), frozenset()),
        (socket.gaierror(socket.EAI_NODATA, "no addresses"), frozenset()),
        (socket.gaierror(socket.EAI_AGAIN, "the name server is away"), None),
    ],
    ids=["several", "IPv6", "a Service without pods", "a name without addresses", "nobody knows"],
)
async def test_answers_of_the_name_server(monkeypatch, caplog, answer, addresses):
    class Loop:
        async def getaddrinfo(self, host, port, *, type):  # noqa: A002 - asyncio's name
            assert (host, port, type) == ("engines.ns.svc", 50051, socket.SOCK_STREAM)
            if isinstance(answer, Exception):
                raise answer
            return [(socket.AF_INET, type, 6, "", address) for address in answer]

    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    assert await DnsDiscovery("engines.ns.svc", 50051).find() == addresses
    # A Service without pods is nothing to speak of.
    assert ("engines.ns.svc" in caplog.text) is (addresses is None)


def test_kinds():
    assert isinstance(parse_discovery("file:/tmp/x"), FileDiscovery)
    assert isinstance(parse_discovery("dns:engines.ns.svc:50051"), DnsDiscovery)
    assert isinstance(parse_discovery("dns:name:1"), DnsDiscovery)
    assert isinstance(parse_discovery("dns:name:65535"), DnsDiscovery)


@pytest.mark.parametrize("text", ["", "file:", "dns:name", "dns::1", "dns:name:0", "dns:name:65536", "zk:x"])
def test_unknown_kind_is_refused_with_the_known_ones(text):
    with pytest.raises(ValueError, match="file:PATH and dns:NAME:PORT"):
        parse_discovery(text)


def test_duplicate_addresses_are_one():
    assert parse_addresses('["a:1", "a:1"]') == {"a:1"}


def test_files_are_looked_at_five_times_a_second_and_names_once():
    assert [parse_discovery(text).interval_s for text in ("file:/e", "dns:engines:8001")] == [0.2, 1.0]


async def test_watch_tells_changes_only():
    class Scripted:
        interval_s = 0.0
        found = iter([None, frozenset({"a:1"}), frozenset({"a:1"}), None, frozenset()])

        async def find(self):
            try:
                return next(self.found)
            except StopIteration:
                raise asyncio.CancelledError from None

    told: list[frozenset[str]] = []
    with pytest.raises(asyncio.CancelledError):
        await watch(Scripted(), told.append)
    assert told == [{"a:1"}, frozenset()]


async def test_watch_pauses_between_two_looks():
    class Counting:
        interval_s = 30.0
        num_looks = 0

        async def find(self):
            self.num_looks += 1
            if self.num_looks > 2:
                raise asyncio.CancelledError

    discovery = Counting()
    watching = asyncio.ensure_future(watch(discovery, lambda _: None))
    for _ in range(5):
        await asyncio.sleep(0)
    assert discovery.num_looks == 1
    watching.cancel()
    await asyncio.wait([watching])
