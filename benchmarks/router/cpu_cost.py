"""CPU cost of Sluice's router per token and per request, without peers.

    .venv/bin/python benchmarks/router/cpu_cost.py [--seconds S] [--repeats N] [--json PATH]
    .venv/bin/python benchmarks/router/cpu_cost.py --split --large-tokenizer
    .venv/bin/python benchmarks/router/cpu_cost.py --against ../old        # another checkout in turn, and the ratio
    PYTHONPATH=build/compiled .venv/bin/python benchmarks/router/cpu_cost.py --against ../old/build/compiled
    .venv/bin/python benchmarks/router/cpu_cost.py --traced 0.01           # with traces of 1 % in turn, and the ratio

The router is measured idle (engines report, no requests come), under long streams at several widths, and under
one-token requests. In each repeat, two trials give the cost of a token and of a request: the widest streams and the
one-token streams. CPU above idle = tokens * cost of a token + requests * cost of a request. ``--split`` adds a trial
of one-token streams to each repeat, whose router times its stages (``traced_router.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import c_programs
import contestants
import grpc
import machine_usage
import report
import trial
from large_tokenizer import NUM_ENTRIES, make_large_model
from load_generator import TrafficWorkload
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from run import add_common_options, make_site
from started_programs import ProgramStartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LONG_PROMPT_TOKENS = 1000
SAMPLER = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """The measured loads by name.

    Args:
        streams: Long streams, narrow to wide.
        one_token_streams: Requests that stream one token.
        others: Further loads for the table.
    """

    streams: dict[str, TrafficWorkload]
    one_token_streams: tuple[str, TrafficWorkload]
    others: dict[str, TrafficWorkload]

    def all(self) -> dict[str, TrafficWorkload]:
        """All of them, in the order of the table."""
        return {**self.streams, self.one_token_streams[0]: self.one_token_streams[1], **self.others}


def make_cases(options: argparse.Namespace) -> Cases:
    """Makes the loads of the command line."""

    def make(*, num_tokens: int = 1, prompt_tokens: int = options.prompt_tokens, **shape: Any) -> TrafficWorkload:
        return TrafficWorkload(
            num_engines=options.engines,
            chunk_tokens=options.chunk_tokens,
            warmup_s=options.warmup_seconds,
            seconds=options.seconds,
            num_tokens=num_tokens,
            prompt_tokens=prompt_tokens,
            **shape,
        )

    rate = options.request_rate
    return Cases(
        streams={
            f"{count} streams": make(concurrency=count, num_tokens=options.tokens) for count in sorted(options.streams)
        },
        one_token_streams=(f"{rate:g} one-token streams/s", make(rate=rate)),
        others={
            f"{rate:g} one-token answers/s": make(rate=rate, is_unary=True),
            f"{rate:g} streams/s, prompts of {LONG_PROMPT_TOKENS}": make(rate=rate, prompt_tokens=LONG_PROMPT_TOKENS),
        },
    )


class Costs:
    """Collects the trials of one router. Mutable.

    Args:
        router: The router.
        options: The command line.
        cases: The loads.
        site: Ports and folders.
        files: Shared files.
    """

    def __init__(
        self,
        router: contestants.Sluice,
        options: argparse.Namespace,
        cases: Cases,
        site: contestants.Site,
        files: trial.Files,
    ) -> None:
        self._options = options
        self._cases = cases
        self._site = site
        self._files = files
        self._router = router
        self.name = router.version()
        self.idle: list[trial.Idle] = []
        self.repeats: report.Repeats = []
        self.splits: list[dict[str, float]] = []
        self.failures: list[str] = []

    def measure(self, number: int) -> None:
        """Runs every load once."""
        self.repeats.append({})
        label = f"{self.name}, repeat {number + 1}/{self._options.repeats}"
        try:
            idle = trial.run_idle(self._router, self._idle_workload(), self._site, self._files)
            self.idle.append(idle)
            print(f"{label}: idle: router {idle.usage.router_cores:.3f} core", flush=True)
            for name, workload in self._cases.all().items():
                self.repeats[-1][name] = self._measure(name, workload, label)
            if self._options.split:
                self.splits.append(self._measure_split(label))
        except ProgramStartError as error:
            self.failures.append(f"{label}: {error}")
            print(f"{label}: FAILED: {error}", flush=True)

    def _idle_workload(self) -> TrafficWorkload:
        return next(iter(self._cases.streams.values()))

    def _measure(self, name: str, workload: TrafficWorkload, label: str) -> trial.Measurement:
        for attempt in range(self._options.max_retries + 1):
            found = trial.run_trial(self._router, workload, self._site, self._files)
            print(f"{label}: {name}: {trial.summarize(found)}", flush=True)
            if not found.void_reasons or attempt == self._options.max_retries:
                break
        return found

    def _measure_split(self, label: str) -> dict[str, float]:
        """Returns microseconds per one-token request by stage."""
        path = self._site.folder / "split.json"
        name, workload = self._cases.one_token_streams
        found = trial.run_trial(replace(self._router, split=path), workload, self._site, self._files)
        print(f"{label}: {name}, by stage: {trial.summarize(found)}", flush=True)
        split: dict[str, float] = json.loads(path.read_text())["us_per_request"]
        return split

    def solve(self) -> tuple[list[float], list[float]]:
        """Splits CPU above idle into the costs of a token and of a request, for each repeat.

        Returns:
            Microseconds per token, microseconds per request (prompt and one stream included, its tokens not).
        """
        wide, short = list(self._cases.streams)[-1], self._cases.one_token_streams[0]
        complete = [(idle, found) for idle, found in zip(self.idle, self.repeats, strict=False) if short in found]
        costs = [solve_costs([found[wide], found[short]], idle.usage.router_cores) for idle, found in complete]
        return [token for token, _ in costs], [request for _, request in costs]

    def as_json(self) -> dict[str, Any]:
        """Returns the values for the result file."""
        per_token, per_request = self.solve()
        return {
            "version": self.name,
            "us_per_token": report.Spread.of(per_token).as_json(),
            "us_per_request": report.Spread.of(per_request).as_json(),
            "us_per_request_by_stage": self.splits,
            "idle_cores": [idle.usage.router_cores for idle in self.idle],
            "idle_pss_bytes": [idle.pss_bytes for idle in self.idle],
            "repeats": [{name: found.as_json() for name, found in repeat.items()} for repeat in self.repeats],
            "failures": self.failures,
        }


def solve_costs(pair: Sequence[trial.Measurement], idle_cores: float) -> tuple[float, float]:
    """Solves cores - idle = tokens/s * a + requests/s * b for two trials.

    Args:
        pair: The trials; their mixes of tokens and requests must differ.
        idle_cores: The router's cores without requests.

    Returns:
        a and b in microseconds.
    """
    (tokens_1, requests_1, cores_1), (tokens_2, requests_2, cores_2) = (
        (found.tokens_per_s, found.requests_per_s, found.usage.router_cores - idle_cores) for found in pair
    )
    determinant = tokens_1 * requests_2 - tokens_2 * requests_1
    if not determinant:
        return float("nan"), float("nan")
    per_token = (cores_1 * requests_2 - cores_2 * requests_1) / determinant
    per_request = (tokens_1 * cores_2 - tokens_2 * cores_1) / determinant
    return per_token * 1e6, per_request * 1e6


def format_costs(costs: Costs, names: Sequence[str]) -> str:
    """Makes the table."""
    header = (
        *("load", "router core", "CPU us/token", "CPU us/request", "tokens/s", "requests/s", "added p50", "p99 ms"),
        *("TTFT+ p50", "p99 ms", "PSS MiB", "errors", "void"),
    )
    idle_cores = report.Spread.of([idle.usage.router_cores for idle in costs.idle])
    idle_pss = report.Spread.of([idle.pss_bytes / report.MIB for idle in costs.idle])
    empty = ["-"] * (len(header) - 2)
    empty[-3:] = [idle_pss.format(0, has_range=False), "0", "-"]
    rows = [["idle", idle_cores.format(3), *empty]]
    for name in names:
        trials = report.choose_valid(costs.repeats, name)
        if not trials:
            continue
        columns = [
            ([found.usage.router_cores for found in trials], 2),
            ([found.cpu_us_per_token for found in trials], 1),
            ([found.cpu_us_per_request for found in trials], 0),
            ([found.tokens_per_s for found in trials], 0),
            ([found.requests_per_s for found in trials], 0),
            ([found.load.token_latency.p50_ms for found in trials], 2),
            ([found.load.token_latency.p99_ms for found in trials], 2),
            ([found.load.added_ttft.p50_ms for found in trials], 2),
            ([found.load.added_ttft.p99_ms for found in trials], 2),
            ([found.pss_bytes / report.MIB for found in trials], 0),
        ]
        cells = [report.Spread.of(values).format(digits, has_range=i < 3) for i, (values, digits) in enumerate(columns)]
        everything = [repeat[name] for repeat in costs.repeats if name in repeat]
        num_void = sum(bool(found.void_reasons) for found in everything)
        rows.append(
            [name, *cells, str(sum(found.load.num_errors for found in trials)), f"{num_void}/{len(everything)}"]
        )
    return report.format_table(header, rows)


def format_split(splits: Sequence[dict[str, float]]) -> str:
    """Makes the table of stages, costliest first."""
    stages = {stage for split in splits for stage in split}
    spreads = {stage: report.Spread.of([split.get(stage, 0.0) for split in splits]) for stage in stages}
    total = sum(spread.median for spread in spreads.values())
    rows = [
        [stage, spreads[stage].format(0), f"{spreads[stage].median / total:.0%}"]
        for stage in sorted(stages, key=lambda stage: -spreads[stage].median)
    ]
    header = ("stage of a one-token stream", "CPU us/request", "share")
    return report.format_table(header, [*rows, ["all, idle work and the clock included", f"{total:.0f}", "100%"]])


def format_costs_above_idle(costs: Sequence[Costs]) -> str:
    """Names the costs of each router, and the first one's shares of the others'."""
    lines = []
    solved = [found.solve() for found in costs]
    for found, (per_token, per_request) in zip(costs, solved, strict=True):
        token, request = report.Spread.of(per_token), report.Spread.of(per_request)
        line = f"{found.name}: CPU above idle: {token.format(1)} us per token + {request.format(0)} us per request"
        if found is not costs[0]:
            ratios = [
                report.Spread.of([new / old for new, old in zip(mine, others, strict=False)])
                for mine, others in zip(solved[0], (per_token, per_request), strict=True)
            ]
            line += f"; {costs[0].name} needs {ratios[0].format(2)} of it per token, {ratios[1].format(2)} per request"
        lines.append(line)
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[250, 1000, 2000], help="widths of the long streams")
    parser.add_argument("--request-rate", type=float, default=200.0, help="one-token requests per second")
    parser.add_argument("--repeats", type=int, default=3, help="trials of each load (default %(default)s)")
    parser.add_argument("--json", type=Path, default=c_programs.BUILD / "router-cost.json", help="result file")
    parser.add_argument("--split", action="store_true", help="times the stages of a one-token stream, too")
    parser.add_argument(
        "--against", type=Path, action="append", default=[], help="another checkout or its build/compiled, in turn"
    )
    parser.add_argument("--traced", type=float, metavar="SHARE", help="share of requests traced, by a router in turn")
    parser.add_argument(
        "--large-tokenizer", action="store_true", help=f"of {NUM_ENTRIES} entries, which is trained at the first use"
    )
    add_common_options(parser)
    options = parser.parse_args()
    if options.large_tokenizer:
        options.model = make_large_model(options.model)
    return options


def measure_all(options: argparse.Namespace, cases: Cases, files: trial.Files, folder: Path) -> list[Costs]:
    """Measures our router and those of other checkouts in turn."""
    site = make_site(options, folder)
    checkouts = [c_programs.REPOSITORY, *(path.resolve() for path in options.against)]
    routers = [contestants.Sluice(strategy=options.strategy, checkout=checkout) for checkout in checkouts]
    with ExitStack() as stack:
        if options.traced is not None:
            endpoint, collector = stack.enter_context(collect_traces())
            stack.callback(lambda: print(f"the collector got {collector.num_spans} spans", flush=True))
            tracing = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                **SAMPLER,
                "OTEL_TRACES_SAMPLER_ARG": str(options.traced),
            }
            routers.append(replace(routers[0], tracing=tracing))
        everyone = [Costs(router, options, cases, site, files) for router in routers]
        for number in range(options.repeats):
            for costs in everyone if number % 2 == 0 else everyone[::-1]:
                costs.measure(number)
    return everyone


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts the spans that a router sends."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(  # noqa: N802 - gRPC's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes spans; see OpenTelemetry's protocol."""
        del context
        self.num_spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collect_traces() -> Iterator[tuple[str, Collector]]:
    """Serves a collector of traces in this process, off the router's core; yields its URL too."""
    server, collector = grpc.server(ThreadPoolExecutor(max_workers=1)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(None)


def main() -> int:
    """Runs the command line."""
    options = parse_options()
    cases = make_cases(options)
    load = c_programs.build("load")
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        trial.make_files(options.model, options.tokens) as files,
    ):
        before = machine_usage.calibrate(load, trial.ROUTER_CORE)
        everyone = measure_all(options, cases, files, (options.logs or Path(folder)).resolve())
        after = machine_usage.calibrate(load, trial.ROUTER_CORE)
    for costs in everyone:
        print(
            f"\nsluice {costs.name}, {options.strategy}; {next(iter(cases.streams.values())).describe()}; "
            f"tokenizer of {options.model.name}; {options.repeats} repeats\n"
        )
        print(format_costs(costs, list(cases.all())))
        if costs.splits:
            print("\n" + format_split(costs.splits))
    print("\n" + format_costs_above_idle(everyone))
    print(report.format_calibration(before, after))
    print("machine: " + ", ".join(f"{key} {value}" for key, value in machine_usage.describe().items()))
    result = {
        "benchmark": "router cost",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "machine": machine_usage.describe(),
        "calibration": {"before": before, "after": after},
        "workloads": {name: workload.as_json() for name, workload in cases.all().items()},
        "routers": [costs.as_json() for costs in everyone],
    }
    report.write_json(options.json, result)
    print(f"written to {options.json}")
    return 1 if any(costs.failures for costs in everyone) else 0


if __name__ == "__main__":
    sys.exit(main())
