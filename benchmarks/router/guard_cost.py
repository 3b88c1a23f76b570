"""CPU that TLS and API keys of clients cost our router, per token, per request and per connection, each in turn.

    PYTHONPATH=build/compiled .venv/bin/python benchmarks/router/guard_cost.py [--turns N] [--streams N] [--json PATH]
    PYTHONPATH=build/compiled .venv/bin/python benchmarks/router/guard_cost.py --units connection [--key-type rsa]

In a turn the same router runs in the open, with TLS, with keys, and with both. Each is measured under long streams and
under one-token streams, on connections that stay open. Figures are CPU above that of an idle router. A ratio compares
two trials of one turn. A new connection costs what a one-token stream on one of its own costs above one on an open
connection: in the open, and with TLS with and without the session of an earlier connection.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import c_programs
import contestants
import machine_usage
import report
import trial
from contestants import Sluice
from load_generator import TrafficWorkload
from run import add_common_options, make_site
from secrets_of_clients import KEY, KEY_TYPES, write_secrets

OPEN, TLS, KEYS, BOTH = "in the open", "TLS", "API keys", "TLS and API keys"
TOKEN, REQUEST, CONNECTION, RESUMED = "token", "request", "new connection", "new connection, session resumed"
GUARDS = {"tls": TLS, "keys": KEYS, "both": BOTH}
UNITS = {"token": (TOKEN,), "request": (REQUEST,), "connection": (REQUEST, CONNECTION, RESUMED)}

# Microseconds by unit and guards.
Costs = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trial of a turn.

    Args:
        guards: What guards the router.
        unit: What a figure is per.
        router: The router.
        workload: The load.
    """

    guards: str
    unit: str
    router: Sluice
    workload: TrafficWorkload


def make_routers(options: argparse.Namespace, folder: Path) -> dict[str, Sluice]:
    """Makes the router with each choice of guards; their certificate and keys are in a folder."""
    tls, keys = write_secrets(folder, options.key_type)
    with_tls, with_keys = ("--front-tls", str(tls)), ("--api-keys", str(keys))
    sends_tls, sends_key = ("--tls",), ("--api-key", KEY)
    router = Sluice(strategy=options.strategy)
    return {
        OPEN: router,
        TLS: replace(router, guards=with_tls, load_arguments=sends_tls),
        KEYS: replace(router, guards=with_keys, load_arguments=sends_key),
        BOTH: replace(router, guards=with_tls + with_keys, load_arguments=sends_tls + sends_key),
    }


def make_cases(options: argparse.Namespace, routers: dict[str, Sluice]) -> list[Case]:
    """Makes the trials of a turn."""
    requests = TrafficWorkload(
        rate=options.request_rate,
        num_tokens=1,
        prompt_tokens=options.prompt_tokens,
        num_engines=options.engines,
        chunk_tokens=options.chunk_tokens,
        warmup_s=options.warmup_seconds,
        seconds=options.seconds,
    )
    streams = replace(requests, rate=0.0, concurrency=options.streams, num_tokens=options.tokens)
    connections = replace(requests, rate=options.connection_rate)
    renewed, resumed = ("--new-connections",), ("--new-connections", "--resume-sessions")
    choices: list[tuple[str, str, TrafficWorkload, tuple[str, ...]]] = [
        *((TOKEN, guards, streams, ()) for guards in routers),
        *((REQUEST, guards, requests, ()) for guards in routers),
        (CONNECTION, OPEN, connections, renewed),
        (CONNECTION, TLS, connections, renewed),
        (RESUMED, TLS, connections, resumed),
    ]
    units = {unit for name in options.units for unit in UNITS[name]}
    chosen = {OPEN, *(GUARDS[name] for name in options.guards)}
    return [
        Case(
            guards=guards,
            unit=unit,
            router=replace(routers[guards], load_arguments=routers[guards].load_arguments + extra),
            workload=workload,
        )
        for unit, guards, workload, extra in choices
        if unit in units and guards in chosen
    ]


def find_cost_us(case: Case, found: trial.Measurement, idle_cores: float) -> float:
    """CPU above that of an idle router per unit, in microseconds.

    Raises:
        RuntimeError: A request failed, or sessions were resumed otherwise than they should have been.
    """
    opened, resumed = (int(found.load.raw[name]) for name in ("opened", "resumed"))
    if found.load.num_errors or not found.load.requests_finished:
        raise RuntimeError(f"{case.guards}, {case.unit}: {found.load.first_error or 'no answer'}")
    # The first connections have no session yet.
    if (resumed > opened / 2) != (case.unit == RESUMED):
        raise RuntimeError(f"{case.guards}, {case.unit}: {resumed} of {opened} connections resumed a session")
    per_s = found.tokens_per_s if case.unit == TOKEN else found.requests_per_s
    return (found.usage.router_cores - idle_cores) * 1e6 / per_s


def measure_turn(cases: list[Case], site: contestants.Site, files: trial.Files, label: str) -> Costs:
    """Runs every case once."""
    costs: Costs = {}
    idle = trial.run_idle(cases[0].router, cases[0].workload, site, files)
    for case in cases:
        found = trial.run_trial(case.router, case.workload, site, files)
        cost_us = find_cost_us(case, found, idle.usage.router_cores)
        costs.setdefault(case.unit, {})[case.guards] = cost_us
        what = f"a {case.unit} and its request" if case.unit in {CONNECTION, RESUMED} else case.unit
        print(f"{label}: {case.guards}: {cost_us:.1f} us per {what}; {trial.summarize(found)}", flush=True)
    return subtract_requests(costs)


def subtract_requests(costs: Costs) -> Costs:
    """Of a request on a new connection, leaves what the connection costs."""
    return {
        unit: {
            guards: cost_us - (costs[REQUEST][guards] if unit in {CONNECTION, RESUMED} else 0.0)
            for guards, cost_us in found.items()
        }
        for unit, found in costs.items()
    }


def format_table(turns: list[Costs]) -> str:
    """Makes the table: medians, ranges, and ratios to the open router by turn."""
    rows = []
    for unit, guards in _list_figures(turns[0]):
        costs = report.Spread.of([turn[unit][guards] for turn in turns])
        opens = [turn[CONNECTION if unit == RESUMED else unit][OPEN] for turn in turns]
        ratios = report.Spread.of([turn[unit][guards] / open_us for turn, open_us in zip(turns, opens, strict=True)])
        rows.append([unit, guards, costs.format(1), "-" if guards == OPEN else ratios.format()])
    return report.format_table(("unit", "guards", "CPU us per unit", "ratio by turn"), rows)


def _list_figures(costs: Costs) -> list[tuple[str, str]]:
    return [(unit, guards) for unit in (TOKEN, REQUEST, CONNECTION, RESUMED) for guards in costs.get(unit, {})]


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", choices=UNITS, nargs="+", default=["token", "request"], help="what to measure")
    parser.add_argument("--guards", choices=GUARDS, nargs="+", default=list(GUARDS), help="beside none")
    parser.add_argument("--turns", type=int, default=3, help="trials of each case (default %(default)s)")
    parser.add_argument("--streams", type=int, default=1000, help="long streams (default %(default)s)")
    parser.add_argument("--request-rate", type=float, default=400.0, help="one-token streams per second")
    parser.add_argument("--connection-rate", type=float, default=100.0, help="new connections per second")
    parser.add_argument(
        "--key-type", choices=KEY_TYPES, default="ecdsa", help="of the certificate: P-256, or 2,048 bits"
    )
    parser.add_argument("--json", type=Path, help="result file")
    add_common_options(parser)
    return parser.parse_args()


def main() -> None:
    """Runs the command line."""
    options = parse_options()
    c_programs.build("load")
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        trial.make_files(options.model, options.tokens) as files,
    ):
        cases = make_cases(options, make_routers(options, Path(folder)))
        site = make_site(options, (options.logs or Path(folder)).resolve())
        turns = [
            # So that none is always first.
            measure_turn(cases[:: 1 if number % 2 == 0 else -1], site, files, f"turn {number + 1}/{options.turns}")
            for number in range(options.turns)
        ]
    print(f"\nsluice {cases[0].router.version()}, {options.turns} turns\n\n{format_table(turns)}")
    print("machine: " + ", ".join(f"{key} {value}" for key, value in machine_usage.describe().items()))
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "turns": turns}))


if __name__ == "__main__":
    main()
