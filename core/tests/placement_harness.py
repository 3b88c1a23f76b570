"""Engines, requests and Algorithm 2 by the book, for the tests of placement."""

import math
import random

from hypothesis import strategies as st

from sluice_core.latency import TRANSFER_LATENCY_S, compute_attention_work
from sluice_core.records import EngineId, IterationShape, PrefillRequest, RequestId, Role, Slo
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import (
    PROVEN_OBSERVATIONS,
    EngineConfig,
    EngineTable,
)
from sluice_core.scheduling.prefill_placement import (
    LengthAwarePlacement,
)
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

SPEC = EngineConfig(block_size_tokens=16, kv_bytes_per_token=200_000, max_num_seqs=256, max_batch_tokens=8192)


P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY


CHUNKS = {P: 2048, D: 256}


def make_table(*engines, observations=PROVEN_OBSERVATIONS):
    """Make a table of engines, each a dict: role, chunk and load fields."""
    table = EngineTable()
    for number, engine in enumerate(engines):
        fields = {"kv_blocks_total": 10_000} | engine
        role = fields.pop("role", P)
        engine_id = EngineId(f"e{number}")
        table.add(engine_id, SPEC, role=role, chunk_size_tokens=fields.pop("chunk", CHUNKS[role]))
        num_observed = fields.pop("observations", observations)
        speed = fields.pop("speed", 1.0)
        for _ in range(num_observed):
            table.observe_iteration(
                engine_id,
                IterationShape(prefill_tokens=512, attention_work=131_072, num_chunks=1, num_decodes=16),
                0.07 * speed,
            )
        is_draining = fields.pop("is_draining", False)
        late_share = fields.pop("late_share", 0.0)
        tokens = fields.get("queued_prefill_tokens", 0)
        if tokens:
            fields = {"queued_requests": 1, "queued_attention_work": compute_attention_work(tokens, 0)} | fields
            fields["late_prefill_tokens"] = int(late_share * tokens)
            fields["late_attention_work"] = late_share * fields["queued_attention_work"]
        table.report(engine_id, EngineLoad(**fields), 0.0)
        if is_draining:
            table.configure(engine_id, role=role, chunk_size_tokens=CHUNKS[role], is_draining=True)
    return table


def make_request(number=0, *, tokens=1000, ttft_s=5.0, arrival_s=0.0, **fields):
    return PrefillRequest(
        request_id=RequestId(f"r{number}"),
        arrival_s=arrival_s,
        prompt_tokens=tokens,
        slo=Slo(ttft_s=ttft_s, tpot_s=0.05),
        **fields,
    )


def make_policy(early_rejection=EarlyRejection.OFF, seed=0):
    return LengthAwarePlacement(StrategyParameters(early_rejection=early_rejection), random.Random(seed))


def decide(table, request, policy=None, now=0.0):
    return (policy or make_policy()).assign(now, [request], table)[0]


# The paper's Algorithm 2, line by line, from the table's raw state; KV fit and room are beyond the paper.
def estimate_by_the_book(state, table, request, now):
    """Q, E and T: lines 3 to 5."""
    if state.load.running_decodes >= state.chunk_size_tokens or state.is_draining:
        return math.inf, math.inf, 0.0
    room = min(state.chunk_size_tokens, state.config.max_batch_tokens) - state.load.running_decodes

    def estimate(tokens, work, prompts):
        return state.latency.estimate_prefill_s(
            tokens=tokens,
            attention_work=work,
            num_prompts=prompts,
            room_tokens=room,
            num_decodes=state.load.running_decodes,
            decode_context_tokens=state.load.decode_context_tokens,
        )

    load = state.load
    free_at = state.reported_at_s + load.iteration_remaining_s
    # Nobody waits for those that the engine computes last.
    free_at += estimate(
        load.queued_prefill_tokens - load.late_prefill_tokens,
        load.queued_attention_work - load.late_attention_work,
        load.queued_requests - load.late_requests,
    )
    for placement in state.in_flight.values():
        free_at = max(free_at, placement.placed_at_s)
        free_at += estimate(placement.tokens, compute_attention_work(placement.tokens, 0), 1)
    execute = estimate(request.prompt_tokens, compute_attention_work(request.prompt_tokens, 0), 1)
    transfer = 0.0
    chunk_sizes = {s.chunk_size_tokens for s in table if not s.is_draining}
    if state.role is P and len(chunk_sizes) > 1:
        rate = table.pull_bytes_per_s or 10e9
        transfer = TRANSFER_LATENCY_S + request.prompt_tokens * state.config.kv_bytes_per_token / rate
    return max(0.0, free_at - now), execute, transfer


def fits_by_the_book(state, request):
    load, size = state.load, state.config.block_size_tokens
    timely_tokens = load.queued_prefill_tokens - load.late_prefill_tokens
    reserved = -(-timely_tokens // size) + max(0, load.queued_requests - load.late_requests - 1)
    reserved += sum(-(-p.tokens // size) for p in state.in_flight.values())
    free = load.kv_blocks_total - load.kv_blocks_used - load.kv_blocks_granted
    return free - reserved >= -(-request.prompt_tokens // size)


engine_states = st.fixed_dictionaries(
    {
        "role": st.sampled_from([P, D]),
        "queued_prefill_tokens": st.sampled_from([0, 0, 0, 500, 500, 3000, 20_000]),
        "running_decodes": st.sampled_from([0, 10, 100, 256]),
        "decode_context_tokens": st.integers(0, 200_000),
        "kv_blocks_used": st.sampled_from([0, 5000, 9900, 10_000]),
        "kv_blocks_granted": st.sampled_from([0, 50]),
        "iteration_remaining_s": st.floats(0, 0.1),
        "speed": st.sampled_from([0.5, 1.0, 1.0, 3.0]),
        "is_draining": st.sampled_from([False, False, False, True]),
        "is_of_others": st.sampled_from([False, False, True]),
        "late_share": st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    },
    optional={"chunk": st.sampled_from([0, 64, 512, 512])},
)


NO_HITS = {EngineId("e0"): 0}


BUSY = {"queued_prefill_tokens": 40_000}


FULL = {"kv_blocks_used": 10_000}


OFF, RANDOM, REJECT = EarlyRejection


SHORT, GONE = 0.2, 0.001


E0, E1 = EngineId("e0"), EngineId("e1")
