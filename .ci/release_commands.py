"""Runs the programs that make and publish a release."""

from __future__ import annotations

import shlex
import subprocess


class ReleaseError(Exception):
    """A file of the release cannot be made, or is not what it should be."""


def run(*command: str) -> str:
    """Runs a program and returns what it prints.

    Raises:
        ReleaseError: It failed, or is not installed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ReleaseError(f"{command[0]} is not installed; install it, or name it with --helm") from error
    if done.returncode != 0:
        raise ReleaseError(f"{shlex.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
