"""Who gets a seat and KV blocks under Sluice where they are short: prompts that can be in time, and one router's."""

import math
import random
from dataclasses import replace

import pytest
from test_paced_prefills import A100, H100, NOW, bind_near_objective
from test_simulation import make_engines
from test_slack_strategy import SLUICE, assign, make_prefill, make_table

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import EngineId, Place, Reject, RequestId, Role, Slo
from sluice_core.scheduling.batching.tpot_slack import SCARCE_SEATS
from sluice_core.scheduling.engine_state import EngineConfig, EngineLoad, get_view
from sluice_core.scheduling.engine_table import PROVEN_OBSERVATIONS, EngineTable
from sluice_core.scheduling.slack.slack_placement import SPARE_OF_OTHERS
from sluice_core.scheduling.slack.slack_waiting_order import WaitingOrder
from sluice_core.scheduling.slack.usual_request import GUESSED_OUTPUT_TOKENS, UsualRequest
from sluice_core.sim.sim_setup import Arrival, Cell
from sluice_core.sim.simulation import Simulation
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

SEATS = 64  # of each engine of ``make_table``, whose KV has 16,000 tokens
RESERVED_SEATS = 16  # that late prompts leave free there


def describe(decisions):
    return [(one.request_id, "placed" if isinstance(one, Place) else one.reason) for one in decisions]


def make_late(num_requests, tokens, **others):
    """A load with prompts that go last."""
    return EngineLoad(
        queued_requests=num_requests,
        queued_prefill_tokens=tokens,
        late_requests=num_requests,
        late_prefill_tokens=tokens,
        **others,
    )


@pytest.mark.parametrize(
    ("load", "place"),
    [
        (make_late(1, 100, running_decodes=SEATS - RESERVED_SEATS - 1), "seats"),
        (make_late(1, 100, running_decodes=SEATS - RESERVED_SEATS - 2), "placed"),
        (make_late(2, 9_001, kv_blocks_used=250), "seats"),
        (make_late(2, 7_000, kv_blocks_used=250), "placed"),
        (make_late(2, 15_001), "seats"),
        (make_late(2, 15_000), "placed"),
    ],
    ids=["one seat", "two seats", "blocks for one", "blocks for both", "idle, for one", "idle, for both"],
)
def test_a_prompt_in_time_passes_late_ones_that_wait_for_a_seat_or_blocks(load, place):
    timely, late = make_prefill("timely", arrival_s=NOW), make_prefill("late", arrival_s=NOW - 9.0)
    assert describe(assign(make_table(load), timely, credit_s=0.0)) == [("timely", "placed")]
    assert describe(assign(make_table(load), late, credit_s=0.0)) == [("late", place)]


def test_late_prompts_that_wait_count_beside_a_placement_too():
    load = make_late(2, 200, running_decodes=SEATS - RESERVED_SEATS - 4)
    timely, late = make_prefill("timely", arrival_s=NOW), make_prefill("late", arrival_s=NOW - 9.0)
    also = make_prefill("also", arrival_s=NOW - 9.0)
    found = describe(assign(make_table(load), timely, late, also, credit_s=0.0))
    assert sorted(found) == [("also", "seats"), ("late", "placed"), ("timely", "placed")]


def test_late_prompts_as_long_as_one_that_was_held_wait_for_the_next_pass():
    """Under overload hundreds of them wait, and would be tried on every engine every 5 ms."""
    router = SLUICE.make_router(StrategyParameters(credit_s=0.0), random.Random(1))

    def place(*waiting):
        queued = EngineLoad(queued_requests=1, queued_prefill_tokens=1000)
        loads = EngineLoad(running_decodes=SEATS - RESERVED_SEATS), queued
        return describe(router.assign(NOW, list(waiting), make_table(*loads)))

    short = make_prefill("short", arrival_s=NOW - 9.0, tokens=200)
    long = make_prefill("long", arrival_s=NOW - 8.0, tokens=8000)
    timely = make_prefill("timely", arrival_s=NOW, tokens=8000)
    assert place(short) == [("short", "seats")]
    assert place(long) == [("long", "placed")], "the other engine is done with it first"
    assert place(short, long) == [("short", "seats"), ("long", "seats")]
    assert place(timely, short) == [("timely", "placed"), ("short", "seats")]
    shorter = make_prefill("shorter", arrival_s=NOW - 7.0, tokens=199)
    assert place(short, long, shorter) == [("short", "seats"), ("long", "seats"), ("shorter", "seats")]


def test_late_prompts_behind_what_engines_have_are_all_held_for_that():
    load = EngineLoad(queued_requests=1, queued_prefill_tokens=4000)
    late = [make_prefill(f"late-{number}", arrival_s=NOW - 9.0 - number, tokens=100 + number) for number in range(3)]
    found = describe(assign(make_table(load), *late, make_prefill("timely", arrival_s=NOW), credit_s=0.01))
    assert {reason for _, reason in found} == {"late_binding"}


def test_early_rejection_looks_at_every_late_prompt():
    router = SLUICE.make_router(StrategyParameters(early_rejection=EarlyRejection.REJECT), random.Random(1))
    load = EngineLoad(queued_requests=1, queued_prefill_tokens=4000, running_decodes=SEATS - RESERVED_SEATS)
    late = [make_prefill(f"late-{number}", arrival_s=NOW - 9.0 - number) for number in range(3)]
    decisions = router.assign(NOW, late, make_table(load))
    assert [type(decision) for decision in decisions] == [Reject] * 3


def test_a_late_prompt_without_blocks_lets_others_pass():
    """One that waits for KV beyond its objective is not passed any more under the other strategies."""
    large = make_prefill("large", arrival_s=NOW - 9.0, tokens=12_000)
    load = EngineLoad(kv_blocks_used=500)
    # The second deadline has passed, and late prompts have a share: so the large one goes first.
    found = describe(assign(make_table(load), large, make_prefill("small", arrival_s=NOW), late_share=0.5))
    assert found == [("large", "seats"), ("small", "placed")]
    waiting = make_prefill("waiting", arrival_s=NOW, tokens=12_000, ttft_s=60.0)
    assert describe(assign(make_table(load), waiting)) == [("waiting", "kv")]


@pytest.mark.parametrize("lacks", ["seats", "kv"])
def test_an_engine_of_another_router_needs_room_for_what_all_routers_send(lacks):
    def make_load(num_free, *, is_of_others):
        if lacks == "seats":
            return EngineLoad(running_decodes=SEATS - num_free, is_of_others=is_of_others)
        return EngineLoad(kv_blocks_used=1000 - math.ceil(num_free * 1000 / 16), is_of_others=is_of_others)

    def is_placed(*loads):
        return isinstance(assign(make_table(*loads), make_prefill("a", arrival_s=NOW))[0], Place)

    full = make_load(0, is_of_others=False)
    assert is_placed(make_load(1, is_of_others=False))
    assert not is_placed(full, make_load(1, is_of_others=True))
    assert not is_placed(full, make_load(SPARE_OF_OTHERS, is_of_others=True))
    assert is_placed(full, make_load(1 + SPARE_OF_OTHERS, is_of_others=True))
    assert is_placed(make_load(1, is_of_others=True)), "a router without an engine of its own waits for none"


def test_a_prompt_that_no_engine_of_its_router_holds_takes_what_there_is_elsewhere():
    table = make_table(EngineLoad(), EngineLoad(is_of_others=True))
    table.report(EngineId("e0"), EngineLoad(kv_blocks_total=100), 10.0)
    (placed,) = assign(table, make_prefill("a", arrival_s=NOW, tokens=8000))
    assert placed.engine_id == EngineId("e1")


def test_a_prompt_is_late_when_two_iterations_and_its_own_do_not_fit_any_more():
    table = make_table(EngineLoad(running_decodes=30, decode_context_tokens=30_000))
    view = get_view(table.order[0])
    prompts = [make_prefill("a", arrival_s=NOW), make_prefill("b", arrival_s=NOW)]
    order = WaitingOrder(StrategyParameters())
    order.sort(NOW, list(prompts), table)
    token_s = view.per_token_s + view.per_iteration_s / view.room_tokens
    alone_s = 1000 * token_s + 0.5 * view.per_work_s * 1000**2 + 2 * view.per_iteration_s
    assert not order.is_late(NOW + 4.0 - alone_s - 1e-6, prompts[0])
    assert order.is_late(NOW + 4.0 - alone_s + 1e-6, prompts[0])


@pytest.mark.parametrize(("num_decodes", "takes_time"), [(128, True), (127, False)])
def test_prompts_take_their_time_where_half_of_the_seats_are_taken(num_decodes, takes_time):
    """Decodes that an iteration takes less time from end sooner, and free their seats."""
    assert SCARCE_SEATS * 256 == 128
    budgets = []
    for pace_share in (0.8, 0.0):
        policy, batch = bind_near_objective(
            1.0, ("a", 20.0, 1000), num_decodes=num_decodes, profile=H100, pace_share=pace_share
        )
        budgets.append(policy.limits(NOW, batch).prefill_budget_tokens)
    assert (budgets[0] < budgets[1]) is takes_time


@pytest.mark.parametrize(
    ("parameters", "least_met", "most_met"),
    [({}, 0.85, 1.0), ({"late_reserve_share": 0.0}, 0.7, 0.84), ({"decode_share": 0.0}, 0.0, 0.3)],
    ids=["seats within the objective", "late ones take the last", "as many as the engine takes"],
)
def test_an_engine_decodes_no_more_than_its_objective_allows(parameters, least_met, most_met):
    """Long answers, a seventh more than can be served: what is too much misses its objectives alone."""
    rng, slo, at_s, arrivals = random.Random(3), Slo(ttft_s=1.0, tpot_s=0.022), 0.0, []
    for _ in range(400):
        at_s += rng.expovariate(12.0)
        arrivals.append(Arrival(at_s=at_s, prompt_tokens=300, output_tokens=rng.randint(350, 450), slo=slo))
    engines = [replace(engine, profile=H100) for engine in make_engines(((1, 2048),), blocks=20_000, max_num_seqs=256)]
    cell = Cell(engines=engines, strategy=SLUICE, parameters=StrategyParameters(**parameters))
    simulation = Simulation(cell, arrivals)
    assert simulation.run()
    num_met = sum(request.has_met_slo for request in simulation.requests)
    assert least_met <= num_met / len(arrivals) <= most_met


def test_requests_are_counted_as_they_usually_are():
    usual = UsualRequest()
    assert (usual.prompt_tokens, usual.output_tokens) == (0.0, GUESSED_OUTPUT_TOKENS)
    for tokens in (500, 1500):
        usual.note_placed(tokens, 1.0)
    usual.note_finished(0)  # given up
    for tokens in (300, 500):
        usual.note_finished(tokens)
    assert (usual.prompt_tokens, usual.output_tokens) == (1000, 400)
    for _ in range(400):
        usual.note_placed(100, 1.0)
        usual.note_finished(10)
    assert (usual.prompt_tokens, usual.output_tokens) == (pytest.approx(100, rel=0.02), pytest.approx(10, rel=0.02))


def test_the_least_objective_is_forgotten_when_nobody_has_it_any_more():
    usual = UsualRequest()
    assert usual.least_ttft_s == math.inf
    usual.note_placed(100, 0.4)
    seen = set()
    for number in range(2, 2001):
        usual.note_placed(100, 9.0)
        seen.add((number // 1000, usual.least_ttft_s))
    assert seen == {(0, 0.4), (1, 0.4), (2, 9.0)}
    usual.note_placed(100, 6.5)
    assert usual.least_ttft_s == 6.5


@pytest.mark.parametrize(
    ("load", "place"),
    [
        (EngineLoad(running_decodes=SEATS - 4), "placed"),  # a twentieth of 64 seats is 3
        (EngineLoad(running_decodes=SEATS - 3), "seats"),
        (EngineLoad(kv_blocks_used=800), "placed"),  # 950 blocks are for prompts, of which this one takes 150
        (EngineLoad(kv_blocks_used=801), "seats"),
        (EngineLoad(), "placed"),
    ],
    ids=["a seat", "no seat", "blocks", "no blocks", "idle"],
)
def test_prompts_leave_seats_and_blocks_free_for_those_of_shorter_objectives(load, place):
    router = SLUICE.make_router(StrategyParameters(urgent_reserve_share=0.05), random.Random(1))
    tokens = 16_000 if not load.kv_blocks_used and not load.running_decodes else 2400
    first, other = make_prefill("first", ttft_s=0.5, tokens=16), make_prefill("other", ttft_s=0.5, tokens=tokens)
    long = make_prefill("long", ttft_s=60.0, tokens=tokens)
    assert describe(router.assign(NOW, [long], make_table(replace(load)))) == [("long", "placed")], "nobody is urgent"
    assert describe(router.assign(NOW, [first], make_table())) == [("first", "no_engine")]
    assert describe(router.assign(NOW, [long], make_table(replace(load)))) == [("long", "placed")], "nobody was placed"
    assert describe(router.assign(NOW, [first], make_table(EngineLoad()))) == [("first", "placed")]
    assert describe(router.assign(NOW, [long], make_table(replace(load)))) == [("long", place)]
    if place != "placed":
        assert describe(router.assign(NOW, [other], make_table(replace(load)))) == [("other", "placed")]


LINE = IterationProfile(
    linear_s=(0.0,) + (0.01,) * 2048,
    decode_request_s=3e-4,
    prefill_token_s=5e-5,
    num_observations=PROVEN_OBSERVATIONS,
)


@pytest.mark.parametrize(("output_tokens", "num_seats"), [(None, 30), (100, 31), (1000, 36), (4, 31)])
def test_a_router_learns_what_prompts_its_decodes_bring(output_tokens, num_seats):
    """Of 21.78 ms an iteration takes 10 ms, a decode 0.3 ms and 50 us per prompt token, yet prompts 2.2 ms at most."""
    table = EngineTable(lambda _: LINE)
    table.add(EngineId("e0"), EngineConfig(16, 1000, 64, 16_384), role=Role.DECODE_HEAVY, chunk_size_tokens=16_384)
    table.report(EngineId("e0"), EngineLoad(kv_blocks_total=10_000, running_decodes=8), 10.0)
    router = SLUICE.make_router(StrategyParameters(), random.Random(1))
    prompt = replace(make_prefill("a", tokens=500), slo=Slo(ttft_s=1.0, tpot_s=0.022))
    router.assign(10.0, [prompt], table)
    if output_tokens is not None:
        router.note_finished(RequestId("a"), output_tokens)
    table.report(EngineId("e0"), EngineLoad(kv_blocks_total=10_000, running_decodes=9), 11.0)
    router.assign(11.0, [replace(prompt, request_id=RequestId("b"), arrival_s=11.0)], table)
    assert get_view(table.order[0]).num_seats == num_seats


@pytest.mark.parametrize(
    ("parameters", "least_met", "most_met"),
    [({}, 0.95, 1.0), ({"urgent_reserve_share": 0.0}, 0.0, 0.8)],
    ids=["room is left", "none is left"],
)
def test_urgent_prompts_find_blocks_where_answers_to_long_ones_fill_the_engines(parameters, least_met, most_met):
    """Prompts of 4,000 tokens come faster than their answers give blocks back: some are late, and only those."""
    rng, long, urgent = random.Random(4), Slo(ttft_s=6.0, tpot_s=0.07), Slo(ttft_s=0.4, tpot_s=0.07)
    at_s, arrivals = 0.0, []
    for number in range(400):
        at_s += rng.expovariate(10.0)
        is_long = number % 4 == 0
        slo = long if is_long else urgent
        arrivals.append(Arrival(at_s=at_s, prompt_tokens=4000 if is_long else 300, output_tokens=200, slo=slo))
    engines = [replace(one, profile=A100) for one in make_engines(((2, 2048),), blocks=2_000, max_num_seqs=256)]
    cell = Cell(engines=engines, strategy=SLUICE, parameters=StrategyParameters(**parameters))
    simulation = Simulation(cell, arrivals)
    assert simulation.run()
    met = [request.has_met_slo for request in simulation.requests if request.ttft_slo_s == urgent.ttft_s]
    assert least_met <= sum(met) / len(met) <= most_met
