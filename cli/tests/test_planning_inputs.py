"""What manifests and flags make of a planning task and of a simulated cluster, against what was recorded.

Flags, manifests and settings are drawn at random. Whoever means to change what one of them does records them anew, and
reviews the difference:

    .venv/bin/python cli/tests/test_planning_inputs.py
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice_cli.simulation.cluster_builder import build_cluster
from sluice_cli.simulation.cluster_spec import ClusterSpec, format_engines
from sluice_cli.simulation.plan_inputs import PlanFlags, make_inputs
from sluice_core.planning.slider_candidates import PrefillHeavyBounds
from sluice_core.records import IterationShape
from sluice_core.sim.traces import TraceRow
from sluice_core.strategies import STRATEGIES
from sluice_operator.api.manifest import check_manifest

RECORDED = Path(__file__).with_name("planning_inputs.jsonl")
NUMBERS = range(60)
ROWS = [TraceRow(prompt_tokens=900, output_tokens=90)]
SHAPE = IterationShape(
    prefill_tokens=300, num_chunks=1, attention_work=45_000.0, num_decodes=9, decode_context_tokens=5000
)
CHANGES = (
    "watermark=0.9",
    "approaching_factor=0.9",
    "early_rejection=Reject",
    "max_batch_tokens=4096",
    "kv_scale=0.5",
    "block_size=32",
    "max_num_seqs=64",
    "link=tcp",
    "link_latency_s=0.5",
    "link_bytes_per_s=1e9",
    "link_shared=true",
    "budget=prefill",
    "flow=false",
    "placement=round_robin",
    "host_iteration_s=0.001",
    "routers=3",
    "report_s=0.1",
    "router_latency_factor=1.5",
    "engine_latency_factor=1.2",
    "burstiness=0.25",
    "wait_limit_s=7",
    "message_s=0.01",
    "output_lengths=exact",
    "length_deviation_tokens=9",
    "prefix_report_s=0.3",
    "no_grant=wait",
    "ttft_end=decode_join",
    "scheduling=in_step",
)


def draw_manifest(rng: random.Random) -> Any:
    if rng.random() < 0.4:
        return None
    strategy = rng.choice([row.title for row in STRATEGIES.values()])
    bounds: dict[str, Any] = {}
    if rng.random() < 0.5:
        bounds["prefillHeavy"] = rng.choice(({"min": 1, "max": 3}, {"min": "25%", "max": "75%"}))
    if rng.random() < 0.5:
        bounds["chunkSizes"] = {"prefillHeavy": {"min": 128, "max": 2048}, "decodeHeavy": {"min": 0, "max": 256}}
    if rng.random() < 0.3:
        bounds["replicas"] = {"min": 2, "max": 9}
    emulation = {"emulation": {"gpu": rng.choice(("h100-80g", "a100-80gx2")), "model": "llama-3-8b"}}
    spec = {
        "replicas": rng.choice((2, 6)),
        "prefillHeavy": rng.choice((1, "50%")),
        "chunkSizes": rng.choice(({"prefillHeavy": 1000, "decodeHeavy": 100}, {"prefillHeavy": 512, "decodeHeavy": 0})),
        "slo": {
            "ttftMilliseconds": 1500,
            "tpotMilliseconds": 45,
            "attainment": rng.choice(("90%", "95%")),
            "classes": rng.choice(([], [{"name": "a", "ttftMilliseconds": 9, "tpotMilliseconds": 8, "priority": 3}])),
        },
        "strategy": strategy,
        "parameters": {"watermarkPercent": rng.choice((90, 95)), "minTokensBetweenMoves": rng.choice((3, 16))},
        "model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
        "engine": {"maxBatchTokens": rng.choice((2048, 8192)), **(emulation if rng.random() < 0.85 else {})},
        "autotune": {"mode": "Recommend", "bounds": bounds},
    }
    body = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", "metadata": {"name": "m"}, "spec": spec}
    return check_manifest(body)


def draw_flags(rng: random.Random, *, is_alone: bool) -> PlanFlags:
    def maybe(share: float, value: Any) -> Any:
        return value if rng.random() < share else None

    share = 0.95 if is_alone else 0.3
    low = rng.randrange(1, 4)
    return PlanFlags(
        model=maybe(share, "qwen2.5-14b"),
        gpu=maybe(share, "a100-80g"),
        tensor_parallels=maybe(0.3, rng.choice(((1,), (2, 1)))),
        strategies=maybe(0.4, rng.choice((("taichi",), ("sluice", "taichi"), ("aggregated",)))),
        engines=maybe(0.4, rng.choice(("2x1024,2x256", "4x512", "1xmax,3x0"))),
        replicas=maybe(0.5, rng.choice(((low, low), (low, low + 3)))),
        prefill_heavy=maybe(0.2, PrefillHeavyBounds(low=1, high=2, is_percent=False)),
        prefill_chunks=maybe(0.2, (256, 100_000)),
        decode_chunks=maybe(0.2, (16, 64)),
        ttft_ms=maybe(share, 700.0),
        tpot_ms=maybe(share, 33.0),
        rate_rps=maybe(0.5, 4.5),
        target=maybe(0.3, 0.85),
        changes=tuple(rng.sample(CHANGES, rng.choice((0, 1, 4)))),
        prefix_reuse=rng.choice((None, None, True)),
    )


def simplify(value: Any) -> Any:
    """Makes records plain; a profile is what it says of one iteration."""
    if hasattr(value, "estimate_shape_s"):
        return f"{value.estimate_shape_s(SHAPE):.8g} s"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: simplify(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): simplify(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [simplify(each) for each in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def describe(number: int) -> dict[str, Any]:
    rng = random.Random(f"inputs {number}")
    manifest = draw_manifest(rng)
    flags = draw_flags(rng, is_alone=manifest is None)
    try:
        inputs = make_inputs(manifest, flags, ROWS)
    except ValueError as error:
        return {"refused": str(error)}
    problem = inputs.problem
    found = {
        "engines": format_engines(inputs.spec.engines),
        "strategy": inputs.spec.strategy,
        "slo": simplify(problem.slo),
        "classes": simplify(problem.classes),
        "engine": simplify(dict(problem.engines)),
        "placements": sorted({(row.placement, row.has_flow) for row in problem.strategies.values()}),
        "parameters": simplify(problem.parameters),
        "options": simplify(problem.options),
        "routers": simplify(problem.routers),
        "space": simplify(inputs.space),
        "goal": simplify(inputs.goal),
        "in force": simplify(inputs.in_force),
    }
    if inputs.spec.engines:
        found["cell"] = describe_cell(inputs.spec, number, found)
    return json.loads(json.dumps(found))


def describe_cell(spec: ClusterSpec, seed: int, found: dict[str, Any]) -> list[str]:
    """Describes the cluster that runs now; what the planning task has too is the same."""
    try:
        cell = build_cluster(spec, seed)
    except ValueError as error:
        return [str(error)]
    for part in ("options", "routers", "parameters"):
        assert simplify(getattr(cell, part)) == found[part]
    engines = [f"{each.engine_id} {each.role} {each.chunk_size_tokens}" for each in cell.engines]
    return [*engines, cell.strategy.name, cell.strategy.placement, str(cell.strategy.has_flow), str(cell.seed)]


def read_recorded() -> list[dict[str, Any]]:
    """Each case is recorded by what differs from the first that was not refused."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    base = lines[0]
    return [line if "refused" in line else {**base, **line} for line in lines[1:]]


RECORDS = read_recorded() if RECORDED.exists() else []


@pytest.mark.parametrize("number", NUMBERS)
def test_manifest_and_flags_make_the_task_that_was_recorded(number: int) -> None:
    found = describe(number)
    expected = RECORDS[number]
    assert {key: value for key, value in found.items() if expected.get(key) != value} == {}
    assert {key for key, value in expected.items() if value is not None} <= set(found)


def test_most_tasks_can_be_planned() -> None:
    assert sum("refused" in record for record in RECORDS) < len(RECORDS) / 3
    assert any("must be given" in record.get("refused", "") for record in RECORDS)


def write() -> None:
    """Records all tasks."""
    found = [describe(number) for number in NUMBERS]
    base = next(each for each in found if "cell" in each)
    lines = [base]
    for each in found:
        gone = {} if "refused" in each else {key: None for key in base if key not in each}
        lines.append({key: value for key, value in {**each, **gone}.items() if base.get(key) != value})
    RECORDED.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    write()
    sys.stdout.write(f"{len(NUMBERS)} tasks are in {RECORDED}\n")
