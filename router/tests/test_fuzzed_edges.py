"""A few of the drawn inputs of ``edge_fuzzing``, of which a long run is a command of its own."""

from __future__ import annotations

import harness_faults
import pytest
from edge_fakes import FakePlane
from edge_fuzzing import fuzz_edges, send_all

NUM_INPUTS = 600


async def test_whatever_comes_in_is_answered_with_success_or_the_clients_fault(text):
    async with fuzz_edges(text, seed=2) as fuzzing:
        await send_all(fuzzing, range(NUM_INPUTS))
    assert fuzzing.faults == []
    assert {"200", "400", "404", "405", "gRPC OK", "gRPC INVALID_ARGUMENT"} <= fuzzing.outcomes.keys()


async def test_a_fault_of_our_own_is_seen_at_both_edges(text, monkeypatch):
    def fail(*_):
        raise RuntimeError("our own fault")

    monkeypatch.setattr(FakePlane, "admit", fail)
    async with fuzz_edges(text, seed=2) as fuzzing:
        await send_all(fuzzing, range(100))
    faults = "\n".join([*fuzzing.faults, *harness_faults.take()])
    assert ": 500: " in faults
    assert "grpc fault" in faults
    assert "our own fault" in faults


@pytest.mark.parametrize("number", [0, 17])
async def test_an_input_is_drawn_again_by_its_number(text, number):
    outcomes = []
    for _ in range(2):
        async with fuzz_edges(text, seed=3) as fuzzing:
            await fuzzing.send(number)
        outcomes.append(fuzzing.outcomes)
    assert outcomes[0] == outcomes[1]
