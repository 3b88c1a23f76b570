"""What strategy Sluice's router notes of prompts that it places and holds, and what its engines count as prompts."""

import random

import pytest
from test_slack_strategy import SLUICE, assign, bind, make_batch, make_decodes, make_prefill, make_table

from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.strategy_parameters import StrategyParameters


def test_seats_are_what_lacks_where_one_engine_has_the_kv():
    no_seat = EngineLoad(running_decodes=64)
    no_kv = EngineLoad(kv_blocks_used=1000)
    for loads in ((no_seat, no_kv), (no_kv, no_seat)):
        assert [one.reason for one in assign(make_table(*loads), make_prefill("a"))] == ["seats"]
    assert [one.reason for one in assign(make_table(no_kv, no_kv), make_prefill("a"))] == ["kv"]


@pytest.mark.parametrize("late_tokens", [0, 5000])
def test_late_prompts_that_had_their_share_let_others_go_first(late_tokens):
    """Two of them take more than a second, all that late prompts may save up.

    What engines have to do for other late ones first once counted as time that these gave to others.
    """
    queued = {"queued_requests": 1, "queued_prefill_tokens": late_tokens} if late_tokens else {}
    load = EngineLoad(**queued, late_requests=len(queued) // 2, late_prefill_tokens=late_tokens)
    router = SLUICE.make_router(StrategyParameters(late_share=0.01, credit_s=0.0), random.Random(1))
    for order in (["late", "fresh"], ["late", "fresh"], ["fresh", "late"]):
        late, fresh = make_prefill("late", arrival_s=0.0, tokens=6000), make_prefill("fresh", arrival_s=9.0)
        decisions = router.assign(10.0, [late, fresh], make_table(load, load))
        assert [one.request_id for one in decisions] == order


@pytest.mark.parametrize(
    "kinds",
    [{"num_new_prompts": 2}, {"num_started_prefills": 2}, {"num_recomputing": 2}, {"num_recomputing": 1}],
    ids=", ".join,
)
def test_every_kind_of_prefill_is_bound_by_the_slack(kinds):
    decodes = make_decodes(("a", 9.0, 10, 0.11))
    alone = make_batch(num_decodes=20, decode_context_tokens=20_000)
    beside = make_batch(**{"num_decodes": 20, "decode_context_tokens": 20_000, "num_new_prompts": 1} | kinds)
    budgets = [bind(decodes).limits(10.0, batch).prefill_budget_tokens for batch in (alone, beside)]
    assert budgets[0] == budgets[1] < 2028
