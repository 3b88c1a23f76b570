"""How long an engine stays that is not needed, where the manifest gives no stabilization window for scaling down."""

from __future__ import annotations

# In seconds.
LEAST_KEEP_S, MOST_KEEP_S = 90.0, 300.0


def choose_down_window_s(start_s: float) -> float:
    """Chooses how long it stays: as long as a start takes, since it has then cost what a new start would cost."""
    return min(max(start_s, LEAST_KEEP_S), MOST_KEEP_S)
