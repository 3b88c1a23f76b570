"""``sluice parallelism``: what it reads, refuses, and prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from sluice_cli.main import cli

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = ("--model", "opt-13b", "--gpu", "a100", "--nodes", "1", "--gpus-per-node", "2")
SLO = ("--ttft-ms", "400", "--tpot-ms", "30")
QUICK = ("--seeds", "1", "--duration-s", "20", "--jobs", "1", "--pipeline-parallel", "1")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["parallelism", *arguments])
    return result.exit_code, result.output


def write_trace(path: Path, *, prompt: int = 400, output: int = 100, gap_s: float = 1.0, has_times: bool = True) -> str:
    header = "arrival_s,input_tokens,output_tokens" if has_times else "input_tokens,output_tokens"
    rows = [
        (f"{number * gap_s}," if has_times else "") + f"{prompt + 10 * (number % 20)},{output + number % 3}"
        for number in range(60)
    ]
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_trace(tmp_path / "trace.csv")


def test_a_placement_is_printed_for_people(trace: str) -> None:
    code, output = run(*CLUSTER, *SLO, *QUICK, "--trace", trace, "--node-affinity", "low", "--rate", "2")
    assert code == 0, output
    assert output.split("\n", 1)[0].split() == ["phase", "TP", "PP", "goodput", "per", "GPU", "instances", "GPUs"]
    assert "prefill   1   1" in output
    assert "decode    1   1" in output
    assert "2 GPUs on 1 node(s) of 2 serve 2 requests/s" in output
    assert "a prefill and a decode instance share 1 node(s)" in output
    assert "not deployable yet" in output


def test_a_placement_is_printed_for_programs_at_the_rate_of_the_trace(trace: str) -> None:
    code, output = run(*CLUSTER, *SLO, *QUICK, "--trace", trace, "--json")
    report = json.loads(output.partition("\nError")[0])
    assert report["rate_rps"] == pytest.approx(1.0)
    assert report["is_deployable"] is False
    assert [phase["phase"] for phase in report["phases"]] == ["prefill", "decode"]
    for phase in report["phases"]:
        gpus = phase["tensor_parallel"] * phase["pipeline_parallel"]
        assert phase["goodput_per_gpu_rps"] == pytest.approx(phase["goodput_rps"] / gpus)
        assert phase["gpus"] == phase["instances"] * gpus
        assert phase["instances"] * phase["goodput_rps"] >= 1.0
    assert report["gpus"] == sum(phase["gpus"] for phase in report["phases"])
    assert len(report["candidates"]) == 4
    assert report["fits"] is (report["nodes"] <= 1) is (code == 0)


def test_results_do_not_depend_on_the_number_of_processes(trace: str) -> None:
    outputs = [
        run(*CLUSTER, *SLO, *QUICK[:4], "--tensor-parallel", "1", "--jobs", jobs, "--trace", trace, "--json")[1]
        for jobs in ("1", "2")
    ]
    assert outputs[0] == outputs[1]


def test_more_nodes_than_there_are_is_an_error_after_the_table(trace: str) -> None:
    code, output = run(*CLUSTER, *SLO, *QUICK, "--trace", trace, "--node-affinity", "low", "--rate", "60")
    assert code == 1
    assert "decode    1   1" in output
    assert "nodes of 2 GPUs are needed; there are 1" in output


def test_parallelisms_without_measurements_are_left_out_by_name(trace: str) -> None:
    cluster = (*CLUSTER[:-1], "3")
    code, output = run(*cluster, *SLO, *QUICK, "--trace", trace, "--json")
    report = json.loads(output.partition("\nError")[0])
    (left_out,) = report["left_out"]
    assert left_out["parallelisms"] == [{"tensor_parallel": 3, "pipeline_parallel": 1}]
    assert "which 3 GPUs cannot share" in left_out["reason"]
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--gpus-per-node", "8", "--tensor-parallel", "8"),
            "DistServe has opt-13b on 1, 2, 4 a100-80g, not opt-13b on 8",
        ),
        (
            ("--model", "llama-2-70b", "--gpus-per-node", "16", "--tensor-parallel", "16"),
            "all-reduces over 16 GPUs were not measured, only over 1, 2, 4, 8",
        ),
        (("--tensor-parallel", "3"), "--tensor-parallel 3 is not possible with 1 node(s) of 2 GPUs and 40 layers"),
        (("--pipeline-parallel", "3"), "--pipeline-parallel 3 is not possible with 1 node(s) of 2 GPUs and 40 layers"),
        (("--model", "llama-2-70b", "--gpus-per-node", "1"), "no parallelism can be simulated: weights of"),
        (("--model", "gpt-9"), "model 'gpt-9' is unknown"),
        (("--gpu", "z80"), "GPU 'z80' is unknown"),
        (("--rate", "0"), "Invalid value for '--rate': 0.0 is not in the range x>0"),
        (("--ttft-ms", "0"), "Invalid value for '--ttft-ms'"),
        (("--nodes", "0"), "Invalid value for '--nodes'"),
        (("--target", "2"), "Invalid value for '--target'"),
        (("--node-affinity", "some"), "Invalid value for '--node-affinity'"),
        (("--set", "routers=2"), "'routers' does not count here; known are prefill_batch_tokens"),
        (("--set", "link=rope"), "link is 'rope'"),
        (("--set", "prefill_batch_tokens=0"), "prefill_batch_tokens is 0; at least 1 is needed"),
        (("--ttft-ms", "30"), "comes closest and needs a TTFT of"),
        (("--tpot-ms", "2"), "comes closest and needs a TPOT of"),
    ],
)
def test_wrong_input_is_refused_by_name(trace: str, arguments: tuple[str, ...], message: str) -> None:
    code, output = run(*CLUSTER, *SLO, *QUICK, "--trace", trace, *arguments)
    assert code != 0
    assert message in " ".join(output.split())


def test_a_trace_without_times_needs_a_rate(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "lengths.csv", has_times=False)
    code, output = run(*CLUSTER, *SLO, *QUICK, "--trace", trace)
    assert code == 1
    assert "the trace does not say when its requests came; --rate is needed" in output
    assert run(*CLUSTER, *SLO, *QUICK, "--trace", trace, "--rate", "1")[0] == 0


@pytest.mark.parametrize(
    ("changes", "shifts"),
    [({}, ""), ({"gap_s": 0.2}, "rate_rps"), ({"prompt": 700, "output": 160}, "prompt_tokens, output_tokens")],
)
def test_a_search_is_made_again_only_if_the_workload_has_shifted(
    trace: str, tmp_path: Path, changes: dict, shifts: str
) -> None:
    recent = write_trace(tmp_path / "recent.csv", **changes)
    wide = (*CLUSTER[:-3], "4", *CLUSTER[-2:])
    code, output = run(*wide, "--ttft-ms", "900", "--tpot-ms", "30", *QUICK, "--planned-for", trace, "--trace", recent)
    assert code == 0, output
    if shifts:
        assert f"the workload has shifted: {shifts}" in output
        assert "not deployable yet" in output
    else:
        assert output == "the workload has not shifted: nothing to do\n"


def test_a_given_rate_counts_and_unanswered_requests_are_left_out_where_asked(trace: str, tmp_path: Path) -> None:
    recent = tmp_path / "recent.csv"
    write_trace(recent, gap_s=0.2)
    fewer = recent.read_text().splitlines()
    fewer[5] = ",".join([*fewer[5].split(",")[:-1], "0"])
    recent.write_text("\n".join(fewer) + "\n")
    asked = (*CLUSTER, *SLO, *QUICK, "--planned-for", trace, "--trace", str(recent), "--rate", "1")
    code, output = run(*asked)
    assert (code, "line 6" in output) == (1, True)
    assert run(*asked, "--skip-unanswered") == (0, "the workload has not shifted: nothing to do\n")
