"""``sluice plan``: what it reads, refuses, and prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from sluice_cli.main import cli
from sluice_cli.output.plan_report import describe_candidate, format_candidate_engines, make_patch
from sluice_cli.simulation.cluster_spec import format_engines, parse_engines
from sluice_cli.simulation.plan_inputs import PlanFlags, make_inputs, parse_range
from sluice_core.planning.slider_candidates import SliderCandidate
from sluice_core.sim.traces import TraceRow
from sluice_operator.api.manifest import check_manifest, parse_manifest
from sluice_operator.api.sliders import resolve_sliders

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-cpu.yaml"
ROWS = [TraceRow(prompt_tokens=300, output_tokens=20), TraceRow(prompt_tokens=900, output_tokens=40)]
CLUSTER = ("--model", "llama-3-8b", "--gpu", "a100", "--ttft-ms", "1500", "--tpot-ms", "80")
QUICK = (
    "--strategy",
    "aggregated",
    "--prefill-chunk",
    "512-1024",
    "--duration-s",
    "4",
    "--seeds",
    "1,2",
    "--jobs",
    "1",
)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["plan", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "log.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": second, "prompt_tokens": 4000 + 100 * second, "completion_tokens": 40}) + "\n"
            for second in range(20)
        )
    )
    return str(path)


def make_manifest(**changes) -> dict:
    content = yaml.safe_load(EXAMPLE.read_text())
    content["spec"] |= changes
    return content


def test_a_plan_is_printed_for_programs(trace: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, output = run(*CLUSTER, *QUICK, "--replicas", "1", "--trace", trace, "--json", "--html", str(page))
    assert code == 0, output
    report = json.loads(output)
    assert report["strategy"] == "aggregated"
    assert format_engines(parse_engines(report["engines"])) == report["engines"]
    assert set(report["parameters"]) == {"watermark", "approaching_factor"}
    predicted = report["predicted"]
    assert predicted["attainment_interval"][0] <= predicted["attainment"] <= predicted["attainment_interval"][1]
    assert predicted["goodput_rps"] > 0.5
    assert predicted["ttft_s"]["p50"] > 0.1
    assert report["alternatives"][0]["goodput_rps"] <= predicted["goodput_rps"]
    assert report["binds"]["objective"] in {"ttft", "tpot"}
    assert report["patch"]["spec"]["chunkSizes"]["prefillHeavy"] == int(report["engines"].partition("x")[2])
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "src=" not in text
    assert "<script" not in text


def test_a_plan_reuses_prefixes_where_asked_to(trace: str) -> None:
    hashed = str(EXAMPLE.parent / "traces" / "mooncake-conversation.jsonl.gz")
    slow = ("--ttft-ms", "20000", "--tpot-ms", "200", "--replicas", "1", "--duration-s", "30")
    code, output = run(*CLUSTER, *QUICK, *slow, "--trace", hashed, "--prefix-reuse", "--json")
    assert code == 0, output
    assert json.loads(output)["predicted"]["prefix_hit_rate"] > 0.01
    code, output = run(*CLUSTER, *QUICK, *slow, "--trace", hashed, "--prefix-reuse")
    assert "prefix hit rate" in output
    code, output = run(*CLUSTER, *QUICK, "--replicas", "1", "--trace", trace, "--prefix-reuse")
    assert code == 1
    assert "line 1: there are no hash_ids" in " ".join(output.split())


def test_a_rate_out_of_reach_is_refused_with_the_best_there_is(trace: str) -> None:
    code, output = run(*CLUSTER, *QUICK, "--replicas", "1", "--trace", trace, "--rate", "500")
    assert code == 1
    assert "no plan within the bounds serves 500 requests/s; the best found reaches" in output
    assert "kubectl patch servingcluster NAME --type merge" in output


@pytest.mark.parametrize("goal", [(), ("--rate", "5")], ids=["highest", "fewest"])
def test_objectives_that_nothing_meets_are_refused_with_what_requests_need(trace: str, goal: tuple[str, ...]) -> None:
    cluster = (*CLUSTER[:4], "--ttft-ms", "1", "--tpot-ms", "80", "--replicas", "1", "--trace", trace)
    code, output = run(*cluster, *QUICK, *goal)
    assert code == 1
    said = " ".join(output.split())
    assert (
        "no plan within the bounds meets a TTFT of 1 ms and a TPOT of 80 ms for 0.9 of the requests at any rate" in said
    )
    ttft_ms, tpot_ms = (float(value) for value in re.findall(r"TTFT and TPOT of (\S+) ms and (\S+) ms", said)[0])
    assert ttft_ms > 50
    assert 1 < tpot_ms < 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-5", *CLUSTER[2:], "--replicas", "2"), "llama-3-8b"),
        ((*CLUSTER[2:], "--replicas", "2"), "without a manifest, --model must be given"),
        (CLUSTER, "without a manifest, --replicas must be given"),
        ((*CLUSTER, "--replicas", "4-2"), "'4-2' ends below its start"),
        ((*CLUSTER, "--replicas", "50%"), "in percent"),
        ((*CLUSTER, "--replicas", "2", "--prefill-heavy", "x"), "'x' is neither a number"),
        ((*CLUSTER, "--replicas", "2", "--strategy", "best"), "known are taichi, aggregated, disaggregated"),
        ((*CLUSTER, "--replicas", "2", "--tensor-parallel", "1,x"), "list of numbers of GPUs"),
        ((*CLUSTER, "--replicas", "2", "--tensor-parallel", "0"), "list of numbers of GPUs"),
        ((*CLUSTER, "--replicas", "2", "--tensor-parallel", "65"), "list of numbers of GPUs"),
        ((*CLUSTER, "--replicas", "2", "--rate", "0"), "is not in the range x>0"),
        ((*CLUSTER, "--replicas", "2", "--prefill-chunk", "1-8"), "no chunk size is within 1 to 8"),
        ((*CLUSTER, "--replicas", "1", "--strategy", "taichi"), "no plan of 1 engines is within the bounds"),
        ((str(EXAMPLE),), "give --model and --gpu"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, tuple) else None,
)
def test_what_cannot_be_planned_is_refused(trace: str, arguments: tuple[str, ...], message: str) -> None:
    code, output = run(*arguments, "--trace", trace, "--jobs", "1")
    assert code != 0
    assert message in output


def test_a_wrong_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt_tokens": 5, "completion_tokens": 2}\n{"prompt_tokens": 5, "completion_tokens": 0}\n')
    code, output = run(*CLUSTER, *QUICK, "--replicas", "1", "--trace", str(path))
    assert code == 1
    assert f"{path}, line 2: completion_tokens is 0" in output
    # Left out, it is no reason to refuse: the next one is named.
    output = run(*CLUSTER, *QUICK, "--trace", str(path), "--skip-unanswered")[1]
    assert "without a manifest, --replicas must be given" in output


def test_a_manifest_gives_bounds_objectives_and_the_plan_in_force() -> None:
    bounds = {
        "prefillHeavy": {"min": "25%", "max": "50%"},
        "chunkSizes": {"prefillHeavy": {"min": 256, "max": 1024}, "decodeHeavy": {"min": 0, "max": 128}},
        "replicas": {"min": 2, "max": 6},
    }
    manifest = check_manifest(make_manifest(autotune={"mode": "Off", "bounds": bounds}))
    inputs = make_inputs(manifest, PlanFlags(model="llama-3-8b", gpu="a100", rate_rps=3.0), ROWS)
    assert inputs.space.prefill_heavy.resolve(4) == (1, 2)
    assert (inputs.space.prefill_heavy_tokens[0], inputs.space.prefill_heavy_tokens[-1]) == (256, 1024)
    assert (inputs.space.decode_heavy_tokens[0], inputs.space.decode_heavy_tokens[-1]) == (0, 128)
    assert (inputs.goal.least_replicas, inputs.goal.most_replicas, inputs.goal.target) == (2, 6, 0.9)
    assert inputs.in_force is not None
    assert format_candidate_engines(inputs.in_force) == "2x512,2x64"
    assert (inputs.problem.slo.ttft_s, [one.name for one in inputs.problem.classes]) == (2.0, ["interactive"])
    assert inputs.space.max_batch_tokens == 2048


def test_flags_win_over_the_manifest() -> None:
    flags = PlanFlags(
        model="llama-3-8b",
        gpu="a100",
        replicas=(6, 6),
        prefill_chunks=(512, 512),
        ttft_ms=700.0,
        target=0.95,
        strategies=("taichi",),
        changes=("watermark=0.9",),
    )
    inputs = make_inputs(parse_manifest(EXAMPLE.read_text()), flags, ROWS)
    assert (inputs.goal.least_replicas, inputs.goal.most_replicas, inputs.goal.target) == (6, 6, 0.95)
    assert (inputs.space.prefill_heavy_tokens, inputs.space.watermarks) == ((512,), (0.9,))
    assert (inputs.problem.slo.ttft_s, inputs.space.strategies) == (0.7, ("taichi",))


def test_a_candidate_is_described_in_the_words_of_simulate() -> None:
    assert describe_candidate(CANDIDATES["taichi"]) == {
        "engines": "1x1024,2x128",
        "strategy": "taichi",
        "tensor_parallel": 1,
        "gpus": 3,
        "parameters": {"watermark": 0.9, "approaching_factor": 1.0},
    }


CANDIDATES = {
    "taichi": SliderCandidate(
        strategy="taichi",
        num_prefill_heavy=1,
        num_decode_heavy=2,
        prefill_heavy_tokens=1024,
        decode_heavy_tokens=128,
        watermark=0.9,
        approaching_factor=1.0,
    ),
    "aggregated": SliderCandidate(
        strategy="aggregated", num_prefill_heavy=2, num_decode_heavy=0, prefill_heavy_tokens=384, decode_heavy_tokens=0
    ),
    "disaggregated": SliderCandidate(
        strategy="disaggregated",
        num_prefill_heavy=2,
        num_decode_heavy=3,
        prefill_heavy_tokens=2048,
        decode_heavy_tokens=0,
    ),
    "flowprefill": SliderCandidate(
        strategy="flowprefill",
        num_prefill_heavy=3,
        num_decode_heavy=1,
        prefill_heavy_tokens=1536,
        decode_heavy_tokens=0,
    ),
}


def merge(content: dict, patch: dict) -> dict:
    """Merges as RFC 7386 says."""
    return {
        **content,
        **{
            key: merge(content.get(key, {}), value) if isinstance(value, dict) else value
            for key, value in patch.items()
        },
    }


@pytest.mark.parametrize("present", ["50%", 4], ids=["share", "count"])
@pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=CANDIDATES)
def test_the_patched_manifest_is_the_plan(candidate: SliderCandidate, present: str | int) -> None:
    content = make_manifest(prefillHeavy=present)
    manifest = check_manifest(content)
    inputs = make_inputs(manifest, PlanFlags(model="llama-3-8b", gpu="a100"), ROWS)
    patched = check_manifest(merge(content, make_patch(candidate, inputs)))
    again = make_inputs(patched, PlanFlags(model="llama-3-8b", gpu="a100"), ROWS).in_force
    assert again is not None
    assert format_candidate_engines(again) == format_candidate_engines(candidate)
    assert again.strategy == candidate.strategy
    assert resolve_sliders(patched.spec).prefill_heavy_tokens == candidate.prefill_heavy_tokens
    if candidate.strategy == "taichi":
        assert (again.watermark, again.approaching_factor) == (candidate.watermark, candidate.approaching_factor)


@pytest.mark.parametrize(
    ("text", "values"),
    [("4", (4, 4, False)), ("2-8", (2, 8, False)), ("25%-75%", (25, 75, True)), ("50%", (50, 50, True))],
)
def test_ranges_are_read(text: str, values: tuple[int, int, bool]) -> None:
    assert parse_range(text) == values


@pytest.mark.parametrize("text", ["", "a", "4-", "2%-4", "-3", "1-2-3"])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_range(text)
