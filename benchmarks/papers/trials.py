"""Trials: one seed of one cell, at a rate or at its goodput; run in processes, each once."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar

from sluice_cli.simulation.cluster_builder import build_cluster
from sluice_cli.simulation.trace_cache import load_rows
from sluice_cli.simulation.worker_processes import start_workers
from sluice_core.sim.goodput_search import NoGoodputError, search_goodput
from sluice_core.sim.run_summary import RunSummary, list_latencies, summarize
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.workload import DrawnWorkload
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from benchmarks.papers.trial_store import TrialStore

    from sluice_cli.simulation.cluster_spec import ClusterSpec
    from sluice_core.sim.sim_setup import Arrival

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTrial:
    """One seed of a cell.

    Args:
        spec: The cell.
        trace: File of the requests.
        seed: Fixes lengths, gaps and the policies' random choices.
        duration_s: Length of the run.
        rate_rps: Requests per second; None: the highest at which nine tenths of the requests meet their objectives.
        start_rps: Where the search for that rate starts.
        num_engines: Engines whose prefill capacity is added up; of capacity only.
        num_decodes: Decodes beside the prefill; of capacity only.
        class_ttft_s: See ``PaperTestbed``.
        prompt_tokens: See there.
        output_tokens: See there.
    """

    spec: ClusterSpec
    trace: Path
    seed: int
    duration_s: float
    rate_rps: float | None
    start_rps: float
    num_engines: int = 1
    num_decodes: int = 0
    class_ttft_s: tuple[tuple[str, float], ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperResult:
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
            raise ValueError("no rate meets the objectives, so there is no run")
        return self.summary


def _make_workload(trial: PaperTrial) -> DrawnWorkload:
    rows = load_rows(trial.trace)
    if trial.class_ttft_s or trial.prompt_tokens or trial.output_tokens:
        ttft_s = dict(trial.class_ttft_s)
        rows = [
            replace(
                row,
                ttft_slo_s=ttft_s.get(row.slo_class, row.ttft_slo_s),
                prompt_tokens=trial.prompt_tokens or row.prompt_tokens,
                output_tokens=trial.output_tokens or row.output_tokens,
            )
            for row in rows
        ]
    return DrawnWorkload(rows, trial.spec.slo, trial.seed)


def make_arrivals(trial: PaperTrial) -> list[Arrival]:
    """Makes the arrivals of a trial at a rate."""
    assert trial.rate_rps is not None
    return _make_workload(trial).make_arrivals(trial.rate_rps, trial.duration_s)


def run_trial(trial: PaperTrial) -> PaperResult:
    """Runs a trial, or searches its goodput."""
    cell = build_cluster(trial.spec, trial.seed)
    if trial.rate_rps is None:
        try:
            found = search_goodput(
                cell,
                _make_workload(trial),
                duration_s=trial.duration_s,
                start_rps=trial.start_rps,
                target=DEFAULT_ATTAINMENT,
            )
        except NoGoodputError:
            return PaperResult(rate_rps=0.0, summary=None)
        return PaperResult(rate_rps=found.rate_rps, summary=found.summary)
    simulation = Simulation(cell, make_arrivals(trial))
    simulation.run()
    return PaperResult(
        rate_rps=trial.rate_rps,
        summary=summarize(simulation),
        latencies_s=list_latencies(simulation.requests),
    )


class PaperTrialPool:
    """Runs trials, each once; mutable: keeps their results. A context manager, because it owns processes.

    Args:
        num_processes: 1: in this process.
        report: Takes a line about the progress.
        store: Has the results of earlier runs, and keeps those of this one; None: they are forgotten.
    """

    def __init__(self, num_processes: int, report: Callable[[str], None], store: TrialStore | None = None) -> None:
        self.num_trials = 0
        self._report = report
        self._store = store
        self._results: dict[object, object] = {} if store is None else dict(store.load())
        self._pool = start_workers(num_processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, what: str, do: Callable[[PaperTrial], _Result], trials: Sequence[PaperTrial]) -> list[_Result]:
        """Runs trials; those that ``do`` already had cost nothing.

        Args:
            what: Named in the progress.
            do: Runs one trial.
            trials: The trials.

        Returns:
            A result for each, in their order.
        """
        known: dict[object, _Result] = self._results  # type: ignore[assignment]
        keys = {trial: (do.__name__, trial, trial.trace.stat().st_size) for trial in trials}
        new = [trial for trial, key in keys.items() if key not in known]
        if new:
            started_s = time.monotonic()
            results = map(do, new) if self._pool is None else self._pool.map(do, new)
            for trial, result in zip(new, results, strict=True):
                known[keys[trial]] = result
                if self._store is not None:
                    self._store.add(keys[trial], result)
            self.num_trials += len(new)
            self._report(f"{what}: {len(new)} trials, {time.monotonic() - started_s:.0f} s")
        return [known[keys[trial]] for trial in trials]
