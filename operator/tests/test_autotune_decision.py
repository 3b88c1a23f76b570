"""When sliders are searched for, changed, kept and taken back. No clock but the one that is handed in."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from autotune_harness import BOUNDS, COOLDOWN_S, FOR_LONG, FOR_SHORT, LONG, SHORT, SPECS, Plant, best_for, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.api.condition_types import REASONS, ConditionType, Reason
from sluice_operator.api.sliders import Sliders, resolve_sliders, scale_sliders
from sluice_operator.autotune import decision
from sluice_operator.autotune.condition import describe_status
from sluice_operator.autotune.stored_sliders import StoredSliders
from sluice_operator.autotune.trial import HISTORY_COOLDOWNS
from sluice_operator.autotune.tuner_state import TunerState


def test_recommend_searches_once_and_changes_nothing() -> None:
    plant = Plant(make_spec(autotune={"mode": "Recommend", "bounds": BOUNDS}))
    assert plant.reason is Reason.SEARCHING
    plant.run(600)
    assert (plant.num_asked, plant.changes) == (1, [])
    assert plant.reason is Reason.RECOMMENDED
    assert plant.state.result is not None
    assert plant.state.result.sliders == FOR_LONG


def test_apply_measures_first_then_changes_then_keeps_what_proved_itself() -> None:
    plant = Plant()
    plant.run(5)
    assert plant.reason is Reason.MEASURING
    plant.run(10)
    assert plant.reason is Reason.ON_TRIAL
    assert [sliders for _, sliders in plant.changes] == [FOR_LONG]
    plant.run(2 * COOLDOWN_S)
    assert plant.reason is Reason.TUNED
    assert (plant.sliders, len(plant.changes), plant.num_asked) == (FOR_LONG, 1, 1)


def test_a_gain_below_the_threshold_changes_nothing() -> None:
    plant = Plant(gain=decision.MIN_GAIN - 0.001)
    plant.run(600)
    assert plant.changes == []
    assert plant.reason is Reason.TUNED


@pytest.mark.parametrize(("least_gain", "is_tried"), [(-0.01, False), (0.0, False), (0.001, True)])
def test_sliders_are_tried_only_where_they_serve_more_on_every_seed(*, least_gain: float, is_tried: bool) -> None:
    plant = Plant(least_gain=least_gain)
    plant.run(600)
    assert bool(plant.changes) == is_tried
    assert plant.reason is Reason.TUNED


def test_a_scale_event_scales_what_is_in_force_and_searches_anew() -> None:
    plant = Plant()
    plant.run(200)
    assert (plant.sliders, plant.num_asked) == (FOR_LONG, 1)
    plant.best = lambda request: request.in_force
    plant.spec = make_spec(replicas=8)
    plant.step()
    assert plant.sliders == replace(FOR_LONG, num_prefill_heavy=6)
    assert (plant.state.edited_s, plant.num_asked) == (None, 2)
    plant.run(200)
    assert plant.sliders == replace(FOR_LONG, num_prefill_heavy=6)
    plant.spec = make_spec(replicas=2)
    plant.step()
    assert plant.sliders == replace(FOR_LONG, num_prefill_heavy=1)


@pytest.mark.parametrize(("search_s", "rest_s"), [(1.0, 5.0), (30.0, 30.0), (300.0, 60.0)])
def test_after_a_search_the_next_one_waits_as_long_as_it_took_within_bounds(search_s: float, rest_s: float) -> None:
    plant = Plant(make_spec(autotune={"mode": "Recommend", "bounds": BOUNDS}), search_s=search_s)
    plant.run(2)
    while plant.state.is_searching:
        plant.step()
    ended_s = plant.state.search_ended_s
    plant.rows = (SHORT,) * 100
    while plant.num_asked == 1:
        plant.step()
    assert plant.now - ended_s == rest_s


def test_nothing_is_changed_or_evaluated_while_engines_come_and_go() -> None:
    plant = Plant(is_settled=False)
    plant.run(300)
    assert plant.changes == []
    plant.is_settled = True
    plant.run(2)
    assert plant.sliders == FOR_LONG
    plant.is_settled, plant.attainment = False, lambda sliders: 0.1
    plant.run(100)
    assert plant.sliders == FOR_LONG


def test_an_edit_of_a_slider_wins_at_once_and_begins_anew() -> None:
    plant = Plant()
    plant.run(20)
    assert plant.sliders == FOR_LONG
    plant.spec = make_spec(chunkSizes={"prefillHeavy": 1024, "decodeHeavy": 64})
    plant.step()
    assert plant.sliders == replace(SPECS, prefill_heavy_tokens=1024)
    assert plant.state.result is None
    edited_s = plant.now
    plant.run(COOLDOWN_S - 2)
    assert plant.reason is Reason.COOLING_DOWN
    plant.run(10)
    assert plant.changes[-1][1] == FOR_LONG
    assert plant.changes[-1][0] - edited_s >= COOLDOWN_S


def test_an_edited_objective_starts_a_search_at_once_and_ends_the_running_one() -> None:
    plant = Plant(search_s=30.0)
    plant.run(10)
    first = plant.state.last_request
    plant.spec = make_spec(slo={"ttftMilliseconds": 2000, "tpotMilliseconds": 40})
    plant.step()
    assert plant.state.last_request is not first
    assert plant.state.last_request.constraints.classes[0].tpot_milliseconds == 40
    assert (plant.state.is_searching, plant.num_asked) == (True, 2)


def test_an_edited_objective_leaves_the_sliders_in_force_until_there_are_better_ones() -> None:
    plant = Plant()
    plant.run(200)
    assert plant.sliders == FOR_LONG
    plant.spec, plant.best = make_spec(slo={"ttftMilliseconds": 2000, "tpotMilliseconds": 40}), lambda _: FOR_SHORT
    plant.step()
    assert plant.sliders == FOR_LONG
    assert plant.reason is Reason.SEARCHING
    plant.run(20)
    assert plant.sliders == FOR_SHORT


def test_a_shifted_workload_starts_a_search_and_noise_does_not() -> None:
    plant = Plant()
    plant.run(200)
    plant.rows = ((9000, 105, ""),) * 100
    plant.run(100)
    assert plant.num_asked == 1
    plant.rows = ((12000, 105, ""),) * 100
    plant.run(100)
    assert plant.num_asked == 2


def test_a_failed_search_is_reported_and_repeated_later() -> None:
    plant = Plant(search_s=float("inf"))
    plant.run(5)
    plant.state = decision.record_failure(plant.state, "out of luck", plant.now)
    assert describe_status(plant.state, plant.observe()).message == "out of luck"
    plant.run(decision.RETRY_S - 2)
    assert plant.num_asked == 1
    plant.run(5)
    assert plant.num_asked == 2


def test_an_answer_to_an_older_workload_is_not_put_in_force() -> None:
    plant = Plant(make_spec(autotune={"mode": "Apply", "bounds": BOUNDS, "cooldownSeconds": 1}), is_settled=False)
    plant.run(30)
    plant.rows, plant.search_s = (SHORT,) * 100, float("inf")
    plant.step()
    plant.state = decision.record_failure(plant.state, "out of luck", plant.now)
    plant.is_settled = True
    plant.run(50)
    assert plant.changes == []
    assert plant.reason is Reason.SEARCH_FAILED


def test_off_takes_the_spec_again_and_forgets() -> None:
    plant = Plant()
    plant.run(50)
    assert plant.sliders == FOR_LONG
    plant.spec = make_spec(autotune={"mode": "Off", "bounds": BOUNDS})
    plant.step()
    assert (plant.sliders, plant.state, plant.reason) == (SPECS, TunerState(), Reason.OFF)


def test_without_a_sample_what_is_in_force_stays() -> None:
    plant = Plant(has_sample=False)
    plant.run(50)
    assert plant.reason is Reason.NO_SAMPLE
    plant.has_sample = True
    plant.run(50)
    plant.has_sample = False
    plant.run(500)
    assert plant.sliders == FOR_LONG


def test_a_new_process_goes_on_with_the_sliders_of_the_last_one_unless_the_spec_was_edited() -> None:
    old = Plant()
    old.run(200)
    stored = StoredSliders.from_json(StoredSliders(basis=old.state.basis, replicas=4, sliders=old.sliders).to_json())
    new = Plant(stored=stored, has_sample=False)
    new.step()
    assert new.sliders == FOR_LONG
    edited = Plant(make_spec(prefillHeavy=1), stored=stored, has_sample=False)
    edited.step()
    assert edited.sliders == replace(SPECS, num_prefill_heavy=1)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"basis": "b", "sliders": {"a": 1}}', '{"basis": "b"}'])
def test_edited_stored_sliders_are_ignored(text: str) -> None:
    assert StoredSliders.from_json(text) is None


@pytest.mark.parametrize(("strategy", "is_known"), [("sluice", True), ("", True), ("fastest", False)])
def test_stored_sliders_of_an_unknown_strategy_are_ignored(strategy: str, *, is_known: bool) -> None:
    stored = StoredSliders(basis="b", replicas=4, sliders=replace(FOR_LONG, strategy=strategy))
    assert (StoredSliders.from_json(stored.to_json()) == stored) == is_known


@settings(max_examples=25, deadline=None)
@given(
    periods=st.lists(st.floats(min_value=5.0, max_value=40 * COOLDOWN_S), min_size=1, max_size=8),
    bad=st.sampled_from([None, FOR_LONG, FOR_SHORT]),
)
def test_a_flapping_workload_does_not_flap_the_sliders(periods: list[float], bad: Sliders | None) -> None:
    plant = Plant(best=best_for, attainment=lambda sliders: 0.5 if sliders == bad else 0.95)
    turns, duration_s, next_s, is_long = 0, 2 * HISTORY_COOLDOWNS * COOLDOWN_S, plant.now, True
    end_s = plant.now + duration_s
    while plant.now < end_s:
        if plant.now >= next_s:
            next_s, is_long = plant.now + periods[turns % len(periods)], not is_long
            plant.rows = (LONG if is_long else SHORT,) * 40
            turns += 1
        plant.step(10.0)
    times = [at_s for at_s, _ in plant.changes]
    forward = [at_s for at_s in times if at_s not in plant.returns_s]
    assert all(after - before >= COOLDOWN_S for before, after in itertools.pairwise(forward))
    for start_s in times:
        within = [at_s for at_s in times if start_s <= at_s < start_s + HISTORY_COOLDOWNS * COOLDOWN_S]
        assert len(within) <= 7, "1 + 2 + 4 + 8 cool-downs of waiting fit, and a return for each of few"


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["rows", "slo", "slider", "off", "apply", "settle", "sample", "attainment"]),
            st.integers(0, 5),
            st.floats(0.5, 200.0),
        ),
        max_size=40,
    )
)
def test_whatever_happens_sliders_stay_within_bounds_and_edits_win(  # noqa: C901 - one case per kind of event
    steps: list[tuple[str, int, float]],
) -> None:
    plant = Plant(best=best_for)
    for what, number, duration_s in steps:
        edit: dict[str, object] = {}
        basis = plant.state.basis
        match what:
            case "rows":
                plant.rows = (LONG if number % 2 else SHORT,) * (30 + 100 * number)
            case "slo":
                edit = {"slo": {"ttftMilliseconds": 100 + number, "tpotMilliseconds": 100}}
            case "slider":
                edit = {"prefillHeavy": number % 3 + 1}
            case "off":
                edit = {"autotune": {"mode": "Off"}}
            case "settle":
                plant.is_settled = bool(number % 2)
            case "sample":
                plant.has_sample = bool(number % 2)
            case "attainment":
                plant.attainment = lambda _, share=number / 5: share
        if edit or what == "apply":
            plant.spec = make_spec(**edit)
        plant.step(duration_s)
        if basis and plant.state.basis != basis:
            assert plant.sliders == resolve_sliders(plant.spec)
        assert plant.sliders in (resolve_sliders(plant.spec), FOR_LONG, FOR_SHORT)
        assert plant.spec.autotune.mode == "Apply" or plant.state.tuned is None
        assert plant.reason in REASONS[ConditionType.AUTOTUNED]


SIZED = Sliders(num_prefill_heavy=6, prefill_heavy_tokens=1024, decode_heavy_tokens=96)


def resize(plant: Plant, replicas: int, sized: Sliders | None = None) -> None:
    """Another number of engines, and one decision."""
    plant.spec = make_spec().model_copy(update={"replicas": replicas})
    plant.has_sample = replicas > 0
    plant.state = decision.decide(plant.state, replace(plant.observe(), sized=sized))


def test_sliders_that_were_found_for_a_size_are_in_force_with_it() -> None:
    plant = Plant()
    plant.run(5)
    resize(plant, 8, SIZED)
    assert plant.sliders == SIZED
    assert plant.state.trial is None
    assert plant.state.baseline == plant.counts, "what finished on another size is not compared"


def test_a_mix_survives_a_fleet_of_one_and_of_none() -> None:
    plant = Plant()
    plant.state = replace(plant.state, basis=decision.make_basis(plant.spec), replicas=4, tuned=FOR_LONG)
    for replicas in (1, 2, 0, 1, 8):
        resize(plant, replicas)
    assert plant.sliders == replace(FOR_LONG, num_prefill_heavy=6)


def test_a_trial_is_measured_anew_with_more_engines() -> None:
    plant = Plant()
    while plant.state.trial is None or plant.state.trial.start is None:
        plant.step()
    plant.run(20)
    resize(plant, 8, SIZED)
    trial = plant.state.trial
    assert trial is not None
    assert plant.sliders == scale_sliders(FOR_LONG, 4, 8), "what is on trial stays on trial"
    assert (trial.started_s, trial.start) == (plant.now, plant.counts)
