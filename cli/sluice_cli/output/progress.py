"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def show_progress(description: str) -> Iterator[Callable[[float, str], None]]:
    """Shows a bar; yields what takes the share done (0 to 1) and what is being done.

    Args:
        description: What is being done first.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=1.0)

        def report(share: float, what: str) -> None:
            progress.update(task, completed=share, description=what)

        yield report
