"""Pipeline parallelism in an iteration's profile: k stages of equal layers, one after the other.

A batch passes all stages, so its latency is the sum of their times. The next one may enter as soon as the first stage
is free. What stages send one another is neglected.

Source: DistServe, section 3: with ``D`` the time of all layers, ``D_s = D`` of a pass and ``D_m = D / k`` of a stage.
"""

from __future__ import annotations

from dataclasses import replace

from sluice_core.latency.interface import UnknownModelError
from sluice_core.latency.iteration_time import TABLE_STEP_TOKENS, IterationProfile


def check_pipeline_parallel(name: str, num_layers: int, num_stages: int) -> None:
    """Check that a model's layers can be divided into equal stages.

    Args:
        name: The model's, for the message.
        num_layers: Its layers.
        num_stages: Stages.

    Raises:
        UnknownModelError: They cannot.
    """
    if num_stages < 1 or num_layers % num_stages:
        raise UnknownModelError(f"{name} has {num_layers} layers, which {num_stages} stages cannot share equally")


def make_stage_profile(profile: IterationProfile, num_stages: int, host_iteration_s: float) -> IterationProfile:
    """Make the profile of one stage: its share of the layers, and all of the host's work.

    Args:
        profile: Of all layers on the GPUs of one stage.
        num_stages: Stages, at least 1.
        host_iteration_s: The host's work per iteration that ``profile`` counts; every stage's host does it.
    """
    if num_stages == 1:
        return profile
    layers_s = (max(0.0, time_s - host_iteration_s) / num_stages for time_s in profile.linear_s[1:])
    large = profile.large_batch
    return replace(
        profile,
        linear_s=(0.0, *(time_s + host_iteration_s for time_s in layers_s)),
        slope_s=profile.slope_s / num_stages,
        prefill_base_s=profile.prefill_base_s / num_stages,
        prefill_token_s=profile.prefill_token_s / num_stages,
        prefill_work_s=profile.prefill_work_s / num_stages,
        decode_base_s=profile.decode_base_s / num_stages,
        decode_request_s=profile.decode_request_s / num_stages,
        decode_context_s=profile.decode_context_s / num_stages,
        large_batch=large
        and large._replace(
            base_s=large.base_s / num_stages,
            request_s=large.request_s / num_stages,
            context_s=large.context_s / num_stages,
        ),
    )


def make_lockstep_profile(stage: IterationProfile, num_stages: int) -> IterationProfile:
    """Make the profile of decodes in a pipeline, as if one engine computed them all in each iteration.

    There are as many micro-batches of equal size as stages, so that no stage waits. Each decode gets a token once all
    stages have computed its micro-batch: an iteration of n decodes takes k times a stage with n / k of them.

    Args:
        stage: Of one stage (``make_stage_profile``).
        num_stages: Stages, at least 1.
    """
    if num_stages == 1:
        return stage
    rows = range(1, len(stage.linear_s))
    large = stage.large_batch
    return replace(
        stage,
        linear_s=(
            0.0,
            *(num_stages * stage.estimate_linear_s(-(-row * TABLE_STEP_TOKENS // num_stages)) for row in rows),
        ),
        prefill_base_s=num_stages * stage.prefill_base_s,
        prefill_token_s=num_stages * stage.prefill_token_s,
        prefill_work_s=num_stages * stage.prefill_work_s,
        decode_base_s=num_stages * stage.decode_base_s,
        large_batch=large
        and large._replace(from_requests=num_stages * large.from_requests, base_s=num_stages * large.base_s),
    )
