"""What the scheduler reports beside tokens: loads, news, cached prefixes, phases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine_server_harness
import pytest
from quiet_imports import import_quietly

from sluice_core.scheduling.engine_policy import PhaseReport
from sluice_engine import core_encoding, core_messages
from sluice_engine.scheduling.phase_tracker import PhaseTracker
from sluice_engine.scheduling.scheduled_batch import ScheduledBatch

LOAD = core_messages.SchedulerLoad(running_decodes=1)
PREFIXES = core_messages.PrefixChanges(stored=[], removed=[5])
ITERATION = engine_server_harness.report().iteration


@pytest.fixture
def outbox() -> Any:
    """One that has reported ``LOAD``."""
    outbox = import_quietly("sluice_engine.scheduling.report_outbox").ReportOutbox()
    send(outbox)
    return outbox


def send(outbox: Any, **changes: Any) -> core_messages.SchedulerReport | None:
    """What an iteration reports, if anything."""
    outputs: dict[int, Any] = {}
    outbox.send(outputs, **{"load": LOAD, "iteration": None, "proposals": [], "prefixes": None, **changes})
    if not outputs:
        return None
    (output,) = outputs[0].outputs
    assert output.request_id == core_messages.REPORT_ID
    return core_encoding.decode_report(output.kv_transfer_params)


def test_an_idle_engine_that_has_nothing_new_reports_nothing(outbox) -> None:
    assert send(outbox) is None
    outbox.note_submit(core_messages.RequestExtras(stream_number=3, submit_number=8))
    assert send(outbox) is None
    report = send(outbox, iteration=ITERATION)
    assert report is not None
    assert report.last_submit_numbers == {3: 8}
    assert send(outbox) is None


@pytest.mark.parametrize(
    "changes",
    [{"iteration": ITERATION}, {"prefixes": PREFIXES}, {"load": core_messages.SchedulerLoad(running_decodes=2)}],
    ids=["an iteration", "a cached block less", "another load"],
)
def test_whatever_is_new_is_reported(outbox, changes) -> None:
    report = send(outbox, **changes)
    assert report is not None
    assert (report.load, report.iteration, report.prefixes) == tuple(
        changes.get(name, default) for name, default in (("load", LOAD), ("iteration", None), ("prefixes", None))
    )


@pytest.mark.parametrize("kind", ["returned", "refused", "pulled"])
def test_what_a_router_waits_for_is_reported_once_by_an_idle_engine_too(outbox, kind) -> None:
    refused = core_messages.RefusedHandOff(request_id="a", reason="preempted")
    part = core_messages.PulledPart(key="1.2", num_tokens=32, reason="")
    news = {"returned": ["a"], "refused": [refused], "pulled": [part]}
    {"returned": outbox.note_returned, "pulled": outbox.note_pulled}.get(kind, lambda _: None)(
        ["a"] if kind == "returned" else part
    )
    if kind == "refused":
        outbox.note_refused("a", "preempted")
    assert outbox.has_news
    report = send(outbox)
    assert report is not None
    assert (report.returned, report.refused, report.pulled_parts) == tuple(
        value if name == kind else [] for name, value in news.items()
    )
    assert not outbox.has_news
    assert send(outbox) is None


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def prefixes() -> Any:
    """Takes batches of events, each a list of what is stored (positive), removed (negative) or cleared (0)."""
    kv_events = import_quietly("vllm.distributed.kv_events")
    recorder = import_quietly("sluice_engine.scheduling.prefix_recorder").PrefixRecorder()
    unsaid = {"parent_block_hash": None, "token_ids": [], "block_size": 16, "lora_id": None, "lora_name": None}

    def make_event(hashes: tuple[int, ...]) -> Any:
        if not hashes:
            return kv_events.AllBlocksCleared()
        if hashes[0] > 0:
            return kv_events.BlockStored(block_hashes=list(hashes), medium=None, **unsaid)
        return kv_events.BlockRemoved(block_hashes=[-each for each in hashes], medium=None)

    def publish(*events: tuple[int, ...]) -> tuple[set[int], set[int]] | None:
        recorder.publish(kv_events.KVEventBatch(ts=0.0, events=[make_event(event) for event in events]))
        changes = recorder.take()
        return None if changes is None else (set(changes.stored), set(changes.removed))

    return publish


def test_what_enters_and_leaves_a_cache_is_reported_once(prefixes) -> None:
    assert prefixes((1, 2, 3), (4,)) == ({1, 2, 3, 4}, set())
    assert prefixes() is None
    assert prefixes((-1, -2), (5,)) == ({5}, {1, 2})
    # What left and came back, or came and left, between two reports is no news.
    assert prefixes((-3, -4), (3,), (6, 7), (-6,)) == ({7}, {4})
    assert prefixes((-9,)) is None


def test_a_content_in_two_blocks_leaves_with_the_second(prefixes) -> None:
    assert prefixes((1,), (1,), (2,)) == ({1, 2}, set())
    assert prefixes((-1,)) is None
    assert prefixes((1,), (-1,), (-1,)) == (set(), {1})


def test_a_cache_that_is_cleared_has_no_copy_left(prefixes) -> None:
    prefixes((1, 2), (1,))
    assert prefixes((3,), ()) == (set(), {1, 2})
    assert prefixes((1,)) == ({1}, set())


# --- phases ----------------------------------------------------------------------------------------------------------


class Phases:
    """A policy that counts its switches, or has no phases."""

    def __init__(self, num_switches: int | None) -> None:
        self.num_switches = num_switches
        self.separates_phases = num_switches is not None
        self.noted: list[tuple[float, bool]] = []

    def note_batch(self, now: float, *, has_prefills: bool) -> None:
        self.noted.append((now, has_prefills))

    def describe_phase(self, now: float, *, is_prefilling: bool) -> PhaseReport | None:
        if self.num_switches is None:
            return None
        return PhaseReport(float(is_prefilling), now, self.num_switches)


def test_switches_between_phases_are_counted_over_all_policies() -> None:
    requests = SimpleNamespace(policy=Phases(2))
    phases = PhaseTracker(requests)  # type: ignore[arg-type]
    counts = []
    for policy, num_switches in ((requests.policy, 2), (requests.policy, 5), (Phases(None), None), (Phases(1), 1)):
        requests.policy, policy.num_switches = policy, num_switches
        report = phases.describe(7.0, is_prefilling=True)
        assert report == (None if num_switches is None else PhaseReport(1.0, 7.0, num_switches))
        counts.append(phases.num_switches)
    assert counts == [2, 5, 5, 6]


def test_only_a_policy_with_phases_is_told_what_iterations_hold() -> None:
    for policy, noted in ((Phases(0), [(7.0, True), (8.0, False)]), (Phases(None), [])):
        phases = PhaseTracker(SimpleNamespace(policy=policy))  # type: ignore[arg-type]
        phases.note_batch(7.0, ScheduledBatch(started_s=1.0, prefill_tokens=5, num_decodes=1))
        phases.note_batch(8.0, ScheduledBatch(started_s=1.0, num_decodes=1))
        assert policy.noted == noted
