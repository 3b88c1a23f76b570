"""Every placement asks the same rule about a prompt that no engine is expected to serve in time."""

import random

import pytest
from placement_harness import BUSY, make_request, make_table

from sluice_core.records import Place, Reject
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement
from sluice_core.scheduling.rolling.rolling_activation import RollingPlacement
from sluice_core.scheduling.shortest_queue_placement import ShortestQueuePlacement
from sluice_core.scheduling.slack.slack_placement import SlackPlacement
from sluice_core.scheduling.splitting.split_placement import SplitPlacement
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

ASKING = (LengthAwarePlacement, ShortestQueuePlacement, SlackPlacement, RollingPlacement, SplitPlacement)
SHORT_S = 0.01


def decide(make, early_rejection, *engines, ttft_s=SHORT_S):
    # Without a credit a late prompt is not held back for its own turn.
    parameters = StrategyParameters(early_rejection=early_rejection, credit_s=0.0)
    (decision,) = make(parameters, random.Random(0), 0).assign(0.0, [make_request(ttft_s=ttft_s)], make_table(*engines))
    return decision


@pytest.mark.parametrize("make", ASKING)
def test_a_late_prompt_is_refused_with_a_time_to_try_again_under_reject_alone(make):
    refusal = decide(make, EarlyRejection.REJECT, BUSY, BUSY)
    assert isinstance(refusal, Reject)
    assert refusal.retry_after_s > 0.0
    placed = decide(make, EarlyRejection.OFF, BUSY, BUSY)
    assert isinstance(placed, Place)
    assert not placed.is_feasible


@pytest.mark.parametrize("make", ASKING)
@pytest.mark.parametrize("engine", [{}, BUSY | {"observations": 1}], ids=["idle", "little is known of it"])
def test_an_engine_that_may_do_better_than_its_estimate_is_tried(make, engine):
    placed = decide(make, EarlyRejection.REJECT, engine)
    assert isinstance(placed, Place)
    assert (placed.reason, placed.is_feasible) == ("unproven", False)


@pytest.mark.parametrize("make", ASKING)
def test_what_is_in_time_is_no_concern_of_the_rule(make):
    decisions = [decide(make, policy, BUSY, ttft_s=600.0) for policy in EarlyRejection]
    assert all(isinstance(decision, Place) and decision.is_feasible for decision in decisions)


@pytest.mark.parametrize("name", ["round_robin", "least_work"])
def test_baselines_that_ignore_objectives_refuse_nothing(name):
    assert isinstance(decide(PLACEMENTS[name], EarlyRejection.REJECT, BUSY), Place)
