"""The check before an engine with RDMA starts."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sluice_engine.errors import RdmaError
from sluice_engine.kv_transfer.rdma_preflight import (
    DEVICES,
    LEAST_MEMLOCK_BYTES,
    check_devices,
    find_problems,
    main,
)
from sluice_engine.settings import EngineSettings
from sluice_engine.termination_log import write_termination_log

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = EngineSettings(
    engine_id="e", port=1, metrics_port=2, kv_host="127.0.0.1", kv_port=3, model="m", max_batch_tokens=64
)


def test_devices_and_locked_memory_are_all_that_is_needed(tmp_path: Path) -> None:
    (tmp_path / "uverbs0").touch()
    assert find_problems(tmp_path, resource.RLIM_INFINITY) == []
    assert find_problems(tmp_path, LEAST_MEMLOCK_BYTES) == []


def test_what_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    devices, memlock = find_problems(tmp_path, 8 << 20)
    assert str(tmp_path) in devices
    assert "resourceName" in devices
    assert "8388608 bytes" in memlock
    assert "LimitMEMLOCK=infinity" in memlock


def test_efa_needs_a_library_that_images_may_not_have(tmp_path: Path) -> None:
    (tmp_path / "uverbs0").touch()
    assert find_problems(tmp_path, resource.RLIM_INFINITY, "libc.so.6") == []
    [missing] = find_problems(tmp_path, resource.RLIM_INFINITY, "libnothing.so.1")
    assert "libnothing.so.1 cannot be loaded" in missing
    assert "image" in missing


@pytest.mark.parametrize(("options", "status"), [([], 0), (["--require"], 1)], ids=["warns", "refuses"])
def test_a_problem_is_reported_and_ends_the_start_only_where_rdma_is_required(tmp_path: Path, options, status) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    assert main(["--fabric", "RoCE", *options], devices=tmp_path, log=log) == status
    assert log.read_text().startswith("RDMA over RoCE cannot work: no RDMA device")


def test_rdma_that_is_required_is_refused_without_a_device_before_anything_loads(tmp_path: Path) -> None:
    required = SETTINGS.model_copy(update={"require_rdma": True})
    check_devices(SETTINGS, tmp_path)
    with pytest.raises(RdmaError, match=f"no RDMA device in {tmp_path}"):
        check_devices(required, tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    check_devices(required, tmp_path)


def test_the_program_refuses_with_a_message_and_an_exit_status_of_its_own(tmp_path: Path) -> None:
    """What a machine without RDMA shows; vLLM is not even imported."""
    if any(DEVICES.glob("*")):
        pytest.skip("this machine has RDMA devices")
    options = ["--engine-id=e", "--port=1", "--metrics-port=2", "--kv-host=127.0.0.1", "--kv-port=3", "--model=m"]
    command = [sys.executable, "-X", "importtime", "-m", "sluice_engine", *options, "--max-batch-tokens=64"]
    done = subprocess.run(
        [*command, "--require-rdma=true"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 6
    assert f"sluice_engine: RDMA is required, and there is no RDMA device in {DEVICES}" in done.stderr
    assert "| vllm" not in done.stderr


def test_the_termination_log_is_written_where_there_is_one(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    write_termination_log("RDMA is required", log)
    assert not log.exists()
    log.touch()
    write_termination_log("RDMA is required", log)
    assert log.read_text() == "RDMA is required"
