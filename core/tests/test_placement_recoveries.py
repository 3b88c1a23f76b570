"""Placement of recoveries: where they go, their share of an engine, and what waits behind them."""

import pytest
from placement_harness import BUSY, E0, E1, FULL, GONE, OFF, REJECT, D, P, decide, make_policy, make_request, make_table

from sluice_core.records import EngineId, Hold, Place, RequestId
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import (
    RECOVERY_BURST_S,
)
from sluice_core.scheduling.placement_records import explain


def test_a_recovery_goes_where_it_is_done_first_not_where_the_queue_is_shortest():
    table = make_table({"role": P, "queued_prefill_tokens": 800}, {"role": D, "queued_prefill_tokens": 700})
    decision = decide(table, make_request(tokens=6000, is_recovery=True))
    assert (decision.engine_id, decision.reason, decision.is_feasible) == ("e0", "recovery", True)


@pytest.mark.parametrize(
    ("engines", "reason"),
    [([], "no_engine"), ([{"chunk": 0}], "room"), ([FULL], "kv")],
    ids=["nobody", "no room", "no KV"],
)
def test_a_recovery_that_nobody_can_take_is_held(engines, reason):
    decision = decide(make_table(*engines), make_request(is_recovery=True))
    assert (type(decision), decision.request_id, decision.reason) == (Hold, "r0", reason)


def use_up_recovery_share(table, name, *, tokens=6000, now=0.0):
    """Place a recovery, and let the engine report that it is done with it, and what else it has."""
    table.record_placement(
        EngineId(name), RequestId("gone"), now, tokens=tokens, kv_tokens=tokens, execute_s=0.75, is_recovery=True
    )
    table.mark_submitted(EngineId(name), RequestId("gone"), 1)


def test_an_idle_engine_takes_recoveries_beyond_their_share():
    table = make_table({})
    use_up_recovery_share(table, "e0")
    busy = EngineLoad(kv_blocks_total=10_000, last_submit_number=1, queued_prefill_tokens=1, queued_requests=1)
    table.report(EngineId("e0"), busy, 0.0)
    assert decide(table, make_request(is_recovery=True)).reason == "recovery_cap"
    table.report(EngineId("e0"), EngineLoad(kv_blocks_total=10_000, last_submit_number=1), 0.0)
    assert decide(table, make_request(1, is_recovery=True)).reason == "recovery"


@pytest.mark.parametrize("now", [0.0, 1000.0])
def test_the_share_of_recoveries_is_open_from_its_very_moment(now):
    table = make_table({"queued_prefill_tokens": 500})
    use_up_recovery_share(table, "e0", now=now)
    # Half of the engine's time: 0.75 s of work take 1.5 s.
    assert table[EngineId("e0")].recovery_free_at_s == now + 1.5
    open_s = table[EngineId("e0")].recovery_free_at_s - RECOVERY_BURST_S
    assert decide(table, make_request(is_recovery=True), now=open_s - 1e-9).reason == "recovery_cap"
    assert decide(table, make_request(is_recovery=True), now=open_s).reason == "recovery"


@pytest.mark.parametrize("rejection", [OFF, REJECT])
def test_recoveries_behind_one_that_waits_for_its_share_wait_too(rejection):
    """One walk, not one for each: the second would fit into the engine that is open, which the first does not."""
    table = make_table({"queued_prefill_tokens": 500}, {"kv_blocks_used": 9900})
    use_up_recovery_share(table, "e0")
    waiting = [make_request(n, tokens=tokens, is_recovery=True) for n, tokens in enumerate((2000, 100))]
    assert [d.reason for d in make_policy(rejection).assign(0.0, waiting, table)] == ["recovery_cap"] * 2
    assert decide(table, waiting[1]).engine_id == "e1"


def test_recoveries_go_first_by_tpot_debt():
    waiting = [
        make_request(0, priority=9),
        make_request(1, is_recovery=True, next_token_due_s=2.0),
        make_request(2, is_recovery=True, next_token_due_s=1.0),
    ]
    decisions = make_policy().assign(3.0, waiting, make_table({}, {}, {}))
    assert [d.request_id for d in decisions] == ["r2", "r1", "r0"]
    assert [d.reason for d in decisions[:2]] == ["recovery", "recovery"]


def test_a_dead_engines_streams_do_not_stop_all_others():
    table, policy = make_table({}, {}), make_policy()
    recoveries = [make_request(n, is_recovery=True, tokens=2000) for n in range(200)]
    new = make_request(999, ttft_s=5.0)
    *recovered, last = policy.assign(0.0, [*recoveries, new], table)
    placed = [d for d in recovered if isinstance(d, Place)]
    held = [d for d in recovered if isinstance(d, Hold)]
    assert placed
    assert {d.reason for d in held} == {"recovery_cap"}
    assert last.is_feasible
    assert max(state.free_at_s for state in table) < 2.0


def test_held_recoveries_follow_at_their_share_of_the_engine():
    table, policy = make_table({}), make_policy()
    waiting = [make_request(n, is_recovery=True, tokens=2000) for n in range(100)]
    placed_s = 0.0
    for tick in range(200):
        now = tick * 0.05
        decisions = {d.request_id: d for d in policy.assign(now, waiting, table)}
        waiting = [r for r in waiting if isinstance(decisions[r.request_id], Hold)]
        # The engine always has other prefills waiting: half of its time is for recoveries.
        table[EngineId("e0")].in_flight.clear()
        table.report(
            EngineId("e0"), EngineLoad(kv_blocks_total=10**6, queued_prefill_tokens=5000, queued_requests=1), now
        )
        execute_s = explain(policy.records[0])[0].execute_s
        placed_s = (100 - len(waiting)) * execute_s
        assert placed_s <= 0.5 * (now + 0.5) + 2 * execute_s
    assert placed_s >= 0.5 * 9.5


@pytest.mark.parametrize(
    ("now", "kind"),
    [(1.0, Place), (6.0, Place), (6.5, Place), (7.0, Hold)],
    ids=["not due", "due recently, arrived long ago", "on the verge", "due long ago"],
)
def test_a_recovery_without_kv_stops_new_prefills_only_when_it_has_waited_long(now, kind):
    table = make_table({"kv_blocks_used": 9950})
    recovery = make_request(0, tokens=5000, is_recovery=True, next_token_due_s=1.5)
    new = make_request(1, tokens=100, arrival_s=now)
    assert [type(d) for d in make_policy().assign(now, [recovery, new], table)] == [Hold, kind]


def test_a_late_recovery_stops_prompts_and_no_other_recovery():
    table = make_table({"kv_blocks_used": 9950})
    late = make_request(0, tokens=5000, is_recovery=True, next_token_due_s=1.0)
    small = [make_request(1, tokens=100, is_recovery=True, next_token_due_s=2.0), make_request(2, tokens=100)]
    assert [type(d) for d in make_policy().assign(9.0, [late, *small], table)] == [Hold, Place, Hold]


def test_a_recovery_is_explained_as_feasible_though_it_is_late():
    policy = make_policy()
    assert decide(make_table(BUSY), make_request(is_recovery=True, ttft_s=GONE), policy).engine_id == "e0"
    assert explain(policy.records[0])[0].reason == "feasible"
    decide(make_table(BUSY), make_request(1, ttft_s=GONE), policy)
    assert explain(policy.records[1])[0].reason == "ttft"


def test_a_recovery_goes_where_its_tokens_are():
    table = make_table({}, {})
    for engine_id in (E0, E1):
        request = make_request(tokens=6000, is_recovery=True, cached_tokens={engine_id: 5000})
        assert decide(table, request).engine_id == engine_id
