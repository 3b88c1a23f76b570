"""Prompts that two simulated engines compute: who computes what and when, and nothing lost whatever happens."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_dynaserve import DYNASERVE, make_cell, make_prompts
from test_sim_prefix_reuse import share_prefixes
from test_simulation import make_arrivals, make_engines, run

from sluice_core.kv_copy_rules import SHORT_TAIL_TOKENS
from sluice_core.latency.transfer import LinkSpeed
from sluice_core.records import EngineId, MoveCause, Role
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import (
    AddEngineEvent,
    Cell,
    ConfigureEvent,
    FailEvent,
    LengthsKnown,
    RouterSetup,
    SimOptions,
    TransferLink,
)
from sluice_core.sim.simulation import Simulation, Steering
from sluice_core.strategies.dynaserve import DynaServeRules

BLOCK_SIZE = 16
MODES = [
    pytest.param({"schedules_ahead": is_ahead, "hash_block_tokens": hashed}, id=f"{name}{' reuses' * bool(hashed)}")
    for is_ahead, name in ((False, "in step"), (True, "ahead"))
    for hashed in (None, BLOCK_SIZE)
]


def cut_at(token, **rules):
    """Cut at a fixed token; the first engine has all first parts."""
    rules = {"cuts_prompts": True, "is_bound_to_sides": True} | rules
    return replace(DYNASERVE, policies=DynaServeRules(fixed_token=token, **rules))


def hash_prompt(prompt_tokens, name):
    return tuple(name * 10_000 + position for position in range(-(-prompt_tokens // BLOCK_SIZE)))


def count_prefill_tokens(simulation):
    return [engine.counters.num_prefill_tokens for engine in simulation.engines]


@pytest.mark.parametrize("mode", MODES)
def test_the_second_engine_computes_the_rest_of_a_prompt_that_is_cut(mode):
    cell = make_cell(blocks=2000, output_lengths=LengthsKnown.EXACT, **mode)
    simulation = run(
        replace(cell, strategy=replace(DYNASERVE, policies=DynaServeRules(cuts_prompts=True))), make_prompts(60)
    )
    assert simulation.num_cut >= 20
    # A tail may be computed twice, and what a block holds of a beginning that goes on where it is.
    again = sum(count_prefill_tokens(simulation)) - 60 * 1200
    assert 0 <= again <= simulation.num_cut * SHORT_TAIL_TOKENS + simulation.num_whole * BLOCK_SIZE
    assert sum(engine.counters.num_output_tokens for engine in simulation.engines) == 60 * 20
    assert simulation.num_moves[MoveCause.SPLIT] >= simulation.num_cut


def test_the_product_s_engines_are_cut_between():
    """Without another rule, as the product's engines say that they can."""
    simulation = run(make_cell(blocks=2000, schedules_ahead=True), make_prompts(60))
    assert simulation.num_cut >= 10


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_at_a_fixed_token_gives_each_engine_its_part(mode):
    cell = replace(make_cell(blocks=4000, **mode), strategy=cut_at(500))
    simulation = run(cell, make_prompts(30, every_s=0.3))
    assert (simulation.num_cut, simulation.num_whole) == (30, 0)
    first, second = count_prefill_tokens(simulation)
    assert first == 30 * 500
    # Ahead, the last four tokens, which fill no block, are computed again rather than pulled where parts come before.
    assert second in ({30 * 700, 30 * 704} if mode["schedules_ahead"] else {30 * 700})
    assert [engine.counters.num_output_tokens for engine in simulation.engines] == [0, 30 * 20]


@pytest.mark.parametrize("mode", MODES)
def test_kv_in_parts_is_there_sooner(mode):
    """One request alone: the last chunk's KV, or all of it, is what the second engine waits for."""
    link = TransferLink(speed=LinkSpeed(bytes_per_s=1e9, latency_s=0.0))
    engines = [replace(engine, chunk_size_tokens=256, link=link) for engine in make_engines(((2, 2048),), blocks=4000)]
    ends_s = {}
    for sends_parts in (True, False):
        options = SimOptions(sends_parts=sends_parts, **mode)
        simulation = run(Cell(engines=engines, strategy=cut_at(1024), options=options), make_prompts(1))
        ends_s[sends_parts] = simulation.requests[0].first_token_s
        waited_tokens = simulation.links.transfer_s * 1e9 / engines[0].kv_bytes_per_token
        assert waited_tokens < 900 if sends_parts else waited_tokens == pytest.approx(1024)
        assert sum(count_prefill_tokens(simulation)) == 1200
    # 256 tokens take longer on this link than to compute, so that parts wait for one another: 0.05 s each.
    assert ends_s[False] - ends_s[True] > 0.03


@pytest.mark.parametrize("mode", MODES)
def test_without_room_on_the_second_engine_the_first_computes_all(mode):
    engines = make_engines(((2, 2048),), blocks=4000)
    engines[1] = replace(engines[1], kv_blocks_total=90)  # for one prompt
    cell = Cell(engines=engines, strategy=cut_at(500), options=SimOptions(**mode))
    simulation = run(cell, make_prompts(8, every_s=0.0))
    assert simulation.num_cut + simulation.num_whole == 8
    assert simulation.num_whole > 0
    first, second = count_prefill_tokens(simulation)
    # What fills no block of the beginning is computed again.
    assert first == 8 * 500 + simulation.num_whole * (700 + 500 % BLOCK_SIZE)
    assert 0 < second <= simulation.num_cut * (700 + SHORT_TAIL_TOKENS)


@pytest.mark.parametrize("mode", MODES)
def test_room_is_asked_for_when_the_first_part_begins(mode):
    """While prompts wait for their turn on the first engine, the second one keeps nothing for them."""
    engines = [replace(engine, chunk_size_tokens=256) for engine in make_engines(((2, 2048),), blocks=4000)]
    seen = []

    def look(simulation):
        first, second = simulation.engines
        seen.append((first.prefills.num_queued, second.granted_blocks))
        return ()

    cell = Cell(engines=engines, strategy=cut_at(1000), options=SimOptions(**mode))
    simulation = Simulation(cell, make_prompts(10, every_s=0.0), steering=Steering(interval_s=0.01, steer=look))
    assert simulation.run()
    assert simulation.num_cut == 10
    of_a_prompt = -(-1201 // BLOCK_SIZE)
    assert max(waiting for waiting, _ in seen) == 10
    assert of_a_prompt <= max(granted for _, granted in seen) <= 3 * of_a_prompt


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_either_engine_has_cached_is_not_computed_or_sent_again(is_ahead):
    """The same prompt three times: each engine finds its part, the second one also what came over the link."""
    options = {"schedules_ahead": is_ahead, "hash_block_tokens": BLOCK_SIZE}
    cell = replace(make_cell(blocks=4000, **options), strategy=cut_at(800))
    arrivals = [
        replace(arrival, block_hashes=hash_prompt(1200, 1)) for arrival in make_prompts(3, prompt=1200, every_s=5.0)
    ]
    simulation = run(cell, arrivals)
    assert simulation.num_cut == 3
    first, second = count_prefill_tokens(simulation)
    # The last token of a part is computed, for its logits: with it, all of its block.
    assert first == 800 + 2 * BLOCK_SIZE
    assert second == 400 + 2 * BLOCK_SIZE
    assert [engine.cache.num_hit_tokens for engine in simulation.engines] == [
        2 * (800 - BLOCK_SIZE),
        2 * (400 - BLOCK_SIZE),
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("at_s", [0.02, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.6])
def test_death_of_either_engine_at_any_moment_loses_nothing(at_s, victim, mode):
    engines = [replace(engine, chunk_size_tokens=256) for engine in make_engines(((3, 2048),), blocks=4000)]
    events = (FailEvent(at_s=at_s, engine_id=engines[victim].engine_id),)
    options = SimOptions(message_s=0.01, **mode)
    simulation = run(Cell(engines=engines, strategy=cut_at(800), options=options, events=events), make_prompts(12))
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)
    assert simulation.num_cut > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_that_drains_gets_no_second_part_and_gives_whole_prompts_back(victim, mode):
    engines = [replace(engine, chunk_size_tokens=256) for engine in make_engines(((2, 2048),), blocks=4000)]
    drain = ConfigureEvent(
        at_s=0.2, engine_id=engines[victim].engine_id, role=Role.PREFILL_HEAVY, chunk_size_tokens=256, is_draining=True
    )
    cell = Cell(engines=engines, strategy=cut_at(800), options=SimOptions(**mode), events=(drain,))
    simulation = run(cell, make_prompts(12, every_s=0.01))
    assert simulation.num_cut < 12
    other = simulation.engines[1 - victim].counters
    assert other.num_output_tokens > 6 * 20


@given(
    seed=st.integers(0, 2**32),
    blocks=st.sampled_from([30, 60, 160]),
    sends_parts=st.booleans(),
    is_ahead=st.booleans(),
    reuses=st.booleans(),
)
# A grant takes blocks of a request that is preempted at the same moment.
@example(seed=356990, blocks=60, sends_parts=False, is_ahead=True, reuses=False)
@settings(max_examples=60, deadline=None)
def test_nothing_of_cut_prompts_is_lost(seed, blocks, sends_parts, is_ahead, reuses):
    """``Simulation.check`` counts tokens, blocks, seats and requests at the end of each run."""
    rng = random.Random(seed)
    cell = make_cell(
        3,
        blocks=blocks,
        seed=seed,
        sends_parts=sends_parts,
        schedules_ahead=is_ahead,
        copies_kv=rng.random() < 0.7,
        message_s=rng.choice((0.0, 0.0037, 0.2)),
        report_s=rng.choice((0.0, 0.0, 0.05)),
        hash_block_tokens=48 if reuses else None,
        prefix_report_s=rng.choice((None, 0.05)) if reuses else None,
    )
    link = TransferLink(speed=LinkSpeed(bytes_per_s=rng.choice((1e8, 1e9, 1e11))))
    engines = [
        replace(engine, link=link, chunk_size_tokens=rng.choice((32, 2048)), max_num_seqs=rng.choice((3, 64)))
        for engine in cell.engines
    ]
    first, second, _ = (engine.engine_id for engine in engines)
    chunk = engines[0].chunk_size_tokens
    events = (
        ConfigureEvent(
            at_s=1.0,
            engine_id=first,
            role=Role.PREFILL_HEAVY,
            chunk_size_tokens=0 if rng.random() < 0.5 else chunk,
            is_draining=rng.random() < 0.5,
        ),
        ConfigureEvent(at_s=1.4, engine_id=first, role=Role.PREFILL_HEAVY, chunk_size_tokens=chunk),
        FailEvent(at_s=rng.uniform(1.5, 4.0), engine_id=rng.choice((first, second))),
        AddEngineEvent(at_s=3.0, setup=replace(engines[1], engine_id=EngineId("late"))),
    )
    rules = DynaServeRules(cuts_prompts=True, fixed_token=rng.choice((0, 0, 40, 150)))
    arrivals = make_arrivals(rng, number=50, rate=15.0)
    if reuses:
        arrivals = share_prefixes(rng, arrivals, hash_block_tokens=48)
    routers = rng.choice(((RouterSetup(),), (RouterSetup(), RouterSetup(arrival_share=2.0, latency_factor=1.2))))
    strategy = replace(DYNASERVE, policies=rules)
    run(replace(cell, engines=engines, strategy=strategy, events=events, routers=routers), arrivals)
