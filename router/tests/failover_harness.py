"""What tests of failover share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2

if TYPE_CHECKING:
    from data_plane_harness import Harness

TWO = {"d0": "D", "d1": "D"}


def tick_with(harness: Harness, *names: str, age_s: float | None = None) -> None:
    """0.1 s passes in which only ``names`` report, without an iteration unless ``age_s`` says how old one is."""
    harness.clock.advance(0.1)
    for name in names:
        load = harness.cores[name].load()
        load.iteration_age_s = 1e9 if age_s is None else age_s
        harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(load=load))
    harness.router.tick()
