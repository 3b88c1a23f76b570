"""Ports of the engines under test. Each worker of a run has a range of its own."""

from __future__ import annotations

import itertools
import os

# Two workers stay below 23000, where those of whole clusters begin, which run at the same time.
_PORTS_PER_WORKER = 1000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

PORTS = itertools.count(21000 + _PORTS_PER_WORKER * _WORKER)
