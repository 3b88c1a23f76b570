"""``sluice simulate``: its flags, its JSON, and how it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice_cli.main import cli
from sluice_cli.simulation import seed_runs
from sluice_cli.simulation.cluster_builder import build_cluster
from sluice_cli.simulation.cluster_spec import (
    ClusterSpec,
    EngineGroup,
    format_engines,
    parse_engines,
    read_manifest_spec,
)
from sluice_cli.simulation.simulation_settings import SimulationSettings, change_settings
from sluice_cli.simulation.trace_cache import load_rows, read_trace
from sluice_core.records import Role, Slo
from sluice_core.sim.goodput_search import search_goodput
from sluice_core.sim.sim_setup import NoGrant, TtftEnd
from sluice_core.sim.traces import TraceError
from sluice_core.sim.workload import DrawnWorkload
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters
from sluice_operator.api.manifest import parse_manifest

ROOT = Path(__file__).parents[2]
TRACE = str(ROOT / "examples" / "traces" / "arxiv-16k.csv")
MANIFEST = ROOT / "examples" / "tiny-cpu.yaml"
CLUSTER = (
    "--model",
    "qwen2.5-14b",
    "--gpu",
    "a100-80g",
    "--engines",
    "2x1024,2x256",
    "--ttft-ms",
    "4000",
    "--tpot-ms",
    "70",
)
SHORT = ("--duration-s", "60", "--seeds", "1,2", "--jobs", "1")


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    return result.exit_code, result.output


def simulate_json(*arguments: str) -> dict[str, object]:
    code, output = simulate(*arguments, "--json")
    assert code == 0, output
    report = json.loads(output)
    assert isinstance(report, dict)
    return report


def test_a_run_reports_every_metric() -> None:
    report = simulate_json(*CLUSTER, "--trace", TRACE, "--rate", "1.5", *SHORT)
    assert {"attainment", "attainment_longest_tenth", "moves", "preemptions", "rejected"} <= set(report)
    assert set(report["ttft_s"]) == set(report["tpot_s"]) == {"p50", "p90", "p99"}  # type: ignore[call-overload]
    assert report["engines"] == "2x1024,2x256"
    assert 0.95 < float(str(report["attainment"])) <= 1.0
    assert report["seeds"] == [1, 2]


def test_goodput_is_searched_for_each_seed_and_processes_change_nothing() -> None:
    arguments = (*CLUSTER, "--trace", TRACE, "--goodput", "--duration-s", "20", "--seeds", "1,2")
    report = simulate_json(*arguments, "--jobs", "1")
    rates = report["goodput_per_seed"]
    assert isinstance(rates, list)
    assert len(rates) == 2
    assert report["goodput_rps"] == pytest.approx(sum(rates) / 2)
    assert report["goodput_sd"] == pytest.approx(abs(rates[0] - rates[1]) / 2**0.5)
    assert float(str(report["attainment"])) >= 0.9
    assert simulate_json(*arguments, "--jobs", "2") == report


@pytest.mark.parametrize("rate", ["0.2", "30"])
def test_the_start_of_the_search_does_not_clip_it(rate: str) -> None:
    arguments = (*CLUSTER, "--trace", TRACE, "--goodput", "--duration-s", "20", "--seeds", "1", "--jobs", "1")
    arguments = (*arguments, "--strategy", "taichi")
    expected = simulate_json(*arguments)["goodput_rps"]
    assert simulate_json(*arguments, "--rate", rate)["goodput_rps"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("flags", "start_rps", "target"), [((), 2.0, 0.9), (("--rate", "3", "--target", "0.8"), 3.0, 0.8)]
)
def test_a_goodput_is_searched_from_the_rate_or_from_half_a_request_per_engine(
    monkeypatch, flags, start_rps, target
) -> None:
    asked = []

    def search(cell, workload, **arguments):
        asked.append((len(cell.engines), len(workload.make_arrivals(1.0, 50.0)), arguments))
        return search_goodput(cell, workload, **arguments)

    monkeypatch.setattr(seed_runs, "search_goodput", search)
    report = simulate_json(*CLUSTER, "--trace", TRACE, "--goodput", "--duration-s", "5", "--seeds", "7", *flags)
    assert report["target"] == target
    rows = load_rows(Path(TRACE))
    arrivals = DrawnWorkload(rows, Slo(ttft_s=4.0, tpot_s=0.07), 7).make_arrivals(1.0, 50.0)
    assert asked == [(4, len(arrivals), {"duration_s": 5.0, "start_rps": start_rps, "target": target})]


HASHED_TRACE = str(ROOT / "examples" / "traces" / "mooncake-conversation.jsonl.gz")


def test_prefix_reuse_is_compared_on_the_same_requests() -> None:
    arguments = (*CLUSTER, "--trace", HASHED_TRACE, "--rate", "0.5", *SHORT)
    reusing = simulate_json(*arguments, "--prefix-reuse")
    same = simulate_json(*arguments, "--no-prefix-reuse")
    assert 0.01 < float(str(reusing["prefix_hit_rate"])) < 0.4
    assert same["prefix_hit_rate"] is None
    assert (reusing["prefix_reuse"], same["prefix_reuse"]) == (True, False)
    assert reusing["requests"] == same["requests"]
    tokens = [sum(use["prefill_tokens"] for use in report["engine_use"]) for report in (reusing, same)]  # type: ignore[attr-defined]
    assert tokens[0] < tokens[1]


def test_the_table_shows_the_hit_rate_where_prefixes_are_reused() -> None:
    arguments = (*CLUSTER, "--trace", HASHED_TRACE, "--rate", "0.5", *SHORT)
    assert "prefix hit rate" in simulate(*arguments, "--prefix-reuse")[1]
    assert "prefix hit rate" not in simulate(*arguments)[1]


def test_prefix_reuse_goes_with_a_manifest_and_the_trace_s_times() -> None:
    cluster = (str(MANIFEST), "--model", "llama-3-8b", "--gpu", "h100-80g", "--trace", HASHED_TRACE, *SHORT)
    report = simulate_json(*cluster, "--trace-times", "--prefix-reuse")
    assert float(str(report["prefix_hit_rate"])) > 0.01


@pytest.mark.parametrize(
    ("ids", "message"),
    [("", "line 2: there are no hash_ids"), (', "hash_ids": [1, 2]', "line 2: hash_ids has 2 entries")],
)
def test_wrong_hashes_are_named_with_file_and_line(ids: str, message: str, tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
        f'{{"timestamp": 1, "input_length": 10, "output_length": 5{ids}}}\n'
    )
    code, output = simulate(*CLUSTER, "--trace", str(trace), "--rate", "1", *SHORT, "--prefix-reuse")
    assert code == 1
    assert f"{trace}, {message}" in " ".join(output.split())
    code, output = simulate(*CLUSTER, "--trace", TRACE, "--rate", "1", *SHORT, "--prefix-reuse")
    assert code == 1
    assert f"{TRACE}, line 1: there are no hash_ids" in " ".join(output.split())


def test_a_manifest_gives_engines_strategy_and_objectives() -> None:
    report = simulate_json(
        str(MANIFEST), "--model", "llama-3-8b", "--gpu", "h100-80g", "--trace", TRACE, "--rate", "2", *SHORT
    )
    assert (report["engines"], report["strategy"]) == ("2x512,2x64", "taichi")
    assert (report["ttft_ms"], report["tpot_ms"]) == (2000.0, 200.0)


def test_flags_win_over_the_manifest() -> None:
    arguments = (str(MANIFEST), *CLUSTER, "--strategy", "aggregated", "--trace", TRACE, "--rate", "1", *SHORT)
    report = simulate_json(*arguments)
    assert (report["engines"], report["strategy"], report["ttft_ms"]) == ("2x1024,2x256", "aggregated", 4000.0)


def test_classes_of_a_manifest_keep_their_objectives() -> None:
    spec = read_manifest_spec(parse_manifest(MANIFEST.read_text()), "qwen2.5-14b", "a100-80g")
    (interactive,) = spec.classes
    assert (interactive.name, interactive.priority, interactive.slo) == ("interactive", 10, Slo(ttft_s=0.5, tpot_s=0.1))


def test_the_table_is_for_people() -> None:
    code, output = simulate(*CLUSTER, "--trace", TRACE, "--rate", "1", *SHORT)
    assert code == 0
    assert "qwen2.5-14b on a100-80g, sluice 2x1024,2x256" in output
    assert "attainment longest tenth" in output


def test_the_timeline_is_written(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    code, output = simulate(*CLUSTER, "--trace", TRACE, "--rate", "1", *SHORT, "--timeline", str(file))
    assert code == 0, output
    assert len(json.loads(file.read_text())["traceEvents"]) > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "1", "--model", "gpt-9"), "model 'gpt-9' is unknown; known are llama-3-8b, qwen2.5-14b"),
        (("--rate", "1", "--gpu", "tpu"), "GPU 'tpu' is unknown; known are a100-80g"),
        (("--rate", "1", "--strategy", "best"), "strategy 'best' is unknown; known are taichi"),
        (("--rate", "1", "--engines", "2x1024,2x256,1x8"), "is not COUNTxCHUNK"),
        (("--rate", "1", "--engines", "2*1024"), "is not COUNTxCHUNK"),
        (("--rate", "1", "--engines", "1x99999"), "chunk size 99999, not in 0..16384"),
        (("--rate", "1", "--set", "colour=red"), "known are watermark"),
        (("--rate", "1", "--set", "no_grant=perhaps"), "no_grant is 'perhaps'; known are in_place, wait"),
        (("--rate", "1", "--set", "watermark=2"), "watermark is '2'; 0 to 1 is allowed"),
        (("--rate", "1", "--seeds", "1,1"), "has a seed twice"),
        (("--rate", "1", "--trace-times"), "the trace has no arrival_s"),
        (("--rate", "1", "--trace-times", "--set", "burstiness=0.25"), "burstiness is for drawn arrivals"),
        ((), "--rate or --goodput is needed"),
        (("--goodput", "--timeline", "x"), "need --rate"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], message: str) -> None:
    code, output = simulate(*CLUSTER, "--trace", TRACE, *SHORT, *arguments)
    assert code != 0
    assert message in " ".join(output.split())


def test_without_a_manifest_the_missing_flags_are_named() -> None:
    code, output = simulate("--model", "qwen2.5-14b", "--trace", TRACE, "--rate", "1")
    assert code == 1
    assert "without a manifest, --gpu, --engines, --ttft-ms, --tpot-ms must be given" in output


def test_a_wrong_row_is_named_with_file_and_line(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("input_tokens,output_tokens\n10,5\n10,many\n")
    code, output = simulate(*CLUSTER, "--trace", str(trace), "--rate", "1", *SHORT)
    assert code == 1
    assert f"{trace}, line 3: output_tokens is 'many'" in " ".join(output.split())


@pytest.mark.parametrize("text", ["4x512", "2x1024,2x256", "2xmax,2x0"])
def test_engines_are_written_as_they_are_read(text: str) -> None:
    assert format_engines(parse_engines(text)) == text


def test_groups_become_engines_of_their_roles() -> None:
    spec = ClusterSpec(
        model="qwen2.5-14b",
        gpu="a100-80g",
        tensor_parallel=1,
        strategy="disaggregated",
        engines=(EngineGroup(count=1, chunk_size_tokens=None), EngineGroup(count=2, chunk_size_tokens=0)),
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        settings=change_settings(
            SimulationSettings(), ["kv_scale=0.5", "link=25gbe", "link_shared=on", "max_num_seqs=7"]
        ),
    )
    engines = build_cluster(spec, seed=1).engines
    assert [(engine.role, engine.chunk_size_tokens) for engine in engines] == [
        (Role.PREFILL_HEAVY, 16_384),
        (Role.DECODE_HEAVY, 0),
        (Role.DECODE_HEAVY, 0),
    ]
    assert {engine.link.name for engine in engines} == {"shared"}
    assert {engine.link.speed.bytes_per_s for engine in engines} == {3e9}
    assert {(engine.max_num_seqs, engine.kv_blocks_total) for engine in engines} == {(7, 227_712 // 32)}


def test_settings_reach_the_cluster() -> None:
    changes = ["no_grant=wait", "ttft_end=decode_join", "budget=prefill", "placement=least_work", "flow=off"]
    changes += ["early_rejection=reject", "approaching_factor=0.9", "watermark=0.8", "min_tokens_between_moves=3"]
    changes += ["routers=3", "report_s=0.05", "router_latency_factor=1.15", "engine_latency_factor=0.9"]
    spec = ClusterSpec(
        model="qwen2.5-14b",
        gpu="a100-80g",
        tensor_parallel=2,
        strategy="taichi",
        engines=parse_engines("2x1024,2x256"),
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        settings=change_settings(SimulationSettings(), changes),
    )
    cluster = build_cluster(spec, seed=1)
    assert (cluster.options.no_grant, cluster.options.ttft_end, cluster.options.counts_decodes) == (
        NoGrant.WAIT,
        TtftEnd.DECODE_JOIN,
        False,
    )
    assert (cluster.strategy.placement, cluster.strategy.has_flow) == ("least_work", False)
    assert cluster.parameters.early_rejection is EarlyRejection.REJECT
    assert (cluster.parameters.approaching_factor, cluster.parameters.watermark) == (0.9, 0.8)
    assert cluster.parameters.min_tokens_between_moves == 3
    assert [router.latency_factor for router in cluster.routers] == [1.15] * 3
    assert [engine.latency_factor for engine in cluster.engines] == [0.9] * 4
    assert cluster.options.report_s == 0.05


def test_memory_of_hosts_reaches_engines_that_reuse_prefixes() -> None:
    changes = ["host_kv_gib=3", "host_bytes_per_s=25e9", "knows_host_kv=on"]
    spec = ClusterSpec(
        model="llama-3-8b",
        gpu="h200-141g",
        tensor_parallel=1,
        strategy="aggregated",
        engines=parse_engines("2x1024"),
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        settings=replace(change_settings(SimulationSettings(), changes), prefix_reuse=True),
    )
    cluster = build_cluster(spec, seed=1)
    num_blocks = 3 * 2**30 // (131_072 * 16)
    assert {(engine.host_kv_blocks, engine.host_bytes_per_s) for engine in cluster.engines} == {(num_blocks, 25e9)}
    assert cluster.options.knows_host_kv
    without = replace(spec, settings=replace(spec.settings, prefix_reuse=False))
    assert {engine.host_kv_blocks for engine in build_cluster(without, seed=1).engines} == {None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("host_kv_gib=-1", "is allowed"),
        ("link_shared=maybe", "on or off is needed"),
        ("max_num_seqs=0", "is allowed"),
        ("routers=1.5", "invalid literal"),
        ("kv_scale=0", "is allowed"),
        ("routers=65", "1 to 64 is allowed"),
        ("report_s=10.1", "0 to 10 is allowed"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        change_settings(SimulationSettings(), [change])
    assert change.partition("=")[0] in str(refused.value)


def test_bursts_cost_goodput() -> None:
    attainment = {}
    for burstiness in (0.1, 1.0):
        code, output = simulate(
            *CLUSTER, "--trace", TRACE, "--rate", "2", *SHORT, "--set", f"burstiness={burstiness}", "--json"
        )
        assert code == 0, output
        attainment[burstiness] = json.loads(output)["attainment"]
    assert attainment[0.1] < attainment[1.0]


def test_every_parameter_of_a_strategy_can_be_set() -> None:
    changes = [f"{name}={value}" for name, value in describe_defaults().items()]
    assert change_settings(SimulationSettings(), changes).parameters == StrategyParameters()


def describe_defaults() -> dict[str, object]:
    values = asdict(StrategyParameters())
    return {name: ("on" if value else "off") if isinstance(value, bool) else value for name, value in values.items()}


def test_a_setting_may_have_either_end_of_its_range() -> None:
    for change, value in {"routers=1": 1, "routers=64": 64, "report_s=0": 0.0, "report_s=10": 10.0}.items():
        assert getattr(change_settings(SimulationSettings(), [change]), change.partition("=")[0]) == value


def test_a_switch_has_six_words_in_any_case() -> None:
    for text, is_on in {"on": True, "True": True, "YES": True, "off": False, "False": False, "no": False}.items():
        assert change_settings(SimulationSettings(), [f"link_shared={text}"]).link_shared is is_on


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\x1f\x8b broken"])
def test_a_file_that_is_no_text_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ("mine.csv.gz" if content and content[0] == 0x1F else "mine.csv")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=f"{path} cannot be read: "):
        read_trace(path)
