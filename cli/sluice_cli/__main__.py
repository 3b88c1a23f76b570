"""``python -m sluice_cli`` is the ``sluice`` command."""

from __future__ import annotations

from sluice_cli.main import main

main()
