"""Ports for tests: each worker of a run has its own, since gRPC servers of two workers could share one unnoticed."""

from __future__ import annotations

import os

_PORTS_PER_WORKER = 500
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

# Below those of engines under test (21000 on), so that both can run at the same time.
FIRST_PORT = 12000 + _PORTS_PER_WORKER * (_WORKER % 16)
# For clusters: those that they choose, and those that manifests and options name.
CLUSTER_PORTS = range(FIRST_PORT, FIRST_PORT + 400)
NAMED_PORTS = range(FIRST_PORT + 400, FIRST_PORT + 500)
