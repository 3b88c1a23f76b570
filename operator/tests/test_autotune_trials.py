"""Trials of sliders: when they begin and end, and when the former sliders return."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autotune_harness import BOUNDS, COOLDOWN_S, FOR_LONG, FOR_SHORT, LONG, SHORT, SPECS, Plant, best_for, make_spec

from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.condition_types import Reason
from sluice_operator.autotune import decision
from sluice_operator.autotune.stored_sliders import StoredSliders, StoredTrial
from sluice_operator.autotune.trial import MAX_TRIAL_COOLDOWNS, has_attainment_fallen
from sluice_operator.autotune.tuner_state import TunerState


def test_sliders_return_when_attainment_falls_and_are_not_tried_again_for_the_same_question() -> None:
    plant = Plant(attainment=lambda sliders: 0.5 if sliders == FOR_LONG else 0.95)
    plant.run(1000)
    assert [sliders for _, sliders in plant.changes] == [FOR_LONG, SPECS]
    assert plant.changes[1][0] - plant.changes[0][0] < COOLDOWN_S, "a return waits for no cool-down"
    assert plant.reason is Reason.RETURNED


def test_a_fall_that_slows_the_clients_too_is_a_fall_and_no_shift_of_the_workload() -> None:
    plant = Plant(attainment=lambda sliders: 0.05 if sliders == FOR_LONG else 0.95)
    for _ in range(80):
        # Closed-loop clients wait for their answers before they send again.
        plant.rate_rps = 0.4 if plant.sliders == FOR_LONG else 2.0
        plant.step(5.0)
    assert [sliders for _, sliders in plant.changes] == [FOR_LONG, SPECS]
    assert plant.reason is Reason.RETURNED


@pytest.mark.parametrize("is_settled", [True, False], ids=["nothing finishes", "engines come and go"])
def test_a_trial_without_a_verdict_is_lost_after_some_cool_downs(*, is_settled: bool) -> None:
    plant = Plant()
    plant.run(20)
    assert plant.reason is Reason.ON_TRIAL
    plant.is_settled = is_settled
    for _ in range(int(MAX_TRIAL_COOLDOWNS * COOLDOWN_S)):
        plant.now += 1.0
        plant.state = decision.decide(plant.state, plant.observe())
    assert plant.state.trial is None
    assert plant.sliders == SPECS
    assert FOR_LONG in plant.state.rejected


def test_a_trial_with_short_cool_downs_has_time_for_its_verdict() -> None:
    plant = Plant(make_spec(autotune={"mode": "Apply", "bounds": BOUNDS, "cooldownSeconds": 1}))
    plant.run(20)
    assert plant.reason is Reason.ON_TRIAL
    # The state is looked at every few seconds only.
    plant.now += MAX_TRIAL_COOLDOWNS + 1.0
    plant.state = decision.decide(plant.state, plant.observe())
    plant.run(10)
    assert (plant.sliders, plant.reason) == (FOR_LONG, Reason.TUNED)


def test_a_new_process_goes_on_with_a_trial() -> None:
    old = Plant()
    old.run(20)
    assert old.reason is Reason.ON_TRIAL
    on_trial = old.state.trial
    trial = StoredTrial(former=on_trial.former, before=on_trial.before, began_s=on_trial.began_s)
    stored = StoredSliders(basis=old.state.basis, replicas=4, sliders=old.sliders, trial=trial)
    assert StoredSliders.from_json(stored.to_json()) == stored
    new = Plant(stored=stored, attainment=lambda sliders: 0.5 if sliders == FOR_LONG else 0.95)
    new.step()
    assert (new.sliders, new.reason) == (FOR_LONG, Reason.ON_TRIAL)
    new.run(100)
    assert [sliders for _, sliders in new.changes] == [FOR_LONG, SPECS]


def test_a_trial_without_a_verdict_is_lost_however_often_the_operator_restarts() -> None:
    plant = Plant()
    plant.run(20)
    began_s, sliders = plant.now, plant.sliders
    assert plant.reason is Reason.ON_TRIAL
    plant.is_settled = False
    while plant.state.trial is not None and plant.now - began_s < 2 * MAX_TRIAL_COOLDOWNS * COOLDOWN_S:
        on_trial = plant.state.trial
        trial = StoredTrial(former=on_trial.former, before=on_trial.before, began_s=on_trial.began_s)
        plant.stored = StoredSliders(basis=plant.state.basis, replicas=4, sliders=sliders, trial=trial)
        plant.state = TunerState()
        plant.now += COOLDOWN_S / 2
        plant.state = decision.decide(plant.state, plant.observe())
    assert plant.now - began_s <= MAX_TRIAL_COOLDOWNS * COOLDOWN_S
    assert plant.sliders == SPECS


def test_a_scale_event_in_a_trial_ends_neither_it_nor_the_way_back() -> None:
    plant = Plant(attainment=lambda sliders: 0.5 if sliders.prefill_heavy_tokens == 2048 else 0.95)
    plant.run(15)
    assert plant.reason is Reason.ON_TRIAL
    plant.spec = make_spec(replicas=8)
    plant.run(50)
    assert plant.sliders == replace(SPECS, num_prefill_heavy=4)
    assert plant.returns_s


def test_refuted_sliders_may_be_tried_again_for_another_workload() -> None:
    plant = Plant(best=best_for, attainment=lambda sliders: 0.5 if sliders == FOR_LONG else 0.95)
    plant.run(200)
    assert plant.reason is Reason.RETURNED
    plant.rows = (SHORT,) * 100
    plant.run(600)
    assert plant.sliders == FOR_SHORT
    plant.rows, plant.attainment = (LONG,) * 100, lambda sliders: 0.95
    plant.run(2000)
    assert plant.sliders == FOR_LONG


def test_a_trial_lasts_as_long_as_the_cool_down() -> None:
    plant = Plant()
    plant.run(13)
    assert plant.reason is Reason.ON_TRIAL
    plant.run(COOLDOWN_S / 2)
    assert plant.reason is Reason.ON_TRIAL
    plant.attainment = lambda sliders: 0.3
    plant.run(30)
    assert [sliders for _, sliders in plant.changes] == [FOR_LONG, SPECS]


def test_a_trial_begins_when_every_engine_has_the_sliders() -> None:
    plant = Plant()
    while not plant.changes:
        plant.step()
    plant.is_settled, plant.attainment = False, lambda sliders: 0.0
    plant.run(40)
    plant.is_settled, plant.attainment = True, lambda sliders: 0.95
    plant.run(3 * COOLDOWN_S)
    assert [sliders for _, sliders in plant.changes] == [FOR_LONG]
    assert plant.reason is Reason.TUNED


def test_all_sliders_whose_trial_failed_stay_rejected() -> None:
    plant = Plant(attainment=lambda sliders: 0.95 if sliders == SPECS else 0.5)
    plant.run(100)
    for best, num_rows in ((FOR_SHORT, 400), (FOR_LONG, 1600)):
        plant.best, plant.rows = lambda _, best=best: best, (LONG,) * num_rows
        plant.run(1000, step_s=20.0)
    assert [sliders for _, sliders in plant.changes] == [FOR_LONG, SPECS, FOR_SHORT, SPECS]
    assert plant.reason is Reason.RETURNED


def test_a_trial_ends_with_the_objectives_that_it_was_about() -> None:
    plant = Plant(search_s=40.0)
    plant.run(50)
    assert plant.reason is Reason.ON_TRIAL
    plant.spec = make_spec(slo={"ttftMilliseconds": 1, "tpotMilliseconds": 1})
    plant.attainment = lambda sliders: 0.0
    plant.run(30)
    assert plant.sliders == FOR_LONG, "objectives that nothing can meet say nothing against the sliders"


def test_a_sample_that_grew_fourfold_starts_a_search_and_keeps_a_trial() -> None:
    plant = Plant(attainment=lambda sliders: 0.5 if sliders == FOR_LONG else 0.95)
    plant.run(12)
    assert plant.reason is Reason.ON_TRIAL
    plant.rows = (LONG,) * 400
    plant.run(100)
    assert [sliders for _, sliders in plant.changes] == [FOR_LONG, SPECS]
    assert plant.reason is Reason.RETURNED
    plant.run(300)
    assert plant.num_asked == 2, "once the sample holds no request of the trial"


def test_attainment_falls_only_beyond_chance() -> None:
    before = SloCounts(num_finished=200, num_met_both=190)
    assert not has_attainment_fallen(before, SloCounts(num_finished=19, num_met_both=0)), "too few to say"
    assert not has_attainment_fallen(before, SloCounts(num_finished=40, num_met_both=37))
    assert has_attainment_fallen(before, SloCounts(num_finished=40, num_met_both=30))
    assert not has_attainment_fallen(before, SloCounts(num_finished=200, num_met_both=200))
    # Where chance is small, a fall must still be large enough to matter.
    many = SloCounts(num_finished=100_000, num_met_both=95_000)
    assert not has_attainment_fallen(many, SloCounts(num_finished=100_000, num_met_both=94_000))
    assert has_attainment_fallen(many, SloCounts(num_finished=100_000, num_met_both=92_000))
