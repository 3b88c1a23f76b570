"""What fleets of several sizes serve: requests and results of a search, and the search itself."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from tuner_harness import BOUNDS, make_spec

from sluice_core.planning.slider_search import SearchEffort
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autoscaling import capacity_process
from sluice_operator.autoscaling.capacity_messages import (
    CapacityPoint,
    CapacityRequest,
    CapacityResult,
    list_sizes,
    make_capacity_request,
)
from sluice_operator.autoscaling.capacity_search import search_capacity
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts
from sluice_operator.autotune.search_process import SearchError, SearchRunner
from sluice_operator.autotune.workload import WorkloadSample

ENGINE = EmulatedEngineFacts(gpu="a100-80g", model="qwen2.5-14b")
EFFORT = SearchEffort(seeds=(1,), num_requests=150, least_duration_s=5.0, most_duration_s=60.0, num_compared=1)
SHARES = {"autotune": {"mode": "Apply", "bounds": {**BOUNDS, "prefillHeavy": {"min": "25%", "max": "75%"}}}}


def make_request(sizes: tuple[int, ...] = (1, 2), prompt_tokens: int = 500, **changes: object) -> CapacityRequest:
    spec = (
        make_spec(replicas=2, autotune={"mode": "Off"}, **changes)
        if "autotune" not in changes
        else make_spec(**changes)
    )
    rows = tuple((prompt_tokens + 37 * number % 100, 20 + 13 * number % 100, "") for number in range(60))
    return make_capacity_request(spec, sizes, resolve_sliders, WorkloadSample(rows=rows, rate_rps=2.0), ENGINE)


@pytest.mark.parametrize(
    ("least", "most", "sizes"),
    [
        (1, 1, (1,)),
        (1, 3, (1, 2, 3)),
        (1, 8, (1, 2, 4, 8)),
        (2, 12, (2, 4, 8, 12)),
        (1, 1000, (1, 2, 4, 8, 16)),
        (2, 2, (2,)),
    ],
)
def test_sizes_are_powers_of_two_and_the_largest(least: int, most: int, sizes: tuple[int, ...]) -> None:
    assert list_sizes(least, most) == sizes


def test_a_request_survives_json() -> None:
    request = make_request()
    assert CapacityRequest.from_json(request.to_json()) == request
    assert request.to_json().count("[537") <= 1, "the workload is written once"


def test_the_rate_alone_is_no_news_and_lengths_objectives_and_sliders_are() -> None:
    request = make_request()
    faster = replace(
        request,
        requests=tuple([replace(item, workload=replace(item.workload, rate_rps=50.0)) for item in request.requests]),
    )
    assert not request.differs(faster)
    assert not request.has_shifted(faster)
    assert request.has_shifted(make_request(prompt_tokens=5000))
    assert request.differs(make_request(slo={"ttftMilliseconds": 900, "tpotMilliseconds": 70}))
    assert request.differs(make_request(chunkSizes={"prefillHeavy": 4096, "decodeHeavy": 512}))
    assert request.differs(make_request(sizes=(1, 2, 4)))


def test_sliders_of_a_size_are_those_of_the_nearest_one_scaled() -> None:
    sliders = Sliders(num_prefill_heavy=2, prefill_heavy_tokens=1024, decode_heavy_tokens=256)
    one = replace(sliders, num_prefill_heavy=1, prefill_heavy_tokens=512)
    points = (
        CapacityPoint(replicas=1, goodput_rps=2.0, sliders=one),
        CapacityPoint(replicas=8, goodput_rps=18.0, sliders=sliders),
    )
    result = CapacityResult(points=points)
    assert CapacityResult.from_json(result.to_json()) == result
    assert result.find_sliders(1) == one
    assert result.find_sliders(12) == replace(sliders, num_prefill_heavy=3)
    assert result.curve.count_engines(4.5, 1, 8) == 3


@pytest.mark.parametrize("text", ["{}", "[]", '{"points": []}', '{"points": [{"replicas": 0}]}'])
def test_something_else_is_no_result(text: str) -> None:
    with pytest.raises(ValueError, match=r"capacity|engines"):
        CapacityResult.from_json(text)


def test_more_engines_serve_more_with_the_sliders_in_force() -> None:
    request = make_request(sizes=(1, 2))
    result = search_capacity(request, EFFORT)
    one, two = result.points
    assert (one.replicas, two.replicas) == (1, 2)
    assert one.goodput_rps > 1.0
    assert two.goodput_rps > 1.5 * one.goodput_rps
    assert [point.sliders for point in result.points] == [item.in_force for item in request.requests]


def test_where_they_may_be_applied_better_sliders_are_found_for_each_size() -> None:
    request = make_request(
        sizes=(2,), prompt_tokens=3000, chunkSizes={"prefillHeavy": 2048, "decodeHeavy": 16}, **SHARES
    )
    (found,) = search_capacity(request, EFFORT).points
    kept = replace(request, may_tune=False)
    assert found.goodput_rps >= search_capacity(kept, EFFORT).points[0].goodput_rps
    assert 256 <= found.sliders.prefill_heavy_tokens <= 2048


async def test_a_search_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = (
        "import json, sys; request = json.load(sys.stdin); sliders = request['requests'][0]['in_force']; "
        "print(json.dumps({'points': [{'replicas': 2, 'goodput_rps': 3.5, 'sliders': sliders}]}))"
    )
    monkeypatch.setattr(capacity_process, "COMMAND", (sys.executable, "-c", echo))
    result = await capacity_process.run_capacity_search(SearchRunner(), make_request())
    assert result.curve.points == ((2, 3.5),)
    monkeypatch.setattr(capacity_process, "COMMAND", (sys.executable, "-c", "raise SystemExit('no chunk size fits')"))
    with pytest.raises(SearchError, match="no chunk size fits"):
        await capacity_process.run_capacity_search(SearchRunner(), make_request())
