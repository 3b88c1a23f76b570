"""What a recommendation costs: CPU time of the operator's search and of ``sluice plan``, four engines, one core.

    make build/compiled/stamp
    PYTHONPATH=build/compiled .venv/bin/python benchmarks/planning/run.py [--only search|plan] [--repeats N]

Each is a process of its own, as in production, and its CPU time is all that it takes, its start included; how much of
it the start is stands in the first line. Short chats have prompts of 40 tokens and answers of 200, of which four
engines serve about 100 in a second; the other workloads are traces. The operator may choose every slider. Its sample
is of 2000 requests at most, as the routers'.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sluice_core.sim.traces import TraceRow, parse_trace
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts
from sluice_operator.autotune.search_constraints import make_constraints
from sluice_operator.autotune.search_messages import SearchRequest
from sluice_operator.autotune.search_process import COMMAND
from sluice_operator.autotune.workload import WorkloadSample

MODEL, GPU, REPLICAS = "qwen2.5-14b", "a100-80g", 4
TARGET_S = 10.0  # of one core, for four engines
TRACES = Path(__file__).parents[1] / "traces"
_NUM_SAMPLED = 2000
_CHATS = [TraceRow(prompt_tokens=40, output_tokens=200)] * 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningCase:
    """A workload and its objectives.

    Args:
        name: Its name.
        trace: File in ``benchmarks/traces``; None: short chats.
        ttft_ms: Objective.
        tpot_ms: Objective.
        rate_rps: Measured rate, at which the operator predicts an attainment.
    """

    name: str
    trace: str | None
    ttft_ms: int
    tpot_ms: int
    rate_rps: float


CASES = [
    PlanningCase(name=name, trace=trace, ttft_ms=ttft_ms, tpot_ms=tpot_ms, rate_rps=rate_rps)
    for name, trace, rate_rps, objectives in (
        ("short chats", None, 90.0, ((1000, 200), (2000, 50), (4000, 200))),
        ("chat", "sharegpt_dist.csv.gz", 18.0, ((3000, 110), (1500, 60))),
        ("arxiv", "arxiv_16k_recon.csv.gz", 1.8, ((4000, 70), (6000, 100))),
        ("mooncake", "mooncake_conversation.csv.gz", 0.6, ((20_000, 100), (30_000, 100))),
    )
    for ttft_ms, tpot_ms in objectives
]


def load_rows(case: PlanningCase) -> list[TraceRow]:
    """Read a sample of the trace."""
    if case.trace is None:
        return _CHATS
    with gzip.open(TRACES / case.trace, "rt") as file:
        rows = parse_trace(file)
    return random.Random(4).sample(rows, min(len(rows), _NUM_SAMPLED))


def make_search_request(case: PlanningCase, rows: list[TraceRow]) -> SearchRequest:
    """Make what the operator asks, with all sliders free."""
    spec = check_manifest(
        {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "ServingCluster",
            "metadata": {"name": "benchmark"},
            "spec": {
                "replicas": REPLICAS,
                "strategy": "TaiChi",
                "prefillHeavy": REPLICAS // 2,
                "chunkSizes": {"prefillHeavy": 2048, "decodeHeavy": 512},
                "slo": {"ttftMilliseconds": case.ttft_ms, "tpotMilliseconds": case.tpot_ms},
                "model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
                "autotune": {"mode": "Recommend"},
            },
        }
    ).spec
    sliders = resolve_sliders(spec)
    return SearchRequest(
        constraints=make_constraints(spec),
        spec_sliders=sliders,
        in_force=sliders,
        workload=WorkloadSample(
            rows=tuple((row.prompt_tokens, row.output_tokens, "") for row in rows), rate_rps=case.rate_rps
        ),
        engine=EmulatedEngineFacts(gpu=GPU, model=MODEL),
    )


def measure(command: list[str], text: str = "") -> tuple[float, str]:
    """Run a process; returns its CPU seconds and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def search(case: PlanningCase, rows: list[TraceRow]) -> tuple[float, float]:
    """Ask the operator's search; returns CPU seconds and the goodput that it promises."""
    cpu_s, output = measure(list(COMMAND), make_search_request(case, rows).to_json())
    return cpu_s, json.loads(output)["goodput_rps"]


def plan(case: PlanningCase, rows: list[TraceRow]) -> tuple[float, float]:
    """Ask ``sluice plan``; returns CPU seconds and the goodput that it promises."""
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("input_tokens,output_tokens\n")
        file.writelines(f"{row.prompt_tokens},{row.output_tokens}\n" for row in rows)
        file.flush()
        command = [sys.executable, "-m", "sluice_cli", "plan", "--model", MODEL, "--gpu", GPU, "--jobs", "1", "--json"]
        command += ["--replicas", str(REPLICAS), "--trace", file.name]
        command += ["--ttft-ms", str(case.ttft_ms), "--tpot-ms", str(case.tpot_ms)]
        cpu_s, output = measure(command)
    return cpu_s, json.loads(output)["predicted"]["goodput_rps"]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["search", "plan"], help="leave the other out")
    parser.add_argument("--repeats", type=int, default=1, help="of each; the quickest counts")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/planning.json"))
    arguments = parser.parse_args()
    start_s = min(measure([sys.executable, "-c", "import sluice_operator.autotune.search"])[0] for _ in range(3))
    print(f"{platform.machine()}, Python {platform.python_version()}; the operator's search starts in {start_s:.2f} s")
    print(f"{'workload':12} {'TTFT, TPOT':>16}  {'search':>8} {'goodput':>8}  {'plan':>8} {'goodput':>8}")
    results = []
    for case in CASES:
        rows = load_rows(case)
        asked = {"search": search, "plan": plan}
        found = {
            name: min(ask(case, rows) for _ in range(arguments.repeats))
            for name, ask in asked.items()
            if arguments.only in {None, name}
        }
        objectives = f"{case.ttft_ms}, {case.tpot_ms} ms"
        columns = [
            f"{found[name][0]:6.2f} s {found[name][1]:8.3f}" if name in found else f"{'-':>17}" for name in asked
        ]
        late = f"more than {TARGET_S:.0f} s" if max(found.values())[0] > TARGET_S else ""
        print(f"{case.name:12} {objectives:>16}  {'  '.join(columns)}  {late}", flush=True)
        results.append({"case": case.name, "objectives": objectives, **found})
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"start_s": start_s, "results": results}, indent=1))


if __name__ == "__main__":
    main()
