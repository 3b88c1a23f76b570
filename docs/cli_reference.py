"""Writes docs/reference/cli.md from the commands of ``sluice``, and checks that it is up to date.

python docs/cli_reference.py write
python docs/cli_reference.py check
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluice_cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "cli.md"

HEAD = """\
# Command line

<!-- Written by docs/cli_reference.py from the commands themselves; run `make reference` after an edit of those. -->

`sluice COMMAND --help` shows the same. `make up` installs `sluice` as `.venv/bin/sluice`.
"""


def write_reference() -> str:
    """Writes the page's text."""
    root = click.Context(cli, info_name="sluice")
    return "\n".join([HEAD, *(_write_command(command, context) for command, context in _find_commands(cli, root))])


def _find_commands(group: click.Group, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command that does something, those of groups among them."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _find_commands(command, inner)
        elif not command.hidden:
            yield command, inner


def _write_command(command: click.Command, context: click.Context) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    help_text = inspect.cleandoc(command.help or "")
    lines = [f"## {context.command_path}", "", help_text, "", f"    {usage}", ""]
    rows = [_write_option(option, context) for option in command.params if isinstance(option, click.Option)]
    return "\n".join([*lines, "| option | what it does |", "|---|---|", *rows, ""])


def _write_option(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None, option.name
    names, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
    variable = f" [environment: {option.envvar}]" if isinstance(option.envvar, str) else ""
    return f"| `{names}` | {text}{variable} |"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Writes or checks docs/reference/cli.md.")
    parser.add_argument("what", choices=["check", "write"])
    what = parser.parse_args().what
    text = write_reference()
    if what == "write":
        PAGE.write_text(text)
        print(f"wrote {PAGE.relative_to(ROOT)}")
    elif not PAGE.is_file() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what the commands say; run `make reference`")
    else:
        print(f"{PAGE.relative_to(ROOT)} is what the commands say")


if __name__ == "__main__":
    main()
