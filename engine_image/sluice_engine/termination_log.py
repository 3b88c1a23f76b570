"""The pod's termination message: why a program of the engine's image has ended, or what it warns of."""

from __future__ import annotations

from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")


def write_termination_log(message: str, log: Path = TERMINATION_LOG) -> None:
    """Writes a message to where the pod's status shows it, if this program runs in a pod."""
    if log.exists():
        log.write_text(message)
