"""A plan and its curves, its runs stood in for by formulas; and the processes that would make them."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_strategy_comparison import GOODPUTS_RPS, Formulas, make_cell

from sluice_cli.output.plan_report import describe_candidate, make_plan_report
from sluice_cli.simulation import plan_search, worker_processes
from sluice_cli.simulation.plan_inputs import PlanInputs, make_inputs
from sluice_cli.simulation.plan_search import search_plan
from sluice_cli.simulation.trace_cache import load_rows
from sluice_cli.simulation.trial_pool import TrialPool
from sluice_core.planning.goodput_comparison import RankedCandidate
from sluice_core.planning.planner import Alternative
from sluice_core.planning.prediction import Interval
from sluice_core.planning.slider_search import SearchEffort
from sluice_core.planning.trials import SearchTrial, TrialEvaluator
from sluice_core.sim.sim_setup import GC_THRESHOLD

EFFORT = SearchEffort(seeds=(3, 4), duration_s=20.0, num_compared=2)


@pytest.fixture
def inputs(tmp_path: Path) -> PlanInputs:
    cell = make_cell(tmp_path)
    return make_inputs(None, cell.flags, load_rows(cell.trace))


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> Formulas:
    monkeypatch.setitem(GOODPUTS_RPS, "taichi", 10.0)
    monkeypatch.setitem(GOODPUTS_RPS, "flowprefill", 5.0)
    monkeypatch.setitem(GOODPUTS_RPS, "dynaserve", 3.0)
    stand_in = Formulas()
    monkeypatch.setattr(plan_search, "TrialPool", stand_in.make_pool)
    return stand_in


@pytest.mark.parametrize("is_in_force", [False, True])
def test_the_best_strategy_is_planned_and_what_is_in_force_is_compared(
    formulas: Formulas, inputs: PlanInputs, *, is_in_force: bool
) -> None:
    told: list[tuple[float, str]] = []
    present = inputs.space.make_candidate("taichi", 2, 1, num_prefill_heavy=1, prefill_heavy_tokens=512)
    if is_in_force:
        object.__setattr__(inputs, "in_force", present)
    found = search_plan(inputs, EFFORT, 3, lambda share, what: told.append((share, what)), draws_curves=False)
    assert found.result.chosen.strategy == "ecoserve"
    assert found.result.goodput_rps.mean == pytest.approx(GOODPUTS_RPS["ecoserve"], rel=0.05)
    assert found.curves == {}
    assert formulas.pools == [(inputs.problem, 3), ("closed", 0)]
    assert max(share for share, _ in told) == 1.0
    whole = {trial.candidate for trial in formulas.trials if trial.duration_s == 20.0 and trial.seed == 4}
    assert (present in whole) == is_in_force


def test_another_candidate_is_described_with_its_mean_difference_and_the_ends_of_it(
    formulas: Formulas, inputs: PlanInputs
) -> None:
    del formulas
    result = search_plan(inputs, EFFORT, 1, lambda *_: None, draws_curves=False).result
    other = Alternative(
        ranked=RankedCandidate(candidate=result.found.ranking[1].candidate, goodputs_rps=(3.0, 5.0)),
        difference=Interval(mean=-0.2, low=-0.5, high=0.1),
    )
    (described,) = make_plan_report(inputs, replace(result, alternatives=(other,)))["alternatives"]
    assert described == {
        **describe_candidate(other.ranked.candidate),
        "goodput_rps": 4.0,
        "difference": -0.2,
        "difference_interval": [-0.5, 0.1],
    }


def test_curves_are_measured_around_the_goodput_by_the_runs_of_the_plan(formulas: Formulas, inputs: PlanInputs) -> None:
    plain = search_plan(inputs, EFFORT, 1, lambda *_: None, draws_curves=False)
    num_before = len(formulas.trials)
    found = search_plan(inputs, EFFORT, 1, lambda *_: None, draws_curves=True)
    assert found.result == plain.result
    drawn = formulas.trials[2 * num_before :]
    ranking = [ranked.candidate for ranked in found.result.found.ranking]
    assert list(found.curves) == ranking[:8]
    assert len(ranking) > 2
    goodput_rps = found.result.goodput_rps.mean
    rates_rps = [goodput_rps * factor for factor in (0.6, 0.75, 0.85, 0.92, 1.0, 1.08, 1.2)]
    for points in found.curves.values():
        assert [rate for rate, _ in points] == pytest.approx(rates_rps)
    best = dict(found.curves[found.result.chosen])
    assert best[min(best)] == 1.0
    assert best[max(best)] < 0.5
    assert {(trial.seed, trial.duration_s) for trial in drawn} == {(3, 20.0), (4, 20.0)}


def test_a_pool_answers_in_order_and_its_processes_are_told_the_problem_once(
    inputs: PlanInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = inputs.space.make_candidate("aggregated", 2, 1, prefill_heavy_tokens=512)
    trials = [SearchTrial(candidate=candidate, seed=1, rate_rps=rate, duration_s=5.0) for rate in (9.0, 1.0, 3.0)]
    with TrialPool(inputs.problem, 1) as pool:
        expected = pool.run(trials)
    assert expected == [TrialEvaluator(inputs.problem).evaluate(trial) for trial in trials]
    told: list[Any] = []

    class Processes:
        """Processes that are this one."""

        def map(self, function: Any, tasks: Any) -> Any:
            return map(function, tasks)

        def shutdown(self, **options: bool) -> None:
            told.append(options)

    def start(num_processes: int, begin: Any, prepare: Any, problem: Any) -> Processes:
        told.append((num_processes, problem))
        begin(prepare, problem)
        return Processes()

    monkeypatch.setattr(worker_processes, "start_workers", start)
    with TrialPool(inputs.problem, 2) as pool:
        assert pool.run(trials) == expected
    assert told == [(2, inputs.problem), {"cancel_futures": True}]


POOL = """
import os, time
from sluice_cli.simulation.worker_processes import start_workers

if __name__ == "__main__":
    print(start_workers(2).submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "pool.py"
    program.write_text(POOL)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    end_s = time.monotonic() + 20.0
    while _is_alive(worker):
        assert time.monotonic() < end_s, "a worker of a killed parent runs on"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_process_is_this_one_and_others_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, str, Any, Any]] = []

    def make(num_processes: int, *, mp_context: Any, initializer: Any, initargs: Any) -> str:
        made.append((num_processes, mp_context.get_start_method(), initializer, initargs))
        return "a pool"

    threshold = gc.get_threshold()
    prepared: list[int] = []
    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", make)
    try:
        assert worker_processes.start_workers(0) is worker_processes.start_workers(1) is None
        assert gc.get_threshold()[0] == GC_THRESHOLD, "this one does the work of one"
        assert worker_processes.start_workers(2, prepared.append, 5) == "a pool"
        gc.set_threshold(*threshold)
        ((number, method, begin, arguments),) = made
        begin(*arguments)
        assert gc.get_threshold()[0] == GC_THRESHOLD
        begin(None, ())
    finally:
        gc.set_threshold(*threshold)
    assert (number, method, prepared) == (2, "spawn", [5])
