"""What an experiment is given, and what all of them share: traces, seeds, trials of a system, tuning.

A *system* is one way to run the engines of a cell: strategy, sliders, placement. Tuning takes the best of a grid of systems:
all at one seed, the better ones at more; seeds of the tuning are not those of the result, so that luck is not reported.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.papers.trials import Laboratory, Outcome, Trial

from sluice_cli.simulation.cell_settings import CellSettings, CellSpec, parse_engines
from sluice_core.records import EarlyRejection
from sluice_core.sim.cell import NoGrant, TtftEnd

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sluice_core.records import Slo

# Semantics of the papers (simulation.md, sections 2.8, 2.9 and 3): a finished prefill waits for its decode engine with its KV on
# the source, TTFT includes that, and a request that no engine can serve in time goes to any. The product's are the defaults.
PAPER_SETTINGS = CellSettings(
    no_grant=NoGrant.WAIT,
    ttft_end=TtftEnd.DECODE_JOIN,
    early_rejection=EarlyRejection.RANDOM,
    min_tokens_between_moves=0,
)
TUNING_SEEDS = (11, 12, 13)
_KEPT_AFTER_FIRST_SEED = 8
_KEPT_AFTER_SECOND_SEED = 3


class MissingTraceError(ValueError):
    """A trace is not there; the message says which, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long is measured.

    Args:
        seeds: One run for each.
        scale: Of the duration of runs.
        grid: Every how many-th system of a grid is tried.
    """

    seeds: tuple[int, ...] = (1, 2, 3)
    scale: float = 1.0
    grid: int = 1


FULL = Effort()
QUICK = Effort(seeds=(1,), scale=0.1, grid=8)  # shows that everything works; its figures mean nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """Engines and their requests.

    Args:
        model: Name.
        gpu: Name.
        tensor_parallel: GPUs per engine.
        trace: Name of the file of the requests, without its ending.
        slo: Objectives.
        duration_s: Length of a run.
        start_rps: Where a goodput search starts.
        settings: Semantics and limits of the engines.
    """

    model: str
    gpu: str
    tensor_parallel: int
    trace: str
    slo: Slo
    duration_s: float
    start_rps: float
    settings: CellSettings = PAPER_SETTINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to run the engines.

    Args:
        strategy: Name.
        engines: As ``--engines`` says it.
        placement: Where prefills run; None: as the strategy says.
        flow: False: requests decode where their prefill ran.
    """

    strategy: str
    engines: str
    placement: str | None = None
    flow: bool = True

    def __str__(self) -> str:
        placement = "" if self.placement is None else f", {self.placement.replace('_', ' ')}"
        return f"{self.engines}{placement}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What an experiment is given.

    Args:
        laboratory: Carries trials out.
        traces: Folder of the traces.
        effort: How long is measured.
    """

    laboratory: Laboratory
    traces: Path
    effort: Effort

    def find_trace(self, name: str) -> Path:
        """Finds a trace.

        Raises:
            MissingTraceError: It is not there.
        """
        path = self.traces / f"{name}.csv.gz"
        if not path.is_file():
            raise MissingTraceError(
                f"trace {path.name} is not in {self.traces}: give the folder that has it with --traces, or leave out the "
                f"experiments that need it with --only"
            )
        return path

    def make_trials(
        self, testbed: Testbed, system: System, *, rate_rps: float | None, seeds: Sequence[int]
    ) -> list[Trial]:
        """Makes the trials of a system: at a rate, or of its goodput when that is None."""
        spec = CellSpec(
            model=testbed.model,
            gpu=testbed.gpu,
            tensor_parallel=testbed.tensor_parallel,
            strategy=system.strategy,
            engines=parse_engines(system.engines),
            slo=testbed.slo,
            settings=replace(testbed.settings, placement=system.placement, flow=system.flow),
        )
        return [
            Trial(
                spec=spec,
                trace=self.find_trace(testbed.trace),
                seed=seed,
                duration_s=testbed.duration_s * self.effort.scale,
                rate_rps=testbed.start_rps if rate_rps is None else rate_rps,
                is_goodput=rate_rps is None,
            )
            for seed in seeds
        ]

    def measure(
        self, what: str, testbed: Testbed, systems: Sequence[System], *, rate_rps: float | None = None
    ) -> list[list[Outcome]]:
        """Carries the trials of systems out.

        Returns:
            For each system an outcome per seed.
        """
        seeds = self.effort.seeds
        trials = [
            trial for system in systems for trial in self.make_trials(testbed, system, rate_rps=rate_rps, seeds=seeds)
        ]
        outcomes = self.laboratory.carry_out(what, trials)
        return [outcomes[index : index + len(seeds)] for index in range(0, len(outcomes), len(seeds))]

    def tune(self, what: str, testbed: Testbed, systems: Sequence[System]) -> System:
        """Finds the system with the highest goodput.

        Args:
            what: Said in the progress.
            testbed: What they run on.
            systems: The grid.
        """
        kept = list(systems[:: self.effort.grid])
        rates: dict[System, list[float]] = {system: [] for system in kept}
        limits = (_KEPT_AFTER_FIRST_SEED, _KEPT_AFTER_SECOND_SEED, 1)
        for seed, limit in zip(TUNING_SEEDS, limits, strict=True):
            trials = [self.make_trials(testbed, system, rate_rps=None, seeds=(seed,))[0] for system in kept]
            outcomes = self.laboratory.carry_out(f"{what}, tuned at seed {seed}", trials)
            for system, outcome in zip(kept, outcomes, strict=True):
                rates[system].append(outcome.rate_rps)
            kept = sorted(kept, key=lambda system: -statistics.fmean(rates[system]))[:limit]
        return kept[0]


def compute_mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Computes the mean over the seeds and the standard deviation, None of one."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
