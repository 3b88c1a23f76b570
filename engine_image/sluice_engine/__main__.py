"""Starts an engine: ``python -m sluice_engine --engine-id ID ...``."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_engine import core_refusal
from sluice_engine.child_processes import leave
from sluice_engine.errors import EngineError
from sluice_engine.kv_transfer.rdma_preflight import check_devices
from sluice_engine.kv_transfer.transport_in_use import TransportLog
from sluice_engine.settings import parse_settings
from sluice_engine.startup.model_check import check_model
from sluice_engine.startup.refused_start import RefusedStart
from sluice_engine.stop_signal import StopSignal
from sluice_engine.supported_versions import check_vllm_version
from sluice_engine.termination_log import write_termination_log

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs an engine until it is told to stop or its EngineCore dies; never returns."""
    # First of all: a pod can be stopped during the imports, and PID 1 without a handler ignores SIGTERM.
    stop = StopSignal()
    stop.install()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = sys.argv[1:] if arguments is None else arguments
    refused = RefusedStart(given)
    refused.wait(stop)
    model = ""
    try:
        # Settings and vLLM's version are checked without importing vLLM, which takes seconds.
        settings = parse_settings(given)
        model = settings.model
        check_vllm_version()
        check_model(settings.model, settings.vllm_args)
        check_devices(settings)
        with tempfile.TemporaryDirectory(prefix="sluice-ucx-") as folder:
            log = TransportLog(Path(folder))
            # UCX reads its variables when it is loaded, which is with vLLM.
            log.prepare(os.environ)
            core_refusal.prepare(Path(folder))
            from sluice_engine.lifecycle import run  # noqa: PLC0415 - imports vLLM, after the signals and the version

            status = run(settings, stop, log)
    except EngineError as error:
        reason = " ".join(str(error).split())
        print(f"sluice_engine: {reason}", file=sys.stderr)
        write_termination_log(reason)
        refused.keep(error, model)
        status = error.exit_status
    leave(status)


if __name__ == "__main__":
    main()
