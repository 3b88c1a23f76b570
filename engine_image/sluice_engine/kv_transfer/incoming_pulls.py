"""Requests that arrive with KV on another engine: their pull starts, arrives, fails, or is cancelled when it is late.

A request whose pull does not succeed recomputes its prompt and output here, so that no request depends on its source.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sluice_core.kv_copy_rules import count_tail_tokens
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_engine.core_messages import NUM_TOKENS_KEY, PulledPart
from sluice_engine.kv_transfer.kv_handles import MalformedHandleError
from sluice_engine.kv_transfer.kv_transfer_timeouts import PULL_START_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sluice_engine.kv_transfer.interface import KvConnector
    from sluice_engine.request_tracker import RequestTracker, TrackedRequest

logger = logging.getLogger(__name__)

# Weight of the newest transfer in the measured rate.
_RATE_WEIGHT = 0.2


class IncomingPulls:
    """The pulls of one engine.

    Args:
        connector: The scheduler's KV connector.
        tracker: The engine's requests.
        note_pulled: Tells a router what has become of the first part of a prompt.
        block_size_tokens: Tokens per KV block.

    Attributes:
        num_moved_in: Requests that arrived with KV, since the start.
        num_recomputed: Pulls that failed, came too late or were malformed, since the start.
        bytes_per_s: Measured rate of pulls, newer ones weighing more; 0: none yet.
    """

    def __init__(
        self,
        connector: KvConnector,
        tracker: RequestTracker,
        note_pulled: Callable[[PulledPart], None],
        block_size_tokens: int,
    ) -> None:
        self._connector = connector
        self._tracker = tracker
        self._note_pulled = note_pulled
        self._block_size_tokens = block_size_tokens
        self.num_moved_in = 0
        self.num_recomputed = 0
        self.bytes_per_s = 0.0

    def classify(self, tracked: TrackedRequest, now_s: float, num_copied_tokens: int = 0) -> RequestKind:
        """Starts the pull of an arriving request that has KV elsewhere.

        Args:
            tracked: The request; no queue of vLLM's holds it.
            now_s: Monotonic time.
            num_copied_tokens: Tokens from its first one on whose KV has come in parts.

        Returns:
            Its class.
        """
        request, extras = tracked.request, tracked.extras
        # What a router sends there is never trusted: only a checked handle reaches vLLM's connector.
        request.kv_transfer_params = None
        if not extras.transfer_params:
            is_started = extras.is_recovery or extras.output_token_ids
            return RequestKind.RECOVERY if is_started else RequestKind.NEW_PROMPT
        try:
            self._connector.start_pull(request, extras.transfer_params)
        except MalformedHandleError as error:
            logger.warning("request %s recomputes: %s", request.request_id, error)
            self.num_recomputed += 1
            self._note_end(tracked, "handle")
            return RequestKind.RECOMPUTE
        num_tokens = request.kv_transfer_params[NUM_TOKENS_KEY]
        if request.num_tokens - num_tokens > 1:
            tracked.num_brought_tokens = num_tokens
            missing = num_tokens - num_copied_tokens
            if missing <= 0 or count_tail_tokens(missing, num_copied_tokens, self._block_size_tokens):
                request.kv_transfer_params = None
                self.num_moved_in += 1
                self._note_end(tracked)
                return RequestKind.STARTED_PREFILL
        tracked.pull_deadline_s = now_s + PULL_START_S
        return RequestKind.JOINING

    def find_late(self, now_s: float) -> Iterator[TrackedRequest]:
        """Requests whose pull has not started in time; each may be cancelled while the others are read."""
        for tracked in self._tracker.of_kind(RequestKind.JOINING):
            # The connector takes the mark away when the request gets its blocks and the transfer begins.
            has_started = not (tracked.request.kv_transfer_params or {}).get("do_remote_prefill")
            if not has_started and now_s >= tracked.pull_deadline_s:
                yield tracked

    def cancel(self, tracked: TrackedRequest) -> None:
        """Makes a late request recompute; no heap of vLLM's may hold it."""
        self._connector.cancel_pull(tracked.request)
        self._recompute(tracked)
        self._tracker.place(tracked)

    def finish(self, tracked: TrackedRequest, *, has_failed: bool) -> None:
        """Notes the end of a pull."""
        if has_failed:
            self._recompute(tracked)
            return
        self.num_moved_in += 1
        if tracked.num_brought_tokens:
            # The rest of its prompt is computed as that of any other.
            self._tracker.change_kind(tracked, RequestKind.STARTED_PREFILL)
            self._note_end(tracked)
        else:
            tracked.is_moved_in = True

    def _note_end(self, tracked: TrackedRequest, reason: str = "") -> None:
        """Tells the router that a prompt needs the KV of its first part elsewhere no more."""
        if tracked.extras.grant_key and not tracked.extras.output_token_ids:
            key, num_tokens = tracked.extras.grant_key, tracked.num_brought_tokens
            self._note_pulled(PulledPart(key=key, num_tokens=num_tokens, reason=reason))

    def _recompute(self, tracked: TrackedRequest) -> None:
        self.num_recomputed += 1
        if tracked.num_brought_tokens:
            self._note_end(tracked, "failed")
            tracked.num_brought_tokens = 0
        self._tracker.change_kind(tracked, RequestKind.RECOMPUTE)

    def observe_rate(self, statistics: Any) -> None:
        """Brings the measured rate up to date.

        Args:
            statistics: ``KVConnectorStats`` of the worker, or None; lists ``bytes_transferred`` and
                ``transfer_duration`` (seconds) of the transfers that ended.
        """
        data = getattr(statistics, "data", None) or {}
        num_bytes, duration_s = sum(data.get("bytes_transferred", ())), sum(data.get("transfer_duration", ()))
        if not num_bytes or duration_s <= 0:
            return
        rate = num_bytes / duration_s
        self.bytes_per_s = rate if not self.bytes_per_s else self.bytes_per_s + _RATE_WEIGHT * (rate - self.bytes_per_s)
