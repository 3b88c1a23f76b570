"""Engines that schedule ahead, as plans and the tuner simulate them: event by event as the plain simulator has it."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_ahead import NaiveAheadSimulation
from test_sim_prefix_reuse import share_prefixes
from test_simulation import SLO, STRATEGIES, make_arrivals, make_engines

from sluice_core.latency.transfer import LinkSpeed
from sluice_core.records import Slo
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import Cell, NoGrant, SimOptions, TransferLink, TtftEnd
from sluice_core.sim.simulation import Simulation
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

SLOS = (SLO, Slo(ttft_s=0.4, tpot_s=0.03), Slo(ttft_s=9.0, tpot_s=0.2))


def list_events(cell, arrivals):
    """What the product's run does: iterations by engine, transfers, and what becomes of each request."""
    timeline = Timeline()
    simulation = Simulation(cell, arrivals, timeline)
    assert simulation.run()
    iterations = {engine.engine_id: [] for engine in simulation.engines}
    for engine_id, *iteration in timeline.iterations:
        iterations[engine_id].append(iteration)
    requests = [
        None
        if request.state is RequestState.REJECTED
        else (request.first_token_s, request.last_token_s, request.num_moves, request.num_preemptions, request.target)
        for request in simulation.requests
    ]
    transfers = timeline.transfers
    gaps = simulation.gaps.num_gaps, simulation.gaps.total_s
    return simulation, (iterations, transfers, requests, gaps, simulation.num_blocked_moves)


def list_plain_events(cell, arrivals, plain=NaiveAheadSimulation):
    naive = plain(cell, arrivals).run()
    requests, num_gaps, gaps_s = [], 0, 0.0
    for request in naive.requests:
        if request.is_rejected:
            requests.append(None)
            continue
        assert len(request.tokens) == request.arrival.output_tokens
        last = request.first_s, request.tokens[-1], request.moves, request.preemptions, request.engine.setup.engine_id
        requests.append(last)
        num_gaps += len(request.tokens) - 1
        gaps_s += request.tokens[-1] - request.first_s
    iterations = {engine_id: engine.log for engine_id, engine in naive.engines.items()}
    return naive, (iterations, naive.transfers, requests, (num_gaps, gaps_s), naive.num_blocked)


def assert_equal_to_plain(cell, arrivals):
    simulation, events = list_events(cell, arrivals)
    naive, plain_events = list_plain_events(cell, arrivals)
    for ours, theirs in zip(flatten(events), flatten(plain_events), strict=True):
        assert ours == theirs or (isinstance(ours, float) and abs(ours - theirs) < 1e-9)
    return simulation, naive


def flatten(value):
    """List the leaves of nested containers, each container's length before them."""
    if isinstance(value, dict):
        value = sorted(value.items())
    if not isinstance(value, list | tuple):
        yield value
        return
    yield len(value)
    for each in value:
        yield from flatten(each)


def make_cell(rng, name, *, blocks, number, hash_block_tokens=None, **options):
    strategy, shape = STRATEGIES[name]
    speed = LinkSpeed(bytes_per_s=rng.choice((1e8, 1e9, 150e9)))
    engines = make_engines(
        shape,
        blocks=blocks,
        link=TransferLink(name=rng.choice(("", "switch")), speed=speed),
        max_num_seqs=rng.choice((4, 12)),
    )
    cell = Cell(
        engines=engines,
        strategy=strategy,
        parameters=StrategyParameters(
            early_rejection=rng.choice(list(EarlyRejection)),
            watermark=rng.choice((0.5, 0.95)),
            min_tokens_between_moves=rng.choice((4, 16)),
            prefill_batch_tokens=8 * blocks,
            grant_wait_s=0.02 * blocks,
        ),
        options=SimOptions(schedules_ahead=True, hash_block_tokens=hash_block_tokens, **options),
        seed=rng.randrange(99),
    )
    arrivals = make_arrivals(rng, rate=rng.choice((2.0, 8.0, 25.0)), slos=SLOS, priorities=(0, 0, 1, -1), number=number)
    if hash_block_tokens is not None:
        arrivals = share_prefixes(rng, arrivals, hash_block_tokens=hash_block_tokens)
    return cell, arrivals


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.sampled_from((26, 40, 60, 400)),
    message_s=st.sampled_from((0.0, 0.0037, 0.05)),
    ttft_end=st.sampled_from(TtftEnd),
    counts_decodes=st.booleans(),
    wait_limit_s=st.sampled_from((None, 1.0)),
    no_grant=st.sampled_from(NoGrant),
    copies_kv=st.booleans(),
)
def test_every_event_is_as_the_plain_simulator_has_it(name, seed, blocks, **options):
    assert_equal_to_plain(*make_cell(random.Random(seed), name, blocks=blocks, number=40, **options))


@pytest.mark.parametrize(
    ("seed", "blocks"),
    [(13, 26), (15, 30)],
    ids=["decodes left out come before prompts", "gaps of a decode left out twice"],
)
def test_runs_that_once_differed_agree(seed, blocks):
    assert_equal_to_plain(*make_cell(random.Random(seed), "taichi", blocks=blocks, number=60))


def test_decodes_that_an_iteration_leaves_out_are_in_the_load():
    """One that is left out has its seat, which a prefill that waits for a grant must not be sent to."""
    options = {"message_s": 0.05, "counts_decodes": False, "no_grant": NoGrant.WAIT, "copies_kv": True}
    rng = random.Random(226713571)
    assert_equal_to_plain(*make_cell(rng, "taichi, round robin", blocks=60, number=40, **options))


@pytest.mark.parametrize("name", ["taichi", "disaggregated", "aggregated"])
def test_a_long_run_is_as_the_plain_simulator_has_it(name):
    """150 requests each; among what is compared are moves of every cause, preemptions and refusals."""
    seen = Counter()
    for seed, blocks in ((1, 30), (9, 30)):
        rng = random.Random(seed)
        cell, arrivals = make_cell(rng, name, blocks=blocks, number=150, message_s=0.0037, wait_limit_s=1.0)
        simulation, _ = assert_equal_to_plain(cell, arrivals)
        seen += Counter({cause.value: number for cause, number in simulation.num_moves.items()})
        seen["preempted"] += sum(request.num_preemptions for request in simulation.requests)
        seen["rejected"] += sum(request.state is RequestState.REJECTED for request in simulation.requests)
        seen["blocked"] += simulation.num_blocked_moves
    wanted = {
        "taichi": {"prefill_done", "degrade", "backflow", "blocked", "rejected"},
        "disaggregated": {"prefill_done", "blocked", "rejected"},
        "aggregated": {"rejected"},
    }
    assert {what for what, number in seen.items() if number} == wanted[name] | {"preempted"}


@pytest.mark.parametrize(("seed", "blocks"), [(38848, 27), (8271, 36), (19632, 26), (12324, 24), (38803, 53)])
def test_routers_see_prompts_become_late_with_time(seed, blocks):
    """Loads that said nothing new were not looked at again, and late prompts held blocks from others."""
    assert_equal_to_plain(*make_cell(random.Random(seed), "sluice", blocks=blocks, number=40, message_s=0.0))
