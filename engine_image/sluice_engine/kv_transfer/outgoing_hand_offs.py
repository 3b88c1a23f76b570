"""Requests on their way out: those that will end with a hand-off, and those whose KV waits for a reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from sluice_engine.core_messages import HandOffAnswer

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sluice_engine.kv_transfer.interface import KvConnector


class OutgoingHandOffs:
    """Hand-offs of one engine.

    Args:
        connector: The scheduler's connector.
        max_model_len: Longest prompt + output, in tokens.
    """

    def __init__(self, connector: KvConnector, max_model_len: int) -> None:
        self._connector = connector
        self._max_model_len = max_model_len
        self._max_tokens_of: dict[str, int] = {}
        self._first_parts: set[str] = set()
        self._num_blocks_of: dict[str, int] = {}
        self._released: set[str] = set()
        self.num_pinned_blocks = 0
        self.num_moved_out = 0

    def request(self, request_id: str, request: Request | None, num_output_tokens: int = 0) -> HandOffAnswer:
        """Makes a running decode end with a hand-off, unless there is a reason against it.

        Args:
            request_id: The request that is asked for.
            request: vLLM's record of it; None when the engine has none.
            num_output_tokens: See ``begin``.
        """
        reason = find_refusal(request)
        if request is not None and not reason:
            self.begin(request, num_output_tokens)
        return HandOffAnswer(request_id=request_id, is_accepted=not reason, reason=reason)

    def begin(self, request: Request, num_output_tokens: int = 0) -> None:
        """Makes a running decode end with a hand-off; a second call changes nothing.

        Args:
            request: vLLM's record of it.
            num_output_tokens: Output tokens of the whole request with which it ends here, if there are fewer so far.
        """
        if request.request_id in self._max_tokens_of:
            return
        # vLLM ends the request by its own length rule at the next iteration boundary, in asynchronous scheduling too
        # and without a wasted token, and reports the connector's parameters with its last output.
        self._max_tokens_of[request.request_id] = request.max_tokens
        self._connector.announce_hand_off(request.request_id)
        soonest = request.num_output_tokens + max(1, request.num_output_placeholders)
        request.max_tokens = min(request.max_tokens, max(soonest, num_output_tokens))

    def begin_first_part(self, request: Request) -> None:
        """Makes the first part of a prompt end with a hand-off: with the token behind it, which is void.

        Args:
            request: vLLM's record of it, whose prompt is that part; no queue holds it yet.
        """
        self._first_parts.add(request.request_id)
        self._max_tokens_of[request.request_id] = request.max_tokens + 1  # so that it never ends by its own limit
        self._connector.announce_hand_off(request.request_id)

    def cancel(self, request: Request) -> bool:
        """Lets a request go on here; the first part of a prompt still ends with its hand-off.

        Returns:
            True if it was to hand off and is not any more.
        """
        return request.request_id not in self._first_parts and self._cancel(request)

    def _cancel(self, request: Request) -> bool:
        max_tokens = self._max_tokens_of.pop(request.request_id, None)
        if max_tokens is None:
            return False
        request.max_tokens = max_tokens
        self._connector.retract_hand_off(request.request_id)
        return True

    def settle(self, request: Request) -> None:
        """Decides, when a request has ended and before its blocks are freed, whether it was handed off."""
        max_tokens = self._max_tokens_of.get(request.request_id)
        if max_tokens is None:
            return
        self._first_parts.discard(request.request_id)
        is_done = (
            request.status != RequestStatus.FINISHED_LENGTH_CAPPED
            or request.num_output_tokens >= max_tokens
            or request.num_tokens >= self._max_model_len
        )
        if is_done:
            self._cancel(request)
        else:
            del self._max_tokens_of[request.request_id]
            self._connector.hand_off(request)
            self.num_moved_out += 1

    def pin(self, request_id: str, num_blocks: int) -> None:
        """Counts the blocks of a handed-off request."""
        self._num_blocks_of[request_id] = num_blocks
        self.num_pinned_blocks += num_blocks

    def unpin(self, request_id: str) -> None:
        """Stops counting them: they are free."""
        self.num_pinned_blocks -= self._num_blocks_of.pop(request_id, 0)

    def is_pinned(self, request_id: str) -> bool:
        """True while blocks wait for a reader."""
        return request_id in self._num_blocks_of

    def release(self, request_id: str) -> None:
        """Ends a lease; the caller frees the blocks."""
        self._connector.release(request_id)
        self._released.add(request_id)

    def drop_released(self, finished: set[str] | None) -> set[str] | None:
        """Leaves out what the worker reports of leases that were ended before it noticed."""
        if not finished or not self._released:
            return finished
        known = finished & self._released
        self._released -= known
        return finished - known


def find_refusal(request: Request | None) -> str:
    """Why a request cannot be handed off: ``unknown``, ``preempted``, ``waiting``, ``prefill``; empty when it can."""
    reason = find_halt(request)
    if reason:
        return reason
    assert request is not None, "it would be unknown"
    # Before its first token there is nothing that another engine could decode on from.
    return "prefill" if request.is_prefill_chunk or not request.num_output_tokens else ""


def find_halt(request: Request | None) -> str:
    """Why a request does not run: ``unknown``, ``preempted``, ``waiting``; empty when it does."""
    if request is None or request.is_finished():
        return "unknown"
    if request.status == RequestStatus.PREEMPTED:
        return "preempted"
    return "" if request.status == RequestStatus.RUNNING else "waiting"
