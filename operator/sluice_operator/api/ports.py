"""Ports of engine pods and router pods.

The CRD refuses the engines' in ``network.kvPort`` and ``network.tcpPortRange``.
"""

from __future__ import annotations

HTTP_PORT = 8000
GRPC_PORT = 8001
CONTROL_PORT = 8002
ENGINE_PORT = 8010
METRICS_PORT = 9090
# Of a router pod: so many ports are free for control.
MAX_WORKERS = ENGINE_PORT - CONTROL_PORT
