"""Decisions of every strategy's policies on drawn states, against what they were when they were recorded.

Routers: where prefills go, in which order, with which estimate and route; where decodes go. Engines: what an iteration
may hold, which decodes ask to leave. Engines differ in speed, which runs of the simulator never have. Whoever means to
change a decision records them anew, and reviews the table:

    .venv/bin/python core/tests/test_drawn_decisions.py
"""

import csv
import math
import random
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from planning_harness import PROFILE
from test_drawn_runs import add_up
from test_simulation import A100_14B

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, Hold, IterationShape, MoveCause, Place, PrefillRequest, RequestId, Role, Slo
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import EngineBatch, RequestKind
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.strategies import STRATEGIES, get_strategy
from sluice_core.strategies.dynaserve import DynaServeRules
from sluice_core.strategy_parameters import EarlyRejection, OverloadOrder, StrategyParameters

RECORDED = Path(__file__).with_name("drawn_decisions.csv")
PROFILES = (A100_14B, PROFILE, load_model_on_gpu("llama-3-8b", "h100-80g", 1).profile)
ROWS = {
    **STRATEGIES,
    "taichi, round robin": get_strategy("taichi").vary(placement="round_robin"),
    "aggregated, least work": get_strategy("aggregated").vary(placement="least_work"),
    "dynaserve, cut prompts": replace(get_strategy("dynaserve"), policies=DynaServeRules(cuts_prompts=True)),
    "dynaserve, fixed": replace(
        get_strategy("dynaserve"), policies=DynaServeRules(cuts_prompts=True, is_bound_to_sides=True, fixed_token=150)
    ),
}
SLOS = (Slo(ttft_s=0.3, tpot_s=0.03), Slo(ttft_s=2.0, tpot_s=0.06), Slo(ttft_s=9.0, tpot_s=0.5))
NUMBERS = range(16)


def draw_parameters(rng):
    other = deepcopy(rng)  # what it draws leaves all that is drawn later as it was
    return StrategyParameters(
        early_rejection=rng.choice(list(EarlyRejection)),
        watermark=rng.choice((0.5, 0.95)),
        approaching_factor=rng.choice((0.6, 0.96)),
        min_tokens_between_moves=rng.choice((4, 16)),
        prefill_batch_tokens=rng.choice((200, 2048)),
        tpot_share=rng.choice((0.8, 0.98)),
        late_ttft_factor=rng.choice((1.0, 3.0)),
        late_share=other.choice((0.1, 0.5, 1.0)),
        pace_share=other.choice((0.0, 0.5, 0.8)),
        overload_order=other.choice(list(OverloadOrder)),
        pack_prompt_share=other.choice((0.0, 0.5)),
        pack_share=rng.choice((0.0, 0.7)),
        credit_s=rng.choice((0.0, 0.1, 1.0)),
        macro_instance_least=rng.choice((1, 2)),
        macro_instance_most=rng.choice((3, 8)),
        split_search_steps=rng.choice((2, 6)),
        split_margin_tokens=rng.choice((0, 20)),
        tbt_target_s=rng.choice((0.0, 0.05)),
    )


def draw_load(rng):
    other = deepcopy(rng)  # see draw_parameters
    queued = rng.choice((0, 0, rng.randrange(1, 9000)))
    decodes = rng.choice((0, rng.randrange(1, 40)))
    num_queued = min(queued, rng.randrange(1, 5)) if queued else 0
    work = queued * rng.uniform(0.0, 3000.0)
    late_share = other.choice((0.0, 0.0, other.random(), 1.0))
    return EngineLoad(
        queued_prefill_tokens=queued,
        queued_requests=num_queued,
        queued_attention_work=work,
        late_prefill_tokens=int(late_share * queued),
        late_requests=int(late_share * num_queued),
        late_attention_work=late_share * work,
        running_decodes=decodes,
        decode_context_tokens=decodes * rng.randrange(50, 4000),
        kv_blocks_total=800,
        kv_blocks_used=rng.choice((0, rng.randrange(800))),
        kv_blocks_granted=rng.choice((0, 0, 30)),
        iteration_remaining_s=rng.choice((0.0, rng.uniform(0.0, 0.1))),
        is_of_others=rng.random() < 0.3,
        prefill_phase_s=rng.choice((0.0, 0.0, rng.uniform(0.0, 1.0))),
        saved_tpot_s=rng.choice((math.inf, rng.uniform(-0.5, 3.0))),
    )


def draw_table(rng):
    profiles = {EngineId(f"e{number}"): rng.choice(PROFILES) for number in range(rng.choice((1, 2, 4, 7)))}
    table = EngineTable(profiles.__getitem__)
    config = EngineConfig(block_size_tokens=16, kv_bytes_per_token=100_000, max_num_seqs=64, max_batch_tokens=2048)
    is_uniform = rng.random() < 0.5
    for engine_id in profiles:
        chunk = 512 if is_uniform else rng.choice((0, 1, 64, 512, 2048))
        table.add(engine_id, config, role=rng.choice(list(Role)), chunk_size_tokens=chunk)
    for state in list(table):
        if rng.random() < 0.9:
            table.report(state.engine_id, draw_load(rng), 10.0)
        if rng.random() < 0.1:
            table.configure(
                state.engine_id, role=state.role, chunk_size_tokens=state.chunk_size_tokens, is_draining=True
            )
    return table


def draw_request(rng, number, now, engine_ids):
    is_recovery = rng.random() < 0.15
    arrival_s = now - rng.choice((0.0, rng.uniform(0.0, 1.0), rng.uniform(0.0, 12.0)))
    return PrefillRequest(
        request_id=RequestId(f"r{number}"),
        arrival_s=arrival_s,
        prompt_tokens=rng.choice((1, rng.randrange(1, 400), rng.randrange(1, 6000))),
        slo=rng.choice(SLOS),
        priority=rng.choice((0, 0, 0, 1, -1)),
        is_recovery=is_recovery,
        next_token_due_s=now + rng.uniform(-1.0, 1.0) if is_recovery else 0.0,
        excluded=frozenset(rng.sample(engine_ids, 1)) if rng.random() < 0.1 else frozenset(),
        cached_tokens={rng.choice(engine_ids): 16 * rng.randrange(1, 20)} if rng.random() < 0.15 else {},
        max_output_tokens=rng.choice((0, 0, 30)),
    )


def write_decision(decision):
    if isinstance(decision, Place):
        route = "".join(f" >{leg.engine_id}:{leg.end_token}" for leg in decision.route)
        late = "" if decision.is_feasible else " late"
        return f"{decision.request_id} {decision.engine_id} {decision.reason}{late}{route}", decision.predicted_ttft_s
    kind = "held" if isinstance(decision, Hold) else "refused"
    return f"{decision.request_id} {kind} {decision.reason if isinstance(decision, Hold) else ''}".strip(), 0.0


def list_targets(rng, router, table, now):
    """Lists where decodes go, by cause and source, and what the router says of roles."""
    engine_ids = [state.engine_id for state in table]
    targets = []
    for cause in MoveCause:
        for source in engine_ids[:3]:
            move = FlowRequest(
                cause=cause,
                source=source,
                num_blocks=rng.choice((1, 60, 400)),
                tpot_slo_s=rng.choice((0.02, 0.06, 0.5, math.inf)),
                excluded=frozenset(rng.sample(engine_ids, 1)) if rng.random() < 0.2 else frozenset(),
                planned_target=rng.choice((None, *engine_ids)),
            )
            targets.append(str(router.target(now, move, table) or "-"))
            targets.append("s" if router.is_too_soon(cause, rng.choice((None, 3, 10, 90))) else "")
    for role in (None, *Role):
        targets.append("m" if router.moves_first_decode(role, table) else "")
        targets.append("d" if router.has_decode_engines(table) else "")
    return targets


def route(name, number):
    """Describes what a router decides: in words, and numbers."""
    rng = random.Random(f"router {name} {number}")
    table, parameters = draw_table(rng), draw_parameters(rng)
    router = ROWS[name].make_router(parameters, random.Random(number))
    engine_ids = [state.engine_id for state in table]
    words, estimates, urgencies, records = [], [], [], []
    now, count = 10.0, 0
    for _ in range(3):
        waiting = [draw_request(rng, count + each, now, engine_ids) for each in range(rng.randrange(1, 8))]
        count += len(waiting)
        for request in waiting:
            urgencies += router.compute_urgency(
                now,
                is_recovery=request.is_recovery,
                next_token_due_s=request.next_token_due_s,
                priority=request.priority,
                arrival_s=request.arrival_s,
                ttft_slo_s=request.slo.ttft_s,
                prompt_tokens=request.prompt_tokens,
            )
        decisions = router.assign(now, waiting, table)
        for decision in decisions:
            text, estimate_s = write_decision(decision)
            words.append(text)
            estimates.append(estimate_s if estimate_s < math.inf else -1.0)
        records += [0.0 if record is None else 1.0 for record in router.take_records(len(decisions))]
        for request in waiting[::2]:
            router.note_finished(request.request_id, rng.choice((0, 5, 300)))
        words.append("|")
        now += rng.choice((0.01, 0.3, 2.0))
        for engine_id in engine_ids:
            if rng.random() < 0.5:
                table.report(engine_id, draw_load(rng), now)
    targets = list_targets(rng, router, table, now)
    words.append(" ".join(filter(None, targets)))
    sums = [add_up(estimates), add_up(urgencies), add_up(records), router.get_grant_wait_s()]
    return "; ".join(words), sums


def draw_decodes(rng, now):
    decodes = DecodeSet(block_size_tokens=16, max_num_seqs=64)
    for number in range(rng.choice((0, 1, 5, 20))):
        output = rng.randrange(1, 300)
        tpot_slo_s = rng.choice((0.03, 0.06, 0.5, math.inf))
        decodes.join(
            RequestId(f"d{number}"),
            prompt_tokens=rng.randrange(1, 900),
            output_tokens=output,
            output_tokens_since_reset=rng.randrange(output + 1),
            first_token_s=now - output * rng.choice((0.02, 0.04, 0.059, 0.2)),
            tpot_slo_s=tpot_slo_s,
            is_moved_in=rng.random() < 0.3,
            split_tokens=rng.choice((0, 0, output + rng.randrange(9))),
        )
    decodes.kv_blocks_total, decodes.kv_blocks_held = 900, rng.randrange(900)
    return decodes


def draw_batch(rng, num_decodes, now):
    chunk = rng.choice((0, 1, 64, 512, 2048))
    return EngineBatch(
        chunk_size_tokens=chunk,
        last_chunk_size_tokens=chunk or 128,
        max_batch_tokens=2048,
        block_size_tokens=16,
        num_decodes=num_decodes,
        decode_context_tokens=num_decodes * rng.randrange(10, 3000),
        num_joining=rng.choice((0, 0, 2)),
        num_recomputing=rng.choice((0, 0, 1)),
        num_started_prefills=rng.choice((0, 1, 3)),
        num_new_prompts=rng.choice((0, 1, 5)),
        num_under_way=rng.choice((0, 0, 1, 2)),
        under_way_s=rng.choice((0.0, 0.02)),
        last_prefill_s=now - rng.choice((0.0, 0.4, 20.0)),
        is_draining=rng.random() < 0.1,
        is_stalled=rng.random() < 0.1,
    )


def batch(name, number):
    """Describes what an engine decides: in words, and numbers."""
    rng = random.Random(f"engine {name} {number}")
    parameters, latency = draw_parameters(rng), rng.choice(PROFILES)
    policy = ROWS[name].make_engine(parameters, counts_decodes=rng.random() < 0.7)
    now = 10.0
    decodes = draw_decodes(rng, now)
    decodes.role = rng.choice(list(Role))
    words, numbers = [], []
    if rng.random() < 0.9:
        policy.bind(decodes, latency)
    policy.observe_chunk_sizes({64, 512} if rng.random() < 0.5 else {512})
    for step in range(6):
        for _ in range(rng.randrange(4)):
            shape = IterationShape(
                prefill_tokens=rng.choice((0, 64, 512)),
                num_chunks=rng.randrange(3),
                attention_work=rng.uniform(0, 1e5),
                num_decodes=len(decodes),
                decode_context_tokens=500 * len(decodes),
            )
            policy.record_iteration(shape, rng.uniform(0.0, 0.2))
        engine = draw_batch(rng, len(decodes), now)
        limits = policy.limits(now, engine)
        flags = (
            limits.runs_recompute,
            limits.runs_started_prefills,
            limits.runs_new_prompts,
            limits.returns_new_prompts,
            limits.is_minimum_progress,
            limits.withholds_decodes,
        )
        words.append(
            f"{limits.token_budget}/{limits.prefill_budget_tokens}/{limits.max_tokens_per_prefill}/"
            f"{limits.saturation_tokens} {''.join('ny'[flag] for flag in flags)}"
        )
        numbers.append(limits.room_per_work)
        decodes.is_draining = step == 4
        moves = policy.propose(now, decodes)
        words.append(" ".join(f"{m.request_id}:{m.cause.value}:{m.output_tokens}:{m.num_blocks}" for m in moves))
        policy.note_batch(now, has_prefills=bool(engine.num_new_prompts))
        report = policy.describe_phase(now + 0.01, is_prefilling=rng.random() < 0.7)
        if report is not None:
            saved_s = report.saved_tpot_s if math.isfinite(report.saved_tpot_s) else -1.0
            numbers += [report.prefill_phase_s, saved_s, report.num_switches]
        decodes.advance()
        now += rng.choice((0.01, 0.05, 1.0))
    for kind in RequestKind:
        numbers += policy.order_key(kind, 5.0, 1)
    numbers += [policy.victim_key(5.0, 1), *(policy.share_for(role, cause) for role in Role for cause in MoveCause)]
    words.append("".join("ny"[policy.hands_off_prefills(role)] for role in Role))
    return "; ".join(words), [add_up(number if math.isfinite(number) else -1.0 for number in numbers)]


CASES = [(kind, name, number) for kind in (route, batch) for name in ROWS for number in NUMBERS]


def read_recorded():
    with RECORDED.open(newline="") as file:
        return {key: (words, [float(each) for each in sums]) for key, words, *sums in csv.reader(file)}


RECORDS = read_recorded() if RECORDED.exists() else {}


@pytest.mark.parametrize(("kind", "name", "number"), CASES, ids=[f"{k.__name__} {n} {i}" for k, n, i in CASES])
def test_decisions_are_as_they_were_recorded(kind, name, number):
    words, sums = kind(name, number)
    recorded = RECORDS[f"{kind.__name__} {name} {number}"]
    assert words == recorded[0]
    assert sums == pytest.approx(recorded[1], rel=1e-7, abs=1e-9)


def test_the_drawn_decisions_have_seen_every_reason():
    text = " ".join(words for words, _ in RECORDS.values())
    for word in (
        "feasible",
        "least_late",
        "held kv",
        "held room",
        "late_binding",
        "saved_tpot",
        "split",
        "whole",
        "recovery",
        "refused",
    ):
        assert word in text


def write():
    """Records all decisions."""
    with RECORDED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for kind, name, number in CASES:
            words, sums = kind(name, number)
            writer.writerow([f"{kind.__name__} {name} {number}", words, *(f"{each:.10g}" for each in sums)])


if __name__ == "__main__":
    write()
    sys.stdout.write(f"{len(CASES)} decisions are in {RECORDED}\n")
