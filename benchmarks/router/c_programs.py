"""Compiles the C programs of the benchmark, once per source."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
REPOSITORY = SOURCES.parent.parent
BUILD = REPOSITORY / "build" / "benchmarks"
FLAGS = ("-O2", "-std=gnu17", "-Wall", "-Wextra", "-Werror")


def build(name: str) -> Path:
    """Compiles ``<name>.c``, unless it is compiled already.

    Args:
        name: ``load`` or ``http_stub``.

    Returns:
        The program, under ``build/``.

    Raises:
        RuntimeError: There is no compiler, or it refuses the source; the message has its output.
    """
    source = SOURCES / f"{name}.c"
    content = b"".join(path.read_bytes() for path in (source, *sorted(SOURCES.glob("*.h")))) + " ".join(FLAGS).encode()
    program = BUILD / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    if program.is_file():
        return program
    BUILD.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_suffix(".new")
    try:
        subprocess.run(
            ["cc", *FLAGS, "-o", unfinished, source, "-lm", "-ldl"],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except FileNotFoundError as error:
        raise RuntimeError("the benchmark needs a C compiler named cc") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"cc refuses {source.name}:\n{error.stderr}") from error
    unfinished.rename(program)
    return program
