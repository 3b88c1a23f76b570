"""Prefills of a simulated engine by themselves: what a preemption looks for, and when an urgent prompt overtakes."""

from dataclasses import replace

import pytest
from test_simulation import SLO, make_engines

from sluice_core.scheduling import engine_policy
from sluice_core.scheduling.batching.chunked_prefill import RECOMPUTE_TOKENS
from sluice_core.scheduling.engine_policy import PrefillSelector, RequestKind
from sluice_core.sim.engine.prefill_queue import PrefillQueue
from sluice_core.sim.engine.selected_prefills import SelectedPrefills
from sluice_core.sim.requests import SimRequest
from sluice_core.sim.sim_setup import Arrival
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters

IS_COMPILED = not engine_policy.__file__.endswith(".py")
BLOCK = 16
(SETUP,) = make_engines(((1, 2048),))
TAICHI = get_strategy("taichi").make_engine(StrategyParameters())


def make_request(index, prompt_tokens=100, at_s=0.0):
    return SimRequest(index, Arrival(at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=4, slo=SLO))


@pytest.mark.parametrize("num_started", [1, 3])
@pytest.mark.parametrize(("chunk", "last"), [(2048, 64), (64, 1024), (0, 64)])
def test_started_prefills_may_run_short_of_blocks_until_every_chunk_surely_finds_its_own(num_started, chunk, last):
    queue = PrefillQueue(replace(SETUP, chunk_size_tokens=chunk), TAICHI)
    assert not queue.may_run_short(0)
    queue.batch.last_chunk_size_tokens = last
    for index in range(num_started):
        request = make_request(index, prompt_tokens=9000)
        queue.add_part(request, BLOCK)
    # The chunk's tokens fill so many blocks; each prefill may begin one and end in another.
    enough = max(chunk, last, RECOMPUTE_TOKENS) // BLOCK + num_started + 1
    assert queue.may_run_short(enough - 1)
    assert not queue.may_run_short(enough)


@pytest.mark.parametrize("left", ["num_new_prompts", "num_started_prefills", "num_recomputing"])
def test_what_is_left_over_in_a_queue_is_found(left):
    queue = PrefillQueue(SETUP, TAICHI)
    queue.check_idle()
    setattr(queue.batch, left, 1)
    with pytest.raises(AssertionError):
        queue.check_idle()


class PlayedSelector(PrefillSelector):
    """Keeps what it hears."""

    def __init__(self):
        self.heard = []
        self.selected = []

    def add(self, request_id, **fields):
        self.heard.append(("add", request_id, fields["tokens"]))

    def advance(self, request_id, num_computed_tokens):
        self.heard.append(("advance", request_id, num_computed_tokens))

    def remove(self, request_id):
        self.heard.append(("remove", request_id))

    def select(self, now, engine):
        return list(self.selected)

    def rank_started(self):
        return []


@pytest.mark.skipif(IS_COMPILED, reason="a compiled class has no interpreted subclass")
@pytest.mark.parametrize(
    ("share", "is_computed"), [(0.0, (1, 1)), (0.009, (1, 1)), (0.02, (2, 1)), (0.5, (50, 15)), (1.0, (100, 30))]
)
def test_an_iteration_counts_for_its_share_and_is_overtaken_by_another_prompt_alone(share, is_computed):
    selector = PlayedSelector()
    setup = replace(SETUP, operators_per_iteration=40)
    policy = get_strategy("flowprefill").make_engine(StrategyParameters(batch_token_budget=4000))
    queue = SelectedPrefills(setup, policy, selector)
    first, second, urgent = make_request(0), make_request(1, prompt_tokens=30), make_request(2)
    for request in (first, second):
        queue.add(request, RequestKind.NEW_PROMPT)
    selector.selected = [first.request_id, second.request_id]
    queue.schedule(0.0, 0, 99, 9999)
    assert queue.num_tokens == 130
    for selected, overtakes in (
        ([first, second], False),
        ([second], False),
        ([urgent, first], True),
        ([first, urgent], False),
        ([], False),
    ):
        selector.heard.clear()
        selector.selected = [request.request_id for request in selected]
        assert queue.is_overtaken(0.1, share) is overtakes
        assert [item for item in selector.heard if item[0] == "advance"] == [
            ("advance", request.request_id, tokens)
            for request, tokens in zip((first, second), is_computed, strict=True)
        ]


@pytest.mark.skipif(IS_COMPILED, reason="a compiled class has no interpreted subclass")
def test_what_is_recomputed_runs_before_the_selected_prompts_and_these_run_in_the_order_of_the_selection():
    selector = PlayedSelector()
    policy = get_strategy("flowprefill").make_engine(StrategyParameters(batch_token_budget=4000))
    queue = SelectedPrefills(SETUP, policy, selector)
    prompts, recomputed = [make_request(index, prompt_tokens=9000) for index in range(2)], make_request(2, 9000)
    for request in prompts:
        queue.add(request, RequestKind.NEW_PROMPT)
        selector.selected = [request.request_id]
        queue.schedule(0.0, 0, 99, 9999)
    queue.add(recomputed, RequestKind.RECOMPUTE)
    queue.schedule(0.0, 0, 99, 9999)
    assert [request.num_computed_tokens for request in (*prompts, recomputed)] == [2048] * 3
    first, second = prompts
    for selected, runnable in (([first], [recomputed, first]), ([second, first], [recomputed, second, first])):
        selector.selected = [request.request_id for request in selected]
        assert queue.list_runnable(0.0, 9999) == runnable


@pytest.mark.skipif(IS_COMPILED, reason="a compiled class has no interpreted subclass")
def test_blocks_that_become_free_later_let_nobody_start_and_who_has_started_goes_on():
    class OrderedSelector(PlayedSelector):
        def rank_started(self):
            return [started.request_id]

    selector = OrderedSelector()
    policy = get_strategy("flowprefill").make_engine(StrategyParameters(batch_token_budget=4000))
    queue = SelectedPrefills(SETUP, policy, selector)
    started, urgent = make_request(0, prompt_tokens=9000), make_request(1, prompt_tokens=100 * BLOCK)
    queue.add(started, RequestKind.NEW_PROMPT)
    selector.selected = [started.request_id]
    queue.schedule(0.0, 0, 99, 9999)
    queue.add(urgent, RequestKind.NEW_PROMPT)
    selector.selected = [urgent.request_id]
    for num_deferred, runnable in ((0, []), (1, [started])):
        queue.deferred_blocks = num_deferred
        assert queue.list_runnable(0.0, 100) == runnable


@pytest.mark.parametrize("num_batches", [0, 1])
def test_a_part_that_came_was_not_in_the_last_batch(num_batches):
    queue = PrefillQueue(SETUP, TAICHI, takes_by_chunk=True)
    for _ in range(num_batches):
        queue.schedule(0.0, 0, 99, 9999)
    part = make_request(0, prompt_tokens=9000)
    queue.add_part(part, BLOCK)
    assert not queue.was_in_last_batch(part)
    queue.schedule(0.0, 0, 99, 9999)
    assert queue.was_in_last_batch(part)
