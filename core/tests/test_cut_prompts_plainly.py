"""Prompts that two engines compute which schedule ahead: event by event as the plain simulator has it."""

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_cuts import NaiveCuttingSimulation
from test_schedules_ahead_plainly import SLOS, flatten, list_events, list_plain_events
from test_simulation import make_arrivals, make_engines

from sluice_core.latency.transfer import LinkSpeed
from sluice_core.sim.sim_setup import Cell, LengthsKnown, SimOptions, TransferLink
from sluice_core.strategies import get_strategy
from sluice_core.strategies.dynaserve import DynaServeRules


def make_cell(rng, blocks):
    link = TransferLink(name=rng.choice(("", "switch")), speed=LinkSpeed(bytes_per_s=rng.choice((1e8, 1e9, 150e9))))
    engines = [
        replace(engine, chunk_size_tokens=rng.choice((64, 2048)))
        for engine in make_engines(((3, 2048),), blocks=blocks, link=link, max_num_seqs=rng.choice((4, 12)))
    ]
    rules = DynaServeRules(
        cuts_prompts=True, is_bound_to_sides=rng.random() < 0.5, fixed_token=rng.choice((0, 0, 20, 100, 170))
    )
    options = SimOptions(
        schedules_ahead=True,
        copies_kv=rng.random() < 0.8,
        sends_parts=rng.random() < 0.8,
        message_s=rng.choice((0.0, 0.0037, 0.05)),
        output_lengths=LengthsKnown.LEARNED,
    )
    strategy = replace(get_strategy("dynaserve"), policies=rules)
    return Cell(engines=engines, strategy=strategy, options=options, seed=rng.randrange(99))


def assert_equal_to_plain(seed, blocks):
    rng = random.Random(seed)
    cell = make_cell(rng, blocks)
    arrivals = make_arrivals(rng, number=30, rate=rng.choice((3.0, 12.0)), longest_prompt=400, slos=SLOS)
    simulation, events = list_events(cell, arrivals)
    naive, plain_events = list_plain_events(cell, arrivals, NaiveCuttingSimulation)
    for ours, theirs in zip(flatten(events), flatten(plain_events), strict=True):
        assert ours == theirs or (isinstance(ours, float) and abs(ours - theirs) < 1e-9)
    assert (simulation.num_cut, simulation.num_whole) == (naive.num_cut, naive.num_whole)
    return naive


@example(seed=20, blocks=30)  # a part comes while decodes have left the prefills without blocks
@example(seed=17324640, blocks=60)  # a part that comes is preempted at once: its last batch was the first engine's
@example(seed=2840997628, blocks=30)  # the same, where the first engine's last iteration has the second one's number
@example(seed=1590873034, blocks=400)  # an engine idles with a queue, because requests to come hold its seats
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from((30, 60, 400)))
@settings(max_examples=30, deadline=None)
def test_cut_prompts_are_as_the_plain_simulator_has_them(seed, blocks):
    assert_equal_to_plain(seed, blocks)


def test_the_plain_simulator_has_seen_what_can_become_of_a_cut_prompt():
    runs = [assert_equal_to_plain(seed, blocks) for seed in range(8) for blocks in (30, 60)]
    assert min(sum(run.num_cut for run in runs), sum(run.num_whole for run in runs)) > 5
    assert any(run.num_again and run.num_cut for run in runs)
    moves = [move for run in runs for move in run.moves if move.cause == "split"]
    assert any(move.copied for move in moves)
    assert any(run.transfers for run in runs)
