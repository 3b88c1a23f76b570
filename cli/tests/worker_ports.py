"""Ports for tests: each worker of a run has its own, since gRPC servers of two workers could share one unnoticed."""

from __future__ import annotations

import os

_PORTS_PER_WORKER = 500
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

# The kernel gives out ports from 32768 on.
FIRST_PORT = 20000 + _PORTS_PER_WORKER * (_WORKER % 25)
# For clusters: those that they choose, and those that manifests and options name.
CLUSTER_PORTS = range(FIRST_PORT, FIRST_PORT + 400)
NAMED_PORTS = range(FIRST_PORT + 400, FIRST_PORT + 500)
