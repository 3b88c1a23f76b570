"""Whole runs of engines that keep KV in their host's memory: what is found, what it costs, and that nothing is lost."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sim_prefix_reuse import HASH_BLOCK_TOKENS, count_hits, estimate, make_prompt, share_prefixes
from test_simulation import SLO, STRATEGIES, cluster_events, make_arrivals, make_engines, run

from sluice_core.latency.transfer import LinkSpeed
from sluice_core.sim.requests import RequestState
from sluice_core.sim.run_summary import summarize
from sluice_core.sim.sim_setup import AddEngineEvent, Arrival, Cell, ConfigureEvent, FailEvent, SimOptions, TransferLink
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters

INSTANT = 1e30  # bytes per second
BLOCK_BYTES = 196_608 * 16
# Engines that select prompts themselves are refused.
WITH_HOST = [name for name in STRATEGIES if not name.startswith(("sluice", "flowprefill"))]


def make_host_cell(shape=((1, 200),), *, blocks=24, host=400, bytes_per_s=INSTANT, options=None, **changes):
    engines = [
        replace(engine, host_kv_blocks=host, host_bytes_per_s=bytes_per_s)
        for engine in make_engines(shape, blocks=blocks)
    ]
    options = {"hash_block_tokens": HASH_BLOCK_TOKENS, **(options or {})}
    return Cell(engines=engines, strategy=get_strategy("aggregated"), options=SimOptions(**options), **changes)


def count_host_hits(simulation):
    return [engine.host.num_hit_tokens for engine in simulation.engines]


def list_ends(simulation):
    return [(request.first_token_s, request.last_token_s, request.num_moves) for request in simulation.requests]


EVICTED = [make_prompt(0.0, 1, 2, 3, prompt_tokens=140), make_prompt(5.0, *range(11, 18), prompt_tokens=330)]


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_what_was_evicted_is_loaded_and_the_rest_computed(ahead):
    """The second prompt takes 21 of 24 blocks; of the first one's 8 full blocks the host has all."""
    arrivals = [*EVICTED, make_prompt(10.0, 1, 2, 3, prompt_tokens=140)]
    simulation = run(make_host_cell(bytes_per_s=BLOCK_BYTES * 100.0, options={"schedules_ahead": ahead}), arrivals)
    in_gpu = count_hits(simulation)[0] // 16
    assert in_gpu in {3, 4}
    assert count_host_hits(simulation) == [(8 - in_gpu) * 16]
    compute_s = estimate(12, 1, 12, 12 * (128 + 6), 0, 0)
    assert simulation.requests[2].ttft_s == pytest.approx((8 - in_gpu) / 100.0 + compute_s, abs=1e-9)
    summary = summarize(simulation)
    assert (summary.num_hit_tokens, summary.num_host_hit_tokens) == (in_gpu * 16, (8 - in_gpu) * 16)


def test_a_slower_link_delays_the_first_token_by_bytes_over_bandwidth():
    arrivals = [*EVICTED, make_prompt(20.0, 1, 2, 3, prompt_tokens=140)]
    fast, slow = (
        run(make_host_cell(bytes_per_s=speed), arrivals).requests[2].ttft_s for speed in (INSTANT, BLOCK_BYTES * 2.0)
    )
    num_loaded = (slow - fast) * 2.0
    assert num_loaded == pytest.approx(round(num_loaded), abs=1e-6)
    assert round(num_loaded) in {4, 5}


def test_a_whole_prompt_is_loaded_and_its_last_token_computed_anew():
    arrivals = [make_prompt(0.0, 1, 2, 3), EVICTED[1], make_prompt(10.0, 1, 2, 3)]
    simulation = run(make_host_cell(), arrivals)
    assert simulation.requests[2].ttft_s == pytest.approx(estimate(1, 1, 1, 143.5, 0, 0), abs=1e-9)
    assert count_hits(simulation)[0] + count_host_hits(simulation)[0] == 143


def test_those_behind_go_ahead_while_a_prompt_loads():
    arrivals = [*EVICTED, make_prompt(10.0, 1, 2, 3, prompt_tokens=140), make_prompt(10.1, 90, prompt_tokens=40)]
    simulation = run(make_host_cell(bytes_per_s=BLOCK_BYTES * 1.0), arrivals)
    _, _, loading, other = simulation.requests
    assert other.ttft_s == pytest.approx(estimate(40, 1, 40, 40 * 20, 0, 0), abs=1e-9)
    assert loading.first_token_s > 14.0 > other.first_token_s


def test_what_another_request_loads_is_found_when_it_is_there():
    """The second of them waits, loads nothing itself, and finds all in the engine's own cache."""
    arrivals = [*EVICTED, *(make_prompt(at_s, 1, 2, 3, prompt_tokens=140) for at_s in (10.0, 10.1))]
    simulation = run(make_host_cell(bytes_per_s=BLOCK_BYTES * 1.0), arrivals)
    _, _, first, second = simulation.requests
    (engine,) = simulation.engines
    assert engine.host.num_loaded_blocks * 16 == engine.host.num_hit_tokens
    assert first.first_token_s == second.first_token_s
    assert count_hits(simulation)[0] == 128 - engine.host.num_hit_tokens + 128


def test_a_prompt_waits_for_the_copy_of_its_beginning_to_the_host():
    """The copy of the first prompt takes 8 s; meanwhile the second one has taken its blocks."""
    arrivals = [make_prompt(0.0, 1, 2, 3, prompt_tokens=140), replace(EVICTED[1], at_s=1.0)]
    arrivals.append(make_prompt(2.0, 1, 2, 3, prompt_tokens=140))
    simulation = run(make_host_cell(bytes_per_s=BLOCK_BYTES * 1.0), arrivals)
    assert simulation.requests[2].first_token_s > 8.0
    assert count_host_hits(simulation)[0] > 0


def test_a_load_waits_until_the_whole_prompt_fits():
    """A decode holds most blocks: what the host has of the prompt is loaded when it has ended."""
    arrivals = [
        *EVICTED,
        Arrival(at_s=10.0, prompt_tokens=250, output_tokens=30, slo=SLO),
        make_prompt(10.5, 1, 2, 3, prompt_tokens=140),
    ]
    simulation = run(make_host_cell(), arrivals)
    _, _, decode, prompt = simulation.requests
    assert prompt.first_token_s > decode.last_token_s
    assert count_host_hits(simulation)[0] > 0


@pytest.mark.parametrize("name", WITH_HOST)
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_a_host_without_room_changes_nothing(name, ahead):
    strategy, shape = STRATEGIES[name]
    arrivals = share_prefixes(random.Random(3), make_arrivals(random.Random(3), number=80, rate=10.0))
    options = SimOptions(hash_block_tokens=HASH_BLOCK_TOKENS, prefix_report_s=0.05, schedules_ahead=ahead)
    ends = []
    for host in (None, 0):
        engines = [replace(engine, host_kv_blocks=host) for engine in make_engines(shape, blocks=60)]
        simulation = run(Cell(engines=engines, strategy=strategy, options=options), arrivals)
        ends.append((list_ends(simulation), count_hits(simulation), simulation.num_moves))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_endless_host_behind_an_instant_link_finds_what_an_unbounded_cache_finds(ahead, seed):
    """One prompt after the other; of whole blocks the host has one more, so no prompt ends with a block here."""
    rng = random.Random(seed)
    arrivals = [
        replace(arrival, at_s=20.0 * number, prompt_tokens=arrival.prompt_tokens - (arrival.prompt_tokens % 16 == 0))
        for number, arrival in enumerate(make_arrivals(rng, number=40, rate=1.0))
        if arrival.prompt_tokens > 1
    ]
    arrivals = share_prefixes(rng, arrivals)
    arrivals = [
        replace(arrival, prompt_tokens=max(1, arrival.prompt_tokens - (arrival.prompt_tokens % 16 == 0)))
        for arrival in arrivals
    ]
    options = {"schedules_ahead": ahead}
    most = 2 + max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals) // 16
    hosted = run(make_host_cell(blocks=most, host=10**6, options=options), arrivals)
    unbounded = run(make_host_cell(blocks=10**5, host=None, options=options), arrivals)
    assert count_hits(hosted)[0] + count_host_hits(hosted)[0] == count_hits(unbounded)[0]
    if count_hits(unbounded)[0]:
        assert sum(r.ttft_s for r in hosted.requests) == pytest.approx(sum(r.ttft_s for r in unbounded.requests))


@pytest.mark.parametrize("name", WITH_HOST)
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@settings(max_examples=12, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), blocks=st.sampled_from((30, 40, 60, 200)))
def test_no_block_is_lost_whatever_happens_to_the_cluster(name, ahead, data, seed, blocks):
    """``run`` asserts that references, cached and free blocks add up, on engines and hosts."""
    strategy, shape = STRATEGIES[name]
    rng = random.Random(seed)
    link = TransferLink(speed=LinkSpeed(bytes_per_s=1e8))
    engines = [
        replace(
            engine,
            host_kv_blocks=rng.choice((0, 5, 40, 200, 5000)),
            host_bytes_per_s=BLOCK_BYTES * rng.choice((3.0, 50.0, 1e4, 1e20)),
            max_num_seqs=rng.choice((3, 64)),
        )
        for engine in make_engines(shape, blocks=blocks, link=link)
    ]
    options = SimOptions(
        schedules_ahead=ahead,
        hash_block_tokens=data.draw(st.sampled_from((16, 48))),
        prefix_report_s=data.draw(st.sampled_from((None, 0.0, 0.2))),
        knows_host_kv=data.draw(st.booleans()),
    )
    cell = Cell(
        engines=engines,
        strategy=strategy,
        parameters=StrategyParameters(watermark=data.draw(st.sampled_from((0.5, 0.95)))),
        options=options,
        events=data.draw(cluster_events(engines)),
        seed=seed,
    )
    arrivals = make_arrivals(rng, number=60, rate=10.0)
    simulation = run(cell, share_prefixes(rng, arrivals, hash_block_tokens=options.hash_block_tokens))
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)
    for engine in simulation.engines:
        if not engine.is_dead:
            assert engine.count_running() == 0


def test_what_is_compared_loads_moves_and_preempts():
    strategy, shape = STRATEGIES["taichi"]
    num_host_hits = num_preemptions = num_refused = 0
    for seed in range(4):
        rng = random.Random(seed)
        engines = [
            replace(engine, host_kv_blocks=20 * seed, host_bytes_per_s=BLOCK_BYTES * 200.0)
            for engine in make_engines(shape, blocks=40)
        ]
        options = SimOptions(hash_block_tokens=HASH_BLOCK_TOKENS, schedules_ahead=seed % 2 == 1)
        cell = Cell(
            engines=engines,
            strategy=strategy,
            parameters=StrategyParameters(watermark=0.5),
            options=options,
            seed=seed,
        )
        simulation = run(cell, share_prefixes(rng, make_arrivals(rng, rate=25.0, number=100)))
        num_host_hits += sum(count_host_hits(simulation))
        num_preemptions += sum(request.num_preemptions for request in simulation.requests)
        num_refused += sum(engine.host.num_refused for engine in simulation.engines)
        assert any(simulation.num_moves.values())
    assert num_host_hits > 1000
    assert num_preemptions > 0
    assert num_refused > 0


def test_a_moved_request_is_offered_to_the_host_of_its_target():
    """As vLLM does with every request that it schedules; nothing was computed there."""
    cell = replace(make_host_cell(((1, 2048), (1, 0)), blocks=100), strategy=get_strategy("disaggregated"))
    simulation = run(cell, [make_prompt(0.0, 1, 2, 3, output_tokens=5)])
    assert [engine.host.num_stored_blocks for engine in simulation.engines] == [9, 9]
    assert [engine.counters.num_prefill_tokens for engine in simulation.engines] == [144, 0]


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_an_engine_that_dies_while_it_loads_loses_nothing(ahead):
    cell = make_host_cell(((2, 200),), bytes_per_s=BLOCK_BYTES * 1.0, options={"schedules_ahead": ahead})
    first, second = cell.engines
    events = (AddEngineEvent(at_s=10.5, setup=second), FailEvent(at_s=11.0, engine_id=first.engine_id))
    arrivals = [*EVICTED, make_prompt(10.0, 1, 2, 3, prompt_tokens=140)]
    simulation = run(replace(cell, engines=[first], events=events), arrivals)
    assert [request.state for request in simulation.requests] == [RequestState.FINISHED] * 3
    dead, survivor = simulation.engines
    assert dead.host.num_loaded_blocks > 0
    assert dead.counters.num_lost_prefill_tokens == 0
    assert survivor.counters.num_prefill_tokens == 140


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_a_prompt_that_has_loaded_runs_where_no_new_one_may_begin(ahead):
    """Its engine takes no prompts from 11 s on; its load ends later."""
    cell = make_host_cell(((2, 200),), bytes_per_s=BLOCK_BYTES * 1.0, options={"schedules_ahead": ahead})
    engine = cell.engines[0]
    events = (ConfigureEvent(at_s=11.0, engine_id=engine.engine_id, role=engine.role, chunk_size_tokens=0),)
    arrivals = [*EVICTED, make_prompt(10.0, 1, 2, 3, prompt_tokens=140)]
    simulation = run(replace(cell, engines=[engine], events=events), arrivals)
    assert 14.0 < simulation.requests[2].first_token_s < 16.0


def test_the_router_may_know_what_hosts_have():
    """Each prompt comes again when it has left the GPU: with knowledge it goes where the host has it."""
    rng = random.Random(1)
    arrivals = [
        make_prompt(10.0 * turn + number, *range(10 * number, 10 * number + 3), prompt_tokens=140)
        for turn in range(4)
        for number in rng.sample(range(1, 10), 9)
    ]
    arrivals.sort(key=lambda arrival: arrival.at_s)
    hits = {}
    for knows in (False, True):
        cell = make_host_cell(((3, 400),), options={"prefix_report_s": 0.0, "knows_host_kv": knows})
        simulation = run(cell, arrivals)
        hits[knows] = sum(count_hits(simulation)) + sum(count_host_hits(simulation))
    assert hits[True] == 27 * 128
    assert hits[False] < hits[True]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from((40, 60)), host=st.sampled_from((5, 40, 1000)))
def test_the_router_knows_what_is_on_gpu_or_host_exactly(seed, blocks, host):
    rng = random.Random(seed)
    options = {"prefix_report_s": 0.0, "knows_host_kv": True}
    cell = make_host_cell(((3, 400),), blocks=blocks, host=host, options=options)
    simulation = run(cell, share_prefixes(rng, make_arrivals(rng, rate=10.0)))
    index = simulation._prefixes._index
    simulation._prefixes.find(simulation.requests[0], math.inf)
    for engine in simulation.engines:
        engine.host.settle(math.inf)
        changes = engine.take_cache_changes(with_host=True)
        index.update(engine.engine_id, changes.stored, changes.removed)
        keys = {key for key in [*engine.cache._entry_of, *engine.host.list_keys()] if key >= 0}
        assert index._blocks.get(engine.engine_id, set()) == keys


@pytest.mark.parametrize("changes", [{"host_kv_blocks": -1}, {"host_kv_blocks": 1, "host_bytes_per_s": 0.0}])
def test_less_than_no_memory_and_no_link_are_refused(changes):
    with pytest.raises(ValueError, match="KV blocks in its host's memory at"):
        replace(make_engines(((1, 200),))[0], **changes)


@pytest.mark.parametrize(("name", "reuses"), [("aggregated", False), ("sluice", True), ("flowprefill", True)])
def test_a_host_without_prefix_reuse_or_beside_selected_prompts_is_refused(name, reuses):
    cell = replace(make_host_cell(), strategy=get_strategy(name))
    cell = replace(cell, options=SimOptions(hash_block_tokens=16 if reuses else None))
    with pytest.raises(ValueError, match="this needs prefix reuse, and a strategy"):
        Simulation(cell, [])
