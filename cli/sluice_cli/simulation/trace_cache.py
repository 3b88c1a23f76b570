"""Loads traces from files, plain or gzipped, once per process; ``sluice_core.sim.traces`` reads their formats."""

from __future__ import annotations

import gzip
from functools import lru_cache
from typing import TYPE_CHECKING

from sluice_core.sim.traces import TraceError, TraceRow, parse_trace

if TYPE_CHECKING:
    from pathlib import Path


def read_trace(path: Path, *, skips_unanswered: bool = False, reads_hashes: bool = False) -> list[TraceRow]:
    """Reads a trace, gzipped if its name ends so.

    Args:
        path: The file.
        skips_unanswered: Leave out requests whose answer has no tokens.
        reads_hashes: Every row needs hashes of its prompt.

    Raises:
        TraceError: Names the file and the line.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return parse_trace(text.decode().splitlines(), skips_unanswered=skips_unanswered, reads_hashes=reads_hashes)
    except TraceError as error:
        raise TraceError(f"{path}, {error}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


@lru_cache(maxsize=8)
def load_rows(trace: Path, *, reads_hashes: bool = False) -> list[TraceRow]:
    """Reads a trace once per process."""
    return read_trace(trace, reads_hashes=reads_hashes)
