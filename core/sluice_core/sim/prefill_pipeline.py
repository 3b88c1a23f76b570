"""Prefills alone, on an instance whose layers are a pipeline of stages.

First come, first served. A batch has whole prompts up to what saturates a GPU, and a longer prompt alone. It enters as
soon as the first stage is free, and waits for later stages in turn: batches of unlike length leave bubbles. KV goes to
a decode instance at once, so memory bounds a single prompt only.

Source: DistServe, section 3.3 for bubbles, section 4.3 for batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.prefill_time import compute_attention_work
from sluice_core.sim.sim_setup import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPipeline:
    """An instance that computes prefills.

    Args:
        stage: How long an iteration takes in one stage.
        num_stages: Stages, one after the other.
        batch_tokens: Tokens up to which whole prompts share a batch; 1: each is alone.
        kv_capacity_tokens: Longest prompt that it holds.

    Raises:
        ValueError: No stage, or no token.
    """

    stage: IterationProfile
    num_stages: int = 1
    batch_tokens: int
    kv_capacity_tokens: int

    def __post_init__(self) -> None:
        for name, value in (("num_stages", self.num_stages), ("batch_tokens", self.batch_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")


def simulate_prefills(
    pipeline: PrefillPipeline, arrivals: Sequence[Arrival], most_missed: int | None = None
) -> list[float] | None:
    """Simulate the prefills of some requests.

    Args:
        pipeline: The instance.
        arrivals: Requests, in the order of their arrival.
        most_missed: Give up as soon as more requests have missed their TTFT; None: never.

    Returns:
        When each has its first token, in seconds; ``math.inf``: it does not fit. None when it gave up.
    """
    ends_s = [math.inf] * len(arrivals)
    waiting = [index for index, each in enumerate(arrivals) if each.prompt_tokens <= pipeline.kv_capacity_tokens]
    limit = len(arrivals) if most_missed is None else most_missed
    num_missed = len(arrivals) - len(waiting)
    free_s = [0.0] * pipeline.num_stages
    position = 0
    while position < len(waiting):
        start_s = max(free_s[0], arrivals[waiting[position]].at_s)
        following = _find_batch_end(pipeline, arrivals, waiting, position, start_s)
        batch = waiting[position:following]
        position = following
        end_s = _pass_stages(free_s, start_s, _estimate_stage_s(pipeline.stage, [arrivals[each] for each in batch]))
        for index in batch:
            ends_s[index] = end_s
            num_missed += end_s - arrivals[index].at_s > arrivals[index].slo.ttft_s
        if num_missed > limit:
            return None
    return ends_s


def _find_batch_end(
    pipeline: PrefillPipeline, arrivals: Sequence[Arrival], waiting: Sequence[int], position: int, start_s: float
) -> int:
    """Find the position behind the last prompt that shares a batch with the first one."""
    tokens = arrivals[waiting[position]].prompt_tokens
    following = position + 1
    while following < len(waiting):
        arrival = arrivals[waiting[following]]
        tokens += arrival.prompt_tokens
        if arrival.at_s > start_s or tokens > pipeline.batch_tokens:
            break
        following += 1
    return following


def _estimate_stage_s(stage: IterationProfile, batch: Sequence[Arrival]) -> float:
    tokens = sum(each.prompt_tokens for each in batch)
    work = sum(compute_attention_work(each.prompt_tokens, 0) for each in batch)
    return stage.estimate_iteration_s(tokens, len(batch), tokens, work, 0, 0)


def _pass_stages(free_s: list[float], start_s: float, stage_s: float) -> float:
    """Let a batch pass all stages; returns when it leaves the last one."""
    end_s = start_s
    for number, free_at_s in enumerate(free_s):
        end_s = max(end_s, free_at_s) + stage_s
        free_s[number] = end_s
    return end_s
