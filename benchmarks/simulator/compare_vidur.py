"""Sluice's simulator beside Vidur's (the package ``vidur``) on the same work: CPU time of one core.

    PYTHONPATH=build/compiled:. .venv/bin/python benchmarks/simulator/compare_vidur.py [--environment DIR]

The work: the aggregated cells of ``run.py``, chunked prefill on four engines by round robin, which both simulators
have; the same requests at the same moments, the same KV blocks, the same time for an iteration. Both run in turn,
three times each, and the best counts. TTFT and the end show that it was the same work; small differences come from
what a first token is and from how partial chunks are ordered.

Vidur needs libraries of other versions, so it has an environment of its own, which is made when it is missing: about
1 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.simulator.run import SLOS, TRACES, list_cases, load_rows, make_cell

from sluice_core.sim.sim_setup import GC_THRESHOLD
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.workload import DrawnWorkload

if TYPE_CHECKING:
    from benchmarks.simulator.run import SimulatorCase

    from sluice_core.sim.sim_setup import Arrival

VIDUR = "vidur==0.0.26"
REPEATS = 3
_COEFFICIENTS = (
    "linear_s",
    "prefill_base_s",
    "prefill_token_s",
    "prefill_work_s",
    "decode_base_s",
    "decode_request_s",
    "decode_context_s",
    "host_sequence_s",
)


def make_environment(folder: Path) -> Path:
    """Make Vidur's environment if it is missing; returns its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", VIDUR], check=True)
    return python


def describe(case: SimulatorCase, arrivals: list[Arrival]) -> dict[str, Any]:
    """Describe the work as plain numbers."""
    engine = make_cell(case).engines[0]
    return {
        "num_engines": len(make_cell(case).engines),
        "chunk_size_tokens": engine.chunk_size_tokens,
        "kv_blocks": engine.kv_blocks_total,
        "max_num_seqs": engine.max_num_seqs,
        "profile": {name: getattr(engine.profile, name) for name in _COEFFICIENTS},
        "arrivals": [(arrival.at_s, arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals],
    }


def run_sluice(case: SimulatorCase, arrivals: list[Arrival]) -> dict[str, float]:
    """Simulate once in this process."""
    gc.collect()
    began = time.process_time()
    simulation = Simulation(make_cell(case), arrivals)
    simulation.run()
    cpu_s = time.process_time() - began
    ttfts = sorted(request.ttft_s for request in simulation.requests)
    return {
        "cpu_s": cpu_s,
        "iterations": sum(engine.counters.num_iterations for engine in simulation.engines),
        "ends_at_s": simulation.now,
        "ttft_mean_s": sum(ttfts) / len(ttfts),
        "ttft_p90_s": ttfts[int(0.9 * len(ttfts))],
    }


def run_vidur(python: Path, workload: dict[str, Any]) -> dict[str, float]:
    """Simulate once in Vidur's environment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.json"
        path.write_text(json.dumps(workload))
        command = [python, Path(__file__).with_name("vidur_side.py"), path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"vidur failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, default=Path(".sluice/vidur"), help="where Vidur is installed")
    options = parser.parse_args()
    python = make_environment(options.environment)
    gc.set_threshold(GC_THRESHOLD)
    print(f"{'cell':18}{'':8}{'CPU s':>9}{'requests/s':>12}{'iterations':>12}{'end s':>9}{'TTFT mean, p90 s':>20}")
    for lengths in TRACES:
        name = f"{lengths} aggregated"
        case = list_cases()[name]
        rows = load_rows(lengths)
        arrivals = DrawnWorkload(rows, SLOS[lengths], 1).make_arrivals(case.rate_rps, case.duration_s)
        workload = describe(case, arrivals)
        runs = [(run_sluice(case, arrivals), run_vidur(python, workload)) for _ in range(REPEATS)]
        best = [min((pair[side] for pair in runs), key=lambda run: run["cpu_s"]) for side in (0, 1)]
        for side, found in zip(("sluice", "vidur"), best, strict=True):
            print(
                f"{name:18}{side:8}{found['cpu_s']:9.3f}{len(arrivals) / found['cpu_s']:12.0f}"
                f"{found['iterations']:12.0f}"
                f"{found['ends_at_s']:9.1f}{found['ttft_mean_s']:12.3f}{found['ttft_p90_s']:8.3f}"
            )
        print(f"{name:18}{best[1]['cpu_s'] / best[0]['cpu_s']:.0f} times as fast")


if __name__ == "__main__":
    main()
