"""The tuner's decisions one by one: each from a state that is written out, at the edge of each number it goes by."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from autotune_harness import BOUNDS, COOLDOWN_S, ENGINE, FOR_LONG, FOR_SHORT, LONG, SHORT, SPECS, make_spec

from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune import decision
from sluice_operator.autotune.condition import describe_status
from sluice_operator.autotune.decision import MIN_GAIN
from sluice_operator.autotune.search_constraints import make_constraints
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.stored_sliders import StoredSliders, StoredTrial
from sluice_operator.autotune.trial import (
    has_attainment_fallen,
)
from sluice_operator.autotune.tuner_state import AutotuneTrial, TunerObservation, TunerState
from sluice_operator.autotune.workload import WINDOW_S, WorkloadSample

NOW = 10_000.0
WALL_S = 1.8e9
LONG_AGO = (NOW - 5000.0,)
ENOUGH = SloCounts(num_finished=20, num_met_both=20)
RESULT = SearchResult(
    sliders=FOR_LONG,
    goodput_rps=3.0,
    attainment=0.95,
    in_force_goodput_rps=2.0,
    in_force_attainment=0.8,
    least_gain=0.4,
)


def make_request(*, row: tuple[int, int, str] = LONG, count: int = 100, spec: object = None, **changes: object):
    request = SearchRequest(
        constraints=make_constraints(spec or make_spec()),
        spec_sliders=SPECS,
        in_force=SPECS,
        workload=WorkloadSample(rows=(row,) * count, rate_rps=2.0),
        engine=ENGINE,
    )
    return replace(request, **changes)


def observe(**changes: object) -> TunerObservation:
    observation = TunerObservation(
        now=NOW,
        wall_s=WALL_S,
        mode="Apply",
        basis="b",
        replicas=4,
        cooldown_s=COOLDOWN_S,
        request=make_request(),
        counts=ENOUGH,
    )
    return replace(observation, **changes)


def make_state(**changes: object) -> TunerState:
    """A tuner that has searched for what it observes, long ago, and has found ``FOR_LONG``."""
    state = TunerState(
        basis="b",
        replicas=4,
        last_request=make_request(),
        search_started_s=NOW - 900.0,
        search_ended_s=NOW - 890.0,
        result=RESULT,
    )
    return replace(state, **changes)


def put_on_trial(**changes: object) -> TunerState:
    """``FOR_LONG`` since just a cool-down; as many requests as are needed finished before."""
    trial = AutotuneTrial(
        former=FOR_SHORT,
        before=ENOUGH,
        started_s=NOW - COOLDOWN_S,
        began_s=WALL_S - COOLDOWN_S,
        start=SloCounts(),
    )
    return make_state(tuned=FOR_LONG, trial=replace(trial, **changes), changes_s=(NOW - COOLDOWN_S,))


def reason_of(state: TunerState, observation: TunerObservation) -> Reason:
    return describe_status(state, observation).reason


# --- when sliders go on trial --------------------------------------------------------------------------------------


def test_better_sliders_go_on_trial_with_what_was_measured_before_them() -> None:
    baseline = SloCounts(num_finished=7, num_met_both=3)
    state = make_state(baseline=baseline, tuned=FOR_SHORT, changes_s=(NOW - 5000.0,))
    after = decision.decide(state, observe(counts=baseline + ENOUGH))
    assert after.tuned == FOR_LONG
    assert after.trial == AutotuneTrial(former=FOR_SHORT, before=ENOUGH, started_s=NOW, began_s=WALL_S)
    assert after.changes_s == (NOW,)  # the earlier one is out of the history


@pytest.mark.parametrize(
    ("state", "observation", "reason"),
    [
        (make_state(result=replace(RESULT, sliders=SPECS)), observe(), Reason.TUNED),
        (make_state(tuned=FOR_LONG), observe(), Reason.TUNED),
        (make_state(result=replace(RESULT, goodput_rps=2.0 * (1.0 + MIN_GAIN) - 1e-9)), observe(), Reason.TUNED),
        (make_state(result=replace(RESULT, least_gain=0.0)), observe(), Reason.TUNED),
        (make_state(), observe(mode="Recommend"), Reason.RECOMMENDED),
        (make_state(rejected=frozenset({FOR_LONG}), changes_s=LONG_AGO), observe(), Reason.RETURNED),
        (make_state(edited_s=NOW - COOLDOWN_S + 0.1), observe(), Reason.COOLING_DOWN),
        (make_state(changes_s=(NOW - COOLDOWN_S + 0.1,)), observe(), Reason.COOLING_DOWN),
        (make_state(baseline=SloCounts(num_finished=1)), observe(), Reason.MEASURING),
        (make_state(failure="no luck", search_ended_s=NOW - 1.0), observe(), Reason.SEARCH_FAILED),
        (make_state(result=None), observe(), Reason.SEARCHING),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else "",
)
def test_sliders_stay_and_the_condition_says_why(state, observation, reason) -> None:
    after = decision.decide(state, observation)
    assert (after.tuned, after.trial) == (state.tuned, None)
    status = describe_status(after, observation)
    assert (status.reason, status.is_true) == (reason, reason is Reason.TUNED)
    assert status.message


@pytest.mark.parametrize(
    "changes",
    [
        {"edited_s": NOW - COOLDOWN_S},
        {"changes_s": (NOW - COOLDOWN_S,)},
        {"rejected": frozenset({FOR_SHORT}), "changes_s": LONG_AGO},
    ],
)
def test_at_the_end_of_the_wait_sliders_go_on_trial(changes) -> None:
    assert decision.decide(make_state(**changes), observe()).tuned == FOR_LONG


def test_a_gain_of_just_the_least_is_enough() -> None:
    result = replace(RESULT, goodput_rps=1.0 + MIN_GAIN, in_force_goodput_rps=1.0)
    assert result.gain >= MIN_GAIN
    assert decision.decide(make_state(result=result), observe()).tuned == FOR_LONG


def test_nothing_is_tried_while_a_search_runs_or_engines_come_and_go() -> None:
    searching = make_state(is_searching=True)
    assert decision.decide(searching, observe()) == searching
    assert decision.decide(make_state(), observe(is_settled=False)) == make_state()


def test_a_trial_is_not_followed_by_another_before_its_verdict() -> None:
    state = replace(put_on_trial(start=None), result=replace(RESULT, sliders=FOR_SHORT))
    after = decision.decide(state, observe(is_settled=False))
    assert (after.tuned, after.trial) == (FOR_LONG, state.trial)


@pytest.mark.parametrize(("number", "cooldowns"), [(1, 1), (2, 2), (3, 4), (4, 8)])
def test_each_change_within_the_history_doubles_the_wait(number, cooldowns) -> None:
    at_s = tuple(NOW - 0.5 * (number - each) for each in range(number))
    wait_s = decision.compute_wait_s(make_state(changes_s=at_s), observe())
    assert wait_s == pytest.approx(cooldowns * COOLDOWN_S - (NOW - at_s[-1]))


def test_a_change_counts_until_the_history_is_over() -> None:
    old_s = NOW - 24 * COOLDOWN_S
    for first_s, cooldowns in ((old_s, 1), (old_s + 0.1, 2)):
        state = make_state(changes_s=(first_s, NOW))
        assert decision.compute_wait_s(state, observe()) == cooldowns * COOLDOWN_S
        after = decision.decide(replace(put_on_trial(before=ENOUGH), changes_s=(first_s, NOW)), observe_fall())
        assert after.changes_s == ((NOW, NOW) if cooldowns == 1 else (first_s, NOW, NOW))


def test_the_later_of_edit_and_change_counts() -> None:
    state = make_state(edited_s=NOW - 10.0, changes_s=(NOW - 30.0,))
    assert decision.compute_wait_s(state, observe()) == COOLDOWN_S - 10.0
    assert decision.compute_wait_s(replace(state, edited_s=NOW - 90.0), observe()) == COOLDOWN_S - 30.0
    assert decision.compute_wait_s(make_state(), observe()) == 0.0


# --- the verdict ---------------------------------------------------------------------------------------------------


def observe_fall(**changes: object) -> TunerObservation:
    return observe(counts=SloCounts(num_finished=20, num_met_both=2), **changes)


def test_a_trial_begins_to_count_when_every_engine_has_the_sliders() -> None:
    state = put_on_trial(start=None)
    assert decision.decide(state, observe(is_settled=False)).trial == state.trial
    assert decision.decide(state, observe()).trial == replace(state.trial, start=ENOUGH)


def test_a_fall_takes_the_former_sliders_back_and_measures_anew() -> None:
    state = replace(put_on_trial(), rejected=frozenset({SPECS}))
    after = decision.decide(state, observe_fall())
    assert (after.tuned, after.trial) == (FOR_SHORT, None)
    assert after.rejected == {SPECS, FOR_LONG}
    assert after.baseline == observe_fall().counts
    assert after.changes_s == (NOW - COOLDOWN_S, NOW)
    # While engines come and go nothing is judged.
    assert decision.decide(state, observe_fall(is_settled=False)).tuned == FOR_LONG


def test_enough_requests_and_a_cool_down_prove_sliders_and_stay_their_measurement() -> None:
    start = SloCounts(num_finished=5, num_met_both=1)
    state = put_on_trial(start=start)
    proved = decision.decide(state, observe(counts=start + ENOUGH))
    assert (proved.tuned, proved.trial, proved.baseline, proved.rejected) == (FOR_LONG, None, start, frozenset())
    one_less = SloCounts(num_finished=19, num_met_both=19)
    assert decision.decide(state, observe(counts=start + one_less)).trial == state.trial
    younger = put_on_trial(start=start, started_s=NOW - COOLDOWN_S + 0.1)
    assert decision.decide(younger, observe(counts=start + ENOUGH)).trial == younger.trial


@pytest.mark.parametrize(("cooldown_s", "age_s"), [(COOLDOWN_S, 4 * COOLDOWN_S), (1.0, 30.0)])
def test_a_trial_that_is_too_old_is_lost(cooldown_s: float, age_s: float) -> None:
    few = observe(counts=SloCounts(num_finished=1, num_met_both=1), cooldown_s=cooldown_s)
    for old_s, tuned in ((age_s, FOR_SHORT), (age_s - 0.1, FOR_LONG)):
        assert decision.decide(put_on_trial(started_s=NOW - old_s), few).tuned == tuned
        assert decision.decide(put_on_trial(started_s=NOW - old_s), replace(few, is_settled=False)).tuned == tuned


@pytest.mark.parametrize(
    ("before", "after", "has_fallen"),
    [
        ((20, 20), (20, 20), False),
        ((19, 19), (1000, 0), False),
        ((1000, 1000), (19, 0), False),
        ((20, 20), (20, 2), True),
        ((20, 2), (20, 20), False),
        # Of many requests: 2 points are no fall, a little more is.
        ((10**6, 950_000), (10**6, 930_000), False),
        ((10**6, 950_000), (10**6, 929_999), True),
        # Chance: 90 % and 80 % of 100 are 2.0 standard errors of 0.0505 apart at 0.85: 0.101.
        ((100, 90), (100, 80), False),
        ((100, 90), (100, 79), True),
        ((100, 90), (50, 39), False),
        ((100, 90), (50, 38), True),
    ],
)
def test_attainment_has_fallen_beyond_two_points_and_two_standard_errors(before, after, has_fallen) -> None:
    counts = [SloCounts(num_finished=finished, num_met_both=met) for finished, met in (before, after)]
    assert has_attainment_fallen(*counts) is has_fallen


# --- searches ------------------------------------------------------------------------------------------------------


def test_a_search_is_for_the_sliders_in_force() -> None:
    for tuned, in_force in ((None, SPECS), (FOR_SHORT, FOR_SHORT)):
        after = decision.decide(make_state(last_request=None, tuned=tuned), observe())
        assert after.last_request == make_request(in_force=in_force)
        assert (after.is_searching, after.search_started_s, after.failure) == (True, NOW, "")


@pytest.mark.parametrize(
    ("last", "request_", "keeps_result", "keeps_measurements"),
    [
        (make_request(), make_request(row=SHORT), True, False),
        (make_request(), make_request(count=400), True, True),
        (
            make_request(),
            make_request(spec=make_spec(slo={"ttftMilliseconds": 9, "tpotMilliseconds": 9})),
            False,
            False,
        ),
        (make_request(), make_request(spec=make_spec(replicas=8)), False, True),
    ],
    ids=["another workload", "a larger sample", "other objectives", "another size"],
)
def test_a_search_forgets_what_belongs_to_another_question(last, request_, keeps_result, keeps_measurements) -> None:
    baseline = SloCounts(num_finished=3)
    state = make_state(last_request=last, baseline=baseline, rejected=frozenset({FOR_SHORT}), changes_s=(NOW - 5e3,))
    after = decision.decide(state, observe(request=request_))
    assert after.is_searching
    assert after.last_request == request_
    assert after.result == (RESULT if keeps_result else None)
    assert after.baseline == (baseline if keeps_measurements else ENOUGH)
    assert after.rejected == (frozenset({FOR_SHORT}) if keeps_measurements else frozenset())


def test_the_first_search_of_a_process_keeps_the_trial_that_the_last_one_left() -> None:
    state = replace(put_on_trial(start=None), last_request=None, result=None, baseline=SloCounts(num_finished=3))
    after = decision.decide(state, observe(is_settled=False))
    assert after.is_searching
    assert (after.trial, after.baseline) == (state.trial, ENOUGH)
    other = make_request(spec=make_spec(slo={"ttftMilliseconds": 9, "tpotMilliseconds": 9}))
    edited = decision.decide(put_on_trial(start=None), observe(is_settled=False, request=other))
    assert edited.is_searching
    assert edited.trial is None


def test_a_failed_search_is_made_again_after_its_time_and_forgets_the_failure() -> None:
    failed = make_state(failure="no luck", search_ended_s=NOW - 59.9)
    assert decision.decide(failed, observe()) == failed
    after = decision.decide(replace(failed, search_ended_s=NOW - 60.0), observe())
    assert (after.is_searching, after.failure) == (True, "")
    recorded = decision.record_result(replace(failed, is_searching=True), RESULT, NOW)
    assert (recorded.is_searching, recorded.failure, recorded.search_ended_s) == (False, "", NOW)
    lost = decision.record_failure(make_state(is_searching=True), "again", NOW)
    assert (lost.is_searching, lost.failure, lost.search_ended_s, lost.result) == (False, "again", NOW, RESULT)


@pytest.mark.parametrize("cooldown_s", [1.0, COOLDOWN_S, 3 * WINDOW_S])
def test_after_a_return_no_search_is_made_on_requests_that_bad_sliders_slowed_down(cooldown_s) -> None:
    wait_s = max(cooldown_s, WINDOW_S)
    shifted = observe(request=make_request(row=SHORT), cooldown_s=cooldown_s)
    for since_s, is_searching in ((wait_s - 0.1, False), (wait_s, True)):
        state = make_state(rejected=frozenset({FOR_LONG}), changes_s=(NOW - since_s,))
        assert decision.decide(state, shifted).is_searching is is_searching
    assert decision.decide(make_state(changes_s=(NOW - 1.0,)), shifted).is_searching
    assert not decision.decide(put_on_trial(start=None), replace(shifted, cooldown_s=1e9)).is_searching


@pytest.mark.parametrize(("took_s", "rest_s"), [(0.1, 5.0), (5.0, 5.0), (6.0, 6.0), (60.0, 60.0), (600.0, 60.0)])
def test_after_a_search_nothing_but_an_edit_causes_the_next_one_for_as_long_as_it_took(took_s, rest_s) -> None:
    for since_s, is_searching in ((rest_s - 0.01, False), (rest_s, True)):
        ended_s = NOW - since_s
        state = make_state(search_started_s=ended_s - took_s, search_ended_s=ended_s)
        assert decision.decide(state, observe(request=make_request(row=SHORT))).is_searching is is_searching
        edited = make_request(spec=make_spec(slo={"ttftMilliseconds": 9, "tpotMilliseconds": 9}))
        assert decision.decide(state, observe(request=edited)).is_searching


# --- what a process leaves, and sizes ------------------------------------------------------------------------------

STORED = StoredSliders(
    basis="b",
    replicas=4,
    sliders=FOR_LONG,
    trial=StoredTrial(former=FOR_SHORT, before=SloCounts(num_finished=9, num_met_both=4), began_s=WALL_S),
)


@pytest.mark.parametrize("trial", [None, STORED.trial, replace(STORED.trial, former=None)])
def test_stored_sliders_are_read_as_they_were_written(trial) -> None:
    stored = replace(STORED, trial=trial)
    text = stored.to_json()
    assert StoredSliders.from_json(text) == stored
    # The annotation does not change while what it says does not.
    assert list(json.loads(text)) == sorted(json.loads(text))


@pytest.mark.parametrize(
    "broken",
    [
        {"trial": {"former": {"a": 1}, "before": {}}},
        {"trial": {"former": None}},
        {"trial": {"former": None, "before": {"a": 1}}},
        {"replicas": "four"},
    ],
)
def test_a_stored_trial_that_somebody_edited_is_ignored(broken) -> None:
    assert StoredSliders.from_json(json.dumps({**json.loads(STORED.to_json()), **broken})) is None


def test_the_first_decision_takes_what_an_earlier_process_stored() -> None:
    observation = observe(request=None, stored=replace(STORED, replicas=8), replicas=8)
    state = decision.decide(TunerState(), observation)
    expected = AutotuneTrial(former=FOR_SHORT, before=STORED.trial.before, started_s=NOW, began_s=WALL_S)
    assert (state.basis, state.replicas, state.tuned, state.trial) == (
        "b",
        8,
        FOR_LONG,
        replace(expected, start=ENOUGH),
    )
    assert state.edited_s is None


@pytest.mark.parametrize(
    ("began_s", "age_s"),
    [(WALL_S - 7.0, 7.0), (WALL_S + 3600.0, 0.0), (math.inf, 0.0)],
    ids=["a while ago", "by a clock that is ahead", "when nobody stored it"],
)
def test_a_trial_is_as_old_for_the_next_process_as_it_is(began_s, age_s) -> None:
    stored = replace(STORED, trial=replace(STORED.trial, began_s=began_s))
    trial = decision.decide(TunerState(), observe(request=None, stored=stored)).trial
    assert trial is not None
    assert (trial.started_s, trial.began_s) == (NOW - age_s, WALL_S - age_s)


def test_sliders_that_an_operator_stored_which_knew_no_time_of_the_trial_stay_in_force() -> None:
    data = json.loads(STORED.to_json())
    del data["trial"]["began_s"]
    assert StoredSliders.from_json(json.dumps(data)) == replace(STORED, trial=replace(STORED.trial, began_s=math.inf))


def test_stored_sliders_of_another_size_are_scaled() -> None:
    state = decision.decide(TunerState(), observe(request=None, stored=replace(STORED, replicas=8), is_settled=False))
    assert state.replicas == 4
    assert state.tuned == replace(FOR_LONG, num_prefill_heavy=2)
    assert state.trial is not None
    assert state.trial.former == replace(FOR_SHORT, num_prefill_heavy=1)


@pytest.mark.parametrize(
    "changes", [{"mode": "Recommend"}, {"stored": None}, {"stored": replace(STORED, basis="another")}]
)
def test_stored_sliders_of_another_spec_or_mode_are_forgotten(changes) -> None:
    state = decision.decide(TunerState(), observe(request=None, **{"stored": STORED, **changes}))
    assert (state.tuned, state.trial) == (None, None)


def test_an_edit_forgets_all_but_when_it_was() -> None:
    state = decision.decide(put_on_trial(), observe(request=None, basis="c", replicas=6, stored=STORED))
    assert state == TunerState(basis="c", replicas=6, edited_s=NOW)


def test_another_size_scales_what_is_in_force_and_what_may_return() -> None:
    state = decision.decide(put_on_trial(start=None), observe(request=None, replicas=8, is_settled=False))
    assert (state.replicas, state.tuned) == (8, replace(FOR_LONG, num_prefill_heavy=6))
    # What was measured of another size says nothing: the trial begins anew.
    before = put_on_trial(start=None).trial
    assert state.trial == replace(before, former=replace(FOR_SHORT, num_prefill_heavy=2), started_s=NOW, began_s=WALL_S)
    from_spec = decision.decide(put_on_trial(start=None, former=None), observe(request=None, replicas=8))
    assert from_spec.trial is not None
    assert from_spec.trial.former is None


def test_a_size_that_was_searched_for_has_its_own_sliders_unless_they_failed_or_others_are_on_trial() -> None:
    sized = Sliders(num_prefill_heavy=5, prefill_heavy_tokens=256, decode_heavy_tokens=32)
    larger = observe(request=None, replicas=8, sized=sized)
    found = decision.decide(make_state(tuned=FOR_LONG), larger)
    assert (found.replicas, found.tuned, found.home, found.baseline) == (8, sized, None, ENOUGH)
    failed = decision.decide(make_state(tuned=FOR_LONG, rejected=frozenset({sized})), larger)
    assert failed.tuned == replace(FOR_LONG, num_prefill_heavy=6)
    on_trial = decision.decide(put_on_trial(start=None), replace(larger, is_settled=False))
    assert on_trial.tuned == replace(FOR_LONG, num_prefill_heavy=6)


def test_sliders_come_back_from_one_engine_and_from_none_as_they_were() -> None:
    """From one engine no mix can be told: what counts is what was found, and for how many."""
    state = make_state(tuned=FOR_LONG)
    one = decision.decide(state, observe(request=None, replicas=1))
    assert (one.replicas, one.home) == (1, (4, FOR_LONG))
    assert one.tuned == replace(FOR_LONG, num_prefill_heavy=1)
    none = decision.decide(one, observe(request=None, replicas=0))
    assert none == one
    back = decision.decide(none, observe(request=None, replicas=4))
    assert (back.replicas, back.tuned) == (4, FOR_LONG)
    specs = decision.decide(make_state(), observe(request=None, replicas=8))
    assert (specs.tuned, specs.home, specs.replicas) == (None, None, 8)


@pytest.mark.parametrize(
    ("tuned", "words"),
    [
        (None, "; strategy Auto is Sluice, the default"),
        (replace(FOR_LONG, strategy="sluice"), "; strategy Auto is Sluice, as a search chose"),
    ],
)
def test_the_condition_names_the_strategy_where_it_is_the_tuners_to_choose(tuned, words) -> None:
    state = make_state(tuned=tuned)
    plain = describe_status(state, observe())
    auto = describe_status(state, observe(chooses_strategy=True))
    assert auto == replace(plain, message=plain.message + words)


@pytest.mark.parametrize("of_former", [False, True])
def test_stored_sliders_of_a_strategy_that_is_unknown_are_ignored(of_former) -> None:
    odd = replace(FOR_LONG, strategy="unheard-of")
    trial = replace(STORED.trial, former=odd if of_former else FOR_SHORT)
    stored = replace(STORED, sliders=FOR_LONG if of_former else odd, trial=trial)
    assert StoredSliders.from_json(stored.to_json()) is None
    known = replace(stored, sliders=replace(FOR_LONG, strategy="sluice"), trial=STORED.trial)
    assert StoredSliders.from_json(known.to_json()) == known


def test_a_trial_is_judged_though_nothing_can_be_searched() -> None:
    assert decision.decide(put_on_trial(), observe_fall(request=None)).tuned == FOR_SHORT


# --- the condition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "observation", "reason", "is_true", "part"),
    [
        (make_state(), observe(mode="Off"), Reason.OFF, False, "off"),
        (put_on_trial(), observe(), Reason.ON_TRIAL, True, "former ones return"),
        (
            make_state(result=None),
            observe(request=None, missing=(Reason.NO_SAMPLE, "send some")),
            Reason.NO_SAMPLE,
            False,
            "send some",
        ),
        (make_state(), observe(request=None), Reason.MEASURING, False, "measured first"),
        (make_state(failure="no luck"), observe(), Reason.SEARCH_FAILED, False, "no luck"),
        (make_state(result=None), observe(), Reason.SEARCHING, False, "search"),
        (make_state(tuned=FOR_LONG), observe(), Reason.TUNED, True, "in force are those recommended"),
        (make_state(result=replace(RESULT, sliders=SPECS)), observe(), Reason.TUNED, True, "in force are those"),
        (make_state(result=replace(RESULT, least_gain=0.0)), observe(), Reason.TUNED, True, "better by 5%"),
        (make_state(), observe(mode="Recommend"), Reason.RECOMMENDED, False, "status.recommended"),
        (make_state(rejected=frozenset({FOR_LONG})), observe(), Reason.RETURNED, False, "attainment fell"),
        (make_state(edited_s=NOW), observe(), Reason.COOLING_DOWN, False, "too recent"),
        (make_state(), observe(counts=SloCounts()), Reason.MEASURING, False, "measured first"),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else "",
)
def test_the_condition_says_what_holds(state, observation, reason, is_true, part) -> None:
    if reason is Reason.MEASURING:
        observation = replace(observation, counts=SloCounts())
    status = describe_status(state, observation)
    assert (status.reason, status.is_true) == (reason, is_true)
    assert part in status.message


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, False),
        ({"prefillHeavy": 1}, True),
        ({"chunkSizes": {"prefillHeavy": 1024, "decodeHeavy": 64}}, True),
        ({"strategy": "Aggregated"}, True),
        ({"autotune": {"mode": "Recommend", "bounds": BOUNDS}}, True),
        ({"autotune": {"mode": "Apply", "bounds": {**BOUNDS, "prefillHeavy": {"min": 1, "max": 2}}}}, True),
        ({"autotune": {"mode": "Apply", "bounds": BOUNDS, "cooldownSeconds": 7}}, False),
        ({"slo": {"ttftMilliseconds": 9, "tpotMilliseconds": 9}}, False),
        ({"replicas": 8}, False),
    ],
)
def test_the_basis_is_what_users_decide_about_sliders(changes, differs) -> None:
    assert (decision.make_basis(make_spec(**changes)) != decision.make_basis(make_spec())) is differs


def test_the_basis_of_a_spec_does_not_depend_on_the_order_of_its_fields() -> None:
    """It is stored: another one resets the tuner of every cluster."""
    basis = decision.make_basis(make_spec())
    assert basis == json.dumps(json.loads(basis), sort_keys=True)
    assert json.loads(basis)[:3] == ["Apply", "TaiChi", "50%"]


# --- the size that sliders were found for --------------------------------------------------------------------------


def test_sliders_that_a_search_found_for_this_size_are_at_home_here() -> None:
    """What they are scaled from when the fleet grows is what was found, not what was in force before."""
    away = {"tuned": FOR_SHORT, "home": (2, FOR_SHORT)}
    assert decision.decide(make_state(**away), observe()).home is None
    grown = decision.decide(make_state(**away), observe(replicas=6, sized=FOR_LONG, is_settled=False))
    assert (grown.tuned, grown.home, grown.replicas) == (FOR_LONG, None, 6)
    trial = AutotuneTrial(former=SPECS, before=ENOUGH, started_s=NOW - 50.0 * COOLDOWN_S, began_s=0.0)
    returned = decision.decide(make_state(**away, trial=trial, changes_s=LONG_AGO), observe(is_settled=False))
    assert (returned.tuned, returned.home, returned.trial) == (SPECS, None, None)
