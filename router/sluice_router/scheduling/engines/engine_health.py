"""When an engine counts as silent or hung."""

from __future__ import annotations

from sluice_core.records import IterationShape
from sluice_core.scheduling.engine_table import EngineTable
from sluice_router.limit_type import Limit, Limits
from sluice_router.scheduling.entities import ConnectedEngine

SILENCE_LIMIT_S = Limit("silence_limit_s", 2.0, "longest silence of an engine's stream", above=0)
ITERATION_AGE_FLOOR_S = Limit("iteration_age_floor_s", 2.0, "least time without progress that means a hang", above=0)
ITERATION_AGE_FACTOR = Limit("iteration_age_factor", 5.0, "longest predicted iterations that mean a hang", at_least=1)


def find_failure(limits: Limits, table: EngineTable, engine: ConnectedEngine, now: float) -> tuple[str, str] | None:
    """Checks whether an engine is silent or hangs.

    Returns:
        Reason and text of its failure; None while it is well.
    """
    silence_s, silence_limit_s = now - engine.last_heard_s, limits[SILENCE_LIMIT_S]
    if silence_s > silence_limit_s:
        return "silence", f"silent for {silence_s:.1f} s, the limit is {silence_limit_s:g} s"
    if not _has_work(engine):
        engine.progress_s = now
        return None
    age_s, limit_s = now - engine.progress_s, _age_limit_s(limits, table, engine)
    if age_s > limit_s:
        return "hang", f"no iteration for {age_s:.1f} s with work to do, the limit is {limit_s:.1f} s"
    return None


def _has_work(engine: ConnectedEngine) -> bool:
    """Whether iterations are due. Pulls are left out: they have time limits of their own."""
    load = engine.load
    if load.queued_prefill_tokens or load.running_decodes:
        return True
    return engine.num_submits > load.last_submit_number and any(
        submission is not None and submission.submit_number > load.last_submit_number for submission in engine.slots
    )


def _age_limit_s(limits: Limits, table: EngineTable, engine: ConnectedEngine) -> float:
    """The longest time that an iteration may take: a multiple of what the latency model predicts for a full one."""
    if engine.engine_id not in table:
        return limits[ITERATION_AGE_FLOOR_S]
    tokens = engine.chunk_size_tokens or engine.spec.max_batch_tokens
    prefill_tokens = max(0, tokens - engine.load.running_decodes)
    shape = IterationShape(
        prefill_tokens=prefill_tokens,
        attention_work=prefill_tokens * engine.max_model_len_tokens / 2,
        num_chunks=1,
        num_decodes=engine.load.running_decodes,
        decode_context_tokens=engine.load.decode_context_tokens,
    )
    longest_s = table[engine.engine_id].latency.estimate_shape_s(shape)
    return max(limits[ITERATION_AGE_FLOOR_S], limits[ITERATION_AGE_FACTOR] * longest_s)
