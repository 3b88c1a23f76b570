"""Finished prefills that wait for a grant, by themselves: who is among them, and what becomes of whom."""

import random
from dataclasses import replace

import pytest
from test_simulation import STRATEGIES, make_arrivals, make_engines

from sluice_core.records import MoveCause, Role
from sluice_core.sim.moves.hand_offs import HandOffStep, SimHandOffs, SimMove
from sluice_core.sim.moves.kept_prefills import KeptPrefills
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import Cell, NoGrant, SimOptions
from sluice_core.sim.simulation import Simulation

NUM_BLOCKS = 3


class Parked:
    """A queue of requests whose KV is pinned on the first engine, each in three blocks."""

    def __init__(self, *, schedules_ahead=False, no_grant=NoGrant.IN_PLACE, number=3):
        strategy, shape = STRATEGIES["disaggregated"]
        options = SimOptions(no_grant=no_grant, schedules_ahead=schedules_ahead, message_s=0.0)
        cell = Cell(engines=make_engines(shape), strategy=strategy, options=options)
        self.simulation = Simulation(cell, make_arrivals(random.Random(1), number=number))
        self.engine = self.simulation.list_engines()[0]
        self.queue = KeptPrefills(self.simulation, SimHandOffs(self.simulation) if schedules_ahead else None)
        self.requests = self.simulation.requests
        for request in self.requests:
            request.generated_tokens, request.num_blocks, request.first_token_s = 1, NUM_BLOCKS, 0.5
            request.state, request.is_leaving = RequestState.DECODING, True
            self.engine.used_blocks += NUM_BLOCKS
            self.engine.pinned_blocks += NUM_BLOCKS
            self.queue.add(request, self.engine)

    @property
    def blocks(self):
        return self.engine.used_blocks // NUM_BLOCKS, self.engine.pinned_blocks // NUM_BLOCKS


def test_who_waits_is_parked_on_its_engine_and_moves_no_more():
    parked = Parked()
    assert len(parked.queue) == 3
    for request in parked.requests:
        assert (request.state, request.source, request.is_leaving) == (
            RequestState.PARKED,
            parked.engine.engine_id,
            False,
        )


@pytest.mark.parametrize("schedules_ahead", [False, True])
def test_a_wait_that_ends_leaves_the_queue_and_frees_the_blocks(schedules_ahead):
    parked = Parked(schedules_ahead=schedules_ahead)
    parked.requests[1].is_leaving = True  # it has asked for room
    parked.queue.expire(parked.requests[1])
    late = parked.requests[1]
    assert (len(parked.queue), parked.blocks) == (2, (2, 2))
    assert (late.state, late.num_blocks, late.is_leaving) == (RequestState.WAITING, 0, False)
    assert parked.simulation.num_held == 1
    parked.queue.expire(late)  # it waits no more
    assert (len(parked.queue), parked.blocks, parked.simulation.num_held) == (2, (2, 2), 1)


def test_who_has_got_a_grant_is_forgotten():
    parked = Parked()
    parked.requests[0].state = RequestState.MOVING
    assert len(parked.queue) == 3
    parked.queue.forget_placed()
    assert len(parked.queue) == 2


@pytest.mark.parametrize("dies", [True, False])
def test_who_waited_on_an_engine_that_died_is_held_at_its_router(dies):
    parked = Parked()
    parked.requests[2].is_leaving = True
    parked.requests[0].state = RequestState.MOVING
    parked.queue.fail(parked.engine if dies else parked.simulation.list_engines()[1])
    states = [request.state for request in parked.requests]
    waiting = RequestState.WAITING if dies else RequestState.PARKED
    assert states == [RequestState.MOVING, waiting, waiting]
    assert parked.requests[2].is_leaving is not dies
    assert len(parked.queue) == (0 if dies else 3)
    assert parked.simulation.num_held == (2 if dies else 0)


@pytest.mark.parametrize("schedules_ahead", [False, True])
@pytest.mark.parametrize("is_decode_engine", [False, True])
@pytest.mark.parametrize("has_targets", [False, True])
def test_who_may_stay_goes_on_where_it_was_prefilled_or_is_recomputed(has_targets, is_decode_engine, schedules_ahead):
    """Where the plan has changed; else room is asked for, and there is some."""
    parked = Parked(schedules_ahead=schedules_ahead, no_grant=NoGrant.WAIT)
    parked.queue.has_targets = has_targets
    if is_decode_engine:
        parked.engine.role = Role.DECODE_HEAVY
    parked.queue.place()
    states = {request.state for request in parked.requests}
    stays = is_decode_engine or not has_targets
    assert len(parked.queue) == 0
    if stays and not schedules_ahead:
        # The engine was idle: it begins with the first, and the others join at the end of the iteration.
        assert [request.state for request in parked.requests] == [RequestState.DECODING, *[RequestState.MOVING] * 2]
        assert parked.engine.num_incoming == 2
        assert parked.blocks[1] == 0
    elif stays:
        assert (states, parked.blocks) == ({RequestState.WAITING}, (0, 0))
        assert [request.num_blocks for request in parked.requests] == [0] * 3
    else:
        assert states == {RequestState.MOVING}
        assert parked.blocks == (3, 3)
        assert sum(engine.granted_blocks for engine in parked.simulation.list_engines()) == 3 * NUM_BLOCKS
        assert not {request.target for request in parked.requests} & {parked.engine.engine_id}


def test_without_room_anywhere_all_wait_on_in_their_order():
    parked = Parked(no_grant=NoGrant.WAIT)
    parked.queue.has_targets = True
    for engine in parked.simulation.list_engines()[1:]:
        engine.granted_blocks = engine.free_blocks
        engine.note_change()
    parked.queue.place()
    assert [request.state for request in parked.requests] == [RequestState.PARKED] * 3
    assert len(parked.queue) == 3


# Whether the target copies, tokens with KV, those that it has, tokens per block: does the request join at once?
ARRIVALS = {
    "all of it is there": (True, 96, 96, 16, True),
    "a tail is missing": (True, 106, 96, 16, True),
    "more than a tail is missing": (True, 196, 96, 16, False),
    "little of it is there": (True, 200, 32, 16, False),
    "nothing is there": (True, 100, 0, 16, False),
    "a token is missing, which is a block": (True, 1, 0, 1, False),
    "less than a block is missing": (True, 10, 0, 16, True),
    "less than a block is missing where nothing is copied": (False, 10, 0, 16, False),
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_a_moved_request_joins_at_once_where_no_more_than_a_tail_of_its_kv_is_missing(name):
    copies_kv, num_kv, num_copied, block_size, joins = ARRIVALS[name]
    strategy, shape = STRATEGIES["disaggregated"]
    options = SimOptions(schedules_ahead=True, copies_kv=copies_kv, message_s=0.0)
    engines = make_engines(shape, block_size_tokens=block_size)
    arrival = replace(make_arrivals(random.Random(1), number=1)[0], prompt_tokens=num_kv, output_tokens=9)
    simulation = Simulation(Cell(engines=engines, strategy=strategy, options=options), [arrival])
    source, *_, target = simulation.list_engines()
    (request,) = simulation.requests
    request.generated_tokens, request.first_token_s, request.num_blocks = 1, 0.5, 3
    request.state, request.source, request.target = RequestState.MOVING, source.engine_id, target.engine_id
    source.used_blocks = source.pinned_blocks = 3
    target.reserve(3)
    move = SimMove(number=1, request=request, source=source, target=target, cause=MoveCause.PREFILL_DONE, num_blocks=3)
    move.num_kv_tokens, move.num_copied_tokens, move.step = num_kv, num_copied, HandOffStep.SUBMIT
    assert request.num_kv_tokens == num_kv
    SimHandOffs(simulation).receive(move)
    assert request.state is (RequestState.DECODING if joins else RequestState.MOVING)
    assert source.used_blocks == (0 if joins else 3)
    assert request.num_moves == 1
    assert (move.step is HandOffStep.NOTICE) is not joins
