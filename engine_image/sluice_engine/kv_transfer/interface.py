"""The interface of a KV connector to Sluice's scheduler; the NIXL connector and the emulated one implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.v1.request import Request


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
        """Ends the lease of a handed-off request, or of an offer."""

    def offer(self, offer_id: str, block_ids: list[int]) -> dict[str, Any]:
        """Lets a reader ask for the blocks of an offer; ``release`` ends that.

        Args:
            offer_id: Name of the offer.
            block_ids: The blocks; the caller has pinned them.

        Returns:
            Where they lie.
        """

    def read_offer(self, transfer_params: str) -> dict[str, Any]:
        """Checks the handle of an offer.

        Raises:
            MalformedHandleError: It must not be read.
        """

    def pull_part(self, read_id: str, params: dict[str, Any], block_ids: list[int]) -> None:
        """Starts a read; the worker reports its end as that of a pull.

        Args:
            read_id: The name under which it does.
            params: Of ``read_offer``; its blocks are those to read, as many as ``block_ids``.
            block_ids: Blocks of this engine; none: the source is only told that nobody reads.
        """
