"""What engines have been committed to, and when they will be done with it: virtual batches.

Source: DynaServe, section 4.1, "Execution predictor within global scheduler". Each engine has a virtual batch. It
advances by passes as long as the real ones take: every decode in it gains a token per pass, at most as many at a time
as the engine has seats, and prompt tokens fill the room. Parts that wait for another engine's part wait here too. What
the engine reports corrects it. A new request adds its own tokens only; nothing that was committed is looked at again,
so a probe is O(1), and what has passed costs O(log n) per part once.
"""

from __future__ import annotations

import heapq
from typing import Final

from sluice_core.records import EngineId, IterationShape, RequestId
from sluice_core.scheduling.engine_state import EngineState
from sluice_core.scheduling.splitting.split_search import ServerClock

# The table of iteration times goes in steps of 8 tokens: a single token may cost nothing, or the whole step.
_STEP: Final = 8
_CONTEXT_STEP: Final = 1024


class _Part:
    """A part of a request that is committed to an engine."""

    __slots__ = ("decode_tokens", "end_pass", "has_left", "is_active", "prefill_s", "starts_at_s")

    def __init__(self, starts_at_s: float, prefill_s: float, decode_tokens: int) -> None:
        self.starts_at_s = starts_at_s
        self.prefill_s = prefill_s
        self.decode_tokens = decode_tokens
        self.end_pass = 0.0
        self.is_active = False
        self.has_left = False


class VirtualBatch:
    """The virtual batch of one engine; mutable.

    Args:
        most_decodes: Most decodes at a time.

    Attributes:
        num_active: Decodes that gain a token per pass.
        num_pending: Parts that have not begun.
        pending_prefill_s: Prefill work of those that no engine reports yet.
    """

    def __init__(self, most_decodes: int) -> None:
        self._most_decodes = most_decodes
        self._pending: list[tuple[float, int, _Part]] = []  # a heap by when they begin
        self._active: list[tuple[float, int, _Part]] = []  # a heap by the pass at which they end
        self._passes = 0.0
        self._sum_of_ends = 0.0
        self._pending_tokens = 0
        self._last_s = 0.0
        self._num_added = 0
        self.num_active = 0
        self.num_pending = 0
        self.pending_prefill_s = 0.0

    @property
    def left_tokens(self) -> float:
        """Decode tokens that active parts have left."""
        return max(0.0, self._sum_of_ends - self.num_active * self._passes)

    @property
    def pending_tokens(self) -> int:
        """Decode tokens of the parts that have not begun."""
        return self._pending_tokens

    def add(self, part: _Part) -> None:
        """Commit a part."""
        self._num_added += 1
        self.num_pending += 1
        self._pending_tokens += part.decode_tokens
        self.pending_prefill_s += part.prefill_s
        heapq.heappush(self._pending, (part.starts_at_s, self._num_added, part))

    def remove(self, part: _Part) -> None:
        """Forget a part."""
        if part.has_left:
            return
        part.has_left = True
        if part.is_active:
            self.num_active -= 1
            self._sum_of_ends -= part.end_pass
        else:
            self.num_pending -= 1
            self._pending_tokens -= part.decode_tokens
            self.pending_prefill_s -= part.prefill_s

    def advance(self, now: float, pass_s: float) -> None:
        """Let the passes go by that end until ``now``.

        Args:
            now: Seconds on the caller's clock.
            pass_s: How long a pass takes.
        """
        if now > self._last_s and pass_s > 0.0:
            self._passes += (now - self._last_s) / pass_s
        self._last_s = max(now, self._last_s)
        while self._active and (self._active[0][2].has_left or self._active[0][0] <= self._passes):
            self.remove(heapq.heappop(self._active)[2])
        while self._pending and (
            self._pending[0][2].has_left or (self._pending[0][0] <= now and self.num_active < self._most_decodes)
        ):
            part = heapq.heappop(self._pending)[2]
            if part.has_left:
                continue
            self.remove(part)
            if part.decode_tokens:
                part.has_left, part.is_active = False, True
                part.end_pass = self._passes + part.decode_tokens
                self.num_active += 1
                self._sum_of_ends += part.end_pass
                heapq.heappush(self._active, (part.end_pass, self._num_added, part))
                self._num_added += 1
        if not self.num_active:
            self._sum_of_ends = 0.0  # no drift
        if not self.num_pending:
            self.pending_prefill_s = 0.0


class ExecutionPredictor:
    """The virtual batches of all engines, of one router; mutable.

    Args:
        margin_tokens: Tokens that a decode has left at least that is there and that nothing is known of.
    """

    def __init__(self, margin_tokens: int) -> None:
        self._margin_tokens = margin_tokens
        self._batches: dict[EngineId, VirtualBatch] = {}
        self._parts: dict[RequestId, list[tuple[VirtualBatch, _Part]]] = {}

    def read_clock(self, now: float, state: EngineState) -> ServerClock:
        """Bring an engine's virtual batch up to date, and say when it is done with what is committed.

        Args:
            now: Seconds on the caller's clock.
            state: The engine as its reports and the placements since then have it.
        """
        batch = self._find_batch(state)
        load, latency = state.load, state.latency
        num_decodes, context_tokens = load.running_decodes, load.decode_context_tokens
        chunk = min(state.queued_prefill_tokens, state.room_tokens)
        pass_s = _estimate_s(state, num_decodes, context_tokens, chunk)
        batch.advance(now, pass_s)
        # What a decode adds to as many as there will be.
        num_ahead = max(_STEP, min(num_decodes + batch.num_pending, state.config.max_num_seqs))
        mean_context = context_tokens / num_decodes if num_decodes else 0.0
        base = int(num_ahead * mean_context)
        least_s = _estimate_s(state, num_ahead, base, 0)
        more_s = _estimate_s(state, num_ahead + _STEP, base, 0)
        wide_s = _estimate_s(state, num_ahead + _STEP, base + _STEP * _CONTEXT_STEP, 0)
        per_decode_s = max(0.0, more_s - least_s) / _STEP
        per_context_s = max(0.0, wide_s - more_s) / (_STEP * _CONTEXT_STEP)
        coefficients = latency.compute_prefill_coefficients(num_decodes, context_tokens, max(1, state.room_tokens))
        left_tokens = self._count_left_tokens(batch, num_decodes) + batch.pending_tokens
        return ServerClock(
            prefill_s=(
                state.queued_prefill_tokens * coefficients.per_token_s
                + load.queued_attention_work * coefficients.per_work_s
                + batch.pending_prefill_s
            ),
            decode_s=left_tokens * (per_decode_s + per_context_s * mean_context),
            per_prefill_s=coefficients.per_token_s,
            per_work_s=coefficients.per_work_s,
            per_decode_s=per_decode_s,
            per_context_s=per_context_s,
            pass_s=pass_s,
        )

    def commit(
        self,
        request_id: RequestId,
        state: EngineState,
        *,
        starts_at_s: float,
        prefill_s: float,
        decode_tokens: int,
    ) -> None:
        """Commit a part of a request (Algorithm 1, line 11).

        Args:
            request_id: The request.
            state: The engine.
            starts_at_s: When its first token is decoded, on the caller's clock.
            prefill_s: Prefill work that the engine does not report before then.
            decode_tokens: Tokens that it decodes there.
        """
        batch, part = self._find_batch(state), _Part(starts_at_s, prefill_s, decode_tokens)
        batch.add(part)
        self._parts.setdefault(request_id, []).append((batch, part))

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that has ended, or is to be placed again; an unknown one is no error."""
        for batch, part in self._parts.pop(request_id, []):
            batch.remove(part)

    def _find_batch(self, state: EngineState) -> VirtualBatch:
        batch = self._batches.get(state.engine_id)
        if batch is None:
            batch = self._batches[state.engine_id] = VirtualBatch(state.config.max_num_seqs)
        return batch

    def _count_left_tokens(self, batch: VirtualBatch, num_decodes: int) -> float:
        """Count the decode tokens that are left, by what is known of as many decodes as the engine reports."""
        num_known, left_tokens = batch.num_active, batch.left_tokens
        if num_decodes < num_known:
            return left_tokens * num_decodes / num_known
        mean = left_tokens / num_known if num_known else 0.0
        return left_tokens + (num_decodes - num_known) * max(float(self._margin_tokens), mean)


def _estimate_s(state: EngineState, num_decodes: int, context_tokens: int, chunk_tokens: int) -> float:
    shape = IterationShape(
        prefill_tokens=chunk_tokens,
        attention_work=chunk_tokens * chunk_tokens / 2,
        num_chunks=1 if chunk_tokens else 0,
        num_decodes=num_decodes,
        decode_context_tokens=context_tokens,
    )
    return state.latency.estimate_shape_s(shape)
