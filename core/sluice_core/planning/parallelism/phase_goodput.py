"""The highest rate of an instance of one phase, or of a pair of both, at which enough requests meet their objectives.

Common random numbers: a seed fixes lengths and unit-rate gaps, and the rate how long a run is. So at a rate all
instances serve the same requests, and a pair meets no more objectives than its prefill instance alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sluice_core.latency.pipeline_stages import make_lockstep_profile
from sluice_core.latency.prefill_time import compute_attention_work
from sluice_core.planning.parallelism.instances import ModelInstance
from sluice_core.planning.parallelism.phase_runs import PhaseWorkload, run_decodes, run_pair, run_prefills
from sluice_core.sim.goodput_search import NoGoodputError, count_allowed_misses, find_highest_rate
from sluice_core.sim.pickling import register
from sluice_core.sim.sim_setup import Arrival
from sluice_core.sim.workload import DrawnWorkload

LEAST_REQUESTS = 30  # of a run; fewer say nothing, so such a rate counts as missed
_USUAL_REQUESTS = 600  # of a run
_LEAST_DURATION_S = 60.0
MOST_DURATION_S = 600.0
_SHOWN_OVERLOAD = 0.04  # of a rate: what must show within a run
_RESPONSES_PER_RUN = 4  # one after the other: KV caches fill within the first two
_USED_SHARE = 0.6  # of what an instance could do if nobody had to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputTask:
    """A goodput to find.

    Args:
        prefill: The instance that prefills; None: only decodes count.
        decode: The instance that decodes; None: only prefills count.
        seeds: Of the runs, at least one.
        duration_s: Length of each; None: ``choose_duration_s``.
        beats_rps: A goodput that it has to exceed, or it counts as 0; 0: none.

    Raises:
        ValueError: No instance, or no seed.
    """

    prefill: ModelInstance | None = None
    decode: ModelInstance | None = None
    seeds: tuple[int, ...] = (1,)
    duration_s: float | None = None
    beats_rps: float = 0.0

    def __post_init__(self) -> None:
        if self.prefill is None and self.decode is None:
            raise ValueError("a task has a prefill instance, a decode instance, or both")
        if not self.seeds:
            raise ValueError("seeds is empty; at least one is needed")


class GoodputMeter:
    """Finds goodputs; mutable only in the requests that it keeps.

    Args:
        workload: What instances are to serve.
    """

    def __init__(self, workload: PhaseWorkload) -> None:
        self._workload = workload
        self._by_seed: dict[int, DrawnWorkload] = {}

    def measure(self, task: GoodputTask) -> float:
        """Find the mean goodput over the seeds, in requests per second; 0: no rate meets the objectives."""
        attempts = [self._make_attempt(task, seed) for seed in task.seeds]
        if task.beats_rps and not any(attempt(task.beats_rps) for attempt in attempts):
            return 0.0
        start_rps = task.beats_rps or estimate_start_rps(self._workload, task)
        return statistics.fmean(_find_goodput(attempt, start_rps) for attempt in attempts)

    def _make_attempt(self, task: GoodputTask, seed: int) -> Callable[[float], bool]:
        workload = self._workload
        requests = self._by_seed.setdefault(seed, DrawnWorkload(workload.rows, workload.slo, seed, workload.classes))

        def attempt(rate_rps: float) -> bool:
            duration_s = task.duration_s or choose_duration_s(workload, rate_rps)
            arrivals = requests.make_arrivals(rate_rps, duration_s)
            if len(arrivals) < LEAST_REQUESTS:
                return False
            most_missed = count_allowed_misses(len(arrivals), workload.target)
            return _run(workload, task, arrivals, most_missed)

        return attempt


def choose_duration_s(workload: PhaseWorkload, rate_rps: float) -> float:
    """Choose a length of runs in which an overload shows, KV caches fill, and there are enough requests."""
    response_s = workload.slo.tpot_s * statistics.fmean(row.output_tokens for row in workload.rows)
    least_s = max(_LEAST_DURATION_S, workload.slo.ttft_s / _SHOWN_OVERLOAD, _RESPONSES_PER_RUN * response_s)
    return min(MOST_DURATION_S, max(least_s, _USUAL_REQUESTS / rate_rps))


def _run(workload: PhaseWorkload, task: GoodputTask, arrivals: Sequence[Arrival], most_missed: int) -> bool:
    if task.decode is None:
        assert task.prefill is not None
        return run_prefills(workload, task.prefill, arrivals, most_missed) is not None
    if task.prefill is None:
        return run_decodes(workload, task.decode, arrivals, most_missed)
    return run_pair(workload, task.prefill, task.decode, arrivals, most_missed)


def _find_goodput(attempt: Callable[[float], bool], start_rps: float) -> float:
    try:
        return find_highest_rate(attempt, start_rps)
    except NoGoodputError:
        return 0.0


def estimate_start_rps(workload: PhaseWorkload, task: GoodputTask) -> float:
    """Guess a goodput: a typical share of what the instances could do if nobody waited."""
    rates = []
    if task.prefill is not None:
        rates.append(task.prefill.parallelism.pipeline / _estimate_prefill_s(workload, task.prefill))
    if task.decode is not None:
        rates.append(_estimate_decode_rps(workload, task.decode))
    return _USED_SHARE * min(rates)


def _estimate_prefill_s(workload: PhaseWorkload, instance: ModelInstance) -> float:
    """Estimate a prompt of mean length alone, over all stages."""
    tokens = round(statistics.fmean(row.prompt_tokens for row in workload.rows))
    return compute_alone_prefill_s(instance, tokens)


def _estimate_decode_rps(workload: PhaseWorkload, instance: ModelInstance) -> float:
    """Estimate as many decodes as KV and seats allow, and the objective as long as there are two."""
    prompt = statistics.fmean(row.prompt_tokens for row in workload.rows)
    output = statistics.fmean(row.output_tokens for row in workload.rows)
    context = prompt + output / 2
    profile = make_lockstep_profile(instance.stage, instance.parallelism.pipeline)
    num_decodes = max(1, min(workload.max_num_seqs, int(instance.kv_capacity_tokens / context)))
    while True:
        iteration_s = profile.estimate_iteration_s(num_decodes, 0, 0, 0.0, num_decodes, int(num_decodes * context))
        if num_decodes == 1 or iteration_s <= workload.slo.tpot_s:
            return num_decodes / (output * iteration_s)
        num_decodes = max(1, num_decodes * 3 // 4)


def compute_alone_prefill_s(instance: ModelInstance, tokens: int) -> float:
    """Compute how long a prompt takes on an idle instance."""
    work = compute_attention_work(tokens, 0)
    return instance.parallelism.pipeline * instance.stage.estimate_iteration_s(tokens, 1, tokens, work, 0, 0)


def compute_alone_decode_s(instance: ModelInstance, context_tokens: int) -> float:
    """Compute how long a token of a single decode takes."""
    return instance.parallelism.pipeline * instance.stage.estimate_iteration_s(1, 0, 0, 0.0, 1, context_tokens)


# Tasks go between processes.
register(GoodputTask, ModelInstance, PhaseWorkload)
