"""When an engine counts as lost, and what its iterations teach, against a stub of the latency model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from data_plane_harness import Harness

from sluice.v1 import engine_pb2
from sluice_core.records import IterationShape
from sluice_router.scheduling.engines import engine_health
from sluice_router.settings import make_limits


class StubTable(dict):
    """Engines whose latency model says three seconds, and keeps what it was asked for."""

    def __init__(self, *names: str) -> None:
        super().__init__({name: SimpleNamespace(latency=self) for name in names})
        self.shapes: list[IterationShape] = []

    def estimate_shape_s(self, shape: IterationShape) -> float:
        self.shapes.append(shape)
        return 3.0


def make_stub_engine(**fields: object) -> SimpleNamespace:
    load = {"queued_prefill_tokens": 0, "running_decodes": 0, "decode_context_tokens": 0, "last_submit_number": 0}
    load |= {key: fields.pop(key) for key in list(fields) if key in load}
    engine = {
        "engine_id": "d0",
        "last_heard_s": 100.0,
        "progress_s": 100.0,
        "num_submits": 0,
        "slots": [],
        "chunk_size_tokens": 256,
        "max_model_len_tokens": 4000,
        "spec": SimpleNamespace(max_batch_tokens=1024),
        "load": SimpleNamespace(**load),
    }
    return SimpleNamespace(**{**engine, **fields})


def submission(number: int) -> SimpleNamespace:
    return SimpleNamespace(submit_number=number)


LIMITS = make_limits(silence_limit_s=20.0, iteration_age_floor_s=2.0, iteration_age_factor=5.0)
FAILURES = {
    # what the engine is, seconds that pass, reason
    "silent as long as it may be": ({}, 20.0, None),
    "silent": ({}, 20.25, "silence"),
    "silent and hung": ({"running_decodes": 1, "last_heard_s": 90.0}, 16.0, "silence"),
    "idle": ({}, 16.0, None),
    "a decode, in time": ({"running_decodes": 1}, 15.0, None),
    "a decode": ({"running_decodes": 1}, 15.25, "hang"),
    "a prompt": ({"queued_prefill_tokens": 1}, 15.25, "hang"),
    "a submit on the way": ({"num_submits": 1, "slots": [submission(1)]}, 15.25, "hang"),
    "a submit behind an empty slot": ({"num_submits": 2, "slots": [None, submission(2)]}, 15.25, "hang"),
    "a submit that it has taken up": (
        {"num_submits": 2, "last_submit_number": 2, "slots": [submission(2)]},
        15.25,
        None,
    ),
    "its last submit was aborted": (
        {"num_submits": 3, "last_submit_number": 2, "slots": [submission(2), None]},
        15.25,
        None,
    ),
    "not in the table, in time": ({"running_decodes": 1, "engine_id": "d9"}, 2.0, None),
    "not in the table": ({"running_decodes": 1, "engine_id": "d9"}, 2.25, "hang"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_engine_is_lost_when_it_is_silent_or_stands_still_with_work(name):
    fields, seconds, reason = FAILURES[name]
    engine, now = make_stub_engine(**fields), 100.0 + seconds
    failure = engine_health.find_failure(LIMITS, StubTable("d0"), engine, now)
    assert (failure and failure[0]) == reason
    has_work = name not in {"silent as long as it may be", "idle"} and reason != "silence"
    # One that has nothing to do makes progress by that.
    if reason is None:
        is_idle = not has_work or "taken up" in name or "aborted" in name
        assert engine.progress_s == (now if is_idle else 100.0)


@pytest.mark.parametrize(
    ("fields", "prefill_tokens"),
    [({}, 253), ({"chunk_size_tokens": 0}, 1021), ({"chunk_size_tokens": 2}, 0)],
    ids=["its chunk size", "none yet: its largest batch", "more decodes than that"],
)
def test_the_longest_iteration_is_a_full_one_at_the_end_of_the_longest_prompt(fields, prefill_tokens):
    engine = make_stub_engine(running_decodes=3, decode_context_tokens=700, **fields)
    table = StubTable("d0")
    assert engine_health.find_failure(LIMITS, table, engine, 101.0) is None
    assert table.shapes == [
        IterationShape(
            prefill_tokens=prefill_tokens,
            attention_work=prefill_tokens * 2000,
            num_chunks=1,
            num_decodes=3,
            decode_context_tokens=700,
        )
    ]


# Number and prompts of an iteration, and whether the latency model learns of it
ITERATIONS = [(1, 0, False), (2, 1, True), (4, 0, True), (5, 0, False), (8, 2, True), (7, 1, False), (8, 2, False)]


def test_each_iteration_is_learned_from_once_and_of_decodes_alone_every_fourth():
    harness = Harness({"d0": "D"})
    learned = []
    table = harness.state.engines.table
    table.observe_iteration = lambda *values: learned.append(values)  # type: ignore[method-assign]
    for number, num_chunks, is_learned in ITERATIONS:
        learned.clear()
        iteration = engine_pb2.Iteration(number=number, num_chunks=num_chunks, prefill_tokens=9, duration_s=0.5)
        load = harness.cores["d0"].load()
        load.iteration.CopyFrom(iteration)
        harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
        assert [(engine_id, shape.num_chunks, seconds) for engine_id, shape, seconds in learned] == (
            [("d0", num_chunks, 0.5)] * is_learned
        ), number
