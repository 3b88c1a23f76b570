"""Gives each prefill its chunk of the prefill budget that the batch policy leaves in an iteration of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.scheduling.engine_policy import EngineBatch, RequestKind

if TYPE_CHECKING:
    from sluice_core.scheduling.engine_policy import BatchLimits
    from sluice_engine.core_messages import ConfigureCommand
    from sluice_engine.request_tracker import RequestTracker
    from sluice_engine.scheduling.kv_usage import KvUsage


class PrefillChunks:
    """The prefill budget of one engine, and who gets how much of it.

    Args:
        tracker: The engine's requests.
        manager: vLLM's KV cache manager.
        kv_usage: The engine's KV blocks.
        max_batch_tokens: Largest chunk size.
        block_size_tokens: Tokens per KV block.
        now_s: Monotonic time.

    Attributes:
        batch: What the batch policy was asked about last.
        withholds_decodes: Decodes get no token in this iteration: what ``hides`` says of each of them.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        manager: Any,
        kv_usage: KvUsage,
        *,
        max_batch_tokens: int,
        block_size_tokens: int,
        now_s: float,
    ) -> None:
        self._tracker = tracker
        self._manager = manager
        self._kv_usage = kv_usage
        self._max_batch_tokens = max_batch_tokens
        self._block_size_tokens = block_size_tokens
        self._last_prefill_s = now_s
        self.batch: EngineBatch
        self.withholds_decodes = False
        self._limits: BatchLimits
        self._remaining_tokens = 0
        self._is_saturated = False
        self._stall: tuple[int, ...] | None = None  # what there was when prefills found no seat or blocks

    def renew(
        self,
        plan: ConfigureCommand,
        last_chunk_size_tokens: int,
        now_s: float,
        *,
        num_under_way: int = 0,
        under_way_s: float = 0.0,
    ) -> BatchLimits:
        """Asks the batch policy for the limits of the next iteration.

        Args:
            plan: Plan in force.
            last_chunk_size_tokens: Last chunk size that was not 0.
            now_s: Monotonic time.
            num_under_way: See ``EngineBatch``.
            under_way_s: See there.
        """
        count = self._tracker.count
        if not self._tracker.num_queued:
            self._last_prefill_s = now_s
        self.batch = EngineBatch(
            chunk_size_tokens=plan.chunk_size_tokens,
            last_chunk_size_tokens=last_chunk_size_tokens,
            max_batch_tokens=self._max_batch_tokens,
            block_size_tokens=self._block_size_tokens,
            num_decodes=count(RequestKind.DECODE) - self._tracker.ending.count(),
            decode_context_tokens=max(0, self._tracker.decode_context_tokens),
            num_joining=count(RequestKind.JOINING),
            num_recomputing=count(RequestKind.RECOMPUTE) + count(RequestKind.RECOVERY),
            num_started_prefills=count(RequestKind.STARTED_PREFILL),
            num_new_prompts=count(RequestKind.NEW_PROMPT),
            num_under_way=num_under_way,
            under_way_s=under_way_s,
            last_prefill_s=self._last_prefill_s,
            is_draining=plan.is_draining,
            is_stalled=self._is_stalled(),
        )
        self._limits = self._tracker.policy.limits(now_s, self.batch)
        self.withholds_decodes = self._limits.withholds_decodes
        self._remaining_tokens = self._limits.prefill_budget_tokens
        self._is_saturated = False
        return self._limits

    def hides(self, kind: RequestKind) -> bool:
        """Says whether requests of a class stay out of this iteration."""
        return self._limits.hides(kind)

    def take(self, kind: RequestKind, num_tokens: int, num_left: int, waiting: Any, *, context_tokens: int = 0) -> int:
        """Gives a prefill its chunk; see ``fit``."""
        taken = self.fit(kind, num_tokens, num_left, waiting, context_tokens=context_tokens)
        self._remaining_tokens -= self._limits.count_room(taken, context_tokens)
        return taken

    def fit(self, kind: RequestKind, num_tokens: int, num_left: int, waiting: Any, *, context_tokens: int = 0) -> int:
        """Says how large a prefill's chunk would be now.

        Args:
            kind: Class of the request, no decode and not joining.
            num_tokens: Tokens that it could use.
            num_left: Tokens that it has left to compute.
            waiting: vLLM's queue of waiting requests.
            context_tokens: Tokens of it that are computed.

        Returns:
            Tokens of the chunk; 0: none in this iteration.
        """
        limits = self._limits
        if limits.hides(kind):
            return 0
        if self._is_saturated or not limits.has_place_for(num_left, self._remaining_tokens):
            self._is_saturated = True  # whoever is behind must not go first
            return 0
        room = self._remaining_tokens
        if kind in (RequestKind.STARTED_PREFILL, RequestKind.NEW_PROMPT):
            # vLLM serves running prefills before it looks at waiting requests, whereas recompute goes first here.
            room -= self._count_recompute_ahead(waiting)
        room = limits.fit_chunk(room, context_tokens, self._block_size_tokens)
        return max(0, min(num_tokens, room, limits.max_tokens_per_prefill))

    def note_prefill(self, now_s: float) -> None:
        """Notes that an iteration computes prefill tokens."""
        self._last_prefill_s = now_s

    def note_scheduled(self, num_tokens: int) -> None:
        """Notes what vLLM scheduled: with nothing in a phase of prefills, decodes go on from the next iteration on.

        Args:
            num_tokens: Tokens of the iteration.
        """
        if not num_tokens and self._limits.withholds_decodes and self._tracker.count(RequestKind.DECODE):
            self._stall = self._describe_room()

    def _is_stalled(self) -> bool:
        """Says whether prefills would find as little room as when they last found too little."""
        if self._stall is None:
            return False
        now = self._describe_room()
        if now[:-1] != self._stall[:-1] or now[-1] > self._stall[-1]:
            self._stall = None
        return self._stall is not None

    def _describe_room(self) -> tuple[int, ...]:
        """Counts requests by class, and the blocks that are left."""
        count = self._tracker.count
        return (*(count(kind) for kind in RequestKind), self._kv_usage.measure().available)

    def _count_recompute_ahead(self, waiting: Any) -> int:
        """Room that the next waiting recompute will use; 0 when none waits or its blocks are not free."""
        request = self._tracker.peek_recomputed(waiting)
        if request is None:
            return 0
        if blocks_for_tokens(request.num_tokens, self._block_size_tokens) > self._kv_usage.measure().available:
            return 0
        _, num_cached_tokens, _ = self._manager.get_computed_blocks(request)
        return int(request.num_tokens - num_cached_tokens)
