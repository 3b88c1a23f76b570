"""Prompts that begin alike share KV blocks: against the plain implementation, and what always holds."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulation import (
    A100_14B,
    SLO,
    STRATEGIES,
    NaiveSimulation,
    assert_equal_to_naive,
    cluster_events,
    make_arrivals,
    make_engines,
    run,
)

from sluice_core.latency.transfer import LinkSpeed
from sluice_core.records import MoveCause, Slo
from sluice_core.sim.engine.prefix_cache import PrefixCache
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import (
    AddEngineEvent,
    Arrival,
    Cell,
    FailEvent,
    NoGrant,
    SimOptions,
    TransferLink,
    TtftEnd,
)
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters

HASH_BLOCK_TOKENS = 48  # three blocks
REUSE = SimOptions(hash_block_tokens=HASH_BLOCK_TOKENS)
estimate = A100_14B.estimate_iteration_s


def share_prefixes(rng, arrivals, *, hash_block_tokens=HASH_BLOCK_TOKENS, share=0.7):
    """Let most prompts begin as an earlier one does, or be the same."""
    shared, next_hash = [], 0
    for arrival in arrivals:
        num_hashes = -(-arrival.prompt_tokens // hash_block_tokens)
        hashes = list(rng.choice(shared).block_hashes) if shared and rng.random() < share else []
        hashes = hashes[: min(rng.randint(0, 8), arrival.prompt_tokens // hash_block_tokens)]
        while len(hashes) < num_hashes:
            next_hash += 1
            hashes.append(next_hash)
        shared.append(replace(arrival, block_hashes=tuple(hashes)))
        if rng.random() < 0.2:
            shared[-1] = replace(rng.choice(shared), at_s=arrival.at_s)
    return shared


def make_prompt(at_s, *hashes, prompt_tokens=None, output_tokens=1):
    prompt_tokens = HASH_BLOCK_TOKENS * len(hashes) if prompt_tokens is None else prompt_tokens
    return Arrival(at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens, slo=SLO, block_hashes=hashes)


def make_cell(shape=((1, 200),), *, blocks=60, **changes):
    return Cell(
        engines=make_engines(shape, blocks=blocks), strategy=get_strategy("aggregated"), options=REUSE, **changes
    )


def count_hits(simulation):
    return [engine.cache.num_hit_tokens for engine in simulation.engines]


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rate=st.sampled_from((2.0, 8.0, 25.0)),
    blocks=st.sampled_from((26, 60, 400)),
    hash_block_tokens=st.sampled_from((16, 48, 50)),
    no_grant=st.sampled_from(NoGrant),
    ttft_end=st.sampled_from(TtftEnd),
)
def test_the_fast_simulator_agrees_with_the_plain_one(name, seed, rate, blocks, hash_block_tokens, no_grant, ttft_end):
    rng = random.Random(seed)
    strategy, shape = STRATEGIES[name]
    arrivals = make_arrivals(rng, rate=rate, slos=(SLO, Slo(ttft_s=0.4, tpot_s=0.03)), priorities=(0, 0, 1))
    arrivals = share_prefixes(rng, arrivals, hash_block_tokens=hash_block_tokens)
    cell = Cell(
        engines=make_engines(
            shape, blocks=blocks, link=TransferLink(speed=LinkSpeed(bytes_per_s=rng.choice((1e8, 150e9))))
        ),
        strategy=strategy,
        parameters=StrategyParameters(watermark=rng.choice((0.5, 0.95))),
        options=SimOptions(no_grant=no_grant, ttft_end=ttft_end, hash_block_tokens=hash_block_tokens),
        seed=seed,
    )
    fast = assert_equal_to_naive(cell, arrivals)
    naive = NaiveSimulation(cell, arrivals).run()
    assert count_hits(fast) == [engine.pool.hits for engine in naive.engines.values()]
    assert [engine.cache.num_queried_tokens for engine in fast.engines] == [
        engine.pool.queries for engine in naive.engines.values()
    ]


def test_hits_moves_and_preemptions_are_among_what_is_compared():
    strategy, shape = STRATEGIES["taichi"]
    seen, num_preemptions, num_hits = set(), 0, 0
    for seed in range(4):
        rng = random.Random(seed)
        cell = Cell(
            engines=make_engines(shape, blocks=40),
            strategy=strategy,
            parameters=StrategyParameters(watermark=0.5),
            options=REUSE,
            seed=seed,
        )
        fast = assert_equal_to_naive(cell, share_prefixes(rng, make_arrivals(rng, rate=25.0, number=100)))
        seen |= {cause for cause, number in fast.num_moves.items() if number}
        num_preemptions += sum(request.num_preemptions for request in fast.requests)
        num_hits += sum(count_hits(fast))
    assert seen == {MoveCause.PREFILL_DONE, MoveCause.DEGRADE, MoveCause.BACKFLOW}
    assert num_preemptions > 0
    assert num_hits > 5000


def test_without_common_prefixes_and_preemptions_reuse_changes_nothing():
    strategy, shape = STRATEGIES["disaggregated"]
    arrivals = make_arrivals(random.Random(4), number=80)
    ends = []
    for options in (SimOptions(), REUSE):
        simulation = run(Cell(engines=make_engines(shape, blocks=400), strategy=strategy, options=options), arrivals)
        ends.append([(request.first_token_s, request.last_token_s) for request in simulation.requests])
    assert ends[0] == ends[1]


def test_a_prompt_computes_what_no_earlier_one_had():
    """The whole trace: 96 of 144 tokens are found, and attention reads them."""
    arrivals = [make_prompt(0.0, 1, 2), make_prompt(5.0, 1, 2, 3)]
    simulation = run(make_cell(), arrivals)
    assert simulation.requests[1].ttft_s == pytest.approx(estimate(48, 1, 48, 48 * (96 + 24), 0, 0), abs=1e-12)
    assert count_hits(simulation) == [96]


def test_the_last_token_of_a_prompt_is_always_computed():
    """So the last block of a prompt that is there as a whole is computed again."""
    simulation = run(make_cell(), [make_prompt(0.0, 1), make_prompt(5.0, 1)])
    assert simulation.requests[1].ttft_s == pytest.approx(estimate(16, 1, 16, 16 * (32 + 8), 0, 0), abs=1e-12)


def test_a_prompt_finds_the_blocks_that_its_own_iteration_computes():
    """Both come during the first iteration, and share the second one: 100 tokens of one, 150 - 96 of the other."""
    arrivals = [
        make_prompt(0.0, 9, prompt_tokens=40),
        make_prompt(0.001, 1, 2, 3, prompt_tokens=100),
        make_prompt(0.001, 1, 2, 3, 4, prompt_tokens=150),
    ]
    simulation = run(make_cell(), arrivals)
    work = 100 * 50 + 54 * (96 + 27)
    end_s = estimate(40, 1, 40, 40 * 20, 0, 0) + estimate(154, 2, 154, work, 0, 0)
    assert [request.first_token_s for request in simulation.requests[1:]] == pytest.approx([end_s, end_s], abs=1e-12)


def test_shared_blocks_are_used_once():
    """Ten blocks of the first, of which the others share six, and one more of each."""
    prompts = [make_prompt(0.0, 1, 2, 3, prompt_tokens=144, output_tokens=9)]
    prompts += [make_prompt(0.1, 1, 2, 90 + number, prompt_tokens=100, output_tokens=9) for number in range(2)]
    simulation = run(make_cell(), prompts)
    assert count_hits(simulation) == [2 * 96]
    assert simulation.engines[0].counters.peak_blocks == 10 + 1 + 1


def test_the_router_knows_nothing_of_hits():
    """It holds a prompt until an engine has room for all of it, whatever the engine would find."""
    prompts = [make_prompt(0.0, 1, 2, 3, output_tokens=9), make_prompt(0.1, 1, 2, 3, output_tokens=9)]
    first, second = run(make_cell(blocks=13), prompts).requests
    assert second.first_token_s > first.last_token_s


def test_the_longest_unused_blocks_are_evicted_first_and_the_end_of_a_prompt_before_its_start():
    """Room for 24 blocks: the third prompt takes six, four of which are the first one's last."""
    arrivals = [
        make_prompt(0.0, 1, 2, 3),
        make_prompt(5.0, 11, 12, 13, 14),
        make_prompt(10.0, 21, 22),
        make_prompt(15.0, 1, 2, 3),
        make_prompt(20.0, 11, 12, 13, 14),
    ]
    simulation = run(make_cell(blocks=24), arrivals)
    (engine,) = simulation.engines
    # The first: 9 blocks, then 12, then 6 of which 3 blank; left of the first 6, computed again 3 blocks, which evict
    # three of the second; of that one 9 are left.
    assert count_hits(simulation) == [6 * 16 + 9 * 16]
    engine.cache.check_idle()


def test_of_equal_blocks_the_one_that_was_cached_first_is_found():
    """Three requests begin one prompt before any has scheduled its end; the duplicates of it are found in turn."""
    cache = PrefixCache(12, 4, 4)
    tables = [cache.open_table(index, 8, (1, 2), []) for index in range(3)]
    for table in tables:
        cache.extend(table, 8)
    order = [table.entries for table in tables]
    assert cache.find_cached_blocks(9, 8, (1, 2), 8) == order[0]
    for table in tables:
        cache.release(table)
    cache.take(6)  # of twelve: six were blank
    cache.take(2)
    assert cache.find_cached_blocks(9, 8, (1, 2), 8) == order[1]
    cache.take(2)
    assert cache.find_cached_blocks(9, 8, (1, 2), 8) == order[2]
    cache.take(1)
    assert cache.find_cached_blocks(9, 8, (1, 2), 8) == order[2][:1]
    cache.check()


def test_a_preempted_request_finds_its_own_blocks():
    """Two decodes in blocks for one and a half: the later one goes and recomputes little, with or without hashes."""
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=100, output_tokens=60, slo=SLO),
        Arrival(at_s=0.01, prompt_tokens=100, output_tokens=60, slo=SLO),
    ]
    recomputed = {}
    for options in (SimOptions(), REUSE):
        cell = Cell(engines=make_engines(((1, 200),), blocks=17), strategy=get_strategy("aggregated"), options=options)
        simulation = run(cell, arrivals)
        assert [request.num_preemptions for request in simulation.requests] == [0, 1]
        recomputed[options.hash_block_tokens] = simulation.engines[0].counters.num_prefill_tokens - 200
    assert 0 < recomputed[HASH_BLOCK_TOKENS] == recomputed[None] < 50


def test_a_move_leaves_out_what_its_target_still_has():
    """Two conversations of one prompt: the second move takes the one block that the first did not."""
    bytes_per_s = 196_608 * 1000.0  # 1000 tokens per second
    link = TransferLink(speed=LinkSpeed(bytes_per_s=bytes_per_s, latency_s=0.0))
    arrivals = [make_prompt(at_s, 1, 2, 3, output_tokens=2) for at_s in (0.0, 5.0)]
    cell = Cell(
        engines=make_engines(((1, 2048), (1, 0)), blocks=100, link=link),
        strategy=get_strategy("disaggregated"),
        options=REUSE,
    )
    first, second = run(cell, arrivals).requests
    decode_s = estimate(1, 0, 0, 0.0, 1, 145)
    assert first.tpot_s == pytest.approx(0.144 + decode_s, abs=1e-9)
    assert second.tpot_s == pytest.approx(0.0 + decode_s, abs=1e-9)


@pytest.mark.parametrize("name", ["taichi", "aggregated", "aggregated, least work", "disaggregated"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), blocks=st.sampled_from((40, 60, 200)))
def test_no_block_is_lost_whatever_happens_to_the_cluster(name, ahead, data, seed, blocks):
    """``run`` asserts that references, cached and free blocks add up."""
    strategy, shape = STRATEGIES[name]
    engines = make_engines(shape, blocks=blocks, link=TransferLink(speed=LinkSpeed(bytes_per_s=1e8)))
    cell = Cell(
        engines=engines,
        strategy=strategy,
        parameters=StrategyParameters(watermark=data.draw(st.sampled_from((0.5, 0.95)))),
        options=SimOptions(schedules_ahead=ahead, hash_block_tokens=data.draw(st.sampled_from((16, 48)))),
        events=data.draw(cluster_events(engines)),
        seed=seed,
    )
    rng = random.Random(seed)
    arrivals = make_arrivals(rng, number=60, rate=10.0)
    simulation = run(cell, share_prefixes(rng, arrivals, hash_block_tokens=cell.options.hash_block_tokens))
    assert all(request.state is RequestState.FINISHED for request in simulation.requests)


def test_the_cache_of_a_dead_engine_is_gone():
    arrivals = [make_prompt(0.0, 1, 2), make_prompt(5.0, 1, 2, 3)]
    cell = make_cell(((2, 200),), events=[FailEvent(at_s=3.0, engine_id=make_engines(((2, 200),))[0].engine_id)])
    simulation = run(cell, arrivals)
    survivor = simulation.engines[1]
    assert survivor.cache.num_hit_tokens in {0, 96}
    assert (survivor.cache.num_hit_tokens == 96) == (survivor.counters.num_prefill_tokens == 96 + 48)


def test_hashes_of_another_length_than_the_prompt_are_refused():
    with pytest.raises(ValueError, match="request 0 has 2 hashes of 48 tokens each for 40 prompt tokens, or 41 with"):
        Simulation(make_cell(), [make_prompt(0.0, 1, 2, prompt_tokens=40)])


def test_a_next_turn_finds_the_answer_whose_hashes_are_known():
    # 96 tokens of prompt and 49 of answer leave KV of 144; the last token of an answer has none.
    first = make_prompt(0.0, 1, 2, 3, 4, prompt_tokens=96, output_tokens=49)
    nameless = make_prompt(0.0, 1, 2, prompt_tokens=96, output_tokens=49)
    second = make_prompt(20.0, 1, 2, 3, 5)
    assert count_hits(run(make_cell(), [first, second])) == [144]
    assert count_hits(run(make_cell(), [nameless, second])) == [96]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from((60, 120, 400)), name=st.sampled_from(sorted(STRATEGIES)))
def test_conversations_agree_with_the_plain_simulator(seed, blocks, name):
    rng = random.Random(seed)
    strategy, shape = STRATEGIES[name]
    turns = []
    for conversation in range(12):
        tokens, at_s = 0, 3.0 * rng.random()
        for _ in range(rng.randint(1, 4)):
            prompt_tokens, output_tokens = tokens + rng.randint(1, 90), rng.randint(1, 60)
            tokens = prompt_tokens + output_tokens
            hashes = (conversation,) * -(-tokens // 16)
            turns.append(make_prompt(at_s, *hashes, prompt_tokens=prompt_tokens, output_tokens=output_tokens))
            at_s += 30.0  # an answer is found once it has ended
    options = SimOptions(hash_block_tokens=16)
    cell = Cell(engines=make_engines(shape, blocks=blocks), strategy=strategy, options=options, seed=seed)
    arrivals = sorted(turns, key=lambda turn: turn.at_s)
    fast = assert_equal_to_naive(cell, arrivals)
    naive = NaiveSimulation(cell, arrivals).run()
    assert count_hits(fast) == [engine.pool.hits for engine in naive.engines.values()]


def test_a_hash_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="a hash names 0 tokens"):
        SimOptions(hash_block_tokens=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_blocks_add_up_after_every_step(data):
    """Requests with one of a few prompts begin, compute chunks, decode and end in any order."""
    num_blocks = data.draw(st.integers(4, 24))
    cache = PrefixCache(num_blocks, 4, 8)
    tables, computed = [], {}
    num_used = 0
    for index in range(data.draw(st.integers(1, 25))):
        prompt_tokens = data.draw(st.integers(1, 40))
        hashes = tuple(data.draw(st.sampled_from((100, 200))) + n for n in range(-(-prompt_tokens // 8)))
        found = cache.find_cached_blocks(index, prompt_tokens, hashes, prompt_tokens - 1)
        need = -(-prompt_tokens // 4) - len(found) + cache.count_free(found)
        if need <= num_blocks - num_used:
            table = cache.open_table(index, prompt_tokens, hashes, found)
            cache.extend(table, prompt_tokens)
            num_used += need
            computed[index] = prompt_tokens
            tables.append(table)
        cache.check()
        while tables and (data.draw(st.booleans()) or num_used == num_blocks):
            table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            cache.cache_filled_blocks(table, computed[table.index])
            num_used -= cache.release(table)
            cache.check()
        assert num_used == num_blocks - cache.num_empty - cache.num_free_cached
    for table in tables:
        cache.release(table)
    cache.check_idle()


def make_aware_cell(report_s, **changes):
    return replace(make_cell(((3, 400),), **changes), options=replace(REUSE, prefix_report_s=report_s))


def test_a_prompt_goes_where_its_beginning_is_once_the_router_knows():
    """Without that the tie is broken by chance; with it the second prompt of each pair follows the first."""
    arrivals = [
        make_prompt(10.0 * turn + pair, *range(10 * pair, 10 * pair + 4 + turn))
        for turn in (0, 1)
        for pair in range(1, 7)
    ]
    arrivals.sort(key=lambda arrival: arrival.at_s)
    aware = run(make_aware_cell(0.1, blocks=400), arrivals)
    assert sum(count_hits(aware)) == 6 * 4 * HASH_BLOCK_TOKENS
    late = run(make_aware_cell(100.0, blocks=400), arrivals)
    assert sum(count_hits(late)) < sum(count_hits(aware))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from((40, 60, 400)), rate=st.sampled_from((2.0, 25.0)))
def test_the_router_knows_what_is_cached_exactly(seed, blocks, rate):
    rng = random.Random(seed)
    simulation = run(make_aware_cell(0.0, blocks=blocks), share_prefixes(rng, make_arrivals(rng, rate=rate)))
    prefixes = simulation._prefixes
    last = simulation.requests[-1]
    for request in simulation.requests:
        known = prefixes.find(request, simulation.now)
        found = {}
        for engine in simulation.engines:
            blocks_found = engine.cache.find_cached_blocks(
                request.index, request.prompt_tokens, request.block_hashes, request.prompt_tokens - 1
            )
            if blocks_found:
                found[engine.engine_id] = len(blocks_found) * engine.setup.block_size_tokens
        assert known == found, last


def test_an_engine_that_dies_is_forgotten_with_what_it_had():
    arrivals = [make_prompt(at_s, 1, 2, 3) for at_s in (0.0, 5.0, 10.0)]
    cell = make_aware_cell(0.0)
    first = run(cell, arrivals[:1])
    (holder,) = [engine.engine_id for engine in first.engines if engine.counters.num_iterations]
    simulation = run(replace(cell, events=(FailEvent(at_s=2.0, engine_id=holder),)), arrivals)
    assert sum(count_hits(simulation)) == 2 * HASH_BLOCK_TOKENS + 32
    assert [request.state for request in simulation.requests] == [RequestState.FINISHED] * 3


def test_what_an_engine_lost_that_died_leaves_out_what_its_prompt_had_found():
    """The second prompt finds 96 of 480 tokens and computes 64 an iteration, the third of which never ends."""
    arrivals = [make_prompt(0.0, 1, 2), make_prompt(5.0, *range(1, 11))]
    first, second = make_engines(((2, 64),))
    dies_at_s = 5.0 + 2.5 * estimate(64, 1, 64, 64 * 192, 0, 0)
    events = (AddEngineEvent(at_s=5.01, setup=second), FailEvent(at_s=dies_at_s, engine_id=first.engine_id))
    simulation = run(replace(make_cell(events=events), engines=[first]), arrivals)
    assert [request.state for request in simulation.requests] == [RequestState.FINISHED] * 2
    dead = simulation.engines[0]
    assert dead.cache.num_hit_tokens == 96
    assert (dead.counters.num_prefill_tokens, dead.counters.num_lost_prefill_tokens) == (96 + 2 * 64, 2 * 64)


@pytest.mark.parametrize("options", [{"prefix_report_s": 1.0}, {"prefix_report_s": -1.0, "hash_block_tokens": 16}])
def test_reports_of_no_caches_are_refused(options):
    with pytest.raises(ValueError, match="prefix_report_s is"):
        SimOptions(**options)
