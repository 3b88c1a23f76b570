"""``sluice simulate``: one cell, at a rate or at its goodput, over some seeds in parallel."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from sluice_cli.output.cluster_display import make_console
from sluice_cli.simulation.cell_settings import (
    CellSpec,
    build_cell,
    change_settings,
    describe_manifest,
    format_engines,
    parse_engines,
)
from sluice_cli.simulation.worker_processes import load_rows, start_workers
from sluice_core.records import Slo
from sluice_core.sim.goodput import TARGET, search_goodput
from sluice_core.sim.metrics import make_report, summarize
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.timeline import Timeline
from sluice_core.sim.workload import PoissonWorkload, scale_trace
from sluice_operator.api.manifest import ManifestError, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_core.sim.cell import Arrival
    from sluice_core.sim.metrics import RunSummary

_START_RPS_PER_ENGINE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one worker does: one seed of a cell.

    Args:
        spec: The cell.
        trace: File of the requests.
        seed: Fixes lengths, gaps and the policies' random choices.
        duration_s: Length of the run.
        rate_rps: Rate; None: search the goodput, or take the trace's times as they are.
        target: Attainment of the goodput; None: run at the rate.
        has_trace_times: Requests arrive at the trace's times, scaled to the rate.
        timeline: Where to write what happened; None: nowhere.
    """

    spec: CellSpec
    trace: Path
    seed: int
    duration_s: float
    rate_rps: float | None
    target: float | None
    has_trace_times: bool = False
    timeline: Path | None = None


def carry_out(run: Run) -> tuple[float | None, RunSummary]:
    """Simulates one seed; returns the goodput if that was asked for, and the run at that rate."""
    rows = load_rows(run.trace, reads_hashes=run.spec.settings.prefix_reuse is not None)
    cell = build_cell(run.spec, run.seed)
    workload = PoissonWorkload(rows, run.spec.slo, run.seed, run.spec.classes)
    if run.target is not None:
        start_rps = run.rate_rps or _START_RPS_PER_ENGINE * len(cell.engines)
        found = search_goodput(cell, workload, duration_s=run.duration_s, start_rps=start_rps, target=run.target)
        return found.rate_rps, found.summary
    arrivals: list[Arrival]
    if run.has_trace_times:
        arrivals = scale_trace(rows, run.spec.slo, run.rate_rps, run.duration_s, run.spec.classes)
    else:
        assert run.rate_rps is not None
        arrivals = workload.make_arrivals(run.rate_rps, run.duration_s)
    timeline = None if run.timeline is None else Timeline()
    simulation = Simulation(cell, arrivals, timeline)
    simulation.run()
    if run.timeline is not None and timeline is not None:
        with run.timeline.open("w") as file:
            file.writelines(timeline.to_chrome_trace())
    return None, summarize(simulation)


def carry_out_all(runs: Sequence[Run], num_processes: int) -> list[tuple[float | None, RunSummary]]:
    """Simulates several seeds, in processes where more than one is allowed."""
    pool = start_workers(min(num_processes, len(runs)))
    if pool is None:
        return [carry_out(run) for run in runs]
    with pool:
        return list(pool.map(carry_out, runs))


def describe_results(runs: Sequence[Run], results: Sequence[tuple[float | None, RunSummary]]) -> dict[str, object]:
    """Makes the JSON that ``--json`` prints."""
    spec = runs[0].spec
    rates = [rate for rate, _ in results if rate is not None]
    report: dict[str, object] = {
        "model": spec.model,
        "gpu": spec.gpu,
        "tensor_parallel": spec.tensor_parallel,
        "strategy": spec.strategy,
        "engines": format_engines(spec.engines),
        "ttft_ms": spec.slo.ttft_s * 1e3,
        "tpot_ms": spec.slo.tpot_s * 1e3,
        "rate_rps": None if rates else runs[0].rate_rps,
        "duration_s": runs[0].duration_s,
        "seeds": [run.seed for run in runs],
        "prefix_reuse": bool(spec.settings.prefix_reuse),
    }
    if rates:
        report["target"] = runs[0].target
        report["goodput_rps"] = statistics.fmean(rates)
        report["goodput_sd"] = statistics.stdev(rates) if len(rates) > 1 else 0.0
        report["goodput_per_seed"] = rates
    return report | make_report([summary for _, summary in results])


def _choose_spec(
    manifest: Path | None, given: dict[str, object], engines: str | None, changes: Sequence[str]
) -> CellSpec:
    """Makes the cell of manifest and flags; flags win."""
    model, gpu = given.pop("model"), given.pop("gpu")
    if manifest is not None:
        spec = describe_manifest(parse_manifest(manifest.read_text()), _text(model), _text(gpu))
    else:
        required = {"--model": model, "--gpu": gpu, "--engines": engines}
        required |= {"--ttft-ms": given["ttft_ms"], "--tpot-ms": given["tpot_ms"]}
        missing = [flag for flag, value in required.items() if value is None]
        if missing:
            raise ValueError(f"without a manifest, {', '.join(missing)} must be given")
        spec = CellSpec(
            model=str(model),
            gpu=str(gpu),
            tensor_parallel=1,
            strategy="taichi",
            engines=(),
            slo=Slo(ttft_s=0, tpot_s=0),
        )
    return _override(spec, given, engines, changes)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _override(spec: CellSpec, given: dict[str, object], engines: str | None, changes: Sequence[str]) -> CellSpec:
    ttft_ms, tpot_ms = given["ttft_ms"], given["tpot_ms"]
    slo = Slo(
        ttft_s=spec.slo.ttft_s if ttft_ms is None else float(str(ttft_ms)) / 1e3,
        tpot_s=spec.slo.tpot_s if tpot_ms is None else float(str(tpot_ms)) / 1e3,
    )
    tensor_parallel, prefix_reuse = given["tensor_parallel"], given["prefix_reuse"]
    return replace(
        spec,
        slo=slo,
        strategy=spec.strategy if given["strategy"] is None else str(given["strategy"]),
        tensor_parallel=spec.tensor_parallel if tensor_parallel is None else int(str(tensor_parallel)),
        engines=spec.engines if engines is None else parse_engines(engines),
        settings=replace(
            change_settings(spec.settings, changes), prefix_reuse=None if prefix_reuse is None else bool(prefix_reuse)
        ),
    )


def make_results_table(report: dict[str, object]) -> Table:
    """Shows the metrics on a terminal."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("cell", f"{report['model']} on {report['gpu']}, {report['strategy']} {report['engines']}")
    if "goodput_rps" in report:
        table.add_row("goodput", f"{report['goodput_rps']:.2f} ± {report['goodput_sd']:.2f} requests/s")
    else:
        table.add_row("rate", f"{report['rate_rps']} requests/s")
    for name in ("attainment", "attainment_longest_tenth"):
        table.add_row(name.replace("_", " "), f"{100 * float(str(report[name])):.1f} %")
    for name in ("ttft_s", "tpot_s", "itl_s"):
        values = report[name]
        assert isinstance(values, dict)
        shown = "  ".join(f"{key} {value * 1e3:.0f} ms" for key, value in values.items() if value is not None)
        table.add_row(name.removesuffix("_s").upper(), shown)
    moves = report["moves"]
    assert isinstance(moves, dict)
    table.add_row("moves", "  ".join(f"{cause} {number}" for cause, number in moves.items() if number) or "none")
    if report["prefix_hit_rate"] is not None:
        table.add_row("prefix hit rate", f"{100 * float(str(report['prefix_hit_rate'])):.1f} % of prompt tokens")
    for name in ("preemptions", "rejected", "requests"):
        table.add_row(name, str(report[name]))
    return table


def parse_seeds(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Reads ``--seeds``."""
    try:
        seeds = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 1,2,3") from None
    if len(set(seeds)) != len(seeds):
        raise click.BadParameter(f"{value!r} has a seed twice")
    return seeds


@click.command()
@click.argument("manifest", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", help="Model by name, or the path of its config.json.")
@click.option("--gpu", help="GPU by name.")
@click.option("--tensor-parallel", type=click.IntRange(1, 64), help="GPUs per engine.  [default: 1]")
@click.option("--strategy", help="taichi, aggregated or disaggregated.  [default: taichi]")
@click.option("--engines", metavar="NxCHUNK[,NxCHUNK]", help="P-heavy engines, then D-heavy ones: 2x1024,2x256.")
@click.option("--trace", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="CSV.")
@click.option("--ttft-ms", type=click.FloatRange(min=0, min_open=True), help="TTFT objective.")
@click.option("--tpot-ms", type=click.FloatRange(min=0, min_open=True), help="TPOT objective.")
@click.option("--rate", "rate_rps", type=click.FloatRange(min=0, min_open=True), help="Requests per second.")
@click.option("--goodput", "is_goodput", is_flag=True, help="Search the highest rate at the target; starts at --rate.")
@click.option("--target", default=TARGET, show_default=True, type=click.FloatRange(0, 1), help="Attainment of goodput.")
@click.option("--duration-s", default=600.0, show_default=True, type=click.FloatRange(min=0, min_open=True))
@click.option("--seeds", default="1,2,3", show_default=True, callback=parse_seeds, help="One run for each.")
@click.option(
    "--trace-times", is_flag=True, help="Arrivals of the trace, stretched to --rate, instead of Poisson ones."
)
@click.option(
    "--prefix-reuse/--no-prefix-reuse",
    default=None,
    help="Reuse KV of prompts that begin alike, by the trace's hash_ids; --no-...: the same requests without that.",
)
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE", help="A parameter; see docs/reference/simulator.md."
)
@click.option(
    "--jobs", default=os.cpu_count() or 1, type=click.IntRange(min=1), help="Processes.  [default: all cores]"
)
@click.option("--timeline", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(
    manifest: Path | None,
    *,
    engines: str | None,
    trace: Path,
    rate_rps: float | None,
    is_goodput: bool,
    target: float,
    duration_s: float,
    seeds: tuple[int, ...],
    trace_times: bool,
    changes: tuple[str, ...],
    jobs: int,
    timeline: Path | None,
    as_json: bool,
    **given: object,
) -> None:
    """Simulates a cluster on a trace: of MANIFEST, of flags, or of a manifest that flags change."""
    if not is_goodput and rate_rps is None and not trace_times:
        raise click.UsageError("--rate or --goodput is needed")
    if is_goodput and (trace_times or timeline):
        raise click.UsageError("--goodput searches with Poisson arrivals; --trace-times and --timeline need --rate")
    try:
        spec = _choose_spec(manifest, given, engines, changes)
        build_cell(spec, seed=0)
        runs = [
            Run(
                spec=spec,
                trace=trace,
                seed=seed,
                duration_s=duration_s,
                rate_rps=rate_rps,
                target=target if is_goodput else None,
                has_trace_times=trace_times,
                timeline=timeline if seed == seeds[0] else None,
            )
            for seed in seeds
        ]
        report = describe_results(runs, carry_out_all(runs, jobs))
    except (ValueError, ManifestError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        make_console().print(make_results_table(report))
