"""A cluster for the tests of what the tuner decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.condition_types import REASONS, ConditionType, Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autotune import decision
from sluice_operator.autotune.condition import describe_status
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts
from sluice_operator.autotune.search_constraints import make_constraints
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.tuner_state import TunerObservation, TunerState
from sluice_operator.autotune.workload import WorkloadSample

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.autotune.stored_sliders import StoredSliders


COOLDOWN_S = 100.0
# The time, in seconds since 1970, when the monotonic clock stood at zero.
START_WALL_S = 1.8e9


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
        "strategy": "TaiChi",
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
            wall_s=START_WALL_S + self.now,
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
        status = describe_status(self.state, self.observe())
        assert status.reason in REASONS[ConditionType.AUTOTUNED]
        return status.reason


def best_for(request: SearchRequest) -> Sliders:
    prompts = [row[0] for row in request.workload.rows]
    return FOR_LONG if sum(prompts) / len(prompts) > 4000 else FOR_SHORT
