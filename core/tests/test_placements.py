"""Round robin, least work and the shortest queue, as baselines of Algorithm 2."""

import random

import pytest
from test_simulation import make_engines

from sluice_core.records import EngineId, Hold, IterationShape, PrefillRequest, Reject, RequestId, Role, Slo
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.sim_setup import Arrival, Cell
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

SPEC = EngineConfig(block_size_tokens=16, kv_bytes_per_token=1000, max_num_seqs=64, max_batch_tokens=8192)


def make_table(*queues, chunk=512, used=()):
    table = EngineTable()
    for number, queued in enumerate(queues):
        engine_id = EngineId(f"e{number}")
        table.add(engine_id, SPEC, role=Role.PREFILL_HEAVY, chunk_size_tokens=chunk)
        kv_used = used[number] if used else 0
        load = EngineLoad(kv_blocks_total=1000, kv_blocks_used=kv_used, queued_prefill_tokens=queued)
        table.report(engine_id, load, 0.0)
    return table


def make_requests(number, **changes):
    slo = Slo(ttft_s=1.0, tpot_s=0.05)
    return [
        PrefillRequest(request_id=RequestId(f"r{index}"), arrival_s=float(index), prompt_tokens=100, slo=slo, **changes)
        for index in range(number)
    ]


def place(name, table, requests):
    policy = PLACEMENTS[name](StrategyParameters(), random.Random(0))
    return [getattr(decision, "engine_id", None) for decision in policy.assign(0.0, requests, table)]


def test_round_robin_ignores_the_queues():
    assert place("round_robin", make_table(900, 0, 50), make_requests(7)) == ["e0", "e1", "e2", "e0", "e1", "e2", "e0"]


def test_round_robin_skips_engines_that_take_no_prompts():
    table = make_table(0, 0, 0)
    table.configure(EngineId("e1"), role=Role.DECODE_HEAVY, chunk_size_tokens=0)
    assert place("round_robin", table, make_requests(4)) == ["e0", "e2", "e0", "e2"]


def test_least_work_counts_what_it_has_just_placed():
    assert place("least_work", make_table(250, 0, 100), make_requests(4)) == ["e1", "e1", "e2", "e1"]


def test_least_work_prefers_the_emptier_engine_among_equal_queues():
    assert place("least_work", make_table(0, 0, used=(20, 10)), make_requests(1)) == ["e1"]


def test_the_shortest_queue_takes_what_it_cannot_serve_in_time_and_what_it_has_no_kv_for():
    table = make_table(900_000, 800_000, used=(0, 1000))
    policy = PLACEMENTS["shortest_queue"](StrategyParameters(), random.Random(0))
    (decision,) = policy.assign(0.0, make_requests(1), table)
    assert (decision.engine_id, decision.reason, decision.is_feasible) == ("e1", "shortest_queue", False)
    assert [record.decision for record in policy.records] == [decision]


def test_of_equally_short_queues_the_one_with_the_most_kv_left_is_taken_and_placements_count():
    assert place("shortest_queue", make_table(0, 0, 90, used=(20, 10, 0)), make_requests(3)) == ["e1", "e0", "e2"]


def test_the_shortest_queue_is_first_come_first_served():
    policy = PLACEMENTS["shortest_queue"](StrategyParameters(), random.Random(0))
    decisions = policy.assign(0.0, reversed(make_requests(3)), make_table(0))
    assert [decision.request_id for decision in decisions] == ["r0", "r1", "r2"]


def test_the_shortest_queue_rejects_early_only_if_it_may():
    late, table = StrategyParameters(early_rejection=EarlyRejection.REJECT), make_table(900_000, 800_000)
    for state in list(table.list_loads()):
        for _ in range(200):
            table.observe_iteration(state.engine_id, IterationShape(prefill_tokens=512, num_chunks=1), 0.06)
        table.report(state.engine_id, state.load, 0.0)
    (decision,) = PLACEMENTS["shortest_queue"](late, random.Random(0)).assign(0.0, make_requests(1), table)
    assert isinstance(decision, Reject)
    assert decision.retry_after_s > 1.0


@pytest.mark.parametrize("name", ["round_robin", "least_work", "shortest_queue"])
def test_excluded_engines_are_avoided_and_no_engine_is_a_hold(name):
    table = make_table(0, 0)
    assert place(name, table, make_requests(2, excluded=frozenset({EngineId("e0")}))) == ["e1", "e1"]
    policy = PLACEMENTS[name](StrategyParameters(), random.Random(0))
    (decision,) = policy.assign(0.0, make_requests(1), make_table(0, chunk=0))
    assert decision.reason == ("room" if name == "shortest_queue" else "no_engine")
    assert isinstance(policy.assign(0.0, make_requests(1), EngineTable())[0], Hold)


@pytest.mark.parametrize("name", ["round_robin", "least_work", "shortest_queue"])
def test_placements_are_recorded_until_a_report_includes_them(name):
    table = make_table(0)
    place(name, table, make_requests(2))
    assert table[EngineId("e0")].queued_prefill_tokens == 200


def test_variants_of_a_strategy():
    base = get_strategy("taichi")
    variant = base.vary(placement="round_robin", flows=False)
    assert (variant.placement, variant.has_flow) == ("round_robin", False)
    assert base.vary() == base
    with pytest.raises(ValueError, match="placement 'best' is unknown; known are length_aware"):
        base.vary(placement="best")
    with pytest.raises(ValueError, match="has no flow to switch on"):
        get_strategy("aggregated").vary(flows=True)


def test_cached_tokens_make_up_for_a_longer_queue():
    requests = make_requests(1, cached_tokens={EngineId("e1"): 90})
    assert place("shortest_queue", make_table(0, 90), requests) == ["e1"]
    assert place("shortest_queue", make_table(0, 90_000), requests) == ["e0"]


def test_another_placement_leaves_of_ecoserve_engines_that_compute_prompts_first():
    """The baseline of its paper: nothing waits at the router for saved TPOT, and prompts go round."""
    slo = Slo(ttft_s=2.0, tpot_s=0.06)
    arrivals = [Arrival(at_s=0.3 * number, prompt_tokens=900, output_tokens=4, slo=slo) for number in range(9)]
    prefilled = {}
    for placement in (None, "round_robin"):
        strategy = get_strategy("ecoserve").vary(placement=placement)
        cell = Cell(engines=make_engines(((3, 2048),), blocks=4000), strategy=strategy)
        timeline = Timeline()
        assert Simulation(cell, arrivals, timeline).run()
        assert not any(one.prefill_tokens and one.num_decodes for one in timeline.iterations)
        engines = [one.engine_id for one in timeline.iterations if one.prefill_tokens]
        prefilled[placement] = [engines.count(engine.engine_id) for engine in cell.engines]
    assert prefilled == {None: [9, 0, 0], "round_robin": [3, 3, 3]}
