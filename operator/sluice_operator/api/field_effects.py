"""What a change of each manifest field does to a running cluster, and the one walker over fields and their effects."""

from __future__ import annotations

from enum import StrEnum


class FieldEffect(StrEnum):
    """What a change of a field does to a running cluster; each field carries one, or inherits it."""

    LIVE = "live"
    RESTARTS_ENGINES = "restarts engines"
    RESTARTS_ROUTERS = "restarts routers"
    RESTARTS_ALL = "restarts engines and routers"
