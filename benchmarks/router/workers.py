"""Compares one router process with several on the same ports (`spec.router.workers`), in turn, on all cores.

    PYTHONPATH=build/compiled .venv/bin/python benchmarks/router/workers.py [--workers N] [--repeats N] [--tokens N]

Generator and stub engines take a part of the cores too, so on few cores the ratio stays below the number of workers.
CPU per request says what sharing itself costs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import c_programs
import report
import trial
from contestants import Sluice
from run import add_common_options, make_site, make_workload


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes to compare with one (default %(default)s)")
    parser.add_argument("--streams", type=int, default=1000, help="requests at any time (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of trials (default %(default)s)")
    add_common_options(parser)
    parser.set_defaults(
        tokens=1, rate=0.0, slow_percent=0.0, disconnect_percent=0.0, lockstep=False, fault=[], max_retries=0
    )
    return parser.parse_args()


def main() -> None:
    """Runs the pairs, and prints each one's figures and the ratios."""
    options = parse_options()
    workload = make_workload(options)
    throughputs, costs = [], []
    c_programs.build("load")
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        trial.make_files(options.model, options.tokens) as files,
    ):
        every_core = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        site = replace(make_site(options, (options.logs or Path(folder)).resolve()), core=every_core)
        for number in range(options.repeats):
            one, several = (
                trial.run_trial(Sluice(strategy=options.strategy, workers=workers), workload, site, files)
                for workers in (1, options.workers)
            )
            throughputs.append(several.requests_per_s / one.requests_per_s)
            costs.append(several.cpu_us_per_request / one.cpu_us_per_request)
            print(f"pair {number + 1}: one: {describe(one)}; {options.workers}: {describe(several)}", flush=True)
    print(f"requests/s, {options.workers} processes over one: {report.Spread.of(throughputs).format()}")
    print(f"CPU per request, {options.workers} processes over one: {report.Spread.of(costs).format()}")


def describe(found: trial.Measurement) -> str:
    """One trial, for a line."""
    return (
        f"{found.requests_per_s:,.0f} requests/s, {found.tokens_per_s:,.0f} tokens/s, "
        f"{found.usage.router_cores:.2f} cores, {found.cpu_us_per_request:.0f} us of CPU per request"
    )


if __name__ == "__main__":
    main()
