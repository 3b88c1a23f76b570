"""Preemption of a simulated engine that has too few KV blocks: the victim is recomputed later.

The victim is what comes last in the batch policy's order. Its blocks are free at once; what is left of them when it
runs again is not recomputed (``freed_blocks``). ``make_room_in_step`` does as papers' simulators do, the others as vLLM
0.32: ``v1/core/sched/scheduler.py``, with a connector for KV (``defer_block_free``); ``benchmarks/fidelity`` compares.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.sim.engine.freed_blocks import FreedBlocks
from sluice_core.sim.engine.scheduler_state import SchedulerState
from sluice_core.sim.requests import RequestState, SimRequest


def make_room_in_step(engine: SchedulerState, now: float) -> int:
    """Preempt decodes until the others have blocks for their next tokens.

    A prompt has reserved all its blocks, so only decodes run out of them and only decodes are preempted.

    Returns:
        Blocks that they need.
    """
    key, need = _make_key(engine), engine.batch.count_growth_blocks()
    while need > engine.count_schedulable_blocks():
        victim = max(engine.batch.list_requests(), key=key)
        _preempt(engine, victim, now, has_grown=False)
        need = engine.batch.count_growth_blocks()
    return need


def make_room_for_decodes(engine: SchedulerState, now: float) -> int:
    """Let decodes find blocks for their next tokens, or preempt, where an iteration is scheduled ahead.

    Blocks are taken by the chunk, and a prompt that has started has reserved none. So decodes may take what it needs
    next, and then the last of all that runs goes. Decodes are served first, then the prefills that have started; one
    that finds no block preempts the last of all, which may be itself.

    Returns:
        Blocks that those take that are in the iteration.
    """
    batch, prefills = engine.batch, engine.prefills
    key = _make_key(engine)
    order = sorted(batch.list_requests(), key=key)
    num_found = 0
    for position, request in enumerate(order):
        if not batch.is_growing(request):
            continue
        while request.state is RequestState.DECODING and num_found >= engine.count_schedulable_blocks():
            victim = _find_victim(engine)
            if _is_in_running_iteration(engine, victim):
                # The iteration under way may still write to its blocks. The decode that needs one and all behind it are
                # left out of one iteration, after which the victim, left out as well, is preempted.
                prefills.max_started = 0
                batch.pause([other for other in order[position:] if other.state is RequestState.DECODING])
                return num_found
            _preempt(engine, victim, now, has_grown=False)
            if victim is request:
                prefills.max_started = 0
        num_found += request.state is RequestState.DECODING
    return num_found


def make_room_for_chunks(engine: SchedulerState, now: float, num_decodes: int) -> None:
    """Let the prefills that have started find blocks for their next chunks, or preempt.

    Args:
        engine: An engine that schedules ahead, few of whose blocks are free.
        now: Seconds of the simulated clock.
        num_decodes: Decodes before any was preempted: the prefill budget was set then.
    """
    prefills = engine.prefills
    limits = prefills.find_limits(now, num_decodes)
    room = limits.prefill_budget_tokens
    found: dict[int, tuple[int, int]] = {}  # blocks and tokens of each
    for request in prefills.list_runnable(now, engine.free_blocks):
        if room <= 0 or len(found) >= prefills.max_started:
            return
        if not request.num_computed_tokens:
            continue  # preempted a moment ago
        num_left = request.prefill_tokens - request.num_computed_tokens
        if not limits.has_place_for(num_left, room):
            return
        most = limits.fit_chunk(room, request.num_computed_tokens, engine.setup.block_size_tokens)
        tokens = min(most, limits.max_tokens_per_prefill, num_left)
        need = prefills.count_chunk_blocks(request, tokens)
        while need and request.num_computed_tokens:
            if sum(blocks for blocks, _ in found.values()) + need <= engine.count_schedulable_blocks():
                break
            victim = _find_victim(engine)
            if _is_in_running_iteration(engine, victim):
                prefills.max_started = len(found)
                prefills.withheld_tokens += tokens
                return
            if victim is request:
                prefills.max_started = len(found)
            _preempt(engine, victim, now, has_grown=not limits.withholds_decodes)
            # The room that it was given is nobody else's in this iteration.
            prefills.withheld_tokens += found.pop(victim.index, (0, 0))[1]
        if request.num_computed_tokens:
            found[request.index] = need, tokens
            room -= limits.count_room(tokens, request.num_computed_tokens)


def _find_victim(engine: SchedulerState) -> SimRequest:
    """Find the last of all that runs."""
    running = [*engine.batch.list_requests(), *engine.prefills.list_started(), *engine.ending]
    return max(running, key=_make_key(engine))


def _make_key(engine: SchedulerState) -> Callable[[SimRequest], tuple[float, int]]:
    """Order requests for preemption: the last one goes first, and of equals the one that arrived last."""
    victim_key = engine.policy.victim_key
    return lambda request: (victim_key(request.arrival_s, request.priority), request.index)


def _is_in_running_iteration(engine: SchedulerState, request: SimRequest) -> bool:
    """Say whether the iteration that ran when this one was scheduled holds a request that runs."""
    if engine.schedules_late:
        return False
    if request.state is RequestState.DECODING:
        return request not in engine.joined
    return request.state is RequestState.FINISHED or engine.prefills.was_in_last_batch(request)


def leave_decodes(engine: SchedulerState, victim: SimRequest, now: float) -> None:
    """Take a decode out whose last token came now, or before it was left out of an iteration."""
    is_new_here = victim in engine.joined
    engine.batch.leave(victim, victim.last_token_s if is_new_here else now)
    if is_new_here:
        engine.joined.remove(victim)


def _preempt(engine: SchedulerState, victim: SimRequest, now: float, *, has_grown: bool) -> None:
    """Preempt a decode, or a prefill that has started.

    Args:
        engine: Where it runs.
        victim: The request.
        now: Seconds of the simulated clock.
        has_grown: Decodes have taken the blocks of the next iteration.
    """
    # vLLM admits nothing in an iteration with a preemption.
    engine.prefills.may_admit = not engine.schedules_ahead
    num_grown = 0
    if victim.state is RequestState.DECODING:
        num_grown = int(has_grown and engine.batch.is_growing(victim))
        has_decoded_here = engine.iteration - victim.start_iteration > victim.generated_tokens
        leave_decodes(engine, victim, now)
        num_tokens = num_cached_tokens = victim.num_kv_tokens
        if engine.schedules_ahead and has_decoded_here:
            # A block is cached by its tokens, and that of the last iteration was not known yet.
            num_cached_tokens -= 1
    else:
        engine.prefills.drop(victim)
        num_tokens = num_cached_tokens = victim.num_computed_tokens
        engine.counters.num_lost_prefill_tokens += num_tokens - victim.num_cached_tokens
    engine.used_blocks -= num_grown + _free_victim_blocks(engine, victim, num_grown, num_tokens, num_cached_tokens)
    victim.num_preemptions += 1
    engine.counters.num_preemptions += 1
    victim.num_blocks = 0
    victim.state = RequestState.QUEUED
    engine.enqueue(victim, RequestKind.RECOMPUTE)


def _free_victim_blocks(
    engine: SchedulerState, victim: SimRequest, num_grown: int, num_tokens: int, num_cached_tokens: int
) -> int:
    """Free the blocks of a preempted request; returns how many are free now, those for its next token left out."""
    cache, prefills = engine.cache, engine.prefills
    if cache is not None:
        assert victim.table is not None
        cache.free_uncached(num_grown)
        cache.cache_filled_blocks(victim.table, num_tokens, num_cached_tokens)
        return cache.release(victim.table)
    if prefills.freed is None:
        prefills.freed = FreedBlocks(engine.count_schedulable_blocks() + prefills.count_promised_blocks())
    num_cached = num_cached_tokens // engine.setup.block_size_tokens
    prefills.freed.free_preempted(victim.index, victim.num_blocks + num_grown, num_cached)
    return victim.num_blocks
