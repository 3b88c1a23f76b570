"""Stops an iteration of prefills where an operator ends, for a prompt that is more urgent.

Source: FlowPrefill (arXiv:2602.16603), sections 5.1 and 5.2. The engine learns of a prompt when it comes, and stops at
the end of the operator that is being computed: the time until then is the blocking time (section 6.4). An engine is a
whole tensor-parallel group here, so its ranks stop together.
"""

from __future__ import annotations

import math

from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.engine.suspended_batch import IterationRest


def find_interrupt_s(engine: SimEngine, now: float) -> float:
    """Find when the iteration under way stops for a prompt that has just come.

    Args:
        engine: Where the prompt has come to.
        now: Seconds of the simulated clock.

    Returns:
        Seconds of that clock; ``math.inf``: it does not stop, or is about to already.
    """
    if not engine.num_operators or not engine.is_running or engine.interrupts_at_s < math.inf:
        return math.inf
    start_s = engine.ends_at_s - engine.duration_s
    # Engines with decodes in the iteration share it: FlowPrefill computes prefills on engines of their own.
    if engine.batch.num_decodes or not engine.prefills.is_overtaken(now, (now - start_s) / engine.duration_s):
        return math.inf
    num_done = math.floor((now - start_s) / engine.duration_s * engine.num_operators) + 1
    if num_done >= engine.num_operators:
        return math.inf
    engine.interrupts_at_s = start_s + engine.duration_s * num_done / engine.num_operators
    engine.counters.blocking_s += engine.interrupts_at_s - now
    return engine.interrupts_at_s


def interrupt(engine: SimEngine, now: float) -> None:
    """Stop the iteration under way; it goes on when its prompts are selected again."""
    rest_s = engine.ends_at_s - now
    done_s = engine.duration_s - rest_s
    rest = IterationRest(
        time_s=rest_s,
        share=rest_s / engine.duration_s,
        num_operators=engine.num_operators - round(done_s / engine.duration_s * engine.num_operators),
    )
    engine.counters.num_interrupts += 1
    engine.counters.busy_s += done_s
    engine.counters.kv_block_seconds += done_s * engine.used_blocks
    engine.prefills.suspend(rest)
    engine.is_running = False
    engine.ends_at_s, engine.interrupts_at_s = -math.inf, math.inf
    engine.note_change()
