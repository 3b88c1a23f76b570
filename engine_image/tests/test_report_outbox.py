"""What the scheduler reports beside tokens: with what, and when nothing is worth a report."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from sluice_engine import core_encoding, core_messages

LOAD = core_messages.SchedulerLoad(running_decodes=1)
PREFIXES = core_messages.PrefixChanges(stored=[], removed=[5])
ITERATION = core_messages.IterationReport(
    number=1,
    prefill_tokens=0,
    attention_work=0.0,
    num_chunks=0,
    num_decodes=1,
    decode_context_tokens=3,
    duration_s=0.03,
)


@pytest.fixture
def outbox() -> Any:
    """One that has reported ``LOAD``. Its module imports vLLM, whose warnings are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sluice_engine.scheduling.report_outbox import ReportOutbox  # noqa: PLC0415
    outbox = ReportOutbox()
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
