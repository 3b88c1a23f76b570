"""An engine that is refused in a pod: it ends once, which tells the operator why, and from then on it waits.

Kubernetes starts a container again whenever it ends, and a Deployment's pods allow nothing else. So the second process
finds what the first one left in the pod's /tmp, and loads nothing: no vLLM, no model, nothing on the GPU. It is not
ready, and the pod's status keeps saying how the first one ended. It starts for real when config.json, or the program,
has become another; an edit of the spec makes another pod anyway.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_engine.supported_versions import VLLM_DISTRIBUTIONS, find_version
from sluice_engine.termination_log import TERMINATION_LOG, write_termination_log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_engine.errors import EngineError
    from sluice_engine.stop_signal import StopSignal

NOTE = Path(tempfile.gettempdir()) / "sluice-refusal.json"
POLL_S = 10.0
PROGRAMS = ("sluice-serve", *VLLM_DISTRIBUTIONS)


class RefusedStart:
    """What is known of an earlier refusal, in a pod; elsewhere there is no second process to tell.

    Args:
        arguments: The engine's command line.
        note: Where a refusal is kept; containers of a pod are started again with the same file.
        log: The pod's termination message; its file is there in pods alone.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        note: Path = NOTE,
        log: Path = TERMINATION_LOG,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._arguments = tuple(arguments)
        self._note = note
        self._log = log
        self._sleep = sleep

    def keep(self, error: EngineError, model: str) -> None:
        """Keeps a refusal for the next process.

        Args:
            error: Says why.
            model: The model's directory; empty: not known.
        """
        if not error.is_permanent or not self._log.exists():
            return
        kept = {"reason": str(error), "status": error.exit_status, "model": model, "of": self._identify(model)}
        # Whole or not at all. Without it the next process finds out for itself.
        written = self._note.with_suffix(".new")
        with suppress(OSError):
            written.write_text(json.dumps(kept))
            written.replace(self._note)

    def wait(self, stop: StopSignal) -> None:
        """Waits for as long as an earlier refusal holds; returns at once if there is none.

        Args:
            stop: Ends the wait, with the refusal's exit status. The kubelet stops what does not get ready within
                the time for a start, and the pod's status then shows this end.
        """
        if not self._log.exists() or not self._note.exists():
            return
        kept = json.loads(self._note.read_text())
        if kept["of"] == self._identify(kept["model"]):
            stop.end_with(kept["status"])
            write_termination_log(kept["reason"], self._log)
            print(f"sluice_engine: {kept['reason']}; waits for another config.json, spec or image", flush=True)
            while kept["of"] == self._identify(kept["model"]):
                self._sleep(POLL_S)
            stop.end_with(0)
        self._note.unlink()

    def _identify(self, model: str) -> str:
        """Identifies all that a refusal may depend on, as far as a pod can change without being replaced."""
        programs = [find_version(name) for name in PROGRAMS]
        try:
            config = Path(model, "config.json").read_bytes() if model else b""
        except OSError:
            config = b""
        return hashlib.sha256(repr((self._arguments, programs, config)).encode()).hexdigest()
