import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_core.records import Slo
from sluice_core.slo_attainment import (
    ATTAINMENT_WINDOW_S,
    DEFAULT_ATTAINMENT,
    NO_REQUESTS,
    AttainmentCounters,
    RequestEnd,
    SloCounts,
    SloOutcome,
    SloWindow,
    check_slo,
    compute_tpot_s,
)

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
BOTH = SloOutcome(met_ttft=True, met_tpot=True)
TTFT_ONLY = SloOutcome(met_ttft=True, met_tpot=False)


def test_tpot_is_the_mean_gap_pauses_included():
    assert compute_tpot_s(10.0, 11.0, 11) == pytest.approx(0.1)


def test_one_token_has_no_tpot_and_meets_it():
    assert compute_tpot_s(10.0, 10.0, 1) is None
    assert check_slo(SLO, 0.5, None).met_both


@pytest.mark.parametrize(("first", "last", "tokens"), [(0.0, 1.0, 0), (1.0, 0.5, 3)], ids=["no token", "backwards"])
def test_impossible_times_are_refused(first, last, tokens):
    with pytest.raises(ValueError):
        compute_tpot_s(first, last, tokens)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "met"),
    [
        (1.0, 0.05, (True, True)),
        (1.001, 0.05, (False, True)),
        (1.0, 0.051, (True, False)),
        (2.0, 1.0, (False, False)),
    ],
    ids=["met at equality", "late first token", "slow", "neither"],
)
def test_objectives_are_checked_one_by_one(ttft_s, tpot_s, met):
    outcome = check_slo(SLO, ttft_s, tpot_s)
    assert (outcome.met_ttft, outcome.met_tpot) == met
    assert outcome.met_both == all(met)


@pytest.mark.parametrize(
    ("end", "finished", "met"),
    [
        (RequestEnd.FINISHED, 1, 1),
        (RequestEnd.FAILED, 1, 0),
        (RequestEnd.REJECTED, 1, 0),
        (RequestEnd.CANCELLED, 0, 0),
    ],
    ids=str,
)
def test_how_a_request_ends_decides_what_it_counts(end, finished, met):
    counters = AttainmentCounters()
    counters.record(0.0, "gold", end, BOTH)
    window = counters.window(0.0)
    assert (window.num_finished, window.num_met_ttft, window.num_met_tpot, window.num_met_both) == (
        finished,
        met,
        met,
        met,
    )


def test_attainment_is_none_before_any_request_and_a_share_after():
    counters = AttainmentCounters()
    assert counters.window(0.0).attainment is None
    counters.record(0.0, "", RequestEnd.FINISHED, BOTH)
    counters.record(0.0, "", RequestEnd.FINISHED, TTFT_ONLY)
    assert counters.window(1.0).attainment == 0.5


def test_classes_are_counted_apart_and_summed_on_demand():
    counters = AttainmentCounters()
    counters.record(0.0, "", RequestEnd.FINISHED, BOTH)
    counters.record(0.0, "gold", RequestEnd.FAILED)
    assert counters.totals["gold"].num_finished == 1
    assert counters.window(0.0, ["gold"]).attainment == 0.0
    assert counters.window(0.0).num_finished == 2


def test_attainment_is_that_of_the_last_five_minutes_and_is_to_be_nine_tenths():
    counters = AttainmentCounters()
    counters.record(0.0, "", RequestEnd.FINISHED, BOTH)
    assert [counters.window(now).num_finished for now in (300.0, 300.1)] == [1, 0]
    assert DEFAULT_ATTAINMENT == 0.9


@given(
    gaps=st.lists(st.floats(0, 200), min_size=1, max_size=40),
    ends=st.lists(st.sampled_from(list(RequestEnd)), min_size=40, max_size=40),
    later=st.floats(0, 400),
)
def test_window_keeps_everything_younger_than_it_and_nothing_much_older(gaps, ends, later):
    counters = AttainmentCounters()
    now, times = 0.0, []
    for gap, end in zip(gaps, ends, strict=False):
        now += gap
        counters.record(now, "", end, BOTH)
        if end is not RequestEnd.CANCELLED:
            times.append(now)
    now += later
    num_counted = counters.window(now).num_finished
    assert sum(t > now - ATTAINMENT_WINDOW_S for t in times) <= num_counted
    assert num_counted <= sum(t > now - ATTAINMENT_WINDOW_S - 5.0 for t in times)
    if times:
        assert counters.totals[""].num_finished == len(times)


def test_counts_are_added_and_taken_from_each_other_one_by_one():
    one = SloCounts(num_finished=10, num_met_ttft=7, num_met_tpot=5, num_met_both=3)
    other = SloCounts(num_finished=1, num_met_ttft=2, num_met_tpot=3, num_met_both=4)
    assert one + other == SloCounts(num_finished=11, num_met_ttft=9, num_met_tpot=8, num_met_both=7)
    assert (one + other) - other == one


def test_five_seconds_share_a_step_and_a_step_leaves_with_its_last_request():
    window, one = SloWindow(20.0), SloCounts(num_finished=1)
    for now in (0.0, 4.9, 5.0, 9.9, 10.0):
        window.add(now, "gold", one)
    times = (20.0, 24.9, 25.0, 29.9, 30.0, 30.1)
    left = [window.sum_by_class(now).get("gold", NO_REQUESTS).num_finished for now in times]
    assert left == [5, 5, 3, 3, 1, 0]
    window.add(30.2, "", one)
    assert window.sum_by_class(30.2) == {"": one}
