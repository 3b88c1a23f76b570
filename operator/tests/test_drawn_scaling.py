"""Drawn days of a scaler: each number, search, condition and stored text is as it was when the record was written.

A day draws what arrives, what waits, edits, failed searches, routers that come and go, engines that start slowly,
trials and new processes. ``drawn_scaling.json`` has a short hash of each step. After a change of behaviour that is
wanted, write the record anew, and say in the commit what changed:

    SLUICE_WRITE_RECORDS=1 .venv/bin/python -m pytest operator/tests/test_drawn_scaling.py
"""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest
from recorded_steps import check_record
from scaler_harness import COEFFICIENTS
from tuner_harness import BOUNDS, make_samples

from sluice.v1 import control_pb2
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autoscaling.capacity_messages import CapacityPoint, CapacityRequest, CapacityResult
from sluice_operator.autoscaling.scaler import Scaler, ScalerInputs
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.autotune.search_process import SearchError

RECORD = Path(__file__).with_name("drawn_scaling.json")
NUM_DAYS = 12
NUM_STEPS = 160
EDITS: tuple[dict[str, Any], ...] = (
    {"replicas": 2},
    {"replicas": 5},
    {"mode": "Disabled"},
    {"mode": "Recommend"},
    {"mode": "Apply"},
    {"mode": "Apply"},
    {"mode": "Apply"},
    {"minReplicas": 0, "maxReplicas": 3},
    {"minReplicas": 3, "maxReplicas": 20},
    {"scaleUp": {"stabilizationWindowSeconds": 40}, "scaleDown": {"stabilizationWindowSeconds": 60}},
    {"tuned": True},
    {"tuned": False},
    {"chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 0}},
    {"chunkSizes": {"prefillHeavy": 2048, "decodeHeavy": 128}},
)
TUNED = {"mode": "Apply", "bounds": {**BOUNDS, "prefillHeavy": {"min": "25%", "max": "75%"}}}


class Day:
    """A scaler, and what it is told."""

    def __init__(self, number: int) -> None:
        self.rng = random.Random(f"day {number}")
        self.now = 500.0
        self.fields: dict[str, Any] = {
            "mode": self.rng.choice(("Apply", "Apply", "Recommend")),
            "minReplicas": self.rng.choice((0, 1)),
            "maxReplicas": self.rng.choice((6, 12)),
            "scaleDown": {"stabilizationWindowSeconds": self.rng.choice((30, 120, 300))},
        }
        self.replicas, self.is_tuned = 2, False
        self.chunks = {"prefillHeavy": 2048, "decodeHeavy": 128}
        self.rate_rps = 2.0
        self.prompt_tokens = 500
        self.num_samples, self.num_fitted = self.rng.choice((10, 40, 400)), 300
        self.routers = {"r0": 1000, "r1": 7}
        self.is_older = self.is_trial = False
        self.num_inside = self.num_waiting = 0
        self.start_s: float | None = None
        self.lines: list[str] = []
        self.ends: list[asyncio.Future[CapacityResult]] = []
        self.scaler = self.start_process()
        self.stored: StoredScale | None = None

    def start_process(self) -> Scaler:
        return Scaler(self.search, enqueue=lambda: self.lines.append("enqueued"), now=lambda: self.now)

    async def search(self, request: CapacityRequest) -> CapacityResult:
        parts = [(item.constraints.replicas, item.in_force, item.spec_sliders) for item in request.requests]
        workload = request.largest.workload
        self.lines.append(f"search {parts} {request.may_tune} {len(workload.rows)} {workload.rate_rps:.3f}")
        future: asyncio.Future[CapacityResult] = asyncio.get_running_loop().create_future()
        self.ends.append(future)
        try:
            points = (await future).points
        except asyncio.CancelledError:
            self.lines.append("the search is ended")
            raise
        wanted = [item.constraints.replicas for item in request.requests]
        return CapacityResult(points=tuple([point for point in points if point.replicas in wanted]))

    def end_search(self) -> None:
        """The oldest search under way fails or finds something."""
        end = self.ends.pop(0)
        fate = self.rng.random()
        if end.done():
            return
        if fate < 0.15:
            end.set_exception(SearchError("no chunk size fits"))
        elif fate < 0.25:
            end.set_exception(ZeroDivisionError("a mistake"))
        else:
            each_rps, loss = self.rng.choice((0.8, 2.0)), self.rng.choice((0.0, 0.05))
            tokens = self.rng.choice((512, 1024))
            sliders = Sliders(num_prefill_heavy=1, prefill_heavy_tokens=tokens, decode_heavy_tokens=64)
            end.set_result(
                CapacityResult(
                    points=tuple(
                        CapacityPoint(
                            replicas=size,
                            goodput_rps=each_rps * size * (1.0 - loss) ** math.log2(size),
                            sliders=sliders,
                        )
                        for size in range(1, 17)
                    )
                )
            )

    def make_inputs(self) -> ScalerInputs:
        spec = {
            "replicas": self.replicas,
            "chunkSizes": self.chunks,
            "strategy": "TaiChi",
            "slo": {"ttftMilliseconds": 4000, "tpotMilliseconds": 70},
            "model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "prefillHeavy": "50%",
            "autoscaling": self.fields,
            **({"autotune": TUNED} if self.is_tuned else {}),
        }
        body = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", "metadata": {"name": "m"}, "spec": spec}
        return ScalerInputs(
            cluster=check_manifest(body),
            statuses=self.list_statuses(),
            find_sliders=resolve_sliders,
            start_s=self.start_s,
            is_trial=self.is_trial,
            stored=self.stored,
        )

    def list_statuses(self) -> list[control_pb2.GetStatusResponse]:
        engine = control_pb2.EngineStatus(
            engine_id="e",
            state=control_pb2.ENGINE_STATE_READY,
            latency=COEFFICIENTS,
            num_fitted_iterations=self.num_fitted,
            kv_blocks_total=1000,
            block_size_tokens=16,
            max_num_seqs=256,
        )
        older = [control_pb2.ClassCounters(num_finished=5)]
        return [
            control_pb2.GetStatusResponse(
                router_id=name,
                num_arrived=0 if self.is_older else arrived,
                num_requests=self.num_inside if name == min(self.routers) else 0,
                num_waiting=self.num_waiting if name == min(self.routers) else 0,
                engines=[engine],
                classes=older,
                samples=make_samples(self.prompt_tokens, self.num_samples) if name == min(self.routers) else [],
            )
            for name, arrived in self.routers.items()
        ]

    def edit(self, change: dict[str, Any]) -> None:
        self.replicas = change.get("replicas", self.replicas)
        self.is_tuned = change.get("tuned", self.is_tuned)
        self.chunks = change.get("chunkSizes", self.chunks)
        self.fields |= {name: value for name, value in change.items() if name in {*self.fields, "scaleUp"}}
        if self.chunks["decodeHeavy"] == 0 and self.fields["minReplicas"] == 1:
            self.fields["minReplicas"] = 2

    def draw_change(self) -> None:  # noqa: C901 - one case per kind of change
        """Draws what is different from this step on."""
        rng = self.rng
        match rng.randrange(40):
            case 0 | 1 | 2:
                self.edit(rng.choice(EDITS))
            case 3 | 4 | 5:
                self.rate_rps = rng.choice((0.0, 0.0, 1.0, 6.0, 14.0))
            case 6:
                self.num_samples, self.prompt_tokens = rng.choice((10, 40, 400)), rng.choice((500, 700, 5000))
            case 7 | 14:
                self.num_fitted = rng.choice((100, 300))
            case 8:
                self.routers[f"r{rng.randrange(9)}"] = rng.randrange(9)
            case 9 if len(self.routers) > 1:
                del self.routers[rng.choice(sorted(self.routers))]
                self.scaler.keep_routers(set(self.routers))
            case 10:
                self.is_older = rng.random() < 0.5
            case 11:
                self.is_trial = rng.random() < 0.5
            case 12:
                self.start_s = rng.choice((None, 30.0, 35.0, 100.0, 900.0))
            case 13:
                self.stored = StoredScale.from_json(self.scaler.stored.to_json()) if self.scaler.stored else None
                self.scaler.stop()
                self.scaler = self.start_process()

    async def step(self) -> list[str]:
        """One status of every router, and a reconcile where the scaler asks for one, or by chance."""
        rng, self.lines = self.rng, []
        self.draw_change()
        step_s = rng.choice((0.3, 1.0, 1.0, 4.0, 20.0, 150.0))
        self.now += step_s
        for name in sorted(self.routers):
            self.routers[name] += round(self.rate_rps * step_s / len(self.routers) * rng.uniform(0.5, 1.5))
        self.num_waiting = rng.choice((0, 0, 0, 40)) if self.rate_rps else 0
        self.num_inside = self.num_waiting + rng.randrange(3) if self.rate_rps else 0
        if self.ends and rng.random() < 0.2:
            self.end_search()
        statuses = self.list_statuses()
        for status in statuses:
            self.scaler.take(status)
        is_needed = self.scaler.watch(statuses)
        self.lines.append(f"watched {is_needed} {self.scaler.describe_status()}")
        if is_needed or rng.random() < 0.1:
            self.lines.append(f"{self.scaler.update(self.make_inputs())} engines")
            self.scaler.search_if_due()
        for _ in range(3):
            await asyncio.sleep(0)
        stored = self.scaler.stored
        self.lines.append(f"{self.scaler.describe_status()} {stored and stored.to_json()}")
        self.lines.append(str([self.scaler.find_sliders(size) for size in (1, 4, 30)]))
        return self.lines


@pytest.mark.parametrize("number", range(NUM_DAYS))
async def test_a_day_is_as_it_was_recorded(number: int) -> None:
    day = Day(number)
    steps = [await day.step() for _ in range(NUM_STEPS)]
    day.scaler.stop()
    check_record(RECORD, str(number), steps)
