"""The record of an engine's iterations: off by default, complete to the line."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sluice_core.scheduling.engine_policy import RequestKind
from sluice_engine.core_messages import ConfigureAnswer
from sluice_engine.scheduling.fidelity_recorder import VARIABLE, IterationRecorder, open_recorder
from sluice_engine.scheduling.scheduled_batch import ScheduledBatch

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def make_tracked(request_id: str, kind: RequestKind, num_computed_tokens: int = 0) -> Any:
    request = SimpleNamespace(
        request_id=request_id, num_tokens=300, max_tokens=7, num_computed_tokens=num_computed_tokens
    )
    return SimpleNamespace(request=request, kind=kind, arrival_s=12.5)


def test_nothing_is_recorded_unless_the_environment_names_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert open_recorder("engine") is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "records"))
    recorder = open_recorder("engine")
    assert recorder is not None
    recorder.close()
    assert (tmp_path / "records" / "engine.jsonl").read_text() == ""


def test_each_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """Engines are killed: what is in a buffer would be lost."""
    recorder = IterationRecorder(tmp_path / "engine.jsonl")
    chunk, joining = make_tracked("a", RequestKind.NEW_PROMPT, 256), make_tracked("b", RequestKind.JOINING, 301)
    batch = ScheduledBatch(
        started_s=0.0, num_decodes=3, decode_context_tokens=900, prefill_tokens=128, computing=[chunk, joining]
    )
    recorder.note_request(chunk)
    output: Any = SimpleNamespace(num_scheduled_tokens={"a": 128, "b": 1, "c": 1})
    recorder.note_batch(output, batch)
    recorder.note_end(0.025)
    recorder.note_hand_off("c")
    recorder.note_plan(ConfigureAnswer(generation=1, role="P-heavy", chunk_size_tokens=512))
    recorded = (tmp_path / "engine.jsonl").read_text()
    recorder.close()
    lines = [json.loads(line) for line in recorded.splitlines()]
    times_s = [line.pop(1) for line in lines]
    assert times_s == sorted(times_s)
    assert lines == [
        ["request", "a", "NEW_PROMPT", 300, 7, 12.5],
        ["batch", 3, 900, [["a", 128, 128]], ["b"]],
        ["end", 0.025],
        ["hand-off", "c"],
        ["plan", "P-heavy", 512],
    ]
