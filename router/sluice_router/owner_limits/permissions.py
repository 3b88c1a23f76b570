"""Which classes and priorities the owner of an API key may use."""

from __future__ import annotations

from collections.abc import Iterable

from sluice_core.records import OwnerLimits, SloClass
from sluice_router.errors import NotAllowedError


def check_class(
    owner: str, limits: OwnerLimits | None, slo_classes: Iterable[SloClass], name: str, priority: int | None
) -> None:
    """Checks a request's class and priority.

    Args:
        owner: Of the API key.
        limits: The owner's; None: it has none.
        slo_classes: Those of the plan.
        name: The request's class; the default one has the empty name.
        priority: The request's own; None: its class's.

    Raises:
        NotAllowedError: The class is not open to the owner, or the priority is above that of each class that is.
    """
    if limits is None or not limits.classes:
        return
    if name not in limits.classes:
        known = ", ".join(repr(open_name) for open_name in sorted(limits.classes))
        message = f"slo_class {name!r} is not open to {owner}; open are {known}"
        raise NotAllowedError(message, param="slo_class", code="class_not_allowed")
    highest = max(item.priority for item in slo_classes if item.name in limits.classes)
    if priority is not None and priority > highest:
        message = f"priority is {priority}, at most {highest} is open to {owner}"
        raise NotAllowedError(message, param="priority", code="priority_not_allowed")
