"""Errors that the user can set right: ``sluice`` prints their message and exits with status 1.

CommandError
    AlreadyRunningError    the cluster already has a launcher
    NoClusterError         no running cluster, or several, where one is needed
    PortError              a port cannot be used
    UnknownRequestError    no router knows the request
    DemoError              a step of the demo did not happen
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator


class CommandError(Exception):
    """Something the user can set right; the message says how."""


@contextmanager
def as_command_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of other packages that report wrong input into a ``CommandError``.

    Args:
        kinds: The errors.

    Raises:
        CommandError: One of them was raised.
    """
    try:
        yield
    except kinds as error:
        raise CommandError(str(error)) from error


@contextmanager
def as_click_error() -> Iterator[None]:
    """Turns a ``CommandError``, in groups of task groups too, into what click prints before it exits with status 1.

    Raises:
        click.ClickException: The command failed in a way that the user can set right.
    """
    try:
        yield
    except* CommandError as group:
        raise click.ClickException(str(_find_first(group))) from group


def _find_first(error: BaseException) -> BaseException:
    """The first cause in a group of groups: task groups nest."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
