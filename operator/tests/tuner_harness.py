"""Requests and results of searches, for the tests of the tuner."""

from __future__ import annotations

from sluice.v1 import control_pb2
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts
from sluice_operator.autotune.search_constraints import make_constraints
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.workload import WorkloadSample

BOUNDS = {
    "prefillHeavy": {"min": 1, "max": 3},
    "chunkSizes": {"prefillHeavy": {"min": 256, "max": 2048}, "decodeHeavy": {"min": 0, "max": 256}},
}


APPLY = {"mode": "Apply", "bounds": BOUNDS, "cooldownSeconds": 10}


FOUND = Sliders(num_prefill_heavy=3, prefill_heavy_tokens=1024, decode_heavy_tokens=128)


FOUND_FLOWPREFILL = Sliders(
    num_prefill_heavy=3, prefill_heavy_tokens=1536, decode_heavy_tokens=0, strategy="flowprefill"
)


def make_answer(sliders: Sliders = FOUND, attainment: float = 0.934) -> SearchResult:
    return SearchResult(
        sliders=sliders,
        goodput_rps=3.0,
        attainment=attainment,
        in_force_goodput_rps=2.0,
        in_force_attainment=0.7,
        least_gain=0.4,
    )


def make_samples(prompt_tokens: int, count: int = 100, gap_s: float = 0.5) -> list[control_pb2.RequestSample]:
    return [
        control_pb2.RequestSample(gap_s=gap_s, prompt_tokens=prompt_tokens, output_tokens=50, slo_class="chat")
        for _ in range(count)
    ]


# Real searches.


def make_spec(**changes: object) -> object:
    spec = {
        "replicas": 2,
        "chunkSizes": {"prefillHeavy": 8192, "decodeHeavy": 512},
        "strategy": "TaiChi",
        "slo": {"ttftMilliseconds": 4000, "tpotMilliseconds": 70},
        "model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
        "autotune": APPLY,
        **changes,
    }
    body = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", "metadata": {"name": "m"}, "spec": spec}
    return check_manifest(body).spec


def make_question(num_requests: int = 60, **changes: object) -> SearchRequest:
    spec = make_spec(**changes)
    lengths = ((500 + 37 * number % 3000, 20 + 13 * number % 200, "") for number in range(num_requests))
    sliders = resolve_sliders(spec)
    return SearchRequest(
        constraints=make_constraints(spec),
        spec_sliders=sliders,
        in_force=sliders,
        workload=WorkloadSample(rows=tuple(lengths), rate_rps=2.0),
        engine=EmulatedEngineFacts(gpu="a100-80g", model="qwen2.5-14b"),
    )
