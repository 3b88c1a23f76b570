"""A phase: one strategy under one load, and everything that is counted meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from benchmarks.emulated.load import run_load
from benchmarks.local_cluster.client import sum_growth
from benchmarks.local_cluster.cluster import read_cpu_s
from benchmarks.local_cluster.figures import compute_percentile, to_json_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.emulated.arrivals import LoadArrival
    from benchmarks.emulated.load import LoadAnswer
    from benchmarks.local_cluster.client import BenchmarkClient
    from benchmarks.local_cluster.cluster import BenchmarkCluster

MS = 1e3
PERCENTS = (50, 90, 99)
# Router's counters: name, labels that are kept. Roles are those of engines, causes those of moves.
COUNTERS = {
    "placements": ("sluice_placements_total", ("role",)),
    "placement_reasons": ("sluice_placements_total", ("role", "reason")),
    "moves": ("sluice_moves_total", ("cause", "result")),
    "cut_prompts": ("sluice_cut_prompts_total", ("result",)),
    "flow_blocked": ("sluice_flow_blocked_total", ("cause", "reason")),
    "recoveries": ("sluice_recoveries_total", ("reason",)),
    "engine_losses": ("sluice_engine_losses_total", ("reason",)),
}
MOVED = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A strategy with its sliders.

    Args:
        name: The strategy, as the manifest spells it.
        spec: What the manifest's spec is changed to.
    """

    name: str
    spec: dict[str, Any]

    def describe(self) -> str:
        """For people."""
        chunks = self.spec["chunkSizes"]
        if self.name == "Aggregated":
            return f"{self.name}: chunk size {chunks['prefillHeavy']} on every engine"
        if self.name == "Disaggregated":
            return f"{self.name}: {self.spec['prefillHeavy']} P-heavy, unchunked; no prefills on the others"
        return (
            f"{self.name}: {self.spec['prefillHeavy']} P-heavy of chunk size {chunks['prefillHeavy']},"
            f" the others {chunks['decodeHeavy']}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreUsage:
    """Mean use of the machine while requests arrived, in cores.

    Args:
        engines: All engines, both processes of each.
        router: The router.
        load: The load generator.
        busy: Everything on the machine.
    """

    engines: float
    router: float
    load: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a strategy did with a load.

    Args:
        strategy: Its name.
        rate: Requests offered per second.
        seed: Of the arrivals.
        answers: One per request that counts; those of the warm-up do not.
        counters: Growth of the router's counters over the whole phase, by ``COUNTERS`` and their labels.
        cores: Use of the machine.
        duration_s: First arrival to last answer.
        latency_error: Mean over the engines of the router's latency model's relative error, at the end.
    """

    strategy: str
    rate: float
    seed: int
    answers: list[LoadAnswer]
    counters: dict[str, dict[tuple[str, ...], float]]
    cores: CoreUsage
    duration_s: float
    latency_error: float

    @property
    def good(self) -> list[LoadAnswer]:
        """Answers that did not fail."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def attainment(self) -> float:
        """Share of requests that met both objectives; a failed one met none."""
        return sum(answer.is_slo_met for answer in self.answers) / len(self.answers) if self.answers else float("nan")

    def compute_share(self, *, ttft_slo_s: float | None = None, tpot_slo_s: float | None = None) -> float:
        """Share of requests that met the objectives given."""
        if not self.answers:
            return float("nan")
        met = [
            answer
            for answer in self.good
            if (ttft_slo_s is None or answer.ttft_s <= ttft_slo_s)
            and (tpot_slo_s is None or answer.tpot_s is None or answer.tpot_s <= tpot_slo_s)
        ]
        return len(met) / len(self.answers)

    def compute_ttft_ms(self, percent: float) -> float:
        """Percentile of TTFT, in milliseconds."""
        return compute_percentile([answer.ttft_s * MS for answer in self.good], percent)

    def compute_tpot_ms(self, percent: float) -> float:
        """Percentile of TPOT, in milliseconds; answers of one token have none."""
        return compute_percentile([answer.tpot_s * MS for answer in self.good if answer.tpot_s is not None], percent)

    def count_moves(self) -> dict[str, int]:
        """Moves that came to their end, by cause."""
        moves = self.counters["moves"]
        return {cause: int(count) for (cause, result), count in sorted(moves.items()) if result == MOVED}

    def as_json(self) -> dict[str, Any]:
        """Everything but the single requests."""
        lags = [answer.lag_s * MS for answer in self.answers]
        checks = [(answer.client_ttft_s - answer.ttft_s) * MS for answer in self.good]
        errors: dict[str, int] = {}
        for answer in self.answers:
            if answer.error:
                errors[answer.error] = errors.get(answer.error, 0) + 1
        return {
            "strategy": self.strategy,
            "rate": self.rate,
            "seed": self.seed,
            "num_requests": len(self.answers),
            "num_failed": len(self.answers) - len(self.good),
            "errors": errors,
            "attainment": to_json_number(self.attainment, 4),
            "ttft_ms": {f"p{percent}": to_json_number(self.compute_ttft_ms(percent)) for percent in PERCENTS},
            "tpot_ms": {f"p{percent}": to_json_number(self.compute_tpot_ms(percent)) for percent in PERCENTS},
            "num_hand_offs": sum(answer.num_hand_offs for answer in self.good),
            **{
                name: {"/".join(labels): int(count) for labels, count in sorted(counts.items())}
                for name, counts in self.counters.items()
            },
            "cores": {name: round(getattr(self.cores, name), 3) for name in ("engines", "router", "load", "busy")},
            "duration_s": round(self.duration_s, 1),
            "latency_error": to_json_number(self.latency_error),
            "send_lag_p99_ms": to_json_number(compute_percentile(lags, 99)),
            "client_minus_router_ttft_p50_ms": to_json_number(compute_percentile(checks, 50)),
            "client_minus_router_ttft_p99_ms": to_json_number(compute_percentile(checks, 99)),
        }


class Meter:
    """Reads CPU time of everything; the processes are looked up once, at its making."""

    def __init__(self, cluster: BenchmarkCluster) -> None:
        self._kinds = {
            "engines": cluster.find_processes("engine"),
            "router": cluster.find_processes("router"),
            "load": [psutil.Process()],
        }
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        times = psutil.cpu_times()
        values = {kind: read_cpu_s(processes) for kind, processes in self._kinds.items()}
        busy_s = times.user + times.nice + times.system + times.irq + times.softirq
        return {**values, "busy": busy_s, "at": time.monotonic()}

    def measure(self) -> CoreUsage:
        """Use of the machine since the meter was made."""
        after = self._read()
        elapsed_s = after["at"] - self._before["at"]
        cores = {name: (after[name] - self._before[name]) / elapsed_s for name in ("engines", "router", "load", "busy")}
        return CoreUsage(**cores)


async def run_phase(
    cluster: BenchmarkCluster,
    client: BenchmarkClient,
    setting: Setting,
    arrivals: Sequence[LoadArrival],
    *,
    rate: float,
    seed: int,
    prompt_seed: int,
    warm_up_s: float,
    timeout_s: float,
) -> Phase:
    """Sets a strategy by an edit of the manifest, and runs a load to its last answer.

    Args:
        cluster: The cluster, idle.
        client: Of its router.
        setting: The strategy.
        arrivals: The load.
        rate: Its rate, in requests per second.
        seed: Of its arrivals.
        prompt_seed: Of its prompts; another one for each phase, or prefix caches would answer.
        warm_up_s: Requests that arrive in this time are served but do not count.
        timeout_s: Longest time that one answer may take.
    """
    await cluster.edit(client, lambda spec: spec.update(setting.spec))
    before = await client.read_metrics()
    meter = Meter(cluster)
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        cores = group.create_task(_measure_at(meter, arrivals[-1].at_s if arrivals else 0.0))
        port = cluster.manifest["spec"]["router"]["service"]["port"]
        answers = await run_load(
            port, arrivals, model=cluster.served_name, prompt_seed=prompt_seed, timeout_s=timeout_s
        )
    duration_s = time.monotonic() - start_s
    after, status = await client.read_metrics(), await client.read_status()
    errors = [engine.latency_error_ratio for engine in status.engines]
    return Phase(
        strategy=setting.name,
        rate=rate,
        seed=seed,
        answers=[answer for answer in answers if answer.arrival.at_s >= warm_up_s],
        counters={name: sum_growth(before, after, sample, labels) for name, (sample, labels) in COUNTERS.items()},
        cores=cores.result(),
        duration_s=duration_s,
        latency_error=sum(errors) / len(errors) if errors else float("nan"),
    )


async def _measure_at(meter: Meter, after_s: float) -> CoreUsage:
    """Measures while requests still arrive: the emptying afterwards would flatter everybody."""
    await asyncio.sleep(after_s)
    return meter.measure()
