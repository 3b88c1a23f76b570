"""Runs systems on testbeds: trials over seeds, and the tuning of a system."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.papers.trials import PaperResult, PaperTrial, PaperTrialPool, run_trial

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.papers.paper_file import PaperTestbed, System

# Seeds of the tuning are not those of the result, so that luck is not reported.
TUNING_SEEDS = (11, 12, 13)
_KEPT_AFTER_SEED = (8, 3, 1)


class MissingTraceError(ValueError):
    """A trace is not there; the message says which, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEffort:
    """How long is measured.

    Args:
        seeds: One run for each.
        scale: Of the duration of runs.
        grid: Every how many-th system of a grid is tried.
    """

    seeds: tuple[int, ...] = (1, 2, 3)
    scale: float = 1.0
    grid: int = 1


FULL = PaperEffort()
QUICK = PaperEffort(seeds=(1,), scale=0.1, grid=8)  # shows that everything works; its figures mean nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRunner:
    """Runs systems on testbeds.

    Args:
        pool: Runs trials.
        traces: Folder of the traces.
        effort: How long is measured.
    """

    pool: PaperTrialPool
    traces: Path
    effort: PaperEffort

    def find_trace(self, name: str) -> Path:
        """Finds a trace.

        Raises:
            MissingTraceError: It is not there.
        """
        path = self.traces / f"{name}.csv.gz"
        if not path.is_file():
            raise MissingTraceError(
                f"trace {path.name} is not in {self.traces}: give the folder that has it with --traces, or leave "
                f"out the experiments that need it with --only"
            )
        return path

    def make_trial(self, testbed: PaperTestbed, system: System, seed: int, rate_rps: float | None = None) -> PaperTrial:
        """Makes a trial of a system: at a rate, or of its goodput."""
        return PaperTrial(
            spec=testbed.make_spec(system),
            trace=self.find_trace(testbed.trace),
            seed=seed,
            duration_s=testbed.duration_s * self.effort.scale,
            rate_rps=rate_rps,
            start_rps=testbed.start_rps,
            class_ttft_s=tuple(testbed.class_ttft_s.items()),
            prompt_tokens=testbed.prompt_tokens,
            output_tokens=testbed.output_tokens,
        )

    def measure(
        self, what: str, testbed: PaperTestbed, systems: Sequence[System], rate_rps: float | None = None
    ) -> list[list[PaperResult]]:
        """Runs systems; for each a result per seed."""
        seeds = self.effort.seeds
        trials = [self.make_trial(testbed, system, seed, rate_rps) for system in systems for seed in seeds]
        results = self.pool.run(what, run_trial, trials)
        return [results[index : index + len(seeds)] for index in range(0, len(results), len(seeds))]

    def tune(self, what: str, testbed: PaperTestbed, systems: Sequence[System]) -> System:
        """Finds the system with the highest goodput: all at one seed, the better ones at more."""
        kept = list(systems[:: self.effort.grid])
        rates: dict[System, list[float]] = {system: [] for system in kept}
        for seed, limit in zip(TUNING_SEEDS, _KEPT_AFTER_SEED, strict=True):
            trials = [self.make_trial(testbed, system, seed) for system in kept]
            results = self.pool.run(f"{what}, tuned at seed {seed}", run_trial, trials)
            for system, result in zip(kept, results, strict=True):
                rates[system].append(result.rate_rps)
            kept = sorted(kept, key=lambda system: -statistics.fmean(rates[system]))[:limit]
        return kept[0]

    def describe(self, testbed: PaperTestbed) -> str:
        """Says what was run."""
        fields = testbed.model_dump() | {
            "ttft_s": testbed.slo[0],
            "tpot_ms": testbed.slo[1] * 1e3,
            "duration_s": testbed.duration_s * self.effort.scale,
            "seeds": ", ".join(map(str, self.effort.seeds)),
        }
        return testbed.description.format(**fields)


def compute_mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Computes the mean over the seeds and the standard deviation, None of one."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
