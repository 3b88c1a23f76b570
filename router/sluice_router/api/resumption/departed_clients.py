"""A client goes before its answer ends: the request goes on where the client can come back, and ends elsewhere.

For how long it goes on, ``scheduling.resumption.detachment`` says.
"""

from __future__ import annotations

from typing import Protocol

from sluice_core.records import RequestId
from sluice_router.scheduling.requests import DataPlane


class DetachableStream(Protocol):
    """A response stream whose client may come back."""

    def detach(self) -> None:
        """Keeps nothing from here on."""
        ...


def leave(
    plane: DataPlane,
    request_id: RequestId,
    response_stream: DetachableStream,
    *,
    can_come_back: bool,
    reason: str = "client_gone",
) -> None:
    """Handles the going of a client.

    Args:
        plane: The data plane.
        request_id: The router's id of the request, which has not ended.
        response_stream: Its stream.
        can_come_back: Whether the client has the capability for that; it has from the answer's first bytes on.
        reason: Why it goes, as for ``DataPlane.cancel``.
    """
    if can_come_back:
        response_stream.detach()
        plane.detach(request_id)
    else:
        plane.cancel(request_id, reason)
