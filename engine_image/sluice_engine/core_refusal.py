"""Why an EngineCore refuses its model, told to the serving process: from vLLM it hears only that its core has ended."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_engine.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Processes that vLLM starts inherit it, whether they are forked or spawned.
VARIABLE = "SLUICE_CORE_REFUSAL"


def prepare(folder: Path) -> None:
    """Names the file that EngineCores of this process write to; before vLLM starts one."""
    os.environ[VARIABLE] = str(folder / "core-refusal")


def is_prepared() -> bool:
    """Whether this process belongs to one of our engines; stock engines have the plugin too."""
    return VARIABLE in os.environ


@contextmanager
def reported() -> Iterator[None]:
    """Tells the serving process of an error within, which another try would meet again."""
    try:
        yield
    except (EngineError, ValueError, NotImplementedError) as error:
        if is_prepared():
            Path(os.environ[VARIABLE]).write_text(str(error))
        raise


def read() -> str:
    """Reads why the EngineCore refused its model; empty: it ended for another reason."""
    try:
        return Path(os.environ[VARIABLE]).read_text()
    except (KeyError, OSError):
        return ""
