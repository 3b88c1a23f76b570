import random
from dataclasses import replace

import pytest
from decode_flow_harness import join, make_decodes
from test_simulation import SLO, make_engines

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import MoveCause, Role
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.decode_flow import PROPOSAL_BACKOFF_S, FlowPolicy
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.prefill_order.deadline_selection import DeadlineSelector
from sluice_core.scheduling.prefill_order.event_driven_selection import EventDrivenSelector
from sluice_core.scheduling.slo_blind_placement import RoundRobinPlacement
from sluice_core.sim.sim_setup import Arrival, Cell
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import DEFAULT_STRATEGY, INITIAL_STRATEGY, PARAMETERS, STRATEGIES, get_strategy
from sluice_core.strategies.disaggregated import GRANT_WAIT_MILLISECONDS
from sluice_core.strategies.interface import Need, RouterPolicy, SliderUse, Strategy
from sluice_core.strategies.role_policies import FlowRules, RoleRouter
from sluice_core.strategy_parameters import WATERMARK, EarlyRejection, PrefillOrder, StrategyParameters

ROWS = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))


@ROWS
def test_a_row_makes_both_policies_of_its_default_parameters(strategy):
    parameters = strategy.read_parameters({})
    assert STRATEGIES[strategy.name] is strategy
    assert strategy.title.lower() == strategy.name
    assert strategy.make_router(parameters, random.Random(0)).is_too_soon(MoveCause.DRAIN, 0) is False
    assert strategy.make_engine(parameters).share_for(Role.DECODE_HEAVY, MoveCause.DRAIN) == 1.0


@ROWS
def test_a_decode_that_was_not_granted_a_place_asks_again_while_its_engine_drains(strategy):
    policy, decodes = strategy.make_engine(strategy.read_parameters({})), make_decodes()
    join(decodes, "a", now=10.0)
    decodes.is_draining = True
    assert [move.cause for move in policy.propose(10.0, decodes)] == [MoveCause.DRAIN]
    assert policy.propose(10.0, decodes) == []
    again_s = 10.0 + PROPOSAL_BACKOFF_S
    assert [move.cause for move in policy.propose(again_s, decodes)] == [MoveCause.DRAIN]


@ROWS
def test_parameters_survive_the_way_over_the_wire(strategy):
    assert strategy.read_parameters({}) == StrategyParameters()
    for name in ("low", "high"):
        values = {row.name: row.choices[-1] if row.choices else str(getattr(row, name)) for row in strategy.parameters}
        assert strategy.format_parameters(strategy.read_parameters(values)) == values


@pytest.mark.parametrize("row", [row for row in PARAMETERS if not row.choices], ids=lambda row: row.name)
def test_a_number_comes_back_as_it_was_set(row):
    numbers = [str(number) for number in range(row.low, min(row.high, row.low + 1100) + 1)]
    read = [replace(StrategyParameters(), **{row.field: row.read(number)}) for number in numbers]
    assert [row.format(parameters) for parameters in read] == numbers


def test_what_a_plan_does_not_set_has_the_papers_values_or_ours():
    assert {row.name: row.format(StrategyParameters()) for row in PARAMETERS} == {
        "approaching_factor_percent": "96",
        "batch_token_budget": "4096",
        "credit_milliseconds": "100",
        "early_rejection": "Off",
        "grant_wait_milliseconds": "10000",
        "late_share_percent": "0",
        "late_ttft_factor_percent": "300",
        "least_prefill_percent": "10",
        "macro_instance_least": "4",
        "macro_instance_most": "16",
        "min_tokens_between_moves": "16",
        "overload_order": "LongestLast",
        "pack_share_percent": "85",
        "prefill_batch_tokens": "2048",
        "split_margin_tokens": "20",
        "split_search_steps": "6",
        "tbt_target_milliseconds": "0",
        "tpot_share_percent": "98",
        "watermark_percent": "95",
    }
    assert GRANT_WAIT_MILLISECONDS.read("10000") == 10.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"watermark_percent": "49"}, "parameters.watermark_percent is 49, allowed are 50 to 99"),
        ({"watermark_percent": "100"}, "parameters.watermark_percent is 100, allowed are 50 to 99"),
        ({"watermark_percent": "-95"}, "parameters.watermark_percent is -95, allowed are 50 to 99"),
        ({"early_rejection": "off"}, "parameters.early_rejection is 'off', known are Off, Random, Reject"),
        ({"magic": "1"}, "parameters.magic is unknown to strategy 'taichi'; known are approaching_factor_percent"),
    ],
)
def test_a_bad_parameter_is_refused_with_the_limit(values, message):
    with pytest.raises(ValueError, match=message):
        get_strategy("taichi").read_parameters(values)


def test_parameters_are_read_in_core_units():
    values = {"watermark_percent": "90", "approaching_factor_percent": "80", "early_rejection": "Reject"}
    assert get_strategy("taichi").read_parameters(values) == StrategyParameters(
        watermark=0.9, approaching_factor=0.8, early_rejection=EarlyRejection.REJECT
    )


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("taichi", (512, 64)), ("aggregated", (512, 512)), ("disaggregated", (2048, 0)), ("sluice", (2048, 2048))],
)
def test_a_row_says_what_the_sliders_of_a_spec_mean(name, chunks):
    assert get_strategy(name).sliders.resolve(512, 64, 2048) == chunks


def test_an_engine_that_lacks_what_a_strategy_needs_refuses_it_by_name():
    demanding = replace(DEFAULT_STRATEGY, needs=frozenset({Need.SPLIT, Need.PARTS}))
    demanding.check_capabilities(frozenset(Need))
    with pytest.raises(ValueError, match="strategy 'sluice' needs parts, split; this engine offers none of these"):
        demanding.check_capabilities(frozenset())
    with pytest.raises(ValueError, match="strategy 'sluice' needs split; this engine offers parts"):
        demanding.check_capabilities(frozenset({Need.PARTS}))


def test_an_engine_without_a_plan_has_nothing_to_move():
    assert INITIAL_STRATEGY.has_flow is False


def test_a_variant_without_flow_moves_nothing_and_flow_cannot_be_added():
    varied = get_strategy("taichi").vary(flows=False, placement="round_robin")
    assert (varied.has_flow, varied.placement) == (False, "round_robin")
    with pytest.raises(ValueError, match="'aggregated' has no flow to switch on"):
        get_strategy("aggregated").vary(flows=True)


def test_a_variant_may_keep_its_flow_or_have_none_as_before():
    assert get_strategy("taichi").vary(flows=True) == get_strategy("taichi")
    assert get_strategy("aggregated").vary(placement="round_robin").placement == "round_robin"
    assert get_strategy("aggregated").vary(flows=False) == get_strategy("aggregated")


@pytest.mark.parametrize(
    ("name", "flows", "on_decode_heavy", "on_prefill_heavy"),
    [
        ("taichi", None, {MoveCause.DEGRADE}, {MoveCause.PREFILL_DONE, MoveCause.BACKFLOW}),
        ("taichi", False, set(), set()),
        ("disaggregated", None, set(), {MoveCause.PREFILL_DONE}),
        ("disaggregated", False, set(), set()),
        ("flowprefill", None, set(), {MoveCause.PREFILL_DONE}),
        ("flowprefill", False, set(), set()),
        ("aggregated", None, set(), set()),
        ("ecoserve", None, set(), set()),
    ],
)
def test_an_engine_proposes_the_moves_of_its_strategy(name, flows, on_decode_heavy, on_prefill_heavy):
    """One decode has had its first token here, and one is slow; the blocks are all used."""
    for role, causes in ((Role.DECODE_HEAVY, on_decode_heavy), (Role.PREFILL_HEAVY, on_prefill_heavy)):
        decodes = make_decodes(role, total=100, used=100)
        join(decodes, "new", now=10.0)
        join(decodes, "slow", now=10.0, output_tokens=50, tpot_s=0.2, moved=True)
        decodes.advance()
        policy = get_strategy(name).vary(flows=flows).make_engine(StrategyParameters())
        assert {move.cause for move in policy.propose(10.0, decodes)} == causes


@pytest.mark.parametrize("switch", ["moves_first_decodes", "degrades", "flows_back"])
def test_a_strategy_has_the_moves_of_its_rules_and_no_others(switch):
    flow = FlowRules(**{switch: True}).make_flow(get_strategy("taichi"), StrategyParameters(), random.Random(1))
    switches = ("moves_first_decodes", "degrades", "flows_back")
    assert [each for each in switches if getattr(flow, each)] == [switch]


def test_a_router_policy_that_says_nothing_moves_nothing():
    policy, engines = RouterPolicy(), EngineTable()
    assert not policy.moves_first_decode(Role.PREFILL_HEAVY, engines)
    assert not policy.has_decode_engines(engines)
    assert not policy.is_too_soon(MoveCause.DEGRADE, 0)


@pytest.mark.parametrize("flows", [None, False])
def test_prefill_heavy_engines_hand_off_under_disaggregation(flows):
    policy = get_strategy("disaggregated").vary(flows=flows).make_engine(StrategyParameters())
    assert [policy.hands_off_prefills(role) for role in Role] == [flows is None, False]


@pytest.mark.parametrize(
    ("order", "kind"), [(PrefillOrder.S_EDF, EventDrivenSelector), (PrefillOrder.CHUNKED_EDF, DeadlineSelector)]
)
def test_flowprefill_selects_prompts_by_its_order(order, kind):
    policy = get_strategy("flowprefill").make_engine(StrategyParameters(prefill_order=order))
    assert type(policy.make_selector(IterationProfile(linear_s=(0.01,)))) is kind


def test_names_are_found_as_the_manifest_writes_them():
    assert get_strategy("TaiChi") is STRATEGIES["taichi"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'tai-chi' is unknown; known are taichi, aggregated, disaggregated"):
        get_strategy("tai-chi")


class ByTurns:
    """Policies of a strategy that has neither roles nor moves."""

    def make_router(self, strategy, parameters, rng, num_records):
        return RoleRouter(
            RoundRobinPlacement(parameters, rng, num_records), FlowPolicy(parameters, rng, degrades=False)
        )

    def make_engine(self, strategy, parameters, *, counts_decodes):
        return ChunkedPrefillPolicy(counts_decodes=counts_decodes)


def test_a_seventh_strategy_is_a_row_that_the_simulator_runs():
    toy = Strategy(
        name="by_turns",
        title="By_Turns",
        parameters=(WATERMARK,),
        sliders=SliderUse(varies_ratio=False, varies_prefill_tokens=True, varies_decode_tokens=False),
        policies=ByTurns(),
    )
    parameters = toy.read_parameters({"watermark_percent": "60"})
    with pytest.raises(ValueError, match="early_rejection is unknown to strategy 'by_turns'; known are watermark"):
        toy.read_parameters({"early_rejection": "Off"})
    arrivals = [Arrival(at_s=float(n), prompt_tokens=64, output_tokens=4, slo=SLO) for n in range(6)]
    simulation = Simulation(Cell(engines=make_engines(((3, 96),)), strategy=toy, parameters=parameters), arrivals)
    assert simulation.run()
    assert [engine.counters.num_output_tokens for engine in simulation.engines] == [8, 8, 8]
    assert sum(simulation.num_moves.values()) == 0
