"""How long an engine goes on with requests whose router's stream was lost; ``server.session_table`` ends them then."""

from __future__ import annotations

# Of requests that their own router alone can resume.
LEASE_S = 10.0
# Of those that their clients can resume at any router; their ends are kept for as long. A cluster's engines get it from
# its manifest: this is the same default (operator, engine_timeouts_spec.py), for engines that are started by hand.
RESUME_TIMEOUT_S = 30.0
