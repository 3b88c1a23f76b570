"""Ports of the engines under test. Each worker of a run has a range of its own."""

from __future__ import annotations

import itertools
import os

_PORTS_PER_WORKER = 1500
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

PORTS = itertools.count(21000 + _PORTS_PER_WORKER * _WORKER)
