"""Whether the router is ready, for probes and the control plane, and why not."""

from __future__ import annotations

from sluice_router.scheduling.state import RouterState


def why_not_ready(state: RouterState) -> str:
    """Says why the router is not ready; empty when it is."""
    if not state.status.is_accepting:
        return "shutting down"
    if state.status.edge_fault:
        return state.status.edge_fault
    if state.active.plan is None:
        return "no plan yet"
    if len(state.engines.table) == 0 and not state.active.is_holding:
        return "no engine has acknowledged the plan yet"
    return ""
