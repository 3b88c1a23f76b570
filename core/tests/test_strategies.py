import random

import pytest

from sluice_core.records import FlowParameters
from sluice_core.strategies import STRATEGIES, get_strategy


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_makes_all_three_policies(name):
    strategy, parameters, rng = STRATEGIES[name], FlowParameters(), random.Random(0)
    assert strategy.name == name
    assert strategy.make_placement(parameters, rng) is not None
    assert strategy.make_batching() is not None
    assert strategy.make_flow(parameters, rng).parameters is parameters


@pytest.mark.parametrize(
    ("name", "moves"),
    [("taichi", (True, True, True)), ("aggregated", (False,) * 3), ("disaggregated", (True, False, False))],
)
def test_strategies_differ_in_flow_only(name, moves):
    strategy = get_strategy(name)
    assert (strategy.moves_first_decodes, strategy.degrades, strategy.flows_back) == moves


def test_names_are_found_as_the_manifest_writes_them():
    assert get_strategy("TaiChi") is STRATEGIES["taichi"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'tai-chi' is unknown; known are taichi, aggregated, disaggregated"):
        get_strategy("tai-chi")
