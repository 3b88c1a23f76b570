"""When sliders are searched for, changed, kept and taken back. No clock but the one that is handed in."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.slo import SloCounts
from sluice_operator.api.condition_types import REASONS, ConditionType, Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autotune import decision
from sluice_operator.autotune.decision import (
    HISTORY_COOLDOWNS,
    StoredSliders,
    StoredTrial,
    TunerObservation,
    TunerState,
    has_attainment_fallen,
)
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult, make_constraints
from sluice_operator.autotune.workload import WorkloadSample

if TYPE_CHECKING:
    from collections.abc import Callable

COOLDOWN_S = 100.0
ENGINE = EmulatedEngineFacts(gpu="a100-80g", model="qwen2.5-14b")
BOUNDS = {
    "prefillHeavy": {"min": "25%", "max": "75%"},
    "chunkSizes": {"prefillHeavy": {"min": 256, "max": 2048}, "decodeHeavy": {"min": 0, "max": 512}},
}
SPECS = Sliders(num_prefill_heavy=2, prefill_heavy_tokens=512, decode_heavy_tokens=64)
FOR_LONG = Sliders(num_prefill_heavy=3, prefill_heavy_tokens=2048, decode_heavy_tokens=128)
FOR_SHORT = Sliders(num_prefill_heavy=1, prefill_heavy_tokens=512, decode_heavy_tokens=256)
LONG, SHORT = (8000, 100, ""), (500, 400, "")


def make_spec(**changes: object) -> object:
    spec = {
        "replicas": 4,
        "prefillHeavy": "50%",
        "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
        "slo": {"ttftMilliseconds": 2000, "tpotMilliseconds": 100},
        "model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
        "autotune": {"mode": "Apply", "bounds": BOUNDS, "cooldownSeconds": int(COOLDOWN_S)},
        **changes,
    }
    body = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", "metadata": {"name": "m"}, "spec": spec}
    return check_manifest(body).spec


@dataclass
class Plant:
    """A cluster whose requests and searches behave as a test says.

    Args:
        spec: In force.
        rows: Recent requests.
        best: What a search finds for a question.
        attainment: What is measured under sliders.
    """

    spec: object = field(default_factory=make_spec)
    rows: tuple[tuple[int, int, str], ...] = (LONG,) * 100
    best: Callable[[SearchRequest], Sliders] = lambda request: FOR_LONG
    attainment: Callable[[Sliders], float] = lambda sliders: 0.95
    gain: float = 0.2
    least_gain: float | None = None
    rate_rps: float = 2.0
    search_s: float = 3.0
    state: TunerState = field(default_factory=TunerState)
    stored: StoredSliders | None = None
    now: float = 1000.0
    counts: SloCounts = field(default_factory=SloCounts)
    is_settled: bool = True
    has_sample: bool = True
    due_s: float | None = None
    num_asked: int = 0
    changes: list[tuple[float, Sliders]] = field(default_factory=list)
    returns_s: list[float] = field(default_factory=list)

    @property
    def sliders(self) -> Sliders:
        return self.state.tuned or resolve_sliders(self.spec)

    def observe(self) -> TunerObservation:
        spec_sliders = resolve_sliders(self.spec)
        request = SearchRequest(
            constraints=make_constraints(self.spec),
            spec_sliders=spec_sliders,
            in_force=spec_sliders,
            workload=WorkloadSample(rows=self.rows, rate_rps=self.rate_rps),
            engine=ENGINE,
        )
        return TunerObservation(
            now=self.now,
            mode=self.spec.autotune.mode,
            basis=decision.make_basis(self.spec),
            replicas=self.spec.replicas,
            cooldown_s=float(self.spec.autotune.cooldown_seconds),
            request=request if self.has_sample else None,
            missing=(Reason.NO_SAMPLE, "no requests"),
            counts=self.counts,
            is_settled=self.is_settled,
            stored=self.stored,
        )

    def step(self, duration_s: float = 1.0) -> None:
        """Lets time pass: requests finish, a search ends when its time has come, one decision is made."""
        self.now += duration_s
        num_finished = round(self.rate_rps * duration_s)
        num_met = round(self.attainment(self.sliders) * num_finished)
        self.counts += SloCounts(num_finished=num_finished, num_met_both=num_met)
        if self.state.is_searching and self.due_s is not None and self.now >= self.due_s:
            self.state = decision.record_result(self.state, self.answer(self.state.last_request), self.now)
        before, sliders = self.state, self.sliders
        self.state = decision.decide(self.state, self.observe())
        if self.state.is_searching and self.state.last_request is not before.last_request:
            self.num_asked += 1
            self.due_s = self.now + self.search_s
        if self.sliders != sliders:
            self.changes.append((self.now, self.sliders))
            if before.trial is not None and self.state.trial is None:
                self.returns_s.append(self.now)

    def run(self, duration_s: float, step_s: float = 1.0) -> None:
        for _ in range(int(duration_s / step_s)):
            self.step(step_s)

    def answer(self, request: SearchRequest) -> SearchResult:
        best = self.best(request)
        gain = 0.0 if best == request.in_force else self.gain
        least_gain = gain - 0.02 if gain and self.least_gain is None else self.least_gain
        return SearchResult(
            sliders=best,
            goodput_rps=2.0 * (1.0 + gain),
            attainment=0.95,
            in_force_goodput_rps=2.0,
            in_force_attainment=0.8,
            least_gain=least_gain or 0.0,
        )

    @property
    def reason(self) -> Reason:
        status = decision.describe_status(self.state, self.observe())
        assert status.reason in REASONS[ConditionType.AUTOTUNED]
        return status.reason


def best_for(request: SearchRequest) -> Sliders:
    prompts = [row[0] for row in request.workload.rows]
    return FOR_LONG if sum(prompts) / len(prompts) > 4000 else FOR_SHORT


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
    for _ in range(int(decision.MAX_TRIAL_COOLDOWNS * COOLDOWN_S)):
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
    plant.now += decision.MAX_TRIAL_COOLDOWNS + 1.0
    plant.state = decision.decide(plant.state, plant.observe())
    plant.run(10)
    assert (plant.sliders, plant.reason) == (FOR_LONG, Reason.TUNED)


def test_a_new_process_goes_on_with_a_trial() -> None:
    old = Plant()
    old.run(20)
    assert old.reason is Reason.ON_TRIAL
    trial = StoredTrial(former=old.state.trial.former, before=old.state.trial.before)
    stored = StoredSliders(basis=old.state.basis, replicas=4, sliders=old.sliders, trial=trial)
    assert StoredSliders.from_json(stored.to_json()) == stored
    new = Plant(stored=stored, attainment=lambda sliders: 0.5 if sliders == FOR_LONG else 0.95)
    new.step()
    assert (new.sliders, new.reason) == (FOR_LONG, Reason.ON_TRIAL)
    new.run(100)
    assert [sliders for _, sliders in new.changes] == [FOR_LONG, SPECS]


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


def test_a_trial_ends_with_the_objectives_that_it_was_about() -> None:
    plant = Plant(search_s=40.0)
    plant.run(50)
    assert plant.reason is Reason.ON_TRIAL
    plant.spec = make_spec(slo={"ttftMilliseconds": 1, "tpotMilliseconds": 1})
    plant.attainment = lambda sliders: 0.0
    plant.run(30)
    assert plant.sliders == FOR_LONG, "objectives that nothing can meet say nothing against the sliders"


def test_a_shifted_workload_starts_a_search_and_noise_does_not() -> None:
    plant = Plant()
    plant.run(200)
    plant.rows = ((9000, 105, ""),) * 100
    plant.run(100)
    assert plant.num_asked == 1
    plant.rows = ((12000, 105, ""),) * 100
    plant.run(100)
    assert plant.num_asked == 2


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


def test_a_failed_search_is_reported_and_repeated_later() -> None:
    plant = Plant(search_s=float("inf"))
    plant.run(5)
    plant.state = decision.record_failure(plant.state, "out of luck", plant.now)
    assert decision.describe_status(plant.state, plant.observe()).message == "out of luck"
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
