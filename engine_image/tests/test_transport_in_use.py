"""The KV transport is read from UCX's log, and an engine that requires RDMA refuses TCP."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import TYPE_CHECKING

import pytest

from sluice_engine.errors import RdmaError
from sluice_engine.kv_transfer.rdma_preflight import check_devices
from sluice_engine.kv_transfer.transport_in_use import (
    TransportLog,
    check_transport,
    find_data_transports,
    find_transport,
    keep_flushed,
)
from sluice_engine.settings import EmulationSettings, EngineSettings

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event
    from pathlib import Path

SETTINGS = EngineSettings(
    engine_id="e", port=1, metrics_port=2, kv_host="127.0.0.1", kv_port=3, model="m", max_batch_tokens=64
)
PREFIX = "[1795280922.018203] [vm:5558 :0]      ucp_worker.c:1997 UCX  INFO    "
TO_ITSELF = "engine-0 self cfg#0 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"
NEAR = "engine-0 intra-node cfg#1 rma(cma/memory)  am(sysv/memory)  ka(sysv/memory)"
FAR = "engine-0 inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)  amo(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)  ka(tcp/eth0)"
FALLEN = "engine-0 inter-node cfg#3 rma_am(tcp/eth0)  amo_am(tcp/eth0)  am(tcp/eth0)  ka(tcp/eth0)"


@pytest.fixture
def log(tmp_path: Path) -> TransportLog:
    return TransportLog(tmp_path)


def write(folder: Path, *lines: str, name: str = "ucx-1.log") -> None:
    with (folder / name).open("a") as file:
        file.writelines(f"{PREFIX}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("lanes", "transports"),
    [
        (TO_ITSELF, {"tcp"}),
        (FAR, {"rc_mlx5"}),
        (NEAR, {"cma"}),
        ("x inter-node cfg#0 rma(cuda_copy/cuda srd/rdmap0:1) am(tcp/eth0)", {"srd"}),
        ("x inter-node cfg#0 rma_bw#0(rc_mlx5/mlx5_0:1) rma_bw#1(rc_mlx5/mlx5_1:1)", {"rc_mlx5"}),
        ("x self cfg#0 am(self/memory)", set()),
    ],
    ids=["emulated by messages", "RDMA", "shared memory", "copies left out", "two rails", "itself"],
)
def test_kv_goes_by_the_lanes_of_remote_memory(lanes: str, transports: set[str]) -> None:
    assert find_data_transports(lanes) == transports


def test_other_engines_count_and_before_them_what_would_be_chosen(log: TransportLog, tmp_path: Path) -> None:
    assert log.read() == ""
    write(tmp_path, "Version 1.23.0 (loaded from libucp.so)", TO_ITSELF)
    assert log.read() == "tcp"
    write(tmp_path, FAR)
    assert log.read() == "rc_mlx5"
    write(tmp_path, NEAR, FALLEN, name="ucx-2.log")
    assert log.read() == "cma,rc_mlx5,tcp"


def test_a_line_that_is_being_written_is_read_when_it_is_whole(log: TransportLog, tmp_path: Path) -> None:
    path = tmp_path / "ucx-1.log"
    path.write_text(f"{PREFIX}{TO_ITSELF}\n{PREFIX}{FAR[:40]}")
    assert log.read() == "tcp"
    with path.open("a") as file:
        file.write(f"{FAR[40:]}\n")
    assert log.read() == "rc_mlx5"


def test_what_has_been_read_is_not_passed_on_again(
    log: TransportLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ucx-1.log"
    written = b"UCX  WARN  one \xff\nUCX  WARN  two\nUCX  WARN  thr"
    path.write_bytes(written)
    log.read()
    log.read()
    path.write_bytes(written + b"ee\n")
    for _ in range(2):
        log.read()
    assert [record.message.split()[-1][:5] for record in caplog.records] == ["\ufffd", "two", "three"]


def test_transports_without_remote_memory_move_kv_by_messages() -> None:
    assert find_data_transports("am(tcp/eth0 self/memory)  ka(sysv/memory)") == {"tcp"}


def test_a_refusal_names_what_the_environment_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS.model_copy(update={"require_rdma": True})
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    with pytest.raises(RdmaError, match="'UCX_TLS': 'tcp,self', 'UCX_NET_DEVICES': 'eth7'"):
        check_transport(settings, "cma,tcp")


def test_warnings_of_ucx_are_passed_on(log: TransportLog, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ucx-1.log").write_text(
        "[1.0] [vm:5559 :1] ib_md.c:1 UCX  ERROR ibv_reg_mr() failed: Cannot allocate\n"
    )
    log.read()
    assert "ibv_reg_mr() failed" in caplog.text


@pytest.mark.parametrize("theirs", [{"UCX_LOG_LEVEL": "debug"}, {"UCX_LOG_FILE": "/x"}], ids=["level", "file"])
def test_a_log_that_somebody_has_set_up_is_left_alone(log: TransportLog, theirs: dict[str, str]) -> None:
    environment = dict(theirs)
    log.prepare(environment)
    assert environment == theirs


def move_kv(name: str, environment: dict[str, str], peer: Connection, done: Event, stop: Event) -> None:
    """Reads a buffer of the other process over NIXL, as vLLM's worker does."""
    os.environ.update(environment)
    import numpy as np  # noqa: PLC0415 - in a process of its own
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

    agent = nixl_agent(name, nixl_agent_config(num_threads=1))
    buffer = np.full(1 << 16, 7 if name == "source" else 0, dtype=np.uint8)
    region = (buffer.ctypes.data, buffer.nbytes, 0)
    agent.register_memory([(*region, "")], "DRAM")
    peer.send((agent.get_agent_metadata(), region))
    metadata, other = peer.recv()
    remote = agent.add_remote_agent(metadata)
    keep_flushed()
    if name == "target":
        descriptors = agent.get_xfer_descs([region], "DRAM"), agent.get_xfer_descs([other], "DRAM")
        transfer = agent.initialize_xfer("READ", *descriptors, remote)
        agent.transfer(transfer)
        while agent.check_xfer_state(transfer) == "PROC":
            pass
        assert (buffer == 7).all()
        done.set()
    stop.wait(60)


def test_real_transfer_on_a_machine_without_rdma_shows_tcp(tmp_path: Path) -> None:
    """The very fallback that RDMA is watched for, seen while the processes live."""
    context = multiprocessing.get_context("spawn")
    ends, done, stop = context.Pipe(), context.Event(), context.Event()
    logs = {name: TransportLog(tmp_path / name) for name in ("source", "target")}
    processes = []
    for end, (name, log) in zip(ends, logs.items(), strict=True):
        (tmp_path / name).mkdir()
        environment: dict[str, str] = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}
        log.prepare(environment)
        processes.append(context.Process(target=move_kv, args=(name, environment, end, done, stop)))
    for process in processes:
        process.start()
    assert done.wait(60)
    deadline_s = time.monotonic() + 60
    while {log.read() for log in logs.values()} != {"tcp"} and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert all(process.is_alive() for process in processes)
    stop.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert {name: log.read() for name, log in logs.items()} == {"source": "tcp", "target": "tcp"}


def efa_device(folder: Path) -> None:
    (folder / "drivers" / "efa").mkdir(parents=True)
    (folder / "class" / "rdmap0" / "device").mkdir(parents=True)
    (folder / "class" / "rdmap0" / "device" / "driver").symlink_to(folder / "drivers" / "efa")


def test_efa_is_recognised_by_its_device(log: TransportLog, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"kv_backend": "LIBFABRIC", "require_rdma": True})
    devices = tmp_path / "class"
    assert find_transport(settings, log, devices) == "tcp"
    with pytest.raises(RdmaError, match="no EFA device"):
        check_devices(settings, devices)
    efa_device(tmp_path)
    assert find_transport(settings, log, devices) == "efa"
    check_devices(settings, devices)


def test_an_emulated_engine_reports_an_emulated_transport(log: TransportLog) -> None:
    assert find_transport(SETTINGS.model_copy(update={"emulation": EmulationSettings()}), log) == "emulated"


@pytest.mark.parametrize("transport", ["rc_mlx5", "cma,rc_mlx5", ""], ids=["RDMA", "with shared memory", "unknown"])
def test_rdma_that_is_required_and_used_is_served(transport: str) -> None:
    check_transport(SETTINGS.model_copy(update={"require_rdma": True}), transport)


@pytest.mark.parametrize("transport", ["tcp", "cma,tcp"])
def test_tcp_is_refused_only_where_rdma_is_required(transport: str) -> None:
    check_transport(SETTINGS, transport)
    with pytest.raises(RdmaError, match=f"KV would go over {transport}"):
        check_transport(SETTINGS.model_copy(update={"require_rdma": True}), transport)
