"""How long a router holds a request that no engine takes. Simulations that plan for a router refuse it then too."""

from __future__ import annotations

from typing import Final

ROUTER_WAIT_LIMIT_S: Final = 30.0
