"""An engine that is refused in a pod: the process after it waits, says the same, and loads nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from sluice_engine.errors import EngineError, ModelRefusedError, RdmaError, SettingsError, StartError
from sluice_engine.startup import refused_start
from sluice_engine.startup.refused_start import RefusedStart
from sluice_engine.stop_signal import StopSignal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REFUSAL = ModelRefusedError("it has a window")
# A container's two processes, one after the other.
WAITING = """
import sys
from pathlib import Path
from sluice_engine.errors import ModelRefusedError
from sluice_engine.startup.refused_start import RefusedStart
from sluice_engine.stop_signal import StopSignal
stop = StopSignal()
stop.install()
start = RefusedStart(["a"], note=Path(sys.argv[1], "note"), log=Path(sys.argv[1], "log"))
start.keep(ModelRefusedError("it has a window"), "")
start.wait(stop)
"""


class Stop:
    """Notes with which status a signal would end the process."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def end_with(self, status: int) -> None:
        self.statuses.append(status)


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """What a container is given: a file for its termination message, a /tmp that stays, a model."""
    (tmp_path / "log").touch()
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def begin(pod: Path, *arguments: str, sleep: Callable[[float], object] = time.sleep) -> RefusedStart:
    return RefusedStart(arguments or ("a",), note=pod / "note", log=pod / "log", sleep=sleep)


def wait(pod: Path, *arguments: str, change: Callable[[], object] | None = None) -> list[int]:
    """Waits until a change; returns the statuses with which a signal would have ended the process."""
    slept: list[float] = []

    def sleep(duration_s: float) -> None:
        slept.append(duration_s)
        if len(slept) == 3:
            assert change is not None, "it waits, though nothing holds it"
            change()

    stop = Stop()
    begin(pod, *arguments, sleep=sleep).wait(stop)  # type: ignore[arg-type]
    assert slept == [refused_start.POLL_S] * (3 if stop.statuses else 0)
    return stop.statuses


def test_the_next_process_waits_until_config_json_is_another_and_then_starts(pod: Path, capsys) -> None:
    begin(pod).keep(REFUSAL, str(pod))
    assert wait(pod, change=lambda: (pod / "config.json").write_text('{"a": 1}')) == [7, 0]
    assert (pod / "log").read_text() == "it has a window"
    said = "sluice_engine: it has a window; waits for another config.json, spec or image\n"
    assert capsys.readouterr().out == said
    assert wait(pod) == []


def test_a_note_is_written_whole_or_not_at_all(pod: Path, monkeypatch) -> None:
    def cut_off(path: Path, _text: str) -> None:
        path.touch()
        raise OSError("no space left on device")

    monkeypatch.setattr(type(pod), "write_text", cut_off)
    begin(pod).keep(REFUSAL, str(pod))
    assert wait(pod) == []


def test_a_model_that_is_gone_is_another(pod: Path) -> None:
    begin(pod).keep(REFUSAL, str(pod))
    assert wait(pod, change=(pod / "config.json").unlink) == [7, 0]


def test_another_command_line_or_program_is_tried(pod: Path, monkeypatch) -> None:
    begin(pod, "a").keep(SettingsError("--a"), "")
    assert wait(pod, "b") == []
    begin(pod, "a").keep(SettingsError("--a"), "")
    monkeypatch.setattr(refused_start, "find_version", lambda _name: "9")
    assert wait(pod, "a") == []


@pytest.mark.parametrize("error", [StartError("a port is taken"), RdmaError("no device")])
def test_what_may_heal_is_tried_again(pod: Path, error: EngineError) -> None:
    begin(pod).keep(error, str(pod))
    assert wait(pod) == []


def test_outside_a_pod_nothing_is_kept(pod: Path) -> None:
    (pod / "log").unlink()
    begin(pod).keep(REFUSAL, str(pod))
    assert not (pod / "note").exists()
    assert wait(pod) == []


def test_a_process_that_is_stopped_while_it_waits_ends_as_the_first_one_did(pod: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING, str(pod)], stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith(b"sluice_engine: it has a window; waits")
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(timeout=20) == 7
    assert (pod / "log").read_text() == "it has a window"


def test_a_stop_signal_ends_with_the_status_that_it_is_told() -> None:
    statuses: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = StopSignal(statuses.append)
    stop.install()
    try:
        for status in (7, 0):
            stop.end_with(status)
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert statuses == [7, 0]
