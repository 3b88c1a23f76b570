"""CPU that TLS and API keys of clients cost our router, per token, per request and per connection, each in turn.

    PYTHONPATH=build/compiled .venv/bin/python benchmarks/router/guard_cost.py [--turns N] [--streams N] [--json PATH]
    PYTHONPATH=build/compiled .venv/bin/python benchmarks/router/guard_cost.py --connections      # new ones, too

In a turn the same router runs in the open, with TLS, with keys, and with both. Each is measured under long streams and
under one-token streams, on connections that stay open. Figures are CPU above that of an idle router. A ratio compares
two trials of one turn. ``--connections`` adds one-token streams on a connection each: in the open, and with TLS with
and without the session of an earlier connection.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import c_programs
import machine_usage
import report
import trial
import trustme
from contestants import Sluice
from load_generator import TrafficWorkload
from run import add_common_options, make_site

OPEN, TLS, KEYS, BOTH = "in the open", "TLS", "API keys", "TLS and API keys"
NUM_OWNERS = 100
KEYS_OF_OWNER = 10
TOKEN, REQUEST, CONNECTION, RESUMED = "token", "request", "new connection", "new connection, session resumed"
NEW_CONNECTIONS = ("--new-connections",)
KEY_TYPES = {"ecdsa": trustme.KeyType.ECDSA, "rsa": trustme.KeyType.RSA}


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
    certificate = trustme.CA().issue_cert("127.0.0.1", key_type=KEY_TYPES[options.key_type])
    tls, keys = folder / "front", folder / "keys"
    for path in (tls, keys):
        path.mkdir()
    certificate.private_key_pem.write_to_path(tls / "tls.key")
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(tls / "tls.crt", append=True)
    for number in range(NUM_OWNERS):
        owned = [secrets.token_urlsafe(32) for _ in range(KEYS_OF_OWNER)]
        (keys / f"owner-{number}").write_text("\n".join(owned))
    with_tls, with_keys = ("--front-tls", str(tls)), ("--api-keys", str(keys))
    sends_tls, sends_key = ("--tls",), ("--api-key", owned[-1])
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
    cases = [
        Case(guards=guards, unit=unit, router=router, workload=workload)
        for unit, workload in ((TOKEN, streams), (REQUEST, requests))
        for guards, router in routers.items()
    ]
    if options.connections:
        connections = replace(requests, rate=options.connection_rate)
        for guards, unit, extra in (
            (OPEN, CONNECTION, NEW_CONNECTIONS),
            (TLS, CONNECTION, NEW_CONNECTIONS),
            (TLS, RESUMED, (*NEW_CONNECTIONS, "--resume-sessions")),
        ):
            router = replace(routers[guards], load_arguments=routers[guards].load_arguments + extra)
            cases.append(Case(guards=guards, unit=unit, router=router, workload=connections))
    return cases


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


def measure_turn(cases: list[Case], site: trial.Site, files: trial.Files, label: str) -> dict[str, dict[str, float]]:
    """Runs every case once; returns microseconds by unit and guards."""
    costs_us: dict[str, dict[str, float]] = {}
    idle = trial.run_idle(cases[0].router, cases[0].workload, site, files)
    for case in cases:
        found = trial.run_trial(case.router, case.workload, site, files)
        cost_us = find_cost_us(case, found, idle.usage.router_cores)
        costs_us.setdefault(case.unit, {})[case.guards] = cost_us
        print(f"{label}: {case.guards}: {cost_us:.1f} us per {case.unit}; {trial.summarize(found)}", flush=True)
    # Of a request on a new connection, only the connection is new.
    for unit in (CONNECTION, RESUMED):
        costs_us[unit] = {
            guards: cost_us - costs_us[REQUEST][guards] for guards, cost_us in costs_us.get(unit, {}).items()
        }
    return {unit: costs for unit, costs in costs_us.items() if costs}


def format_table(turns: list[dict[str, dict[str, float]]]) -> str:
    """Makes the table: medians, ranges, and ratios to the open router by turn."""
    rows = []
    for unit, guards in ((unit, guards) for unit, costs in turns[0].items() for guards in costs):
        costs = report.Spread.of([turn[unit][guards] for turn in turns])
        ratios = report.Spread.of([turn[unit][guards] / turn[unit].get(OPEN, float("nan")) for turn in turns])
        rows.append([unit, guards, costs.format(1), "-" if guards == OPEN else ratios.format()])
    return report.format_table(("unit", "guards", "CPU us per unit", "ratio by turn"), rows)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="trials of each case (default %(default)s)")
    parser.add_argument("--streams", type=int, default=1000, help="long streams (default %(default)s)")
    parser.add_argument("--request-rate", type=float, default=400.0, help="one-token streams per second")
    parser.add_argument("--connections", action="store_true", help="new connections, too")
    parser.add_argument("--connection-rate", type=float, default=100.0, help="new connections per second")
    parser.add_argument("--key-type", choices=KEY_TYPES, default="ecdsa", help="of the certificate (P-256, or 2048 bits)")
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
