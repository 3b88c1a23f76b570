"""What tests of real engines rely on."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import engine_harness
import pytest


def wait_for_child(seconds: float) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(seconds,))
    child.start()
    child.join()
    raise RuntimeError("the core has ended")


def test_a_core_that_hangs_at_its_start_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_harness, "START_LIMIT_S", 0.2)
    starts: list[int] = []

    def start() -> Any:
        starts.append(len(starts))
        return wait_for_child(600.0) if len(starts) == 1 else "client"

    assert engine_harness.start_core(start) == "client"
    assert starts == [0, 1]


def test_a_core_that_ends_by_itself_is_not_started_again() -> None:
    with pytest.raises(RuntimeError, match="the core has ended"):
        engine_harness.start_core(lambda: wait_for_child(0.0))
