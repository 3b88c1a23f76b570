"""Trials: one seed of one cell, at a rate or at its goodput; carried out in processes and remembered."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from sluice_cli.simulation.cell_settings import CellSpec, build_cell
from sluice_cli.simulation.worker_processes import load_rows, start_workers
from sluice_core.sim.goodput import TARGET, NoGoodputError, search_goodput
from sluice_core.sim.metrics import RunSummary, list_latencies, summarize
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.workload import PoissonWorkload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One seed of a cell.

    Args:
        spec: The cell.
        trace: File of the requests.
        seed: Fixes lengths, gaps and the policies' random choices.
        duration_s: Length of the run.
        rate_rps: Requests per second; with ``is_goodput`` where the search starts.
        is_goodput: Search the highest rate at which nine tenths of the requests meet their objectives.
    """

    spec: CellSpec
    trace: Path
    seed: int
    duration_s: float
    rate_rps: float
    is_goodput: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial gave.

    Args:
        rate_rps: The rate, or the goodput; 0: no rate passes.
        summary: The run at that rate; None: no rate passes.
        latencies_s: TTFT and TPOT of each request that has both, in the order of arrival; of trials at a rate only.
    """

    rate_rps: float
    summary: RunSummary | None
    latencies_s: tuple[tuple[float, float], ...] = ()

    @property
    def run(self) -> RunSummary:
        """The run.

        Raises:
            ValueError: There is none.
        """
        if self.summary is None:
            raise ValueError("no rate passes: there is no run to look at")
        return self.summary


def carry_out(trial: Trial) -> Outcome:
    """Carries one trial out."""
    cell = build_cell(trial.spec, trial.seed)
    workload = PoissonWorkload(load_rows(trial.trace), trial.spec.slo, trial.seed)
    if trial.is_goodput:
        try:
            found = search_goodput(cell, workload, duration_s=trial.duration_s, start_rps=trial.rate_rps, target=TARGET)
        except NoGoodputError:
            return Outcome(rate_rps=0.0, summary=None)
        return Outcome(rate_rps=found.rate_rps, summary=found.summary)
    simulation = Simulation(cell, workload.make_arrivals(trial.rate_rps, trial.duration_s))
    simulation.run()
    return Outcome(
        rate_rps=trial.rate_rps,
        summary=summarize(simulation),
        latencies_s=list_latencies(simulation.requests),
    )


class Laboratory:
    """Carries trials out, each once; mutable in what it remembers. Use it as a context: it owns processes.

    Args:
        num_processes: 1: in this process.
        report: Takes a line about the progress.
    """

    def __init__(self, num_processes: int, report: Callable[[str], None]) -> None:
        self.num_trials = 0
        self._report = report
        self._outcomes: dict[Trial, Outcome] = {}
        self._pool = start_workers(num_processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def carry_out(self, what: str, trials: Sequence[Trial]) -> list[Outcome]:
        """Carries trials out.

        Args:
            what: Said in the progress.
            trials: The trials; those already known cost nothing.

        Returns:
            An outcome for each, in their order.
        """
        new = [trial for trial in dict.fromkeys(trials) if trial not in self._outcomes]
        if new:
            started_s = time.monotonic()
            results = map(carry_out, new) if self._pool is None else self._pool.map(carry_out, new)
            self._outcomes.update(zip(new, results, strict=True))
            self.num_trials += len(new)
            self._report(f"{what}: {len(new)} trials, {time.monotonic() - started_s:.0f} s")
        return [self._outcomes[trial] for trial in trials]

    def map(self, what: str, do: Callable[[_Given], _Result], given: Sequence[_Given]) -> list[_Result]:
        """Carries out something else than trials, in the same processes; nothing is remembered."""
        started_s = time.monotonic()
        results = list(map(do, given) if self._pool is None else self._pool.map(do, given))
        self._report(f"{what}: {len(given)} measurements, {time.monotonic() - started_s:.0f} s")
        return results
