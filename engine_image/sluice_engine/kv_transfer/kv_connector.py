"""What Sluice's scheduler asks of its KV connector: the NIXL connector and the emulated one both answer it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Longest time that handed-off blocks wait for a reader, in seconds. Nothing extends it, so that a reader that is gone
# cannot keep another engine's blocks.
LEASE_S = 30


class KvConnector(Protocol):
    """The scheduler's half of a KV connector, beyond vLLM's own interface."""

    def start_pull(self, request: Request, transfer_params: str) -> None:
        """Makes an arriving request pull its KV from the source.

        Raises:
            MalformedHandleError: The request must recompute.
        """

    def cancel_pull(self, request: Request) -> None:
        """Makes a request whose pull has not started recompute, and notifies the source."""

    def announce_hand_off(self, request_id: str) -> None:
        """Announces that a running request ends with a hand-off at the next iteration boundary."""

    def retract_hand_off(self, request_id: str) -> None:
        """Takes the announcement back."""

    def hand_off(self, request: Request) -> None:
        """Marks a request that ends now: its blocks wait for a reader."""

    def release(self, request_id: str) -> None:
        """Ends the lease of a handed-off request."""
