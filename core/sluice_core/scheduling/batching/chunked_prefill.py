"""Chunked prefill beside decodes (TaiChi, sections 3.1 and 3.5).

The chunk size is the most tokens of an iteration, decodes included. Decodes are never cut; requests that arrive with
their KV (joining) come next; local prefills get the rest, the *prefill budget*: ``max(0, chunk size - decodes -
joining)``. Chunk size 0 means no new prompts: prefills that have started finish at the last non-zero size, unstarted
ones return to their router, recompute always runs, 2048 tokens at a time.

No class starves:

- decodes and joining requests always have their token (``phase_switch``: but for phases of prefills);
- recompute goes ahead of other prefills;
- within a class the order is by arrival, and priority is worth a bounded head start, so every request becomes first;
- where decodes fill the chunk, prefills still get a small chunk now and then (minimum progress,
  ``ChunkedPrefillPolicy``);
- the victim of a preemption is the request that comes last in that same order, so the first one is never preempted
  and always ends.
"""

from __future__ import annotations

from typing import Final

from sluice_core.scheduling.engine_policy import BatchLimits, EngineBatch, EnginePolicy, RequestKind
from sluice_core.scheduling.waiting_order import PRIORITY_HEAD_START_S

RECOMPUTE_TOKENS: Final = 2048  # per iteration, where the chunk size is 0; chosen for a 14B model on an A100
MIN_PROGRESS_INTERVAL_S: Final = 0.25  # longest time without prefill progress while prefills wait
MIN_PROGRESS_TOKENS: Final = 128  # 4 times a second: 512 tokens/s, for about 1 ms of TPOT on an A100 with a 14B model


class ChunkedPrefillPolicy(EnginePolicy):
    """Decodes first, prefills in what the chunk size leaves (TaiChi, section 3.1).

    Minimum progress: with prefills waiting, room 0, and no prefill token computed for ``MIN_PROGRESS_INTERVAL_S``,
    the iteration gets ``MIN_PROGRESS_TOKENS`` (at most the chunk size, at least a KV block) on top of its decodes.

    Args:
        counts_decodes: The chunk size counts decodes and joining requests. False is for comparisons only: papers that
            count prefill tokens alone.
    """

    def __init__(self, *, counts_decodes: bool = True) -> None:
        self._counts_decodes = counts_decodes
        self._room_per_work = 0.0

    def limits(self, now: float, engine: EngineBatch) -> BatchLimits:
        """See ``EnginePolicy.limits``."""
        ahead = engine.num_decodes + engine.num_joining  # one token each, never cut
        takes_new_prompts = engine.chunk_size_tokens > 0 and not engine.is_draining
        counted = ahead if self._counts_decodes else 0
        # The prefill budget: what the chunk size leaves beside decodes, within the engine's largest batch.
        room = max(0, min(_desired_room(engine, counted), engine.max_batch_tokens - ahead))
        room = self.bound_room(now, engine, room)
        is_minimum_progress = room == 0 and _is_progress_due(now, engine, takes_new_prompts=takes_new_prompts)
        if is_minimum_progress:
            # Decodes fill the chunk. Without this room prompts would wait until decodes end, however long that takes.
            chunk = engine.chunk_size_tokens or engine.last_chunk_size_tokens or MIN_PROGRESS_TOKENS
            least = max(engine.block_size_tokens, min(MIN_PROGRESS_TOKENS, chunk))
            room = max(0, min(least, engine.max_batch_tokens - ahead))
        return BatchLimits(
            token_budget=ahead + room,
            prefill_budget_tokens=room,
            max_tokens_per_prefill=room,
            runs_recompute=room > 0,
            runs_started_prefills=room > 0,
            runs_new_prompts=room > 0 and takes_new_prompts,
            returns_new_prompts=not takes_new_prompts,
            is_minimum_progress=is_minimum_progress,
            room_per_work=0.0 if is_minimum_progress else self._room_per_work,
        )

    def bound_room(self, now: float, engine: EngineBatch, room_tokens: int) -> int:  # noqa: ARG002 - for overrides
        """Bound the prefill budget further; sets ``_room_per_work`` where attention takes room too.

        Args:
            now: See ``limits``.
            engine: See there.
            room_tokens: The room by chunk size.
        """
        return room_tokens

    def order_key(self, kind: RequestKind, arrival_s: float, priority: int) -> tuple[int, float]:
        """See ``EnginePolicy.order_key``."""
        return int(kind), arrival_s - priority * PRIORITY_HEAD_START_S

    def victim_key(self, arrival_s: float, priority: int) -> float:
        """See ``EnginePolicy.victim_key``."""
        return arrival_s - priority * PRIORITY_HEAD_START_S


def _desired_room(engine: EngineBatch, ahead: int) -> int:
    """Compute the room that the chunk size leaves beside ``ahead`` tokens; the engine's maximum is not applied."""
    if engine.chunk_size_tokens > 0:
        return engine.chunk_size_tokens - ahead
    # Chunk size 0 (TaiChi, section 3.1: disaggregation): no new prompts, but what has started must end, and requests
    # that lost their KV are recomputed here.
    started = (engine.last_chunk_size_tokens or RECOMPUTE_TOKENS) - ahead if engine.num_started_prefills else 0
    return max(started, RECOMPUTE_TOKENS if engine.num_recomputing else 0)


def _is_progress_due(now: float, engine: EngineBatch, *, takes_new_prompts: bool) -> bool:
    """Say whether prefills wait that have seen no progress for too long."""
    waiting = engine.num_recomputing + engine.num_started_prefills
    waiting += engine.num_new_prompts if takes_new_prompts else 0
    return waiting > 0 and now - engine.last_prefill_s >= MIN_PROGRESS_INTERVAL_S
