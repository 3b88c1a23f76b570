"""Drawn days of a tuner: each search, verdict, condition and stored text is as it was when the record was written.

A day draws lengths, rates and how well sliders serve, edits, other numbers of engines with and without sliders of their
own, failed searches, engines that come and go, and new processes. ``drawn_tuning.json`` has a short hash of each step.
After a change of behaviour that is wanted, write the record anew, and say in the commit what changed:

    SLUICE_WRITE_RECORDS=1 .venv/bin/python -m pytest operator/tests/test_drawn_tuning.py
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from recorded_steps import check_record

from sluice.v1 import control_pb2
from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autotune.engine_facts import COEFFICIENTS
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.autotune.stored_sliders import StoredSliders
from sluice_operator.autotune.tuner import Tuner, TunerInputs

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingClusterSpec

RECORD = Path(__file__).with_name("drawn_tuning.json")
NUM_DAYS = 10
NUM_STEPS = 150
BOUNDS = {
    "prefillHeavy": {"min": "25%", "max": "75%"},
    "chunkSizes": {"prefillHeavy": {"min": 256, "max": 2048}, "decodeHeavy": {"min": 0, "max": 256}},
}
FIXED = {
    "prefillHeavy": {"min": "50%", "max": "50%"},
    "chunkSizes": {"prefillHeavy": {"min": 512, "max": 512}, "decodeHeavy": {"min": 64, "max": 64}},
}
FEW, ENOUGH = 10, 60
RATES = (0.00002, 0.000025, 0.00006)


class Day:
    """A tuner, and what it is told."""

    def __init__(self, number: int) -> None:
        self.rng = random.Random(f"tuning {number}")
        self.now = 500.0
        self.spec: dict[str, Any] = {
            "replicas": self.rng.choice((2, 4)),
            "strategy": self.rng.choice(("TaiChi", "TaiChi", "Auto", "Aggregated")),
            "prefillHeavy": "50%",
            "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
            "slo": {"ttftMilliseconds": 4000, "tpotMilliseconds": 70},
            "model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "autotune": {"mode": "Apply", "bounds": BOUNDS, "cooldownSeconds": self.rng.choice((10, 60))},
        }
        self.lengths = (2000, 50)
        self.num_samples, self.gap_s, self.num_fitted, self.per_token_s = ENOUGH, 0.5, 300, RATES[0]
        self.counts = SloCounts()
        self.attainments: dict[Sliders, float] = {}
        self.is_settled = True
        self.stored: StoredSliders | None = None
        self.sized: Sliders | None = None
        self.lines: list[str] = []
        self.ends: list[asyncio.Future[SearchResult]] = []
        self.tuner = self.start_process()

    def start_process(self) -> Tuner:
        return Tuner(
            self.search,
            enqueue=lambda: self.lines.append("enqueued"),
            now=lambda: self.now,
            wall_s=lambda: 1e9 + self.now,
        )

    async def search(self, request: SearchRequest) -> SearchResult:
        self.lines.append(f"search {request.to_json()}")
        future: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        self.ends.append(future)
        return await future

    def draw_sliders(self) -> Sliders:
        is_auto = self.spec["strategy"] == "Auto"
        return Sliders(
            num_prefill_heavy=self.rng.randrange(1, max(2, self.spec["replicas"])),
            prefill_heavy_tokens=self.rng.choice((512, 1024)),
            decode_heavy_tokens=self.rng.choice((0, 64)),
            strategy=self.rng.choice(("taichi", "flowprefill")) if is_auto else "",
        )

    def end_search(self) -> None:
        """The oldest search under way fails or finds something."""
        end = self.ends.pop(0)
        fate, gain = self.rng.random(), self.rng.choice((0.0, 0.04, 0.05, 0.3, 0.3))
        if end.done():
            return
        if fate < 0.1:
            end.set_exception(SearchError("no chunk size fits"))
        elif fate < 0.15:
            end.set_exception(ZeroDivisionError("a mistake"))
        else:
            result = SearchResult(
                sliders=self.draw_sliders(),
                goodput_rps=2.0 * (1.0 + gain),
                attainment=0.95,
                in_force_goodput_rps=self.rng.choice((2.0, 2.0, 2.0, 0.0)),
                in_force_attainment=0.8,
                least_gain=self.rng.choice((gain, gain, 0.0, -0.01)),
            )
            end.set_result(result)

    @property
    def checked(self) -> Any:
        spec = dict(self.spec)
        body = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", "metadata": {"name": "m"}, "spec": spec}
        if spec["replicas"]:
            return check_manifest(body)
        # Autoscaling alone takes the last engine away.
        found = check_manifest({**body, "spec": {**spec, "replicas": 2}})
        return found.model_copy(update={"spec": found.spec.model_copy(update={"replicas": 0})})

    def read_inputs(self) -> TunerInputs:
        prompt, output = self.lengths
        sample = control_pb2.RequestSample(
            gap_s=self.gap_s, prompt_tokens=prompt, output_tokens=output, slo_class="chat"
        )
        latency = control_pb2.LatencyCoefficients(**dict.fromkeys(COEFFICIENTS, 1e-9))
        latency.base_s, latency.per_token_s = 0.02, self.per_token_s
        engine = control_pb2.EngineStatus(
            engine_id="e",
            state=control_pb2.ENGINE_STATE_READY,
            latency=latency,
            num_fitted_iterations=self.num_fitted,
            kv_blocks_total=1000,
            block_size_tokens=16,
            max_num_seqs=256,
        )
        status = control_pb2.GetStatusResponse(engines=[engine], samples=[sample] * self.num_samples)
        return TunerInputs(
            cluster=self.checked,
            statuses=[status],
            counts=self.counts,
            is_settled=self.is_settled,
            stored=self.stored,
            sized=self.sized,
        )

    def edit(self) -> None:
        rng = self.rng
        if rng.random() < 0.6:
            mode, bounds = rng.choice(("Apply", "Apply", "Recommend", "Off")), rng.choice((BOUNDS, BOUNDS, FIXED))
            self.spec["autotune"] = {"mode": mode, "bounds": bounds, "cooldownSeconds": rng.choice((10, 60))}
        elif rng.random() < 0.5:
            self.spec["slo"] = {"ttftMilliseconds": rng.choice((900, 4000)), "tpotMilliseconds": 70}
        else:
            self.spec["chunkSizes"] = {"prefillHeavy": rng.choice((512, 600)), "decodeHeavy": 64}

    def restart(self) -> None:
        stored = self.tuner.stored
        self.stored = StoredSliders.from_json(stored.to_json()) if stored else None
        self.tuner.stop()
        self.tuner = self.start_process()

    def draw_change(self) -> None:  # noqa: C901 - one case per kind of change
        """Draws what is different from this step on."""
        rng = self.rng
        match rng.randrange(60):
            case 0:
                self.edit()
            case 1 | 2:
                self.spec["replicas"] = rng.choice((1, 2, 4, 6, 6, 4, 0))
            case 3 | 4:
                self.lengths = rng.choice(((2000, 50), (2400, 50), (9000, 50), (2000, 300)))
            case 5:
                self.num_samples = rng.choice((FEW, ENOUGH, ENOUGH, ENOUGH, 300))
            case 6:
                self.num_fitted, self.per_token_s = rng.choice((100, 300, 300)), rng.choice(RATES)
            case 7 | 8:
                self.is_settled = not self.is_settled
            case 9:
                self.sized = rng.choice((None, self.draw_sliders()))
            case 10:
                self.restart()
            case 11:
                self.gap_s = rng.choice((0.5, 0.1, 20.0))
        if self.ends and rng.random() < 0.3:
            self.end_search()

    def serve(self, step_s: float) -> None:
        """Requests finish, well or badly by the sliders in force."""
        in_force = self.tuner.find_sliders(self.checked.spec)
        share = self.attainments.setdefault(in_force, self.rng.choice((0.5, 0.88, 0.9, 1.0)))
        finished = round(step_s / self.gap_s)
        met = round(share * finished)
        self.counts += SloCounts(num_finished=finished, num_met_ttft=met, num_met_tpot=finished, num_met_both=met)

    async def step(self) -> list[str]:
        self.lines = []
        self.draw_change()
        step_s = self.rng.choice((0.5, 1.0, 3.0, 3.0, 20.0, 70.0))
        self.now += step_s
        self.serve(step_s)
        is_needed = self.tuner.needs_update(self.read_inputs if self.rng.random() < 0.95 else lambda: None)
        self.lines.append(f"needed {is_needed} {self.tuner.describe_status()}")
        if is_needed or self.rng.random() < 0.2:
            tuned = self.tuner.update(self.read_inputs())
            self.lines.append(f"{resolve_sliders(tuned.spec)} {tuned.spec.strategy} {tuned.spec.prefill_heavy}")
        for _ in range(3):
            await asyncio.sleep(0)
        stored = self.tuner.stored
        self.lines.append(f"{self.tuner.describe_status()} {stored and stored.to_json()} {self.tuner.is_on_trial}")
        self.lines.append(f"{self.tuner.result} {[self.tuner.find_sliders(size) for size in self.resize((1, 3, 8))]}")
        return self.lines

    def resize(self, sizes: tuple[int, ...]) -> list[ServingClusterSpec]:
        return [self.checked.spec.model_copy(update={"replicas": size}) for size in sizes]


@pytest.mark.parametrize("number", range(NUM_DAYS))
async def test_a_day_is_as_it_was_recorded(number: int) -> None:
    day = Day(number)
    steps = [await day.step() for _ in range(NUM_STEPS)]
    day.tuner.stop()
    check_record(RECORD, str(number), steps)
