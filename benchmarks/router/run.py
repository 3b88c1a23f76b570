"""Compares Sluice's router with vllm-router, SGLang's and nginx, in turn, with one table of ratios.

    .venv/bin/python benchmarks/router/run.py [--seconds S] [--streams N] [--repeats N] [--json PATH] [--peers LIST]

benchmarks/README.md explains the columns, and what makes a trial void.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import c_programs
import contestants
import machine_usage
import peers
import report
import trial
from contestants import Contestant, Nginx, NoRouter, RustRouter, Site, Sluice
from load_generator import TrafficWorkload
from started_programs import ProgramStartError

# How each peer of PyPI is started: its program and first arguments.
RUST_ROUTERS = {"vllm-router": ("vllm-router",), "sglang-router": ("smg", "launch")}
PEERS = (*RUST_ROUTERS, "nginx")
NOTE = """\
How to read it: sluice tokenizes each prompt, detokenizes each token and places each request by its SLO, over one
gRPC stream per engine; the proxies pass bytes. Text work off: {text_off}
"tokens/core" is the inverse of CPU per token, by repeat: median [range]. "added" is from the stub's stamp of a token to
the client's read. "TTFT+" is the way of a request to the stub plus that of its first token back. Both include transport
and client, as do the rows without a router."""
TEXT_OFF_MISSING = "not measured, because the router offers no raw pieces yet (contestants.RAW_PIECES_ARGUMENTS)."
TEXT_OFF_MEASURED = "the row 'sluice, text off'."


def choose_contestants(names: list[str], strategy: str) -> tuple[list[Contestant], list[str]]:
    """Makes the contestants that can run here.

    Args:
        names: Peers, and "sluice".
        strategy: Strategy of Sluice's router.

    Returns:
        The contestants, and the reasons why others are left out.
    """
    chosen: list[Contestant] = []
    skipped = []
    if "sluice" in names:
        chosen.append(Sluice(strategy=strategy))
        if contestants.RAW_PIECES_ARGUMENTS:
            chosen.append(Sluice(strategy=strategy, is_text_off=True))
    for name, (program, *arguments) in RUST_ROUTERS.items():
        try:
            if name in names:
                chosen.append(RustRouter(name, (peers.install(name, program), *arguments)))
        except peers.PeerMissingError as error:
            skipped.append(f"{name} is left out: {error}")
    try:
        if "nginx" in names:
            chosen.append(Nginx(peers.install_nginx()))
    except peers.PeerMissingError as error:
        skipped.append(f"nginx is left out: {error}")
    return chosen, skipped


def choose_stubs(field: list[Contestant], workload: TrafficWorkload) -> list[Contestant]:
    """Makes the rows without a router, one for each kind of stub in use."""
    stubs: list[Contestant] = [NoRouter("http")] if any(item.backend == "http" for item in field) else []
    # The bare engine client keeps a fixed number of streams and cannot recover from faults.
    if any(item.backend == "attach" for item in field) and workload.concurrency and not workload.faults:
        stubs.append(NoRouter("attach"))
    return stubs


class RouterComparison:
    """One run; collects the trials. Mutable.

    Args:
        options: The command line.
        workload: The load.
        site: Ports and folders.
        files: Shared files.
    """

    def __init__(self, options: argparse.Namespace, workload: TrafficWorkload, site: Site, files: trial.Files) -> None:
        self._options = options
        self._workload = workload
        self._site = site
        self._files = files
        self.repeats: report.Repeats = []
        self.voided: list[trial.Measurement] = []
        self.failures: list[str] = []

    def measure_all(self, field: list[Contestant]) -> None:
        """Runs every contestant once per repeat. The order rotates, so that none is always first."""
        for number in range(self._options.repeats):
            self.repeats.append({})
            turn = number % len(field)
            for contestant in [*field[turn:], *field[:turn]]:
                self.measure(contestant, f"repeat {number + 1}/{self._options.repeats}")

    def measure(self, contestant: Contestant, label: str) -> None:
        """Runs one contestant, again while its trial is void, and adds it to the last repeat."""
        for attempt in range(self._options.max_retries + 1):
            try:
                found = trial.run_trial(contestant, self._workload, self._site, self._files)
            except ProgramStartError as error:
                self.failures.append(f"{contestant.name}, {label}: {error}")
                print(f"{label}: {contestant.name}: FAILED: {error}", flush=True)
                return
            print(f"{label}: {contestant.name}: {trial.summarize(found)}", flush=True)
            if not found.void_reasons or attempt == self._options.max_retries:
                break
            self.voided.append(found)
        self.repeats[-1][contestant.name] = found


def make_site(options: argparse.Namespace, folder: Path) -> Site:
    """Chooses ports and folders."""
    return Site(
        port=options.port_base,
        engine_port=options.port_base + 100,
        num_engines=options.engines,
        chunk_tokens=options.chunk_tokens,
        model=options.model,
        folder=folder,
        core=trial.ROUTER_CORE,
    )


def make_workload(options: argparse.Namespace) -> TrafficWorkload:
    """Makes the load of the command line."""
    return TrafficWorkload(
        concurrency=0 if options.rate else options.streams,
        rate=options.rate,
        num_tokens=options.tokens,
        prompt_tokens=options.prompt_tokens,
        slow_percent=options.slow_percent,
        disconnect_percent=options.disconnect_percent,
        warmup_s=options.warmup_seconds,
        seconds=options.seconds,
        num_engines=options.engines,
        chunk_tokens=options.chunk_tokens,
        is_lockstep=options.lockstep,
        faults=tuple(options.fault),
    )


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Options that all programs of this folder share."""
    default_model = c_programs.REPOSITORY / ".sluice" / "volumes" / "models" / "tiny"
    parser.add_argument("--seconds", type=float, default=8.0, help="window of a trial (default %(default)s)")
    parser.add_argument("--warmup-seconds", type=float, default=4.0, help="load before it (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--engines", type=int, default=32, help="emulated engines, 1 to 64 (default %(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="their chunk size (default %(default)s)")
    parser.add_argument(
        "--strategy", choices=sorted(contestants.STRATEGIES), default="aggregated", help="of our router"
    )
    parser.add_argument("--model", type=Path, default=default_model, help="folder of the model (default: the tiny one)")
    parser.add_argument("--max-retries", type=int, default=2, help="new trials for a void one (default %(default)s)")
    parser.add_argument("--port-base", type=int, default=26000, help="first of 200 free ports (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="keep the programs' logs in this folder")


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="streams at any time (default %(default)s)")
    parser.add_argument("--rate", type=float, default=0.0, help="open loop instead: requests per second, Poisson")
    parser.add_argument("--repeats", type=int, default=3, help="trials of each router (default %(default)s)")
    parser.add_argument("--json", type=Path, default=c_programs.BUILD / "router.json", help="result file")
    parser.add_argument(
        "--peers",
        default=",".join(("sluice", *PEERS)),
        help="routers to run, with commas (default %(default)s); the first peer is the reference",
    )
    parser.add_argument("--slow-percent", type=float, default=0.0, help="clients that stall")
    parser.add_argument("--disconnect-percent", type=float, default=0.0, help="answers cut by the client")
    parser.add_argument("--lockstep", action="store_true", help="all engines step at once")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        help="KIND:ENGINE:AT_S[:FOR_S] of the engines behind sluice (engine_stub.py)",
    )
    add_common_options(parser)
    options = parser.parse_args()
    unknown = set(options.peers.split(",")) - {"sluice", *PEERS}
    if unknown or options.repeats < 1:
        parser.error(f"unknown peers {sorted(unknown)}" if unknown else "--repeats is at least 1")
    return options


def print_result(
    run: RouterComparison, everyone: list[Contestant], workload: TrafficWorkload, facts: dict[str, Any]
) -> None:
    """Prints the table and what is needed to read it."""
    names = [contestant.name for contestant in everyone if any(contestant.name in repeat for repeat in run.repeats)]
    text_off = TEXT_OFF_MEASURED if contestants.RAW_PIECES_ARGUMENTS else TEXT_OFF_MISSING
    print(f"\n{workload.describe()}; {len(run.repeats)} repeats\n")
    print(report.format_comparison(run.repeats, names, facts["reference"]))
    print("\n" + NOTE.format(text_off=text_off))
    print(report.format_calibration(**facts["calibration"]))
    print("versions: " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    print("machine: " + ", ".join(f"{key} {value}" for key, value in facts["machine"].items()))
    for line in (*facts["skipped"], *run.failures):
        print(line)


def make_result(run: RouterComparison, everyone: list[Contestant], facts: dict[str, Any]) -> dict[str, Any]:
    """Makes the result file."""
    ratios = {
        item.name: report.find_ratios(run.repeats, item.name, facts["reference"]).as_json()
        for item in everyone
        if item.is_router
    }
    return {
        "benchmark": "router",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        **facts,
        "tokens_per_core_ratio": ratios,
        "repeats": [{name: found.as_json() for name, found in repeat.items()} for repeat in run.repeats],
        "voided": [found.as_json() for found in run.voided],
        "failures": run.failures,
    }


def main() -> int:
    """Runs the command line."""
    options = parse_options()
    workload = make_workload(options)
    field, skipped = choose_contestants(options.peers.split(","), options.strategy)
    if not field:
        sys.exit("\n".join(skipped))
    load = c_programs.build("load")
    versions = {contestant.name: contestant.version() for contestant in field}
    reference = next((item.name for item in field if item.name in PEERS), "sluice")
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        trial.make_files(options.model, options.tokens) as files,
    ):
        run = RouterComparison(options, workload, make_site(options, (options.logs or Path(folder)).resolve()), files)
        before = machine_usage.calibrate(load, trial.ROUTER_CORE)
        everyone = [*choose_stubs(field, workload), *field]
        run.measure_all(everyone)
        after = machine_usage.calibrate(load, trial.ROUTER_CORE)
    facts: dict[str, Any] = {
        "machine": machine_usage.describe(),
        "versions": versions,
        "calibration": {"before": before, "after": after},
        "skipped": skipped,
        "reference": reference,
        "workload": workload.as_json(),
    }
    print_result(run, everyone, workload, facts)
    report.write_json(options.json, make_result(run, everyone, facts))
    print(f"written to {options.json}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
