import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_simulation import make_engines

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import (
    EngineId,
    Hold,
    IterationShape,
    MoveCause,
    Place,
    PrefillRequest,
    Reject,
    RequestId,
    Role,
    Slo,
)
from sluice_core.scheduling.batching.tpot_slack import SlackBatching
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.decode_set import LOST_BACK_OFF_S, DecodeSet
from sluice_core.scheduling.engine_policy import BatchLimits, EngineBatch
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.scheduling.iteration_limits import fit_prefill_budget
from sluice_core.sim.sim_setup import Arrival, Cell, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import EarlyRejection, OverloadOrder, StrategyParameters

A100 = load_model_on_gpu("qwen2.5-14b", "a100-80g", 1).profile
SLUICE = get_strategy("sluice")


def make_decodes(*members: tuple[str, float, int, float]) -> DecodeSet:
    """Name, first token, output tokens, TPOT objective."""
    decodes = DecodeSet(block_size_tokens=16, max_num_seqs=256)
    for name, first_token_s, output_tokens, tpot_slo_s in members:
        decodes.join(
            RequestId(name),
            prompt_tokens=100,
            output_tokens=output_tokens,
            output_tokens_since_reset=output_tokens,
            first_token_s=first_token_s,
            tpot_slo_s=tpot_slo_s,
            is_moved_in=False,
        )
    return decodes


def make_batch(**changes: float) -> EngineBatch:
    batch = EngineBatch(
        chunk_size_tokens=2048,
        last_chunk_size_tokens=2048,
        max_batch_tokens=4096,
        block_size_tokens=16,
        num_new_prompts=1,
        last_prefill_s=10.0,
    )
    return replace(batch, **changes)


def bind(decodes: DecodeSet, *, least_prefill_share: float = 0.0, **parameters: float) -> SlackBatching:
    policy = SLUICE.make_engine(StrategyParameters(least_prefill_share=least_prefill_share, **parameters))
    assert isinstance(policy, SlackBatching)
    policy.bind(decodes, A100)
    return policy


def test_the_slack_is_what_the_slowest_decode_has_until_its_next_token_is_late():
    decodes = make_decodes(("slow", 9.0, 10, 0.11), ("fast", 9.5, 10, 0.11), ("relaxed", 8.0, 10, 1.0))
    assert decodes.find_least_slack_s(10.0) == pytest.approx(10 * 0.11 - 1.0)
    assert decodes.find_least_slack_s(10.0, num_gaps=2) == pytest.approx(11 * 0.11 - 1.0)
    assert make_decodes().find_least_slack_s(10.0) == math.inf


def test_nobody_waits_for_a_decode_that_has_lost_its_objective():
    decodes = make_decodes(("lost", 5.0, 10, 0.1), ("slow", 9.0, 10, 0.11))
    assert decodes.find_least_slack_s(10.0, lost_s=1.0) == pytest.approx(0.1)
    assert decodes.find_least_slack_s(10.0) == pytest.approx(0.1)  # it is left out for a while
    decodes.refresh_ranking(10.0 + LOST_BACK_OFF_S, min_tokens=0, alpha=1.0)
    assert decodes.find_least_slack_s(10.0) == pytest.approx(1.0 - 5.0)


@given(
    limit_s=st.floats(0.02, 1.0),
    num_decodes=st.integers(0, 200),
    context=st.integers(0, 100_000),
    most=st.integers(1, 16_384),
)
def test_a_room_is_the_most_that_ends_within_its_limit(limit_s, num_decodes, context, most):
    def estimate_s(tokens):
        return A100.estimate_shape_s(
            IterationShape(prefill_tokens=tokens, num_chunks=1, num_decodes=num_decodes, decode_context_tokens=context)
        )

    tokens = fit_prefill_budget(A100, limit_s, most, num_decodes, context).tokens
    assert 0 <= tokens <= most
    assert tokens == 0 or estimate_s(tokens) <= limit_s
    assert tokens == most or estimate_s(tokens + 2 + tokens // 64) > limit_s


@given(
    room=st.integers(-5, 10_000),
    context=st.integers(0, 50_000),
    per_work=st.floats(0.0, 1e-3),
    least=st.integers(1, 64),
)
def test_a_chunk_takes_no_more_room_with_its_attention_than_there_is(room, context, per_work, least):
    limits = BatchLimits(
        token_budget=room,
        prefill_budget_tokens=room,
        max_tokens_per_prefill=room,
        runs_recompute=True,
        runs_started_prefills=True,
        runs_new_prompts=True,
        returns_new_prompts=False,
        room_per_work=per_work,
    )
    tokens = limits.fit_chunk(room, context, least)
    assert tokens <= max(room, 0) or tokens == room
    assert tokens <= least or limits.count_room(tokens, context) <= room
    if least <= tokens < room:
        assert limits.count_room(tokens + 2, context) >= room


def test_an_iteration_ends_within_the_slack_of_every_decode():
    policy = bind(make_decodes(("slow", 9.0, 10, 0.11), ("other", 9.5, 10, 0.11)))
    limits = policy.limits(10.0, make_batch(num_decodes=2, decode_context_tokens=300))
    slack_s = 0.98 * 10 * 0.11 - 1.0
    for chunk in (limits.fit_chunk(limits.prefill_budget_tokens, 8000, 16), limits.prefill_budget_tokens // 2):
        shape = IterationShape(
            prefill_tokens=chunk,
            attention_work=chunk * (8000 + chunk / 2) if chunk > 1 else 0.0,
            num_chunks=1,
            num_decodes=2,
            decode_context_tokens=300,
        )
        if limits.count_room(chunk, 8000) <= limits.prefill_budget_tokens:
            assert A100.estimate_shape_s(shape) <= slack_s * 1.02
    assert 0 < limits.prefill_budget_tokens < 2046
    waits = policy.limits(10.0, make_batch(num_decodes=2, num_under_way=1, under_way_s=0.2))
    assert waits.prefill_budget_tokens == 0
    assert not waits.runs_new_prompts


def test_without_decodes_the_chunk_size_is_the_limit_and_late_decodes_leave_minimum_progress():
    assert bind(make_decodes()).limits(10.0, make_batch()).prefill_budget_tokens == 2048
    late = bind(make_decodes(("late", 9.0, 9, 0.11)))
    assert late.limits(10.0, make_batch(num_decodes=1)).prefill_budget_tokens == 0
    limits = late.limits(10.3, make_batch(num_decodes=1))
    assert (limits.prefill_budget_tokens, limits.is_minimum_progress, limits.room_per_work) == (128, True, 0.0)


def test_a_decode_that_is_about_to_begin_bounds_the_iteration_by_one_gap():
    decodes = make_decodes(("fast", 9.9, 50, 0.11))
    policy = bind(decodes)
    alone = policy.limits(10.0, make_batch(num_decodes=1)).prefill_budget_tokens
    beside = policy.limits(10.0, make_batch(num_decodes=2)).prefill_budget_tokens
    shape = IterationShape(prefill_tokens=beside, num_chunks=1, num_decodes=2)
    assert beside < alone
    assert A100.estimate_shape_s(shape) <= 0.98 * 0.11


@pytest.mark.parametrize("first_token_s", [9.0, 8.5], ids=["little slack", "far behind"])
def test_prompts_get_their_share_of_an_iteration_whatever_decodes_can_spare(first_token_s: float) -> None:
    decodes = make_decodes(("slow", first_token_s, 10, 0.11))
    batch = make_batch(num_decodes=1, decode_context_tokens=300)
    room = bind(decodes, least_prefill_share=0.1).limits(10.0, batch).prefill_budget_tokens
    alone_s, beside_s = (
        A100.estimate_shape_s(
            IterationShape(prefill_tokens=tokens, num_chunks=1, num_decodes=1, decode_context_tokens=300)
        )
        for tokens in (0, room)
    )
    longest_s = max(alone_s + 0.1 * 0.11, 0.98 * 10 * 0.11 - (10.0 - first_token_s))
    assert 0.95 * longest_s <= beside_s <= longest_s
    without = bind(decodes).limits(10.0, batch).prefill_budget_tokens
    assert without == (0 if first_token_s == 8.5 else room)


@pytest.mark.parametrize(("share", "is_served"), [(0.0, False), (0.1, True)])
def test_prompts_beside_long_answers_near_their_objective_are_in_time(share: float, *, is_served: bool) -> None:
    """Iterations of these decodes alone take nearly as long as the objective: little is spared, and never for long."""
    slo = Slo(ttft_s=1.0, tpot_s=0.028)
    arrivals = [Arrival(at_s=0.3 * number, prompt_tokens=300, output_tokens=800, slo=slo) for number in range(80)]
    engines = make_engines(((1, 2048),), blocks=20_000, max_num_seqs=256)
    parameters = StrategyParameters(
        least_prefill_share=share,
        pack_share=0.0,
        late_share=1.0,
        overload_order=OverloadOrder.DEADLINE,
        pace_share=0.0,
    )
    simulation = Simulation(Cell(engines=engines, strategy=SLUICE, parameters=parameters), arrivals)
    assert simulation.run()
    num_in_time = sum(request.ttft_s is not None and request.ttft_s <= slo.ttft_s for request in simulation.requests)
    assert (num_in_time > 75) == is_served
    assert num_in_time > 75 or num_in_time < 40


def test_each_decode_asks_once_where_it_should_run_and_keeps_its_slack():
    decodes = make_decodes(("a", 9.0, 10, 0.11), ("b", 9.0, 10, 0.11))
    policy = bind(decodes)
    assert {move.request_id for move in policy.propose(10.0, decodes)} == {"a", "b"}
    assert policy.propose(10.0, decodes) == []
    assert decodes.find_least_slack_s(10.0) < math.inf
    assert bind(make_decodes(("a", 9.0, 10, 0.11)), pack_share=0.0).propose(10.0, decodes) == []
    decodes.is_draining = True
    assert {move.cause for move in policy.propose(10.0, decodes)} == {MoveCause.DRAIN}


def make_table(*loads: EngineLoad) -> EngineTable:
    table = EngineTable(lambda _: A100)
    for number, load in enumerate(loads):
        engine_id = EngineId(f"e{number}")
        load.kv_blocks_total = 1000
        table.add(engine_id, EngineConfig(16, 1000, 64, 16_384), role=Role.DECODE_HEAVY, chunk_size_tokens=16_384)
        table.report(engine_id, load, 10.0)
    return table


def make_prefill(name: str, arrival_s: float = 10.0, tokens: int = 1000, ttft_s: float = 4.0) -> PrefillRequest:
    slo = Slo(ttft_s=ttft_s, tpot_s=0.07)
    return PrefillRequest(request_id=RequestId(name), arrival_s=arrival_s, prompt_tokens=tokens, slo=slo)


def assign(table: EngineTable, *waiting: PrefillRequest, now: float = 10.0, **parameters: object) -> list:
    return SLUICE.make_router(StrategyParameters(**parameters), random.Random(1)).assign(now, waiting, table)


def test_a_prefill_goes_where_decodes_leave_most_room():
    table = make_table(EngineLoad(running_decodes=40, decode_context_tokens=120_000), EngineLoad(running_decodes=2))
    (placed,) = assign(table, make_prefill("a"))
    assert (placed.engine_id, placed.reason) == ("e1", "feasible")


@pytest.mark.parametrize(
    ("busy_s", "credit_s", "share", "engine"),
    [
        (0.04, 0.1, 0.0, "e0"),
        (0.09, 0.2, 0.0, "e0"),
        (0.06, 0.1, 0.0, "e1"),
        (0.04, 0.0, 0.0, "e1"),
        (0.39, 0.1, 0.2, "e0"),  # of 4 s
        (0.41, 0.1, 0.2, "e1"),
        (0.41, 0.9, 0.2, "e0"),
        (0.04, 0.0, 0.2, "e1"),
    ],
)
def test_an_engine_of_another_routers_share_is_taken_where_ones_own_are_half_a_credit_behind(
    busy_s, credit_s, share, engine
):
    table = make_table(EngineLoad(iteration_remaining_s=busy_s), EngineLoad(is_of_others=True))
    (placed,) = assign(table, make_prefill("a"), credit_s=credit_s, shared_credit_share=share)
    assert placed.engine_id == engine


@pytest.mark.parametrize(
    ("busy_s", "ttft_s", "placed_alone", "placed_beside_others"),
    [
        (0.09, 2.0, True, True),
        (0.11, 2.0, False, True),
        (0.59, 2.0, False, True),
        (0.61, 2.0, False, False),
        (0.09, math.inf, True, True),
        (0.11, math.inf, False, False),
    ],
)
def test_routers_that_share_engines_give_more_ahead(busy_s, ttft_s, placed_alone, placed_beside_others):
    """0.1 s, and where engines are shared three tenths of the TTFT objective."""
    busy = EngineLoad(iteration_remaining_s=busy_s)
    for loads, is_placed in (((busy,), placed_alone), ((busy, EngineLoad(is_of_others=True)), placed_beside_others)):
        table = make_table(*loads)
        if len(loads) > 1:
            table.configure(EngineId("e1"), role=Role.DECODE_HEAVY, chunk_size_tokens=16_384, is_draining=True)
        (decision,) = assign(table, make_prefill("a", ttft_s=ttft_s))
        assert isinstance(decision, Place) == is_placed
        assert is_placed or decision.reason == "late_binding"


def test_engines_compute_prompts_by_deadline_and_last_those_that_will_be_late():
    selector = bind(make_decodes()).make_selector(A100)
    assert selector is not None
    for name, ttft_slo_s, tokens in (("hopeless", 0.1, 2000), ("relaxed", 9.0, 500), ("urgent", 2.0, 500)):
        selector.add(RequestId(name), arrival_s=10.0, ttft_slo_s=ttft_slo_s, priority=0, tokens=tokens)
    assert selector.select(10.0, make_batch()) == ["urgent", "relaxed", "hopeless"]
    selector.advance(RequestId("relaxed"), 400)
    assert selector.select(10.1, make_batch()) == ["urgent", "relaxed", "hopeless"]
    assert selector.select(30.0, make_batch()) == ["hopeless", "urgent", "relaxed"]  # all are late
    assert bind(make_decodes(), selects_by_slack=False).make_selector(A100) is None


def test_an_engine_gets_no_more_than_its_credit_and_the_rest_waits_by_deadline():
    table = make_table(EngineLoad())
    late, urgent = make_prefill("late", arrival_s=5.0, ttft_s=4.0), make_prefill("urgent", ttft_s=2.0)
    decisions = assign(table, make_prefill("relaxed", arrival_s=9.0), late, urgent)
    assert [(one.request_id, type(one)) for one in decisions] == [("urgent", Place), ("relaxed", Hold), ("late", Hold)]
    assert {one.reason for one in decisions if isinstance(one, Hold)} == {"late_binding"}
    everywhere = assign(make_table(EngineLoad()), urgent, late, credit_s=0.0)
    assert all(isinstance(one, Place) for one in everywhere)


def test_a_late_prompt_waits_no_longer_than_its_second_deadline():
    """Late ones go behind; from the second deadline on, before all that came later, where they have a share."""

    def find_order(arrival_s, share, **parameters):
        late, fresh = make_prefill("late", arrival_s=0.0), make_prefill("fresh", arrival_s=arrival_s)
        decisions = assign(make_table(EngineLoad()), late, fresh, late_share=share, **parameters)
        return [one.request_id for one in decisions]

    assert find_order(9.0, 0.1) == ["late", "fresh"]
    assert find_order(7.0, 0.1) == ["fresh", "late"]
    assert find_order(7.0, 0.1, late_ttft_factor=1.0) == ["late", "fresh"]
    assert find_order(9.0, 0.0) == ["fresh", "late"]


def test_a_prompt_waits_at_the_router_while_engines_have_no_seat():
    full, free = EngineLoad(running_decodes=60, queued_requests=4), EngineLoad(running_decodes=60, queued_requests=3)
    assert [one.reason for one in assign(make_table(full), make_prefill("a"))] == ["seats"]
    placed, held = assign(make_table(free, full), make_prefill("a"), make_prefill("b"), credit_s=0.0)
    assert (placed.engine_id, held.reason) == ("e0", "seats")


def test_beyond_one_pass_the_most_urgent_are_those_of_the_same_order():
    router = SLUICE.make_router(StrategyParameters(), random.Random(1))
    router.assign(10.0, [make_prefill("a"), make_prefill("b")], make_table(EngineLoad()))

    def urgency(arrival_s: float, *, is_recovery: bool = False):
        return router.compute_urgency(
            10.0,
            is_recovery=is_recovery,
            next_token_due_s=3.0,
            priority=0,
            arrival_s=arrival_s,
            ttft_slo_s=4.0,
            prompt_tokens=1000,
        )

    assert urgency(9.0, is_recovery=True) < urgency(8.0) < urgency(9.0) < urgency(5.0)


def test_a_prompt_that_is_late_everywhere_is_refused_if_that_is_allowed():
    table = make_table(EngineLoad(queued_prefill_tokens=200_000, queued_requests=20))
    prompt = make_prefill("a")
    assert isinstance(assign(table, prompt)[0], Hold)
    assert isinstance(assign(table, prompt, early_rejection=EarlyRejection.REJECT)[0], (Reject, Place, Hold))
    assert [one.reason for one in assign(make_table(), prompt)] == ["no_engine"]
    full = make_table(EngineLoad(kv_blocks_used=990))
    assert [one.reason for one in assign(full, prompt)] == ["kv"]


def target(
    table: EngineTable,
    source: str = "e0",
    tpot_slo_s: float = 0.07,
    prompt_tokens: int = 4000,
    **parameters: float,
) -> EngineId | None:
    router = SLUICE.make_router(StrategyParameters(**{"pack_share": 0.7, **parameters}), random.Random(1))
    (placed,) = router.assign(10.0, [make_prefill("before", tokens=prompt_tokens)], make_table(EngineLoad()))
    assert isinstance(placed, Place)
    move = FlowRequest(
        cause=MoveCause.PREFILL_DONE,
        source=EngineId(source),
        num_blocks=100,
        tpot_slo_s=tpot_slo_s,
    )
    return router.target(10.0, move, table)


def test_decodes_gather_on_the_fullest_engine_that_keeps_their_objective():
    def loads(third: int = 50, used: int = 0) -> EngineTable:
        return make_table(
            EngineLoad(running_decodes=1),
            EngineLoad(running_decodes=5),
            EngineLoad(running_decodes=third, decode_context_tokens=1000 * third, kv_blocks_used=used),
        )

    assert target(loads()) == "e2"
    assert target(loads(used=900)) == "e1"  # no room for its KV
    assert target(loads(third=60)) == "e1"  # no seat
    assert target(loads(), tpot_slo_s=0.04) == "e1"  # too slow there
    assert target(loads(), source="e2") is None  # it is there already
    assert target(loads(), pack_share=0.0) is None
    assert target(loads(), tpot_slo_s=math.inf) is None
    assert target(loads(), source="gone") is None
    assert target(loads(), prompt_tokens=2000) is None  # 0.24 s: less than four gaps
    assert target(loads(), prompt_tokens=2000, pack_prompt_share=3.0) == "e2"
    assert target(loads(third=900), source="e2") == "e1"  # its own engine is too full
    without_it_s = A100.estimate_shape_s(IterationShape(num_decodes=51, decode_context_tokens=50_000))
    assert target(loads(), tpot_slo_s=without_it_s / 0.7) == "e1"  # too slow with the 1600 tokens of its KV


def test_drains_move_wherever_there_is_room():
    router = SLUICE.make_router(StrategyParameters(), random.Random(1))
    move = FlowRequest(cause=MoveCause.DRAIN, source=EngineId("e0"), num_blocks=100)
    assert router.target(10.0, move, make_table(EngineLoad(), EngineLoad())) == "e1"


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in step", "ahead"])
def test_decodes_keep_their_objective_beside_a_flood_of_prompts(is_ahead):
    """At chunks of 2048 tokens each of these iterations would take three times the TPOT objective."""
    slo = Slo(ttft_s=5.0, tpot_s=0.07)
    arrivals = [Arrival(at_s=n * 0.1, prompt_tokens=2000, output_tokens=30, slo=slo) for n in range(60)]
    cells = {
        name: Cell(
            engines=make_engines(((2, 2048),), blocks=20_000),
            strategy=get_strategy(name),
            options=SimOptions(schedules_ahead=is_ahead),
        )
        for name in ("sluice", "aggregated")
    }
    met = {}
    for name, cell in cells.items():
        simulation = Simulation(cell, arrivals)
        assert simulation.run()
        met[name] = sum((one.tpot_s or 0.0) <= slo.tpot_s for one in simulation.requests)
    assert met["sluice"] >= 59
    assert met["aggregated"] < 30


def test_parameters_are_read_in_core_units():
    values = {
        "tpot_share_percent": "90",
        "late_ttft_factor_percent": "250",
        "least_prefill_percent": "5",
        "late_share_percent": "20",
        "overload_order": "Deadline",
        "pack_share_percent": "0",
        "credit_milliseconds": "50",
    }
    assert SLUICE.read_parameters(values) == StrategyParameters(
        tpot_share=0.9,
        least_prefill_share=0.05,
        late_ttft_factor=2.5,
        late_share=0.2,
        overload_order=OverloadOrder.DEADLINE,
        pack_share=0.0,
        credit_s=0.05,
    )


def test_an_objective_that_no_iteration_meets_holds_nothing_up():
    """An iteration takes 22.7 ms at least. Those with another objective that wait beside it are served as well."""
    slos = (Slo(ttft_s=1.0, tpot_s=0.01), Slo(ttft_s=1.0, tpot_s=0.1))
    arrivals = [
        Arrival(at_s=0.01 * number, prompt_tokens=200, output_tokens=5, slo=slos[number % 2]) for number in range(8)
    ]
    simulation = Simulation(Cell(engines=make_engines(((2, 512),)), strategy=SLUICE), arrivals)
    assert simulation.run()
    assert [request.has_met_slo for request in simulation.requests] == [False, True] * 4
