"""The operator at scale: many ServingClusters and pods on a real control plane with kwok's nodes and emulated routers.

    .venv/bin/python benchmarks/operator/run.py [--clusters 500] [--pods 10000] [--json OUT]

Needs root (for the pods' addresses) and the binaries of ``make e2e-k8s``. Phases: ``create`` (all clusters at once,
until the operator reports each as settled), ``idle`` (resyncs only), ``edits`` (a slider of one cluster after the
other), ``burst`` (a slider of all clusters at once).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "e2e" / "kube")]

from benchmarks.operator.kwok_cluster import (  # noqa: E402
    CLUSTERS,
    MERGE,
    OPERATOR_PORT,
    PlanWatch,
    make_manifest,
    run_operator,
    run_routers,
    run_stage,
    send_all,
)
from benchmarks.operator.scrape import Scrape, scrape  # noqa: E402 - the checkout's

if TYPE_CHECKING:
    import psutil
    from testbed.cluster import Testbed

NUM_ROUTERS = 2
MAX_EDITS = 60
PAUSE_S = 0.2
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTrial:
    """One run.

    Args:
        testbed: The control plane.
        operator: The operator's process.
        plans: Times at which plans were stored.
        names: Names of the clusters.
        num_engines: Engines of each cluster.
    """

    testbed: Testbed
    operator: psutil.Process
    plans: PlanWatch
    names: list[str]
    num_engines: int

    def measure(self, before: Scrape, started_s: float, cpu_s: float) -> dict[str, Any]:
        """Measures what the operator did since."""
        took_s, did = time.monotonic() - started_s, scrape(OPERATOR_PORT) - before
        quantiles = {name: did.reconcile_quantile_s(share) for name, share in (("p50", 0.5), ("p99", 0.99))}
        return {
            "seconds": round(took_s, 2),
            "reconciles": int(did.num_reconciles),
            "reconcile_ms": {
                name: None if value is None else round(1000 * value, 1) for name, value in quantiles.items()
            },
            "calls_per_reconcile": round(did.num_calls / did.num_reconciles, 2) if did.num_reconciles else None,
            "writes_per_minute": round(60 * did.num_writes / took_s, 2),
            "reads_per_minute": round(60 * (did.num_calls - did.num_writes) / took_s, 1),
            "operator_cores": round((get_cpu_s(self.operator) - cpu_s) / took_s, 3),
            "operator_rss_mib": round(self.operator.memory_info().rss / MEBIBYTE, 1),
            "failed_calls": {" ".join(key): int(count) for key, count in did.calls.items() if int(key[2]) // 100 != 2},
        }

    def create(self) -> dict[str, Any]:
        """Creates all clusters, and waits until they have settled."""
        before, started_s, cpu_s = scrape(OPERATOR_PORT), time.monotonic(), get_cpu_s(self.operator)
        manifests = [make_manifest(name, self.num_engines, NUM_ROUTERS) for name in self.names]
        send_all(self.testbed, [("POST", CLUSTERS, manifest) for manifest in manifests])
        deadline = time.monotonic() + 60 + 4 * len(self.names)
        while True:
            asked_s = time.monotonic()
            if (num_settled := self.count_settled()) == len(self.names):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{num_settled} of {len(self.names)} clusters settled; see the operator's log")
            # Listing hundreds of clusters takes a busy API server seconds. The benchmark itself must not keep it busy.
            time.sleep(max(1.0, 10 * (time.monotonic() - asked_s)))
        return self.measure(before, started_s, cpu_s)

    def count_settled(self) -> int:
        """Counts the clusters that the operator reports as settled."""
        items = self.testbed.client.request("GET", CLUSTERS).content["items"]
        return sum(
            any(
                condition["type"] == "Progressing" and condition["reason"] == "Settled"
                for condition in item.get("status", {}).get("conditions", [])
            )
            for item in items
        )

    def rest(self, duration_s: float) -> dict[str, Any]:
        """Does nothing."""
        # Time for work that creation left, such as the operator's first measurements.
        time.sleep(20.0)
        before, started_s, cpu_s = scrape(OPERATOR_PORT), time.monotonic(), get_cpu_s(self.operator)
        time.sleep(duration_s)
        return self.measure(before, started_s, cpu_s)

    def edit(self, name: str, number: int) -> tuple[str, str, dict[str, Any]]:
        """Makes an edit of a slider, as a request."""
        return "PATCH", f"{CLUSTERS}/{name}", {"spec": {"chunkSizes": {"prefillHeavy": 600 + number}}}

    def edit_in_turn(self, rng: random.Random) -> dict[str, Any]:
        """Edits one cluster after the other."""
        before, started_s, cpu_s = scrape(OPERATOR_PORT), time.monotonic(), get_cpu_s(self.operator)
        times_s = []
        for number, name in enumerate(rng.sample(self.names, min(MAX_EDITS, len(self.names)))):
            wanted = self.plans.newest[name] + 1
            _, path, content = self.edit(name, number)
            sent_s = time.monotonic()
            assert self.testbed.client.request("PATCH", path, content, MERGE).is_ok
            times_s.append(self.plans.wait_for(name, wanted) - sent_s)
            time.sleep(PAUSE_S)
        return {**self.measure(before, started_s, cpu_s), "edit_to_plan_ms": summarize_ms(times_s)}

    def edit_at_once(self) -> dict[str, Any]:
        """Edits all clusters at once; each time counts from the first edit."""
        before, started_s, cpu_s = scrape(OPERATOR_PORT), time.monotonic(), get_cpu_s(self.operator)
        wanted = {name: self.plans.newest[name] + 1 for name in self.names}
        send_all(self.testbed, [self.edit(name, 100) for name in self.names])
        times_s = [self.plans.wait_for(name, number) - started_s for name, number in wanted.items()]
        return {**self.measure(before, started_s, cpu_s), "edit_to_plan_ms": summarize_ms(times_s)}


def get_cpu_s(process: psutil.Process) -> float:
    """Reads the CPU time of a process, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


def summarize_ms(times_s: list[float]) -> dict[str, float]:
    """Computes median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(1000 * time_s for time_s in times_s)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 1), "p99": round(p99, 1), "max": round(ordered[-1], 1)}


def print_table(phases: dict[str, dict[str, Any]]) -> None:
    """Prints the measurements."""
    columns = (
        "reconciles",
        "reconcile p50",
        "reconcile p99",
        "calls/reconcile",
        "writes/min",
        "reads/min",
        "cores",
        "RSS MiB",
        "edit p50",
    )
    print(f"{'phase':>8} {'s':>7} " + " ".join(f"{column:>15}" for column in (*columns, "edit p99")))
    for name, row in phases.items():
        edits = row.get("edit_to_plan_ms", {})
        cells = (
            row["reconciles"],
            row["reconcile_ms"]["p50"],
            row["reconcile_ms"]["p99"],
            row["calls_per_reconcile"],
            row["writes_per_minute"],
            row["reads_per_minute"],
            row["operator_cores"],
            row["operator_rss_mib"],
            edits.get("p50", ""),
            edits.get("p99", ""),
        )
        print(
            f"{name:>8} {row['seconds']:>7.1f} " + " ".join(f"{cell if cell is not None else '':>15}" for cell in cells)
        )
    print("reconcile, edit (from the edit to the plan in its ConfigMap): ms")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=500)
    parser.add_argument("--pods", type=int, default=10_000, help="engines and routers of all clusters")
    parser.add_argument("--resync-s", type=float, default=420.0, help="the operator's resync interval")
    parser.add_argument("--idle-s", type=float, help="length of the idle phase (default: a resync of every cluster)")
    parser.add_argument(
        "--profile", type=Path, help="run the operator under cProfile (which slows it), and write its profile here"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "benchmarks" / "operator.json")
    arguments = parser.parse_args()
    num_engines = arguments.pods // arguments.clusters - NUM_ROUTERS
    if num_engines < 2:
        parser.error(f"--pods must be at least {NUM_ROUTERS + 2} per cluster")
    if os.geteuid() != 0:
        print("skipped: the benchmark needs root, for the pods' addresses")
        return
    names = [f"c{number:04}" for number in range(arguments.clusters)]
    with (
        run_stage(arguments.pods) as testbed,
        run_routers(),
        run_operator(testbed, arguments.resync_s, arguments.profile) as operator,
    ):
        trial = OperatorTrial(
            testbed=testbed, operator=operator, plans=PlanWatch(testbed), names=names, num_engines=num_engines
        )
        phases = {"create": trial.create()}
        phases["idle"] = trial.rest(arguments.resync_s if arguments.idle_s is None else arguments.idle_s)
        phases["edits"] = trial.edit_in_turn(random.Random(1))
        phases["burst"] = trial.edit_at_once()
    print(f"{arguments.clusters} clusters of {num_engines} engines and {NUM_ROUTERS} routers")
    print_table(phases)
    result = {
        "benchmark": "operator",
        "python": sys.version.split()[0],
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "clusters": arguments.clusters,
        "engines_per_cluster": num_engines,
        "routers_per_cluster": NUM_ROUTERS,
        "resync_s": arguments.resync_s,
        "phases": phases,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
