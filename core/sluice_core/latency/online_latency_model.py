"""The model that learns from the iterations of the engine itself.

An iteration's time is linear in its shape: tokens (prefill and decode alike), attention work, chunks, decodes and
their contexts, plus a constant: ``IterationProfile`` with one straight line for its table. All coefficients are
non-negative.
"""

from __future__ import annotations

import math
from operator import mul as _multiply
from typing import NamedTuple

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.prefill_time import PrefillCoefficients
from sluice_core.records import IterationShape

# Seconds per unit of each feature: constant, token, token pair of attention, chunk, decode, token of decode context.
# A 14B model on one A100 (the line through 8 and 2048 tokens of its profile), where no profile is given; only the
# ratios matter after the first measured iteration.
_PRIOR = (0.021, 9.2e-5, 5.2e-9, 3.7e-4, 1.2e-5, 1.3e-7)
_NUM_FEATURES = len(_PRIOR)
_LEAST_BASE_S = 1e-6  # no iteration is free, whatever a profile says
_LINE_TOKENS = (8, 2048)  # a profile's table becomes the line through them
_FORGETTING = 0.998  # per iteration: about the last 500 count, some 15 s of work
_RIDGE = 0.002  # pull to the common multiple of the prior, in iterations with a relative error of 100 %
_ERROR_GAIN = 0.05  # weight of the newest error in the running mean
_LEAST_TOLERANCE = 0.1  # relative residuals under this are never outliers
_TOLERANCE_FACTOR = 3.0  # times the recent error: beyond it a residual weighs linearly (Huber)
_MAX_RATIO = 10.0  # bounds what one absurd measurement can do
_CHANGED_BIAS = 0.4  # mean of log(measured / estimate) beyond which the engine has changed, not the weather
_CHANGED_FORGETTING = 0.9  # then the last ten iterations count
_EAGER_OBSERVATIONS = 64  # solve after each of these, then every eighth time
_SOLVE_EVERY = 8
_SWEEPS = 12


class LinearCoefficients(NamedTuple):
    """An iteration's time as a sum; all coefficients are non-negative.

    Args:
        base_s: Of any iteration.
        per_token_s: Per token, of prefills and decodes alike.
        per_attention_pair_s: Per token pair of prefill attention (``compute_attention_work``).
        per_chunk_s: Per prefill chunk.
        per_decode_s: Per decode.
        per_context_token_s: Per token of the decodes' contexts.
    """

    base_s: float
    per_token_s: float
    per_attention_pair_s: float
    per_chunk_s: float
    per_decode_s: float
    per_context_token_s: float

    def make_profile(self) -> IterationProfile:
        """Make the profile that takes as long, for the simulator."""
        return IterationProfile(
            # A table of one entry and its slope: a straight line.
            linear_s=(max(_LEAST_BASE_S, self.base_s),),
            slope_s=self.per_token_s,
            prefill_base_s=self.per_chunk_s,
            prefill_work_s=self.per_attention_pair_s,
            decode_request_s=self.per_decode_s,
            decode_context_s=self.per_context_token_s,
        )


class OnlineLatencyModel:
    """Fits the coefficients to the iterations that an engine measures.

    Recursive least squares on relative residuals with forgetting and non-negative coefficients. Features are measured
    in the seconds that the prior gives them, so the fit has no scale of its own, and coefficients are drawn weakly to
    one common multiple of the prior: after a few iterations of any kind the unseen kinds are right in magnitude.
    Residuals far above the recent error weigh less, so a stall is ignored; a lasting bias shortens the memory, so a
    changed engine is learned.

    Args:
        profile: What is known of the engine before it has measured anything.

    Attributes:
        num_observations: Iterations seen.
        relative_error: Mean of abs(estimate before learning - measured) / measured over recent iterations.
    """

    __slots__ = (
        "_bias",
        "_coefficients",
        "_gram",
        "_log_scale",
        "_moments",
        "_multiples",
        "_prior",
        "num_observations",
        "relative_error",
    )

    def __init__(self, profile: IterationProfile | None = None) -> None:
        self.num_observations = 0
        self.relative_error = 0.0
        self._prior: tuple[float, ...] = _PRIOR if profile is None else _make_prior(profile)
        self._coefficients: tuple[float, ...] = self._prior
        self._multiples = [1.0] * _NUM_FEATURES  # of the prior
        self._bias = 0.0  # mean of log(measured / estimate)
        self._log_scale = 0.0  # mean of log(measured / prior)
        self._gram = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self._moments = [0.0] * _NUM_FEATURES

    @property
    def coefficients(self) -> LinearCoefficients:
        """What was fitted so far."""
        return LinearCoefficients(*self._coefficients)

    def estimate_shape_s(self, shape: IterationShape) -> float:
        """See ``LatencyModel.estimate_shape_s``."""
        base, token, work, chunk, decode, context = self._coefficients
        return (
            base
            + token * (shape.prefill_tokens + shape.num_decodes)
            + work * shape.attention_work
            + chunk * shape.num_chunks
            + decode * shape.num_decodes
            + context * shape.decode_context_tokens
        )

    def compute_prefill_coefficients(
        self, num_decodes: int, decode_context_tokens: int, room_tokens: int
    ) -> PrefillCoefficients:
        """See ``LatencyModel.compute_prefill_coefficients``."""
        del room_tokens  # one straight line has the same slope everywhere
        base, token, work, chunk, decode, context = self._coefficients
        per_iteration_s = base + chunk + (token + decode) * num_decodes + context * decode_context_tokens
        return PrefillCoefficients(token, work, per_iteration_s)

    def estimate_prefill_s(
        self,
        *,
        tokens: int,
        attention_work: float,
        num_prompts: int,
        room_tokens: int,
        num_decodes: int,
        decode_context_tokens: int,
    ) -> float:
        """See ``LatencyModel.estimate_prefill_s``."""
        if tokens <= 0:
            return 0.0
        if room_tokens <= 0:
            return math.inf
        coefficients = self.compute_prefill_coefficients(num_decodes, decode_context_tokens, room_tokens)
        shared_chunks = max(0, num_prompts - 1)  # each further prompt adds a chunk to an iteration that runs anyway
        return coefficients.compute_s(tokens, attention_work, room_tokens) + shared_chunks * self._coefficients[3]

    def observe(self, shape: IterationShape, duration_s: float) -> None:
        """See ``LatencyModel.observe``."""
        if not 0.0 < duration_s < math.inf:
            return
        features = self._features(shape)
        if self.num_observations == 0:
            self._log_scale = math.log(duration_s / sum(features))
            self._draw_to_prior()
        estimate_s = max(self.estimate_shape_s(shape), duration_s / _MAX_RATIO)
        self._note_error(estimate_s, duration_s, sum(features))
        residual = abs(duration_s / estimate_s - 1.0)
        tolerance = max(_LEAST_TOLERANCE, _TOLERANCE_FACTOR * self.relative_error)
        weight = 1.0 if residual <= tolerance else tolerance / residual
        self._accumulate([feature / estimate_s for feature in features], duration_s / estimate_s, weight)
        if self.num_observations <= _EAGER_OBSERVATIONS or self.num_observations % _SOLVE_EVERY == 0:
            self._solve()

    def _note_error(self, estimate_s: float, duration_s: float, prior_s: float) -> None:
        """Update the count and the running means."""
        self.num_observations += 1
        gain = max(1.0 / self.num_observations, _ERROR_GAIN)
        error = min(abs(estimate_s - duration_s) / duration_s, _MAX_RATIO)
        self.relative_error += gain * (error - self.relative_error)
        bias = min(1.0, max(-1.0, math.log(duration_s / estimate_s)))
        self._bias += _ERROR_GAIN * (bias - self._bias)
        surprise = min(1.0, max(-1.0, math.log(duration_s / prior_s) - self._log_scale))
        self._log_scale += gain * surprise

    def _accumulate(self, row: list[float], target: float, weight: float) -> None:
        """Add an observation ``row . multiples = target`` to the normal equations."""
        keep = _FORGETTING if abs(self._bias) < _CHANGED_BIAS else _CHANGED_FORGETTING
        for i, gram_row in enumerate(self._gram):
            scaled = weight * row[i]
            self._moments[i] = keep * self._moments[i] + scaled * target
            for j in range(_NUM_FEATURES):
                gram_row[j] = keep * gram_row[j] + scaled * row[j]

    def _draw_to_prior(self) -> None:
        """Set all coefficients to the common multiple of the prior."""
        self._multiples = [math.exp(self._log_scale)] * _NUM_FEATURES
        self._coefficients = tuple(map(_multiply, self._multiples, self._prior))

    def _solve(self) -> None:
        """Minimize the ridge problem over non-negative multiples by coordinate descent from the last answer."""
        scale = math.exp(self._log_scale)
        pull, pull_moment = _RIDGE / scale**2, _RIDGE / scale
        multiples = self._multiples
        for _ in range(_SWEEPS):
            for i, gram_row in enumerate(self._gram):
                others = sum(map(_multiply, gram_row, multiples)) - gram_row[i] * multiples[i]
                multiples[i] = max(0.0, (self._moments[i] + pull_moment - others) / (gram_row[i] + pull))
        self._coefficients = tuple(map(_multiply, multiples, self._prior))

    def _features(self, shape: IterationShape) -> tuple[float, ...]:
        """Express a shape in the seconds that the prior gives to each of its parts."""
        base, token, work, chunk, decode, context = self._prior
        return (
            base,
            token * (shape.prefill_tokens + shape.num_decodes),
            work * shape.attention_work,
            chunk * shape.num_chunks,
            decode * shape.num_decodes,
            context * shape.decode_context_tokens,
        )


def _make_prior(profile: IterationProfile) -> tuple[float, ...]:
    """Draw a straight line through a profile's table; its attention per token goes to the tokens."""
    low, high = _LINE_TOKENS
    low_s, high_s = profile.estimate_linear_s(low), profile.estimate_linear_s(high)
    token_s = (high_s - low_s) / (high - low)
    return (
        max(_LEAST_BASE_S, low_s - low * token_s),
        token_s + profile.prefill_token_s,
        profile.prefill_work_s,
        profile.prefill_base_s + profile.host_sequence_s,
        profile.decode_request_s + profile.host_sequence_s,
        profile.decode_context_s,
    )
