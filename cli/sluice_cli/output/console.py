"""The terminal, or the file that output goes to."""

from __future__ import annotations

from rich.console import Console

# Wide enough for the table when output goes to a file, where there is no terminal to ask.
PLAIN_WIDTH = 160


def make_console() -> Console:
    """Makes the console of standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
