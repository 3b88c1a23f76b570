"""Requests and engines for the tests of moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fake_engine import expected_output

from sluice_core.records import EngineId

if TYPE_CHECKING:
    from data_plane_harness import Harness

PDD = {"p0": "P", "d0": "D", "d1": "D"}


TWO = {"d0": "D", "d1": "D"}


def start_on(harness: Harness, name: str, max_tokens: int = 40):
    """Admits a request that is placed on one engine."""
    others = [other for other in harness.engines if other != name]
    for other in others:
        harness.state.engines.table.configure(
            EngineId(other), role=harness.engines[other].role, chunk_size_tokens=0, is_draining=False
        )
    request_id, response_stream = harness.admit(20, max_tokens)
    for other in others:
        engine = harness.engines[other]
        harness.state.engines.table.configure(
            EngineId(other), role=engine.role, chunk_size_tokens=engine.chunk_size_tokens, is_draining=False
        )
    assert harness.engine_of(request_id) == name
    harness.deliver()
    return request_id, response_stream


def check_end(harness: Harness, response_stream, num_tokens: int = 40) -> None:
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, num_tokens)
    assert response_stream.finish is not None
    harness.assert_idle()
