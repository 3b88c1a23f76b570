"""The check before an engine with RDMA starts."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from sluice_engine.kv_transfer.rdma_preflight import LEAST_MEMLOCK_BYTES, find_problems, main

if TYPE_CHECKING:
    from pathlib import Path


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
