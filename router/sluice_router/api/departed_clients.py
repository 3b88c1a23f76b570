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
    plane: DataPlane, request_id: RequestId, resumable: DetachableStream | None = None, *, reason: str = "client_gone"
) -> None:
    """Handles the going of a client.

    Args:
        plane: The data plane.
        request_id: The router's id of the request, which has not ended.
        resumable: The stream that the client can come back to, as it has the capability for that from the answer's
            first bytes on; None: it cannot come back.
        reason: Why it goes, as for ``DataPlane.cancel``.
    """
    if resumable is None:
        plane.cancel(request_id, reason)
    else:
        resumable.detach()
        plane.detach(request_id)
