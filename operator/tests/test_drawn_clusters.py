"""Drawn lives of a cluster: each write, plan, mark, event and pause of the operator is as the record has it.

A life draws edits of all kinds, good and bad rolls, models that replace each other, drains that hang, pods that do not
start, an API server that fails, routers that are silent, load that comes and goes, and new processes of the operator.
``drawn_clusters.json`` has a short hash of each step. After a change of behaviour that is wanted, write the record
anew, and say in the commit what changed:

    SLUICE_WRITE_RECORDS=1 .venv/bin/python -m pytest operator/tests/test_drawn_clusters.py
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_harness import KEY, World
from fake_kubernetes import READS
from recorded_steps import check_record
from scaler_harness import COEFFICIENTS
from test_operator_faults import Crash
from tuner_harness import BOUNDS, make_samples

from sluice.v1 import control_pb2
from sluice_operator.api.labels import DEFAULT_IMAGE_ANNOTATION, ROLLOUT_ANNOTATION, TEMPLATE_ANNOTATION
from sluice_operator.api.sliders import Sliders
from sluice_operator.autoscaling.capacity_messages import CapacityPoint, CapacityRequest, CapacityResult
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.kubernetes.errors import BusyError, ConflictError, ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.kubernetes.objects import Object

RECORD = Path(__file__).with_name("drawn_clusters.json")
NUM_LIVES = 10
NUM_STEPS = 80
GATE = {"durationSeconds": 5, "timeoutSeconds": 15, "minRequests": 10}
SHARES = {**BOUNDS, "prefillHeavy": {"min": "25%", "max": "75%"}}
SCALING = {"mode": "Apply", "minReplicas": 1, "maxReplicas": 6, "scaleDown": {"stabilizationWindowSeconds": 10}}
EDITS: tuple[dict[str, Any], ...] = (
    {"replicas": 2},
    {"replicas": 3},
    {"replicas": 5},
    {"replicas": 1},
    {"router": {"replicas": 1}},
    {"router": {"replicas": 3}},
    {"prefillHeavy": 1},
    {"prefillHeavy": "75%"},
    {"chunkSizes": {"prefillHeavy": 1024, "decodeHeavy": 128}},
    {"chunkSizes": {"prefillHeavy": 9999}},
    {"strategy": "Sluice"},
    {"strategy": "TaiChi"},
    {"strategy": "Disaggregated"},
    {"slo": {"ttftMilliseconds": 900}},
    {"engine": {"maxBatchTokens": 4096}},
    {"engine": {"maxBatchTokens": 2048}},
    {"engine": {"image": "broken:1"}},
    {"engine": {"image": None}},
    {"engine": {"drainTimeoutSeconds": 3}},
    {"rollout": {"gate": GATE}},
    {"rollout": {"gate": None}},
    {"rollout": {"paused": True}},
    {"rollout": {"paused": False}},
    {"rollout": {"maxSurge": "100%", "maxUnavailable": 0}},
    {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    {"model": {"name": "other"}},
    {"model": {"name": "tiny"}},
    {"autotune": {"mode": "Apply", "bounds": SHARES, "cooldownSeconds": 5}},
    {"autotune": {"mode": "Recommend", "bounds": SHARES}},
    {"autotune": {"mode": "Off"}},
    {"autoscaling": SCALING},
    {"autoscaling": {**SCALING, "mode": "Recommend"}},
    {"autoscaling": {**SCALING, "minReplicas": 0}},
    {"autoscaling": {"mode": "Disabled"}},
)
ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: BusyError("429", retry_after_s=3.0),
    lambda: ConflictError("somebody was faster"),
    lambda: ForbiddenError("403: the right is missing"),
)


class Life:
    """A world, and what happens in it."""

    def __init__(self, number: int) -> None:
        self.rng = random.Random(f"life {number}")
        self.world = World(rollout=self.rng.choice(({}, {"gate": GATE})))
        self.world.run_search, self.world.run_capacity_search = self.search, self.search_capacity
        self.world.kubernetes.broken_images.add("broken:1")
        self.world.kubernetes.before, self.world.kubernetes.after = self.fail_before, self.crash_after
        self.error: Callable[[], Exception] | None = None
        self.num_calls_left = 0
        self.crashes_in = -1
        self.rate_rps, self.is_bad = 0.0, False
        self.arrived = 0.0
        # Templates name images, whose version changes with each release: they count by their order.
        self.templates: list[str] = []
        self.versions: dict[Any, str] = {}
        self.lines: list[str] = []

    # What the world does.

    async def search(self, request: SearchRequest) -> SearchResult:
        self.lines.append(f"search {request.constraints} {request.in_force} {len(request.workload.rows)}")
        if self.rng.random() < 0.2:
            raise SearchError("no chunk size fits")
        return SearchResult(
            sliders=Sliders(
                num_prefill_heavy=self.rng.choice((1, 2)),
                prefill_heavy_tokens=self.rng.choice((512, 1024)),
                decode_heavy_tokens=128,
            ),
            goodput_rps=3.0,
            attainment=self.rng.choice((0.9, 0.99)),
            in_force_goodput_rps=2.0,
            in_force_attainment=0.7,
            least_gain=self.rng.choice((0.4, 0.01)),
        )

    async def search_capacity(self, request: CapacityRequest) -> CapacityResult:
        sizes = [item.constraints.replicas for item in request.requests]
        self.lines.append(f"search for capacity of {sizes}")
        points = [
            CapacityPoint(replicas=size, goodput_rps=2.0 * size, sliders=item.in_force)
            for size, item in zip(sizes, request.requests, strict=True)
        ]
        return CapacityResult(points=tuple(points))

    def fail_before(self, verb: str, plural: str) -> None:
        self.num_calls_left -= 1
        if self.error is not None and self.num_calls_left == 0:
            raise self.error()
        self.lines.append(f"{verb} {plural}") if verb not in READS else None

    def crash_after(self, _verb: str, _plural: str) -> None:
        self.crashes_in -= 1
        if self.crashes_in == 0:
            raise Crash

    def draw_change(self) -> None:
        """Draws what is different from this step on."""
        rng, routers = self.rng, self.world.routers
        self.error, self.crashes_in = None, -1
        if rng.random() < 0.12:
            self.world.edit(**rng.choice(EDITS))
        changes: tuple[Callable[[], Any], ...] = (
            lambda: routers.stuck.update(sorted(self.world.engine_uids)[:1]),
            routers.stuck.clear,
            lambda: routers.late.update(sorted(self.world.engine_uids)[1:2]),
            routers.late.clear,
            lambda: setattr(routers, "is_silent", not routers.is_silent),
            self.world.start_operator,
            lambda: setattr(self, "error", rng.choice(ERRORS)),
            lambda: setattr(self, "crashes_in", rng.randrange(1, 20)),
            lambda: setattr(self, "rate_rps", rng.choice((0.0, 1.0, 3.0, 9.0))),
            lambda: setattr(self, "is_bad", not self.is_bad),
            lambda: self.measure_engines(rng.choice((500, 9000))),
            lambda: routers.loads.update({uid: rng.randrange(5) for uid in sorted(self.world.engine_uids)}),
        )
        if rng.random() < 0.25:
            rng.choice(changes)()
        self.num_calls_left = rng.randrange(1, 25)

    def measure_engines(self, prompt_tokens: int) -> None:
        routers = self.world.routers
        routers.samples, routers.latency = make_samples(prompt_tokens, 400), COEFFICIENTS
        routers.num_fitted_iterations = 300

    def serve(self) -> None:
        """Requests arrive and end, on new engines badly where the roll is bad."""
        routers, step = self.world.routers, round(self.rate_rps * 5)
        self.arrived += self.rate_rps
        routers.num_arrived = int(self.arrived)
        routers.num_waiting = int(self.rate_rps > 5.0)
        routers.num_inside = routers.num_waiting + int(self.rate_rps)
        met = step // 2 if self.is_bad else step
        for uid in sorted(self.world.engine_uids)[-1:]:
            ended, good, failed = routers.outcomes.get(uid, (0, 0, 0))
            routers.outcomes[uid] = ended + step, good + met, failed + int(self.is_bad and self.rate_rps > 5.0)
        last = routers.counters[0] if routers.counters else control_pb2.ClassCounters()
        routers.counters[:] = [
            control_pb2.ClassCounters(
                num_finished=last.num_finished + step,
                num_met_ttft=last.num_met_ttft + met,
                num_met_tpot=last.num_met_tpot + step,
                num_met_both=last.num_met_both + met,
            )
        ]

    # What is compared.

    def intern(self, template: Any) -> int:
        text = json.dumps(template, sort_keys=True)
        if text not in self.templates:
            self.templates.append(text)
        return self.templates.index(text)

    def describe(self, item: Object) -> str:
        """An object without what a release or another rendering changes."""
        metadata, kind = item["metadata"], item["kind"]
        annotations = dict(metadata.get("annotations") or {})
        annotations.pop(DEFAULT_IMAGE_ANNOTATION, None)
        if TEMPLATE_ANNOTATION in annotations:
            annotations[TEMPLATE_ANNOTATION] = f"template {self.intern(json.loads(annotations[TEMPLATE_ANNOTATION]))}"
        if ROLLOUT_ANNOTATION in annotations:
            roll = json.loads(annotations[ROLLOUT_ANNOTATION])
            roll["good_template"] = self.intern(roll["good_template"])
            del roll["target_hash"]
            annotations[ROLLOUT_ANNOTATION] = json.dumps(roll)
        if kind == "Pod":
            annotations = {name: text for name, text in annotations.items() if "hash" not in name}
            content: Any = metadata.get("labels", {}).get("sluice.dev/role")
        elif kind == "Deployment":
            spec = item["spec"]
            content = {name: spec[name] for name in spec if name not in ("template", "selector")}
            content["template"] = self.intern(spec["template"])
        else:
            content = {name: item[name] for name in ("data", "status") if name in item and kind != "ServiceAccount"}
        return f"{kind} {metadata['name']} {json.dumps(annotations, sort_keys=True)} {json.dumps(content)}"

    def list_changes(self) -> list[str]:
        found = self.world.kubernetes.objects
        changed = [item for address, item in sorted(found.items()) if self.versions.get(address) != version_of(item)]
        gone = [f"{' '.join(address)} is gone" for address in sorted(set(self.versions) - set(found))]
        self.versions = {address: version_of(item) for address, item in found.items()}
        return [*map(self.describe, changed), *gone]

    async def step(self) -> list[str]:
        """One second."""
        world, self.lines = self.world, []
        self.draw_change()
        self.serve()
        world.run_controllers()
        world.enqueued.clear()
        num_events, num_plans = len(world.kubernetes.events), len(world.routers.offered)
        try:
            wake_s = await world.reconcile()
            self.lines.append(f"{wake_s} {type(world.last_error).__name__}")
        except* Crash:
            self.lines.append("the operator crashed")
            world.start_operator()
        for status in world.routers.statuses(KEY).values():
            world.reconciler.record_status(KEY, status)
        for _ in range(3):
            await asyncio.sleep(0)
        self.lines.append(f"enqueued {len(world.enqueued)} times")
        self.lines += [f"{item['reason']}: {item['note']}" for item in world.kubernetes.events[num_events:]]
        self.lines += [f"plan {plan.generation}" for plan in world.routers.offered[num_plans:]]
        self.lines += self.list_changes()
        world.now += self.rng.choice((1.0, 1.0, 1.0, 4.0))
        return self.lines


def version_of(item: Object) -> str:
    return str(item["metadata"]["resourceVersion"])


async def live(number: int) -> tuple[Life, list[list[str]]]:
    life = Life(number)
    steps = [await life.step() for _ in range(NUM_STEPS)]
    life.world.start_operator()
    return life, steps


@pytest.mark.parametrize("number", range(NUM_LIVES))
async def test_a_life_is_as_it_was_recorded(number: int) -> None:
    _, steps = await live(number)
    check_record(RECORD, str(number), steps)


if __name__ == "__main__":

    async def count() -> Counter[str]:
        found: Counter[str] = Counter()
        for number in range(NUM_LIVES):
            life, steps = await live(number)
            for item in life.world.status["conditions"]:
                found[f"{item['type']} {item['reason']}"] += 1
            found.update(line.split(" ")[0] + " " + line.split(" ")[1] for step in steps for line in step)
        return found

    for name, times in sorted(asyncio.run(count()).items()):
        print(times, name)
